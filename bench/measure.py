"""What the measurements in this folder share: two ways in turn, medians, the machine, one JSON file per question.

A report has `tables`: {name: {"columns": [...], "rows": [[...], ...]}} of numbers and words, for bench/table.py, which
renders them into README.md and docs/; everything else in it is there for whoever wants to look closer.
"""
import datetime
import gc
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
PACKAGES = ("torch", "transformers", "peft", "trl", "torchao")      # those installed are named in a report
FOLDERS = ("--results_dir", "--work_dir")      # flags that change nothing of what is measured
MALLOC = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "100000000000", "MALLOC_TOP_PAD_": "268435456"}


def keep_freed_memory(argv=None):
    """Start this script anew with a glibc that keeps freed memory, when there is no GPU and main() got no argv.

    By default each large tensor costs page faults anew, which a GPU, with torch's caching allocator, never pays.
    """
    if argv is None and not torch.cuda.is_available() and platform.libc_ver()[0] == "glibc" \
            and not MALLOC.items() <= os.environ.items():
        sys.stdout.flush()
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | MALLOC)


def allocator():
    """Who gives memory to tensors on the CPU, in words."""
    if not MALLOC.items() <= os.environ.items():
        return "the system's"
    return " ".join(["glibc, freed memory kept:", *(f"{name}={value}" for name, value in MALLOC.items())])


def synchronize(device):
    """Wait for the GPU; a CPU is always done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def alternate(ways, rounds, device, warm_up=1, after=None):
    """{name: [seconds of each round]} of {name: function}, called in turn: a busy moment of the machine hits all.

    Each name's first `warm_up` calls are not timed. The order turns around every round, so none always goes first.
    after: called with what is known so far when a timed round has ended.
    """
    seconds = {name: [] for name in ways}
    for turn in range(-warm_up, rounds):
        gc.collect()
        for name in ways if turn % 2 == 0 else reversed(ways):
            synchronize(device)
            start = time.perf_counter()
            ways[name]()
            synchronize(device)
            if turn >= 0:
                seconds[name].append(time.perf_counter() - start)
        if after and turn >= 0:
            after(seconds)
    return seconds


def median(values):
    """Median and spread of a list of numbers: {"median", "least", "most"}."""
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def matmul_rate(device, dtype=None, size=None, repeats=10):
    """FLOP/s of a large matrix product, median: bf16, 8192 wide on a GPU, float32, 1024 wide on a CPU."""
    cuda = device.type == "cuda"
    size, dtype = size or (8192 if cuda else 1024), dtype or (torch.bfloat16 if cuda else torch.float32)
    a, b = torch.randn(2, size, size, device=device, dtype=dtype)
    seconds = alternate({"matmul": lambda: [a @ b for _ in range(10)]}, repeats, device, warm_up=3)["matmul"]
    return 10 * 2 * size ** 3 / statistics.median(seconds)


def peak_memory_gib(device):
    """Most memory held so far: of the GPU as torch counts it, else resident memory of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))     # getrusage's has the parent's in it
    return int(status["VmHWM"].split()[0]) / 2**20


def device_name(device):
    """"NVIDIA H200", or "CPU"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def command(script, argv=None):
    """The line that measures it again: argv, by default this process's, less the folders of this machine."""
    parts, words = [], iter(sys.argv[1:] if argv is None else argv)
    for word in words:
        if word in FOLDERS:
            next(words, None)
        elif not word.startswith(tuple(f"{flag}=" for flag in FOLDERS)):
            parts.append(word)
    return shlex.join(["python", f"bench/{script}.py", *parts])


def new_report(question, device, command):
    """What every report begins with: the question, the machine, versions, the day and the command."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    if device.type == "cuda":
        versions["cuda"] = torch.version.cuda
    cpu = next((line.split(":", 1)[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")), "")
    return {"question": question, "device": device_name(device), "cpu": cpu, "cores": len(os.sched_getaffinity(0)),
            "threads": torch.get_num_threads(), "allocator": allocator(), "date": datetime.date.today().isoformat(),
            "versions": versions, "command": command, "tables": {}}


def write_report(name, report, results_dir=RESULTS):
    """Write results_dir/NAME-DEVICE.json and return its path."""
    path = Path(results_dir) / f"{name}-{'-'.join(report['device'].lower().split())}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(report, indent=1) + "\n")
    os.replace(temporary, path)
    return path
