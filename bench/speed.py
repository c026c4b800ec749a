"""How fast does each trainer train, and others on the same files? Whole processes, in turn.

    python bench/speed.py speech            # or chats, blocks: small models on a CPU, minutes
    python bench/speed.py speech --lora     # adapters instead of all weights
    python bench/speed.py chats --shape tiny --rounds 1     # to try it

Each way is a command as a user would type it: ours by its trainer, the plain script of minimal/, or
transformers' Trainer (hf_trainer.py). A run trains two epochs and the second one counts: the same
samples for all, with loading. The ways take turns, and the median over --rounds is shown. In its
first step minimal/ (speech, blocks) or Trainer (chats) must have our loss; else nothing
more is measured. On a GPU all compute in bf16, and compiled ways are among them. With one thread on
a CPU (OMP_NUM_THREADS=1) seconds are those that a process ran on a core, which other work on the
machine hardly changes.

Writes bench/results/NAME-DEVICE.json after every run; a way that fails is recorded, the others go
on, and the exit status is 1.
"""
import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench import measure

SCRIPTS = {"speech": "train_v2_ddp.py", "chats": "distill/train_sft.py",
           "blocks": "diffusion/train_bd3lm.py"}
# {name: (shape, samples of an epoch, of a step)} on a CPU and on a GPU
SETS = {"cpu": {"speech": ("small", 20, 4), "chats": ("small", 32, 16), "blocks": ("tiny", 16, 8)},
        "cuda": {"speech": ("3b", 64, 8), "chats": ("4b", 128, 16), "blocks": ("small", 512, 128)}}
SAME = {"speech": ("ours", "minimal"), "chats": ("ours", "Trainer"),
        "blocks": ("ours, one problem a row", "minimal")}       # whose losses must agree
TOLERANCE = {"cpu": 1e-4, "cuda": 1e-2}     # of the first loss, relative
LIMIT_S = 600               # of one run
COLUMNS = ["way", "steps of an epoch", "step (ms)", "fastest", "slowest", "samples/s",
           "useful tokens/s", "padding",
           "memory (GiB)", "mfu", "first loss", "ours is faster by", "at least"]


# ---- Commands


def make_files(name, folder, shape, samples, fill=None):
    """Flags that name a model and data, lengths log-normal."""
    from bench import shapes
    fill = fill or shapes.write_random
    if name in ("speech", "speech3"):
        seconds = shapes.log_normal(2 * samples, 7, 0.6, 2, 20).reshape(-1, 2).round(2).tolist()
        make = shapes.speech_files if name == "speech" else shapes.speech3_files
        words = make(folder, seconds, 0, shape, fill)
        try:
            import soundfile  # noqa: F401
        except ImportError:     # then nothing can be decoded here
            shapes.fill_cache(folder)
        return words
    if name == "chats":
        mean = 500 if shape == "4b" else 48
        lengths = shapes.log_normal(samples, mean, 0.8, mean // 20, 4 * mean)
        return shapes.chat_files(folder, lengths, 0, shape, fill)
    lengths = shapes.log_normal(samples, 157, 0.34, 40, 440)        # GSM8K's
    return shapes.block_files(folder, lengths)


def length(name, epochs, steps):
    """Flags of this many epochs; block diffusion counts steps."""
    return ["--max_steps", steps] if name == "blocks" else ["--num_train_epochs", epochs]


def our_command(name, words, shape, batch, folder, *more):
    """By our trainer; neither validates nor saves before its end."""
    speech = ["--disable_eval", "--code_cache", folder / "codes", "--normalize_text", "off"]
    own = {"speech": speech, "speech3": speech, "chats": [],
           "blocks": ["--model_size", shape, "--validation_split", 0, "--attn_backend",
                      "flex" if torch.cuda.is_available() else "sdpa", "--dropout", 0]}[name]
    size = [] if {"--max_tokens_per_batch", "--problems_per_batch"} & set(more) else [
        "--per_device_train_batch_size", batch]
    return [sys.executable, ROOT / SCRIPTS[name.removesuffix("3")], *words, *own, *size,
            "--report_to", "none",
            "--gradient_accumulation_steps", 1, "--eval_steps", 0, "--save_steps", 0,
            "--num_workers", 2 if torch.cuda.is_available() else 0, *more]


def packed(name, batch):
    """Flags of packs whose shapes do not change, which layers can be compiled for."""
    if name == "blocks":
        return ["--problems_per_batch", batch]
    tokens = 8192 if torch.cuda.is_available() else {"speech": 2048, "chats": 1024}[name]
    return ["--max_tokens_per_batch", tokens]


def ways_of(name, words, args, folder):
    """{way: command}; ours first."""
    shape, samples, batch = args.shape, args.samples, args.batch
    cuda, steps = torch.cuda.is_available(), -(-samples // batch)
    method = ["--use_lora"] if args.lora else []
    precise = ["--bf16"] if cuda else []
    enough = ["--max_steps", 2 * steps + 1]

    def ours(*more):
        return our_command(name, words, shape, batch, folder, *length(name, 2, enough[1]),
                           *method, *precise, *more)

    def minimal(*more):
        return [sys.executable, ROOT / "minimal" / more[0], *words, *more[1:], *precise, *enough,
                "--save_steps", 10**6, "--per_device_train_batch_size", batch]

    def trainer(*more):
        return [sys.executable, ROOT / "bench" / "hf_trainer.py", name, *words, *method, *precise,
                *enough, "--per_device_train_batch_size", batch, "--tables", folder / "ours-0",
                *more]
    if name == "blocks":
        from diffusion.dit import SIZES

        from bench import shapes
        longest = shapes.longest_problem(*words[1::2])      # what minimal's rows are padded to
        names = "--hidden_size", "--layers", "--heads", "--cond_size"
        plain = [word for pair in zip(names, SIZES[shape]) for word in pair]
        ways = {"ours": ours(*packed(name, batch)),
                "ours, one problem a row": ours("--no-pack", "--max_length", longest),
                "minimal": minimal("train_bd3lm.py", *plain, "--dropout", 0, "--max_length",
                                   longest, "--gradient_accumulation_steps", 1,
                                   "--eval_data_file", words[1]),
                "ours, compiled": ours(*packed(name, batch), "--compile")}
        return ways
    ways = {"ours": ours(), "ours, packed": ours(*packed(name, batch)),
            "ours, compiled": ours(*packed(name, batch), "--compile")}
    if name == "speech":
        ways["minimal"] = minimal("train_higgs.py", *method, "--validation_split", 0)
    ways |= {"Trainer": trainer(), "Trainer, compiled": trainer("--compile")}
    if name == "chats":
        ways["Trainer, no padding"] = trainer("--flat")
    return ways


# ---- One run


def seconds_of(pid):
    """CPU time of a process: of its core where it has one thread on a CPU, else of the clock."""
    if torch.cuda.is_available() or torch.get_num_threads() > 1:
        return time.monotonic()
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def run(command, out):
    """Train into a folder -> {"seconds" of the second epoch, "steps" of it, "rows" of
    metrics.jsonl}, or {"error"}. Lines that begin with "step" give the time.
    """
    words = [*map(str, command), "--output_dir", str(out), "--learning_rate", "1e-4",
             "--logging_steps", "1"]
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "CHECK_FLAGS": ""}
    times, last = [], ""
    with subprocess.Popen(words, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          env=environment, cwd=ROOT) as process:
        clock = threading.Timer(LIMIT_S, process.kill)
        clock.start()
        for line in process.stdout:
            last = line.strip() or last
            if line.startswith("step "):
                times.append(seconds_of(process.pid))
        clock.cancel()
    if process.returncode == -signal.SIGKILL:
        return {"error": f"more than {LIMIT_S} s"}
    if process.returncode or len(times) < 2:
        return {"error": last[:200]}
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    steps = len(times) // 2
    return {"seconds": times[2 * steps - 1] - times[steps - 1], "steps": steps,
            "rows": [row for row in rows if "train/loss" in row]}


def summary(name, runs, baseline, samples, tokens):
    """One row of the table: medians over the runs of a way."""
    if error := next((run["error"] for run in runs if "error" in run), None):
        return [name, *[None] * (len(COLUMNS) - 2), error]
    seconds = [run["seconds"] for run in runs]
    spent, steps, rows = statistics.median(seconds), runs[0]["steps"], runs[-1]["rows"]
    faster = least = None
    if len(baseline) == len(runs) and all("seconds" in run for run in baseline):
        ratios = [other / mine["seconds"] for mine, other in zip(baseline, seconds)]
        faster, least = statistics.median(ratios), min(ratios)

    def of(key):
        return rows[-1].get(f"train/{key}")
    step, fastest, slowest = (round(1e3 * value / steps, 1)
                              for value in (spent, min(seconds), max(seconds)))
    return [name, steps, step, fastest, slowest, samples / spent, tokens / spent,
            of("padding"), of("memory_gib"), of("mfu"), rows[0]["train/loss"], faster, least]


def check_first_loss(runs_by_way, pair, device):
    """SystemExit where the two ways that compute the same have other losses in their first step."""
    losses = {way: runs[0]["rows"][0]["train/loss"] for way, runs in runs_by_way.items()
              if runs and "rows" in runs[0]}
    if losses.keys() >= set(pair):
        first, second = (losses[way] for way in pair)
        if not abs(first / second - 1) <= TOLERANCE[device.type]:
            raise SystemExit("error: the first losses DISAGREE, nothing more is measured: "
                             f"{losses}")


# --------------------------------------------------------------------------------------------------


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=SCRIPTS, help="system to measure")
    parser.add_argument("--shape", help="size of the model (bench/shapes.py, or --model_size)")
    parser.add_argument("--samples", type=int, help="samples per epoch")
    parser.add_argument("--batch", type=int, help="samples per step")
    parser.add_argument("--lora", action="store_true", help="speech, chats: train adapters")
    parser.add_argument("--ways", nargs="+", help="compare with these (default: all)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each way")
    parser.add_argument("--work_dir", help="intermediate files (default: a temporary folder)")
    parser.add_argument("--results_dir", type=Path, default=measure.RESULTS)
    args = parser.parse_args(argv)
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    usual = dict(zip(("shape", "samples", "batch"), SETS[device.type][args.name]))
    vars(args).update({key: getattr(args, key) or value for key, value in usual.items()})
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")  # with more, Trainer would use them all
    report = measure.new_report("training speed, random weights", device,
                                measure.command("speed", argv))
    report |= {"shape": args.shape, "samples": args.samples, "batch": args.batch, "runs": {}}
    with tempfile.TemporaryDirectory(dir=args.work_dir) as folder:
        folder = Path(folder)
        words = make_files(args.name, folder, args.shape, args.samples)
        ways = ways_of(args.name, words, args, folder)
        usual = [way for way in ways if cuda or "compiled" not in way]
        ways = {way: ways[way] for way in dict.fromkeys(["ours", *(args.ways or usual)])}
        tokens = 0
        measured = {way: [] for way in ways}
        for number in range(args.rounds):
            for way in ways if number % 2 == 0 else reversed(ways):
                if measured[way] and "error" in measured[way][0]:
                    continue
                out = folder / f"{way.replace(' ', '').replace(',', '-')}-{number}"
                measured[way].append(run(ways[way], out))
                if way == "ours" and not tokens and "rows" in measured[way][0]:
                    rows = measured[way][0]["rows"]
                    tokens = sum(row["train/throughput"] * row["train/step_seconds"]
                                 for row in rows[:len(rows) // 2])
                check_first_loss(measured, SAME[args.name], device)
                report["tables"][args.name] = {"columns": COLUMNS, "rows": [
                    summary(way, runs, measured["ours"][:len(runs)], args.samples, tokens)
                    for way, runs in measured.items() if runs]}
                report["runs"] = measured
                path = measure.write_report(args.name, report, args.results_dir)
                row = next(row for row in report["tables"][args.name]["rows"] if row[0] == way)
                print(" | ".join(f"{value:,.3f}" if isinstance(value, float) else str(value)
                                 for value in row if value is not None), flush=True)
    print(f"wrote {path}")
    failed = [f"{way}: {runs[0]['error']}" for way, runs in measured.items() if "error" in runs[0]]
    if failed:
        raise SystemExit(f"error: failed: {'; '.join(failed)}")


if __name__ == "__main__":
    main()
