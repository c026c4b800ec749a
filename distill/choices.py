"""Values of the distillation scripts' flags. Imports nothing: flags are parsed before torch is imported."""
TOO_LONG = ("stop", "drop", "cut_left", "cut_right")            # what becomes of samples above the limit of tokens
CHECKS = ("unreadable", "invalid", "template", "teacher", "too_long")    # of samples, for --drop_bad
THINKING = {"template": None, "true": True, "false": False}     # --enable_thinking -> chat.Encoder's thinking
DIVERGENCES = ("forward", "reverse", "js")      # of a student from its prompted teacher; see divergence.py
LINES = 2**28   # create_data.py's ids: a digest of the input file x LINES + the line's number; below JSON's 2**53
GROUP = 15      # lines of one sentence in the language task: a sentence in so many languages


def evaluated(p, max_new_tokens):
    """Flags of both evaluations; max_new_tokens: a default."""
    p.add_argument("--model_path", help="base model the run started from (default: what the run's flags say)")
    p.add_argument("--output_dir", required=True, help="everything written goes here")
    p.add_argument("--max_new_tokens", type=int, default=max_new_tokens, help="tokens an answer may have")
    p.add_argument("--batch_size", type=int, default=16, help="answers generated together by transformers")
    p.add_argument("--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto",
                   help="to compute in; auto: bfloat16 on a GPU that has it, else float32 (vllm: its own choice)")
    p.add_argument("--device", help="where the models run (default: the GPU if there is one)")
