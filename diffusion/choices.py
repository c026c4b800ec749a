"""Values of the block diffusion scripts' flags, and what derives from flags. Standard library only: flags are parsed
before torch is imported.
"""
import math
from dataclasses import dataclass

from common.flags import at_least_one, need, zero_or_more

SYSTEMS = ("gsm8k", "chat", "hdp")
CHECKS = ("invalid", "control_token", "too_long")        # of problems, for --drop_bad
ORDERS = ("first_hitting", "top_k", "confidence")
SCHEDULES = ("loglinear", "square", "square_root", "log", "cosine")      # of noise
# hidden size, layers, heads, width of the conditioning; nano is for demos and tests, the others are BD3-LM's
SIZES = {"nano": (64, 2, 4, 16), "tiny": (256, 8, 8, 64), "small": (768, 12, 12, 128), "medium": (1024, 24, 16, 128)}
# problems per micro-step, micro-steps (on one GPU), learning rate, warm-up, steps. Rates of 256, 512 and 1024 problems
# are from ngocbao220/hdp-diffusion's H200 guide, that of 768 follows the square root; source is what its scripts run;
# finetune and convert are ours, for --init_from: for DiT weights a third of the rate at which BD3-LM is fine-tuned, for
# a language model twice that of SDAR and E2D2 and 10 passes over GSM8K; sdar, for SDAR's models, has the rate of SDAR.
PRESETS = {"conservative": (64, 4, 4e-4, 5000, 50_000), "recommended": (128, 4, 5e-4, 5000, 50_000),
           "aggressive": (192, 4, 6e-4, 5000, 50_000), "extreme": (256, 4, 7e-4, 10_000, 50_000),
           "source": (16, 16, 1e-3, 1000, 10_000), "finetune": (64, 2, 1e-4, 100, 3000),
           "convert": (64, 1, 2e-5, 35, 1170), "sdar": (64, 1, 1e-5, 35, 1170)}

QUESTION, PLAN, EXECUTION, FILL = 0, 1, 2, 3        # regions; gsm8k's answer is PLAN, FILL is what follows an end token
FULL = (1e-3, 1.0)          # the range of t of the bound itself; an end of a range that equals its end is not enforced


# ---------------------------------------------------------------------------------------------------------------------
# Layout


@dataclass
class Layout:
    """How a problem becomes blocks; JSON-able through dataclasses.asdict. Lengths in tokens."""
    system: str = "gsm8k"
    hdp_layout: str = "hierarchical"    # or flat
    block_size: int = 16
    plan_block_size: int = 0            # 0: block_size; hierarchical only
    execution_block_size: int = 0
    question_budget: int = 128          # hdp: tokens a region may have, markers and end token included
    plan_budget: int = 128
    execution_budget: int = 256
    max_length: int = 512               # gsm8k: tokens a problem may have
    strip_calculator: bool = False      # remove <<48/2=24>>
    loss_on_question: bool = False      # noise and train the question as well
    prompt: str = ""                    # gsm8k: text with {question} before an answer; "": Question: ...\\nAnswer:
    end_token: str = ""                 # gsm8k: what ends an answer; "": <|endoftext|>

    @property
    def flat(self):
        return self.system == "hdp" and self.hdp_layout == "flat"

    @property
    def longest(self):
        """Tokens of the longest possible document."""
        budgets = self.question_budget + self.plan_budget + self.execution_budget
        return budgets if self.system == "hdp" else self.max_length

    def region_block(self, region):
        """Block size of PLAN or EXECUTION."""
        own = {PLAN: self.plan_block_size, EXECUTION: self.execution_block_size}[region]
        return own if own and self.system == "hdp" else self.block_size

    def start(self, region):
        """Position of a region's first token, the same for every problem (hdp)."""
        return (0, self.question_budget, self.question_budget + self.plan_budget)[region]

    def check(self):
        """Raise UserError for a layout that does not come out even, or settings that would do nothing."""
        at_least_one(self, "block_size", "question_budget", "plan_budget", "execution_budget",
                     "max_length")
        for flag in ("plan_block_size", "execution_block_size"):
            zero_or_more(self, flag)
            need(not getattr(self, flag) or (self.system == "hdp" and not self.flat),
                 f"--{flag} needs --system hdp and --hdp_layout hierarchical")
        if self.system != "hdp":
            even = [("block_size", self.block_size, "max_length", self.max_length)]
        elif self.flat:         # a block over two regions could not be written region by region
            even = [("block_size", self.block_size, name, getattr(self, name))
                    for name in ("question_budget", "plan_budget", "execution_budget")]
        else:
            even = [("plan_block_size", self.region_block(PLAN), "plan_budget", self.plan_budget),
                    ("execution_block_size", self.region_block(EXECUTION), "execution_budget", self.execution_budget)]
        for flag, size, name, total in even:
            need(total % size == 0, f"--{name} {total} is not a multiple of --{flag} {size}: a block would be cut")


# ---------------------------------------------------------------------------------------------------------------------
# Ranges of t


def bound_range(layout):
    """The range of t that makes the loss a bound: all of it, or, where blocks are single tokens, t = 1: exact."""
    single = layout.region_block(PLAN) == layout.region_block(EXECUTION) == 1
    return (1.0, 1.0) if single else FULL


def enforced(t_range):
    """(low, high) share of masked tokens that a block must have under a clipped range, 0 and 1 where not enforced."""
    low, high = t_range
    clipped = tuple(t_range) != FULL
    return (low if clipped and low > FULL[0] else 0.0), (high if clipped and high < FULL[1] else 1.0)


def range_fits(t_range, block_size):
    """Whether some number of masked tokens of a full block, not none, lies in the range."""
    low, high = enforced(t_range)
    return max(1, math.ceil(low * block_size - 1e-9)) <= math.floor(high * block_size + 1e-9)


def check_range(t_range, block_size):
    """Raise UserError for a range that is none, or that no number of masked tokens of a full block lies in."""
    low, high = t_range
    need(0 < low <= high <= 1, f"noise range {low:g} to {high:g}: it must lie above 0, up to 1, lower end first")
    need(range_fits(t_range, block_size),
         f"noise range {low:g} to {high:g}: no number of masked tokens out of {block_size} lies in it; widen it")
