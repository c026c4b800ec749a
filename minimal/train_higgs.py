# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11", "transformers>=5.17", "peft", "numpy", "soundfile", "soxr"]
# ///
"""Fine-tune Higgs-Audio V2 in one file: LoRA or all weights, one GPU or several, exact resume.

    torchrun --nproc_per_node=8 minimal/train_higgs.py --model_path MODEL \
        --audio_tokenizer_path CODEC --train_data_file train.json --use_lora --bf16

With --parallel fsdp (FSDP2) each rank keeps a shard of weights, gradients and moments. A test
checks that losses and gradients equal those of train_v2_ddp.py --normalize_text off, which adds
speed (packed batches, fused layers) and fault tolerance.
"""
import argparse
import contextlib
import hashlib
import json
import math
import os
import re
import shutil
import signal
from pathlib import Path

import numpy as np
import soundfile
import soxr
import torch
import torch.distributed as dist
import torch.nn.functional as F
from peft import LoraConfig, PeftModel, get_peft_model
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoTokenizer, HiggsAudioV2TokenizerModel
from transformers import HiggsAudioV2ForConditionalGeneration as HiggsAudioV2

p = argparse.ArgumentParser(description="Fine-tune Higgs-Audio V2 on a ChatML file.")
p.add_argument("--model_path", required=True, help="native Higgs-Audio V2, folder or hub name")
p.add_argument("--audio_tokenizer_path", required=True, help="its codec, folder or hub name")
p.add_argument("--train_data_file", required=True, help="ChatML, .json or .jsonl")
p.add_argument("--output_dir", default="output")
p.add_argument("--validation_split", type=float, default=0.05, help="share of samples held out")
p.add_argument("--per_device_train_batch_size", type=int, default=2, help="samples per micro-step")
p.add_argument("--gradient_accumulation_steps", type=int, default=1)
p.add_argument("--max_steps", type=int, default=1000, help="optimizer steps")
p.add_argument("--learning_rate", type=float, default=5e-5)
p.add_argument("--warmup_steps", type=int, default=50)
p.add_argument("--use_lora", action="store_true", help="adapters on a frozen base")
p.add_argument("--lora_rank", type=int, default=16)
p.add_argument("--bf16", action="store_true", help="autocast; a frozen base is stored in bfloat16")
p.add_argument("--parallel", choices=("ddp", "fsdp"), default="ddp")
p.add_argument("--compile", action="store_true", help="torch.compile each decoder layer")
p.add_argument("--logging_steps", type=int, default=10)
p.add_argument("--save_steps", type=int, default=200, help="steps between checkpoints")
p.add_argument("--seed", type=int, default=42, help="seed of adapters, order and hold-out")
args = p.parse_args()
# torchrun sets these three; a single process is rank 0 of 1
rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
local_rank = int(os.environ.get("LOCAL_RANK", 0))
device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
if device.type == "cuda":
    torch.cuda.set_device(device)
if world_size > 1 or args.parallel == "fsdp":
    alone = {} if world_size > 1 else {"rank": 0, "world_size": 1, "store": dist.HashStore()}
    dist.init_process_group(**alone)       # gloo for tensors on CPUs, NCCL for those on GPUs
IGNORE = -100       # label of tokens that are not trained
out = Path(args.output_dir)
(out / "codes").mkdir(parents=True, exist_ok=True)


def all_sum(tensor):        # sum over ranks, in place
    if world_size > 1:
        dist.all_reduce(tensor)
    return tensor


# ---- Model: transformers' forward, with losses as sums, so any split over ranks adds up


class Higgs(torch.nn.Module):
    def __init__(self, net, native):
        super().__init__()
        self.net = net                  # the trained model: native, or PEFT around it
        self._native = [native]         # in a list, so its weights are not registered twice

    def forward(self, batch):
        """Sums over a batch's targets: audio (K,), one per codebook, and text ()."""
        native, tokens, rows = self._native[0], batch["input_ids"], batch["audio_ids"]
        hidden = native.model(
            input_ids=tokens.clamp(min=0), attention_mask=tokens >= 0,          # padding is < 0
            audio_input_ids=rows.clamp(min=0), audio_input_ids_mask=rows[..., 0] >= 0,
        ).last_hidden_state[:, :-1]             # (B, S - 1, H): each position predicts the next
        codes, tokens = batch["audio_labels"][:, 1:], batch["text_labels"][:, 1:]
        where = (codes != IGNORE).any(-1)       # R positions
        logits = native.audio_lm_head(hidden[where]).float()
        logits = logits.view(-1, native.config.num_codebooks, native.config.codebook_size)
        audio = F.cross_entropy(logits.transpose(1, 2), codes[where], ignore_index=IGNORE,
                                reduction="none").sum(0)        # (R, K) -> (K,)
        where = tokens != IGNORE
        logits = native.text_lm_head(hidden[where]).float()
        return audio, F.cross_entropy(logits, tokens[where], reduction="sum")


checkpoints = [folder for folder in out.iterdir() if re.fullmatch(r"checkpoint-\d+", folder.name)]
checkpoints.sort(key=lambda folder: int(folder.name.split("-")[1]))
resume = checkpoints[-1] if checkpoints else None
source = resume if resume and not args.use_lora else args.model_path
dtype = torch.bfloat16 if args.bf16 and args.use_lora else torch.float32
native = net = HiggsAudioV2.from_pretrained(source, use_text_head=True, dtype=dtype)
config = native.config
tokenizer = AutoTokenizer.from_pretrained(args.model_path, trust_remote_code=False)
K, BOS, EOS = config.num_codebooks, config.audio_stream_bos_id, config.audio_stream_eos_id
if args.use_lora and resume:
    net = PeftModel.from_pretrained(native, resume, is_trainable=True)
elif args.use_lora:
    net = get_peft_model(native, LoraConfig(
        r=args.lora_rank, lora_alpha=2 * args.lora_rank, task_type="CAUSAL_LM",
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]))
    generator = torch.Generator().manual_seed(args.seed)
    for name, parameter in net.named_parameters():
        if "lora_A" in name:            # the same on every rank; B starts at zero
            torch.nn.init.kaiming_uniform_(parameter, a=math.sqrt(5), generator=generator)

# ---- Data: conversation -> pieces of text and clips -> tokens and rows of codes, with labels

INSTRUCTION = re.compile(r"\s*please generate speech\b[^:]*:\s*", re.IGNORECASE)
CONTROL = re.compile(r"<\|(?!scene_desc_(?:start|end)\|>)")     # would become a token
path = Path(args.train_data_file)
conversations = (list(map(json.loads, open(path))) if path.suffix == ".jsonl"
                 else json.load(open(path)))


def parts_of(content):
    """A message's content -> texts (str) and clips (tuples of path, start and length in s)."""
    parts = []
    for item in content if isinstance(content, list) else [{"type": "text", "text": content}]:
        if item["type"] == "text":
            parts.append(item["text"].strip())
        else:       # without an offset, the duration describes the whole file
            length = item.get("duration") if item.get("offset") is not None else None
            parts.append((str(path.parent / item["audio_url"]), item.get("offset") or 0, length))
    assert not any(CONTROL.search(text) for text in parts if isinstance(text, str)), parts
    return [text_or_clip for text_or_clip in parts if text_or_clip]


def pieces_of(conversation):
    """[(text or clip, trained)] as in the chat template; the last spoken turn is trained."""
    pieces, turns, messages = [("<|begin_of_text|>", False)], [], conversation["messages"]
    roles = [message["role"] for message in messages]
    assert set(roles) <= {"system", "user", "assistant"}, f"these roles are not read here: {roles}"
    first = conversation.get("start_index")     # first trained turn
    assert first is None or roles[first:].count("assistant") == 1, "start_index: several turns"
    for message in messages:
        role, parts = message["role"], parts_of(message["content"])
        clips = [item for item in parts if isinstance(item, tuple)]
        if role == "user" and clips:            # a reference: it becomes two turns
            assert list(map(type, parts)) == [str, tuple, str], "a reference is text, clip, text"
            turns += [("user", parts[:1]), ("assistant", clips)]
            parts = [INSTRUCTION.sub("", parts[2])]
        if role == "assistant" and clips:
            spoken = len(turns)
            if turns[-1][1] == parts[:-1]:      # its text only repeats the request
                parts = clips
        turns.append((role, parts))
    if turns[0][0] != "system":
        turns, spoken = [("system", ["Generate audio following instruction."]), *turns], spoken + 1
    for i, (role, parts) in enumerate(turns):
        turn_pieces = []
        for item in parts:
            is_clip = isinstance(item, tuple)
            turn_pieces += ["<|audio_out_bos|>", item, "<|audio_eos|>"] if is_clip else [item]
        goes_on = role == "assistant" and i + 1 < len(turns) and turns[i + 1][0] == role
        turn_pieces.append("<|eom_id|>" if goes_on else "<|eot_id|>")
        pieces.append((f"<|start_header_id|>{role}<|end_header_id|>\n\n", False))
        pieces += [(piece, i == spoken) for piece in turn_pieces]
    return pieces


pieces = [pieces_of(conversation) for conversation in conversations]
code_files = {}       # clip -> file of its codes, which the first run writes
for clip in (piece for sample in pieces for piece, _ in sample if isinstance(piece, tuple)):
    key = f"{os.path.abspath(clip[0])} {clip[1:]} {os.stat(clip[0])[6:9]}"      # size and times
    code_files[clip] = out / "codes" / (hashlib.sha256(key.encode()).hexdigest()[:32] + ".npy")
share = [clip for clip in list(code_files)[rank::world_size] if not code_files[clip].exists()]
if share:
    codec = HiggsAudioV2TokenizerModel.from_pretrained(args.audio_tokenizer_path).to(device).eval()
for clip in share:
    with soundfile.SoundFile(clip[0]) as file:
        file.seek(round(clip[1] * file.samplerate))
        frames = -1 if clip[2] is None else round(clip[2] * file.samplerate)
        wave = file.read(frames, dtype="float32", always_2d=True).mean(axis=1)
        wave = torch.from_numpy(soxr.resample(wave, file.samplerate, 24000)).to(device)
    with torch.no_grad():               # (K, T): 25 frames a second
        codes = codec.encode(wave[None, None], max(codec.config.target_bandwidths)).audio_codes[0]
    temporary = code_files[clip].with_suffix(f".{rank}.npy")
    np.save(temporary, codes[:K].T.to(torch.int16).cpu().numpy())
    os.replace(temporary, code_files[clip])       # so that the file is complete
all_sum(torch.zeros(1))                 # barrier: all clips are encoded


def sample_of(pieces):
    """Pieces -> arrays: input_ids and text_labels (n,), audio_ids (a, K), audio_labels (n, K).

    A clip of T frames takes T + K + 1 rows. Codebook k is delayed by k rows, after begin-of-stream
    and before end-of-stream. Targets are its T codes and one end-of-stream, never the fill.
    """
    input_ids, text_labels, audio_labels, audio_ids = [], [], [], []
    for piece, trained in pieces:
        if isinstance(piece, str):
            tokens = np.array(tokenizer(piece, add_special_tokens=False)["input_ids"])
            labels = np.full((len(tokens), K), IGNORE)
            text_labels.append(tokens if trained else np.full(len(tokens), IGNORE))
        else:
            codes = np.load(code_files[piece]).astype(np.int64)     # (T, K)
            T = len(codes)
            # row embeddings replace these tokens; the last K - 1 mark the tail
            tokens = np.full(T + K + 1, config.audio_token_id)
            tokens[T + 2:] = config.audio_delay_token_id
            text_labels.append(np.full(T + K + 1, IGNORE))
            rows, labels = np.full((T + K + 1, K), EOS), np.full((T + K + 1, K), IGNORE)
            for k in range(K):
                rows[:k + 1, k] = BOS
                rows[k + 1:k + 1 + T, k] = codes[:, k]
                if trained:
                    labels[k + 1:k + 2 + T, k] = [*codes[:, k], EOS]
            audio_ids.append(rows)
        input_ids.append(tokens)
        audio_labels.append(labels)
    return {"input_ids": np.concatenate(input_ids), "text_labels": np.concatenate(text_labels),
            "audio_ids": np.concatenate(audio_ids), "audio_labels": np.concatenate(audio_labels)}


samples = [sample_of(sample) for sample in pieces]
n_audio_targets = np.array([(sample["audio_labels"] != IGNORE).sum() for sample in samples])
n_text_targets = np.array([(sample["text_labels"] != IGNORE).sum() for sample in samples])
shuffled = np.random.default_rng((args.seed, 2)).permutation(len(samples))
held_out = max(1, round(len(samples) * args.validation_split)) if args.validation_split else 0
train_ids, eval_ids = np.sort(shuffled[held_out:]), np.sort(shuffled[:held_out])
size = args.per_device_train_batch_size
batches_per_step = world_size * args.gradient_accumulation_steps
steps_per_epoch = math.ceil(len(train_ids) / size / batches_per_step)


def batches_of(step):
    """Batches of all ranks in a step: arrays of sample numbers, empty after an epoch's last one."""
    epoch, epoch_step = divmod(step, steps_per_epoch)
    order = train_ids[np.random.default_rng((args.seed, epoch, 1)).permutation(len(train_ids))]
    first = epoch_step * batches_per_step
    return [order[i * size:(i + 1) * size] for i in range(first, first + batches_per_step)]


def load(numbers):
    """Sample numbers -> {name: (B, longest, ...)}. Without numbers: a sample of zero weight."""
    batch = {name: pad_sequence([torch.from_numpy(samples[i][name]) for i in numbers or [0]],
                                batch_first=True, padding_value=IGNORE) for name in samples[0]}
    for name in () if numbers else ("text_labels", "audio_labels"):
        batch[name].fill_(IGNORE)
    return batch


# ---- Optimizer, resume, validation, checkpoints

for layer in native.model.layers if args.compile else ():
    layer.compile()
model = Higgs(net, native).train()
if args.parallel == "fsdp":     # gathers weights layer by layer, then frees them
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if args.bf16 else None,
                                  reduce_dtype=torch.float32, cast_forward_inputs=False)
    for layer in native.model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
wrapped = model = model.to(device)
if args.parallel == "ddp" and world_size > 1:
    wrapped = DistributedDataParallel(model)
decay = {True: [], False: []}           # True for matrices, False for norms and embeddings
for name, parameter in model.named_parameters():
    if parameter.requires_grad:
        decay[parameter.ndim > 1 and "embed" not in name].append(parameter)
optimizer = torch.optim.AdamW([{"params": decay[True], "weight_decay": 0.01},
                               {"params": decay[False], "weight_decay": 0.0}], fused=True)
step, whole = 0, states.StateDictOptions(full_state_dict=True, cpu_offload=True)
if resume:
    state = torch.load(resume / "trainer_state.pt", map_location="cpu", weights_only=True)
    step = state["step"]
    states.set_optimizer_state_dict(model, optimizer, state["optimizer"], options=whole)


@torch.no_grad()
def evaluate():
    """Mean loss over all held-out targets, of which each rank takes a share."""
    model.eval()
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    for i in range(rank, math.ceil(len(eval_ids) / world_size) * world_size, world_size):
        # if none is left, a sample of zero weight, as FSDP2's ranks run every forward together
        batch = {name: tensor.to(device) for name, tensor in load(list(eval_ids[i:i + 1])).items()}
        with torch.autocast(device.type, torch.bfloat16, enabled=args.bf16):
            audio, text = model(batch)
        sums += torch.stack([audio.sum(), text]).double()
    model.train()
    audio, text = all_sum(sums).tolist()
    return audio / n_audio_targets[eval_ids].sum() + text / max(1, n_text_targets[eval_ids].sum())


def save():
    """Write checkpoint-N atomically: temporary name, sync, rename. Call on every rank."""
    weights = states.get_model_state_dict(net, options=whole)       # full tensors on rank 0
    moments = states.get_optimizer_state_dict(model, optimizer, options=whole)
    if rank:
        return
    building, final = out / f"checkpoint-{step}.building", out / f"checkpoint-{step}"
    shutil.rmtree(building, ignore_errors=True)
    net.save_pretrained(building, state_dict=weights)       # PEFT's or transformers' own files
    tokenizer.save_pretrained(building)
    torch.save({"step": step, "optimizer": moments}, building / "trainer_state.pt")
    os.sync()                               # to disk before the rename
    os.rename(building, final)
    checkpoints.append(final)
    while len(checkpoints) > 3:
        shutil.rmtree(checkpoints.pop(0))


# ---- Loop

stop = []       # SIGTERM and Slurm's SIGUSR1: finish the step, save, end
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, lambda number, frame: stop.append(number))
mine = (batch for s in range(step, args.max_steps) for batch in batches_of(s)[rank::world_size])
loader = iter(torch.utils.data.DataLoader(range(len(samples)), batch_sampler=mine, collate_fn=load,
                                          num_workers=2))
stopping = False
while step < args.max_steps and not stopping:
    numbers = np.concatenate(batches_of(step))      # all ranks': the loss divides by their targets
    n_audio, n_text = int(n_audio_targets[numbers].sum()), int(n_text_targets[numbers].sum())
    total = torch.zeros((), device=device)
    for micro in range(args.gradient_accumulation_steps):
        batch = {name: tensor.to(device) for name, tensor in next(loader).items()}
        last = micro == args.gradient_accumulation_steps - 1    # reduce gradients once
        if args.parallel == "fsdp":
            model.set_requires_gradient_sync(last)
        with wrapped.no_sync() if wrapped is not model and not last else contextlib.nullcontext():
            with torch.autocast(device.type, torch.bfloat16, enabled=args.bf16):
                audio, text = wrapped(batch)
            loss = audio.sum() / n_audio + text / max(1, n_text)    # a mean over all ranks' targets
            (loss * world_size).backward()          # since DDP and FSDP2 average over ranks
        total += loss.detach()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm        # of all shards
    warm = min(1, (step + 1) / max(1, args.warmup_steps))       # linear, then half a cosine to 0
    done = max(0, step - args.warmup_steps) / max(1, args.max_steps - args.warmup_steps)
    for group in optimizer.param_groups:
        group["lr"] = lr = args.learning_rate * warm * 0.5 * (1 + math.cos(math.pi * done))
    if torch.isfinite(norm):                        # the same on every rank
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    step += 1
    stopping = all_sum(torch.tensor(len(stop), device=device)).item() > 0    # the same on all ranks
    saving, values = stopping or step == args.max_steps or step % args.save_steps == 0, {}
    if step % args.logging_steps == 0 or saving:
        values = {"train/loss": all_sum(total).item(), "train/grad_norm": norm.item(), "lr": lr}
    if len(eval_ids) and saving:
        values["eval/loss"] = evaluate()
    if values and rank == 0:
        shown = (f"| {name} {value:.6g}" for name, value in values.items())
        print(f"step {step:>6}/{args.max_steps}", *shown, flush=True)
        with open(out / "metrics.jsonl", "a") as log:
            log.write(json.dumps({"step": step, **values}) + "\n")
    if saving:
        save()
if dist.is_initialized():
    dist.destroy_process_group()
