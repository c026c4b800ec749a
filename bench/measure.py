"""Helpers of the measurements: the machine, its matrix rate, one JSON file per question.

A report has `tables`: {name: {"columns": [...], "rows": [[...], ...]}} of numbers and words, which
bench/table.py renders into README.md and docs/.
"""
import datetime
import json
import os
import platform
import shlex
import statistics
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

RESULTS = Path(__file__).resolve().parent / "results"
PACKAGES = ("torch", "transformers", "peft", "trl", "torchao")      # named in a report if installed
FOLDERS = ("--results_dir", "--work_dir")      # flags that do not change the measurement


def synchronize(device):
    """Wait for the GPU; a CPU is always done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def matmul_rate(device, repeats=13):
    """FLOP/s of a large matrix product, median: bf16, 8192 wide on a GPU, fp32, 1024 on a CPU."""
    size, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (1024, torch.float32)
    a, b = torch.randn(2, size, size, device=device, dtype=dtype)
    seconds = []
    for _ in range(repeats):
        synchronize(device)
        start = time.perf_counter()
        for _ in range(10):
            a @ b
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    return 10 * 2 * size ** 3 / statistics.median(seconds[3:])


def peak_memory_gib(device):
    """Most memory held so far: of the GPU as torch counts it, else resident memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    with open("/proc/self/status") as file:     # getrusage's has the parent's in it
        status = dict(line.split(":", 1) for line in file)
    return int(status["VmHWM"].split()[0]) / 2**20


def device_name(device):
    """"NVIDIA H200", or "CPU"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def command(script, argv=None):
    """The line that measures it again: argv, or this process's, less folders of this machine."""
    parts, words = [], iter(sys.argv[1:] if argv is None else argv)
    for word in words:
        if word in FOLDERS:
            next(words, None)
        elif not word.startswith(tuple(f"{flag}=" for flag in FOLDERS)):
            parts.append(word)
    return shlex.join(["python", f"bench/{script}.py", *parts])


def new_report(question, device, command):
    """The head of every report: question, machine, versions, day and command."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    if device.type == "cuda":
        versions["cuda"] = torch.version.cuda
    with open("/proc/cpuinfo") as file:
        names = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
    return {"question": question, "device": device_name(device), "cpu": names[0] if names else "",
            "cores": len(os.sched_getaffinity(0)), "threads": torch.get_num_threads(),
            "date": datetime.date.today().isoformat(), "versions": versions, "command": command,
            "tables": {}}


def write_report(name, report, results_dir=RESULTS):
    """Write results_dir/NAME-DEVICE.json and return its path."""
    path = Path(results_dir) / f"{name}-{'-'.join(report['device'].lower().split())}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(report, indent=1) + "\n")
    os.replace(temporary, path)
    return path
