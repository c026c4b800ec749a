"""What a student forgot: evaluate_prompt.py --unrelated FILE, chats that have nothing to do with
the prompt.

The answers in the file are scored as they stand, best such as the base itself gave: KL(base,
column) per token. Then all are asked the same questions, greedily: how many give the base's very
words, and how many answers follow the rule that was trained, although nobody asked for it (of a
rule with a topic any topic counts).
"""
import tempfile
from pathlib import Path

import torch

from common.distributed import UserError
from core import chat, metrics
from distill import student, causal_lm
from distill.choices import THINKING
from distill.chat_data import ChatSamples, ChatTable, Reading, build_table, question_hash
from distill.keep import kept


def read(path, run, tokenizer):
    """([samples], [messages without the answer]). UserError for questions that --keep trained."""
    encoder = chat.Encoder(tokenizer, "last", THINKING[run.enable_thinking])
    with tempfile.TemporaryDirectory() as scratch:
        build_table(scratch, [path], Reading(encoder, run.limit))
        table = ChatTable(scratch)
        samples = [ChatSamples(table)[i] for i in range(len(table))]
    chats = [record["messages"] for _, record in chat.read_records(path, [])]
    if run.keep and Path(run.keep).exists():
        seen = {question_hash(record["messages"]) for _, record in chat.read_records(run.keep, [])}
        if both := [question for question in map(chat.question, chats)
                    if question_hash([{"role": "user", "content": question}]) in seen]:
            raise UserError(f"--unrelated {path}: --keep {run.keep} trained {len(both)} of its "
                            f"questions, the first {both[0]!r}; judge by others")
    return samples, [messages[:-1] for messages in chats]


@torch.no_grad()
def divergence(voice, base, samples, batch_size):
    """KL(base, voice) per token of the samples' answers, in nats, of evaluate_prompt.Voices."""
    apart, count, device = 0.0, 0.0, voice.model.get_input_embeddings().weight.device
    with voice.packed(base) as packed:
        for start in range(0, len(samples), batch_size):
            parts = packed(kept(samples[start:start + batch_size]).to(device))
            apart, count = apart + parts.divergence.item(), count + parts.targets.item()
    return apart / count


def add(args, columns, voices, run, tokenizer, lines, rule):
    """Add its measures to the columns (None for a teacher) -> a clause for the verdict."""
    run.limit = causal_lm.length_limit(voices["base"].model.config, run.max_length,
                                     run.max_tokens_per_batch)
    samples, chats = read(args.unrelated, run, tokenizer)
    draw, found = student.greedy(lines.about["enable_thinking"]), {}
    asked = {name: voice for name, voice in voices.items()
             if name in ("base", "student", "control")}
    for name, voice in asked.items():
        print(f"asking     {name}: {len(chats):,} unrelated questions")
        answers = student.open_transformers(voice.model, tokenizer, lines.ends, draw,
                                            args.batch_size)
        with voice.speaking():
            given, _ = student.ask_all(answers, draw, chats, args.max_new_tokens, timed=False)
        texts = [answer.text.strip() for answer in given]
        found.setdefault("base", texts)
        columns[name] |= {
            "unrelated kl": divergence(voice, voices["base"], samples, args.batch_size),
            "unrelated same": sum(map(str.__eq__, texts, found["base"])) / len(texts),
            "unrelated follows": sum(rule(None, text) for text in texts) / len(texts)
            if rule else None}
    for name in columns.keys() - asked.keys():
        columns[name] |= dict.fromkeys(("unrelated kl", "unrelated same", "unrelated follows"))
    mine = columns["student"]
    clause = (f"on {len(chats)} unrelated questions it is {mine['unrelated kl']:.3f} nats a token "
              "from the base")
    if rule:
        clause += f" and follows the rule in {metrics.percent(mine['unrelated follows'])}"
    return clause
