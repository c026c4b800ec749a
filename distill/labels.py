"""A teacher's answer -> its label, or the reason why it has none. Never a guess.

A label counts only if the teacher ended by itself, and if the label is one of the allowed ones and
comes after the last closing thinking tag, on the last line that has the wanted form as a whole. A
quoted example of the form, a thought that was cut off and an answer with two labels on a line
therefore give no label. Standard library only.
"""
import re
from typing import NamedTuple

from core.cli import UserError, require

LANGUAGES = ("ar", "de", "el", "en", "es", "fr", "hi", "ru", "tr", "ur", "vi", "zh", "ot")
PARSERS = ("language", "regex", "whole")
THOUGHT = re.compile(r"<(/?)(?:think|thinking|thought|reasoning)>")
# markdown around it is harmless
LANGUAGE_LINE = r"[*_`#\s]*final answer[*_`]*\s*:[*_`\s]*([a-z]{2})[*_`\s.]*"
ENDINGS = {"length": "cut off at --max_tokens",
           "too_long": "the prompt leaves no room for an answer"}
UNANSWERED = ("refused", "no_answer")       # endings of lines without an answer: the text says why
# ids of records: a digest of the input file x LINES + the line's number; below JSON's 2**53
LINES = 2**28


class Parser(NamedTuple):
    """What counts as an answer."""
    line: re.Pattern | None         # form of the label's line, None: the whole answer
    labels: tuple | None = None     # None allows any
    lower: bool = False


class Found(NamedTuple):
    """A label that begins at text[start], or None and why."""
    label: str | None
    start: int = 0
    why: str = ""


def make_parser(name, pattern=None, labels=None):
    """Parser by its name. pattern (regex): the line's form, group 1 the label; labels: allowed."""
    require((pattern is not None) == (name == "regex"), "--parser regex needs --pattern, its only "
            "group the label; no other parser takes one")
    if name == "whole":
        return Parser(None, labels)
    if name == "language":
        return Parser(re.compile(LANGUAGE_LINE, re.IGNORECASE), labels or LANGUAGES, lower=True)
    try:
        line = re.compile(pattern)
    except re.error as error:
        raise UserError(f"--pattern {pattern!r}: is not a regular expression ({error})")
    require(line.groups == 1, f"--pattern {pattern!r}: has {line.groups} groups; put the label, "
                              "nothing else, in one: (...)")
    return Parser(line, labels)


def read_label(parser, text, finish_reason, must_think=False):
    """Found of one answer. must_think: without a closed thought it is not an answer."""
    if finish_reason in UNANSWERED:
        return Found(None, why=text)
    if finish_reason != "stop":
        return Found(None, why=ENDINGS.get(finish_reason, f"ended by {finish_reason}"))
    begin, open_thought = 0, False
    for tag in THOUGHT.finditer(text):
        begin, open_thought = tag.end(), not tag[1]
    if open_thought or (must_think and not begin):
        return Found(None, why="its thoughts have no end")
    if parser.line is None:
        found = Found(text[begin:].strip(), begin)
        if not found.label:
            return Found(None, why="is empty")
    else:
        match = None
        for line in re.finditer(r"\S[^\n]*", text[begin:]):
            end = begin + line.start() + len(line[0].rstrip())
            match = parser.line.fullmatch(text, begin + line.start(), end) or match
        if match is None or not match[1]:
            return Found(None, why="has no line of the wanted form")
        found = Found(match[1].lower() if parser.lower else match[1], match.start(1))
    if parser.labels and found.label not in parser.labels:
        return Found(None, why=f"{found.label[:40]!r} is not one of the labels")
    return found


def thoughts(text, end):
    """What an answer thinks before its label, which begins at text[end]; "" without a thought."""
    tags = [tag for tag in THOUGHT.finditer(text[:end]) if tag[1]]
    return THOUGHT.sub("", text[:tags[-1].start()]).strip() if tags else ""
