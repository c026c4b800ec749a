"""GSM8K and HDP files -> problems; tokenizers with special tokens.

Special tokens follow kuleshov-group/bd3lms (gsm8k: a mask after GPT-2's vocabulary) and
ngocbao220/hdp-diffusion (hdp: five tokens in that order), both Apache-2.0.
"""
import functools
import re
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from core import json_files
from core.cli import UserError, first_line, require

END = "<|endoftext|>"
MARKERS = {"gsm8k": ("<|mask|>",),
           "hdp": ("<|pad|>", "<|plan|>", "<|execution|>", "<|answer|>", "<|mask|>")}
SDAR_MASK = "<|MASK|>"      # the mask in SDAR's tokenizers (github.com/JetAstra/SDAR)
NUMBER = re.compile(r"(?:(?<![\d)])-)?\d[\d,]*(?:\.\d+)?")       # the minus in 5-3 is not a sign
HUB_NAME = re.compile(r"(?!.*\.jsonl?$)\w[\w.-]*(/[\w.-]+)?")      # openai/gsm8k, gpt2
CALCULATOR = re.compile(r"<<[^<>]*>>")
# files of a split in a dataset folder
SPLITS = ("{}.jsonl", "{}.json", "main/{}-*.parquet", "{}-*.parquet", "data/{}-*.parquet")


@dataclass
class Problem:
    """One problem."""
    name: str               # file and line
    question: str
    solution: str           # gsm8k: worked answer with its last line `#### N`; hdp: the execution
    answer: str             # the final number
    plan: str = ""          # hdp only
    ids: list = None        # chat: tokenised prompt and answer
    prompt_length: int = 0  # chat: ids of the prompt


def read_problems(path, split, system, strip_calculator=False, bad=None):
    """List of Problems of a JSONL or JSON file, a dataset folder or a hub dataset (its `split`).
    bad: list to which unusable problems are added; None: UserError that lists them."""
    problems, wrong = [], [] if bad is None else bad
    for name, entry in read_rows(path, split):
        try:
            problems.append(parse_problem(name, entry, system, strip_calculator))
        except UserError as error:
            wrong.append(json_files.Problem(name, "invalid", error, path))
    if bad is None:
        json_files.Problems().add(wrong).settle()
    require(problems or wrong, f"{path}: holds no problems")
    return problems


def parse_problem(name, entry, system, strip_calculator):
    """One JSON object -> Problem; UserError with fault and remedy."""
    hdp, texts = system == "hdp", {}
    for key in ("question", "plan", "execution", "answer") if hdp else ("question", "answer"):
        text = entry.get(key) if isinstance(entry, dict) else None
        hint = "; make plans with make_problems.py plans" * (key in ("plan", "execution"))
        require(isinstance(text, str) and text.strip(),
                f"has no {key!r} (a text that is not empty){hint}")
        require(not json_files.HALF_CHARACTER.search(text),
                f"its {key!r} holds half a character (\\ud800 to \\udfff)")
        texts[key] = text.strip()
    solution, answer = texts["execution" if hdp else "answer"], texts["answer"]
    if strip_calculator:
        solution = CALCULATOR.sub("", solution)
    if not hdp:
        _, marker, answer = map(str.strip, solution.rpartition("####"))
        require(marker, "its 'answer' has no '#### N' line; add the final number after ####")
    require(NUMBER.fullmatch(answer), f"its final answer {answer!r} is not a number")
    return Problem(name, texts["question"], solution, answer, texts.get("plan", ""))


def read_rows(path, split):
    """Yield (name, JSON value) of the problems of a file, folder or hub dataset. UserError."""
    source = Path(path)
    if not source.exists():
        require("/" in str(path) and HUB_NAME.fullmatch(str(path)), f"{path}: no such file")
        from huggingface_hub import snapshot_download
        try:
            source = Path(snapshot_download(str(path), repo_type="dataset",
                                            allow_patterns=["*.json*", "*.parquet"]))
        except Exception as error:      # many kinds
            raise UserError(f"{path}: no such file, nor on the hub ({type(error).__name__}); try: "
                            f"hf download {path} --repo-type dataset --local-dir FOLDER")
    patterns = [pattern.format(split) for pattern in SPLITS]
    files = [source] if source.is_file() else next(
        filter(None, (sorted(source.glob(pattern)) for pattern in patterns)), None)
    require(files, f"{source}: has none of {', '.join(patterns)}")
    for file in files:
        for location, entry in json_files.read_entries(file):
            yield f"{file} {location}", entry


@dataclass
class Tokens:
    """A byte-level BPE tokenizer with a system's special tokens; missing ids are -1."""
    tokenizer: Tokenizer
    vocab_size: int         # rows of the embedding: GPT-2's with gsm8k's mask 50,258, hdp's 50,262
    bos: int
    end: int                # ends the answer (gsm8k) or a region (hdp)
    plan: int
    execution: int
    answer: int
    mask: int

    @functools.cached_property
    def markers(self):
        """{name: id} of the special tokens after the tokenizer's vocabulary."""
        ids = {name: self.tokenizer.token_to_id(name) for name in (*MARKERS["hdp"], SDAR_MASK)}
        return {name: number for name, number in ids.items() if number is not None}

    @functools.cached_property
    def special(self):
        """Tokens that no text of a problem may hold."""
        added = self.tokenizer.get_added_tokens_decoder().values()
        return [*(token.content for token in added if token.special), *self.markers]

    def find_control_token(self, *texts):
        """The first special token in one of the texts, or None."""
        return next((name for name in self.special if any(name in text for text in texts)), None)

    def encode(self, text):
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids):
        """Ids -> text, including special tokens."""
        return self.tokenizer.decode([int(i) for i in ids], skip_special_tokens=False)


def load_tokenizer(name, system, end_token=""):
    """Tokens of a tokenizer.json, its folder or hub name. end_token: of answers. UserError."""
    path = Path(name)
    try:
        if not path.exists():
            require(HUB_NAME.fullmatch(str(name)), "no such file or folder")
            from huggingface_hub import hf_hub_download
            path = Path(hf_hub_download(str(name), "tokenizer.json"))
        tokenizer = read_tokenizer(path)
    except Exception as error:      # tokenizers raises bare Exceptions, the hub many kinds
        raise UserError(f"--tokenizer {name}: cannot be read ({first_line(error):.150}); give a "
                        "folder with tokenizer.json")
    end_token = end_token or END
    end = tokenizer.token_to_id(end_token)
    require(end is not None or system == "hdp",
            f"--tokenizer {name}: has no token {end_token} to end answers with; give --end_token")
    # a question begins with <|endoftext|>, or with this tokenizer's start token
    begins = [tokenizer.token_to_id(END), *tokenizer.encode("").ids, end]
    begin = next((number for number in begins if number is not None), -1)
    tokenizer.no_padding()
    tokenizer.no_truncation()
    markers = MARKERS["hdp" if system == "hdp" else "gsm8k"]
    if tokenizer.token_to_id(SDAR_MASK) is not None:
        markers = (*markers[:-1], SDAR_MASK)
    tokenizer.add_special_tokens([*([] if end is None else [end_token]), *markers])
    size = max(tokenizer.get_vocab().values()) + 1
    ids = [tokenizer.token_to_id(marker) for marker in markers]
    if system == "hdp":
        return Tokens(tokenizer, size, -1, *ids)
    return Tokens(tokenizer, size, begin, end, -1, -1, -1, *ids)


def read_tokenizer(path):
    """Tokenizer of a tokenizer.json, its folder, or a folder with Qwen's older files. UserError."""
    file = path / "tokenizer.json" if path.is_dir() else path
    if file.exists():
        return Tokenizer.from_file(str(file))
    from diffusion import published
    return published.read_older_tokenizer(path)
