"""Chats -> token ids and which of them are trained, proven against the chat template.

A chat is one JSON object per line, or a row of .parquet: {"messages": [{"role": "user", "content":
"..."}, {"role": "assistant", ...}]}, ShareGPT's "conversations", or "prompt" and "completion" (or
"response"). Only assistant turns are trained, unless their "weight" is 0. The tokenizer's own
template proves where an answer begins: the ids of the prompt (the messages before the answer, with
the generation prompt) must be the first ids of the whole chat. If this holds for their texts only
(an opened think block may share a token with what follows), the last answer is tokenised
separately, as generation writes it. If a template rewrites earlier turns, such as their thoughts,
each answer becomes a sample (split). All other chats are refused.
"""
import contextlib
import functools
import glob
import json
from pathlib import Path

from core import json_files
from core.cli import UserError, first_line, require
from core.packing import token_lists
from core.json_files import Problem

THINKING = {"template": {}, "true": {"enable_thinking": True}, "false": {"enable_thinking": False}}
SHAREGPT = {"from": "role", "value": "content", "human": "user", "gpt": "assistant"}
KNOWN = {"role", "content", "reasoning_content"}
KEYS = {"system": KNOWN, "developer": KNOWN, "user": KNOWN,         # {role: keys of a message}
        "assistant": KNOWN | {"tool_calls", "weight"}, "tool": KNOWN | {"tool_call_id", "name"}}
to_json = functools.partial(json.dumps, ensure_ascii=False)

# ---- Files -> conversations


@functools.cache
def files_of(name):
    """[paths] of a file, or of a pattern such as 'data/train-*.parquet'. UserError."""
    files = [str(name)] if Path(name).is_file() else sorted(glob.glob(str(name)))
    require(files, f"{name}: cannot be read (No such file or directory)")
    return files


def read_lines(path):
    """Yield each line, or row as a dict, of all files of a data set. UserError."""
    for name in files_of(path):
        with json_files.open_file(name) as file:
            yield from json_files.table_rows(name) if name.endswith(".parquet") else file


def read_records(path, problems, lines=None):
    """Yield (number, record) of numbered lines, by default of the whole data set, without messages
    after the last answer; append the faults of the others to `problems`. UserError."""
    for number, line in enumerate(read_lines(path), 1) if lines is None else lines:
        if not isinstance(line, dict) and not line.strip():
            continue
        try:
            record = normalize_record(line if isinstance(line, dict) else json_files.loads(line))
            while record["messages"] and record["messages"][-1]["role"] != "assistant":
                record["messages"].pop()
            require(record["messages"], "has no message of the assistant, so no answer to train")
            yield number, record
        except (UserError, ValueError) as error:
            problems.append(Problem(f"{path}:{number}", "invalid", error, path))


def normalize_record(record):
    """A record of any form with "messages" and "tools" as templates take them. UserError, or
    ValueError if a text in it is no JSON."""
    require(isinstance(record, dict), f"is a JSON {type(record).__name__}, not an object")
    messages = [normalize_message(f"message {number}", message)
                for number, message in enumerate(turns_of(record), 1)]
    require(messages, 'has no list "messages" of {"role": ..., "content": ...}')
    tools = record.get("tools")
    tools = json_files.loads(tools) if isinstance(tools, str) else tools
    functions_of(tools, 'its "tools"')
    require(not json_files.HALF_CHARACTER.search(to_json([messages, tools])),
            "holds half a character (\\ud800 to \\udfff)")
    return record | {"messages": messages, "tools": tools}


def turns_of(record):
    """Messages as a record has them, ShareGPT's turns, or a prompt and its completion; else []."""
    if isinstance(record.get("messages"), list):
        return record["messages"]
    sides = [record.get("prompt"), record.get("completion", record.get("response"))]
    if isinstance(record.get("conversations"), list):
        sides = [record["conversations"]]
    if None in sides:
        return []
    turns = [{"role": "system", "content": record["system"]}] if record.get("system") else []
    for role, side in zip(("user", "assistant"), sides):
        turns += side if isinstance(side, list) else [{"role": role, "content": side}]
    return turns


def normalize_message(name, message):
    """A message as templates take it: our names for ShareGPT's, a text also if it only has tool
    calls, and JSON for arguments of calls that servers send as text. UserError, ValueError."""
    message = message if isinstance(message, dict) else {}
    if message.keys() - {"weight"} == {"from", "value"}:
        message = {SHAREGPT.get(key, key): value for key, value in message.items()}
        message["role"] = SHAREGPT.get(str(message["role"]), message["role"])
    calls = functions_of(message.get("tool_calls"), f"{name}: its tool_calls")
    for call in calls:
        if isinstance(call.get("arguments"), str):
            call["arguments"] = json_files.loads(call["arguments"])
        require(isinstance(call.get("arguments", {}), dict),
                f"{name} has a tool call whose arguments are no JSON object")
    if calls:
        message = message | {"content": message.get("content") or ""}
    role, content = str(message.get("role")), message.get("content")
    require(role in KEYS, f"{name} has no role out of {', '.join(KEYS)}")
    require(isinstance(content, str) and isinstance(message.get("reasoning_content") or "", str),
            f"{name} has no text as its content; only text is trained, and parts are to be joined")
    require(role != "assistant" or content.strip() or calls, f"{name} is an empty answer")
    unknown = ", ".join(sorted(message.keys() - KEYS[role]))
    require(not unknown, f"{name} has {unknown}, which no chat template is sure to write")
    require(message.get("weight", 1) in (0, 1), f"{name} has the weight {message.get('weight')!r}; "
            "an answer is trained (1) or not (0)")
    return message


def functions_of(tools, name=""):
    """[{"name": ..., ...}] of tools or tool calls: their "function" or, without one, themselves.
    name: for the UserError."""
    with contextlib.suppress(AttributeError, KeyError, TypeError):
        functions = [tool.get("function", tool) for tool in tools or ()]
        if all(isinstance(each["name"], str) and each["name"] for each in functions):
            return functions
    raise UserError(f'{name} are no list of {{"function": {{"name": ..., ...}}}}')


def question(messages):
    """The text of the last user message, "" without one."""
    return next((m["content"] for m in reversed(messages) if m["role"] == "user"), "")


# ---- Conversations -> ids and mask


def load_tokenizer(folder, template=None):
    """Tokenizer of a model folder, its chat template or the Jinja file `template`. UserError."""
    from transformers import AutoTokenizer
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:      # of many kinds
        raise UserError(f"{folder}: no tokenizer can be loaded from it ({first_line(error)})")
    if template:
        tokenizer.chat_template = json_files.read_text(template)
    require(isinstance(tokenizer.chat_template, str), f"{folder}: its tokenizer has no chat "
            "template; give one with --chat_template FILE")
    return tokenizer


class Encoder:
    """Turns a record into samples: (ids, mask of the trained ids). turns: train "all" answers or
    the "last". options: of the template, as in THINKING. split: if one sample cannot hold all
    answers, each becomes one."""

    def __init__(self, tokenizer, turns="all", options=None, split=False):
        self.tokenizer, self.turns, self.split = tokenizer, turns, split
        self.lists, self.options = functools.partial(token_lists, tokenizer), options or {}
        added = tokenizer.added_tokens_decoder.items()
        self.special = {number: token.content for number, token in added if token.special}

    def encode(self, record):
        """[(ids, mask)] of a record of read_records. UserError."""
        require(record.get("teacher_messages") is None, '"teacher_messages" need --teacher_path')
        messages, tools = record["messages"], record.get("tools")
        content = to_json([messages, tools])
        tokens = [token for token in self.special.values() if to_json(token)[1:-1] in content]
        require(not tokens, f"contains the control token {', '.join(tokens)}; remove it")
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        answers = answers if self.turns == "all" else answers[-1:]
        answers = [i for i in answers if messages[i].get("weight", 1)]
        require(answers and 0 not in answers, "has no answer to train, or begins with one")
        try:
            turns = {i: [self.tokenizer.apply_chat_template(
                messages[:end], tokenize=False, add_generation_prompt=end == i, tools=tools,
                **self.options) for end in (i, i + 1)] for i in answers}
        except Exception as error:      # of Jinja, or of an expression in the template
            raise UserError(f"the chat template refuses it ({type(error).__name__}: {error})")
        check_rendered(messages[:answers[-1] + 1], tools, turns)
        try:
            return [self._mask([*turns.values()])]
        except UserError:
            if not self.split:
                raise
            return [self._mask([turn]) for turn in turns.values()]

    def _mask(self, turns):
        """(ids, mask) of a sample. turns: (text of the prompt, text of prompt and answer) of each
        trained answer; the last has the whole text. UserError."""
        lists = self.lists([text for turn in turns for text in turn])
        (prompt, text), (first, ids) = turns[-1], lists[-2:]
        if ids[:len(first)] != first and text.startswith(prompt):
            # tokenise the answer separately, if that decodes to the same text
            separate = [*first, *self.lists([text[len(prompt):]])[0]]
            decode = functools.partial(self.tokenizer.decode, clean_up_tokenization_spaces=False)
            if decode(separate) == decode(ids):
                lists[-1] = ids = separate
        mask = [False] * len(ids)
        for before, through in zip(lists[::2], lists[1::2]):
            require(ids[:len(before)] == before and ids[:len(through)] == through,
                    "the template's prompt is not how the whole begins; try --train_turns last")
            ends = [i + 1 for i in range(len(before), len(through)) if ids[i] in self.special]
            require(ends and not self.tokenizer.decode(ids[ends[-1]:len(through)]).strip(),
                    "the chat template does not end an answer with a special token; give another "
                    "with --chat_template FILE")
            mask[len(before):ends[-1]] = [True] * (ends[-1] - len(before))
        return ids, mask


def check_rendered(messages, tools, turns):
    """UserError if the chat template leaves out a tool or a part of a message.
    turns: {number of a trained message: (text of its prompt, text of prompt and answer)}."""
    first_prompt, conversation = turns[min(turns)][0], turns[max(turns)][1]
    lost, remedy = "the chat template leaves out", "; give --chat_template FILE"
    for tool in functions_of(tools):
        require(tool["name"] in first_prompt, f"{lost} the tool {tool['name']}{remedy}")
    schemas = to_json(tools or "")      # they have the names of calls as well
    for i, message in enumerate(messages):
        calls = functions_of(message.get("tool_calls"))
        text = message["content"].split("</think>")[-1].strip()     # without thoughts
        complete = text in conversation and all(
            conversation.count(call["name"]) > schemas.count(call["name"]) for call in calls)
        prompt, whole = turns.get(i, (None, ""))
        if i in turns and whole.startswith(prompt):     # otherwise _mask reports the tokens
            words = [text, (message.get("reasoning_content") or "").strip()]
            words += [word for call in calls for word in (call["name"], *call.get("arguments", {}))]
            complete &= all(word in whole[len(prompt):] for word in words)
        require(complete, f"{lost} a part of message {i + 1} ({message['role']}){remedy}")
