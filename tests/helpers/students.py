"""Runs of train_sft.py in tests, and losses and divergences by transformers' forward."""
import json

import numpy as np
import torch
import torch.nn.functional as F

from tests.helpers import trainer

HELD_OUT, SEED = 0.15, 42
SCRIPT = "distill/train_sft.py"


def plan_run(argv, gpus=2):
    """A dry run of train_sft.py in this process; raises UserError."""
    words = [*map(str, argv), "--dry_run", str(gpus)]
    train_sft.check_flags(train_sft.build_parser().parse_args(words), gpus)
    train_sft.main(words)


train_sft = trainer.trainer_of(SCRIPT)


def sample_loss(model, table, number):
    """(sum of cross-entropies of trained tokens, number of right ones) of one sample by transformers' forward."""
    span = slice(table.offsets[number], table.offsets[number + 1])
    ids = torch.from_numpy(table.tokens[span].astype(np.int64))
    labels = torch.where(torch.from_numpy(table.trained[span].copy()), ids, -100)
    logits = model(input_ids=ids[None]).logits[0, :-1]
    return (F.cross_entropy(logits, labels[1:], reduction="sum", ignore_index=-100),
            (logits.argmax(-1) == labels[1:]).sum())


def answer_rows(net, tokenizer, asked, answer):
    """(logits of the rows that predict an answer's ids, these ids) by a plain forward pass, without final white space."""
    start = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
    whole = tokenizer.apply_chat_template([*asked, answer], return_dict=False)
    while tokenizer.decode(whole[-1:]).isspace():
        whole = whole[:-1]
    assert whole[:len(start)] == start
    return net(torch.tensor([whole])).logits[0, len(start) - 1:-1], whole[len(start):]


def apart(student, teacher, kind, beta=0.5, k=0):
    """Divergence of one row (V,) by plain probabilities in double precision; k: all other tokens are one bucket."""
    size = min(len(student), len(teacher))
    q, p = (logits[:size].double().softmax(-1) for logits in (student, teacher))
    if k:
        kept = p.topk(k).indices
        p, q = (torch.cat([d[kept], (1 - d[kept].sum())[None]]) for d in (p, q))

    def kl(a, b):
        return (a * (a / b).log()).sum()
    m = beta * p + (1 - beta) * q
    return {"forward": kl(p, q), "reverse": kl(q, p), "js": beta * kl(p, m) + (1 - beta) * kl(q, m)}[kind]


def train(pool, ranks, output_dir, *flags, fails="", key=""):
    """{step: {metric: value}} of a run of train_sft.py; None if it fails, as expected, with the message `fails`.
    key: a server's API key; no run prints it."""
    words = "--output_dir", output_dir, "--num_workers", 0, "--report_to", "none", "--logging_steps", 1, *flags
    statuses, output = pool.run(ranks, trainer.RUN_SCRIPT, SCRIPT, list(map(str, words)),
                                env={"OPENAI_API_KEY": key})
    assert any(statuses) == bool(fails) and fails in output and not (key and key in output), output
    if fails:
        return None
    metrics = {}
    for line in map(json.loads, (output_dir / "metrics.jsonl").read_text().splitlines()):
        metrics.setdefault(line["step"], {}).update(line)
    return metrics


def column(metrics, name="train/loss"):
    """{step: value} of one metric out of those of train()."""
    return {step: values[name] for step, values in sorted(metrics.items()) if name in values}
