"""Chats -> token ids and which of them are trained, proven against the chat template.

One JSON object a line, or a row of .parquet: {"messages": [{"role": "user", "content": "..."},
{"role": "assistant", ...}]}, ShareGPT's "conversations", or "prompt" and "completion" (or
"response"). Only assistant turns are trained, but for "weight" 0. Where one begins is proven with
the tokenizer's own template: the ids of the prompt (all before it, with the generation prompt) must
be the first ids of the whole. Where only its text begins the whole (an opened think block may share
a token with what follows), the last answer is tokenised apart, as generation writes it. A template
that rewrites earlier turns, such as their thoughts, gives each answer a sample (split); one for
which nothing holds is refused.
"""
import copy
import functools
import glob
import itertools
import json
import os
import re
from collections import Counter
from pathlib import Path

from core import json_files
from core.cli import UserError, first_line, require
from core.packing import token_lists
from core.problems import problem

THINKING = {"template": None, "true": True, "false": False}     # --enable_thinking -> Encoder's
SHAREGPT = {"human": "user", "gpt": "assistant"}        # its names of roles
KNOWN = {"role", "content", "reasoning_content"}
KEYS = {"system": KNOWN, "developer": KNOWN, "user": KNOWN,         # {role: keys of a message}
        "assistant": KNOWN | {"tool_calls", "weight"}, "tool": KNOWN | {"tool_call_id", "name"}}
dumped = functools.partial(json.dumps, ensure_ascii=False)

# ---- Files -> conversations


@functools.cache
def files_of(name):
    """[paths] of a file, a pattern, or a folder's one set of .jsonl or .parquet. UserError."""
    path = Path(name)
    if not path.is_dir():
        found = [str(name)] if path.is_file() else sorted(glob.glob(str(name)))
        require(found, f"{name}: cannot be read (No such file or directory); of the hub: hf "
                       "download OWNER/NAME --repo-type dataset --local-dir FOLDER")
        return found
    found = sorted(str(file) for file in (*path.glob("*"), *path.glob("data/*"))
                   if file.suffix in (".jsonl", ".parquet"))
    # shards of one set have one word before the numbers
    sets = sorted({re.sub(r"[-_.][^/]*$", "", file) + "*" + Path(file).suffix for file in found})
    require(len(sets) == 1, f"{path}: needs one set of .jsonl or .parquet, in it or its data/; it "
            f"holds {', '.join(sets[:12]) or 'none'}; give one in quotes")
    return found


def lines_of(path):
    """Yield the lines, or the rows as dicts, of all files of a data set. UserError."""
    for name in files_of(path):
        with json_files.open_file(name) as file:
            yield from (json_files.table_rows(name) if name.endswith(".parquet")
                        else json_files.lines(file, name))


def parsed(value):
    """The value of a JSON text; anything else is a value already. ValueError."""
    return json_files.loads(value) if isinstance(value, (str, bytes)) else value


def usable(path, lines, problems):
    """Yield (number, record) of numbered lines; `problems` takes the faults of the others."""
    for number, line in lines:
        if not isinstance(line, dict) and not line.strip():
            continue
        check = "unreadable"
        try:
            if not isinstance(record := parsed(line), dict):
                raise ValueError(f"is a JSON {type(record).__name__}, and one object a line is "
                                 "read; of a list: jq -c '.[]' LIST > LINES.jsonl")
            check = "invalid"
            record = as_messages(record)
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
        yield list(usable(path, chunk, problems)), problems


def read_records(path, problems, numbers=None):
    """Yield (line number, record), of all lines or of these numbers; see usable. UserError."""
    return usable(path, (line for line in enumerate(lines_of(path), 1)
                         if numbers is None or line[0] in numbers), problems)


def as_messages(record, answered=True):
    """A record of a known form with the "messages" and "tools" that templates want. answered: it
    has to have an answer, and what follows the last is left out. ValueError: fault and remedy.
    """
    messages, turns, system = map(record.get, ("messages", "conversations", "system"))
    if not isinstance(messages, list):
        sides = record.get("prompt"), record.get("completion", record.get("response"))
        messages = turns if isinstance(turns, list) else [] if None in sides else [
            message for role, side in zip(("user", "assistant"), sides) for message in
            (side if isinstance(side, list) else [{"role": role, "content": side}])]
        messages = [{"role": "system", "content": system}] * bool(system and messages) + messages
    record = record | {"messages": list(map(as_message, messages))}
    if "tools" in record:
        record["tools"] = parsed(record["tools"])
    check_messages(record)
    group_key(record)
    if answered and all(message["role"] != "assistant" for message in record["messages"]):
        raise ValueError(f"ends with a message of the {record['messages'][-1]['role']}, "
                         "so there is no answer to train; drop it")
    while answered and record["messages"][-1]["role"] != "assistant":
        record["messages"].pop()
    return record


def as_message(message):
    """A message as templates take it: keys of ShareGPT become ours, one that only has calls gets an
    empty text, and arguments of calls, which servers send as text, JSON values. ValueError.
    """
    if isinstance(message, dict) and message.keys() - {"weight"} == {"from", "value"}:
        names = {"from": "role", "value": "content"}
        message = {names.get(key, key): value for key, value in message.items()}
        message["role"] = SHAREGPT.get(str(message["role"]), message["role"])
    calls = message.get("tool_calls") if isinstance(message, dict) else None
    if isinstance(calls, list) and calls:
        calls = copy.deepcopy(calls)
        for call in map(called, calls):
            if "arguments" in call:
                call["arguments"] = parsed(call["arguments"])
        message = message | {"content": message.get("content") or "", "tool_calls": calls}
    return message


def called(tool):
    """The dict that has a tool's, or a tool call's, name: the tool, or its "function"."""
    inner = tool.get("function", tool) if isinstance(tool, dict) else {}
    return inner if isinstance(inner, dict) else {}


def group_key(record):
    """The record's integer "id", or None for another kind. ValueError for one out of range."""
    key = record.get("id")
    if type(key) is int and not 0 <= key < 2**63:
        raise ValueError(f'has the "id" {key}; give a whole number from 0 to 2**63 - 1, or none')
    return key if type(key) is int else None


def check_messages(record):
    """ValueError for messages or tools of a record that cannot be used."""
    messages, tools = record.get("messages"), record.get("tools") or []
    if not messages or not isinstance(messages, list):
        raise ValueError('has no list "messages", so it is not a chat; give {"messages": [{"role": '
                         '"user", "content": ...}, {"role": "assistant", "content": ...}]}')
    if not isinstance(tools, list) or not all(
            called(tool).get("name") and isinstance(called(tool)["name"], str) for tool in tools):
        raise ValueError('its "tools" are no list of {"function": {"name": ..., ...}}')
    for number, message in enumerate(messages, 1):
        fields = message if isinstance(message, dict) else {}
        role, content, calls = (fields.get(key) for key in ("role", "content", "tool_calls"))
        texts, calls = [content, fields.get("reasoning_content") or ""], calls or []
        if role not in list(KEYS):      # nor is one that is a list itself
            why = f" has no role out of {', '.join(KEYS)}"
        elif not all(isinstance(text, str) for text in texts):
            why = " has no text as its content; only text is trained, and parts are to be joined"
        elif json_files.HALF_CHARACTER.search("".join(texts)):
            why = " holds half a character (\\ud800 to \\udfff)"
        elif role == "assistant" and not content.strip() and not calls:
            why = " is an empty answer; drop the line"
        elif other := message.keys() - KEYS[role]:
            why = (f" has {', '.join(sorted(other))}, which no chat template is sure to write; "
                   f"remove it, known are {', '.join(sorted(KEYS[role]))}")
        elif not isinstance(calls, list) or not all(
                isinstance(called(call).get("name"), str)
                and isinstance(called(call).get("arguments", {}), dict) for call in calls):
            why = ': its tool_calls are no list of {"name": "...", "arguments": {...}}'
        elif message.get("weight", 1) not in (0, 1):
            why = f" has the weight {message['weight']!r}; an answer is trained (1) or not (0)"
        else:
            continue
        raise ValueError(f"message {number}{why}")


def as_question(record):
    """(messages up to a question, tools or None, whether its answer was left out). ValueError."""
    record = as_messages(record, answered=False)
    messages = record["messages"]
    answered = messages[-1]["role"] == "assistant"
    messages = messages[:-1] if answered else messages
    if (not messages or messages[-1]["role"] not in ("user", "tool")
            or not question(messages).strip()):
        raise ValueError("has no user message with text before the answer that is asked for")
    return messages, record.get("tools") or None, answered


def question(messages):
    """The text of the last user message, "" without one."""
    return next((m["content"] for m in reversed(messages) if m["role"] == "user"), "")


def plain(message):
    """The text of a message, without thoughts."""
    return message["content"].split("</think>")[-1].strip()


# ---- Conversations -> ids and mask


def load_tokenizer(folder, template=None):
    """Tokenizer of a model folder, its chat template or the Jinja file `template`. UserError."""
    from transformers import AutoTokenizer
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:      # of many kinds
        raise UserError(f"{folder}: no tokenizer can be loaded from it "
                        f"({first_line(error)})")
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
    """Conversations -> (ids, mask of the trained ones), proven. turns: "all" or the "last" answer.
    thinking: the template's enable_thinking. split: a list of samples where one cannot hold all.
    """

    def __init__(self, tokenizer, turns="all", thinking=None, split=False):
        self.tokenizer, self.turns, self.split = tokenizer, turns, split
        self.lists = token_lists(tokenizer)
        self.options = {} if thinking is None else {"enable_thinking": thinking}
        added = tokenizer.added_tokens_decoder.items()
        self.special = {number: token.content for number, token in added if token.special}
        # longest first, as json.dumps writes them
        texts = (re.escape(dumped(text)[1:-1]) for text in self.special.values())
        self.control = re.compile("|".join(sorted(texts, key=len, reverse=True)) or r"(?!)")
        self.ends = Counter()   # ids that trained turns ended with

    def encode(self, chats, tools=None):
        """[messages], [tools or None] -> [(ids, mask) or the ValueError that says why not]."""
        found = [attempt(self._turns, *pair) for pair in zip(chats, tools or [None] * len(chats))]
        turns = [turn for some in found if isinstance(some, list) for turn in some]
        texts = list(set(itertools.chain.from_iterable(turns)))
        ids = dict(zip(texts, self.lists(texts)))
        for i, turns in enumerate(found):
            if isinstance(turns, list):
                found[i] = attempt(self._mask, turns, ids)
                if isinstance(found[i], ValueError) and self.split and len(turns) > 1:
                    found[i] = attempt(lambda ts=turns: [self._mask([turn], ids) for turn in ts])
        return found

    def _turns(self, messages, tools):
        """[(prompt, prompt and answer)]: texts of the trained turns. ValueError."""
        schemas = dumped(tools or "")
        texts = {f"message {number} contains": dumped(m) for number, m in enumerate(messages, 1)}
        for what, text in (texts | {"its tools contain": schemas}).items():
            if found := self.control.search(text):
                raise ValueError(f"{what} the control token {found[0]}; remove it")
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        answers = answers[0 if self.turns == "all" else -1:]
        answers = [i for i in answers if messages[i].get("weight", 1)]
        if not answers or 0 in answers:
            raise ValueError("has no answer to train that is not of weight 0, or begins with an "
                             "answer, so nothing is asked before it; drop the line")
        try:
            turns = [tuple(self.tokenizer.apply_chat_template(
                messages[:end], tokenize=False, add_generation_prompt=end == i, tools=tools,
                **self.options) for end in (i, i + 1)) for i in answers]
        except Exception as error:      # Jinja's, and whatever a template's expressions raise
            raise ValueError(f"the chat template refuses it ({type(error).__name__}: {error})")
        # words that a text must have, and more often than another has them
        needed = [(f"the tool {name}", [name], turns[0][0], "")
                  for name in (called(tool)["name"] for tool in tools or ())]
        for i, message in enumerate(messages[:answers[-1] + 1]):
            calls = [called(call) for call in message.get("tool_calls") or ()]
            prompt, whole = turns[answers.index(i)] if i in answers else ("-", "")
            if whole.startswith(prompt):        # else _mask names the tokens
                words = [plain(message), (message.get("reasoning_content") or "").strip()]
                words += [word for c in calls for word in (c["name"], *c.get("arguments", {}))]
                needed.append((f"the answer, the reasoning or a tool call of message {i + 1}",
                               words, whole[len(prompt):], ""))
            text = f"the text of message {i + 1} ({message['role']})"
            needed += [(text, [plain(message)], turns[-1][1], ""),
                       (text, [call["name"] for call in calls], turns[-1][1], schemas)]
        for what, words, text, other in needed:
            if any(text.count(word) <= other.count(word) for word in words):
                raise ValueError(f"the chat template leaves out {what}; give another with "
                                 "--chat_template FILE, or drop the line")
        return turns

    def _mask(self, turns, ids_of):
        """_turns' turns, {text: ids} -> (ids, mask) of the last turn's text. ValueError."""
        parts = [[ids_of[prompt], ids_of[text]] for prompt, text in turns]
        (prompt, text), (first, ids) = turns[-1], parts[-1]
        if ids[:len(first)] != first and text.startswith(prompt):
            # tokenised apart, if both give the same text
            apart = [*first, *self.lists([text[len(prompt):]])[0]]
            decode = functools.partial(self.tokenizer.decode, clean_up_tokenization_spaces=False)
            parts[-1][1] = ids = apart if decode(apart) == decode(ids) else ids
        mask = [False] * len(ids)
        for number, (before, upto) in enumerate(parts, 1):
            for part, whole, what in ((before, upto, "prompt"), (upto, ids, "conversation so far")):
                if whole[:len(part)] != part:
                    at = len(os.path.commonprefix([part, whole]))
                    theirs, ours = (self.tokenizer.decode(b[at:at + 1]) for b in (part, whole))
                    raise ValueError(
                        f"trained turn {number}: by this chat template the {what} is not how the "
                        f"whole begins: token {at} is {theirs!r} there, {ours!r} in the whole. Try "
                        "another --enable_thinking, --train_turns last, or --chat_template FILE")
            stop = len(upto)
            while stop > len(before) and ids[stop - 1] not in self.special \
                    and not self.tokenizer.decode([ids[stop - 1]]).strip():     # white space
                stop -= 1
            if stop == len(before) or ids[stop - 1] not in self.special:
                raise ValueError("the chat template does not end an answer with a special token, "
                                 "so the model would not learn to stop; give another with "
                                 "--chat_template FILE")
            self.ends[ids[stop - 1]] += 1
            mask[len(before):stop] = [True] * (stop - len(before))
        return ids, mask
