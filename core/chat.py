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
import functools
import glob
import itertools
import json
import re
from collections import Counter
from pathlib import Path

from core import json_files
from core.cli import UserError, first_line, require
from core.packing import token_lists
from core.json_files import problem

THINKING = {"template": None, "true": True, "false": False}     # --enable_thinking -> Encoder's
SHAREGPT = {"human": "user", "gpt": "assistant"}        # its names of roles
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


def lines_of(path):
    """Yield the lines, or the rows as dicts, of all files of a data set. UserError."""
    for name in files_of(path):
        with json_files.open_file(name) as file:
            yield from json_files.table_rows(name) if name.endswith(".parquet") else file


def parse_json(value):
    """The value of a JSON text; anything else is a value already. ValueError."""
    return json_files.loads(value) if isinstance(value, (str, bytes)) else value


def parse_lines(path, lines, problems):
    """Yield (number, record) of numbered lines; append the faults of the others to `problems`."""
    for number, line in lines:
        if not isinstance(line, dict) and not line.strip():
            continue
        check = "unreadable"
        try:
            record = parse_json(line)
            if not isinstance(record, dict):
                raise ValueError(f"is a JSON {type(record).__name__}, and one object a line is "
                                 "read")
            check = "invalid"
            record = normalize_record(record)
        except ValueError as error:
            problems.append(problem(f"{path}:{number}", check, error, path))
        else:
            yield number, record


def read_chunks(path, size, first=0, step=1):
    """Yield ([(line number, record)], [problem]) of every `step`-th chunk of lines. UserError."""
    lines = enumerate(lines_of(path), 1)
    chunks = iter(lambda: list(itertools.islice(lines, size)), [])
    for chunk in itertools.islice(chunks, first, None, step):
        problems = []
        yield list(parse_lines(path, chunk, problems)), problems


def read_records(path, problems, numbers=None):
    """parse_lines() of a data set, of all its lines or of these numbers. UserError."""
    return parse_lines(path, (line for line in enumerate(lines_of(path), 1)
                              if numbers is None or line[0] in numbers), problems)


def normalize_record(record, answered=True):
    """A record in any known form with the "messages" and "tools" that templates take. answered:
    require an answer, and drop the messages after the last answer. ValueError."""
    record = record | {"messages": list(map(normalize_message, turns_of(record)))}
    if "tools" in record:
        record["tools"] = parse_json(record["tools"])
    check_messages(record)
    if answered and all(message["role"] != "assistant" for message in record["messages"]):
        raise ValueError("has no message of the assistant, so there is no answer to train")
    while answered and record["messages"][-1]["role"] != "assistant":
        record["messages"].pop()
    return record


def turns_of(record):
    """Messages as a record has them, ShareGPT's turns, or a prompt and its completion; else []."""
    messages, prompt = record.get("messages"), record.get("prompt")
    answer = record.get("completion", record.get("response"))
    if isinstance(messages, list):
        return messages
    messages = record.get("conversations")
    if not isinstance(messages, list):
        messages = []
        if prompt is not None and answer is not None:
            for role, side in ("user", prompt), ("assistant", answer):
                messages += side if isinstance(side, list) else [{"role": role, "content": side}]
    if messages and record.get("system"):
        messages = [{"role": "system", "content": record["system"]}, *messages]
    return messages


def normalize_message(message):
    """A message as templates take it. ShareGPT's keys become ours; a message with only tool calls
    gets an empty text; arguments of calls, which servers send as text, become JSON. ValueError."""
    if not isinstance(message, dict):
        return message      # check_messages refuses it
    if message.keys() - {"weight"} == {"from", "value"}:
        names = {"from": "role", "value": "content"}
        message = {names.get(key, key): value for key, value in message.items()}
        message["role"] = SHAREGPT.get(str(message["role"]), message["role"])
    calls = message.get("tool_calls")
    if isinstance(calls, list) and calls:
        for call in map(function_of, calls):
            if "arguments" in call:
                call["arguments"] = parse_json(call["arguments"])
        message = message | {"content": message.get("content") or ""}
    return message


def function_of(tool):
    """The dict with the name of a tool or a tool call: its "function" or, without one, itself."""
    inner = tool.get("function", tool) if isinstance(tool, dict) else {}
    return inner if isinstance(inner, dict) else {}


def check_messages(record):
    """ValueError unless the messages and tools of a record can be used."""
    messages, tools = record.get("messages"), record.get("tools") or []
    if not messages or not isinstance(messages, list):
        raise ValueError('has no list "messages"; give {"messages": [{"role": "user", "content": '
                         '...}, {"role": "assistant", "content": ...}]}')
    names = [function_of(tool).get("name") for tool in tools] if isinstance(tools, list) else [None]
    if not all(name and isinstance(name, str) for name in names):
        raise ValueError('its "tools" are no list of {"function": {"name": ..., ...}}')
    for number, message in enumerate(messages, 1):
        fields = message if isinstance(message, dict) else {}
        role, content, calls = (fields.get(key) for key in ("role", "content", "tool_calls"))
        texts, calls = [content, fields.get("reasoning_content") or ""], calls or []
        if role not in list(KEYS):      # a list, as the role may be unhashable
            why = f" has no role out of {', '.join(KEYS)}"
        elif not all(isinstance(text, str) for text in texts):
            why = " has no text as its content; only text is trained, and parts are to be joined"
        elif json_files.HALF_CHARACTER.search("".join(texts)):
            why = " holds half a character (\\ud800 to \\udfff)"
        elif role == "assistant" and not content.strip() and not calls:
            why = " is an empty answer; drop the line"
        elif unknown := message.keys() - KEYS[role]:
            why = f" has {', '.join(sorted(unknown))}, which no chat template is sure to write"
        elif not isinstance(calls, list) or not all(
                isinstance(function_of(call).get("name"), str)
                and isinstance(function_of(call).get("arguments", {}), dict) for call in calls):
            why = ': its tool_calls are no list of {"name": "...", "arguments": {...}}'
        elif message.get("weight", 1) not in (0, 1):
            why = f" has the weight {message['weight']!r}; an answer is trained (1) or not (0)"
        else:
            continue
        raise ValueError(f"message {number}{why}")


def question(messages):
    """The text of the last user message, "" without one."""
    return next((m["content"] for m in reversed(messages) if m["role"] == "user"), "")


def answer_text(message):
    """The text of a message, without thoughts."""
    return message["content"].split("</think>")[-1].strip()


# ---- Conversations -> ids and mask


def load_tokenizer(folder, template=None):
    """Tokenizer of a model folder, its chat template or the Jinja file `template`. UserError."""
    from transformers import AutoTokenizer
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:      # of many kinds
        raise UserError(f"{folder}: no tokenizer can be loaded from it ({first_line(error)})")
    if template:
        tokenizer.chat_template = json_files.read_text(template, "--chat_template ")
    require(isinstance(tokenizer.chat_template, str), f"{folder}: its tokenizer has no chat "
            "template; give one with --chat_template FILE")
    return tokenizer


def attempt(function, *args):
    """function(*args), or the ValueError that it raises."""
    try:
        return function(*args)
    except ValueError as error:
        return error


class Encoder:
    """Turns a conversation into (ids, mask of the trained ids). turns: train "all" answers or the
    "last". thinking: the template's enable_thinking. split: into samples if one cannot hold all."""

    def __init__(self, tokenizer, turns="all", thinking=None, split=False):
        self.tokenizer, self.turns, self.split = tokenizer, turns, split
        self.lists = token_lists(tokenizer)
        self.options = {} if thinking is None else {"enable_thinking": thinking}
        added = tokenizer.added_tokens_decoder.items()
        self.special = {number: token.content for number, token in added if token.special}
        texts = (re.escape(to_json(text)[1:-1]) for text in self.special.values())
        self.control = re.compile("|".join(texts) or r"(?!)")
        self.ends = Counter()   # ids that trained turns ended with

    def encode(self, chats, tools=None):
        """[messages], [tools or None] -> [(ids, mask), or the ValueError that explains why not]."""
        rendered = [attempt(self._render, *pair)
                    for pair in zip(chats, tools or [None] * len(chats))]
        texts = list({text for turns in rendered if not isinstance(turns, ValueError)
                      for turn in turns for text in turn})
        ids = dict(zip(texts, self.lists(texts)))
        return [turns if isinstance(turns, ValueError) else self._sample(turns, ids)
                for turns in rendered]

    def _sample(self, turns, ids_of):
        """(ids, mask) of rendered turns, a list of them if they are split, or a ValueError."""
        sample = attempt(self._mask, turns, ids_of)
        if isinstance(sample, ValueError) and self.split and len(turns) > 1:
            return attempt(lambda: [self._mask([turn], ids_of) for turn in turns])
        return sample

    def _render(self, messages, tools):
        """[(text of the prompt, text of prompt and answer)] of the trained turns. ValueError."""
        if match := self.control.search(to_json([messages, tools])):
            raise ValueError(f"contains the control token {match[0]}; remove it")
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        answers = answers if self.turns == "all" else answers[-1:]
        answers = [i for i in answers if messages[i].get("weight", 1)]
        if not answers or 0 in answers:
            raise ValueError("has no answer to train (weight 0), or begins with an answer")
        try:
            turns = [tuple(self.tokenizer.apply_chat_template(
                messages[:end], tokenize=False, add_generation_prompt=end == i, tools=tools,
                **self.options) for end in (i, i + 1)) for i in answers]
        except Exception as error:      # of Jinja, or of an expression in the template
            raise ValueError(f"the chat template refuses it ({type(error).__name__}: {error})")
        check_rendered(messages[:answers[-1] + 1], tools, dict(zip(answers, turns)))
        return turns

    def _mask(self, turns, ids_of):
        """(ids, mask) of the last turn's text. ids_of: {text: ids}. ValueError."""
        parts = [[ids_of[prompt], ids_of[text]] for prompt, text in turns]
        (prompt, text), (first, ids) = turns[-1], parts[-1]
        if ids[:len(first)] != first and text.startswith(prompt):
            # tokenise the answer separately, if that decodes to the same text
            separate = [*first, *self.lists([text[len(prompt):]])[0]]
            decode = functools.partial(self.tokenizer.decode, clean_up_tokenization_spaces=False)
            if decode(separate) == decode(ids):
                parts[-1][1] = ids = separate
        mask = [False] * len(ids)
        for number, (before, through) in enumerate(parts, 1):
            if through[:len(before)] != before or ids[:len(through)] != through:
                raise ValueError(f"trained turn {number}: by this chat template the prompt is not "
                                 "how the whole begins; try --train_turns last")
            ends = [i + 1 for i in range(len(before), len(through)) if ids[i] in self.special]
            if not ends or self.tokenizer.decode(ids[ends[-1]:len(through)]).strip():
                raise ValueError("the chat template does not end an answer with a special token; "
                                 "give another with --chat_template FILE")
            self.ends[ids[ends[-1] - 1]] += 1
            mask[len(before):ends[-1]] = [True] * (ends[-1] - len(before))
        return ids, mask


def check_rendered(messages, tools, turns):
    """ValueError if the chat template leaves out a tool or a part of a message.
    turns: {index of a trained message: (text of its prompt, text of prompt and answer)}."""
    def check(complete, subject):
        if not complete:
            raise ValueError(f"the chat template leaves out {subject}; give --chat_template FILE")
    first_prompt, conversation = turns[min(turns)][0], turns[max(turns)][1]
    schemas = to_json(tools or "")      # these have the names of calls as well
    for name in (function_of(tool)["name"] for tool in tools or ()):
        check(name in first_prompt, f"the tool {name}")
    for i, message in enumerate(messages):
        calls = [function_of(call) for call in message.get("tool_calls") or ()]
        complete = answer_text(message) in conversation and all(
            conversation.count(call["name"]) > schemas.count(call["name"]) for call in calls)
        prompt, whole = turns.get(i, ("", ""))
        if i in turns and whole.startswith(prompt):     # otherwise _mask reports the tokens
            words = [answer_text(message), (message.get("reasoning_content") or "").strip()]
            words += [word for c in calls for word in (c["name"], *c.get("arguments", {}))]
            complete &= all(word in whole[len(prompt):] for word in words)
        check(complete, f"a part of message {i + 1} ({message['role']})")
