"""Values of the distillation scripts' flags. Imports nothing: flags are parsed before torch is imported."""
TOO_LONG = ("stop", "drop", "cut_left", "cut_right")            # what becomes of samples above the limit of tokens
CHECKS = ("unreadable", "invalid", "template", "teacher", "too_long")    # of samples, for --drop_bad
THINKING = {"template": None, "true": True, "false": False}     # --enable_thinking -> chat.Encoder's thinking
DIVERGENCES = ("forward", "reverse", "js")      # of a student from its prompted teacher; see divergence.py
DISTILLING = ("prompt_role", "divergence", "distill_topk", "js_beta", "on_policy", "max_new_tokens", "base_url", "refresh_steps",
              "request_timeout", "distill_weight", "keep", "keep_weight", "keep_every", "teacher_url",
              "teacher_name")       # train_sft.py's, checked where one of them is given
LINES = 2**28   # create_data.py's ids: a digest of the input file x LINES + the line's number; below JSON's 2**53
GROUP = 15      # lines of one sentence in the language task: a sentence in so many languages
