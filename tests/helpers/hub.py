"""A Hugging Face hub of one data set, as far as its client asks: what there is, and files by ranges of bytes."""
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "c0ffee" + 34 * "0"


class Hub:
    """serve() starts it; url; read: {file: bytes that were sent of it}."""

    def __init__(self, repo, files):
        """files: {name: bytes}."""
        self.repo, self.files, self.read = repo, files, dict.fromkeys(files, 0)

    def __enter__(self):
        hub = self

        def about(name):
            return {"type": "file", "path": name, "size": len(hub.files[name]), "oid": "0"}

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args):
                pass

            def answer(self, status, data=b"", **headers):
                self.send_response(status)
                for name, value in {"Content-Length": len(data), **headers}.items():
                    self.send_header(name.replace("_", "-"), value)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(data)

            def do_GET(self):
                path = self.path.split("?")[0]
                if path.startswith(f"/api/datasets/{hub.repo}/tree/"):
                    folder = path.split("/tree/")[1].partition("/")[2]
                    return self.answer(200, json.dumps([about(name) for name in hub.files if name.startswith(folder)]
                                                       ).encode())
                if path.startswith(f"/api/datasets/{hub.repo}"):
                    there = {"id": hub.repo, "sha": COMMIT, "siblings": [{"rfilename": name} for name in hub.files]}
                    return self.answer(200, json.dumps(there).encode())
                name = path.removeprefix(f"/datasets/{hub.repo}/resolve/{COMMIT}/")
                if name not in hub.files:
                    return self.answer(401 if path.startswith("/api") else 404, X_Error_Code="RepoNotFound")
                data, status, more = hub.files[name], 200, {}
                etag = hashlib.sha256(data).hexdigest()
                if wanted := self.headers.get("Range"):
                    start, stop = wanted.removeprefix("bytes=").split("-")
                    stop = min(int(stop or len(data) - 1), len(data) - 1)
                    more = {"Content_Range": f"bytes {start}-{stop}/{len(data)}"}
                    data, status = data[int(start):stop + 1], 206
                if self.command == "GET":
                    hub.read[name] += len(data)
                self.answer(status, data, ETag=f'"{etag}"', X_Repo_Commit=COMMIT, Accept_Ranges="bytes", **more)
            do_HEAD = do_GET

            def do_POST(self):
                """paths-info: sizes of files."""
                asked = self.rfile.read(int(self.headers["Content-Length"])).decode()
                found = [about(name) for name in hub.files if name in asked or name.replace("/", "%2F") in asked]
                self.answer(200, json.dumps(found).encode())

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        return self

    def __exit__(self, *why):
        self.server.shutdown()
        self.server.server_close()
