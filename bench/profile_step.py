"""Where does the time of one of our steps go? torch.profiler over warmed-up steps of a trainer, as a table.

    python bench/profile_step.py tts                    # or sft, block_diffusion; a minute or two
    python bench/profile_step.py tts --shape tiny --steps 1     # to try it

The steps are those that tts.py, sft.py and block_diffusion.py measure as "ours" on this kind of machine; on a GPU the
speech and diffusion layers are compiled, as measured there. Two steps warm up, then --steps are timed as they are, then
as many under the profiler. Self times: without what a called operator spends; on a GPU of its kernels, and what they
leave of the step is time in which the GPU waits.

Writes bench/results/profile-NAME-DEVICE.txt.
"""
import argparse
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
from bench.table import origin

WARM_UP, ROWS, WIDTH = 2, 25, 64
GROUPS = {      # the first that a name of an operator or a kernel matches
    "attention": r"attention|flash|fmha|flex",
    "matrix products": r"::(mm|addmm|bmm|baddbmm|_scaled_mm)$|mkldnn|gemm|cutlass|cublas|nvjet|xmma|splitk",
    "optimizer, clipping": r"adam|_foreach|multi_tensor|vector_norm|lpnorm",
    "random numbers, dropout": r"dropout|bernoulli|rand|normal_|philox|distribution",
    "softmax and cross-entropy": r"softmax|nll|cross_entropy|argmax",
    "copies, casts, gathers, zeros": r"copy|::cat$|catarray|index|gather|scatter|embedding|fill|zero|empty|masked|"
                                     r"memcpy|memset|split|slice|_to_copy",
    "views, autograd's own work": r"autograd::|Backward\d+$|strided|transpose|::t$|view|reshape|expand|squeeze|::to$|"
                                  r"linear$|select$|detach|subclass"}
OTHER = "elementwise, norms, sums and the rest"


class Watch:
    """Profiles a training loop that calls step_done() after every step; also what tts_ways and sft_ways tell rounds to.

    times: seconds of a step without the profiler, and under it.
    """

    def __init__(self, device, steps):
        self.device, self.steps, self.ended, self.going, self.times = device, steps, 0, True, []
        self.counts, self.plan, self.checked, self.slots = Counter(), [], None, 0
        self.profiler = torch.profiler.profile(
            activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda"))

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

    step = step_done

    def wait(self):
        return self.going

    def done(self, *_):
        """A pass over tts_ways' samples has ended."""


# ---------------------------------------------------------------------------------------------------------------------
# Our step of each benchmark, until the watch has seen enough


def tts(watch, args, device, folder):
    """A step of train_v2_ddp.py."""
    from bench import tts_ways
    cuda = device.type == "cuda"
    batch = 8 if cuda else 4
    tts_ways.write_samples(folder, 2 * batch, args.seed)
    way = {"side": "ours", "shape": args.shape or ("3b" if cuda else "small"), "method": args.method or "lora",
           "bf16": cuda, "batch": batch, "packed": cuda, "compile": cuda}
    tts_ways.train_ours(way, folder, device, watch)
    return way


def sft(watch, args, device, folder):
    """A step of train_sft.py on the label task's short samples."""
    from bench import sft_ways
    cuda = device.type == "cuda"
    shape = args.shape or ("qwen3-4b" if cuda else "small")
    job = argparse.Namespace(folder=folder, data=folder / "data", method=args.method or "full", sets=1,
                             mix=sft_ways.MIXES[device.type]["short"], seed=args.seed)
    sft_ways.make_model(folder / "model", shape, args.seed)
    sft_ways.make_data(job, dict(zip(sft_ways.SIZES, sft_ways.SHAPES[shape]))["vocab_size"], device)
    sft_ways.train_ours(watch, job, {})
    return {"shape": shape, "method": job.method, "samples": job.mix.step_samples}


def block_diffusion(watch, args, device, folder):
    """A step of train_bd3lm.py."""
    from bench import block_steps
    from common import distributed
    cuda = device.type == "cuda"
    problems = 512 if cuda else 8
    settings = argparse.Namespace(size=args.shape or ("small" if cuda else "tiny"), seed=args.seed,
                                  micro_steps=4 if cuda else 1)
    documents, numbers = block_steps.make_documents(max(16, problems), 512, args.seed), list(range(problems))
    step = block_steps.our_step(distributed.World(device=device), settings, documents, numbers, "flex" if cuda else "sdpa",
                                compiled=cuda)
    while watch.going:
        step(watch.ended)
        watch.step_done()
    return vars(settings) | {"problems": problems}


STEPS = {"tts": tts, "sft": sft, "block_diffusion": block_diffusion}


# ---------------------------------------------------------------------------------------------------------------------
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
    return next((group for group, pattern in GROUPS.items() if re.search(pattern, name, re.IGNORECASE)), OTHER)


def tables(found, watch, cuda):
    """Lines of both tables, a step each; found: of self_times, over watch.steps."""
    steps, (alone, wall) = watch.steps, (1e3 * seconds for seconds in watch.times)
    groups = Counter()
    for name, (spent, _) in found.items():
        groups[group_of(name)] += spent / steps
    groups["GPU idle" if cuda else "outside operators (Python)"] = wall - sum(groups.values())
    lines = [f"a step: {alone:,.1f} ms, under the profiler {wall:,.1f} ms; of the latter", ""]
    lines += [f"{spent:12,.2f} ms {100 * spent / wall:6.1f} %   {group}" for group, spent in groups.most_common()]
    lines += ["", f"{'self ms':>12} {'%':>9}   {'calls':>7}   {'kernel' if cuda else 'operator'}"]
    for name, (spent, calls) in sorted(found.items(), key=lambda item: -item[1][0])[:ROWS]:
        spent, calls = spent / steps, calls / steps
        lines.append(f"{spent:12,.2f} {100 * spent / wall:9.1f}   {calls:7,.0f}   {name[:WIDTH]}")
    return lines


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=STEPS, help="whose step")
    parser.add_argument("--shape", help="size of the model, as that benchmark names it (default: its own)")
    parser.add_argument("--method", choices=("lora", "full"), help="tts, sft: what is trained (default: lora, full)")
    parser.add_argument("--steps", type=int, default=2, help="steps to time, and to profile")
    parser.add_argument("--seed", type=int, default=42, help="of weights and samples")
    parser.add_argument("--results_dir", type=Path, default=measure.RESULTS, help="where the text goes")
    args = parser.parse_args(argv)
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    if cuda:
        torch.set_float32_matmul_precision("high")
    torch.manual_seed(args.seed)
    watch = Watch(device, args.steps)
    report = measure.new_report("where a step's time goes", device, measure.command("profile_step", argv))
    with tempfile.TemporaryDirectory() as folder:
        settings = STEPS[args.name](watch, args, device, Path(folder))
    found = self_times(watch.profiler.key_averages(), cuda)
    lines = [origin(report), ", ".join(f"{name} {value}" for name, value in settings.items()),
             f"memory from: {report['allocator']}", "", *tables(found, watch, cuda)]
    print("\n".join(lines))
    path = Path(args.results_dir) / f"profile-{args.name}-{'-'.join(report['device'].lower().split())}.txt"
    path.write_text("\n".join(lines) + "\n")
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
