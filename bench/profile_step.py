"""Where does the time of one of our steps go? torch.profiler over steps of a trainer, as a table.

    python bench/profile_step.py speech                    # or chats, blocks; a minute or two
    python bench/profile_step.py speech --shape tiny --steps 1     # to try it

The trainer itself runs, on speed.py's files, packed to a budget. Four steps warm up, then --steps
are timed as they are, then as many under the profiler. Self times: without what a called operator
spends; on a GPU of its kernels, and what they leave of the step is time in which the GPU waits. The
peak of memory stands beside the one that --dry_run plans for.

Writes bench/results/profile-NAME-DEVICE.txt.
"""
import argparse
import contextlib
import importlib
import os
import re
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import measure
from bench.speed import SCRIPTS, SETS, length, make_files, our_command, packed
from bench.table import origin
from common import flags, plan, run, step_memory

WARM_UP, ROWS, WIDTH = 4, 25, 64
GROUPS = {      # the first that a name of an operator or a kernel matches
    "attention": r"attention|flash|fmha|flex",
    "matrix products": r"::(mm|addmm|bmm|baddbmm|_scaled_mm)$|mkldnn|gemm|cutlass|cublas|nvjet|"
                       r"xmma|splitk",
    "optimizer, clipping": r"adam|_foreach|multi_tensor|vector_norm|lpnorm",
    "random numbers, dropout": r"dropout|bernoulli|rand|normal_|philox|distribution",
    "softmax and cross-entropy": r"softmax|nll|cross_entropy|argmax",
    "copies, casts, gathers, zeros": r"copy|::cat$|catarray|index|gather|scatter|embedding|fill|"
                                     r"zero|empty|masked|memcpy|memset|split|slice|_to_copy",
    "views, autograd's own work": r"autograd::|Backward\d+$|strided|transpose|::t$|view|reshape|"
                                  r"expand|squeeze|::to$|linear$|select$|detach|subclass"}
OTHER = "elementwise, norms, sums and the rest"


class Watch:
    """Profiles a training loop that calls step_done() after every step.

    times: seconds of a step without the profiler, and under it.
    """

    def __init__(self, device, steps):
        self.device, self.steps = device, steps
        self.ended, self.going, self.times = 0, True, []
        kinds = [ProfilerActivity.CPU]
        if device.type == "cuda":
            kinds.append(ProfilerActivity.CUDA)
        self.profiler = torch.profiler.profile(activities=kinds)

    def step_done(self):
        """False when all has been seen."""
        self.ended += 1
        seen = self.ended - WARM_UP
        if seen % self.steps == 0 and seen >= 0:
            measure.synchronize(self.device)
            if seen:
                self.times.append((time.perf_counter() - self.start) / self.steps)
            if seen == self.steps:
                self.profiler.start()
            elif seen == 2 * self.steps:
                self.profiler.stop()
                self.going = False
            self.start = time.perf_counter()
        return self.going


# --------------------------------------------------------------------------------------------------
# The trainer, until the watch has seen enough


class Finished(Exception):
    """All steps have been seen."""


def train(name, words, watch):
    """Run a trainer's own train(): the watch hears of each step. -> bytes of one GPU that its
    --dry_run plans for.
    """
    script = importlib.import_module(SCRIPTS[name].removesuffix(".py").replace("/", "."))
    planned, real_window = [], run.TrainState.window

    def parse(*more):
        return flags.parse(script.build_parser(), script.check_flags, [*map(str, words), *more])

    def print_room(args, setup, found, *_):
        planned.append(found.peak)

    def window(now):
        if now.step and not watch.step_done():
            raise Finished
        return real_window(now)

    with step_memory.swapped((plan, "print_room", print_room)):
        script.train(parse("--dry_run", "1"))
    with step_memory.swapped((run.TrainState, "window", window)), contextlib.suppress(Finished):
        script.train(parse())
    return planned[0]


# --------------------------------------------------------------------------------------------------
# What the profiler saw


def self_times(averages, cuda):
    """{name: (milliseconds, calls)} of operators, on a GPU of kernels."""
    found = {}
    for row in averages:
        on_device = row.device_type != DeviceType.CPU
        if on_device == cuda and not row.is_user_annotation:
            spent = row.self_device_time_total if cuda else row.self_cpu_time_total
            before, calls = found.get(row.key, (0, 0))
            found[row.key] = before + spent / 1e3, calls + row.count
    return found


def group_of(name):
    found = (group for group, pattern in GROUPS.items() if re.search(pattern, name, re.IGNORECASE))
    return next(found, OTHER)


def tables(found, steps, times, cuda):
    """Lines of both tables, a step each. found: of self_times, over `steps`. times: seconds of a
    step without the profiler and under it.
    """
    groups = Counter()
    alone, wall = (1e3 * seconds for seconds in times)
    for name, (spent, _) in found.items():
        groups[group_of(name)] += spent / steps
    rest = "GPU idle" if cuda else "outside operators (Python)"
    groups[rest] = wall - sum(groups.values())
    lines = [f"a step: {alone:,.1f} ms, under the profiler {wall:,.1f} ms; of the latter", ""]
    for group, spent in groups.most_common():
        lines.append(f"{spent:12,.2f} ms {100 * spent / wall:6.1f} %   {group}")
    kind = "kernel" if cuda else "operator"
    lines += ["", f"{'self ms':>12} {'%':>9}   {'calls':>7}   {kind}"]
    for name, (spent, calls) in sorted(found.items(), key=lambda item: -item[1][0])[:ROWS]:
        spent, calls = spent / steps, calls / steps
        share = 100 * spent / wall
        lines.append(f"{spent:12,.2f} {share:9.1f}   {calls:7,.0f}   {name[:WIDTH]}")
    return lines


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=SCRIPTS, help="whose step")
    parser.add_argument("--shape", help="size of the model, as speed.py has it")
    parser.add_argument("--lora", action="store_true", help="speech, chats: adapters")
    parser.add_argument("--compile", action="store_true", help="as the trainer's flag")
    parser.add_argument("--steps", type=int, default=2, help="steps to time, and to profile")
    parser.add_argument("--results_dir", type=Path, default=measure.RESULTS)
    args = parser.parse_args(argv)
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    shape, samples, batch = SETS[device.type][args.name]
    shape, watch = args.shape or shape, Watch(device, args.steps)
    report = measure.new_report("where a step's time goes", device,
                                measure.command("profile_step", argv))
    more = [*packed(args.name, batch), *length(args.name, 1000, 1000)]
    kind = [args.name]
    if args.lora:
        more.append("--use_lora")
        kind.append("lora")
    if args.compile:
        more.append("--compile")
        kind.append("compiled")
    if cuda:
        more += ["--bf16", "--tf32"]
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        files = make_files(args.name, folder, shape, samples)
        _, _, *words = our_command(args.name, files, shape, batch, folder, *more, "--output_dir",
                                   folder / "out")
        planned = train(args.name, words, watch)
        memory = (f"peak {measure.peak_memory_gib(device):.2f} GiB, planned "
                  f"{planned / 2**30:.2f} GiB for a GPU")
    found = self_times(watch.profiler.key_averages(), cuda)
    lines = [origin(report), f"{shape}, {memory}", f"memory from: {report['allocator']}", "",
             *tables(found, watch.steps, watch.times, cuda)]
    print("\n".join(lines))
    where = "-".join(report["device"].lower().split())
    path = args.results_dir / f"profile-{'-'.join(kind)}-{where}.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
    print(f"wrote {path}", flush=True)
    if argv is None:
        os._exit(0)     # threads of the run that was left


if __name__ == "__main__":
    main()
