# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11", "tokenizers", "huggingface-hub", "numpy"]
# ///
"""Block diffusion (BD3-LM, arXiv 2503.09573) on GSM8K in one file, on one GPU.

    python minimal/train_bd3lm.py --train_data_file train.jsonl --eval_data_file test.jsonl

A test checks that losses and gradients equal those of diffusion/train_bd3lm.py --no-pack, which
adds speed (sparse attention, packed rows, several GPUs) and fault tolerance.
"""
import argparse
import json
import math
import os
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import nn

p = argparse.ArgumentParser(description="Block diffusion on GSM8K.")
p.add_argument("--train_data_file", required=True, help='JSONL of {"question", "answer"}')
p.add_argument("--eval_data_file", required=True, help="the same, for the bound and the samples")
p.add_argument("--tokenizer", default="gpt2", help="tokenizer.json with <|endoftext|>, or hub name")
p.add_argument("--output_dir", default="output")
p.add_argument("--hidden_size", type=int, default=768)
p.add_argument("--layers", type=int, default=12)
p.add_argument("--heads", type=int, default=12)
p.add_argument("--cond_size", type=int, default=128, help="width of the noise level's embedding")
p.add_argument("--dropout", type=float, default=0.1)
p.add_argument("--block_size", type=int, default=16, help="tokens per block")
p.add_argument("--max_length", type=int, default=512, help="longer problems are left out")
p.add_argument("--per_device_train_batch_size", type=int, default=32, help="problems a micro-step")
p.add_argument("--gradient_accumulation_steps", type=int, default=4)
p.add_argument("--max_steps", type=int, default=10_000, help="optimizer steps")
p.add_argument("--learning_rate", type=float, default=5e-4, help="constant after the warm-up")
p.add_argument("--warmup_steps", type=int, default=1000)
p.add_argument("--ema_decay", type=float, default=0.9999, help="decay of the average")
p.add_argument("--bf16", action="store_true", help="autocast")
p.add_argument("--logging_steps", type=int, default=10)
p.add_argument("--save_steps", type=int, default=1000, help="steps between checkpoints")
p.add_argument("--seed", type=int, default=42, help="seed of weights, order, noise")
args = p.parse_args()

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
out = Path(args.output_dir)
out.mkdir(parents=True, exist_ok=True)
L = args.max_length     # a row: one problem, padded

# ---- Data: a problem -> tokens in blocks; the answer's tokens are noised and trained

file = args.tokenizer if os.path.exists(args.tokenizer) else None
tokenizer = Tokenizer.from_file(file) if file else Tokenizer.from_pretrained(args.tokenizer)
tokenizer.add_special_tokens(["<|mask|>"])
END, MASK = tokenizer.token_to_id("<|endoftext|>"), tokenizer.token_to_id("<|mask|>")


def head_of(question):
    """Ids of the text before the answer."""
    text = f"Question: {question.strip()}\nAnswer:"
    return [END, *tokenizer.encode(text, add_special_tokens=False).ids]


def read(path):
    """File -> tokens (n, L) and is_target (n, L); -1 is padding.

    The end token is repeated to the end of its block and trained, as a sampler fills blocks.
    """
    tokens, is_target, n_long = [], [], 0
    for line in open(path):
        problem = json.loads(line)
        head = head_of(problem["question"])
        answer = tokenizer.encode(f" {problem['answer'].strip()}", add_special_tokens=False).ids
        ids = [*head, *answer, END]
        ids += [END] * (-len(ids) % args.block_size)
        n_long += len(ids) > L
        if len(ids) <= L:
            tokens.append(ids + [-1] * (L - len(ids)))
            is_target.append([len(head) <= i < len(ids) for i in range(L)])
    print(f"{path}: {len(tokens)} problems, {n_long} left out as longer than {L} tokens")
    return np.array(tokens), np.array(is_target)


def blocks_of(is_target):
    """(n, L) -> index of each token's block among the blocks with targets in these rows, else -1.

    All tokens of such a block share one noise level.
    """
    n = len(is_target)
    has = is_target.reshape(n, -1, args.block_size).any(-1)             # (n, blocks)
    number = np.where(has, has.cumsum().reshape(has.shape) - 1, -1)
    return number.repeat(args.block_size, axis=1)


# ---- Noise: t uniform in (0.001, 1] for each block, a token masked with probability t


def draw(purpose, number, groups, rows):
    """Random numbers of a step: levels t (groups,), one per stratum, and uniform (rows, L)."""
    rng = np.random.default_rng((args.seed, purpose, *number))
    strata = rng.permutation(groups)
    level = (strata + rng.random(groups)) / groups
    rng.random(groups)          # unused, but the big trainer draws these too
    return 1e-3 + (1 - 1e-3) * level, rng.random((rows, L))


def diffuse(tokens, is_target, level, uniform):
    """Rows -> (noisy, is_masked, weight), each (n, L); noisy is MASK where is_masked.

    The cross-entropies of masked tokens, weighted by 1 / t, bound the negative log-likelihood.
    """
    t = np.where(is_target, level[blocks_of(is_target)], 1.0)
    is_masked = is_target & (uniform <= t)
    return np.where(is_masked, MASK, tokens), is_masked, 1 / t


# ---- Model: a DiT over [noisy tokens | clean tokens] with the paper's mask


def attention_mask(tokens):
    """(n, L) clean tokens -> (n, 1, 2L, 2L) bool: queries (rows) may attend to keys (columns).

    A noisy token attends to its noisy block and the clean blocks before it, a clean token to its
    clean block and those before it. Padding attends only to itself and is otherwise masked.
    """
    block = torch.arange(L, device=tokens.device).repeat(2) // args.block_size
    clean = torch.arange(2 * L, device=tokens.device) >= L
    own = (block[:, None] == block) & (clean[:, None] == clean)
    before = (block[:, None] > block) & clean
    real = (tokens >= 0).repeat(1, 2)
    seen = (own | before) & real[:, :, None] & real[:, None, :]
    return (seen | torch.eye(2 * L, dtype=torch.bool, device=tokens.device))[:, None]


class Norm(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x, shift, scale):
        x = F.layer_norm(x.float(), x.shape[-1:]) * self.weight
        return x * (1 + scale) + shift


class Layer(nn.Module):
    """Attention and MLP under adaLN-zero: every layer starts as the identity."""

    def __init__(self):
        super().__init__()
        size = args.hidden_size
        self.norm_attention, self.norm_mlp = Norm(size), Norm(size)
        self.qkv = nn.Linear(size, 3 * size, bias=False)
        self.out = nn.Linear(size, size, bias=False)
        self.up, self.down = nn.Linear(size, 4 * size), nn.Linear(4 * size, size)
        self.modulation = nn.Linear(args.cond_size, 6 * size)

    def forward(self, x, condition, cos, sin, mask):
        """x (n, 2L, H), cos and sin (2L, D / 2), mask (n, 1, 2L, 2L) -> like x."""
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(condition).chunk(6)
        qkv = self.qkv(self.norm_attention(x, shift1, scale1)).unflatten(-1, (3, args.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)            # each (n, heads, 2L, D)
        q, k = (rotate(t, cos, sin).to(v.dtype) for t in (q, k))
        seen = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)
        x = x + F.dropout(gate1 * self.out(seen), args.dropout, self.training)
        mlp = self.down(F.gelu(self.up(self.norm_mlp(x, shift2, scale2)), approximate="tanh"))
        return x + F.dropout(gate2 * mlp, args.dropout, self.training)


def rotate(x, cos, sin):
    """Rotary position embedding: rotate halves of x (..., D) by angles that grow with position."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class DiT(nn.Module):
    def __init__(self):
        super().__init__()
        size, cond = args.hidden_size, args.cond_size
        self.embed = nn.Embedding(tokenizer.get_vocab_size(), size)
        self.condition_in, self.condition_out = nn.Linear(256, cond), nn.Linear(cond, cond)
        self.layers = nn.ModuleList([Layer() for _ in range(args.layers)])
        self.norm, self.modulation = Norm(size), nn.Linear(cond, 2 * size)
        self.head = nn.Linear(size, tokenizer.get_vocab_size())
        nn.init.kaiming_uniform_(self.embed.weight, a=math.sqrt(5))
        for linear in [self.head, self.modulation, *(layer.modulation for layer in self.layers)]:
            nn.init.zeros_(linear.weight)
            nn.init.zeros_(linear.bias)

    def forward(self, noisy, clean, where):
        """noisy, clean (n, L), where (n, L) bool -> logits (R, V) of those noisy tokens."""
        x = self.embed(torch.cat([noisy, clean], 1).clamp(min=0))
        # no time conditioning: the embedding of noise level 0, with cosines 1 and sines 0
        wave = (torch.arange(256, device=x.device) < 128).float()
        condition = F.silu(self.condition_out(F.silu(self.condition_in(wave))))
        half = args.hidden_size // args.heads // 2
        frequency = 10_000.0 ** (-torch.arange(half, device=x.device) / half)
        angle = torch.arange(L, device=x.device).repeat(2)[:, None] * frequency
        mask = attention_mask(clean)
        for layer in self.layers:
            x = layer(x, condition, angle.cos(), angle.sin(), mask)
        x = self.norm(x[:, :L][where], *self.modulation(condition).chunk(2))
        logits = self.head(x).float()
        logits[:, MASK] = -torch.inf        # the mask is never the answer
        return logits


# ---- Training, averaged weights, bound, samples, checkpoint


def weighted_loss(network, tokens, is_target, level, uniform):
    """Sum over masked tokens of weight * cross-entropy."""
    noisy, is_masked, weight = diffuse(tokens, is_target, level, uniform)
    arrays = noisy, tokens, is_masked
    noisy, clean, where = (torch.from_numpy(array).to(device) for array in arrays)
    with torch.autocast(device.type, torch.bfloat16, enabled=args.bf16):
        logits = network(noisy, clean, where)
    losses = F.cross_entropy(logits, clean[where], reduction="none")
    return (losses * torch.from_numpy(weight[is_masked]).to(device).float()).sum()


@torch.no_grad()
def bound(network, tokens, is_target, repeats=4):
    """Bound on the negative log-likelihood in nats per trained token. Calls use the same noise."""
    network.eval()
    total = 0.0
    for number, first in enumerate(range(0, len(tokens), 32)):
        rows = slice(first, first + 32)
        groups = blocks_of(is_target[rows]).max() + 1
        for repeat in range(repeats):
            level, uniform = draw(2, (number, repeat), groups, 32)
            uniform = uniform[:len(tokens[rows])]
            total += weighted_loss(network, tokens[rows], is_target[rows], level, uniform).item()
    network.train()
    return total / repeats / is_target.sum()


@torch.no_grad()
def sample(network, question):
    """Answer a question block by block. Each pass fills one random token of the block."""
    network.eval()
    ids = head_of(question)
    stop, generator = len(ids), torch.Generator().manual_seed(args.seed)
    while len(ids) < L and END not in ids[stop:]:
        ids += [MASK] * (args.block_size - len(ids) % args.block_size)
        masked = [i for i in range(len(ids)) if ids[i] == MASK]
        for i in torch.tensor(masked)[torch.randperm(len(masked), generator=generator)].tolist():
            noisy = torch.tensor([ids + [-1] * (L - len(ids))], device=device)
            logits = network(noisy, noisy, torch.arange(L, device=device)[None] == i)
            ids[i] = torch.multinomial(logits[0].softmax(-1).cpu(), 1, generator=generator).item()
    network.train()
    return tokenizer.decode(ids[stop:])


tokens, is_target = read(args.train_data_file)
eval_tokens, eval_is_target = read(args.eval_data_file)
torch.manual_seed(args.seed)
model, average = DiT().to(device).train(), DiT().to(device)
average.load_state_dict(model.state_dict())
optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0, fused=True)
torch.manual_seed(args.seed)
step, checkpoint = 0, out / "checkpoint.pt"
if checkpoint.exists():
    state = torch.load(checkpoint, map_location="cpu", weights_only=True)
    step = state["step"]
    for name, target in (("model", model), ("average", average), ("optimizer", optimizer)):
        target.load_state_dict(state[name])
    torch.set_rng_state(state["rng"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda_rng"])
size, accumulation = args.per_device_train_batch_size, args.gradient_accumulation_steps
steps_per_epoch = math.ceil(len(tokens) / size / accumulation)
while step < args.max_steps:
    # order and noise are functions of seed and step, so resume is exact
    epoch, epoch_step = divmod(step, steps_per_epoch)
    order = np.random.default_rng((args.seed, epoch, 1)).permutation(len(tokens))
    rows = order[epoch_step * size * accumulation:(epoch_step + 1) * size * accumulation]
    group = blocks_of(is_target[rows])
    level, uniform = draw(1, (step,), group.max() + 1, size * accumulation)
    total = 0.0
    for first in range(0, len(rows), size):
        micro = slice(first, first + size)
        first_group = group[micro][group[micro] >= 0].min()         # of this micro-step's blocks
        loss = weighted_loss(model, tokens[rows[micro]], is_target[rows[micro]],
                             level[first_group:], uniform[micro])
        loss = loss / is_target[rows].sum()         # a mean over the targets of the whole step
        loss.backward()
        total += loss.item()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for settings in optimizer.param_groups:
        settings["lr"] = args.learning_rate * min(1.0, (step + 1) / max(1, args.warmup_steps))
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    step += 1
    decay = min(args.ema_decay, (1 + step) / (10 + step))       # lower at first
    with torch.no_grad():
        for slow, fast in zip(average.parameters(), model.parameters()):
            slow.lerp_(fast, 1 - decay)

    saving, values = step % args.save_steps == 0 or step == args.max_steps, {}
    if step % args.logging_steps == 0 or saving:
        values = {"train/loss": total, "train/grad_norm": norm.item(), "lr": settings["lr"]}
    if saving:
        values["eval/loss"] = bound(average, eval_tokens, eval_is_target)
    if values:
        shown = " | ".join(f"{name} {value:.6g}" for name, value in values.items())
        print(f"step {step:>6}/{args.max_steps} | {shown}", flush=True)
        with open(out / "metrics.jsonl", "a") as log:
            log.write(json.dumps({"step": step, **values}) + "\n")
    if saving:
        question = json.loads(open(args.eval_data_file).readline())["question"]
        print(f"sample: {question}\n{sample(average, question)}", flush=True)
        cuda_rng = torch.cuda.get_rng_state() if device.type == "cuda" else None
        state = {"step": step, "rng": torch.get_rng_state(), "cuda_rng": cuda_rng,
                 "model": model.state_dict(),
                 "average": average.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, out / "checkpoint.tmp")
        os.sync()                       # to disk before the rename
        os.replace(out / "checkpoint.tmp", checkpoint)
