"""Three ways to ask a teacher, behind one function: answers = open_vllm(...), then answers(take).

take(n) gives up to n Requests that are still to be asked, none when there are no more for now. answers yields
(Request, Answer) in any order; whoever reads them may put a request back before the next one is read.
open_vllm, open_server and open_transformers return it:

vllm           vLLM in this process, the GPUs this process sees; equal prompt beginnings are computed once
openai         any server with OpenAI's /chat/completions (vllm serve, SGLang, ...), many requests at once
transformers   generate() of transformers; slow, but runs anywhere

All send messages through the model's own chat template, and draw from a seed of each request: the answer to a
request does not depend on which others are asked, in which order, or by how many processes (up to rounding of sums).
"""
import asyncio
import base64
import importlib.util
import json
import math
import os
import queue
import re
import ssl
import threading
import time
import urllib.parse
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from common import json_files
from common.flags import UserError, need_package
from common.text import printable

TRANSIENT = (408, 409, 425, 429, *range(500, 600))
WHOLE_RUN = (401, 402, 404, 405)        # wrong key, no credit, wrong address: no line is to blame
UNKNOWN = re.compile("unsupported|not supported|unrecogni|unknown|unexpected|extra|not permitted|not allowed|invalid")
NOTICE_S = 10           # seconds between notices of calls that failed
SAID = 2**16            # bytes read of what a server says about an error
# what a server would else take from the model's generation_config, and the value that changes nothing; and the seed
NOT_SET = {"seed": 0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0,
           "frequency_penalty": 0.0}
PLACE = "{text}"        # where the line goes in the prompt
# what a failed call, or an answer of another form, raises
MALFORMED = (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError)
TOO_LONG = ("context length", "too long", "maximum model length", "max_model_len", "longer than")


@dataclass(frozen=True)
class Request:
    """One question to the teacher."""
    id: int                     # of the line
    messages: list              # as OpenAI's API has them, the teacher's prompt among them
    seed: int                   # of the draws
    constraint: dict = None     # {"choice": [str]} or {"regex": str} that the answer must obey


@dataclass
class Answer:
    """What came back. text holds thoughts as well, where the engine leaves them there."""
    text: str
    # stop: by itself; length: cut off; too_long: the prompt leaves no room; refused, no_answer: text says why
    finish_reason: str
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int | None = None        # of the prompt, None: the engine does not say
    reasoning: str = ""         # closed thoughts that the engine has taken out of the text
    tokens: list = field(default_factory=list)      # with --logprobs: [(text, [(text, log-probability), ...])]


@dataclass
class Sampling:
    """How answers are drawn."""
    max_tokens: int             # an answer may have, thoughts included
    temperature: float = 0.0    # 0: always the likeliest token
    top_p: float = 1.0          # draw from the likeliest tokens of this total probability
    top_k: int = 0              # draw from so many tokens, 0: from all
    logprobs: int = 0           # so many alternatives of each token come back
    thinking: str = "default"   # enable_thinking of the chat template: on, off; default: nothing is passed


def pick_engine(engine, base_url):
    """Name of the engine that --engine auto means."""
    if engine != "auto":
        return engine
    if base_url:
        return "openai"
    return "vllm" if importlib.util.find_spec("vllm") else "transformers"


def template_flags(thinking):
    """What the chat template gets beside the messages. thinking: of Sampling."""
    return {} if thinking == "default" else {"enable_thinking": thinking == "on"}


def opens_thought(tokenizer, flags):
    """The text that an answer begins with although the teacher did not write it: the template opens its thoughts."""
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False,
                                           add_generation_prompt=True, **flags)
    return "<think>" if prompt.rstrip().endswith("<think>") else ""


class Prompt(NamedTuple):
    """The teacher's prompt. role user: text before and behind the last user message; system: a message of its own."""
    role: str
    before: str
    after: str = ""


def read_prompt(path, role="user"):
    """Prompt of a file; other braces in it than PLACE mean nothing. Raises UserError."""
    text = json_files.read_text(path, "--prompt_file ").rstrip("\n")
    parts = text.split(PLACE)
    if role == "system":
        if len(parts) > 1 or not text.strip():
            why = f"has {PLACE}, which --prompt_role system does not fill in" if text.strip() else "is empty"
            raise UserError(f"--prompt_file {path}: {why}")
        return Prompt(role, text)
    if len(parts) != 2:
        raise UserError(f"--prompt_file {path}: has {PLACE} {len(parts) - 1} times; write it once, where the line goes"
                        + ("" if len(parts) > 2 else ", or give --prompt_role system"))
    return Prompt(role, *parts)


def with_prompt(prompt, messages):
    """The messages as the teacher gets them. ValueError for a second system message, or when there is no message of the
    user at the end that a prompt could go around.
    """
    if prompt.role == "system":
        if messages and messages[0]["role"] in ("system", "developer"):
            raise ValueError("has a system message of its own beside --prompt_role system; join the two")
        return [{"role": "system", "content": prompt.before}, *messages]
    if not messages or messages[-1]["role"] != "user":
        raise ValueError("has no message of the user before its last answer, around which --prompt_role user could go")
    return [*messages[:-1], {**messages[-1], "content": prompt.before + messages[-1]["content"] + prompt.after}]


def behind_prompt(prompt, encoder, chats, tools, results):
    """[(ids, mask, tokens of the student)] or ValueErrors: encoder.encode's results, each followed by its teacher's.

    The teacher's has the prompt, and the very tokens of the student's answers.
    """
    prompted, found = [], []
    for messages in chats:
        try:
            prompted.append([*with_prompt(prompt, messages[:-1]), messages[-1]])
        except ValueError as error:
            prompted.append(error)
    chosen = [i for i, messages in enumerate(prompted) if isinstance(messages, list)]
    taught = iter(encoder.encode([prompted[i] for i in chosen], [tools[i] for i in chosen]))
    for messages, result in zip(prompted, results):
        theirs = next(taught) if isinstance(messages, list) else messages
        if wrong := [one for one in (result, theirs) if isinstance(one, ValueError)]:
            found.append(wrong[0])
        elif [t for t, m in zip(*result) if m] != [t for t, m in zip(*theirs) if m]:
            found.append(ValueError("the answer has other tokens behind the prompt"))
        else:
            found.append((result[0] + theirs[0], result[1] + theirs[1], len(result[0])))
    return found


def evaluated(p, max_new_tokens):
    """Flags of both evaluations; max_new_tokens: a default."""
    p.add_argument("--model_path", help="base model the run started from (default: what the run's flags say)")
    p.add_argument("--output_dir", required=True, help="everything written goes here")
    p.add_argument("--max_new_tokens", type=int, default=max_new_tokens, help="tokens an answer may have")
    p.add_argument("--batch_size", type=int, default=16, help="answers generated together by transformers")
    p.add_argument("--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto",
                   help="to compute in; auto: bfloat16 on a GPU that has it, else float32 (vllm: its own choice)")
    p.add_argument("--device", help="where the models run (default: the GPU if there is one)")


def taker(requests):
    """take of a list of requests, for `answers`."""
    waiting = deque(requests)
    return lambda n: [waiting.popleft() for _ in range(min(n, len(waiting)))]


def ask(answers, chats):
    """[Answer] to conversations, in their order; for greedy ones, or where every seed may be 0."""
    requests = [Request(number, messages, 0) for number, messages in enumerate(chats)]
    found = {request.id: answer for request, answer in answers(taker(requests))}
    return [found[number] for number in range(len(chats))]


# ---------------------------------------------------------------------------------------------------------------------
# vLLM


def open_vllm(name, draw, *, tensor_parallel_size=1, pipeline_parallel_size=1, gpu_memory_utilization=0.9,
              max_model_len=0, enforce_eager=False, seed=0, chunk_size=1024):
    """A model folder or hub name in this process. draw: Sampling. max_model_len 0: the model's own.

    chunk_size: requests given to vLLM together; the next ones wait for all of them.
    """
    try:
        from vllm import LLM, SamplingParams
        from vllm.sampling_params import StructuredOutputsParams
    except ImportError as error:
        raise UserError(f"--engine vllm: vLLM cannot be imported ({error}); install it, or give --base_url")
    llm = LLM(model=name, tensor_parallel_size=tensor_parallel_size, pipeline_parallel_size=pipeline_parallel_size,
              gpu_memory_utilization=gpu_memory_utilization, max_model_len=max_model_len or None,
              max_logprobs=max(20, draw.logprobs), enforce_eager=enforce_eager, enable_prefix_caching=True, seed=seed)
    tokenizer, flags = llm.get_tokenizer(), template_flags(draw.thinking)
    need_template(tokenizer, name)
    begin, limit = opens_thought(tokenizer, flags), llm.llm_engine.model_config.max_model_len

    def sampling(request):
        constraint = StructuredOutputsParams(**request.constraint) if request.constraint else None
        return SamplingParams(temperature=draw.temperature, top_p=draw.top_p, top_k=draw.top_k, seed=request.seed,
                              max_tokens=draw.max_tokens, logprobs=draw.logprobs or None,
                              structured_outputs=constraint)

    def answers(take):
        while requests := take(chunk_size):
            yield from chunk(requests)

    def chunk(requests):
        fitting = []
        for request in requests:        # one that does not fit would end the whole call
            ids = tokenizer.apply_chat_template(request.messages, add_generation_prompt=True, return_dict=False,
                                                **flags)
            if len(ids) >= limit:
                yield request, Answer("", "too_long", len(ids))
            else:
                fitting.append(request)
        outputs = llm.chat([request.messages for request in fitting], [sampling(r) for r in fitting],
                           use_tqdm=False, chat_template_kwargs=flags or None) if fitting else []
        for request, out in zip(fitting, outputs):
            best = out.outputs[0]
            tokens = [(row[i].decoded_token, [(alternative.decoded_token, alternative.logprob) for alternative in
                                              sorted(row.values(), key=lambda a: a.rank)[:draw.logprobs]])
                      for i, row in zip(best.token_ids, best.logprobs or [])]
            yield request, Answer(begin + best.text, best.finish_reason, len(out.prompt_token_ids),
                                  len(best.token_ids), out.num_cached_tokens, tokens=tokens)
    return answers


# ---------------------------------------------------------------------------------------------------------------------
# A server


def open_server(name, draw, base_url, concurrency=64, timeout=600.0, patience=600.0):
    """A server that knows the model as `name`; `concurrency` requests are under way at once. draw: Sampling.

    timeout: seconds that one request may take in all; patience: seconds that one line's failed requests are repeated.
    Raises UserError when the server, or the model, is not there.
    """
    server = Server(base_url, timeout)
    try:
        models = [str(model["id"]) for model in server.call("/models")["data"]]
    except MALFORMED as error:
        raise UserError(f"--base_url {server.url}: {explain(error)}; start the server, or mend the address "
                        "(it mostly ends in /v1)")
    if name not in models:
        raise UserError(f"--model_name {name}: the server has {', '.join(models) or 'no models'}")

    todo, done = queue.SimpleQueue(), queue.SimpleQueue()

    def work():
        while True:
            request = todo.get()
            try:
                done.put((request, ask_server(name, draw, server, request, patience)))
            except Exception as error:      # raised in the main thread, which ends the run
                done.put((request, error))
    for _ in range(concurrency):            # daemons: a thread that waits for the server must not delay the end
        threading.Thread(target=work, daemon=True).start()

    def answers(take):
        under_way = 0
        while True:
            for request in take(concurrency - under_way):
                todo.put(request)
                under_way += 1
            if not under_way:
                return
            request, answer = done.get()
            under_way -= 1
            if isinstance(answer, Exception):
                raise answer
            yield request, answer
    return answers


class Refused(OSError):
    """The server's answer is an error. code: its HTTP status; said: what it says, one line; retry_after: header."""

    def __init__(self, code, said, retry_after=""):
        super().__init__(said)
        self.code, self.said, self.retry_after = code, said, retry_after


class Server:
    """An address, and what its server has refused so far. url is without the user's name and password.

    httpx carries the calls, in an event loop of its own thread: a time limit there holds for a whole call.
    """

    def __init__(self, base_url, timeout):
        need_package("httpx", "--base_url")
        import httpx
        try:
            parts = urllib.parse.urlsplit(base_url.rstrip("/"))
        except ValueError as error:
            raise UserError(f"--base_url: is no address ({error})")
        if "@" in parts.path + parts.query + parts.fragment:        # the address may hold a part of a password
            raise UserError("--base_url: a name or password in it holds / ? or #; write them as %2F, %3F, %23")
        user, _, host = parts.netloc.rpartition("@")
        self.url, self.timeout, headers = parts._replace(netloc=host).geturl(), timeout, {}
        if key := os.environ.get("OPENAI_API_KEY", "").strip():
            if not re.fullmatch(r"[\x21-\x7e]+", key):
                raise UserError("OPENAI_API_KEY: holds characters that no key has, such as a space or a line feed")
            headers["Authorization"] = f"Bearer {key}"
        elif user:
            user = urllib.parse.unquote(user).encode()
            headers["Authorization"] = f"Basic {base64.b64encode(user).decode()}"
        self.max_tokens, self.dropped = "max_tokens", frozenset()   # its name for the limit; fields it does not take
        self.told = -math.inf       # when the last notice was printed
        self.failures = (httpx.HTTPError, httpx.InvalidURL)
        try:        # idle connections: vLLM closes them after 5 s
            self.client = httpx.AsyncClient(headers={"Content-Type": "application/json", **headers}, timeout=None,
                                            limits=httpx.Limits(keepalive_expiry=2),
                                            verify=ssl.create_default_context())
            httpx.URL(self.url)
        except (ImportError, ValueError, httpx.InvalidURL) as error:      # of the address, or of a proxy's
            raise UserError(f"--base_url {self.url}, or a proxy of the environment: {error}")
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()

    def call(self, path, body=None, text=False):
        """GET, or POST of a JSON body; the JSON that comes back, whole within the timeout. Raises one of MALFORMED.

        text: what comes back is no JSON, and returned as bytes. A redirection is refused: it could lead to another
        host, which the key is not for.
        """
        data = None if body is None else json.dumps(body).encode()
        asked = asyncio.run_coroutine_threadsafe(self._ask("GET" if body is None else "POST", path, data), self.loop)
        try:
            response, found = asked.result()
        except TimeoutError:
            raise TimeoutError(f"no whole answer in {self.timeout:g} s")
        except self.failures as error:
            raise ConnectionError(root_cause(error))
        if response.is_redirect:
            place = urllib.parse.urlsplit(response.headers.get("Location", "")).netloc.rpartition("@")[2]
            raise Refused(response.status_code, f"redirects to {place or 'another address'}, which is not followed; "
                                                "give the address itself")
        if not response.is_success:
            raise Refused(response.status_code, said(found, response.reason_phrase),
                          response.headers.get("Retry-After", ""))
        return found if text else json_files.loads(found)

    async def _ask(self, method, path, data):
        """(response, at most LONGEST bytes of its body)."""
        found = bytearray()
        async with asyncio.timeout(self.timeout), self.client.stream(method, self.url + path, content=data) as response:
            async for part in response.aiter_bytes():
                found += part
                if len(found) > json_files.LONGEST:
                    break
        return response, bytes(found[:json_files.LONGEST])

    def drops(self, why, kept):
        """Whether a refusal is about a field that can be left out, or has another name, from now on.

        kept: fields that the user has set, which are never left out.
        """
        if self.max_tokens == "max_tokens" and "max_completion_tokens" in why:
            self.max_tokens = "max_completion_tokens"
            return True
        if not UNKNOWN.search(why.lower()):
            return False
        new = {name for name in NOT_SET if re.search(rf"\b{name}\b", why)} - self.dropped - {*kept}
        self.dropped |= new
        for name in sorted(new):
            print(f"notice     the server takes no {name}: "
                  + ("answers cannot be drawn again alike" if name == "seed" else "it draws by its own"))
        return bool(new)

    def tell(self, message):
        """Print a notice, at most one in NOTICE_S: a server that is down fails for every line."""
        if time.monotonic() - self.told > NOTICE_S:
            self.told = time.monotonic()
            print(printable(message))


def ask_server(name, draw, server, request, patience):
    """Answer to one request. What may fail only for a while is tried again for `patience` seconds.

    A line that the server refuses, or never answers while it lives, has an Answer that says so. UserError when the
    server is gone, or what it refuses is not the line.
    """
    end, pause, line = time.monotonic() + patience, 0.5, f"line {request.id + 1}"
    while True:
        sent = server.dropped, server.max_tokens
        body = {"model": name, "messages": request.messages, server.max_tokens: draw.max_tokens,
                "temperature": draw.temperature, "top_p": draw.top_p, **NOT_SET, "seed": request.seed,
                "top_k": draw.top_k}
        body = {name: value for name, value in body.items() if name not in sent[0]}
        if flags := template_flags(draw.thinking):
            body["chat_template_kwargs"] = flags
        if draw.logprobs:
            body |= {"logprobs": True, "top_logprobs": draw.logprobs}
        if request.constraint:
            body["structured_outputs"] = request.constraint
        try:
            return read_answer(server.call("/chat/completions", body))
        except Refused as error:
            why, pause_asked = explain(error), error.retry_after
            if error.code in (400, 413) and any(words in why.lower() for words in TOO_LONG):
                return Answer(why, "too_long")
            if error.code in (400, 422) and (
                    sent != (server.dropped, server.max_tokens)
                    or server.drops(why, ["top_k"] if draw.top_k else [])):
                continue        # as this thread, or another one, has learnt
            if error.code in WHOLE_RUN or error.code < 400:
                raise UserError(f"{line}: the server at {server.url} refuses it: {why}")
            if error.code not in TRANSIENT:
                return Answer(why, "refused")
            pause = max(pause, float(pause_asked) if pause_asked.isdecimal() else 0)
        except MALFORMED as error:
            why = explain(error)
        if time.monotonic() + pause > end:
            try:
                server.call("/models")
            except MALFORMED:
                raise UserError(f"{line}: no answer from {server.url} in {patience:g} s: "
                                f"{why}; what is finished is kept, the same command goes on")
            return Answer(f"no answer in {patience:g} s: {why}", "no_answer")
        server.tell(f"notice     {line} waits for {server.url}: {why}")
        time.sleep(pause)
        pause = min(2 * pause, 30)


def said(body, reason):
    """What a server says about an HTTP error, one line: of the body's bytes, or else the status's own words."""
    try:
        text = body[:SAID].decode("utf-8", "replace")
        found = json_files.loads(text)
        found = found.get("error", found)
        text = found["message"] if isinstance(found, dict) and "message" in found else str(found)
    except (ValueError, AttributeError):
        text = reason
    return printable(" ".join(str(text).split()), 200)


def root_cause(error):
    """The system's words for a failed connection, which clients wrap several times."""
    words = str(error) or type(error).__name__
    while error := error.__cause__ or error.__context__:
        if isinstance(error, OSError) and error.errno:      # asyncio has words of its own; negative: a name's
            words = f"[Errno {error.errno}] {os.strerror(error.errno)}" if error.errno > 0 else str(error)
    return words


def explain(error):
    """A failed call in a few words; for an HTTP error what the server says about it."""
    if isinstance(error, Refused):
        return f"HTTP {error.code} {error.said}"
    if isinstance(error, OSError):
        return str(error) or type(error).__name__
    return f"its answer is not what OpenAI's API gives ({type(error).__name__} {str(error)[:80]})"


def read_answer(found):
    """Answer from the JSON of /chat/completions; one of MALFORMED where it has another form."""
    choice, usage = found["choices"][0], found.get("usage") or {}
    message, details = choice["message"], usage.get("prompt_tokens_details") or {}
    rows = (choice.get("logprobs") or {}).get("content") or []
    tokens = [(row["token"], [(top["token"], top["logprob"]) for top in row["top_logprobs"]]) for row in rows]
    return Answer(plain(message["content"]), choice["finish_reason"], usage.get("prompt_tokens") or 0,
                  usage.get("completion_tokens") or 0, details.get("cached_tokens"),
                  plain(message.get("reasoning_content") or message.get("reasoning")).strip(), tokens)


def plain(content):
    """Text of a message's content: a text, nothing, or a list of parts such as {"type": "text", "text": ...}."""
    if isinstance(content, list):
        content = "".join(part if isinstance(part, str) else part.get("text") or "" for part in content)
    return json_files.HALF_CHARACTER.sub("\ufffd", content or "")         # no file can hold halves


# ---------------------------------------------------------------------------------------------------------------------
# transformers


def open_transformers(name, draw, max_model_len=0, batch_size=16, chunk_size=1024):
    """A model folder or hub name on the GPU, or the CPU where there is none. draw: Sampling.

    max_model_len 0: the model's own. batch_size, chunk_size: of answers_of.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        dtype = "auto" if device.type == "cuda" else torch.float32      # many CPUs are slow in bfloat16
        model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise UserError(f"--model_name {name}: cannot be loaded ({str(error).splitlines()[0][:200]}); "
                        "give a folder, or a hub name when online")
    need_template(tokenizer, name)
    ends = model.generation_config.eos_token_id
    if ends is None:
        ends = tokenizer.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    return answers_of(model.to(device).eval(), tokenizer, draw, ends, max_model_len, batch_size, chunk_size)


def answers_of(model, tokenizer, draw, ends, max_model_len=0, batch_size=16, chunk_size=1024):
    """`answers` of a loaded causal LM of transformers, adapters inside or not. ends: ids that end an answer.

    batch_size: requests generated together, out of chunk_size sorted by length. max_model_len 0: the model's.
    """
    import torch
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    from distill.generate import Draw, generate
    flags = template_flags(draw.thinking)
    begin = opens_thought(tokenizer, flags)
    limit = max_model_len or getattr(model.config, "max_position_embeddings", None) or 1 << 30

    def processors(seeds):
        if not draw.temperature:
            return []
        kept = [TopKLogitsWarper(draw.top_k)] if draw.top_k else []
        kept += [TopPLogitsWarper(draw.top_p)] if draw.top_p < 1 else []
        return [TemperatureLogitsWarper(draw.temperature), *kept, Draw(seeds)]

    def answers(take):
        while requests := take(chunk_size):
            yield from chunk(requests)

    def chunk(requests):
        fitting = []
        for request in requests:
            ids = tokenizer.apply_chat_template(request.messages, add_generation_prompt=True,
                                                return_dict=False, **flags)
            if len(ids) + draw.max_tokens > limit:
                yield request, Answer("", "too_long", len(ids))
            else:
                fitting.append((request, ids))
        fitting.sort(key=lambda pair: len(pair[1]))         # less padding
        for i in range(0, len(fitting), batch_size):
            yield from batch(fitting[i:i + batch_size])

    def batch(asked):
        found, logits = generate(model, [ids for _, ids in asked], draw.max_tokens, ends,
                                 processors([request.seed for request, _ in asked]), bool(draw.logprobs))
        for row, ((request, prompt), ids) in enumerate(zip(asked, found)):
            ended = ids[-1] in ends
            text = ids[:-1] if ended else ids
            top = [alternatives(logits[i][row]) for i in range(len(text))] if draw.logprobs else []
            yield request, Answer(
                begin + tokenizer.decode(text, skip_special_tokens=False), "stop" if ended else "length",
                len(prompt), len(ids), tokens=[(tokenizer.decode([t]), row_) for t, row_ in zip(text, top)])

    def alternatives(row):
        best = torch.log_softmax(row.float(), -1).topk(draw.logprobs)
        return [(tokenizer.decode([token]), value)
                for token, value in zip(best.indices.tolist(), best.values.tolist())]
    return answers


def need_template(tokenizer, name):
    """Raw prompts are not what a chat model was trained on: without a chat template most answers cannot be read."""
    if not tokenizer.chat_template:
        raise UserError(f"--model_name {name}: its tokenizer has no chat template; take a chat model")
