"""Chats -> token ids and which of them are trained, proven against the chat template.

One JSON object a line, or a row of .parquet: {"messages": [{"role": "user", "content": "..."},
{"role": "assistant", ...}]}, ShareGPT's "conversations", or "prompt" and "completion" (or
"response"). Only assistant turns are trained. Where one begins is proven with the tokenizer's own
template: the ids of the prompt (all messages before it, with the generation prompt) must be the
first ids of the whole conversation. Where its text begins the whole, but not its ids (an opened
think block may share a token with what follows), the last answer is tokenised apart, as generation
writes it. A template that rewrites earlier turns, such as their thoughts, gives each answer a
sample, with the template's text at that turn (split); one for which nothing holds is refused.
White space after a turn's special token is not trained, nor is an answer of "weight" 0.
"""
import functools
import glob
import itertools
import json
import os
import re
from collections import Counter
from pathlib import Path

from core import json_files
from core.cli import UserError, require
from core.packing import token_lists
from core.problems import problem

THINKING = {"template": None, "true": True, "false": False}     # --enable_thinking -> Encoder's
KINDS = (".parquet", ".jsonl")                          # of a data set's files in a folder
SHAREGPT = {"human": "user", "gpt": "assistant"}        # its names of roles
KNOWN = {"role", "content", "reasoning_content"}
KEYS = {"system": KNOWN, "developer": KNOWN, "user": KNOWN,         # {role: keys of a message}
        "assistant": KNOWN | {"tool_calls", "weight"}, "tool": KNOWN | {"tool_call_id", "name"}}
FORMS = ('has no list "messages", so it is not a chat; give {"messages": [{"role": "user", '
         '"content": ...}, {"role": "assistant", "content": ...}]}')

# ---- Files -> conversations


def group_key(record):
    """The record's integer "id", or None for another kind. ValueError for one out of range."""
    key = record.get("id")
    if type(key) is int and not 0 <= key < 2**63:
        raise ValueError(f'has the "id" {key}; give a whole number from 0 on, below 2**63, or '
                         "leave it out")
    return key if type(key) is int else None


def numbered_lines(path, size):
    """Yield (number from 1, line, or row as a dict) of all files of a data set; UserError. size:
    rows of a table read together.
    """
    number = 0
    for name in files_of(path):
        with json_files.open_file(name) as file:
            table = Path(name).suffix == ".parquet"
            for line in (json_files.table_rows(name, size) if table
                         else json_files.lines(file, name)):
                number += 1
                yield number, line


def read_chunks(path, size, first=0, step=1):
    """Yield (records, problems) of every `step`-th chunk of `size` lines from chunk `first` on:
    [(line number, record with messages that can be used)], [problem] of others, nothing of empty
    lines. Raises UserError when the file cannot be read.
    """
    lines = numbered_lines(path, size)
    for number, chunk in enumerate(iter(lambda: list(itertools.islice(lines, size)), [])):
        if number < first or (number - first) % step:
            continue
        records, problems = [], []
        for place, line in chunk:
            if not isinstance(line, dict) and not line.strip():
                continue
            check = "unreadable"
            try:
                if not isinstance(record := parsed(line), dict):
                    raise ValueError(
                        f"is a JSON {type(record).__name__}, and one object a line is read; a list "
                        "becomes lines by: jq -c '.[]' LIST > LINES.jsonl")
                check, record = "invalid", as_messages(record)
                check_messages(record)
                group_key(record)
                records.append((place, record))
            except ValueError as error:
                problems.append(problem(f"{path}:{place}", check, error, path))
        yield records, problems


def read_records(path, problems):
    """Yield read_chunks' (line number, record); its problems go to the list `problems`."""
    for records, wrong in read_chunks(path, 1):
        problems.extend(wrong)
        yield from records


def parsed(value):
    """The value of a JSON text; anything else is a value already. ValueError."""
    return json_files.loads(value) if isinstance(value, (str, bytes)) else value


def records_at(path, numbers):
    """Yield (line number, record) of these lines of read_records' file, which could be used."""
    return ((number, as_messages(parsed(line))) for number, line in numbered_lines(path, 1)
            if number in numbers)


def as_messages(record, trained=True):
    """The record with the messages and tools that templates want, whichever known form it has.
    trained: what follows the last answer is left out, as nothing there is trained. ValueError.
    """
    messages = record.get("messages")
    if not isinstance(messages, list):
        messages = messages_of(record)
    messages = [as_message(m) if isinstance(m, dict) else m for m in messages]
    roles = [m.get("role") if isinstance(m, dict) else None for m in messages]
    if trained and "assistant" in roles and roles[-1] in list(KEYS):
        messages = messages[:len(roles) - roles[::-1].index("assistant")]
    tools = {"tools": parsed(record["tools"])} if "tools" in record else {}
    return record | {"messages": messages} | tools


def as_message(message):
    """A message as templates want it: arguments of tool calls are JSON values, which servers send
    as text; one that is nothing but calls has an empty text, one in OpenAI's parts has one text.
    ValueError.
    """
    content, calls = message.get("content"), message.get("tool_calls")
    if isinstance(content, list):
        if not all(isinstance(part, dict) and part.get("type") == "text"
                   and isinstance(part.get("text"), str) for part in content):
            raise ValueError("has content of a type that is not text; only text is trained")
        message = message | {"content": "".join(part["text"] for part in content)}
    if isinstance(calls, list) and calls:
        message = message | {"content": message.get("content") or "",
                             "tool_calls": list(map(_with_arguments, calls))}
    return message


def _with_arguments(call):
    if isinstance(call, dict) and isinstance(call.get("function"), dict):
        return call | {"function": _with_arguments(call["function"])}
    has_text = isinstance(call, dict) and isinstance(call.get("arguments"), str)
    return call | {"arguments": json_files.loads(call["arguments"])} if has_text else call


def messages_of(record):
    """Messages of a record of another form, [] where it has none. ValueError."""
    turns, system = record.get("conversations"), record.get("system")
    system = [{"role": "system", "content": system}] if system else []
    if isinstance(turns, list):         # ShareGPT's
        if not all(isinstance(turn, dict) and isinstance(turn.get("from"), str)
                   and turn.keys() - {"weight"} == {"from", "value"} for turn in turns):
            raise ValueError('its "conversations" are no list of {"from": ..., "value": ...}')
        return system + [{"role": SHAREGPT.get(turn["from"], turn["from"]),
                          "content": turn["value"]}
                         | ({"weight": turn["weight"]} if "weight" in turn else {})
                         for turn in turns]
    sides = record.get("prompt"), record.get("completion", record.get("response"))
    if None in sides:
        return []
    sides = [[{"role": role, "content": side}] if isinstance(side, str) else side
             for role, side in zip(("user", "assistant"), sides)]
    if not all(isinstance(side, list) for side in sides):
        raise ValueError('its "prompt" and "completion" are neither texts nor lists of messages')
    return system + sides[0] + sides[1]


def as_question(record):
    """(messages that end with a question, tools or None, whether its answer was left out) of a
    record that a teacher is to answer. ValueError.
    """
    record = as_messages(record, trained=False)
    messages = check_messages(record, answered=False)
    answered = messages[-1]["role"] == "assistant"
    messages = messages[:-1] if answered else messages
    if not messages or messages[-1]["role"] not in ("user", "tool"):
        raise ValueError("has no user message before the answer that is asked for")
    for number, message in enumerate(messages, 1):
        if not message["content"].strip() and not message.get("tool_calls"):
            raise ValueError(f"has no text in message {number}")
    return messages, record.get("tools") or None, answered


def question(messages):
    """The text of the last user message, "" without one."""
    return next((m["content"] for m in reversed(messages) if m["role"] == "user"), "")


@functools.cache
def files_of(name):
    """[paths] of what holds a data set's lines: of a file, of the files of a pattern, or of a
    folder's one set of KINDS, in it or its data/. UserError.
    """
    path = Path(name)
    if not path.is_dir():
        found = [str(name)] if path.is_file() else sorted(glob.glob(str(name)))
        require(found, f"{name}: cannot be read (No such file or directory); of the hub: hf "
                       "download OWNER/NAME --repo-type dataset --local-dir FOLDER")
        return found
    found = next(filter(None, (sorted(str(file) for file in place.glob("*") if file.suffix in KINDS)
                               for place in (path, path / "data"))), [])
    # shards of one set have one word before the numbers
    sets = {re.sub(r"[-_.][^/]*$", "", file) + "*" + Path(file).suffix for file in found}
    require(sets, f"{path}: has no files ending in {' or '.join(KINDS)}, nor has its data/")
    require(len(sets) == 1, f"{path}: holds the sets {', '.join(sorted(sets)[:12])}; give one: "
            f"'{min(sets, key=lambda files: 'train' not in files, default='')}'")
    return found


def called(tool):
    """The dict that has a tool's, or a tool call's, name: the tool, or its "function"."""
    inner = tool.get("function", tool) if isinstance(tool, dict) else {}
    return inner if isinstance(inner, dict) else {}


def check_tools(tools):
    """Names of a list of tools. ValueError unless it is a list of them, each with a name."""
    names = [called(tool).get("name") for tool in tools] if isinstance(tools, list) else [None]
    if not all(isinstance(name, str) and name for name in names):
        raise ValueError('its "tools" are no list of {"type": "function", "function": '
                         '{"name": ..., ...}}')
    return names


def check_messages(record, answered=True):
    """The messages of a record, which have to end with an answer if `answered`; ValueError says
    the fault and the remedy.
    """
    messages = record.get("messages") if isinstance(record, dict) else None
    if not isinstance(messages, list) or not messages:
        raise ValueError(FORMS)
    check_tools(record.get("tools") or [])
    for number, message in enumerate(messages, 1):
        if why := message_problem(message):
            raise ValueError(f"message {number}{why}")
    if answered and messages[-1]["role"] != "assistant":
        raise ValueError(f"ends with a message of the {messages[-1]['role']}, so there is no "
                         "answer to train; drop it")
    return messages


def message_problem(message):
    """The fault of one message in words, or ""."""
    role = message.get("role") if isinstance(message, dict) else None
    if role not in list(KEYS):      # nor is one that is a list itself
        return f" has no role out of {', '.join(KEYS)}"
    content, calls = message.get("content"), message.get("tool_calls") or []
    thoughts = message.get("reasoning_content") or ""
    if not isinstance(content, str) or not isinstance(thoughts, str):
        return " has no text as its content; only text is trained"
    if json_files.HALF_CHARACTER.search(content + thoughts):
        return " holds half a character (\\ud800 to \\udfff)"
    if role == "assistant" and not content.strip() and not calls:
        return " is an empty answer; drop the line"
    if other := message.keys() - KEYS[role]:
        return (f" has {', '.join(sorted(other))}, which no chat template is sure to write; remove "
                f"it, known are {', '.join(sorted(KEYS[role]))}")
    if not isinstance(calls, list) or not all(
            isinstance(called(call).get("name"), str)
            and isinstance(called(call).get("arguments", {}), dict) for call in calls):
        return ': its tool_calls are no list of {"name": "...", "arguments": {...}}'
    if message.get("weight", 1) not in (0, 1):
        return f" has the weight {message['weight']!r}; an answer is trained (1) or not (0)"
    return ""


# ---- Conversations -> ids and mask


def load_tokenizer(folder, template=None, load=None):
    """Tokenizer of a model folder, by load(folder) or transformers' own, with its chat template or
    the Jinja file `template`. Raises UserError.
    """
    from transformers import AutoTokenizer
    try:
        tokenizer = load(folder) if load else AutoTokenizer.from_pretrained(
            folder, trust_remote_code=False)
    except Exception as error:      # of many kinds
        raise UserError(f"{folder}: no tokenizer can be loaded from it "
                        f"({str(error).splitlines()[0]})")
    if template:
        tokenizer.chat_template = json_files.read_text(template, "--chat_template ")
    require(isinstance(tokenizer.chat_template, str), f"{folder}: its tokenizer has no chat "
            "template; give one with --chat_template FILE")
    return tokenizer


class Encoder:
    """Conversations -> (ids, mask of the trained ones), proven. turns: "all" assistant turns or the
    "last" one. thinking: None or what the template gets as enable_thinking. split: a conversation
    whose answers do not fit one sample gives a list of samples.
    """

    def __init__(self, tokenizer, turns="all", thinking=None, split=False):
        self.tokenizer, self.turns, self.lists = tokenizer, turns, token_lists(tokenizer)
        self.split = split
        self.options = {} if thinking is None else {"enable_thinking": thinking}
        special = {i: t.content for i, t in tokenizer.added_tokens_decoder.items() if t.special}
        self.special = set(special)
        longest_first = sorted(special.values(), key=len, reverse=True)
        self.control = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self.ends = Counter()   # ids that trained turns ended with

    def render(self, messages, prompt, tools=None):
        """Text of messages by the template, with the generation prompt or not. ValueError."""
        try:
            return self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=prompt, tools=tools, **self.options)
        except Exception as error:      # Jinja's, and whatever a template's expressions raise
            raise ValueError(f"the chat template refuses it ({type(error).__name__}: {error})")

    def encode(self, chats, tools=None):
        """[messages], [list of tools or None] -> [(ids, mask) or the ValueError that says why not],
        lists of ints and bools.
        """
        jobs = [attempt(self._texts, *pair) for pair in zip(chats, tools or [None] * len(chats))]
        texts = {text for job in jobs if isinstance(job, list) for part in job for text in part}
        texts = dict(zip(texts, self.lists(list(texts))))
        return [job if isinstance(job, ValueError) else attempt(
            self._samples, [[texts[text] for text in part] for part in job], job)
            for job in jobs]

    def _samples(self, parts, texts):
        """_mask of all trained turns in one sample, or [_mask of each at its turn]."""
        try:
            return self._mask(parts, *texts[-1])
        except ValueError:
            if not self.split or len(parts) == 1:
                raise
            return [self._mask([part], *text) for part, text in zip(parts, texts)]

    def _answers(self, messages, tools):
        """Places of the trained answers. ValueError for a control token, or none to train."""
        texts = {f"message {number} contains": [
            message["content"], message.get("reasoning_content") or "", json.dumps(
                message.get("tool_calls") or "", ensure_ascii=False)]
            for number, message in enumerate(messages, 1)}
        texts["its tools contain"] = [json.dumps(tools or "", ensure_ascii=False)]
        for what, parts in texts.items():
            if found := self.control.search("\n".join(parts)):
                raise ValueError(f"{what} the control token {found[0]}; remove it")
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        answers = answers[0 if self.turns == "all" else -1:]
        answers = [i for i in answers if messages[i].get("weight", 1)]
        if 0 in answers:
            raise ValueError("begins with an answer, so nothing is asked before it; put a message "
                             "there, give it the weight 0, or drop the line")
        if not answers:
            raise ValueError("has no answer to train that is not of weight 0; drop the line")
        return answers

    def _texts(self, messages, tools):
        """[(prompt, prompt and answer)] of the trained turns, proven whole."""
        answers = self._answers(messages, tools)
        found = [(self.render(messages[:i], True, tools),
                  self.render(messages[:i + 1], False, tools)) for i in answers]
        for i, (prompt, text) in zip(answers, found):
            if not text.startswith(prompt):         # _mask refuses it, naming the tokens
                continue
            words = [plain(messages[i]), (messages[i].get("reasoning_content") or "").strip()]
            for call in map(called, messages[i].get("tool_calls") or ()):
                words += call["name"], *call.get("arguments", {})
            if any(word not in text[len(prompt):] for word in words):
                raise ValueError("the chat template leaves out the answer, the reasoning or a tool "
                                 f"call of message {i + 1}")
        whole, schemas = found[-1][1], json.dumps(tools or "", ensure_ascii=False)
        for number, message in enumerate(messages[:answers[-1] + 1], 1):
            calls = [called(call)["name"] for call in message.get("tool_calls") or ()]
            if plain(message) not in whole or any(
                    whole.count(name) <= schemas.count(name) for name in calls):
                raise ValueError(f"the chat template leaves out the text of message {number} "
                                 f"({message['role']})")
        for name in check_tools(tools or []):
            if name not in found[0][0]:
                raise ValueError(f"the chat template leaves out the tool {name}; give another with "
                                 "--chat_template FILE, or drop the line")
        return found

    def _mask(self, parts, prompt, text):
        """[[prompt ids, prompt and answer ids] of each trained turn] -> (ids, mask). prompt, text:
        of the last, which is tokenised apart where its prompt's ids are not the whole's first, and
        both give the same text.
        """
        first, ids = parts[-1]
        if ids[:len(first)] != first and text.startswith(prompt):
            apart = [*first, *self.lists([text[len(prompt):]])[0]]
            same = [self.tokenizer.decode(made, clean_up_tokenization_spaces=False)
                    for made in (apart, ids)]
            parts[-1][1] = ids = apart if same[0] == same[1] else ids
        mask = [False] * len(ids)
        for number, (before, upto) in enumerate(parts, 1):
            self._prove(before, upto, "prompt", number)
            self._prove(upto, ids, "conversation so far", number)
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

    def _prove(self, first, whole, what, number):
        """ValueError unless the ids `first` are the beginning of `whole`."""
        if whole[:len(first)] == first:
            return
        at = len(os.path.commonprefix([first, whole]))
        theirs, ours = (self.tokenizer.decode(ids[at:at + 1]) for ids in (first, whole))
        raise ValueError(f"trained turn {number}: by this chat template the {what} is not how the "
                         f"whole begins: token {at} is {theirs!r} there, {ours!r} in the whole. "
                         "Try another --enable_thinking, --train_turns last, or --chat_template "
                         "FILE")


def attempt(function, *args):
    """function(*args), or the ValueError that it raises."""
    try:
        return function(*args)
    except ValueError as error:
        return error


def plain(message):
    """The text of a message, without thoughts."""
    return message["content"].split("</think>")[-1].strip()
