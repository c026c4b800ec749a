"""Chat JSONL -> token ids and which of them are trained, proven against the chat template.

One JSON object a line: {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}, or
ShareGPT's {"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", ...}]}, TRL's prompt and completion, or
alpaca's instruction, input and output; .parquet: such rows. A data set is one file, or the files that a folder, a
pattern or the hub has of it.
Only assistant turns are trained. Where one begins is not guessed from markers but proven with the tokenizer's own
template: the ids of the prompt (all messages before it, with the generation prompt) must be the first ids of the whole
conversation. Then the model is trained on exactly the answer that it has to write behind exactly the prompt that
it will be given. Where the prompt's text begins the whole, but not its ids (an opened think block may share a token
with what follows), the last answer is tokenised apart: generation sees the prompt's ids, and writes others behind them.
A template for which neither holds is refused. A turn ends with its special token; white space that a template writes
behind it is not trained. A record's "tools" go to the template, as do tool calls; an answer of "weight" 0 is context.
"""
import functools
import itertools
import json
import re
from collections import Counter
from pathlib import Path

from core.cli import UserError
from core.indexing import token_lists
from core.problems import problem
from core import json_files
from core.json_files import HALF_CHARACTER

ROLES = ("system", "developer", "user", "assistant", "tool")
THINKING = {"template": None, "true": True, "false": False}     # --enable_thinking -> Encoder's
KNOWN = {"role", "content", "reasoning_content"}        # keys of a message, and those that some roles have beside them
KEYS = {"assistant": {"tool_calls", "weight"}, "tool": {"tool_call_id", "name"}}


# ---------------------------------------------------------------------------------------------------------------------
# Files -> conversations


def group_key(record):
    """The record's integer "id", or None for one of another kind. ValueError for a number that no group can have."""
    key = record.get("id")
    if type(key) is not int:
        return None
    if not 0 <= key < 2**63:
        raise ValueError(f'has the "id" {key}; give a whole number from 0 on, below 2**63, or leave it out')
    return key


def read_records(path, problems):
    """Yield (line number, record with messages that can be used) of a JSONL file; others go to the list problems.

    Empty lines are passed over. Raises UserError when the file cannot be read.
    """
    for records, wrong in read_chunks(path, 1):
        problems.extend(wrong)
        yield from records


def read_chunks(path, size, first=0, step=1):
    """Yield (read_records' records, its problems) of every `step`-th chunk of `size` lines from chunk `first` on."""
    lines = enumerate(itertools.chain.from_iterable(lines_of(name, size) for name in files_of(path)), 1)
    for _ in itertools.islice(lines, first * size):
        pass
    while chunk := list(itertools.islice(lines, size)):
        records, problems = [], []
        for number, line in chunk:
            rows = isinstance(line, dict)
            if not rows and not line.strip():
                continue
            check = "unreadable"
            try:
                record = line if rows else json_files.loads(line)
                if not isinstance(record, dict):
                    raise ValueError(f"is a JSON {type(record).__name__}, and one object a line is read"
                                     "; a list becomes lines by: jq -c '.[]' LIST > LINES.jsonl")
                check = "invalid"
                record = as_messages(record)
                check_messages(record)
                group_key(record)
            except ValueError as error:
                problems.append(problem(f"{path}:{number}", check, error, path))
            else:
                records.append((number, record))
        yield records, problems
        for _ in itertools.islice(lines, (step - 1) * size):
            pass


def records_at(path, numbers):
    """Yield (line number, record) of these lines of read_records' file, which could be used."""
    for number, line in enumerate(itertools.chain.from_iterable(lines_of(name, 1) for name in files_of(path)), 1):
        if number in numbers:
            yield number, as_messages(line if isinstance(line, dict) else json_files.loads(line))


def as_messages(record, trained=True):
    """The record with the messages and tools that templates want, whichever known form it has. ValueError.

    trained: what follows the last answer is left out, as nothing there is trained.
    """
    if isinstance(record, dict) and "messages" not in record:
        from core import chat_forms
        record = chat_forms.of_sharegpt(record) | chat_forms.of_pair(record)
    record = with_tools(record)
    if isinstance(record, dict) and isinstance(record.get("messages"), list):
        messages = record["messages"]
        if any(isinstance(message, dict) and isinstance(message.get("content"), list) for message in messages):
            from core import chat_forms
            messages = [chat_forms.with_text(message) for message in messages]
        roles = [message.get("role") if isinstance(message, dict) else None for message in messages]
        if trained and "assistant" in roles and roles[-1] in ROLES:
            messages = messages[:len(roles) - roles[::-1].index("assistant")]
        record = record | {"messages": messages}
    return record


def as_question(record):
    """(messages that end with a question, tools or None, whether its answer was left out) of a record that a teacher
    is to answer: of as_messages, or {"text": ..., "history": [[question, answer], ...]}. ValueError.
    """
    if isinstance(record, dict) and "text" in record:
        if "messages" in record:
            raise ValueError('has to have one of "messages" and "text"')
        history = record.get("history") or []
        if not isinstance(history, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in history):
            raise ValueError('has a "history" that is no list of [question, answer]')
        texts = [text for pair in history for text in pair] + [record["text"]]
        record = {"messages": [{"role": ("user", "assistant")[i % 2], "content": text}
                               for i, text in enumerate(texts)]}
    record = as_messages(record, trained=False)
    messages = check_messages(record, answered=False)
    answered = messages[-1]["role"] == "assistant"
    if answered:
        messages = messages[:-1]
    if not messages or messages[-1]["role"] not in ("user", "tool"):
        raise ValueError("has no user message before the answer that is asked for")
    if empty := [number for number, message in enumerate(messages, 1)
                 if not message["content"].strip() and not message.get("tool_calls")]:
        raise ValueError(f"has no text in message {empty[0]}")
    return messages, record.get("tools") or None, answered


def question(messages):
    """The text of the last user message, "" without one."""
    return next((m["content"] for m in reversed(messages) if m["role"] == "user"), "")


@functools.cache
def files_of(path):
    """[paths] of what holds a data set's lines: a file itself, or the files of a pattern, of a folder (as save_to_disk
    wrote it, or of one set of KINDS, in it or its data/), or of a name on the hub, downloaded. Raises UserError.
    """
    name, path = str(path), Path(path)
    if path.is_file():
        return [name]
    from core.chat_forms import find_files
    return find_files(name)


def lines_of(path, size):
    """Yield a file's lines, or rows of a table as dicts; UserError. size: rows at a time."""
    try:
        with json_files.open_file(path) as file:
            kind = Path(path).suffix
            if kind not in (".parquet", ".arrow"):
                yield from json_files.lines(file, path)
                return
        from core.hub import table_rows
        yield from table_rows(path, size)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})")


def with_tools(record):
    """The record as templates want it: tools and arguments of tool calls are JSON values, which servers send as text;
    a message that is nothing but calls has an empty text. ValueError for text that is no JSON.
    """
    if not isinstance(record, dict) or not isinstance(record.get("messages"), list):
        return record
    messages = []
    for message in record["messages"]:
        if isinstance(message, dict) and isinstance(message.get("tool_calls"), list) and message["tool_calls"]:
            message = message | {"content": message.get("content") or "", "tool_calls": [
                _with_arguments(call) for call in message["tool_calls"]]}
        messages.append(message)
    tools = record.get("tools")
    return record | {"messages": messages} | ({"tools": json_files.loads(tools)} if isinstance(tools, str) else {})


def _with_arguments(call):
    if not isinstance(call, dict):
        return call
    if isinstance(call.get("function"), dict):
        return call | {"function": _with_arguments(call["function"])}
    arguments = call.get("arguments")
    return call | ({"arguments": json_files.loads(arguments)} if isinstance(arguments, str) else {})


def check_tools(record):
    """Names of a record's tools. ValueError for what is no list of tools, each with a name."""
    tools = record.get("tools") or []
    names = [called(tool).get("name") for tool in tools] if isinstance(tools, list) else [None]
    if not all(isinstance(name, str) and name for name in names):
        raise ValueError('its "tools" are no list of {"type": "function", "function": {"name": ..., ...}}')
    return names


def called(tool):
    """What of a tool, or of a tool call, has its name: the tool itself, or its "function"."""
    inner = tool.get("function", tool) if isinstance(tool, dict) else {}
    return inner if isinstance(inner, dict) else {}


def check_messages(record, answered=True):
    """The messages of one record; ValueError says what is wrong with them and what to do. answered: they have to end
    with an answer.
    """
    messages = record.get("messages") if isinstance(record, dict) else None
    if not isinstance(messages, list) or not messages:
        raise ValueError('has no list "messages"; a line is {"messages": [{"role": ..., "content": ...}, ...]}, or has '
                         '"conversations", "prompt" and "completion", or "instruction" and "output"')
    check_tools(record)
    for number, message in enumerate(messages):
        where = f"message {number + 1}"
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            raise ValueError(f"{where} has no role out of {', '.join(ROLES)}")
        if not isinstance(message.get("content"), str):
            raise ValueError(f"{where} has no text as its content; only text is trained")
        if HALF_CHARACTER.search(message["content"] + str(message.get("reasoning_content") or "")):
            raise ValueError(f"{where} holds half a character (\\ud800 to \\udfff)")
        if message["role"] == "assistant" and not message["content"].strip() and not message.get("tool_calls"):
            raise ValueError(f"{where} is an empty answer; drop the line")
        known = KNOWN | KEYS.get(message["role"], set())
        if other := message.keys() - known:
            raise ValueError(f"{where} has {', '.join(sorted(other))}, which no chat template is sure to write; "
                             f"remove it, known are {', '.join(sorted(known))}")
        if not isinstance(message.get("reasoning_content") or "", str):
            raise ValueError(f"{where}: its reasoning_content is not text")
        calls = message.get("tool_calls") or []
        if not isinstance(calls, list) or not all(isinstance(called(call).get("name"), str) and isinstance(
                called(call).get("arguments", {}), dict) for call in calls):
            raise ValueError(f'{where}: its tool_calls are no list of {{"name": "...", "arguments": {{...}}}}')
        if message.get("weight", 1) not in (0, 1):
            raise ValueError(f"{where} has the weight {message['weight']!r}; an answer is trained (1) or not (0)")
    if answered and messages[-1]["role"] != "assistant":
        raise ValueError(f"ends with a message of the {messages[-1]['role']}, so there is no answer to train; drop it")
    return messages


# ---------------------------------------------------------------------------------------------------------------------
# Conversations -> ids and mask


def load_tokenizer(folder, template=None, load=None):
    """Tokenizer of a model folder with a chat template, its own or the Jinja file `template`. Raises UserError.

    load: function of the folder that reads it; None: transformers' own.
    """
    from transformers import AutoTokenizer
    try:
        tokenizer = load(folder) if load else AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:      # of many kinds
        raise UserError(f"{folder}: no tokenizer can be loaded from it ({str(error).splitlines()[0]})")
    if template:
        tokenizer.chat_template = json_files.read_text(template, "--chat_template ")
    if not isinstance(tokenizer.chat_template, str):
        raise UserError(f"{folder}: its tokenizer has no chat template; give one with --chat_template FILE")
    return tokenizer


class Encoder:
    """Conversations -> (ids, mask of the trained ones), proven. turns: "all" assistant turns or the "last" one.

    thinking: None or what the template gets as enable_thinking.
    """

    def __init__(self, tokenizer, turns="all", thinking=None):
        self.tokenizer, self.turns, self.lists = tokenizer, turns, token_lists(tokenizer)
        self.options = {} if thinking is None else {"enable_thinking": thinking}
        special = {i: t.content for i, t in tokenizer.added_tokens_decoder.items() if t.special}
        self.special = set(special)
        self.control = re.compile("|".join(map(re.escape, sorted(special.values(), key=len, reverse=True))) or r"(?!)")
        self.blank = {}         # id -> is it white space?
        self.ends = Counter()   # ids that trained turns ended with

    def render(self, messages, prompt, tools=None):
        """Text of messages by the template, or texts of many such lists; prompt: with the generation prompt.

        ValueError when it refuses them, or one of them.
        """
        try:
            return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt,
                                                      tools=tools, **self.options)
        except Exception as error:      # Jinja's, and whatever a template's expressions raise
            raise ValueError(f"the chat template refuses it ({type(error).__name__}: {error})")

    def _render_all(self, asked):
        """[(text of the prompt, of prompt and answer)] of [(messages, place of an answer)]; None: ask one by one."""
        try:
            return list(zip(self.render([messages[:i] for messages, i in asked], True),
                            self.render([messages[:i + 1] for messages, i in asked], False))) if asked else []
        except ValueError:
            return None

    def encode(self, chats, tools=None):
        """[messages] -> [(ids, mask) or the ValueError that says why not], each list of ints and of bools.

        tools: [list of tools or None] of the conversations.
        """
        jobs, texts, tools = [], {}, tools or [None] * len(chats)
        for messages, known in zip(chats, tools):
            try:
                jobs.append(self._answers(messages, known))
            except ValueError as error:
                jobs.append(error)
        asked = [(messages, i) for messages, job, known in zip(chats, jobs, tools)
                 if isinstance(job, list) and not known for i in job]
        rendered = self._render_all(asked)
        together = None if rendered is None else iter(rendered)
        for number, (messages, job, known) in enumerate(zip(chats, jobs, tools)):
            if isinstance(job, ValueError):
                continue
            pairs = list(itertools.islice(together, len(job))) if together and not known else (
                (self.render(messages[:i], True, known), self.render(messages[:i + 1], False, known)) for i in job)
            try:
                jobs[number] = self._texts(messages, job, pairs, known)
            except ValueError as error:
                jobs[number] = error
            else:
                texts |= dict.fromkeys(itertools.chain.from_iterable(jobs[number]))
        texts = dict(zip(texts, self.lists(list(texts))))
        results = []
        for job in jobs:
            try:
                results.append(job if isinstance(job, ValueError) else self._mask(
                    [[texts[t] for t in part] for part in job], *job[-1]))
            except ValueError as error:
                results.append(error)
        return results

    def _answers(self, messages, tools):
        """Places of the answers that are trained. ValueError for a text with a control token, or none to train."""
        for number, message in enumerate(messages, 1):
            for text in (message["content"], message.get("reasoning_content") or "",
                         json.dumps(message.get("tool_calls") or "", ensure_ascii=False)):
                if found := self.control.search(text):
                    raise ValueError(f"message {number} contains the control token {found[0]}; remove it")
        if found := self.control.search(json.dumps(tools or "", ensure_ascii=False)):
            raise ValueError(f"its tools contain the control token {found[0]}; remove it")
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        answers = [i for i in answers[0 if self.turns == "all" else -1:] if messages[i].get("weight", 1)]
        if 0 in answers:
            raise ValueError("begins with an answer, so nothing is asked before it; put a message there, give it the "
                             "weight 0, or drop the line")
        if not answers:
            raise ValueError("has no answer to train that is not of weight 0; drop the line")
        return answers

    def _texts(self, messages, answers, pairs, tools):
        """The (prompt, prompt and answer) of each trained turn, proven whole; what follows the last is left out."""
        found = []
        for i, (prompt, text) in zip(answers, pairs):
            if text.startswith(prompt):         # else _mask refuses it, naming the tokens
                words = [messages[i]["content"].split("</think>")[-1].strip(),
                         (messages[i].get("reasoning_content") or "").strip()]
                for call in map(called, messages[i].get("tool_calls") or ()):
                    words += call["name"], *call.get("arguments", {})
                if any(word not in text[len(prompt):] for word in words):
                    raise ValueError("the chat template leaves out the answer, the reasoning or a tool call of message "
                                     f"{i + 1}")
            found.append((prompt, text))
        whole, schemas = found[-1][1], json.dumps(tools or "", ensure_ascii=False)
        for number, message in enumerate(messages[:answers[-1] + 1], 1):
            calls = [called(call)["name"] for call in message.get("tool_calls") or ()]
            if message["content"].split("</think>")[-1].strip() not in whole or any(
                    whole.count(name) <= schemas.count(name) for name in calls):
                raise ValueError(f"the chat template leaves out the text of message {number} ({message['role']})")
        if missing := [name for name in check_tools({"tools": tools}) if name not in found[0][0]]:
            raise ValueError(f"the chat template leaves out the tool {missing[0]}; give another with --chat_template "
                             "FILE, or drop the line")
        return found

    def _apart(self, ids, whole, prompt, text):
        """`ids` of a prompt and those of what its text `prompt` lacks of `text`; `whole` where they are not the same
        text, or the prompt's are its beginning anyway.
        """
        if whole[:len(ids)] == ids or not text.startswith(prompt):
            return whole
        apart = [*ids, *self.lists([text[len(prompt):]])[0]]
        same = (self.tokenizer.decode(made, clean_up_tokenization_spaces=False) for made in (apart, whole))
        return apart if next(same) == next(same) else whole

    def _mask(self, parts, prompt, text):
        """[(prompt ids, prompt and answer ids) of each trained turn] -> (ids, mask). prompt, text: of the last."""
        parts[-1][1] = self._apart(*parts[-1], prompt, text)
        ids = parts[-1][1]
        mask = [False] * len(ids)
        for number, (prompt, upto) in enumerate(parts, 1):
            self._prove(prompt, upto, "prompt", number)
            self._prove(upto, ids, "conversation so far", number)
            stop = len(upto)
            while stop > len(prompt) and ids[stop - 1] not in self.special and self._is_blank(ids[stop - 1]):
                stop -= 1
            if stop == len(prompt) or ids[stop - 1] not in self.special:
                raise ValueError("the chat template does not end an answer with a special token, so the model would "
                                 "not learn to stop; give another with --chat_template FILE")
            self.ends[ids[stop - 1]] += 1
            mask[len(prompt):stop] = [True] * (stop - len(prompt))
        return ids, mask

    def _prove(self, first, whole, what, number):
        """ValueError unless the ids `first` are the beginning of `whole`."""
        if whole[:len(first)] == first:
            return
        at = next((i for i, (a, b) in enumerate(zip(first, whole)) if a != b), min(len(first), len(whole)))
        theirs, ours = (self.tokenizer.decode(ids[at:at + 1]) for ids in (first, whole))
        advice = "--enable_thinking false (or true)" if not self.options else "another --enable_thinking"
        advice += ", --train_turns last" if self.turns == "all" else ""
        raise ValueError(f"trained turn {number}: by this chat template the {what} is not how the whole begins: token "
                         f"{at} is {theirs!r} there, {ours!r} in the whole; so what the model will be given cannot be "
                         f"trained. Try {advice}, or give another template with --chat_template FILE")

    def _is_blank(self, token):
        if token not in self.blank:
            self.blank[token] = not self.tokenizer.decode([token]).strip()
        return self.blank[token]


def cut(ids, mask, limit, policy):
    """(ids, mask) of at most `limit` tokens by a policy of choices.TOO_LONG, or None when the sample is to be dropped.

    Dropped are too long ones under "drop", and whatever a cut leaves nothing to train of. Raises ValueError under
    "stop". The first token of a sample is never trained: nothing predicts it.
    """
    if len(ids) > limit:
        if policy == "stop":
            raise ValueError(f"{len(ids)} tokens, more than {limit}")
        if policy == "drop":
            return None
        part = slice(-limit, None) if policy == "cut_left" else slice(limit)
        ids, mask = ids[part], mask[part]
    return (ids, mask) if any(mask[1:]) else None
