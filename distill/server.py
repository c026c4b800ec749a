"""A server with OpenAI's API, such as vLLM's or SGLang's: calls by httpx, one loop that repeats."""
import asyncio
import itertools
import json
import math
import os
import re
import ssl
import threading
import time
import urllib.parse
from concurrent.futures import wait

from core import json_files
from core.cli import UserError, printable, require, require_package

TRANSIENT = (408, 409, 425, 429, *range(500, 600))
NOTICE_S = 10           # seconds between notices of calls that failed
# what a server would else take from generation_config, at the value that changes nothing; the seed
NOT_SET = {"seed": 0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0,
           "frequency_penalty": 0.0}
# what a failed call, or an answer of another form, raises
MALFORMED = (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError)


class Refused(OSError):
    """The server's answer is an error. code: HTTP status."""

    def __init__(self, code, message):
        super().__init__(f"HTTP {code} {message}")
        self.code = code


class Server:
    """An address with its client. The calls run in an event loop of a daemon thread: a time limit
    there holds for a whole call, and waiting for the server does not delay the end of the process.
    """

    def __init__(self, base_url, timeout, flag="--base_url"):
        """timeout: seconds that one attempt of a call may take. flag: that gave the address."""
        require_package("httpx", flag)
        import httpx
        self.flag, self.timeout, self.noticed = flag, timeout, -math.inf
        self.url, self.failures = address(base_url, flag), (httpx.HTTPError, httpx.InvalidURL)
        # uncompressed: a few bytes of gzip in gzip would become gigabytes before they are counted
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if key := os.environ.get("OPENAI_API_KEY", "").strip():
            require(re.fullmatch(r"[\x21-\x7e]+", key), "OPENAI_API_KEY: holds characters that no "
                                                        "key has, such as a space or a line feed")
            headers["Authorization"] = f"Bearer {key}"
        try:
            self.client = httpx.AsyncClient(     # vLLM closes idle connections after 5 s
                headers=headers, timeout=None, limits=httpx.Limits(keepalive_expiry=2),
                verify=ssl.create_default_context())
        except (ImportError, ValueError, httpx.InvalidURL) as error:    # of a proxy's address
            raise UserError(f"{flag} {self.url}, by a proxy of the environment: {error}")
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()

    def wait(self, coroutine):
        """The result of a coroutine that the thread runs."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result()

    def each(self, ask, jobs, limit=64):
        """Yield (job, result of the coroutine ask(job)) as they end, `limit` under way at once."""
        jobs, under_way = iter(jobs), {}
        try:
            while True:
                for job in itertools.islice(jobs, limit - len(under_way)):
                    under_way[asyncio.run_coroutine_threadsafe(ask(job), self.loop)] = job
                if not under_way:
                    return
                for future in wait(under_way, return_when="FIRST_COMPLETED").done:
                    yield under_way.pop(future), future.result()        # an error ends the run
        finally:
            for future in under_way:
                future.cancel()

    async def fetch(self, path, body=None, end=math.inf):
        """GET, or POST of a JSON body -> bytes, before time.monotonic() is `end`. Raises OSError;
        Refused for an error status, a redirection, to which the key must not go, and an answer that
        is too long or compressed.
        """
        found, within = bytearray(), max(0.01, min(self.timeout, end - time.monotonic()))
        method, data = ("GET", None) if body is None else ("POST", json.dumps(body))
        try:
            async with asyncio.timeout(within), self.client.stream(
                    method, self.url + path, content=data) as response:
                packed = response.headers.get("Content-Encoding", "identity")
                if packed != "identity":
                    raise Refused(415, f"its answer is {printable(packed, 40)}, and was asked for "
                                       "as it is")
                async for part in response.aiter_raw():
                    found += part
                    if len(found) > json_files.LONGEST:
                        raise Refused(413, "its answer is too long")
        except TimeoutError:
            raise TimeoutError(f"no whole answer in {round(within, 2):g} s")
        except self.failures as error:
            raise ConnectionError(str(error) or type(error).__name__)
        if not response.is_success:
            words = found[:2000].decode("utf-8", "replace").split() or [response.reason_phrase]
            raise Refused(response.status_code, printable(" ".join(words), 500))
        return bytes(found)

    async def call(self, path, body=None, read=json_files.loads, end=math.inf):
        """read(what fetch gives), tried again until twice the timeout or `end` is over, where it
        failed for a reason that may pass. Raises MALFORMED.
        """
        pause, until = 0.5, min(end, time.monotonic() + 2 * self.timeout)
        while True:
            try:
                return read(await self.fetch(path, body, end))
            except MALFORMED as error:
                if (isinstance(error, Refused) and error.code not in TRANSIENT
                        or time.monotonic() + pause > until):
                    raise
                if time.monotonic() - self.noticed > NOTICE_S:
                    self.noticed = time.monotonic()
                    print(printable(f"notice     waiting for {self.url}: {explain(error)}"))
            await asyncio.sleep(pause)
            pause = min(2 * pause, 30)

    async def insist(self, path, body=None, read=json_files.loads, hint="", end=math.inf):
        """call(); UserError instead, with the hint where the server refuses."""
        try:
            return await self.call(path, body, read, end)
        except MALFORMED as error:
            hint = hint if isinstance(error, Refused) else ""
            raise UserError(f"{self.flag} {self.url}{path}: {explain(error)}{hint}")


def address(base_url, flag):
    """The address of a flag. Raises UserError, which shows no part that may be secret."""
    try:
        parts = urllib.parse.urlsplit(base_url)
    except ValueError as error:
        raise UserError(f"{flag}: is not an address ({error})")
    require("@" not in base_url and not parts.query and not parts.fragment,
            f"{flag}: holds a name and password (@), ?... or #..., which no call would carry; give "
            "the key in OPENAI_API_KEY, and an address that ends in its path, mostly /v1")
    return base_url.rstrip("/")


def explain(error):
    """A failed call in a few words."""
    if isinstance(error, OSError):
        return str(error) or type(error).__name__
    return (f"its answer is not what OpenAI's API gives ({type(error).__name__} "
            f"{str(error)[:80]})")
