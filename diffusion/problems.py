"""GSM8K and HDP files -> problems; GPT-2's tokenizer (or another byte-level BPE) with a system's special tokens.

Reads JSONL, JSON, dataset folders (JSONL, parquet, arrow) and hub names. Whatever cannot be used is one line that names
the file and the sample. Special tokens follow kuleshov-group/bd3lms (gsm8k: a mask behind GPT-2's vocabulary) and
ngocbao220/hdp-diffusion (hdp: five tokens in that order), both Apache-2.0.
"""
import functools
import re
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from common.distributed import UserError
from common.problems import problem, settle
from common.text import NAME, printable
from core import json_files

END = "<|endoftext|>"
MARKERS = {"gsm8k": ("<|mask|>",), "hdp": ("<|pad|>", "<|plan|>", "<|execution|>", "<|answer|>", "<|mask|>")}
SDAR_MASK = "<|MASK|>"      # the mask of SDAR's tokenizers (github.com/JetAstra/SDAR), which they hold already
NUMBER = re.compile(r"(?:(?<![\d)])-)?\d[\d,]*(?:\.\d+)?")       # the minus of 5-3 is no sign
HUB_NAME = re.compile(r"(?!.*\.jsonl?$)\w[\w.-]*(/[\w.-]+)?")      # openai/gsm8k, gpt2
CALCULATOR = re.compile(r"<<[^<>]*>>")


# ---------------------------------------------------------------------------------------------------------------------
# Files -> problems


@dataclass
class Problem:
    """One problem. name says where it stands in the user's files; answer is the final number as text."""
    name: str
    question: str
    solution: str           # gsm8k: the worked answer with its last line `#### N`; hdp: the execution
    answer: str
    plan: str = ""          # hdp only
    ids: list = None        # of a chat: prompt and answer, tokenised; the first `given` are the prompt
    given: int = 0


def read_problems(path, split, system, strip_calculator=False, bad=None):
    """List of Problems of a JSONL or JSON file, a dataset folder or a hub dataset (both: its `split`).

    strip_calculator removes GSM8K's <<48/2=24>> marks. bad: a list that takes what cannot be used (problems.Problem of
    common); None: UserError with all of them.
    """
    problems, wrong = [], []
    for name, entry in read_entries(path, split):
        try:
            problems.append(parse_problem(name, entry, system, strip_calculator))
        except ValueError as error:
            wrong.append(problem(name, "invalid", error, path))
    if bad is None or not problems:
        settle(wrong)
    else:
        bad += wrong
    if not problems:
        raise UserError(f"{path}: holds no problems")
    return problems


def parse_problem(name, entry, system, strip_calculator):
    """One JSON object -> Problem; ValueError says what is wrong and what to do."""
    if not isinstance(entry, dict):
        raise ValueError(f"is a {type(entry).__name__}, not an object with 'question'")
    keys = ("question", "answer") if system != "hdp" else ("question", "plan", "execution", "answer")
    for key in keys:
        if not isinstance(entry.get(key), str) or not entry[key].strip():
            hint = "; make plans with make_problems.py plans" if key in ("plan", "execution") else ""
            raise ValueError(f"has no {key!r} (a text that is not empty){hint}")
        if json_files.HALF_CHARACTER.search(entry[key]):
            raise ValueError(f"its {key!r} holds half of a surrogate pair (\\ud800 to \\udfff); write it whole")
    question, solution = entry["question"].strip(), entry[keys[-2] if system == "hdp" else "answer"].strip()
    if strip_calculator:
        solution = CALCULATOR.sub("", solution)
    answer = entry["answer"].strip()
    if system != "hdp":
        marker, answer = solution.rpartition("####")[1:]
        if not marker:
            raise ValueError("its 'answer' has no '#### N' line; add the final number behind ####")
        answer = answer.strip()
    if not NUMBER.fullmatch(answer):
        raise ValueError(f"its final answer {answer!r} is not a number")
    return Problem(name, question, solution, answer, entry["plan"].strip() if system == "hdp" else "")


def read_entries(path, split):
    """Yield (name, JSON value) of the problems of a file, folder or hub dataset. UserError."""
    file = Path(path)
    if not file.exists() and ("/" not in str(path) or not HUB_NAME.fullmatch(str(path))):
        raise UserError(f"{path}: no such file or folder")
    if not file.is_file():
        from common import hub
        from diffusion import folders
        file = folders.find_split(file if file.exists() else folders.download(path), split)
        if isinstance(file, list):      # parquet or arrow
            rows = (row for one in file for row in hub.table_rows(one))
            for i, entry in enumerate(rows):
                yield f"{file[0].parent} {split} sample {i}", entry
            return
    text = json_files.read_text(file)
    if not text.strip():
        raise UserError(f"{file}: is empty")
    if text.lstrip()[0] == "[":
        for i, entry in enumerate(json_files.parse(text, file)):
            label = entry.get("id") if isinstance(entry, dict) else None
            yield f"{file} sample {i}" + (f" ({printable(label, NAME)})" if label else ""), entry
        return
    # splitlines() would also cut at characters inside strings
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield f"{file} line {number}", json_files.parse(line, file, number)


# ---------------------------------------------------------------------------------------------------------------------
# Tokenizer


@dataclass
class Tokens:
    """A byte-level BPE tokenizer with the special tokens of a system; ids that a system lacks are -1."""
    tokenizer: Tokenizer
    vocab_size: int         # rows of the model's embedding: GPT-2 has 50,258 with gsm8k's mask, 50,262 with hdp's five
    bos: int
    end: int                # ends the answer (gsm8k) or a region (hdp)
    pad: int
    plan: int
    execution: int
    answer: int
    mask: int

    @functools.cached_property
    def special(self):
        """{text: id} of tokens that no text of a problem may hold."""
        added = {token.content: number for number, token in self.tokenizer.get_added_tokens_decoder().items()
                 if token.special}
        return added | self.markers

    def smuggled(self, *texts):
        """The first special token that stands in one of the texts, or None."""
        return next((name for name in sorted(self.special, key=self.special.get)
                     if any(name in text for text in texts)), None)

    @functools.cached_property
    def markers(self):
        """{name: id} of the special tokens that follow the tokenizer's own."""
        found = {name: self.tokenizer.token_to_id(name) for name in (*MARKERS["hdp"], SDAR_MASK)}
        return {name: number for name, number in found.items() if number is not None}

    def encode(self, text):
        """Text -> list of ids."""
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids):
        """Ids -> text, special tokens spelled out."""
        return self.tokenizer.decode([int(i) for i in ids], skip_special_tokens=False)

    def save(self, folder):
        """Write folder/tokenizer.json, which load_tokenizer reads back."""
        self.tokenizer.save(str(Path(folder) / "tokenizer.json"))


def load_tokenizer(name, system, end_token=""):
    """Tokens from a tokenizer.json, a folder (tokenizer.json, or GPT-2's two files), or a hub name
    such as gpt2. end_token: of gsm8k's answers; "": <|endoftext|>. Raises UserError.
    """
    path = Path(name)
    hint = "give a folder with tokenizer.json or with GPT-2's encoder.json and vocab.bpe, or gpt2 when online"
    try:
        if path.is_dir():
            tokenizer = tokenizer_from_folder(path)
        else:
            if not path.exists():
                from diffusion import folders
                path = folders.download_tokenizer(name, HUB_NAME.fullmatch(str(name)), hint)
            tokenizer = Tokenizer.from_file(str(path))
    except UserError:
        raise
    except Exception as error:      # the tokenizers library raises bare Exceptions
        why = str(error).partition("\n")[0]
        raise UserError(f"--tokenizer {name}: is not a tokenizer ({why:.120}); {hint}")
    end_token = end_token or END
    end = tokenizer.token_to_id(end_token)
    if end is None and system != "hdp":
        raise UserError(f"--tokenizer {name}: has no token {end_token} to end answers with; give "
                        "one that it has (--end_token '</s>'), or --chat where it has a template")
    # a question begins with <|endoftext|>, or with what this tokenizer puts before every text
    begins = [tokenizer.token_to_id(END), *tokenizer.encode("").ids, end]
    begin = next((number for number in begins if number is not None), -1)
    tokenizer.no_padding()
    tokenizer.no_truncation()
    markers = MARKERS["hdp" if system == "hdp" else "gsm8k"]
    if tokenizer.token_to_id(SDAR_MASK) is not None:
        markers = (*markers[:-1], SDAR_MASK)
    tokenizer.add_special_tokens([*([] if end is None else [end_token]), *markers])
    used, size = set(tokenizer.get_vocab().values()), tokenizer.get_vocab_size()
    if used != set(range(size)):        # the model's embedding has a row for each of 0 to size - 1
        raise UserError(f"--tokenizer {name}: its {size} tokens have ids up to {max(used)}, with "
                        f"gaps; {hint}")
    ids = {m: tokenizer.token_to_id(m) for m in markers}
    last = ids.get("<|pad|>", end)
    regions = [ids.get(f"<|{name}|>", -1) for name in ("plan", "execution", "answer")]
    return Tokens(tokenizer, size, -1 if system == "hdp" else begin, last, last, *regions, ids[markers[-1]])


def tokenizer_from_folder(folder):
    """tokenizer.json, or OpenAI's (encoder.json, vocab.bpe) or transformers' (vocab.json, merges.txt) GPT-2 files."""
    if (folder / "tokenizer.json").exists():
        return Tokenizer.from_file(str(folder / "tokenizer.json"))
    # Qwen's and SDAR's older folders: vocabulary and merges alone lack the added tokens and how text is split; without
    # these files or a class transformers makes an empty tokenizer, or none
    slow = [folder / name for name in ("vocab.json", "merges.txt", "tokenizer_config.json")]
    if all(path.exists() for path in slow) and '"tokenizer_class"' in slow[-1].read_text(encoding="utf-8"):
        from diffusion import folders
        return folders.auto_tokenizer(folder).backend_tokenizer
    for vocabulary, merges in (("encoder.json", "vocab.bpe"), ("vocab.json", "merges.txt")):
        if (folder / vocabulary).exists() and (folder / merges).exists():
            tokenizer = Tokenizer(models.BPE.from_file(str(folder / vocabulary), str(folder / merges)))
            tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
            tokenizer.decoder = decoders.ByteLevel()
            return tokenizer
    raise UserError(f"--tokenizer {folder}: has neither tokenizer.json nor encoder.json with vocab.bpe nor vocab.json "
                    "with merges.txt")
