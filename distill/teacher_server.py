"""A teacher behind a server: any with OpenAI's /chat/completions (vllm serve, SGLang, ...)."""
import asyncio
import base64
import json
import math
import os
import queue
import re
import ssl
import threading
import time
import urllib.parse
from concurrent.futures import ThreadPoolExecutor

from common.flags import UserError, need, need_package
from common.text import printable
from core import json_files
from distill.teacher import Answer

TRANSIENT = (408, 409, 425, 429, *range(500, 600))
WHOLE_RUN = (401, 402, 404, 405)        # wrong key, no credit, wrong address: no line is to blame
UNKNOWN = re.compile("unsupported|not supported|unrecogni|unknown|unexpected|extra|not permitted|"
                     "not allowed|invalid")
TOO_LONG = ("context length", "too long", "maximum model length", "max_model_len", "longer than")
UNDER_WAY = 64          # requests of each() at once
NOTICE_S = 10           # seconds between notices of calls that failed
SAID = 2**16            # bytes read of what a server says about an error
# what a server would else take from the model's generation_config, and the value that changes
# nothing; and the seed
NOT_SET = {"seed": 0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0,
           "frequency_penalty": 0.0}
# what a failed call, or an answer of another form, raises
MALFORMED = (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError)


def open_server(name, draw, base_url, concurrency=64, timeout=600.0, patience=600.0):
    """`answers` of teacher.py by a server that knows the model as `name`. draw: Sampling.

    concurrency: requests under way at once. timeout: seconds that one request may take in all;
    patience: seconds that one line's failed requests are repeated. Raises UserError when the
    server, or the model, is not there.
    """
    server = Server(base_url, timeout)
    try:
        models = [str(model["id"]) for model in server.call("/models")["data"]]
    except MALFORMED as error:
        raise UserError(f"--base_url {server.url}: {explain(error)}; start the server, or mend the "
                        "address (it mostly ends in /v1)")
    need(name in models, f"--model_name {name}: the server has {', '.join(models) or 'no models'}")

    def answers(take):
        done, under_way = queue.SimpleQueue(), 0
        while True:
            for request in take(concurrency - under_way):
                asked = server.start(ask_server(name, draw, server, request, patience))
                asked.add_done_callback(lambda found, request=request: done.put((request, found)))
                under_way += 1
            if not under_way:
                return
            request, found = done.get()
            under_way -= 1
            yield request, found.result()       # an error ends the run
    return answers


class Refused(OSError):
    """The server's answer is an error. code: HTTP status; said: its words; retry_after: header."""

    def __init__(self, code, said, retry_after=""):
        super().__init__(said)
        self.code, self.said, self.retry_after = code, said, retry_after


class Server:
    """An address, and what its server has refused so far. url is without the user's name and
    password.

    httpx carries the calls, in an event loop of its own thread: a time limit there holds for a
    whole call. The thread is a daemon: waiting for the server must not delay the end.
    """

    def __init__(self, base_url, timeout, flag="--base_url"):
        need_package("httpx", flag)
        import httpx
        self.flag = flag
        self.timeout, self.failures = timeout, (httpx.HTTPError, httpx.InvalidURL)
        self.url, user = address(base_url, flag)
        # uncompressed: a few bytes of gzip in gzip would become gigabytes before they are counted
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity",
                   **authorization(user)}
        # its name for the limit; fields it does not take
        self.max_tokens, self.dropped = "max_tokens", frozenset()
        self.told = -math.inf       # when the last notice was printed
        try:        # idle connections: vLLM closes them after 5 s
            self.client = httpx.AsyncClient(headers=headers, timeout=None,
                                            limits=httpx.Limits(keepalive_expiry=2),
                                            verify=ssl.create_default_context())
            httpx.URL(self.url)
        except (ImportError, ValueError, httpx.InvalidURL) as error:    # of a proxy's address, too
            raise UserError(f"{flag} {self.url}, or a proxy of the environment: {error}")
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()

    def start(self, work):
        """Have the thread do a coroutine -> Future of its result."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def call(self, path, body=None, text=False, within=None):
        """What fetch() returns, waited for in any other thread."""
        return self.start(self.fetch(path, body, text, within)).result()

    def insist(self, path, body=None, text=False, hint="", end=None):
        """call(), and again where what failed may fail only for a while. UserError when that is
        over, after twice `timeout` seconds, or by `end`; hint: what it then says beside.
        """
        last, pause = min(end or math.inf, time.monotonic() + self.timeout), 0.5    # to try again
        while True:
            try:
                left = (end or math.inf) - time.monotonic()
                return self.call(path, body, text, max(0.01, min(self.timeout, left)))
            except MALFORMED as error:
                lasts = isinstance(error, Refused) and error.code not in TRANSIENT
                if end and isinstance(error, TimeoutError):
                    hint = (f"; the calls of a step have {2 * self.timeout:g} s together, twice "
                            "--request_timeout")
                if lasts or time.monotonic() + pause > last:
                    if not isinstance(error, (Refused, TimeoutError)):      # of what nobody has read
                        hint = ""
                    raise UserError(f"{self.flag} {self.url}{path}: {explain(error)}{hint}")
            time.sleep(pause)
            pause = min(2 * pause, 30)

    def each(self, ask, jobs):
        """[ask(job, end)], UNDER_WAY at once. end: time.monotonic() of insist, the same for all of
        them: other ranks wait.
        """
        end, pool = time.monotonic() + 2 * self.timeout, ThreadPoolExecutor(UNDER_WAY)
        try:
            return list(pool.map(lambda job: ask(job, end), jobs))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    async def fetch(self, path, body=None, text=False, within=None):
        """GET, or POST of a JSON body; the JSON that comes back, whole within so many seconds, or
        the timeout. Raises one of MALFORMED.

        text: what comes back is not JSON, and returned as bytes. A redirection is refused: it could
        lead to another host, which the key is not for.
        """
        data = None if body is None else json.dumps(body).encode()
        within = within or self.timeout
        try:
            method = "GET" if body is None else "POST"
            response, found = await asyncio.wait_for(self.stream(method, path, data), within)
        except TimeoutError:
            raise TimeoutError(f"no whole answer in {round(within, 2):g} s")
        except self.failures as error:
            raise ConnectionError(root_cause(error))
        headers = response.headers
        if response.is_redirect:
            place = urllib.parse.urlsplit(headers.get("Location", "")).netloc.rpartition("@")[2]
            raise Refused(response.status_code, f"redirects to {place or 'another address'}, which "
                                                "is not followed; give the address itself")
        if not response.is_success:
            raise Refused(response.status_code, said(found, response.reason_phrase),
                          headers.get("Retry-After", ""))
        return found if text else json_files.loads(found)

    async def stream(self, method, path, data):
        """(response, its body). Refused when that is longer than LONGEST."""
        found, most = bytearray(), json_files.LONGEST
        async with self.client.stream(method, self.url + path, content=data) as response:
            packed = response.headers.get("Content-Encoding", "identity")
            if packed != "identity":
                raise Refused(415, f"its answer is {printable(packed, 40)}, and was asked for as it is")
            async for part in response.aiter_raw():
                found += part
                if len(found) > most:
                    raise Refused(413, f"its answer is longer than {most >> 20} MiB")
        return response, bytes(found)

    def drops(self, why, kept):
        """Whether a refusal is about a field that can be left out, or has another name, from now
        on. kept: fields that the user has set, which are never left out.
        """
        if self.max_tokens == "max_tokens" and "max_completion_tokens" in why:
            self.max_tokens = "max_completion_tokens"
            return True
        if not UNKNOWN.search(why.lower()):
            return False
        named = {name for name in NOT_SET if re.search(rf"\b{name}\b", why)}
        new = named - self.dropped - {*kept}
        self.dropped |= new
        for name in sorted(new):
            what = "it draws by its own"
            if name == "seed":
                what = "answers cannot be drawn again alike"
            print(f"notice     the server takes no {name}: {what}")
        return bool(new)

    def tell(self, message):
        """Print a notice, at most one in NOTICE_S: a server that is down fails for every line."""
        if time.monotonic() - self.told > NOTICE_S:
            self.told = time.monotonic()
            print(printable(message))


def address(base_url, flag):
    """(address without the user's name and password, those or ""). Raises UserError."""
    try:
        parts = urllib.parse.urlsplit(base_url.rstrip("/"))
    except ValueError as error:
        raise UserError(f"{flag}: is not an address ({error})")
    # a part of a password may stand there
    need("@" not in parts.path + parts.query + parts.fragment,
         f"{flag}: a name or password in it holds / ? or #; write them as %2F, %3F, %23")
    need(not parts.query and not parts.fragment,     # which may be a key, so it is not shown
         f"{flag}: ends in ?... or #..., which no call would carry; give the key in OPENAI_API_KEY, "
         "and an address that ends in its path, mostly /v1")
    user, _, host = parts.netloc.rpartition("@")
    return parts._replace(netloc=host).geturl(), urllib.parse.unquote(user)


def authorization(user):
    """Headers with the key of the environment, or with the address's own name and password."""
    if key := os.environ.get("OPENAI_API_KEY", "").strip():
        need(re.fullmatch(r"[\x21-\x7e]+", key),
             "OPENAI_API_KEY: holds characters that no key has, such as a space or a line feed")
        return {"Authorization": f"Bearer {key}"}
    words = base64.b64encode(user.encode()).decode()
    return {"Authorization": f"Basic {words}"} if user else {}


async def ask_server(name, draw, server, request, patience):
    """Answer to one request. What may fail only for a while is tried again for `patience` seconds.

    A line that the server refuses, or never answers while it lives, has an Answer that says so.
    UserError when the server is gone, or what it refuses is not the line.
    """
    end, pause, line = time.monotonic() + patience, 0.5, f"line {request.id + 1}"
    while True:
        known = server.dropped, server.max_tokens
        try:
            return read_answer(await server.fetch(
                "/chat/completions", body_of(name, draw, server, request)))
        except Refused as error:
            why = explain(error)
            if error.code in (400, 413) and any(words in why.lower() for words in TOO_LONG):
                return Answer(why, "too_long")
            if error.code in (400, 422) and (known != (server.dropped, server.max_tokens)
                                             or server.drops(why, ["top_k"] if draw.top_k else [])):
                continue        # as this request, or another one, has learnt
            need(error.code not in WHOLE_RUN and error.code >= 400,
                 f"{line}: the server at {server.url} refuses it: {why}")
            if error.code not in TRANSIENT:
                return Answer(why, "refused")
            if error.retry_after.isdecimal():
                left = end - time.monotonic() - 1       # a last time, where it asks for longer
                pause = max(pause, min(float(error.retry_after), left))
        except MALFORMED as error:
            why = explain(error)
        if time.monotonic() + pause > end:
            try:
                await server.fetch("/models")
            except MALFORMED:
                raise UserError(f"{line}: no answer from {server.url} in {patience:g} s: {why}; "
                                "what is finished is kept, the same command goes on")
            return Answer(f"no answer in {patience:g} s: {why}", "no_answer")
        server.tell(f"notice     {line} waits for {server.url}: {why}")
        await asyncio.sleep(pause)
        pause = min(2 * pause, 30)


def body_of(name, draw, server, request):
    """The JSON of a request, as far as the server takes it."""
    body = {"model": name, "messages": request.messages, server.max_tokens: draw.max_tokens,
            "temperature": draw.temperature, "top_p": draw.top_p, **NOT_SET,
            "seed": request.seed, "top_k": draw.top_k}
    body = {field: value for field, value in body.items() if field not in server.dropped}
    if draw.template_flags:
        body["chat_template_kwargs"] = draw.template_flags
    if draw.logprobs:
        body |= {"logprobs": True, "top_logprobs": draw.logprobs}
    if request.constraint:
        body["structured_outputs"] = request.constraint
    return body


def said(body, reason):
    """What a server says about an error, one line: of the body's bytes, or the status's words."""
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
        if isinstance(error, OSError) and error.errno:
            words = str(error)      # negative: a name's
            if error.errno > 0:     # asyncio has words of its own
                words = f"[Errno {error.errno}] {os.strerror(error.errno)}"
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
    tokens = [(row["token"], [(top["token"], top["logprob"]) for top in row["top_logprobs"]])
              for row in rows]
    reasoning = plain(message.get("reasoning_content") or message.get("reasoning"))
    return Answer(plain(message["content"]), choice["finish_reason"],
                  usage.get("prompt_tokens") or 0, usage.get("completion_tokens") or 0,
                  details.get("cached_tokens"), reasoning.strip(), tokens)


def plain(content):
    """Text of a message's content: a text, None, or parts such as {"type": "text", "text": ...}."""
    if isinstance(content, list):
        content = "".join(part if isinstance(part, str) else part.get("text") or ""
                          for part in content)
    return json_files.HALF_CHARACTER.sub("\ufffd", content or "")     # no file can hold halves
