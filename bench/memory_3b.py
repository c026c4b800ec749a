"""Does training at the 3B shape fit, how fast is it, and how good is --dry_run's estimate of its memory?

    python bench/memory_3b.py                   # on a GPU machine: the real shape, about 5 minutes and 12 GB of disk
    python bench/memory_3b.py --shape tiny      # anywhere: shows that this script works, measures nothing of use

Random weights in the real shape, random codes of 96 clips, the real trainer in processes of its own: first its dry run,
then some steps, whose step time, MFU and peak of allocated memory are read from metrics.jsonl. That peak has no CUDA
context in it: it compares with the estimate less its fixed part. What the GPU had in use, seen from outside, compares
with the whole one. Writes bench/results/memory_3b-DEVICE.json.
"""
import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import measure
from speech import codes, make_tiny, weights
from speech.conversations import Clip

ROOT = Path(__file__).resolve().parent.parent

SHAPES = {"3b": {"vocab_size": 128256, "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28,
                 "num_attention_heads": 24, "num_key_value_heads": 8, "head_dim": 128}, "tiny": {}}
LORA = ("--use_lora", "--lora_target_modules", "all-linear", "--lora_rank", 16, "--lora_alpha", 64)
FULL = ("--parallel", "fsdp", "--gradient_checkpointing")
MODES = {
    "LoRA, DDP": LORA,
    "LoRA, FSDP2": (*LORA, "--parallel", "fsdp"),
    "LoRA, FSDP2, checkpointing": (*LORA, "--parallel", "fsdp", "--gradient_checkpointing"),
    "full, FSDP2, checkpointing": FULL,
    "full, FSDP2, checkpointing, layers kept": (*FULL, "--no-reshard_after_forward"),
    "full, FSDP2, checkpointing, 2 micro-steps": (*FULL, "--gradient_accumulation_steps", 2),
}


def write_samples(folder, clips=96):
    """Codec, tokenizer and tiny model of make_tiny.py in a folder, and train.json of clips of 2 to 8 s.

    Their codes are random and lie in folder/codes; the audio files are empty, since nothing decodes them: a GPU machine
    may lack soundfile.
    """
    make_tiny.make_codec(folder)
    make_tiny.make_model(folder, make_tiny.make_tokenizer(folder))
    cache, rng, speech = folder / "codes" / codes.codec_fingerprint(folder / "codec"), np.random.default_rng(0), []
    cache.mkdir(parents=True)
    batch = codes.Batch(cache, 8)
    for number, seconds in enumerate(rng.uniform(2, 8, clips)):
        path, key = (folder / f"{number}.wav").resolve(), f"{number:016d}".encode()
        path.touch()
        batch.add_codes(key, rng.integers(0, 1024, (round(seconds * codes.FRAME_RATE), 8), np.int16))
        batch.add_file(codes.file_key(Clip(str(path)), 0, path.stat().st_mtime_ns), key)
        speech.append({"text": make_tiny.SENTENCES[number % len(make_tiny.SENTENCES)], "speaker": number % 4,
                       "path": path.name, "seconds": round(float(seconds), 3)})
    batch.write()
    make_tiny.make_dataset(folder, speech)


def write_model(folder, tiny, shape):
    """A random bf16 checkpoint of the shape in the native format, one file a layer, with the tiny model's tokenizer."""
    shutil.copytree(tiny, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((tiny / "config.json").read_text()) | SHAPES[shape]
    model = weights.empty_model(weights.native_config(config), torch.bfloat16)
    model.config.save_pretrained(folder)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    files = {}
    for name, parameter in model.named_parameters():
        files.setdefault(".".join(name.split(".")[:3]), {})[name] = parameter.shape
    for i, shapes in enumerate(files.values()):
        tensors = {name: torch.ones(s, dtype=torch.bfloat16) if "norm" in name else
                   (torch.randn(s, dtype=torch.bfloat16, device=device) * 0.02).cpu() for name, s in shapes.items()}
        save_file(tensors, folder / f"model-{i + 1:05d}-of-{len(files):05d}.safetensors", {"format": "pt"})


def used_memory():
    """Bytes in use on each GPU, by whatever process."""
    return [total - free for free, total in map(torch.cuda.mem_get_info, range(torch.cuda.device_count()))]


def kill_tree(pid):
    """End a process and all that it started, at once; torchrun's workers have sessions of their own."""
    pairs = subprocess.run(["ps", "-e", "-o", "pid=,ppid="], text=True, stdout=subprocess.PIPE).stdout.splitlines()
    children, doomed = {}, [pid]
    for child, parent in (map(int, pair.split()) for pair in pairs):
        children.setdefault(parent, []).append(child)
    for process in doomed:
        doomed += children.get(process, [])
    for process in doomed:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def run(command, output_dir, steps, limit_s):
    """Train until `steps` are logged, then end the processes at once (a full checkpoint is 69 GB).

    -> (metrics by step, most bytes in use on one GPU that were not before, None without a GPU).
    """
    metrics, end = output_dir / "metrics.jsonl", time.monotonic() + limit_s
    before, used = used_memory(), []
    with tempfile.TemporaryFile("w+") as log:
        job = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        rows, status = [], None
        try:
            while time.monotonic() < end and status is None and len(rows) < steps:
                time.sleep(0.2)
                status = job.poll()
                used += [now - then for now, then in zip(used_memory(), before)]
                if metrics.exists():
                    lines = metrics.read_text().splitlines(keepends=True)
                    rows = [json.loads(line) for line in lines if line.endswith("\n")]
        finally:
            kill_tree(job.pid)
            job.wait()
        log.seek(0)
        text = log.read()
    if len(rows) < steps:
        raise SystemExit(f"only {len(rows)} of {steps} steps (status {status}):\n{text[-3000:]}")
    return rows, max(used, default=None)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="3b", help="size of the model")
    parser.add_argument("--steps", type=int, default=8, help="optimizer steps of each mode; the last half is timed")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens per step and GPU")
    parser.add_argument("--modes", default="", help="comma-separated numbers of the modes to run, from 0; empty = all")
    parser.add_argument("--work_dir", help="where models and runs go (default: a temporary folder)")
    parser.add_argument("--results_dir", type=Path, default=measure.RESULTS, help="where the JSON goes")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))       # `timeout` leaves no trainer behind
    gpus = torch.cuda.device_count()
    names = [name for i, name in enumerate(MODES) if not args.modes or str(i) in args.modes.split(",")]
    results = []
    with tempfile.TemporaryDirectory(dir=args.work_dir) as work:
        work = Path(work)
        write_samples(work)
        write_model(work / "big", work / "model", args.shape)
        for i, name in enumerate(names):
            output_dir = work / f"run{i}"
            trainer = [str(ROOT / "train_v2_ddp.py"), "--model_path", work / "big", "--audio_tokenizer_path",
                       work / "codec", "--train_data_file", work / "train.json", "--code_cache", work / "codes",
                       "--output_dir", output_dir, "--report_to", "none", "--bf16", "--disable_eval",
                       "--logging_steps", 1, "--max_tokens_per_batch", args.tokens, "--max_steps", 1000,
                       "--save_steps", 0, *MODES[name]]
            trainer = list(map(str, trainer))
            plan = subprocess.run([sys.executable, *trainer, "--dry_run", str(max(1, gpus)), "--gpu_memory", "1000",
                                   "--host_memory", "1000"], text=True, stdout=subprocess.PIPE,
                                  stderr=subprocess.STDOUT).stdout
            try:
                estimate, fixed = (float(re.search(part + r" +([\d.,]+) GiB", plan)[1].replace(",", ""))
                                   for part in ("peak estimate", "fixed"))
            except TypeError:
                raise SystemExit(f"the dry run gave no estimate:\n{plan[-3000:]}")
            launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone",
                        f"--nproc_per_node={max(1, gpus)}"]
            rows, used = run([*launcher, *trainer], output_dir, args.steps, 400)
            timed = rows[args.steps // 2:args.steps]
            mean = {key: sum(row[key] for row in timed) / len(timed) for key in timed[0] if key.startswith("train/")}
            results.append({"mode": name, "estimate_gib": estimate, "used_gib": used and round(used / 2**30, 2),
                            "estimate_without_fixed_gib": round(estimate - fixed, 2),
                            "allocated_gib": max(row["train/memory_gib"] for row in rows),
                            "step_seconds": mean["train/step_seconds"], "tokens_per_second": mean["train/throughput"],
                            "mfu": mean.get("train/mfu"), "loss": rows[-1]["train/loss"]})
            print(json.dumps(results[-1]), flush=True)
    if args.shape != "3b":
        print("not the real shape: nothing is written")
        return
    report = measure.new_report("memory and speed at the 3B shape, random weights, bf16",
                                torch.device("cuda" if gpus else "cpu"), measure.command("memory_3b"))
    report |= {"gpus": gpus, "tokens_per_step_and_gpu": args.tokens, "results": results}
    columns = ["estimate_gib", "used_gib", "estimate_without_fixed_gib", "allocated_gib", "step_seconds",
               "tokens_per_second", "mfu"]
    report["tables"]["modes"] = {"columns": ["mode", *(column.replace("_", " ") for column in columns)],
                                 "rows": [[result["mode"], *(result[column] for column in columns)]
                                          for result in results]}
    print(f"wrote {measure.write_report('memory_3b', report, args.results_dir)}")


if __name__ == "__main__":
    main()
