"""Why tensor_files.whole gathers as it does: gloo's threads corrupt the heap where the name of a collective is long.

    python bench/gloo_names.py          # three minutes; writes bench/results/gloo_names-cpu.json

A process alone begins two gathers at once, again and again for --seconds: by torch's functional collectives, as
DTensor.full_tensor() does and gloo calls ALLGATHER_COALESCED, or by all_gather_into_tensor (since torch 2.13
all_gather_single), gloo's ALLGATHER.
"""
import argparse
import resource
import signal
import subprocess
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import measure

GATHERS = """
import sys
import time

import torch
import torch.distributed as dist

torch.set_num_threads(1)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
functional, group = torch.ops._c10d_functional, dist.group.WORLD.group_name
part, wholes, end, gathers = torch.ones(4), torch.empty(2, 4), time.monotonic() + float(sys.argv[2]), 0
while time.monotonic() < end:
    for _ in range(100):
        if sys.argv[1] == "ALLGATHER_COALESCED":
            for whole in [functional.all_gather_into_tensor(part, 1, group) for _ in wholes]:
                functional.wait_tensor(whole)
        else:
            for work in [gather(whole, part, async_op=True) for whole in wholes]:
                work.wait()
    gathers += 200
    print(gathers, flush=True)
"""


def leave_no_core():
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def run(name, seconds):
    """[name, gathers seen, how the process ended]; CalledProcessError where neither time nor a signal ended it."""
    done = subprocess.run([sys.executable, "-c", GATHERS, name, str(seconds)], stdout=subprocess.PIPE, text=True,
                          stderr=subprocess.PIPE, preexec_fn=leave_no_core)
    if done.returncode > 0:
        sys.stderr.write(done.stderr)
        done.check_returncode()
    ended = signal.Signals(-done.returncode).name if done.returncode else "status 0"
    return [name, int((done.stdout.split() or [0])[-1]), ended]


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=20, help="of a run that nothing ends (default: %(default)s)")
    parser.add_argument("--runs", type=int, default=5, help="of each name, in turn (default: %(default)s)")
    parser.add_argument("--results_dir", default=measure.RESULTS, help="folder of the report")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    report = measure.new_report("How does a process end whose gloo threads gather two tensors at once?",
                                torch.device("cpu"), measure.command("gloo_names", argv))
    rows = [run(name, args.seconds) for _ in range(args.runs) for name in ("ALLGATHER_COALESCED", "ALLGATHER")]
    report["tables"]["ends"] = {"columns": ["gloo's name", "gathers until the end", "end"], "rows": sorted(rows)}
    print(measure.write_report("gloo_names", report, args.results_dir))


if __name__ == "__main__":
    main()
