"""Teachers that answer conversations, the prompt that only the teacher reads, and labels.

`answers = open_ENGINE(name, Sampling, ...)` returns a function that takes an iterable of Requests
and yields (Request, Answer) in any order. The engines are vllm, openai (any server with OpenAI's
/chat/completions) and transformers. Each request has a seed, so up to rounding an answer does not
depend on the other requests.
"""
import asyncio
import itertools
import json
import math
import os
import re
import ssl
import threading
import time
from concurrent.futures import wait
from functools import partial
from typing import NamedTuple

from core import json_files
from core.cli import UserError, one_line, require, require_package

PLACE = "{text}"        # in the prompt: replaced by the line
LONGEST = 32768         # tokens of prompt and answer: 262,144 positions would fill a GPU's memory
LANGUAGES = ("ar", "de", "el", "en", "es", "fr", "hi", "ru", "tr", "ur", "vi", "zh", "ot")
PARSERS = ("language", "regex", "whole")
THOUGHT = re.compile(r"<(/?)(?:think|thinking|thought|reasoning)>")
# with or without markdown around it
LANGUAGE_LINE = r"[*_`#\s]*final answer[*_`]*\s*:[*_`\s]*([a-z]{2})[*_`\s.]*"
ENDINGS = {"length": "cut off at --max_tokens",
           "too_long": "the prompt leaves no room for an answer"}


class Request(NamedTuple):
    """One question to the teacher."""
    id: int                     # number of the line
    messages: list              # with the teacher's prompt
    seed: int = 0
    tools: list = None


class Answer(NamedTuple):
    text: str                   # with thoughts, unless the engine removes them
    finish_reason: str          # stop, length (cut off), too_long (prompt), unanswered (text: why)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    thought: bool = False       # the engine removed closed thoughts from the text
    tool_calls: list = None     # tool calls that a server removed from the text


class Sampling(NamedTuple):
    max_tokens: int             # most tokens of an answer, including thoughts
    temperature: float = 0.0    # 0: greedy
    top_p: float = 1.0          # sample from the likeliest tokens of this total probability
    top_k: int = 0              # sample from this number of likeliest tokens, 0: all
    options: dict = {}          # of the chat template, besides messages and tools


# ---- The teacher's prompt


class Prompt(NamedTuple):
    """The teacher's prompt. role "user": texts before and after the last user message; "system": a
    separate message; "none": no prompt."""
    role: str
    before: str
    after: str = ""


def read_prompt(path, role="user"):
    """Read a Prompt from a file. Other braces than PLACE have no meaning. Raises UserError."""
    parts = json_files.read_text(path).rstrip("\n").split(PLACE)
    require("".join(parts).strip() or len(parts) > 1, f"--prompt_file {path}: is empty")
    require(len(parts) == (1 if role == "system" else 2), f"--prompt_file {path}: has {PLACE} "
            f"{len(parts) - 1} times; write it once, where the line goes, or remove it and give "
            "--prompt_role system")
    return Prompt(role, *parts)


def add_prompt(prompt, messages):
    """Messages with the teacher's Prompt, before the text of a system message. UserError."""
    if prompt.role == "none":
        return list(messages)
    if prompt.role == "system":
        if messages and messages[0]["role"] in ("system", "developer"):
            first, *rest = messages
            return [first | {"content": f"{prompt.before}\n\n{first['content']}"}, *rest]
        return [{"role": "system", "content": prompt.before}, *messages]
    require(messages and messages[-1]["role"] == "user",
            "has no user message before its last answer, for --prompt_role user")
    text = prompt.before + messages[-1]["content"] + prompt.after
    return [*messages[:-1], messages[-1] | {"content": text}]


# ---- Labels. The label is in the last line after all thoughts that matches the form as a whole. It
# must be an allowed label, and the answer must have ended by itself. Quoted examples of the form,
# unfinished thoughts and lines with two labels do not count.


class Parser(NamedTuple):
    line: re.Pattern | None         # form of its line; None: the whole answer is the label
    labels: tuple | None = None     # allowed labels; None: any
    lower: bool = False             # convert the label to lower case


def make_parser(name, pattern=None, labels=None):
    """Parser by its name in PARSERS. pattern: regex of the line; its group 1 is the label."""
    require((pattern is not None) == (name == "regex"), "--parser regex needs --pattern, its only "
            "group the label; other parsers take no --pattern")
    if name == "whole":
        return Parser(None, labels)
    if name == "language":
        return Parser(re.compile(LANGUAGE_LINE, re.IGNORECASE), labels or LANGUAGES, lower=True)
    try:
        line = re.compile(pattern)
    except re.error as error:
        raise UserError(f"--pattern {pattern!r}: is not a regular expression ({error})")
    require(line.groups == 1, f"--pattern {pattern!r}: has {line.groups} groups; give one: (label)")
    return Parser(line, labels)


def read_label(parser, text, finish_reason, must_think=False):
    """Return (label, "") of one answer, or (None, reason). must_think: require a closed thought."""
    if finish_reason == "unanswered":
        return None, text
    if finish_reason != "stop":
        return None, ENDINGS.get(finish_reason, f"ended by {finish_reason}")
    start, open_thought = 0, False
    for tag in THOUGHT.finditer(text):
        start, open_thought = tag.end(), not tag[1]
    if open_thought or (must_think and not start):
        return None, "its thoughts have no end"
    label = text[start:].strip()
    if parser.line:
        matches = filter(None, (parser.line.fullmatch(line.strip()) for line in label.split("\n")))
        label = ["", *(match[1] or "" for match in matches)][-1]
        label = label.lower() if parser.lower else label
    if not label:
        return None, "is empty" if parser.line is None else "has no line of the wanted form"
    if parser.labels and label not in parser.labels:
        return None, f"{label[:40]!r} is not one of the labels"
    return label, ""


# ---- Engines in this process


def longest_of(config):
    """Most tokens of prompt and answer: the model's positions, but at most LONGEST."""
    return min(getattr(config.get_text_config(), "max_position_embeddings", LONGEST), LONGEST)


def answer_in_chunks(size, tokenizer, options, limit, complete, requests):
    """Yield (request, Answer), in chunks of `size` requests. limit: most tokens of a prompt.

    complete(prompts, seeds) gets the ids of prompts, the shortest first, and yields (text,
    finish_reason, number of tokens) of each."""
    def render(messages, tools=None, **more):
        return tokenizer.apply_chat_template(
            messages, tools=tools, add_generation_prompt=True, **more, **options)
    # some templates end with the opening tag of a thought, which the answer does not repeat
    prompt = render([{"role": "user", "content": "x"}], tokenize=False)
    opening_tag = "<think>" if prompt.rstrip().endswith("<think>") else ""
    requests = iter(requests)
    while chunk := list(itertools.islice(requests, size)):
        fitting = []
        for request in chunk:
            ids = render(request.messages, request.tools, return_dict=False)
            if len(ids) <= limit:
                fitting.append((request, ids))
            else:
                yield request, Answer("", "too_long", len(ids))
        fitting.sort(key=lambda pair: len(pair[1]))
        results = complete([ids for _, ids in fitting], [request.seed for request, _ in fitting])
        for (request, ids), (text, reason, tokens) in zip(fitting, results):
            yield request, Answer(opening_tag + text, reason, len(ids), tokens)


def open_vllm(name, draw, *, max_model_len=0, seed=0, chunk_size=1024, **options):
    """`answers` of vLLM on this process's GPUs. chunk_size: requests per call. options: of LLM."""
    from transformers import AutoConfig
    try:
        from vllm import LLM, SamplingParams
    except ImportError as error:
        raise UserError(f"--engine vllm: vLLM cannot be imported ({error}); install it")

    from core import chat
    config = AutoConfig.from_pretrained(name, trust_remote_code=False)
    tokenizer = chat.load_tokenizer(name)
    llm = LLM(model=name, max_model_len=max_model_len or longest_of(config), seed=seed,
              enable_prefix_caching=True, **options)

    def complete(prompts, seeds):
        params = [SamplingParams(temperature=draw.temperature, top_p=draw.top_p, top_k=draw.top_k,
                                 seed=seed, max_tokens=draw.max_tokens) for seed in seeds]
        prompts = [{"prompt_token_ids": ids} for ids in prompts]
        for out in llm.generate(prompts, params, use_tqdm=False) if prompts else ():
            answer = out.outputs[0]
            yield answer.text, answer.finish_reason, len(answer.token_ids)
    limit = llm.llm_engine.model_config.max_model_len - 1   # vLLM refuses longer prompts
    return partial(answer_in_chunks, chunk_size, tokenizer, draw.options, limit, complete)


def open_transformers(name, draw, *, max_model_len=0, batch_size=16, chunk_size=1024):
    """`answers` of transformers' generate(), on the GPU or the CPU. Others: see answers_of."""
    import torch

    from core import chat
    from distill.causal_lm import find_model
    from distill.generation import load_whole
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    # most CPUs are slow in bfloat16
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    folder = find_model(name, "--model_name")
    return answers_of(load_whole(folder, dtype, device), chat.load_tokenizer(folder),
                      draw, max_model_len, batch_size, chunk_size)


def answers_of(model, tokenizer, draw, max_model_len=0, batch_size=16, chunk_size=1024):
    """`answers` of a loaded causal LM, with or without adapters. Requests are sorted by length in
    chunks of chunk_size, then answered batch_size at a time."""
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    from distill.causal_lm import stop_at
    from distill.generation import Draw, generate
    ends, warpers = stop_at(model) or [tokenizer.eos_token_id], []
    if draw.temperature:
        warpers = [TemperatureLogitsWarper(draw.temperature)]
        warpers += [TopKLogitsWarper(draw.top_k)] if draw.top_k else []
        warpers += [TopPLogitsWarper(draw.top_p)] if draw.top_p < 1 else []

    def complete(prompts, seeds):
        for i in range(0, len(prompts), batch_size):
            batch = slice(i, i + batch_size)
            draws = [Draw(seeds[batch])] if draw.temperature else []
            for ids in generate(model, prompts[batch], draw.max_tokens, ends, [*warpers, *draws]):
                ended = ids[-1] in ends
                text = tokenizer.decode(ids[:-1] if ended else ids, skip_special_tokens=False)
                yield text, "stop" if ended else "length", len(ids)
    limit = (max_model_len or longest_of(model.config)) - draw.max_tokens
    return partial(answer_in_chunks, chunk_size, tokenizer, draw.options, limit, complete)


# ---- On a server: httpx with retries

TRANSIENT = (408, 409, 425, 429, *range(500, 600))
FATAL = (401, 402, 404, 405)        # wrong key, no credit or wrong address: affects all lines
TOO_LONG = ("context length", "too long", "maximum model length", "max_model_len", "longer than")
NOTICE_S = 10           # seconds between notices of calls that failed
# the seed, and neutral values of settings that a server would take from generation_config
NEUTRAL = {"seed": 0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0,
           "frequency_penalty": 0.0}
# errors in reading an answer
MALFORMED = (UserError, ValueError, LookupError, TypeError, AttributeError)


class ServerError(UserError):
    """A failed call. why: the reason without the address. status: of HTTP; 0: no usable answer."""

    def __init__(self, where, why, status=0):
        super().__init__(f"{where}: {why}")
        self.why, self.status = why, status


class Server:
    """A client of one address. Its calls run in the event loop of a daemon thread, so that a time
    limit covers a whole call, and a pending call does not delay the exit of the process."""

    def __init__(self, base_url, timeout, flag="--base_url"):
        """timeout: seconds for one attempt of a call. flag: the flag that holds the address."""
        require_package("httpx", flag)
        import httpx
        self.url, self.timeout, self.last_notice = address(base_url, flag), timeout, -math.inf
        self.name, self.failures = f"{flag} {self.url}", (httpx.HTTPError, httpx.InvalidURL)
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get("OPENAI_API_KEY", "").strip():
            # an error of httpx would print the key
            require(re.fullmatch(r"[\x21-\x7e]+", key),
                    "OPENAI_API_KEY: holds a space, a line feed or a character outside ASCII")
            headers["Authorization"] = f"Bearer {key}"
        self.client = httpx.AsyncClient(        # vLLM closes idle connections after 5 s
            headers=headers, timeout=None, limits=httpx.Limits(keepalive_expiry=2),
            verify=ssl.create_default_context())
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()

    def wait(self, coroutine):
        """Run a coroutine in the thread and return its result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result()

    def run_all(self, ask, jobs, limit=64):
        """Yield (job, result of the coroutine ask(job)) as they finish, at most `limit` at once."""
        jobs, running = iter(jobs), {}
        try:
            while True:
                for job in itertools.islice(jobs, limit - len(running)):
                    running[asyncio.run_coroutine_threadsafe(ask(job), self.loop)] = job
                if not running:
                    return
                for future in wait(running, return_when="FIRST_COMPLETED").done:
                    yield running.pop(future), future.result()      # an error ends the run
        finally:
            for future in running:
                future.cancel()

    async def fetch(self, path, body=None, read=json_files.loads, end=math.inf, hint=""):
        """read(bytes) of a GET, or of a POST with a body. A redirection is a ServerError: the other
        address must not get the key. end: deadline. hint: what to say if the server refuses."""
        def fail(why, status=0):
            raise ServerError(self.name + path, why + hint * (status >= 400), status)
        seconds = max(0.01, min(self.timeout, end - time.monotonic()))
        method, content = ("GET", None) if body is None else ("POST", json.dumps(body))
        try:
            async with asyncio.timeout(seconds):
                response = await self.client.request(method, self.url + path, content=content)
        except TimeoutError:
            fail(f"no whole answer in {round(seconds, 2):g} s")
        except (OSError, ValueError, *self.failures) as error:
            fail(str(error) or type(error).__name__)
        if not response.is_success:
            words = response.text[:2000].split() or [response.reason_phrase]
            fail(one_line(f"HTTP {response.status_code} {' '.join(words)}"), response.status_code)
        try:
            return read(response.content)
        except MALFORMED as error:
            is_object = response.content.lstrip().startswith(b"{")      # else a gateway's: retry
            fail(f"its answer does not have the form of OpenAI's API ({error!r:.100})",
                 response.status_code if is_object else 0)

    async def call(self, path, body=None, read=json_files.loads, end=math.inf, hint=""):
        """fetch(...), retried after temporary failures for twice the timeout, or until `end`."""
        pause, last_try = 0.5, min(end, time.monotonic() + 2 * self.timeout)
        while True:
            try:
                return await self.fetch(path, body, read, end, hint)
            except ServerError as error:
                if error.status not in (0, *TRANSIENT) or time.monotonic() + pause > last_try:
                    raise
                if time.monotonic() - self.last_notice > NOTICE_S:
                    self.last_notice = time.monotonic()
                    print(one_line(f"notice     waiting for {self.url}: {error.why}"))
            await asyncio.sleep(pause)
            pause = min(2 * pause, 30)


def address(base_url, flag):
    """Check the address of a flag and return it. The error does not repeat what may be secret."""
    require(not re.search("[@?#]", base_url), f"{flag}: holds a name and password (@), ?... or "
            "#...; put the key into OPENAI_API_KEY instead")
    return base_url.rstrip("/")


def open_openai(name, draw, *, base_url, concurrency=64, request_timeout=600.0):
    """`answers` of a server that serves the model as `name`. Others: flags of create_data.py."""
    server, refused = Server(base_url, request_timeout), set()
    models = server.wait(server.fetch("/models", read=lambda data: [
        model["id"] for model in json_files.loads(data)["data"]]))
    require(name in models, f"--model_name {name}: the server has {', '.join(map(str, models))}")
    return lambda requests: server.run_all(
        lambda request: ask_server(server, name, draw, refused, request), requests, concurrency)


async def ask_server(server, name, draw, refused, request):
    """Answer to one request; "unanswered" if the server refuses this line or is too slow. UserError
    if it is gone or would refuse every line. refused: collects fields that it does not accept."""
    optional = {*NEUTRAL} - ({"top_k"} if draw.top_k else set())    # the rest is the user's wish
    while True:
        limit = "max_completion_tokens" if "max_tokens" in refused else "max_tokens"
        body = {"model": name, "messages": list(map(to_openai, request.messages)),
                limit: draw.max_tokens, "temperature": draw.temperature, "top_p": draw.top_p,
                **NEUTRAL, "seed": request.seed, "top_k": draw.top_k,
                "chat_template_kwargs": draw.options or None, "tools": request.tools}
        body = {field: value for field, value in body.items()
                if field not in refused and value not in (None, [])}
        try:
            return await server.call("/chat/completions", body, read_answer)
        except ServerError as error:
            why, status = error.why, error.status
        if status in (400, 413) and any(words in why.lower() for words in TOO_LONG):
            return Answer(why, "too_long")
        fields = {field for field in optional & body.keys() if re.search(rf"\b{field}\b", why)}
        if limit == "max_tokens" and "max_completion_tokens" in why:
            fields.add("max_tokens")
        if status in (400, 422) and fields:
            refused |= fields
            continue
        require(status not in (*FATAL, *range(300, 400)),
                f"line {request.id + 1}: the server at {server.url} refuses it: {why}")
        if status and status not in TRANSIENT:
            return Answer(why, "unanswered")
        try:
            await server.fetch("/models", read=bytes)
        except ServerError:
            raise UserError(f"line {request.id + 1}: no answer from {server.url}: {why}; finished "
                            "lines are kept, rerun the same command to resume")
        return Answer(f"no answer in {2 * server.timeout:g} s: {why}", "unanswered")


def to_openai(message):
    """A message in the form of OpenAI's API, which takes the arguments of tool calls as text."""
    sent = {name: message[name] for name in ("role", "content", "tool_call_id", "name")
            if name in message}
    for number, call in enumerate(message.get("tool_calls") or []):
        function = call.get("function", call)
        arguments = json.dumps(function.get("arguments", {}), ensure_ascii=False)
        sent.setdefault("tool_calls", []).append(
            {"id": call.get("id", f"call_{number}"), "type": "function",
             "function": {"name": function["name"], "arguments": arguments}})
    return sent


def read_answer(data):
    """Answer from the bytes of /chat/completions. Raises MALFORMED."""
    response = json_files.loads(data)
    choice, usage = response["choices"][0], response.get("usage") or {}
    message = choice["message"]
    calls = [{"type": "function", "function": {
        "name": call["function"]["name"], "arguments": json_files.loads(
            call["function"]["arguments"] or "{}")}} for call in message.get("tool_calls") or []]
    # a tool call ends an answer
    reason = "stop" if choice["finish_reason"] == "tool_calls" else choice["finish_reason"]
    text = message["content"] or ""
    if isinstance(text, list):      # of texts
        text = "".join(each["text"] for each in text)
    # files cannot hold half a character
    text = json_files.HALF_CHARACTER.sub("\ufffd", text)
    return Answer(text, reason, usage.get("prompt_tokens") or 0,
                  usage.get("completion_tokens") or 0,
                  bool(message.get("reasoning_content") or message.get("reasoning")), calls or None)
