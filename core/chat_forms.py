"""Other forms of chats than JSONL of "messages": imported where a data set has one.

Folders and patterns; ShareGPT, TRL, alpaca, OpenAI's parts of content.
"""
import glob
import re
from pathlib import Path

from core import json_files
from core.cli import UserError, require

KINDS = (".parquet", ".jsonl")                          # of a data set's files in a folder
# its names of roles, beside chat.ROLES
SHAREGPT = {"human": "user", "gpt": "assistant", "function_call": "assistant",
            "observation": "tool"}


def find_files(name):
    """[paths] of the files of a pattern, or of a folder: one set of KINDS, in it or its data/.
    UserError.
    """
    path = Path(name)
    if not path.is_dir():
        found = sorted(glob.glob(name))
        require(found, f"{name}: cannot be read (No such file or directory); of the hub: hf download "
                       "OWNER/NAME --repo-type dataset --local-dir FOLDER")
        return found
    for place in (path, path / "data"):
        found = sorted(str(file) for file in place.glob("*") if file.suffix in KINDS)
        # shards of one set have one word before the numbers
        sets = {re.sub(r"[-_.][^/]*$", "", file) + "*" + Path(file).suffix for file in found}
        if len(sets) > 1:
            one = min(sets, key=lambda files: "train" not in files)
            raise UserError(f"{path}: holds the sets {', '.join(sorted(sets)[:12])}; give one: "
                            f"'{one}'")
        if found:
            return found
    raise UserError(f"{path}: has no files ending in {' or '.join(KINDS)}, nor has its data/")


def messages_of(record):
    """{"messages": ...} of a record of another form, or {}. ValueError."""
    if isinstance(record.get("conversations"), list):
        return {"messages": of_sharegpt(record)}
    if "prompt" in record and "completion" in record:       # TRL's
        sides = ("user", record["prompt"]), ("assistant", record["completion"])
        sides = [[{"role": role, "content": side}] if isinstance(side, str) else side
                 for role, side in sides]
        if not all(isinstance(side, list) for side in sides):
            raise ValueError('its "prompt" and "completion" are neither texts nor lists of '
                             "messages")
        return {"messages": sides[0] + sides[1]}
    if "instruction" in record and "output" in record:      # alpaca's
        parts = record["instruction"], record.get("input") or "", record["output"]
        if not all(isinstance(part, str) for part in parts):
            raise ValueError('its "instruction", "input" or "output" is not text')
        asked = "\n\n".join(part for part in parts[:2] if part)
        system = [{"role": "system", "content": record["system"]}] if record.get("system") else []
        return {"messages": [*system, *of_history(record.get("history")),
                             {"role": "user", "content": asked},
                             {"role": "assistant", "content": parts[2]}]}
    return {}


def of_history(history):
    """Messages of [[question, answer], ...]. ValueError."""
    history = history or []
    if not isinstance(history, list) or not all(
            isinstance(pair, list) and len(pair) == 2 for pair in history):
        raise ValueError('has a "history" that is no list of [question, answer]')
    return [{"role": role, "content": text} for pair in history
            for role, text in zip(("user", "assistant"), pair)]


def of_sharegpt(record):
    """Messages of ShareGPT's "conversations" and "system". ValueError.

    A turn from function_call is an answer that is one tool call, one from observation what the
    tool says.
    """
    turns = [{"from": "system", "value": record["system"]}] if record.get("system") else []
    messages = []
    for number, turn in enumerate([*turns, *record["conversations"]], 1):
        if not isinstance(turn, dict) or turn.keys() - {"weight"} != {"from", "value"}:
            raise ValueError(f'turn {number} of its "conversations" is not {{"from": ..., '
                             '"value": ...}')
        role = turn["from"] if isinstance(turn["from"], str) else None
        message = {"role": SHAREGPT.get(role, role), "content": turn["value"]}
        if role == "function_call":
            call = turn["value"]
            call = json_files.loads(call) if isinstance(call, str) else call
            message |= {"content": "", "tool_calls": [{"type": "function", "function": call}]}
        messages.append(message | ({"weight": turn["weight"]} if "weight" in turn else {}))
    return messages


def text_of(parts):
    """The text of a message's content in OpenAI's parts. ValueError for parts of other types."""
    texts = []
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise ValueError(f"has content of the type {kind}; only text is trained")
        texts.append(part["text"])
    return "".join(texts)
