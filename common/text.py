"""What is printed of users' files, and why a process ends: bounded lines, no control characters, no
passwords.

A name in a data file may hold line feeds and terminal escapes, and be megabytes long: printed as it
is, it could pass for a line of ours. Standard library only.
"""
import contextlib
import json
import os
import re
import sys
import time

NAME = 80           # characters of a name or label
WHAT = 500          # of what is wrong with one sample
LINE = 2000         # of a line of an error, which may list paths or names of weights
LINES = 60          # of an error
GIB = 2**30

# control characters, line and paragraph separators, marks that turn the direction of text, halves of characters
HIDDEN = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
                    "\ud800-\udfff\U000e0000-\U000e007f]")
PASSWORD = re.compile(r"(?<=://)[^/?#\s]*(?=@)")        # http://user:password@host


class UserError(Exception):
    """A mistake in flags, files or data. Shown as text without a traceback; str() is what is read."""
    status = 1      # the process ends with


def need(good, message):
    """UserError(message) unless good."""
    if not good:
        raise UserError(message)


SECRETS = re.compile(r"(?<=://)[^/?#\s]*@|(?<=[?&])[\w-]*(?:key|token|secret|password)[\w-]*=[^&#\s]*", re.IGNORECASE)


def without_secrets(value):
    """A value of JSON as it may be stored: URLs in it lose names, passwords and keys."""
    if isinstance(value, dict):
        return {name: without_secrets(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_secrets(part) for part in value]
    return SECRETS.sub("", value) if isinstance(value, str) and "://" in value else value


def printable(text, limit=WHAT):
    """str(text) as one line; of more than `limit` characters the beginning and the end, and how many are left out.

    Characters of HIDDEN are spelled as Python spells them (\\n, \\x1b), which may make the line longer again.
    """
    text = PASSWORD.sub("***", str(text))       # first: the cut may come before the sign that ends a password
    if len(text) > limit:
        half = limit // 2
        text = f"{text[:half]}[... {len(text) - 2 * half:,} characters ...]{text[-half:]}"
    return HIDDEN.sub(lambda found: repr(found[0])[1:-1], text)


def counted(number, noun):
    """1 rank, 2 ranks."""
    return f"{number} {noun if number == 1 else noun + 's'}"


def error_text(message, lines=LINES):
    """A message of several lines for the terminal: each printable, and all but the first indented."""
    first, *rest = str(message).split("\n")
    left_out = [f"[... {len(rest) - lines:,} lines ...]"] if len(rest) > lines else []
    rest = [printable(line, LINE) for line in rest[:lines] + left_out]
    return "\n".join([printable(first, LINE), *(line if line.startswith("  ") else f"  {line}" for line in rest)])


def print_error(text, short=""):
    """Print why this process ends, and leave it to torchrun, which repeats it in its last lines.
    short: what torchrun gets instead of the text.
    """
    print(text, file=sys.stderr, flush=True)
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        about = {"py_callstack": short or text, "timestamp": str(int(time.time()))}
        with contextlib.suppress(OSError):      # torchrun fails at half a file
            with open(f"{path}.new", "w") as file:
                json.dump({"message": {"message": short or text, "extraInfo": about}}, file)
            os.replace(f"{path}.new", path)


def size(n):
    """Bytes as text."""
    return f"{n / GIB:,.2f} GiB" if n >= GIB / 10 else f"{n / 2**20:,.2f} MiB"
