"""A teacher behind vLLM's server: the log-probabilities that it gives to the tokens of an answer
(prompt_logprobs).

    vllm serve Qwen/Qwen3-30B-A3B-Instruct-2507 --max-logprobs 64

What is scored goes there as ids, never as text: no tokenizer of the server has a say. For each
token come the teacher's K likeliest (--distill_topk) and the token itself; all others are one
bucket, as with --teacher_path and the same K. Each conversation is one request, and its answer goes
to its own rows: one that failed and is sent again counts once.
"""
import math

import torch

from common.distributed import UserError
from distill.divergence import FLOOR
from distill.teacher_server import NOT_SET, Server


def known_tokens(found, k):
    """([ids], [log-probabilities]) of the k likeliest of a place's prompt_logprobs. ValueError."""
    try:
        ranked = sorted((value["rank"], int(token), float(value["logprob"]))
                        for token, value in found.items())
        ranked = [(token, logprob) for rank, token, logprob in ranked if rank <= k][:k]
        if len(ranked) != k or any(math.isnan(logprob) for _, logprob in ranked):
            raise ValueError
    except (KeyError, TypeError, AttributeError):
        raise ValueError
    return tuple(zip(*ranked))


class Scorer:
    """scorer(batch) -> ((ids (R, K), log-probabilities (R, K + 1), the last of all others), None).

    url, name: of the server and its model. timeout: seconds of a call; a batch has twice as many.
    """

    def __init__(self, url, name, k, timeout, rows):
        self.server, self.name, self.k = Server(url, timeout, "--teacher_url"), name, k
        self.rows = rows        # of the student's head

    def ask(self, ids, end=None):
        """known_tokens of each place of a conversation; None of the first. end: of insist."""
        found = self.server.insist("/completions", {
            **NOT_SET, "model": self.name, "prompt": ids, "max_tokens": 1, "temperature": 0.0,
            "prompt_logprobs": self.k}, hint=f"; it needs --max-logprobs {self.k}", end=end)
        try:
            first, *rows = found["choices"][0]["prompt_logprobs"]
            if len(rows) != len(ids) - 1:
                raise ValueError
            return [first, *(known_tokens(row, self.k) for row in rows)]
        except (ValueError, KeyError, TypeError, IndexError):
            raise UserError(f"--teacher_url {self.server.url}/completions: gave no prompt_logprobs "
                            f"of the {self.k} likeliest for each of {len(ids)} tokens; vLLM's "
                            "server does")

    def __call__(self, batch):
        ids, bounds = batch.prompted_ids.tolist(), batch.prompted_cu_seqlens.tolist()
        places = (batch.prompted_rows + 1).tolist()         # of the tokens that are predicted
        wanted = [(a, b) for a, b in zip(bounds, bounds[1:])
                  if any(a < place < b for place in places)]
        found = self.server.each(self.ask, [ids[a:b] for a, b in wanted])
        at = {a + i: row for (a, _), rows in zip(wanted, found) for i, row in enumerate(rows)}
        tokens, logprobs = (
            torch.tensor([at[place][i] for place in places], dtype=kind).reshape(-1, self.k)
            for i, kind in ((0, torch.int64), (1, torch.float64)))
        if (tokens >= self.rows).any():
            raise UserError(f"--teacher_url: names token {tokens.max().item()}, and the student has "
                            f"{self.rows:,}: serve a model of as many rows")
        rest = (1 - logprobs.exp().sum(-1, keepdim=True)).clamp(min=0).log()
        both = torch.cat([logprobs, rest], 1).clamp(min=FLOOR)
        device = batch.prompted_ids.device
        return (tokens.to(device), both.to(device)), None
