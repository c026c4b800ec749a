"""Values of text, JSON, JSONL and parquet files, or a UserError of one line. Only regular files are
read: a pipe may never end. Imports the standard library only.
"""
import contextlib
import json
import math
import os
import re
import stat
from pathlib import Path

from core.cli import UserError, first_line, require

LONGEST = 2**26         # bytes of a line
BLANK = b"\xef\xbb\xbf \t\r\n"     # around a line: white space, a byte order mark
HALF_CHARACTER = re.compile("[\ud800-\udfff]")      # json joins pairs: these are single
NOT_UTF8 = "is not UTF-8 text; convert it: iconv -f CP1252 -t UTF-8 (Excel: -f UTF-16)"
SKIPPED = object()      # in place of an entry that was asked to be left out
DECODER = json.JSONDecoder(parse_constant={"Infinity": math.inf, "-Infinity": -math.inf}.get)


@contextlib.contextmanager
def open_file(path, flag=""):
    """Open a regular file to read bytes; UserError, also where a disk fails while it is read.
    flag: named before the path, "--x ".
    """
    try:
        # a pipe that nobody writes would block
        with open(path, "rb", opener=lambda p, flags: os.open(p, flags | os.O_NONBLOCK)) as file:
            require(stat.S_ISREG(os.fstat(file.fileno()).st_mode),
                    f"{flag}{path}: cannot be read (it is a pipe or a device, not a file)")
            yield file
    except (OSError, ValueError) as error:      # the latter: a NUL in the name
        raise UserError(f"{flag}{path}: cannot be read "
                        f"({getattr(error, 'strerror', None) or error})")


def read_text(path, flag=""):
    """The text of a UTF-8 file, without its byte order mark. UserError."""
    with open_file(path, flag) as file:
        data = file.read()
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UserError(f"{flag}{path}: line {line} {NOT_UTF8}")


def lines(file, path):
    """Yield the lines of open_file's file; UserError for one of more than LONGEST bytes."""
    for number, line in enumerate(iter(lambda: file.readline(LONGEST + 1), b""), 1):
        require(len(line) <= LONGEST, f"{path}: line {number} is longer than {LONGEST >> 20} MiB")
        yield line


def loads(text):
    """The value of a JSON text, str or bytes; ValueError says in a few words why there is none."""
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


def json_value(path, flag=""):
    """The JSON value that is a file's text. UserError."""
    text = read_text(path, flag)
    require(text.strip(), f"{flag}{path}: is empty")
    try:
        return loads(text)
    except ValueError as error:
        raise UserError(f"{flag}{path}: {error}")


def read_object(path, flag=""):
    """The JSON object that is a file's text, a dict. UserError."""
    found = json_value(path, flag)
    require(isinstance(found, dict),
            f"{flag}{path}: holds a JSON {type(found).__name__}, not an object")
    return found


def read_entries(path):
    """(unit, read) of JSONL, of a JSON list or of one JSON object. UserError with line and column.

    read(wanted) yields (number, value): numbers are those of the lines of JSONL (unit "line") or of
    a list's entries ("sample"), from 0 on. JSONL is read line by line, and SKIPPED replaces lines
    that are not wanted(number); a list is read whole, once.
    """
    with open_file(path) as file:
        start = next(filter(None, (line.strip(BLANK) for line in lines(file, path))), b"")
    with contextlib.suppress(ValueError):       # of an object in more than one line
        if start[:1] == b"{" and (Path(path).suffix == ".jsonl" or loads(start) is not None):
            return "line", lambda wanted: _json_lines(path, wanted)
    data = json_value(path)
    data = [data] if isinstance(data, dict) and "messages" in data else data
    require(isinstance(data, list), f"{path}: holds a JSON {type(data).__name__}, not a list of "
            "samples with 'messages'")
    return "sample", lambda wanted: enumerate(data)


def _json_lines(path, wanted):
    with open_file(path) as file:
        for number, line in enumerate(lines(file, path)):
            if line.strip(BLANK):
                try:
                    value = loads(line) if wanted(number) else SKIPPED
                except ValueError as error:
                    raise UserError(f"{path} line {number + 1}: {error}")
                yield number, value


# ---- Tables


def without_null(value):
    """A value of a table without fields of null, which pyarrow adds where one row has a field."""
    if isinstance(value, dict):
        return {name: without_null(part) for name, part in value.items() if part is not None}
    return [without_null(part) for part in value] if isinstance(value, list) else value


def table_rows(path):
    """Yield the rows of a parquet file as dicts without fields of null. UserError."""
    try:
        import pyarrow.parquet
    except ImportError:
        raise UserError(f"{path}: pip install pyarrow to read it, or give JSONL")
    try:
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches(1024):
            yield from map(without_null, batch.to_pylist())
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path}: cannot be read as parquet ({first_line(error)})")
