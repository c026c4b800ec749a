"""Does a step's time grow in line with tokens and layers, and how long does a checkpoint stop training?

    python bench/growth.py                              # two CPU cores: less than 6 minutes; one H200: less
    python bench/growth.py --tokens 128 --rounds 2 --steps 12 --save_steps 4 --hidden_size 32      # a try

Growth: forward, loss, backward, clipping and AdamW of the three trainers' own models on packs of documents of 128
tokens each, with 1, 2, 4, 8 and 16 times --tokens a step, then with 1, 2, 4 and 8 layers. All sizes take turns, small
ones as several steps in a row, so that no timing is short, and the medians count. A line a + b n is fitted so that
relative misses are least (least squares, each time's miss divided by it), and "off the line" is how far a median lies
from it, in per cent. Attention is inside documents, so it does not grow with the pack. Output heads take all rows at
once, at every size: from some thousand rows on the trainers take them in pieces and compute logits again in the
backward pass, which has a line of its own. float32 on a CPU, bf16 autocast on a GPU.

Checkpoints: train_sft.py itself on made-up conversations, twice in a process of its own, without checkpoints and
with one every --save_steps steps. "stopped" is how long the training path stands still in save_checkpoint, from its
call to its return; the files are written behind it. Its share is of a save interval of SAVE_STEPS steps.

Writes bench/results/growth-DEVICE.json.
"""
import argparse
import functools
import json
import math
import multiprocessing
import runpy
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import data
from bench import block_steps, measure
from common import document_attention, optim
from diffusion import blocks, dit, noise
from distill import packed_lm, weights
from distill import table as chat_table
from speech import higgs
from speech.labels import TokenIds, assemble
from tests.helpers import chats

from transformers import HiggsAudioV2Config, HiggsAudioV2ForConditionalGeneration, LlamaConfig  # isort: skip # noqa

SCRIPT = Path(__file__).resolve().parent.parent / "distill" / "train_sft.py"
DOCUMENT = 128          # tokens of every document
TIMES = (1, 2, 4, 8, 16)
SAVE_STEPS = 500        # of the interval that the time of a save is set against
LAYERS = (1, 2, 4, 8)
VOCABULARY = 2048
LEAST_S = 0.3           # seconds of a timing: as many steps in a row as that takes
WHOLE = 2**40           # rows of logits, or logits, at a time: more than there are


# ---------------------------------------------------------------------------------------------------------------------
# One step of each trainer


def train_step(device, named_parameters, decays, loss):
    """step(): backward of loss(), clipping, guarded AdamW, as in the trainers."""
    parameters = [p for _, p in named_parameters]
    optimizer = optim.build_adamw(named_parameters, 1e-4, 0.0, (0.9, 0.999), decays)

    def step():
        with block_steps.autocast(device):
            total = loss()
        total.backward()
        norm = optim.clip_gradients(parameters, 1.0)
        optim.guarded_step(optimizer, 1 - torch.isfinite(norm).float())
        optimizer.zero_grad(set_to_none=True)
    return step


def heads(size):
    """Attention heads of 64 values, four at least."""
    return max(4, size // 64)


def speech(device, size, layers, documents):
    """A step of train_v2_ddp.py: each document is 40 text tokens and a clip of 79 frames, 88 rows."""
    ids = TokenIds(audio=3, delay=4, pad=0, num_codebooks=8, stream_bos=1024, stream_eos=1025)
    config = HiggsAudioV2Config(
        vocab_size=VOCABULARY, hidden_size=size, intermediate_size=2 * size, num_hidden_layers=layers,
        num_attention_heads=heads(size), num_key_value_heads=2, head_dim=size // heads(size), num_codebooks=8,
        codebook_size=1026, pad_token_id=0, bos_token_id=1, eos_token_id=2, audio_token_id=3, audio_delay_token_id=4,
        audio_bos_token_id=5)
    model = higgs.PackedHiggs(HiggsAudioV2ForConditionalGeneration(config, use_text_head=True).to(device).train())
    rng = np.random.default_rng(0)
    samples = []
    for number in range(documents):
        text = rng.integers(5, VOCABULARY, 41)
        text[20] = ids.audio
        codes = rng.integers(0, 1024, (DOCUMENT - 40 - 9, 8))
        samples.append({"number": number, **assemble(text, np.arange(41) >= 20, [codes], ids)})
    batch = data.collate(samples, ids)
    assert batch.counts["tokens"] == documents * DOCUMENT
    on_device, counts = batch.to(device), batch.counts

    def loss():
        audio, text, _ = model(on_device)
        return higgs.total_loss(audio, counts["audio_targets"], text, counts["text_targets"], "mean", 1.0)
    return train_step(device, list(model.named_parameters()), higgs.decays, loss)


def chat(device, size, layers, documents):
    """A step of train_sft.py: the second half of each document is trained."""
    config = LlamaConfig(vocab_size=VOCABULARY, hidden_size=size, intermediate_size=2 * size, num_hidden_layers=layers,
                         num_attention_heads=heads(size), num_key_value_heads=2, head_dim=size // heads(size))
    native = weights.AutoModelForCausalLM.from_config(config, attn_implementation=document_attention.ATTENTION)
    model = packed_lm.PackedLM(native.to(device).train(), logits=WHOLE)
    rng, trained = np.random.default_rng(0), np.arange(DOCUMENT) >= DOCUMENT // 2
    batch = chat_table.collate([(i, rng.integers(0, VOCABULARY, DOCUMENT), trained) for i in range(documents)])
    on_device, targets = batch.to(device), batch.counts["targets"]
    return train_step(device, list(model.named_parameters()), packed_lm.decays,
                      lambda: model(on_device)[0] / targets)


def diffusion(device, size, layers, documents):
    """A step of train_bd3lm.py: a document is a row of 128 clean tokens, 60 % of them its answer; noise included."""
    model = dit.DiT(dit.Config(VOCABULARY, VOCABULARY - 1, size, layers, heads(size), 32),
                    "flex" if device.type == "cuda" else "sdpa").to(device).train()
    problems = block_steps.make_documents(documents, DOCUMENT, 0, size=DOCUMENT)
    problems.ids %= VOCABULARY - 1
    rows = blocks.make_rows(problems, np.arange(documents), DOCUMENT, False)
    batch = blocks.collate([rows[r] for r in range(documents)], documents, DOCUMENT, rows.noisy_length, 0)

    def loss():
        draws = noise.draw(0, "train", 0, batch.n_groups, documents, DOCUMENT)
        inputs = noise.diffuse(batch, draws, VOCABULARY - 1)._replace(layout=None).to(device)
        return (model(inputs) * inputs.weights).sum() / batch.n_targets
    return train_step(device, list(model.named_parameters()), dit.decays, loss)


TRAINERS = {"speech": speech, "chat": chat, "block diffusion": diffusion}


# ---------------------------------------------------------------------------------------------------------------------
# Growth


def line(sizes, seconds):
    """(a, b, [relative miss of each]) of a + b n, least squares of (a + b n) / seconds - 1."""
    seconds = np.asarray(seconds)
    design = np.stack([1 / seconds, np.asarray(sizes) / seconds], axis=1)
    (a, b), *_ = np.linalg.lstsq(design, np.ones(len(seconds)), rcond=None)
    return float(a), float(b), (design @ [a, b] - 1).tolist()


def grow(name, steps, unit, args, device):
    """Time {size: step} -> ([trainer, size, seconds, milliseconds a unit, % off the line] of each size, the line)."""
    once = measure.alternate(steps, 1, device, warm_up=2)
    repeats = {size: math.ceil(LEAST_S / spent) for size, (spent,) in once.items()}

    def in_a_row(size):
        for _ in range(repeats[size]):
            steps[size]()
    seconds = measure.alternate({size: functools.partial(in_a_row, size) for size in steps}, args.rounds, device,
                                warm_up=0)
    sizes, medians = list(steps), [statistics.median(spent) / repeats[size] for size, spent in seconds.items()]
    a, b, off = line(sizes, medians)
    rows = [[name, size * unit, s, 1e3 * s / (size * unit), 100 * miss] for size, s, miss in zip(sizes, medians, off)]
    for row in rows:
        print(f"{name:<16} {row[1]:>6} | {row[2]:8.4f} s | {row[3]:8.4f} ms each | {row[4]:+5.1f} % off the line",
              flush=True)
    return rows, {"constant_seconds": a, "seconds_each": b / unit, "most_off": max(map(abs, off))}


# ---------------------------------------------------------------------------------------------------------------------
# Checkpoints


def timed_runs(runs, path):
    """In a process of its own: train_sft.py with the flags of {name: flags}, one run after the other.

    Writes {name: {"steps": when each was logged, "stopped": seconds of each save, "written": seconds of its files}}.
    """
    from common import checkpoint, metrics
    records = {name: {"steps": [], "stopped": [], "written": []} for name in runs}

    def timed(function, what):
        def call(*args, **kwargs):
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                records[name][what].append(time.perf_counter() - start)
        return call
    write = metrics.MetricsLog.write
    metrics.MetricsLog.write = lambda *args: (records[name]["steps"].append(time.perf_counter()), write(*args))
    begin, save = checkpoint.Writer.begin, checkpoint.Writer.save
    began = []      # when the trainer stopped for each save; it goes on when Writer.save returns
    checkpoint.Writer.begin = lambda *args: (began.append(time.perf_counter()), begin(*args))[1]
    checkpoint.Writer.save = lambda *args: (save(*args),
                                            records[name]["stopped"].append(time.perf_counter() - began[-1]))[0]
    checkpoint.write_files = timed(checkpoint.write_files, "written")
    for name in runs:
        sys.argv = [str(SCRIPT), *runs[name]]
        runpy.run_path(str(SCRIPT), run_name="__main__")
    Path(path).write_text(json.dumps(records))


def checkpoints(args, report):
    """Tables "checkpoints": how long saving stops train_sft.py, as a share of a save interval."""
    with tempfile.TemporaryDirectory(dir=args.work_dir) as work:
        work = Path(work)
        chats.student(work / "model", "llama", hidden_size=args.checkpoint_size, num_hidden_layers=6,
                      intermediate_size=3 * args.checkpoint_size, num_attention_heads=8, num_key_value_heads=4,
                      head_dim=args.checkpoint_size // 8)
        chats.write(work / "chats.jsonl", chats.conversations(240))
        runs = {}
        for name, save_steps in (("none", 0), ("saves", args.save_steps)):
            argv = ["--model_path", work / "model", "--train_data_file", work / "chats.jsonl", "--output_dir",
                    work / name, "--report_to", "none", "--max_steps", args.steps, "--logging_steps", 1, "--eval_steps",
                    0, "--validation_split", 0, "--save_steps", save_steps, "--save_total_limit", 1, "--num_workers", 1,
                    "--max_tokens_per_batch", args.checkpoint_tokens, "--max_length", 256]
            runs[name] = [str(part) for part in argv]
        process = multiprocessing.get_context("spawn").Process(target=timed_runs, args=(runs, work / "times.json"))
        process.start()
        process.join(400)
        if process.exitcode != 0:
            process.kill()
            raise SystemExit(f"error: train_sft.py ended with status {process.exitcode}")
        records = json.loads((work / "times.json").read_text())
        folder = next((work / "saves").glob("checkpoint-*"))
        size = sum(p.stat().st_size for p in folder.rglob("*") if p.is_file()) / 1e6
    step = statistics.median(np.diff(records["none"]["steps"])[2:])
    stops = records["saves"]["stopped"][:-1] or records["saves"]["stopped"]     # the last one is the run's end
    stopped, written = statistics.median(stops), max(records["saves"]["written"])
    wall = {name: record["steps"][-1] - record["steps"][2] for name, record in records.items()}
    extra = (wall["saves"] - wall["none"]) / len(stops)
    table = {"columns": ["what", "value"], "rows": [
        ["checkpoint, MB", size], ["seconds a step, without saving", step], ["saves in the run", len(stops)],
        ["stopped a save, seconds", stopped], ["longest of them", max(stops)],
        ["MB/s copied while stopped", size / stopped], ["seconds the files took, behind training", written],
        [f"save interval of {SAVE_STEPS} steps, seconds", SAVE_STEPS * step],
        ["stopped, % of that interval", 100 * stopped / (SAVE_STEPS * step)],
        ["longer run a save, seconds (stop and slower steps behind it)", extra],
        ["the same, % of that interval", 100 * extra / (SAVE_STEPS * step)]]}
    report["tables"]["checkpoints"] = table
    for what, value in table["rows"]:
        print(f"{'checkpoint':<16} {what:<62} {value:10.4f}", flush=True)


# ---------------------------------------------------------------------------------------------------------------------


def main(argv=None):
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0],
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096 if cuda else 256, help="tokens of the smallest step")
    parser.add_argument("--hidden_size", type=int, default=1024 if cuda else 256, help="of the models")
    parser.add_argument("--rounds", type=int, default=9, help="timings of each size; the median counts")
    parser.add_argument("--steps", type=int, default=90, help="checkpoints: optimizer steps of each run")
    parser.add_argument("--save_steps", type=int, default=25, help="checkpoints: steps between two of them")
    parser.add_argument("--checkpoint_size", type=int, default=384, help="checkpoints: hidden size of the model")
    parser.add_argument("--checkpoint_tokens", type=int, default=512, help="checkpoints: tokens a step")
    parser.add_argument("--work_dir", help="checkpoints: where they go (default: a temporary folder)")
    parser.add_argument("--results_dir", type=Path, default=measure.RESULTS, help="where the JSON goes")
    args = parser.parse_args(argv)
    measure.keep_freed_memory(argv)
    began, device = time.monotonic(), torch.device("cuda", 0) if cuda else torch.device("cpu")
    torch.manual_seed(0)
    dit.HEAD_ROWS = WHOLE
    if cuda:    # flex attention: two masks of each size, and after 8 shapes it would not be compiled any more
        torch._dynamo.config.recompile_limit = 64
    report = measure.new_report("growth of a step's time with tokens and layers; what a checkpoint stops", device,
                                measure.command("growth", argv))
    report |= {"settings": {name: value for name, value in vars(args).items() if f"--{name}" not in measure.FOLDERS},
               "lines": {}}
    columns = ["trainer", "size", "seconds a step", "milliseconds each", "% off the line"]
    summary = []
    for what, sizes, unit in (("tokens", TIMES, args.tokens), ("layers", LAYERS, 1)):
        table = {"columns": [what if c == "size" else c for c in columns], "rows": []}
        for name, trainer in TRAINERS.items():
            documents = args.tokens // DOCUMENT
            steps = {size: trainer(device, args.hidden_size, 4, size * documents) if what == "tokens" else
                     trainer(device, args.hidden_size, size, 4 * documents) for size in sizes}
            rows, fit = grow(name, steps, unit, args, device)
            table["rows"] += rows
            report["lines"][f"{name}, {what}"] = fit
            each = {size: row[3] for size, row in zip(sizes, rows)}
            summary.append([f"{name}, {what}", fit["constant_seconds"], 1e3 * fit["seconds_each"],
                            100 * fit["most_off"], each[16] / each[4] if what == "tokens" else each[8] / each[4]])
        report["tables"][what] = table
    report["tables"]["lines"] = {"columns": ["line", "constant, seconds", "milliseconds each", "most off, %",
                                             "each at 16x (8 layers) over 4x (4 layers)"], "rows": summary}
    for row in summary:
        print(f"{row[0]:<24} {row[1]:8.4f} s + {row[2]:8.4f} ms each | most off {row[3]:4.1f} % | "
              f"largest over middle {row[4]:5.3f}", flush=True)
    measure.write_report("growth", report, args.results_dir)
    checkpoints(args, report)
    report["seconds"] = time.monotonic() - began
    print(f"wrote {measure.write_report('growth', report, args.results_dir)} after {report['seconds']:.0f} s")


if __name__ == "__main__":
    main()
