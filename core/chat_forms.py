"""Other forms of chats than JSONL of "messages": imported where a data set has one.

Folders, patterns and the hub's names; parquet and arrow; ShareGPT, TRL, alpaca, OpenAI's parts of content.
"""
import glob
from pathlib import Path

from core import hub
from core.cli import UserError
from core import json_files

KINDS = (".parquet", ".jsonl")                          # of a data set's files in a folder or on the hub
# its names of roles, beside chat.ROLES
SHAREGPT = {"human": "user", "gpt": "assistant", "function_call": "assistant", "observation": "tool"}


def find_files(name):
    """chat.files_of for what is not a file: a folder, a pattern, or a name on the hub, downloaded. UserError."""
    path = Path(name)
    if path.is_dir():
        if saved := hub.saved_shards(path):
            return [str(file) for file in saved]
        for place in (path, path / "data"):
            if found := sorted(str(file) for file in place.glob("*") if file.suffix in KINDS):
                hub.one_set(path, found, str)
                return found
        raise UserError(f"{path}: has no files ending in {' or '.join(KINDS)}, nor has its data/")
    if not path.exists() and (found := sorted(glob.glob(name))):
        return found
    if not path.exists() and hub.may_be(name):
        return [hub.download(shard) for shard in hub.find_shards(name, KINDS)]
    return [name]


def of_sharegpt(record):
    """The record with "messages" made of ShareGPT's "conversations" and "system", where it has those; else itself.

    A turn from function_call is an answer that is one tool call, one from observation what the tool says.
    """
    if not isinstance(record.get("conversations"), list):
        return record
    turns = [{"from": "system", "value": record["system"]}] if record.get("system") else []
    messages = []
    for number, turn in enumerate([*turns, *record["conversations"]], 1):
        if not isinstance(turn, dict) or turn.keys() - {"weight"} != {"from", "value"}:
            raise ValueError(f'turn {number} of its "conversations" is not {{"from": ..., "value": ...}}')
        role = turn["from"] if isinstance(turn["from"], str) else None
        message = {"role": SHAREGPT.get(role, role), "content": turn["value"]}
        if role == "function_call":
            call = json_files.loads(turn["value"]) if isinstance(turn["value"], str) else turn["value"]
            message |= {"content": "", "tool_calls": [{"type": "function", "function": call}]}
        messages.append(message | ({"weight": turn["weight"]} if "weight" in turn else {}))
    return record | {"messages": messages}


def of_pair(record):
    """{"messages"} of TRL's "prompt" and "completion", texts or lists of messages, or of alpaca's "instruction",
    "input", "output", "system" and "history"; else {}.
    """
    if "prompt" in record and "completion" in record:
        sides = [[{"role": role, "content": side}] if isinstance(side, str) else side for role, side in
                 (("user", record["prompt"]), ("assistant", record["completion"]))]
        if not all(isinstance(side, list) for side in sides):
            raise ValueError('its "prompt" and "completion" are neither texts nor lists of messages')
        return {"messages": sides[0] + sides[1]}
    if "instruction" not in record or "output" not in record:
        return {}
    parts = [record["instruction"], record.get("input")]
    if not all(isinstance(part, str) for part in (parts[0], parts[1] or "", record["output"])):
        raise ValueError('its "instruction", "input" or "output" is not text')
    asked = "\n\n".join(part for part in parts if part)
    messages = [{"role": "system", "content": record["system"]}] if record.get("system") else []
    history = record.get("history") or []
    if not isinstance(history, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in history):
        raise ValueError('its "history" is not a list of [question, answer]')
    for pair in history:
        messages += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    return {"messages": [*messages, {"role": "user", "content": asked},
                         {"role": "assistant", "content": record["output"]}]}


def with_text(message):
    """A message whose content is a list of OpenAI's parts with one text instead. ValueError for other parts."""
    if not isinstance(message, dict) or not isinstance(message.get("content"), list):
        return message
    texts = []
    for part in message["content"]:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise ValueError(f"has content of the type {kind}; only text is trained")
        texts.append(part["text"])
    return message | {"content": "".join(texts)}
