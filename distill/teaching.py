"""A teacher that scores the student's answers: its flags and its inputs.

The teacher reads the conversation, or the record's "teacher_messages", in its template with
--prompt_file, and then the exact tokens of the student's answer. So both must have the same
vocabulary, which is checked token by token. Does not import torch: flags are parsed first.
"""
from itertools import compress
from pathlib import Path

from core.cli import UserError, require

# {flag: flags of which it needs one}
NEEDED = {"prompt_role": "prompt_file", "teacher_name": "teacher_url", "keep_weight": "keep",
          "keep_every": "keep", "request_timeout": "base_url teacher_url", **dict.fromkeys((
              "divergence", "js_beta", "distill_topk", "distill_weight", "on_policy",
              "max_new_tokens", "base_url"), "prompt_file teacher_path")}


def check_flags(args, parser):
    """UserError for flags that would fail later or do nothing. The base is the default teacher."""
    args.teacher_path = args.teacher_path or (args.prompt_file and args.model_path)
    for flag, others in NEEDED.items():
        unset = getattr(args, flag) == parser.get_default(flag)
        require(unset or any(getattr(args, other) for other in others.split()),
                f"--{flag} needs --{others.replace(' ', ' or --')}")
    if args.teacher_url:
        require(args.teacher_path and Path(args.teacher_path).is_dir(),     # a name would download
                "--teacher_url needs --teacher_path, a folder of its config.json and tokenizer")
        require(args.distill_topk, "--teacher_url needs --distill_topk, as servers give no others")
        require(args.divergence != "reverse", "--divergence reverse needs the smallest "
                "probabilities, which a server rounds: take forward or js, or no --teacher_url")
    for flag in ("teacher_url", "base_url"):
        if getattr(args, flag):
            from distill.teachers import address
            address(getattr(args, flag), f"--{flag}")
            require(0 < 2 * args.request_timeout < args.collective_timeout,
                    "--request_timeout must be above 0 and below half of --collective_timeout")
    if args.keep or args.teacher_path:
        require(args.compile is not True,
                "--compile and a teacher exclude each other, as --keep does: shapes change")
        args.compile = False
    require(not args.base_url or args.on_policy and args.use_lora and not args.use_dora,
            "--base_url needs --on_policy and --use_lora, without --use_dora: vLLM loads adapters")
    require(not args.on_policy or args.distill_weight == 1,
            "--on_policy needs --distill_weight 1: the student's own answers are not targets")
    if args.prompt_file and args.prompt_role == "user":
        args.train_turns = "last"


# ---- What the teacher reads


def check_same(tokenizer, teacher_tokenizer, rows, name):
    """UserError unless two tokenizers agree on each id below `rows`. name: for the message."""
    # {token: id}.items() ^ {token: id}.items(): the pairs that only one of them has
    differing = {i for _, i in tokenizer.get_vocab().items() ^ teacher_tokenizer.get_vocab().items()
                 if i < rows}
    require(not differing, f"--teacher_path {name}: has another vocabulary than --model_path "
            f"({len(differing)} ids differ), so learn its answers: distill/create_data.py")


def open_teacher_inputs(args, world, config, encoder):
    """Read and check what a teacher needs. Returns (PairEncoder, the config with fewer positions).
    config, encoder: the student's. Collective. UserError."""
    from core import chat, dist
    from distill import causal_lm
    from distill.teachers import Prompt, read_prompt
    dist.rank0(world, causal_lm.find_model, args.teacher_path, "--teacher_path")    # downloads
    prompt = (read_prompt(args.prompt_file, args.prompt_role) if args.prompt_file
              else Prompt("none", ""))
    teacher_config, tokens, teacher = config, config.vocab_size, encoder
    if args.teacher_path != args.model_path or args.teacher_url:
        folder = causal_lm.find_model(args.teacher_path, "--teacher_path")
        teacher_config = causal_lm.load_config(folder)
        teacher_tokenizer = chat.load_tokenizer(folder, template=args.chat_template)
        causal_lm.check_vocabulary(teacher_tokenizer, teacher_config)
        tokens = min(config.vocab_size, teacher_config.vocab_size)
        check_same(encoder.tokenizer, teacher_tokenizer, tokens, args.teacher_path)
        teacher = chat.Encoder(teacher_tokenizer, args.train_turns,
                               chat.THINKING[args.enable_thinking])
    require(args.distill_topk < tokens, f"--distill_topk {args.distill_topk}: the models have "
            f"{tokens:,} tokens; give a smaller number, or 0 for all of them")
    require(not args.on_policy or config.vocab_size <= teacher_config.vocab_size,
            f"--on_policy: the student may generate ids above the teacher's {tokens:,}")
    return (PairEncoder(encoder, teacher, prompt),
            min(config, teacher_config, key=causal_lm.positions))


def check_teacher_differs(args, table, numbers):
    """UserError if teacher and student are the same model with the same input: divergence 0. With
    the data's targets (--distill_weight) it is a useful pull towards the base."""
    same = Path(args.teacher_path).resolve() == Path(args.model_path).resolve()
    if same and not args.teacher_url and not args.prompt_file and args.distill_weight == 1:
        samples = (table[i] for i in numbers)
        require(any(ids[:own].tolist() != ids[own:].tolist() for _, ids, _, own in samples),
                "--teacher_path is --model_path and reads what the student reads, so there is "
                "nothing to learn: give --prompt_file")


def teacher_context(record):
    """The teacher's messages before the last answer. UserError."""
    from core.chat import normalize_record
    if record.get("teacher_messages") is None:
        return record["messages"][:-1]
    try:
        messages = normalize_record({"messages": record["teacher_messages"]})["messages"]
    except (UserError, ValueError) as error:
        raise UserError(f'its "teacher_messages": {error}')
    require((role := messages[-1]["role"]) in ("user", "tool"),
            f'its "teacher_messages" end with a message of the {role}, not the user')
    # answers among them are context; only the last answer is learned
    return [m | {"weight": 0} if m["role"] == "assistant" else m for m in messages]


class PairEncoder:
    """chat.Encoders of student and teacher as one: the student's version, then the teacher's."""

    def __init__(self, student, teacher, prompt):
        """prompt: teachers.Prompt."""
        self.student, self.teacher, self.prompt = student, teacher, prompt

    def encode(self, record):
        """[(ids, mask, number of the student's ids)] of a record. Both versions must train exactly
        the same tokens. UserError."""
        from distill.teachers import add_prompt
        (ids, mask), = self.student.encode(record | {"teacher_messages": None})
        messages = [*add_prompt(self.prompt, teacher_context(record)), record["messages"][-1]]
        (others, other_mask), = self.teacher.encode(
            {"messages": messages, "tools": record.get("tools")})
        hint = "; with teacher_messages give --train_turns last"
        # compress(ids, mask) gives the trained ids
        require(list(compress(ids, mask)) == list(compress(others, other_mask)),
                "the teacher's template gives the answer other tokens"
                + hint * ("teacher_messages" in record))
        return [(ids + others, mask + other_mask, len(ids))]
