"""A server with OpenAI's /v1/models and /v1/chat/completions. Its teacher answers with a line's first word.

    python tests/helpers/label_server.py LOG

It prints its port, then appends each request body to LOG. An answer depends on the message and the seed alone; some
seeds give unusable answers. Words in a line cause faults, some at the first request only: slow, flaky (HTTP 500 first),
full (429), drop (connection closed first), garbage (no JSON first), never (no usable answer), long (400), refused
(403), drip (slow bytes first), bare (no usage, separate thoughts), seedless, limitless and plain (400 for a field).
"""
import contextlib
import hashlib
import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

GOOD = "<think>\nThe form is\nFinal Answer: xx\nand zh is possible.\n</think>\n\nFinal Answer: {}"
BAD = [("Looks like\nFinal Answer: hi", "length"), ("<think>\nMaybe\nFinal Answer: hi\nor not", "stop"),
       ("Final Answer: hi or el", "stop"), ("Final Answer: xx", "stop")]
seen, lock = set(), threading.Lock()


def answer_to(line, seed):
    """(text, finish_reason) of the teacher's answer."""
    draw = int(hashlib.sha256(f"{line}|{seed}".encode()).hexdigest()[:8], 16)
    if "never" in line.split() or draw % 3 == 0:
        return BAD[draw // 3 % len(BAD)]
    return GOOD.format(line.split()[0]), "stop"


class Handler(BaseHTTPRequestHandler):
    def reply(self, status, body):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        if self.path == "/v1/models":
            return self.reply(200, {"data": [{"id": "teacher"}]})
        self.reply(404, {"error": {"message": "Not Found"}})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        content = body["messages"][-1]["content"]
        line = content.strip().split("\n")[-1]
        words = line.split()
        with lock:
            first = (content, body.get("seed")) not in seen
            seen.add((content, body.get("seed")))
            with open(sys.argv[1], "a") as log:
                log.write(json.dumps(body) + "\n")
        if "slow" in words:
            time.sleep(0.2)
        if "long" in words:
            return self.reply(400, {"error": {"message": "This model's maximum context length is 128 tokens."}})
        if "refused" in words:
            return self.reply(403, {"error": {"message": "not allowed"}})
        if "seedless" in words and "seed" in body:
            return self.reply(422, {"detail": [{"type": "extra_forbidden", "loc": ["body", "seed"]}]})
        if "limitless" in words and "max_tokens" in body:
            return self.reply(400, {"error": {"message": "'max_tokens': use 'max_completion_tokens' instead."}})
        if "plain" in words and (other := body.keys() & {"top_k", "min_p", "repetition_penalty"}):
            return self.reply(400, {"error": {"message": f"Unrecognized: {', '.join(sorted(other))}"}})
        if first and "drip" in words:
            with contextlib.suppress(OSError):
                self.wfile.write(b"HTTP/1.1 200 OK\r\nX-Slow: ")
                for _ in range(200):
                    self.wfile.write(b"x")
                    time.sleep(0.05)
            return self.connection.close()
        if first and "flaky" in words:
            return self.reply(500, b"oops")
        if "full" in words:
            return self.reply(429, {"error": {"message": "rate limit"}})
        if first and "garbage" in words:
            return self.reply(200, b"<html>")
        if first and "drop" in words:
            return self.connection.close()
        text, reason = answer_to(line, body.get("seed"))
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": reason}
        if "bare" in words:
            thoughts, _, text = text.rpartition("</think>")
            choice["message"] = {"role": "assistant", "content": text, "reasoning_content": thoughts or None}
            return self.reply(200, {"choices": [choice], "usage": None})
        usage = {"prompt_tokens": len(content), "completion_tokens": len(text)}
        self.reply(200, {"choices": [choice], "usage": usage})

    def log_message(self, *_):
        pass


if __name__ == "__main__":
    ThreadingHTTPServer.request_queue_size = 256
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(server.server_address[1], flush=True)
    server.handle_error = lambda *_: None       # clients are killed
    server.serve_forever()
