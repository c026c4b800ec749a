"""Read text, JSON, JSONL and parquet files, with errors of one line; list samples that are bad."""
import json
import math
import os
import re
from collections import Counter
from pathlib import Path

from core.cli import UserError, error_names_file, first_line, one_line, problem_text, require

BLANK = b"\xef\xbb\xbf \t\r\n"     # white space or a byte order mark around a line
HALF_CHARACTER = re.compile("[\ud800-\udfff]")      # half of a surrogate pair; json joins pairs
NOT_UTF8 = "is not UTF-8 text; convert it: iconv -f CP1252 -t UTF-8"
DECODER = json.JSONDecoder(parse_constant={"Infinity": math.inf, "-Infinity": -math.inf}.get)
LIST = "problems.jsonl"     # in OUTPUT_DIR: samples that cannot be used


def open_file(path):
    """A regular file, opened to read bytes. UserError if there is none."""
    # files are read twice, a pipe only once
    require(os.path.isfile(path), f"{path}: there is no file of this name")
    return open(path, "rb")


def read_text(path):
    """Text of a UTF-8 file without its byte order mark. UserError."""
    try:
        with open_file(path) as file:
            return file.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise UserError(f"{path}: line {line} {NOT_UTF8}")


def loads(text):
    """Value of a JSON text, str or bytes. ValueError with a short reason."""
    try:
        text = (text if isinstance(text, str) else text.decode("utf-8-sig")).rstrip()
        return DECODER.decode(text)
    except UnicodeDecodeError:
        raise ValueError(NOT_UTF8)
    except json.JSONDecodeError as error:
        line = f"line {error.lineno} " * ("\n" in text)
        raise ValueError(f"is not valid JSON at {line}column {error.colno}: {error.msg}")
    except RecursionError:
        raise ValueError("is nested too deeply")


def read_object(path, kind=dict, wanted="an object"):
    """Value of a JSON file. UserError, also if it is no `kind`; wanted: that type in words."""
    try:
        value = loads(read_text(path))
    except ValueError as error:
        raise UserError(f"{path}: {error}")
    require(isinstance(value, kind), f"{path}: holds a JSON {type(value).__name__}, not {wanted}")
    return value


def read_entries(path):
    """Yield (location, value) of a file of JSONL, a JSON list, one sample, or parquet. UserError.
    location: "line 1" in JSONL, which is read line by line, else "sample 1"."""
    with open_file(path) as file:
        start = next(filter(None, (line.strip(BLANK) for line in file)), b"")
        if start[:1] == b"{" and start[-1:] == b"}":
            file.seek(0)
            for number, line in enumerate(file, 1):
                if line.strip(BLANK):
                    try:
                        yield f"line {number}", loads(line)
                    except ValueError as error:
                        raise UserError(f"{path} line {number}: {error}")
            return
    is_table = Path(path).suffix == ".parquet"
    data = table_rows(path) if is_table else read_object(path, (list, dict), "a list of samples")
    for number, value in enumerate([data] if isinstance(data, dict) else data, 1):
        yield f"sample {number}", value


def drop_nulls(value):
    """A value of a table without null fields, which pyarrow adds if other rows have the field."""
    if isinstance(value, dict):
        return {name: drop_nulls(item) for name, item in value.items() if item is not None}
    return [drop_nulls(item) for item in value] if isinstance(value, list) else value


def table_rows(path):
    """Yield the rows of a parquet file as dicts without null fields. UserError."""
    import pyarrow.parquet
    try:
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches(1024):
            yield from map(drop_nulls, batch.to_pylist())
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path}: cannot be read as parquet ({first_line(error)})")


# ---- Samples that cannot be used: some stop a run, others are dropped, and all are listed


class Problem:
    """Why a sample cannot be used; str() is a line for its user."""

    def __init__(self, name, check, reason, file="", sample=None):
        """name: its file and place. check: one of --drop_bad. sample: its number in a table."""
        self.name, self.check, self.reason = one_line(name), check, one_line(reason)
        self.file, self.sample = str(file), sample

    def __str__(self):
        return f"{self.name}: {self.reason}"


class Problems:
    """Counts problems by check, keeps those that stop the run, and appends all to a folder's LIST
    at once, as audio may be encoded for hours."""

    def __init__(self, drop=(), folder=None):
        """drop: checks whose samples are dropped. folder: None writes no list."""
        self.drop, self.path = drop, Path(folder) / LIST if folder else None
        self.counts, self.fatal = Counter(), []

    def add(self, problems):
        """Returns self."""
        self.counts.update(p.check for p in problems)
        self.fatal += [p for p in problems if p.check not in self.drop]
        if problems and self.path:
            rows = [{"file": p.file, "entry": p.name.removeprefix(one_line(p.file)).strip(" :"),
                     "check": p.check, "problem": p.reason} for p in problems]
            with error_names_file(self.path), open(self.path, "a") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows)
        return self

    def settle(self, hint=""):
        """Text with the number of samples that each check drops, or "". UserError with the problems
        that stop the run, if any, and then `hint`."""
        where = f"; see {self.path}" if self.path and self.counts else ""
        require(not self.fatal, problem_text(self.fatal) + where + hint)
        return ", ".join(f"{n} {check}" for check, n in sorted(self.counts.items())) + where
