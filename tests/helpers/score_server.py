"""vLLM's server that scores: prompt_logprobs of prompts given as ids, by transformers."""
import json

import torch
from transformers import AutoModelForCausalLM

from tests.helpers.lora_server import LoraServer


class ScoreServer(LoraServer):
    """with ScoreServer(model folder, name) as server: url, calls, fails: how many of the first calls are lost, each
    after the work for it is done."""

    def __init__(self, folder, name, fails=0):
        super().__init__(folder)
        self.name, self.lost, self.model = name, fails, AutoModelForCausalLM.from_pretrained(folder).eval()

    @torch.no_grad()
    def score(self, ids, k):
        """[None, {token: {"logprob", "rank", "decoded_token"}} of each next place]: the k likeliest and the own."""
        rows = [None]
        for place, scores in enumerate(self.model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1), 1):
            shown = dict.fromkeys([*scores.topk(k).indices.tolist(), ids[place]])
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
