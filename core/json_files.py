"""Text, JSON, JSONL, parquet and arrow files -> their values, or a UserError of one line.

Only regular files are read: a pipe may never end, and a run that resumes reads its files again.
Standard library only.
"""
import contextlib
import errno
import io
import json
import math
import os
import re
import stat
from pathlib import Path

from core.cli import UserError, require

LONGEST = 2**26         # bytes of a line
HALF_CHARACTER = re.compile("[\ud800-\udfff]")      # json joins pairs: these are single
SKIPPED = object()      # in place of an entry that was asked to be left out
DECODER = json.JSONDecoder(parse_constant={"Infinity": math.inf, "-Infinity": -math.inf}.get)


class _Named(io.FileIO):
    """A file whose errors of reading are a UserError that names it: a bad disk's come without."""
    read, readall = io.RawIOBase.read, io.RawIOBase.readall     # both by readinto

    def readinto(self, buffer):
        try:
            return super().readinto(buffer)
        except OSError as error:
            raise UserError(f"{self.label}: cannot be read ({error.strerror})")


def open_file(path, flag=""):
    """A regular file, opened for reading bytes; UserError. flag: named before the path, "--x "."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)     # a pipe that nobody writes would hang
    except (OSError, ValueError) as error:      # the latter: a NUL in the name
        if getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE):
            raise       # nothing is wrong with this file
        raise UserError(f"{flag}{path}: cannot be read "
                        f"({getattr(error, 'strerror', None) or error})")
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise UserError(f"{flag}{path}: cannot be read (it is a folder, a pipe or a device, not a "
                        "file)")
    file = _Named(fd, "rb")
    file.label = f"{flag}{path}"
    return io.BufferedReader(file)


def read_text(path, flag=""):
    """The text of a UTF-8 file, without its byte order mark. UserError."""
    with open_file(path, flag) as file:
        data = file.read()
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise not_utf8(f"{flag}{path}", data.count(b"\n", 0, error.start) + 1, data)


def not_utf8(path, line, data):
    """UserError of a text whose line of this number is not UTF-8. data: bytes of its beginning."""
    encoding = "UTF-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "CP1252"
    return UserError(f"{path}: is not UTF-8 text (line {line}); convert it: "
                     f"iconv -f {encoding} -t UTF-8")


def lines(file, path):
    """Yield the lines of open_file's file; UserError for one of more than LONGEST bytes."""
    for number, line in enumerate(iter(lambda: file.readline(LONGEST + 1), b""), 1):
        require(len(line) <= LONGEST, f"{path}: line {number} is longer than {LONGEST >> 20} MiB")
        yield line


def loads(text):
    """The value of a JSON text, str or bytes; ValueError says in a few words why there is none."""
    try:
        return DECODER.decode(text if isinstance(text, str) else text.decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise ValueError("is not UTF-8 text")
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON ({error.msg} at character {error.pos})")
    except RecursionError:
        raise ValueError("is nested too deeply")


def parse(text, path, line=1):
    """The value of a JSON text that begins at this line of a file; UserError names the place."""
    require(text.strip(), f"{path}: is empty")
    try:
        return DECODER.decode(text)
    except json.JSONDecodeError as error:
        why = error.msg if text.rstrip()[-1] in "]}" else "the file looks truncated"
        raise UserError(f"{path}: not valid JSON at line {line + error.lineno - 1} column "
                        f"{error.colno}: {why}")
    except (ValueError, RecursionError) as error:
        why = "is nested too deeply" if isinstance(error, RecursionError) else error
        raise UserError(f"{path}: JSON that cannot be read, from line {line} on: {why}")


def json_value(path, flag=""):
    """The one JSON value of a file, whatever its type. Raises UserError."""
    return parse(read_text(path, flag), f"{flag}{path}")


def read_object(path, flag=""):
    """The JSON object of a file, a dict. Raises UserError."""
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
        start = next((text for line in lines(file, path) if (text := stripped(line))), b"")
    with contextlib.suppress(ValueError):
        if start[:1] == b"{" and (Path(path).suffix == ".jsonl" or loads(start) is not None):
            return "line", lambda wanted: _json_lines(path, wanted)
    data = json_value(path)
    if isinstance(data, dict) and "messages" in data:
        data = [data]
    require(isinstance(data, list), f"{path}: holds a JSON {type(data).__name__}, not a list of "
            "samples with 'messages'")
    return "sample", lambda wanted: enumerate(data)


def stripped(line):
    """Bytes of a line without a byte order mark and white space around it."""
    return line.removeprefix(b"\xef\xbb\xbf").strip()


def _json_lines(path, wanted):
    with open_file(path) as file:
        for number, line in enumerate(lines(file, path)):
            if stripped(line) and not wanted(number):
                yield number, SKIPPED
            elif stripped(line):
                try:
                    text = line.decode("utf-8" if number else "utf-8-sig")
                except UnicodeDecodeError:
                    raise not_utf8(path, number + 1, line)
                yield number, parse(text.rstrip("\n"), path, number + 1)


# ---- Tables; the hub


@contextlib.contextmanager
def asking(path):
    """Turn an error of the hub's client into a UserError of one line."""
    try:
        yield
    except Exception as error:
        why = (str(error).strip().splitlines() or [""])[0]
        raise UserError(f"{path}: no such file or folder here, and the hub does not give it "
                        f"({type(error).__name__}: {why[:120]}); private ones need `hf auth login`;"
                        " where there is a network: `hf download OWNER/NAME --repo-type dataset "
                        "--local-dir FOLDER`, then give that folder")


def without_null(value):
    """A value of a table without fields of null, which pyarrow adds where one row has a field."""
    if isinstance(value, dict):
        return {name: without_null(part) for name, part in value.items() if part is not None}
    return [without_null(part) for part in value] if isinstance(value, list) else value


def table_rows(path, size=1024):
    """Yield the rows of a parquet file, or of an arrow file as datasets' save_to_disk writes it, as
    dicts without fields of null; UserError. size: rows of a parquet file read together.
    """
    path = Path(path)
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise UserError(f"{path}: pip install pyarrow to read it, or give JSONL")
    try:
        batches = (pyarrow.parquet.ParquetFile(path).iter_batches(size) if path.suffix == ".parquet"
                   else pyarrow.ipc.open_stream(pyarrow.memory_map(str(path))))
        for batch in batches:
            yield from map(without_null, batch.to_pylist())
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path}: cannot be read as {path.suffix[1:]} "
                        f"({str(error).splitlines()[0]})")
