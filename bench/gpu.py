"""Is it right, and how fast, on one GPU? The trainers run as a user starts them, each in a process.

    python bench/gpu.py refs DIR                # on a CPU, beforehand: tiny models, losses in fp32
    python bench/gpu.py right DIR               # 28 tiny runs against those losses: 2 to 4 minutes
    python bench/gpu.py fast DIR [JOB ...]      # 3B, 4B, 170M: time, TFLOP/s, memory, profile

A job of `fast` takes 45 to 110 s, as the host is fast or slow. All files go to DIR; carry it from
the machine of `refs` to the GPU. A JOB is a model and options in one word each, such as "speech
lora compiled float8" (OPTIONS below). Results are lines of DIR/right.jsonl or DIR/fast.jsonl and a
table; the exit status is 1 if anything failed. SHAPES=tiny rehearses all of it on a CPU.
"""
import argparse
import contextlib
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
TINY = os.environ.get("SHAPES") == "tiny"
BEGAN = time.monotonic()
SCRIPTS = {"speech": "train_v2_ddp.py", "speech3": "train_v2_ddp.py",
           "chats": "distill/train_sft.py", "blocks": "diffusion/train_bd3lm.py"}
COMMON = ["--report_to", "none", "--gradient_accumulation_steps", 1, "--eval_steps", 0,
          "--save_steps", 0, "--num_workers", 0, "--resume", "none"]

# ---- Processes and results


def start(command, log, **env):
    """Start a command in a new session, its output in a file -> Popen. Its --output_dir, of
    an earlier run of this script, goes first.
    """
    if "--output_dir" in command:
        shutil.rmtree(command[command.index("--output_dir") + 1], ignore_errors=True)
    Path(log).parent.mkdir(exist_ok=True)
    with open(log, "w") as file:
        return subprocess.Popen([*map(str, command)], cwd=ROOT, stdout=file, stderr=file,
                                start_new_session=True, env=os.environ | {
                                    "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1",
                                    "OMP_NUM_THREADS": "1"} | env)


def wait(process, until):
    """Its exit status, or "late" where it had to be killed; whatever it started is killed too."""
    try:
        status = process.wait(max(0, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        status = "late"
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return status


def run_all(commands, until, side_by_side):
    """Yield (name, status) of {name: (command, log, env)} as they end."""
    names, running = list(commands), {}
    while names or running:
        while names and len(running) < side_by_side:
            command, log, env = commands[names[0]]
            running[names.pop(0)] = start(command, log, **env)
        time.sleep(0.1)
        for name, process in list(running.items()):
            if process.poll() is not None or time.monotonic() > until:
                yield name, wait(running.pop(name), until)


def tail(log):
    """The last lines of a log in one."""
    lines = Path(log).read_text(errors="replace").splitlines() if Path(log).exists() else []
    return " | ".join([line for line in lines if line.strip()][-4:])[-500:]


def metrics(out):
    """Rows of training of a run's metrics.jsonl."""
    path = Path(out) / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [row for row in rows if "train/grad_norm" in row]


def loss_of(row):
    return row["train/loss"] if "train/loss" in row else row["train/nll"]


def note(path, row):
    """Append a result to a file and print it."""
    with open(path, "a") as file:
        file.write(json.dumps(row) + "\n")
    text = " ".join(f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}"
                    for key, value in row.items())
    print(f"{time.monotonic() - BEGAN:6.1f} s {text}", flush=True)


def table(rows, columns):
    """Print rows (dicts) as a markdown table; columns: {key: format}."""
    def cell(row, key, form):
        value = row.get(key)
        if value is None:
            return ""
        return format(value, form) if isinstance(value, float) else str(value)
    print("\n| " + " | ".join(columns) + " |\n|" + " --- |" * len(columns))
    for row in rows:
        print("| " + " | ".join(cell(row, *column) for column in columns.items()) + " |")
    sys.stdout.flush()


def gpu_name():
    """Name and memory by nvidia-smi, or "CPU"; CUDA is left to the processes that train."""
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"]
        done = subprocess.run(query, text=True, capture_output=True, check=True)
        return done.stdout.splitlines()[0]
    return "CPU"


# ---- refs, right: tiny models, a few steps

STEPS = 5
LORA = ["--use_lora", "--lora_target_modules", "all-linear"]
PACKS = ["--max_tokens_per_batch", 1024]
CASES = {       # {case: (trainer, its flags)}
    "speech lora": ("speech", [*LORA, *PACKS]),
    "speech full": ("speech", ["--per_device_train_batch_size", 3]),
    "speech3 lora": ("speech3", [*LORA, *PACKS]),
    "chats lora": ("chats", [*LORA, *PACKS, "--parallel", "ddp"]),
    "chats full": ("chats", [*PACKS]),
    "blocks": ("blocks", ["--problems_per_batch", 8, "--model_size", "tiny"])}
WAYS = {        # {way: flags}
    "fp32": [],
    "bf16": ["--bf16"],
    "bf16 fsdp": ["--bf16", "--parallel", "fsdp"],
    "bf16 recomputed": ["--bf16", "--gradient_checkpointing"],
    "bf16 compiled": ["--bf16", "--compile"],
    "bf16 compiled float8": ["--bf16", "--compile", "--float8"]}
ONLY = {"bf16 compiled float8": ("speech lora", "chats lora"),      # cases of a way; default: all
        "bf16 fsdp": ("speech lora", "speech full", "chats lora"),
        "bf16 recomputed": [case for case in CASES if case != "blocks"]}
# relative, by dtype: first loss, its gradient norm, last loss. bf16 on a CPU: 8e-5, 3e-3, 4e-4
LIMITS = {"fp32": (1e-4, 5e-3, 2e-3), "bf16": (1e-3, 2e-2, 5e-3)}


def tiny_files(folder, cases):
    """{trainer: its flags} of some cases; makes missing files."""
    from bench import shapes
    folder.mkdir(parents=True, exist_ok=True)
    pairs = shapes.log_normal(24, 3, 0.5, 1, 6).reshape(-1, 2).round(2).tolist()
    speech = ["--code_cache", folder / "codes", "--disable_eval", "--normalize_text", "off"]
    make = {
        "speech": lambda: [*shapes.speech_files(folder, pairs, 0, "tiny", shapes.write_random),
                           *speech],
        "speech3": lambda: [*shapes.speech3_files(folder, pairs, 0, "tiny"), *speech],
        "chats": lambda: shapes.chat_files(folder, shapes.log_normal(32, 60, 0.6, 10, 200), 0,
                                           "tiny", shapes.write_random),
        "blocks": lambda: [*shapes.block_files(folder, shapes.log_normal(24, 60, 0.3, 30, 120)),
                           "--validation_split", 0, "--dropout", 0]}
    flags = {name: make[name]() for name in dict.fromkeys(CASES[case][0] for case in cases)}
    for path in folder.rglob("*"):      # the code cache goes by times, which a copy may round
        os.utime(path, (1_700_000_000, 1_700_000_000))
    return flags


def tiny_run(folder, flags, case, way):
    """(command, log, environment)"""
    trainer, more = CASES[case]
    out = folder / "runs" / f"{case} {way}".replace(" ", "-")
    warm_up = "--warmup_ratio" if trainer == "chats" else "--warmup_steps"
    if trainer == "blocks":
        flex = gpu_name() != "CPU" and way != "ref"
        more = [*more, "--attn_backend", "flex" if flex else "sdpa"]
    env = {"CUDA_VISIBLE_DEVICES": ""} if way == "ref" else {}
    return [sys.executable, ROOT / SCRIPTS[trainer], *flags[trainer], *COMMON, "--logging_steps", 1,
            "--max_steps", STEPS, "--learning_rate", "1e-3", warm_up, 0, *more,
            *WAYS.get(way, []), "--output_dir", out], f"{out}.log", env


def refs(folder, only):
    cases = [case for case in CASES if re.search(only, case)]
    flags = tiny_files(folder / "tiny", cases)
    commands = {case: tiny_run(folder, flags, case, "ref") for case in cases}
    for case, status in run_all(commands, BEGAN + 600, 1):
        if status:
            sys.exit(f"error: {case}: {tail(commands[case][1])}")
    losses = {case: [(loss_of(row), row["train/grad_norm"]) for row in metrics(command[-1])]
              for case, (command, _, _) in commands.items()}
    (folder / "refs.json").write_text(json.dumps(losses, indent=1) + "\n")
    print(f"wrote {folder / 'refs.json'}: {len(losses)} cases of {STEPS} steps")


def right(folder, seconds, only):
    if not (folder / "refs.json").exists():
        refs(folder, "")
    wanted = json.loads((folder / "refs.json").read_text())
    flags = tiny_files(folder / "tiny", wanted)
    until, rows = BEGAN + seconds, []
    todo = [(case, way) for way in WAYS for case in ONLY.get(way, CASES)
            if case in wanted and re.search(only, f"{case} {way}")
            and not (TINY and "float8" in way)]
    for compiled in (False, True):      # those that compile use all cores
        commands = {(case, way): tiny_run(folder, flags, case, way)
                    for case, way in todo if ("compiled" in way) == compiled}
        for (case, way), status in run_all(commands, until, 2 if TINY else 8):
            limits, ref = LIMITS["fp32" if way == "fp32" else "bf16"], wanted[case]
            command, log, _ = commands[case, way]
            logged, errors = metrics(command[-1]), [math.inf] * 3
            if len(logged) == STEPS:
                errors = [abs(loss_of(logged[0]) / ref[0][0] - 1),
                          abs(logged[0]["train/grad_norm"] / ref[0][1] - 1),
                          abs(loss_of(logged[-1]) / ref[-1][0] - 1)]
            ok = status == 0 and all(e <= limit for e, limit in zip(errors, limits))
            row = {"case": case, "way": way, "ok": "yes" if ok else "NO",
                   **dict(zip(("first loss", "its norm", "last loss"), errors))}
            rows.append(row if status == 0 else row | {"error": f"{status}: {tail(log)}"})
            note(folder / "right.jsonl", rows[-1])
    table(rows, {"case": "", "way": "", "ok": "", "first loss": ".1e", "its norm": ".1e",
                 "last loss": ".1e", "error": ""})
    return [f"{row['case']} {row['way']}" for row in rows if row["ok"] == "NO"]


# ---- fast: true shapes

WARM_UP, TIMED, PROFILED = 12, 8, 2     # steps; WARM_UP as in profile_step.py
PEAK = 989e12       # bf16 FLOP/s of an H100 or H200 SXM by datasheet, which train/mfu divides by
BUDGET = 2048 if TINY else 8192         # tokens of a pack
BATCH = 4 if TINY else 8                # samples of a padded batch
SHAPES = {"speech": ("3b", 256), "speech3": ("4b", 256), "chats": ("4b", 384),
          "blocks": ("small", 1024)}    # (size, samples): packs are 98 % full
if TINY:
    SHAPES = {"speech": ("tiny", 16), "speech3": ("tiny", 16), "chats": ("tiny", 32),
              "blocks": ("tiny", 32)}
OPTIONS = {"eager": ["--compile", "false"], "compiled": ["--compile"], "full": [],
           "lora": ["--use_lora"], "all": ["--lora_target_modules", "all-linear"],
           "float8": ["--float8"], "fsdp": ["--parallel", "fsdp"],
           "recomputed": ["--gradient_checkpointing"], "tiles64": []}
# FlexAttention's backward in smaller pieces: by registers two of them fit a core at once, not one
TILES64 = {f"bwd_BLOCK_{name}": 64 for name in ("M1", "N1", "M2", "N2")} | {
    "bwd_num_warps": 4, "bwd_num_stages": 1}
JOBS = ["speech lora compiled", "chats lora compiled", "blocks compiled", "speech lora fsdp",
        "speech3 lora compiled", "speech lora all compiled float8", "speech lora eager",
        "speech lora Trainer"]      # what matters most, and what was never measured, comes first


def big_files(folder, trainer):
    """Make a model and its data, weights drawn on the GPU -> flags that name them."""
    import torch

    from bench import shapes, speed
    device = "cuda" if torch.cuda.is_available() else "cpu"

    def fill(named, path):
        shapes.write_random(named, path, device)
    (folder / trainer).mkdir(parents=True, exist_ok=True)
    return speed.make_files(trainer, folder / trainer, *SHAPES[trainer], fill)


def job_command(folder, job, flags, out):
    """[script, its flags] of a job."""
    from bench import speed
    trainer, *options = job.split()
    more = [word for option in options if option != "Trainer" for word in OPTIONS[option]]
    if trainer == "chats" and "fsdp" not in options:
        more += ["--parallel", "ddp"]
    if trainer == "blocks":
        more += ["--problems_per_batch", 8 if TINY else 128]
    elif "Trainer" not in options:      # which takes padded batches of the same samples
        more += ["--max_tokens_per_batch", BUDGET]
    _, _, *words = speed.our_command(
        trainer, flags, SHAPES[trainer][0], BATCH, folder / "files" / trainer, *more,
        *speed.length(trainer, 1000, 1000), "--logging_steps", 4, "--learning_rate", "1e-4",
        *["--bf16"] * (not TINY or "float8" in options), "--output_dir", out)
    return [SCRIPTS[trainer], *words]


def rate_of(folder):
    """FLOP/s of a large matrix product in a separate process."""
    import torch

    from bench import measure
    rate = measure.matmul_rate(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    (folder / "rate.json").write_text(json.dumps(rate))


def child(*words):
    return [sys.executable, Path(__file__).resolve(), "child", *words]


def fast(folder, seconds, jobs):
    until, work = BEGAN + seconds, folder / "work"
    work.mkdir(parents=True, exist_ok=True)
    many = 2 if TINY else 4
    trainers = dict.fromkeys(job.split()[0] for job in jobs)
    commands = {name: (child("files", folder, name), work / f"{name}.log", {}) for name in trainers}
    commands["rate"] = child("rate", folder), work / "rate.log", {}
    ready = dict(run_all(commands, until, many))
    rate = json.loads((folder / "rate.json").read_text()) if ready.pop("rate") == 0 else math.nan
    flags = {name: json.loads((work / f"{name}.json").read_text())
             for name, status in ready.items() if status == 0}
    print(f"{gpu_name()}: {rate / 1e12:.0f} TFLOP/s in a large product", flush=True)
    outs = {job: work / job.replace(" ", "-") for job in jobs}
    words_of = {job: job_command(folder, job, flags[job.split()[0]], outs[job])
                for job in jobs if job.split()[0] in flags}
    plans = {job: ([sys.executable, *words[:-1], f"{outs[job]}-plan", "--dry_run", 1],
                   f"{outs[job]}.plan.log", {})
             for job, words in words_of.items() if "Trainer" not in job}
    dict(run_all(plans, until, many))
    rows = []
    for job in jobs:
        out, row = outs[job], {"job": job}
        if job not in words_of:
            status, log = "no files", work / f"{job.split()[0]}.log"
        elif until - time.monotonic() < 15:
            status, log = "no time", os.devnull
        elif "Trainer" in job:
            status, log = others(job, words_of[job], out, until), f"{out}.log"
        else:
            log = f"{out}.log"
            status = wait(start(child("watch", out, *words_of[job]), log,
                                OMP_NUM_THREADS="1" if TINY else "8"), until)
        if Path(f"{out}.json").exists():
            row |= json.loads(Path(f"{out}.json").read_text())
        logged = [r for r in metrics(out) if WARM_UP < r["step"] <= WARM_UP + TIMED]
        if logged and "samples_s" not in row and "step_s" in row:
            row |= rates(logged, row["step_s"], rate)
        plan = job in plans and re.search(r"(?:peak estimate|FITS)\s+([\d.]+)",
                                          Path(plans[job][1]).read_text(errors="replace"))
        row["planned_gib"] = float(plan[1]) if plan else None
        if status != 0:
            row["error"] = f"{status}: {tail(log)}"
        rows.append(row)
        note(folder / "fast.jsonl", row)
    for job in jobs:
        if (path := Path(f"{outs[job]}.profile.txt")).exists():
            print(f"\n== {job}\n" + "\n".join(path.read_text().splitlines()[:12]), flush=True)
    table(rows, {"job": "", "step_s": ".4f", "tokens_s": ",.0f", "samples_s": ".1f",
                 "tflops": ".0f", "of_rate": ".1%", "mfu": ".1%", "peak_gib": ".2f",
                 "planned_gib": ".2f", "first_step_s": ".1f", "first loss": ".4f",
                 "grad_norm": ".3f", "error": ""})
    return [row["job"] for row in rows if "error" in row]


def rates(logged, step_s, rate):
    """Metrics that the trainer logged in the timed steps, as rates over the time that they took."""
    tokens, samples, mfu = (
        sum(row.get(f"train/{key}", math.nan) * row.get("train/step_seconds", math.nan)
            for row in logged) / len(logged) for key in ("throughput", "samples_per_second", "mfu"))
    values = {"tokens_s": tokens / step_s, "samples_s": samples / step_s,
              "first loss": loss_of(logged[0]), "grad_norm": logged[0]["train/grad_norm"]}
    if not math.isnan(mfu):
        flops = mfu * PEAK / step_s
        values |= {"tflops": flops / 1e12, "of_rate": flops / rate, "mfu": flops / PEAK}
    return values


def others(job, words, out, until):
    """transformers' Trainer on the samples that our trainer has tokenised -> status."""
    run = [sys.executable, *words[:-1], f"{out}-ours", "--max_steps", 1]
    status = wait(start(run, f"{out}.log"), until)
    trainer, *options = job.split()
    flags = ["--compile"] * ("compiled" in options) + ["--use_lora"] * ("lora" in options)
    command = [sys.executable, ROOT / "bench" / "hf_trainer.py", trainer, *words[1:3], *flags,
               *["--bf16"] * (not TINY), "--tables", f"{out}-ours", "--output_dir", out,
               "--max_steps", WARM_UP + TIMED, "--learning_rate", "1e-4",
               "--per_device_train_batch_size", BATCH]
    status = status or wait(start(command, f"{out}.log"), until)
    rows = metrics(out)[WARM_UP:]
    if status == 0:
        step_s = sum(row["train/step_seconds"] for row in rows) / len(rows)
        Path(f"{out}.json").write_text(json.dumps({
            "step_s": step_s, "samples_s": BATCH / step_s,
            "peak_gib": rows[-1]["train/memory_gib"], "first loss": loss_of(rows[0]),
            "grad_norm": rows[0]["train/grad_norm"]}))
    return status


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("refs", "right", "fast"))
    parser.add_argument("folder", type=Path, help="where all files go")
    parser.add_argument("jobs", nargs="*", metavar="JOB", default=[], help=f"default: {JOBS}")
    parser.add_argument("--seconds", type=float, default=540, help="time limit of the whole run")
    parser.add_argument("--only", default="", help="pattern: run only the cases that match")
    args = parser.parse_intermixed_args()       # --seconds may come before the jobs
    for job in args.jobs or JOBS:
        trainer, *options = job.split()
        if trainer not in SCRIPTS or set(options) - {"Trainer", *OPTIONS}:
            parser.error(f"{job!r}: a model ({', '.join(SCRIPTS)}) and some of "
                         f"{', '.join(OPTIONS)}")
    folder = args.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if args.what == "refs":
        return refs(folder, args.only)
    failed = right(folder, args.seconds, args.only) if args.what == "right" else fast(
        folder, args.seconds, args.jobs or JOBS)
    if failed:
        sys.exit(f"error: failed: {', '.join(failed)}")
    print("all right" if args.what == "right" else "all ran")


def child_main(task, *words):
    """Entry points that this script starts in child processes."""
    if task == "watch":
        from bench import profile_step
        if words[0].endswith("tiles64"):
            from diffusion import dit
            dit.KERNEL |= TILES64
        profile_step.watch(words[1], words[2:], words[0], TIMED, PROFILED)
    elif task == "rate":
        rate_of(Path(words[0]))
    else:
        flags = big_files(Path(words[0]) / "files", words[1])
        (Path(words[0]) / "work" / f"{words[1]}.json").write_text(json.dumps([*map(str, flags)]))


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        child_main(*sys.argv[2:])
    else:
        main()
