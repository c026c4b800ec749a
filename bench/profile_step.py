"""Where does the time of one of our steps go? torch.profiler over steps of a trainer, as a table.

    python bench/profile_step.py speech                    # or chats, blocks; a minute or two
    python bench/profile_step.py speech --shape tiny --steps 1     # to try it

The trainer runs as a user starts it, on speed.py's files, packed to a budget. Twelve steps warm up,
then --steps are timed, then the same number under the profiler. Self times: without what a
called operator spends; on a GPU those of kernels, and the rest of the step the GPU waits.

Writes bench/results/profile-NAME-DEVICE.txt.
"""
import argparse
import json
import os
import re
import runpy
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch
from torch.autograd import DeviceType
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.profiler import ProfilerActivity

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench import measure
from bench.speed import SCRIPTS, SETS, length, make_files, our_command, packed
from bench.table import origin

WARM_UP = 12        # steps: kernels of other sizes are compiled in the first ones
ROWS, WIDTH = 25, 64        # of the table
GROUPS = {      # the first that a name of an operator or a kernel matches
    "attention": r"attention|flash|fmha|flex",
    "fused by torch.compile": r"^triton_",
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


def watch(script, words, out, timed, profiled):
    """Run a trainer's script in this process, time and profile its steps, then leave the process.

    Writes OUT.json (seconds of a step and of the first one, peak memory) and OUT.profile.txt.
    """
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    kinds = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * cuda]
    profiler, steps, times = torch.profiler.profile(activities=kinds), 0, {}
    started, ended = WARM_UP + timed, WARM_UP + timed + profiled

    def step_done(optimizer, args, kwargs):
        nonlocal steps
        steps += 1
        if steps not in (1, WARM_UP, started, ended):
            return
        measure.synchronize(device)
        times[steps] = time.perf_counter()
        if steps == started:    # written before the profiler starts, whatever that does
            row = {"step_s": (times[started] - times[WARM_UP]) / timed,
                   "first_step_s": times[1] - began, "peak_gib": measure.peak_memory_gib(device)}
            Path(f"{out}.json").write_text(json.dumps(row))
            profiler.start()
            times["profile"] = time.perf_counter()
        elif steps == ended:
            profiler.stop()
            alone = (times[started] - times[WARM_UP]) / timed
            under = (times[ended] - times["profile"]) / profiled
            seen = profiler.key_averages()
            lines = tables(self_times(seen, cuda), profiled, (alone, under), cuda)
            if cuda:        # what the host does meanwhile
                lines += rows_of(self_times(seen, False), profiled, under, "host operator")
            Path(f"{out}.profile.txt").write_text("\n".join(lines) + "\n")
            os._exit(0)     # threads of the trainer still run
    register_optimizer_step_post_hook(step_done)
    sys.argv, began = [script, *words], time.perf_counter()
    runpy.run_path(str(ROOT / script), run_name="__main__")
    sys.exit(f"error: the run ended in its step {steps}, before {ended}")


# ---- What the profiler saw


def self_times(averages, cuda):
    """{name: (milliseconds, calls)} of operators, on a GPU of kernels."""
    times = {}
    for row in averages:
        on_device = row.device_type != DeviceType.CPU
        if on_device == cuda and not row.is_user_annotation:
            spent = row.self_device_time_total if cuda else row.self_cpu_time_total
            before, calls = times.get(row.key, (0, 0))
            times[row.key] = before + spent / 1e3, calls + row.count
    return times


def group_of(name):
    groups = (group for group, pattern in GROUPS.items() if re.search(pattern, name, re.IGNORECASE))
    return next(groups, OTHER)


def tables(operators, steps, times, cuda):
    """Lines of both tables, a step each. operators: of self_times, over `steps`. times: seconds of
    a step without the profiler and under it.
    """
    groups = Counter()
    alone, wall = (1e3 * seconds for seconds in times)
    for name, (spent, _) in operators.items():
        groups[group_of(name)] += spent / steps
    rest = "GPU idle" if cuda else "outside operators (Python)"
    groups[rest] = wall - sum(groups.values())
    lines = [f"a step: {alone:,.1f} ms, under the profiler {wall:,.1f} ms; of the latter", ""]
    for group, spent in groups.most_common():
        lines.append(f"{spent:12,.2f} ms {100 * spent / wall:6.1f} %   {group}")
    return lines + rows_of(operators, steps, times[1], "kernel" if cuda else "operator")


def rows_of(operators, steps, seconds, kind):
    """Lines of the slowest names, per step. seconds: duration of a step."""
    lines = ["", f"{'self ms':>12} {'%':>9}   {'calls':>7}   {kind}"]
    for name, (spent, calls) in sorted(operators.items(), key=lambda item: -item[1][0])[:ROWS]:
        lines.append(f"{spent / steps:12,.2f} {spent / steps / seconds / 10:9.1f}   "
                     f"{calls / steps:7,.0f}   {name[:WIDTH]}")
    return lines


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=SCRIPTS, help="system to profile")
    parser.add_argument("--shape", help="size of the model, as in speed.py")
    parser.add_argument("--lora", action="store_true", help="speech, chats: train adapters")
    parser.add_argument("--compile", action="store_true", help="compile the layers")
    parser.add_argument("--steps", type=int, default=2, help="steps to time and to profile")
    parser.add_argument("--results_dir", type=Path, default=measure.RESULTS)
    args = parser.parse_args(argv)
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    shape, samples, batch = SETS[device.type][args.name]
    shape = args.shape or shape
    report = measure.new_report("where a step's time goes", device,
                                measure.command("profile_step", argv))
    options = {"lora": ["--use_lora"], "compile": ["--compile"]}
    kind = [name for name in options if getattr(args, name)]
    more = [*packed(args.name, batch), *length(args.name, 1000, 1000),
            *[word for name in kind for word in options[name]], *["--bf16", "--tf32"] * cuda]
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        files = make_files(args.name, folder, shape, samples)
        _, _, *words = our_command(args.name, files, shape, batch, folder, *more, "--output_dir",
                                   folder / "out")
        subprocess.run([sys.executable, __file__, "watch", str(args.steps), str(folder / "seen"),
                        SCRIPTS[args.name], *map(str, words)], check=True)
        seen = json.loads((folder / "seen.json").read_text())
        profile = (folder / "seen.profile.txt").read_text()
    text = f"{origin(report)}\n{shape}, peak {seen['peak_gib']:.2f} GiB\n\n{profile}"
    print(text)
    where = "-".join([args.name, *kind, *report["device"].lower().split()])
    path = args.results_dir / f"profile-{where}.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    print(f"wrote {path}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["watch"]:      # in a separate process
        watch(sys.argv[4], sys.argv[5:], sys.argv[3], int(sys.argv[2]), int(sys.argv[2]))
    main()
