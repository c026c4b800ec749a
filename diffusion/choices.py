"""Settings of block diffusion: presets, the layout of blocks, noise levels. Standard library only,
so mistakes in flags are reported before torch is imported.
"""
import math
from dataclasses import dataclass, fields

from core.cli import check_trainer, require

# regions of a document; gsm8k's answer is PLAN; FILL follows an end token
QUESTION, PLAN, EXECUTION, FILL = 0, 1, 2, 3
FULL = (1e-3, 1.0)      # range of t in the bound; its limits are not enforced
CHECKS = ("invalid", "control_token", "too_long")   # of problems, for --drop_bad
# Problems per micro-step, micro-steps (on one GPU), learning rate, warm-up, steps. From
# ngocbao220/hdp-diffusion's H200 guide; "source" is from its scripts. For --init_from: finetune has
# a third of BD3-LM's rate; convert (language models) twice that of SDAR and E2D2; sdar SDAR's rate.
PRESETS = {"conservative": (64, 4, 4e-4, 5000, 50_000), "extreme": (256, 4, 7e-4, 10_000, 50_000),
           "recommended": (128, 4, 5e-4, 5000, 50_000), "aggressive": (192, 4, 6e-4, 5000, 50_000),
           "source": (16, 16, 1e-3, 1000, 10_000), "finetune": (64, 2, 1e-4, 100, 3000),
           "convert": (64, 1, 2e-5, 35, 1170), "sdar": (64, 1, 1e-5, 35, 1170)}
PRESET_FLAGS = ("problems_per_batch", "gradient_accumulation_steps", "learning_rate",
                "warmup_steps", "max_steps")


@dataclass
class Layout:
    """Layout of a problem in blocks; JSON-able by dataclasses.asdict. Lengths in tokens."""
    system: str = "gsm8k"
    block_size: int = 16
    plan_block_size: int = 0            # hdp; 0: block_size
    execution_block_size: int = 0
    question_budget: int = 128          # hdp: room of a region, including markers and end token
    plan_budget: int = 128
    execution_budget: int = 256
    max_length: int = 512               # gsm8k, chat: tokens of question and answer
    strip_calculator: bool = False      # remove <<48/2=24>>
    loss_on_question: bool = False      # noise and train the question as well
    prompt: str = ""                    # gsm8k: text with {question}; "": Question: ...\\nAnswer:
    end_token: str = ""                 # end of an answer; "": <|endoftext|>

    @property
    def regions(self):
        """{region: (flag of its budget, tokens of the budget, block size or 0)}, in order."""
        if self.system != "hdp":
            return {PLAN: ("max_length", self.max_length, self.block_size)}
        plan, execution = (size or self.block_size
                           for size in (self.plan_block_size, self.execution_block_size))
        return {QUESTION: ("question_budget", self.question_budget, 0),
                PLAN: ("plan_budget", self.plan_budget, plan),
                EXECUTION: ("execution_budget", self.execution_budget, execution)}

    @property
    def block_sizes(self):
        """The different block sizes of generated regions."""
        return {size for *_, size in self.regions.values() if size}

    def start(self, region):
        """Position of a region's first token; in hdp the same for every problem."""
        return sum(most for other, (_, most, _) in self.regions.items() if other < region)

    longest = property(lambda self: self.start(FILL))       # tokens of the longest document

    def check(self):
        """Raise UserError if blocks do not fit evenly, or a setting would have no effect."""
        require(all(size > 0 for size in self.block_sizes), "a block has at least 1 token")
        hdp = self.system == "hdp"
        require(hdp or not (self.plan_block_size or self.execution_block_size),
                "--plan_block_size and --execution_block_size need --system hdp")
        for name, most, size in self.regions.values():
            flag = name.replace("budget", "block_size") if hdp else "block_size"
            require(not size or most % size == 0,
                    f"--{name} {most} is not a multiple of --{flag} {size}")


def bound_range(layout):
    """Range of t for which the loss is a bound: full; for single tokens t = 1, which is exact."""
    return (1.0, 1.0) if layout.block_sizes == {1} else FULL


def enforced_limits(t_range):
    """(low, high) limits for the share of masked tokens in a block, under a clipped range."""
    low, high = t_range
    return (low if low > FULL[0] else 0.0), high


def range_fits(t_range, block_size):
    """True if a full block can have a number of masked tokens, above 0, in the range."""
    low, high = enforced_limits(t_range)
    return max(1, math.ceil(low * block_size - 1e-9)) <= math.floor(high * block_size + 1e-9)


def check_range(t_range, layout):
    """Raise UserError for an invalid range, or one that some full block cannot meet."""
    low, high = t_range
    name = f"noise range {low:g} to {high:g}"
    require(0 < low <= high <= 1, f"{name}: above 0, up to 1, lower end first")
    for size in layout.block_sizes:
        require(range_fits(t_range, size),
                f"{name}: no number of masked tokens out of {size} lies in it; widen it")


def layout_of(args):
    """The Layout that the flags describe."""
    return Layout(**{field.name: getattr(args, field.name) for field in fields(Layout)
                     if hasattr(args, field.name)})


def check_flags(args, world_size, parser):
    """Raise UserError for flags that would fail later or have no effect; set derived values."""
    args.batch_preset = args.batch_preset or ("finetune" if args.init_from else "recommended")
    total, each, steps = (args.global_batch_size, args.problems_per_batch,
                          args.gradient_accumulation_steps)
    require(not (args.per_device_train_batch_size and (total or each)), "give one of "
            "--per_device_train_batch_size, rows, and --problems_per_batch or --global_batch_size")
    if total and (not args.auto or each or steps):      # the unset one of the two uses the preset
        share = total // world_size
        each = each or (share // steps if steps else min(share, PRESETS[args.batch_preset][0]))
        steps = steps or share // max(1, each)
        require(each * steps * world_size == total, f"--global_batch_size {total}: is not {each} "
                f"problems x {steps} micro-steps x {world_size} ranks")
        args.problems_per_batch, args.gradient_accumulation_steps = each, steps
        args.named |= {"problems_per_batch", "gradient_accumulation_steps"}
    for flag, value in zip(PRESET_FLAGS, PRESETS[args.batch_preset]):
        if getattr(args, flag) is None:
            lora = flag == "learning_rate" and args.use_lora
            setattr(args, flag, value * 10 if lora else value)
    args.global_batch_size = total or args.problems_per_batch * args.gradient_accumulation_steps
    check_trainer(args, world_size, parser, CHECKS)
    chat, hdp, demo = args.system == "chat", args.system == "hdp", args.demo is not None
    validated = args.eval_data_file or demo or args.validation_split
    for bad, message in (
            (demo == bool(args.train_data_file) or demo and args.eval_data_file,
             "give one of --train_data_file and --demo, which makes its validation data"),
            (args.use_lora and (hdp or not args.init_from),
             "--use_lora needs --init_from of a language model, and no --system hdp"),
            (args.chat and args.system != "gsm8k", "--chat needs --system gsm8k"),
            (args.end_token and (hdp or args.chat),
             "--end_token needs --system gsm8k, and no --chat, or --system chat"),
            (args.best_by == "accuracy" and not args.eval_accuracy,
             "--best_by accuracy needs --eval_accuracy"),
            (not validated and (args.eval_accuracy or args.clip_search_widths),
             "--eval_accuracy and --clip_search_widths need validation data"),
            (chat and (args.eval_accuracy or args.strip_calculator or args.loss_on_question),
             "--system chat has no --eval_accuracy, --strip_calculator or --loss_on_question")):
        require(not bad, message)
    layout = layout_of(args)
    layout.check()
    check_range(args.t_range or bound_range(layout), layout)
    args.row_length = args.row_length or layout.longest
