"""A language identifier that answers like a chat model: py3langid behind OpenAI's /v1/chat/completions.

    pip install --no-deps py3langid==0.4.0      # BSD; needs numpy
    python distill/demo/langid_server.py --port_file port    # serves until it is ended; PORT goes to the file

No language model: a naive Bayes classifier over byte n-grams, which stands in for a large teacher where none can run.
It reads the last line of the message, so it fits prompts that end with the text, like distill/prompts/language_id.txt,
and answers in the form that prompt demands. Of the prompt's rules it knows what the labels are, nothing else: its codes
are kept where they are labels, languages in Cyrillic letters become ru, all others ot. The same text always gets the
same answer, whatever the seed.
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))    # common/ and distill/ stand there

from common import flags


def build_parser():
    p = flags.Parser(__doc__.split("\n")[0])
    p.add_argument("--port", type=int, default=0, help="to listen on, 0: any free one")
    p.add_argument("--port_file", type=Path, help="file to write the port to once it is served")
    flags.switch(p, "--stay", help="go on when the process that started this one has ended")
    return p


# parsed before torch is imported: --help and a mistake in a flag answer at once
ARGS = flags.parse(build_parser()) if __name__ == "__main__" else None

import json
import os
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from common import distributed
from common.distributed import UserError
from core import json_files
from distill.labels import LANGUAGES

NAME = "py3langid"
CYRILLIC = ("be", "bg", "kk", "ky", "mk", "mn", "ru", "sr", "tg", "tt", "uk")   # languages usually written so
FORM = "Final Answer:"          # what the prompt must ask for


def label_of(code):
    """Label of the language task for a language code of the identifier (ISO 639)."""
    if code in CYRILLIC:
        return "ru"
    return code if code in LANGUAGES else "ot"


def answer_to(body, classify):
    """JSON answer to a request of /chat/completions; ValueError names what this teacher cannot do."""
    content = body["messages"][-1]["content"]
    if FORM not in content:
        raise ValueError(f"this teacher only answers prompts that ask for '{FORM} ...' and end with the text")
    if body.get("logprobs"):
        raise ValueError("this teacher has no tokens, so no log-probabilities")
    text = content.rstrip().rpartition("\n")[2]
    answer = f"{FORM} {label_of(classify(text)[0])}"
    choice = {"index": 0, "message": {"role": "assistant", "content": answer}, "finish_reason": "stop"}
    return {"object": "chat.completion", "model": NAME, "choices": [choice]}        # no usage: it has no tokens


def make_handler(classify):
    class Handler(BaseHTTPRequestHandler):
        def reply(self, status, found):
            data = json.dumps(found).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self):
            if self.path == "/v1/models":
                return self.reply(200, {"object": "list", "data": [{"id": NAME, "object": "model"}]})
            self.reply(404, {"error": {"message": f"no such path: {self.path}"}})

        def do_POST(self):
            try:
                size = int(self.headers["Content-Length"])
                asked = json_files.loads(self.rfile.read(max(0, size)))         # -1 would wait for the end
                found = answer_to(asked, classify)
            except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
                return self.reply(400, {"error": {"message": f"{error}"}})
            self.reply(200, found)

        def log_message(self, *_):
            pass
    return Handler


def leave_with(parent):
    """End this process when the process that started it is gone, however that ended."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(0)


def main(argv=None):
    args, parent = ARGS or flags.parse(build_parser(), argv=argv), os.getppid()
    with distributed.one_clear_error():
        try:
            from py3langid import langid
        except ImportError as error:
            raise UserError(f"{error}: pip install --no-deps py3langid==0.4.0")
        langid.classify("the model is read at the first call")
        ThreadingHTTPServer.request_queue_size = 256
        try:
            server = ThreadingHTTPServer(("127.0.0.1", args.port), make_handler(langid.classify))
        except (OSError, OverflowError) as error:
            raise UserError(f"--port {args.port}: {error}")
        server.handle_error = lambda *_: None       # clients may be killed
        if not args.stay:
            threading.Thread(target=leave_with, args=(parent,), daemon=True).start()
        print(f"teacher    {NAME} on http://127.0.0.1:{server.server_address[1]}/v1", flush=True)
        if args.port_file:
            temporary = args.port_file.with_name(f".{args.port_file.name}.tmp")
            temporary.write_text(f"{server.server_address[1]}\n")
            os.replace(temporary, args.port_file)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            sys.exit(130)


if __name__ == "__main__":
    main()
