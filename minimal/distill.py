# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11", "transformers>=5.17", "numpy"]
# ///
"""Prompt distillation in one file, on one GPU: a model learns to answer as if it had its prompt.

    python minimal/distill.py --model_path Qwen/Qwen2.5-0.5B-Instruct --prompt_file prompt.txt \
        --questions_file questions.txt

The model answers the questions with the prompt. A copy without the prompt learns these answers
(--loss ce), or the full distribution of each of their tokens (--loss kl). Held-out questions
evaluate the copy, and the model with and without its prompt. distill/train_sft.py adds speed
(packing, FSDP2, LoRA, vLLM) and fault tolerance. A test checks that, for the same answers, --loss
ce gives the same losses and gradients as that trainer.
"""
import argparse
import json
import math
import os
import re
import shutil
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer

p = argparse.ArgumentParser(description="Distil a prompt into the model.")
p.add_argument("--model_path", required=True, help="chat model, folder or hub name")
p.add_argument("--prompt_file", required=True, help="text of the system message to distil")
p.add_argument("--questions_file", required=True, help="one question per line")
p.add_argument("--held_out", type=float, default=0.2, help="share of questions for evaluation")
p.add_argument("--output_dir", default="output")
p.add_argument("--loss", choices=("ce", "kl"), default="ce")
p.add_argument("--temperature", type=float, default=0.0, help="sampling; 0 = greedy")
p.add_argument("--max_new_tokens", type=int, default=128, help="most tokens of an answer")
p.add_argument("--per_device_train_batch_size", type=int, default=8, help="answers per micro-step")
p.add_argument("--gradient_accumulation_steps", type=int, default=1)
p.add_argument("--max_steps", type=int, default=200, help="optimizer steps")
p.add_argument("--learning_rate", type=float, default=2e-5)
p.add_argument("--warmup_steps", type=int, default=20)
p.add_argument("--bf16", action="store_true", help="autocast")
p.add_argument("--logging_steps", type=int, default=10)
p.add_argument("--save_steps", type=int, default=100)
p.add_argument("--seed", type=int, default=42, help="seed of order, hold-out and sampled answers")
args = p.parse_args()

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
out = Path(args.output_dir)
out.mkdir(parents=True, exist_ok=True)
tokenizer = AutoTokenizer.from_pretrained(args.model_path, trust_remote_code=False)
prompt = Path(args.prompt_file).read_text().strip()
questions = [line.strip() for line in open(args.questions_file) if line.strip()]
special = set(tokenizer.all_special_ids)
PAD = tokenizer.eos_token_id        # fills rows; attention masks exclude it


def load(source):
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32,
                                                 trust_remote_code=False)
    return model.to(device).eval()


def write(path, text):
    """Write a file under a temporary name, then rename it, so that it is always complete."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text)
    os.replace(temporary, path)


# ---- Chats as tokens


def chat_ids(system, question, answer=None):
    """Ids of a chat; without an answer, those up to its start."""
    texts = {"system": system, "user": question, "assistant": answer}
    messages = [{"role": role, "content": text} for role, text in texts.items() if text]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=answer is None,
                                         return_dict=False)


def label_chat(question, answer, system=""):
    """(ids, number of untrained ids before the answer). The answer and its end token are trained.

    Text that the template adds after the end token, such as a line break, is cut off.
    """
    before, ids = chat_ids(system, question), chat_ids(system, question, answer)
    assert ids[:len(before)] == before, "the template rewrites the request once it is answered"
    while ids[-1] not in special:
        ids.pop()
    return ids, len(before)


def logits_of(model, rows):
    """[(ids, n_before)] -> logits (R, V) of the trained tokens, and these tokens (R,)."""
    ids = pad_sequence([torch.tensor(ids) for ids, _ in rows], True, PAD).to(device)
    lengths = torch.tensor([len(ids) for ids, _ in rows], device=device)[:, None]
    before = torch.tensor([n for _, n in rows], device=device)[:, None]
    position = torch.arange(ids.shape[1], device=device)
    with torch.autocast(device.type, torch.bfloat16, enabled=args.bf16):
        logits = model(input_ids=ids, attention_mask=(position < lengths).long()).logits
    trained = (position >= before) & (position < lengths)       # (B, S)
    return logits[:, :-1][trained[:, 1:]].float(), ids[trained]


# ---- 1. The teacher answers


@torch.no_grad()
def answers_of(model, questions, system, temperature=0.0):
    """[answer, or None if it was cut off]. Generates in left-padded batches."""
    answers = []
    for first in range(0, len(questions), 32):
        rows = [chat_ids(system, question) for question in questions[first:first + 32]]
        longest = max(map(len, rows))
        ids = torch.tensor([[PAD] * (longest - len(row)) + row for row in rows], device=device)
        position = torch.arange(longest, device=device)
        lengths = torch.tensor([len(row) for row in rows], device=device)[:, None]
        mask = (position >= longest - lengths).long()
        sampling = {"do_sample": temperature > 0, "temperature": temperature or None}
        with torch.autocast(device.type, torch.bfloat16, enabled=args.bf16):
            output = model.generate(input_ids=ids, attention_mask=mask, pad_token_id=PAD,
                                   max_new_tokens=args.max_new_tokens, **sampling)
        for row in output[:, longest:].tolist():
            text = tokenizer.decode(row, skip_special_tokens=True).strip()
            answers.append(text if special & set(row) else None)    # without end token: cut off
    return answers


shuffled = np.random.default_rng((args.seed, 2)).permutation(len(questions))
n_held_out = math.ceil(args.held_out * len(questions))
train_questions = [questions[i] for i in np.sort(shuffled[n_held_out:])]
eval_questions = [questions[i] for i in np.sort(shuffled[:n_held_out])]
teacher = load(args.model_path)
torch.manual_seed(args.seed)
chats = {}
for name, asked in (("answers", train_questions), ("held_out", eval_questions)):
    path = out / f"{name}.jsonl"        # a later start reuses existing answers
    if not path.exists():
        answers = answers_of(teacher, asked, prompt, args.temperature)
        turns = [[{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
                 for question, answer in zip(asked, answers) if answer]
        print(f"{name}: {len(turns)} of {len(asked)} questions; the other answers were empty or "
              f"longer than {args.max_new_tokens} tokens")
        write(path, "".join(json.dumps({"messages": messages}) + "\n" for messages in turns))
    lines = [json.loads(line)["messages"] for line in open(path)]
    chats[name] = [(user["content"], assistant["content"]) for user, assistant in lines]
    assert chats[name], f"{path} is empty; if answers were cut off, raise --max_new_tokens"

# ---- 2. The student learns them, without the prompt

rows = [label_chat(question, answer) for question, answer in chats["answers"]]
prompted = [label_chat(question, answer, prompt) for question, answer in chats["answers"]]
checkpoints = [folder for folder in out.iterdir() if re.fullmatch(r"checkpoint-\d+", folder.name)]
checkpoints.sort(key=lambda folder: int(folder.name.split("-")[1]))
step = 0
student = load(checkpoints[-1] if checkpoints else args.model_path).train()
decay = {True: [], False: []}           # True for matrices, False for norms and embeddings
for name, parameter in student.named_parameters():
    decay[parameter.ndim > 1 and "embed" not in name].append(parameter)
optimizer = torch.optim.AdamW([{"params": decay[True], "weight_decay": 0.01},
                               {"params": decay[False], "weight_decay": 0.0}],
                              betas=(0.9, 0.95), fused=True)
if checkpoints:
    state = torch.load(checkpoints[-1] / "trainer_state.pt", map_location="cpu", weights_only=True)
    step = state["step"]
    optimizer.load_state_dict(state["optimizer"])


def loss_of(chosen):
    """Sum over trained tokens of cross-entropy, or of KL(teacher with prompt, student)."""
    logits, targets = logits_of(student, [rows[i] for i in chosen])
    if args.loss == "ce":
        return F.cross_entropy(logits, targets, reduction="sum")
    with torch.no_grad():               # the same tokens in the same order, after the prompt
        wanted = logits_of(teacher, [prompted[i] for i in chosen])[0].log_softmax(-1)
    return F.kl_div(logits.log_softmax(-1), wanted, reduction="sum", log_target=True)


def save():
    """Write checkpoint-N atomically (temporary name, sync, rename); delete the previous one."""
    building, final = out / f"checkpoint-{step}.building", out / f"checkpoint-{step}"
    shutil.rmtree(building, ignore_errors=True)
    student.save_pretrained(building)       # loads with from_pretrained
    tokenizer.save_pretrained(building)
    torch.save({"step": step, "optimizer": optimizer.state_dict()}, building / "trainer_state.pt")
    os.sync()                               # to disk before the rename
    os.rename(building, final)
    checkpoints.append(final)
    while len(checkpoints) > 1:
        shutil.rmtree(checkpoints.pop(0))


size, accumulation = args.per_device_train_batch_size, args.gradient_accumulation_steps
steps_per_epoch = math.ceil(len(rows) / size / accumulation)
while step < args.max_steps:
    epoch, epoch_step = divmod(step, steps_per_epoch)   # the step gives the order: exact resume
    order = np.random.default_rng((args.seed, epoch, 1)).permutation(len(rows))
    window = order[epoch_step * size * accumulation:(epoch_step + 1) * size * accumulation]
    n_targets = sum(len(rows[i][0]) - rows[i][1] for i in window)
    total = 0.0
    for first in range(0, len(window), size):
        loss = loss_of(window[first:first + size]) / n_targets      # a mean over the whole step
        loss.backward()
        total += loss.item()
    norm = torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
    warm = min(1, (step + 1) / max(1, args.warmup_steps))       # linear, then a cosine to a tenth
    done = max(0, step - args.warmup_steps) / max(1, args.max_steps - args.warmup_steps)
    lr = args.learning_rate * warm * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * done)))
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    step += 1
    if step % args.logging_steps == 0 or step == args.max_steps:
        values = {"train/loss": total, "train/grad_norm": norm.item(), "lr": lr}
        shown = " | ".join(f"{name} {value:.6g}" for name, value in values.items())
        print(f"step {step:>6}/{args.max_steps} | {shown}", flush=True)
        with open(out / "metrics.jsonl", "a") as log:
            log.write(json.dumps({"step": step, **values}) + "\n")
    if step % args.save_steps == 0 or step == args.max_steps:
        save()

# ---- 3. Evaluate on held-out questions


@torch.no_grad()
def evaluate(model, system):
    """Share of held-out answers equal to the teacher's, and nats per token of the teacher's."""
    asked, wanted = zip(*chats["held_out"])
    equal = np.mean([a == b for a, b in zip(answers_of(model, asked, system), wanted)])
    total, n = 0.0, 0
    for question, answer in chats["held_out"]:
        logits, tokens = logits_of(model, [label_chat(question, answer, system)])
        total += F.cross_entropy(logits, tokens, reduction="sum").item()
        n += len(tokens)
    return {"equal": float(equal), "nats_per_token": total / n}


results = {"base": evaluate(teacher, ""), "base + prompt": evaluate(teacher, prompt),
           "student": evaluate(student.eval(), "")}
write(out / "judged.json", json.dumps(results, indent=1))
print(f"{len(chats['held_out'])} held-out questions: answers equal to the teacher's | nats a token")
for name, values in results.items():
    print(f"{name:<14} {100 * values['equal']:5.1f} % | {values['nats_per_token']:.3f}")
