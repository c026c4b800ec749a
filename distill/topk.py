"""Learning from a teacher's likeliest tokens: what create_data.py --logprobs stored -> student tokens; the loss.

A record has, for each token of its label, texts with log-probabilities. Teacher and student may have other tokenizers,
so nothing is taken over but what is exactly the same:

- A label is taught where the student's tokens have the very texts of the teacher's. Where they have not, or the record
  has no log-probabilities (labels by constraint), the sample is trained on its label alone, and counted.
- An alternative that is not exactly one student token joins "everything else", as does what the teacher gave no number.
- The token that ends the turn has no alternatives; it is trained by cross-entropy.

Loss of a taught token, w being the share of divergence: (1 - w) CE + w KL, the mix of Hinton et al. 2015
(arXiv:1503.02531) at temperature 1, as another would need the teacher's whole distribution. KL is between teacher p and
student q as distributions over the alternatives and one bucket for everything else (the bucket is this project's):

    KL = sum_i p_i log(p_i / q_i) + p_rest log(p_rest / q_rest),  p_rest = 1 - sum_i p_i,  q_rest = 1 - sum_i q_i

It is zero where the student agrees, and by the log-sum inequality never above the KL over the whole vocabulary. q is
the student's softmax over that; q_rest is summed from the other tokens' logits: the difference would be all rounding.
"""
import math
from array import array

import numpy as np
import torch

from common.distributed import UserError
from distill.journal import unpack

ROUNDING = 1e-3         # by which a probability may be above 1: values are stored with five decimals


# ---------------------------------------------------------------------------------------------------------------------
# Records -> student tokens


def read_alternatives(record):
    """(texts of the label's tokens, [(text, log-probability), ...] of each, likeliest first) of a chat record, or None.

    None: it has none. ValueError says what is wrong with them.
    """
    if "logprobs" not in record or not record["messages"][-1].get("weight", 1):
        return None
    rows, texts = record["logprobs"], record.get("label_tokens")
    again = "; label again with create_data.py --logprobs, or drop both fields"
    if isinstance(rows, str):
        try:
            rows = unpack(rows)
        except ValueError as error:
            raise ValueError(f'its "logprobs" cannot be read: the text {error}{again}')
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts) or \
            "".join(texts) != record["messages"][-1]["content"].strip():
        raise ValueError(f'its "label_tokens" do not make up the last answer, so its log-probabilities cannot be placed'
                         f"{again}")
    if not isinstance(rows, list) or len(rows) != len(texts):
        raise ValueError(f'its "logprobs" are not one list for each of the {len(texts)} label tokens{again}')
    for number, row in enumerate(rows, 1):
        where = f"logprobs of label token {number}"
        if not isinstance(row, list) or not all(
                isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], str) and pair[0]
                and type(pair[1]) in (int, float) and math.isfinite(pair[1]) for pair in row):
            raise ValueError(f"{where} are no list of [text, finite log-probability]{again}")
        if above := [pair for pair in row if pair[1] > ROUNDING]:
            raise ValueError(f"{where}: {above[0][0]!r} has {above[0][1]}; the logarithm of a probability is at most 0"
                             f"{again}")
        if (mass := sum(math.exp(value) for _, value in row)) > 1 + ROUNDING:
            raise ValueError(f"{where}: the probabilities add up to {mass:.3f}, more than 1{again}")
        if len({text for text, _ in row}) < len(row):
            raise ValueError(f"{where} have a text twice{again}")
    return texts, [sorted(row, key=lambda pair: -pair[1]) for row in rows]


class Alternatives:
    """Collects the k likeliest alternatives of each label token of many samples, as ids of the student's tokenizer."""

    def __init__(self, tokenizer, k):
        self.tokenizer, self.k = tokenizer, k
        self.texts, self.ids = {}, {}                           # id -> text, (id before, text) -> id or None
        self.places, self.taught = array("q"), array("q")       # of each taught token; taught tokens of each sample
        self.found, self.values = array("i"), array("f")        # k ids and log-probabilities of each taught token
        self.widest, self.without = 0, 0
        self.otherwise, self.rest = [], 0.0

    def text(self, end, token):
        """What a token adds to a text; `end`: a control token to stand before it, as a first one may lose its space."""
        if token not in self.texts:
            one, two = (self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
                        for ids in ([end], [end, token]))
            self.texts[token] = two[len(one):]
        return self.texts[token]

    def find(self, end, text):
        """The one student token that is exactly this text, or None."""
        if (end, text) not in self.ids:
            found = None
            for before in ("\n", self.tokenizer.decode([end])):         # so that no space is added in front
                first, both = (self.tokenizer(whole, add_special_tokens=False)["input_ids"]
                               for whole in (before, before + text))
                if both[:-1] == first and self.text(end, both[-1]) == text:
                    found = both[-1]
            self.ids[end, text] = found
        return self.ids[end, text]

    def add(self, record, ids, mask, name, shift=0, stop=None):
        """Note what a sample is taught. ids, mask: of chat.Encoder; of which ids[shift:stop] is kept; name: for errors.

        Raises ValueError for log-probabilities that cannot be right.
        """
        known = read_alternatives(record)
        before, stop = len(self.places), len(ids) if stop is None else stop
        if known is None:
            self.without += 1
        else:
            texts, rows = known
            end = len(mask) - 1 - mask[::-1].index(True)        # of the last answer: the token that ends it
            start = end - len(texts)
            own = [self.text(ids[end], token) for token in ids[max(0, start):end]]
            # where the student's first token holds the space in front of an answer, the others hold it as well
            space = own[0][:len(own[0]) - len(own[0].lstrip())] if own else ""
            self.widest = max(self.widest, *map(len, rows))
            if own == [space + texts[0], *texts[1:]] and all(mask[start:end]):
                for place, row, front in zip(range(start, end), rows, [space] + [""] * len(rows)):
                    if shift < place < stop:        # nothing predicts the first token
                        self._add_token(ids[end], place - shift, row, front)
            else:
                self.otherwise.append(name)
        self.taught.append(len(self.places) - before)

    def _add_token(self, end, place, row, space):
        pairs = [(self.find(end, space + text), value) for text, value in row[:self.k]]
        pairs = [(token, value) for token, value in pairs if token is not None]
        if pairs:
            total = math.log(max(1.0, sum(math.exp(value) for _, value in pairs)))       # above 1 by rounding alone
            missing = self.k - len(pairs)
            self.places.append(place)
            self.found.extend([token for token, _ in pairs] + [pairs[0][0]] * missing)
            self.values.extend([value - total for _, value in pairs] + [-math.inf] * missing)
            self.rest += max(0.0, 1 - sum(math.exp(value) for _, value in pairs))

    def arrays(self, path):
        """{name: array} for the table; see table.ChatTable. Raises UserError where nothing, or less, is stored."""
        if not self.widest:
            raise UserError(f"--distill_topk: {path} has no log-probabilities; make it with create_data.py --logprobs "
                            f"{self.k}, or drop the flag")
        if self.k > self.widest:
            raise UserError(f"--distill_topk {self.k}: {path} has at most {self.widest} log-probabilities a token; "
                            f"give --distill_topk {self.widest}, or make it with create_data.py --logprobs {self.k}")
        if not self.places:
            raise UserError(f"--distill_topk: of {path} nothing can be taught: the student splits "
                            f"{len(self.otherwise)} labels otherwise, of others no alternative is one of its tokens; "
                            "drop the flag")
        return {"teacher_offsets": np.concatenate([[0], np.cumsum(self.taught)]),
                "teacher_places": np.array(self.places),
                "teacher_ids": np.array(self.found).reshape(-1, self.k),
                "teacher_logprobs": np.array(self.values, np.float32).reshape(-1, self.k)}

    def about(self):
        """Summary to print, one line."""
        samples = sum(n > 0 for n in self.taught)
        text = (f"teacher    {samples} of {len(self.taught)} samples have alternatives, for {len(self.places)} tokens; "
                f"{100 * self.rest / len(self.places):.2f}% of the probability is on everything else")
        if self.without:
            text += f"; {self.without} have none"
        if self.otherwise:
            text += f"; {len(self.otherwise)} are split otherwise by the student, first {self.otherwise[0]}"
        return text + ("; those train on the label alone" if samples < len(self.taught) else "")


# ---------------------------------------------------------------------------------------------------------------------
# Loss


def divergence(logits, ids, logprobs):
    """KL of the top of this file, (R,) fp32; 0 where nothing is known.

    logits (R, V) fp32; ids (R, K) int64 alternatives and logprobs (R, K) fp32 of them, -inf where there are fewer: such
    ids repeat the first one.
    """
    p = logprobs.exp()
    p_rest = (1 - p.sum(-1)).clamp(min=0) * (p[:, 0] > 0)
    total = logits.logsumexp(-1)
    log_q = logits.gather(1, ids) - total[:, None]
    log_q_rest = logits.scatter(1, ids, -math.inf).logsumexp(-1) - total
    return (torch.xlogy(p, p) - p * log_q).sum(-1) + torch.xlogy(p_rest, p_rest) - p_rest * log_q_rest


def mixed_loss(logits, targets, ids, logprobs, share):
    """(loss, sum of cross-entropies, sum of divergences, number of taught rows), 0-d fp32; only the loss has gradients.

    targets (R,) int64; share: of the divergence in the loss of a taught row, 0 to 1. The others as in `divergence`.
    """
    ce = logits.logsumexp(-1) - logits.gather(1, targets[:, None])[:, 0]
    kl, taught = divergence(logits, ids, logprobs), (logprobs[:, 0] > -math.inf).float()
    loss = (ce + share * taught * (kl - ce)).sum()
    return loss, ce.detach().sum(), kl.detach().sum(), taught.sum()
