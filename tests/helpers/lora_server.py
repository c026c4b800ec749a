"""A replacement for vLLM's server with transformers and PEFT: completions and adapters; prompts and answers are ids."""
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM


@torch.no_grad()
def draw_answer(model, prompt, seed, tokens, ends):
    """Ids drawn after a prompt, one token after the other, each by a whole forward pass; as in generation.Draw."""
    ids, numbers = list(prompt), torch.Generator().manual_seed(seed)
    while len(ids) < len(prompt) + tokens and (len(ids) == len(prompt) or ids[-1] not in ends):
        sums = model(torch.tensor([ids])).logits[0, -1].double().softmax(-1).cumsum(-1)
        ids.append(int((sums <= torch.rand(1, generator=numbers, dtype=torch.float64) * sums[-1]).sum()))
    return ids[len(prompt):]


class LoraServer:
    """with LoraServer(model folder) as server: url (ends in /v1), calls: [(path, body)], fails: {path: status}."""

    def __init__(self, folder):
        self.folder, self.models, self.calls, self.fails, self.lock = folder, {}, [], {}, threading.Lock()

    def complete(self, body):
        """Ids of the answer to body["prompt"]."""
        assert [body[name] for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")] == [
            1, 1, 0, 0, 1]
        return draw_answer(self.models[body["model"]], body["prompt"], body["seed"], body["max_tokens"],
                           body["stop_token_ids"])

    def answer(self, path, body):
        """(status, text) of a call."""
        with self.lock:
            self.calls.append((path, body))
            if self.fails.get(path):
                return self.fails.pop(path), json.dumps({"error": {"message": "no"}})
            if path == "/v1/load_lora_adapter":
                base = AutoModelForCausalLM.from_pretrained(self.folder)
                self.models[body["lora_name"]] = PeftModel.from_pretrained(base, body["lora_path"]).eval()
            elif path == "/v1/unload_lora_adapter":
                del self.models[body["lora_name"]]
            elif path == "/v1/completions":
                return 200, json.dumps({"choices": [{"token_ids": self.complete(body), "text": "?"}]})
            else:
                return 200, json.dumps({"data": []})
            return 200, "Success: done."

    def __enter__(self):
        server = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *args):
                pass

            def do_POST(self):
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                status, text, *headers = server.answer(self.path, json.loads(body or "null"))
                self.send_response(status)
                for name, value in headers:
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(text.encode())
            do_GET = do_POST
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.http.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"
        return self

    def __exit__(self, *why):
        self.http.shutdown()
        self.http.server_close()


class ScoreServer(LoraServer):
    """with ScoreServer(model folder, name, fails) as server: url, calls. The first `fails` answers are lost."""

    def __init__(self, folder, name, fails=0):
        super().__init__(folder)
        self.name, self.lost, self.model = name, fails, AutoModelForCausalLM.from_pretrained(folder).eval()

    @torch.no_grad()
    def score(self, ids, k):
        """[None, {token: {"logprob", "rank", "decoded_token"}} a position]: the k likeliest tokens and the sent one."""
        rows = [None]
        for position, scores in enumerate(self.model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1), 1):
            shown = dict.fromkeys([*scores.topk(k).indices.tolist(), ids[position]])
            rows.append({str(token): {"logprob": scores[token].item(), "rank": int((scores > scores[token]).sum()) + 1,
                                      "decoded_token": "?"} for token in reversed(shown)})
        return rows

    def answer(self, path, body):
        assert path == "/v1/completions" and body["model"] == self.name and body["max_tokens"] == 1
        with self.lock:
            self.calls.append((path, body))
            rows = self.score(body["prompt"], body["prompt_logprobs"])
            if self.lost:
                self.lost -= 1
                return 503, json.dumps({"error": {"message": "busy"}})
            return 200, json.dumps({"choices": [{"text": "?", "prompt_logprobs": rows}]})
