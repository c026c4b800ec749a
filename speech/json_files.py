"""JSON and JSONL files -> their raw entries, one at a time, with line and column of what is not JSON."""
import json
import math
import re

from common.parallel import UserError

DECODER = json.JSONDecoder(parse_constant={"Infinity": math.inf, "-Infinity": -math.inf}.get)       # NaN: None
WHITE = re.compile(r"[ \t\n\r]*")
PIECE = 2**20           # characters of a JSON list in memory at a time
SKIPPED = object()      # stands for an entry that was asked to be left out


def json_entries(path, wanted=lambda number: True):
    """Yield the raw samples of a JSON list, one JSON object, or JSONL. Raises UserError naming line and column.

    wanted(number): whether the entry is read; else SKIPPED is yielded in its place.
    """
    try:
        with open(path, encoding="utf-8-sig") as f:
            head = f.read(1)
            while head[-1:].isspace() and (more := f.read(1)):
                head += more
            if head.endswith("["):
                yield from _list_entries(f, path, head)
                return
            f.seek(0)
            first_line = next((line for line in f if line.strip()), "")
            f.seek(0)
            if head.endswith("{") and (_is_json(first_line) or str(path).endswith(".jsonl")):
                entry = 0
                for number, line in enumerate(f, 1):
                    if not line.isspace():
                        yield _loads(line, path, number) if wanted(entry) else SKIPPED
                        entry += 1
                return
            data = _loads(f.read(), path, 1)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); give the path of a ChatML JSON or JSONL file")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: is not UTF-8 text ({error.reason}, line {_bad_line(path)})")
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
            end = WHITE.match(text, at).end()
            empty = first and text[end:end + 1] == "]"
            if not empty:
                entry, end = DECODER.raw_decode(text, end)
                end = WHITE.match(text, end).end()
                if text[end:end + 1] not in (",", "]"):
                    raise json.JSONDecodeError("Expecting ',' delimiter", text, end)
        except json.JSONDecodeError as error:               # wrong, or goes on in the next piece
            if not (more := f.read(max(PIECE, len(text)))):
                raise _not_json(error, path, line, column)
            line, column = line + text.count("\n", 0, at), at - text.rfind("\n", 0, at) + (
                column - 1) * ("\n" not in text[:at])
            text, at = text[at:] + more, 0
            continue
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
        json.loads(line)
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


def _loads(text, path, line):
    if not text.strip():
        raise UserError(f"{path}: is empty")
    try:
        return DECODER.decode(text)
    except json.JSONDecodeError as error:
        raise _not_json(error, path, line)


def _not_json(error, path, line, column=1):
    """UserError of a JSONDecodeError in a text that begins at this line and column of the file."""
    whole = error.doc.rstrip()
    cut = error.pos >= len(whole) - 1 or whole[-1] not in "]}"
    return UserError(f"{path}: not valid JSON at line {line + error.lineno - 1} "
                     f"column {error.colno + (column - 1) * (error.lineno == 1)}: "
                     f"{'the file looks truncated' if cut else error.msg}")


def json_value(path):
    """The one JSON value of a file, whatever its type."""
    try:
        return _loads(path.read_text(encoding="utf-8-sig"), path, 1)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({error})")
