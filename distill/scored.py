"""A teacher behind vLLM's server: the log-probabilities that it gives to the tokens of an answer
(prompt_logprobs).

    vllm serve Qwen/Qwen3-30B-A3B-Instruct-2507 --max-logprobs 64

What is scored goes there as ids, never as text: no tokenizer of the server has a say. For each
token come the teacher's K likeliest (--distill_topk) and the token itself; all others are one
bucket, as with --teacher_path and the same K. Each conversation is one request, and its answer goes
to its own rows: one that failed and is sent again counts once.
"""
import math
from concurrent.futures import ThreadPoolExecutor

import torch

from common.distributed import UserError
from distill.divergence import FLOOR
from distill.teacher_server import NOT_SET, Server

UNDER_WAY = 64          # requests of a rank at once


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

    url, name: of the server and its model. timeout: seconds of a call, and of its repetitions.
    """

    def __init__(self, url, name, k, timeout):
        self.server, self.name, self.k = Server(url, timeout, "--teacher_url"), name, k

    def ask(self, ids):
        """known_tokens of each place of a conversation; None of the first."""
        found = self.server.insist("/completions", {
            **NOT_SET, "model": self.name, "prompt": ids, "max_tokens": 1, "temperature": 0.0,
            "prompt_logprobs": self.k}, hint=f"; it needs --max-logprobs {self.k}")
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
        with ThreadPoolExecutor(UNDER_WAY) as pool:
            rows = dict(zip(wanted, pool.map(lambda part: self.ask(ids[slice(*part)]), wanted)))
        at = {a + i: row for (a, _), found in rows.items() for i, row in enumerate(found)}
        tokens, logprobs = (
            torch.tensor([at[place][i] for place in places], dtype=kind).reshape(-1, self.k)
            for i, kind in ((0, torch.int64), (1, torch.float64)))
        rest = (1 - logprobs.exp().sum(-1, keepdim=True)).clamp(min=0).log()
        both = torch.cat([logprobs, rest], 1).clamp(min=FLOOR).float()
        device = batch.prompted_ids.device
        return (tokens.to(device), both.to(device)), None
