"""A teacher behind vLLM's server: the log-probabilities that it gives to the tokens of an answer
(prompt_logprobs).

    vllm serve Qwen/Qwen3-30B-A3B-Instruct-2507 --max-logprobs 64

What is scored goes there as ids, never as text: no tokenizer of the server has a say. For each
token come the teacher's K likeliest (--distill_topk) and the token itself; all others are one
bucket, as with --teacher_path and the same K. Each conversation is one request, and its answer goes
to its own rows: one that failed and is sent again counts once.
"""
import math
import re

import torch

from core.cli import UserError
from core.cli import printable
from distill.losses import FLOOR
from distill.server import NOT_SET, Server


ROUNDING = 1e-3         # by which rounded probabilities may be above 1


def known_tokens(found, k, token):
    """([ids], [log-probabilities]) of the k likeliest of a place's prompt_logprobs. ValueError.

    token: the one that stands at this place. Servers give it besides the likeliest: where it is not
    there, the row is another place's.
    """
    try:
        ranked = sorted((value["rank"], name, float(value["logprob"]))
                        for name, value in found.items())
    except (KeyError, TypeError, AttributeError, ValueError):
        raise ValueError(f"gave no prompt_logprobs of the {k} likeliest for each token; vLLM's "
                         "server does")
    if odd := [name for _, name, _ in ranked if not re.fullmatch(r"0|[1-9]\d{0,9}", name)]:
        raise ValueError(f"names a token {printable(odd[0], 20)}, which is no id")
    if str(token) not in found:
        raise ValueError(f"gave log-probabilities without that of token {token}, which was sent: "
                         "they are of another place")
    best = [(int(name), logprob) for rank, name, logprob in ranked if rank <= k][:k]
    if len(best) != k:
        raise ValueError(f"gave {len(best)} tokens of the {k} likeliest; it needs --max-logprobs {k}")
    if not all(value <= ROUNDING for _, _, value in ranked) or sum(
            math.exp(min(value, 1)) for _, value in best) > 1 + ROUNDING:
        raise ValueError("gave log-probabilities that are none: above 0, nan, or of more than 1 together")
    return tuple(zip(*best))


class Scorer:
    """scorer(batch) -> ((ids (R, K), log-probabilities (R, K + 1), the last of all others), None).

    url, name: of the server and its model. timeout: seconds of a call; a batch has twice as many.
    """

    def __init__(self, url, name, k, timeout, rows):
        self.server, self.name, self.k = Server(url, timeout, "--teacher_url"), name, k
        self.rows = rows        # of the student's head

    async def ask(self, ids, end=math.inf):
        """known_tokens of each place of a conversation; None of the first. end: of insist."""
        found = await self.server.insist("/completions", {
            **NOT_SET, "model": self.name, "prompt": ids, "max_tokens": 1, "temperature": 0.0,
            "prompt_logprobs": self.k}, hint=f"; it needs --max-logprobs {self.k}", end=end)
        try:
            first, *rows = found["choices"][0]["prompt_logprobs"]
        except (ValueError, KeyError, TypeError, IndexError):
            first, rows = None, []
        try:
            if len(rows) != len(ids) - 1:
                raise ValueError(f"gave prompt_logprobs of {len(rows)} places for {len(ids) - 1}; "
                                 "vLLM's server gives each")
            return [first, *(known_tokens(row, self.k, token)
                             for row, token in zip(rows, ids[1:]))]
        except ValueError as error:
            raise UserError(f"--teacher_url {self.server.url}/completions: {error}")

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
