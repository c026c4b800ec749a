"""Text, JSON and JSONL files -> what is in them. Whatever is wrong with one is said in one line, and nothing hangs.

Only regular files are read: a pipe may never end, and a run that resumes reads its files again. Refused beside what is
no JSON are values that Python's own reader takes or fails on: whole numbers beyond 64 bits, whose use as a float may
overflow, and nesting so deep that printing the value would fail. Standard library only.
"""
import errno
import io
import json
import math
import os
import re
import stat
from pathlib import Path

from common.text import UserError

DIGITS = 19             # of a whole number, its sign included
DEPTH = 100             # of lists and objects in each other
LONGEST = 2**26         # bytes of a line, characters of a list's entry
PIECE = 2**20           # characters of a JSON list in memory at a time
WHITE = re.compile(r"[ \t\n\r]*")
HALF_CHARACTER = re.compile("[\ud800-\udfff]")      # json joins pairs, so that whatever is left stands alone
SKIPPED = object()      # stands for an entry that was asked to be left out


def _whole(digits):
    if len(digits) > DIGITS:
        raise ValueError(f"holds a whole number of {len(digits.lstrip('-')):,} digits")
    return int(digits)


DECODER = json.JSONDecoder(parse_int=_whole,
                           parse_constant={"Infinity": math.inf, "-Infinity": -math.inf}.get)       # NaN: None


# ---------------------------------------------------------------------------------------------------------------------
# Files


class _Named(io.FileIO):
    """A file whose errors of reading name it: that of a bad disk comes without."""

    def __init__(self, fd, path):
        super().__init__(fd, "rb")
        self.path = str(path)

    def readinto(self, buffer):
        return self._named(super().readinto, buffer)

    def readall(self):
        return self._named(super().readall)

    def _named(self, read, *args):
        try:
            return read(*args)
        except OSError as error:
            error.filename = self.path
            raise


def open_file(path, flag=""):
    """A regular file, opened for reading bytes. UserError for anything else. flag: named before the path, "--x "."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)     # to open a pipe that nobody writes would hang
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):     # nothing is wrong with this file
            raise
        raise UserError(f"{flag}{path}: cannot be read ({error.strerror})")
    except ValueError as error:     # a NUL in the name
        raise UserError(f"{flag}{path}: cannot be read ({error})")
    mode = os.fstat(fd).st_mode
    if not stat.S_ISREG(mode):
        os.close(fd)
        what = "a folder" if stat.S_ISDIR(mode) else "a pipe or a device, not a file; write it to a file first"
        raise UserError(f"{flag}{path}: cannot be read (it is {what})")
    return io.BufferedReader(_Named(fd, path))


def read_text(path, flag=""):
    """The text of a UTF-8 file, without its byte order mark. UserError, which names the flag that gave the path."""
    with open_file(path, flag) as file:
        try:
            data = file.read()
        except OSError as error:
            raise UserError(f"{flag}{path}: cannot be read ({error.strerror})")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UserError(f"{flag}{path}: is not UTF-8 text (line {line}); convert it: iconv -t UTF-8")


def lines(file, path):
    """Yield the lines of open_file's file; UserError for one of more than LONGEST bytes."""
    number = 0
    while line := file.readline(LONGEST + 1):
        number += 1
        if len(line) > LONGEST:
            raise UserError(f"{path}: line {number} is longer than {LONGEST >> 20} MiB")
        yield line


# ---------------------------------------------------------------------------------------------------------------------
# One value


def loads(text):
    """The value of a JSON text, str or bytes; ValueError says in a few words why there is none."""
    try:
        text = text if isinstance(text, str) else text.decode("utf-8-sig")
        return shallow(DECODER.decode(text), text.count("[") + text.count("{"))
    except UnicodeDecodeError:
        raise ValueError("is not UTF-8 text")
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON ({error.msg} at character {error.pos})")
    except RecursionError:
        raise ValueError("is nested too deeply")


def shallow(value, brackets):
    """The value itself; ValueError when it is nested more than DEPTH deep. brackets: [ and { in its text."""
    if brackets > DEPTH:
        level, depth = [value], 0
        while level := [part for one in level if isinstance(one, (dict, list))
                        for part in (one.values() if isinstance(one, dict) else one)]:
            depth += 1
            if depth > DEPTH:
                raise ValueError("is nested too deeply")
    return value


def parse(text, path, line=1):
    """The value of a JSON text that begins at this line of a file; UserError names the place."""
    if not text.strip():
        raise UserError(f"{path}: is empty")
    try:
        return shallow(DECODER.decode(text), text.count("[") + text.count("{"))
    except json.JSONDecodeError as error:
        raise _not_json(error, path, line)
    except (ValueError, RecursionError) as error:
        raise _unreadable(error, path, line)


def json_value(path, flag=""):
    """The one JSON value of a file, whatever its type. Raises UserError."""
    return parse(read_text(path, flag), f"{flag}{path}")


def read_object(path, flag=""):
    """The JSON object of a file, a dict. Raises UserError."""
    found = json_value(path, flag)
    if not isinstance(found, dict):
        raise UserError(f"{flag}{path}: holds a JSON {type(found).__name__}, not an object")
    return found


def _not_json(error, path, line, column=1):
    """UserError of a JSONDecodeError in a text that begins at this line and column of the file."""
    whole = error.doc.rstrip()
    cut = error.pos >= len(whole) - 1 or whole[-1] not in "]}"
    return UserError(f"{path}: not valid JSON at line {line + error.lineno - 1} "
                     f"column {error.colno + (column - 1) * (error.lineno == 1)}: "
                     f"{'the file looks truncated' if cut else error.msg}")


def _unreadable(error, path, line):
    """UserError of what is JSON but is not read."""
    why = "is nested too deeply" if isinstance(error, RecursionError) else error
    return UserError(f"{path}: JSON that cannot be read, from line {line} on: {why}")


# ---------------------------------------------------------------------------------------------------------------------
# Many values


def json_entries(path, wanted=lambda number: True):
    """Yield the raw samples of a JSON list, one JSON object, or JSONL. Raises UserError naming line and column.

    wanted(number): whether the entry is read; else SKIPPED is yielded in its place.
    """
    with open_file(path) as binary:
        f = io.TextIOWrapper(binary, encoding="utf-8-sig")
        try:
            head = f.read(1)
            while head[-1:].isspace() and (more := f.read(1)):
                head += more
            if head.endswith("["):
                yield from _list_entries(f, path, head)
                return
            f.seek(0)
            first_line = next((line for line in lines(f, path) if line.strip()), "")
            f.seek(0)
            if head.endswith("{") and (_is_json(first_line) or Path(path).suffix == ".jsonl"):
                entry = 0
                for number, line in enumerate(lines(f, path), 1):
                    if not line.isspace():
                        yield parse(line, path, number) if wanted(entry) else SKIPPED
                        entry += 1
                return
            data = parse(f.read(), path)
        except UnicodeDecodeError as error:
            raise UserError(f"{path}: is not UTF-8 text ({error.reason}, line {_bad_line(path)})")
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror})")
    if not isinstance(data, dict) or "messages" not in data:
        raise UserError(f"{path}: holds a JSON {type(data).__name__}, not a list of samples with 'messages'")
    yield data


def _list_entries(f, path, text):
    """Yield the entries of the JSON list that goes on in file f after `text`, its beginning up to the bracket.

    One at a time: a list of millions as Python objects takes several times the memory of its text.
    """
    at, first, line, column = len(text), True, 1, 1         # line and column of the beginning of text
    while True:
        try:
            start = end = WHITE.match(text, at).end()
            empty = first and text[end:end + 1] == "]"
            if not empty:
                entry, end = DECODER.raw_decode(text, end)
                shallow(entry, text.count("[", start, end) + text.count("{", start, end))
                end = WHITE.match(text, end).end()
                if text[end:end + 1] not in (",", "]"):
                    raise json.JSONDecodeError("Expecting ',' delimiter", text, end)
        except json.JSONDecodeError as error:               # wrong, or goes on in the next piece
            if len(text) - at > LONGEST:
                raise UserError(f"{path}: not valid JSON, or an entry of more than {LONGEST >> 20} Mi characters, from "
                                f"line {line + text.count(chr(10), 0, at)} on")
            if not (more := f.read(max(PIECE, len(text)))):
                raise _not_json(error, path, line, column)
            line, column = line + text.count("\n", 0, at), at - text.rfind("\n", 0, at) + (
                column - 1) * ("\n" not in text[:at])
            text, at = text[at:] + more, 0
            continue
        except (ValueError, RecursionError) as error:
            raise _unreadable(error, path, line + text.count("\n", 0, start))
        if not empty:
            yield entry
        if text[end] == "]":
            break
        at, first = end + 1, False
    text += f.read()
    if (end := WHITE.match(text, end + 1).end()) < len(text):
        raise _not_json(json.JSONDecodeError("Extra data", text, end), path, line, column)


def _is_json(line):
    try:
        loads(line)
        return True
    except ValueError:
        return False


def _bad_line(path):
    """Number of the first line that is not UTF-8; the reader's own error counts from its last buffer, not the start."""
    with open(path, "rb") as f:
        for number, line in enumerate(f, 1):
            try:
                line.decode()
            except UnicodeDecodeError:
                return number
