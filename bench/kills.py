"""Does a killed run lose anything? 100 SIGKILLs, one process each, at seeded instants of seven phases of the trainers.

    python bench/kills.py                       # goes on where it was; then python bench/table.py
    python bench/kills.py --only chat           # a part: chains with this in their name
    python bench/kills.py --only none           # none: only write the report of what is done

A chain is one run of a trainer on a tiny model, started by python, by torchrun or by a launcher as a user would type
it, with processes that read data beside it. Every start but the last is killed: one process gets SIGKILL, at a drawn
instant of a drawn phase, which is seen from outside by what the run prints and writes. When its command returns, at
once if that was the process killed, the same command is started again; nothing is cleaned up in between. A start that
is refused because processes of the one before still run is repeated.

A chain is good when it ends as the same command that nobody kills, in every bit of weights, optimizer, random states
and log (but for times); no command hung, every process has ended by itself (found by a mark in its environment), and no
file is left that the other run has not. Good chains stand in WORK_DIR/chains.jsonl and are not run again; failed ones
are.
"""
import argparse
import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import measure
from common import checkpoint, metrics, resume
from tests.helpers import chats

ROOT = Path(__file__).resolve().parent.parent
TRAINERS = {"speech": "train_v2_ddp.py", "chat": "distill/train_sft.py", "block diffusion": "diffusion/train_bd3lm.py"}
WAYS = ("python", "torchrun", "launcher")           # the last two with two ranks
PHASES = ("import", "reading", "encoding", "training", "saving", "validation", "ending")
VICTIMS = ("rank", "torchrun", "loader", "decoder", "launcher")
CHAINS = 18
STEPS, SAVE_STEPS, EVAL_STEPS = 36, 3, 4
SLOW_DISK_S = 0.04      # that each file of a checkpoint takes: a tiny one would be written between two looks
LOOK_S = 0.01           # between two looks at a start
HANG_S = 600            # a command that shows no sign of getting on for so many seconds hangs, also on a busy machine
GONE_S = 120            # by then after a kill, every process has ended
CLOCK = {"train/throughput", "train/audio_seconds_per_second", "train/samples_per_second", "train/step_seconds",
         "train/data_wait_seconds", "train/memory_gib"}     # what the time decides in metrics.jsonl


# ---------------------------------------------------------------------------------------------------------------------
# What is killed, where and when


@dataclass
class Kill:
    """One drawn kill. nth: of the phase's occurrences in a start; share: of its usual length; which: of the victims."""
    phase: str
    victim: str
    nth: int
    share: float
    which: float


@dataclass
class Chain:
    """A run that is killed as often as there are kills."""
    name: str
    trainer: str
    way: str
    kills: list


def victims(trainer, way, phase):
    """Whom a kill in this phase can hit."""
    found = {"python": ["rank"], "torchrun": ["rank", "torchrun"], "launcher": ["rank", "torchrun", "launcher"]}[way]
    if phase == "encoding":
        return [*found, "decoder"]
    loads = phase in ("training", "validation") or (trainer, phase) == ("chat", "reading")
    return [*found, "loader"] if loads else found


def draw_kill(draw, trainer, way, phase, used):
    """A Kill in this phase, of a victim that has been drawn least so far, with this way twice; used: Counter."""
    victim = min(victims(trainer, way, phase), key=lambda name: (used[name] + 2 * used[way, name], draw.random()))
    used.update([victim, (way, victim)])
    again = phase in ("training", "saving", "validation")
    return Kill(phase, victim, draw.randint(1, 2) if again else 1, draw.uniform(0, 0.95), draw.random())


def plan(seed):
    """All Chains: 100 kills. Encoding comes first in a chain, since what is encoded stays so; ending comes last."""
    draw, used, chains = random.Random(seed), Counter(), []
    others = [phase for phase in PHASES if phase != "encoding"]
    for number in range(CHAINS):
        trainer, way = list(TRAINERS)[number % 3], WAYS[number // 3 % 3]
        first, phases = [], others
        if trainer == "speech":
            nth = number // 3       # of its six chains: 2 kills each while audio is encoded, 16 in other phases
            first, phases = ["encoding"] * 2, [others[(3 * nth + i) % 6] for i in range(3 if nth < 4 else 2)]
        order = first + sorted(draw.sample(phases, len(phases)), key="ending".__eq__)
        chains.append(Chain(f"{trainer.replace(' ', '-')}-{way}-{number}", trainer, way,
                            [draw_kill(draw, trainer, way, phase, used) for phase in order]))
    return chains


# ---------------------------------------------------------------------------------------------------------------------
# Data and commands


def make_data(folder):
    """A tiny model and data for each trainer; the block diffusion trainer makes its own."""
    if (folder / "made").exists():
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    subprocess.run([sys.executable, ROOT / "speech" / "demo" / "make_tiny.py", folder / "speech", "--clips", "48", "--speakers",
                    "3"], check=True, stdout=subprocess.DEVNULL)
    chats.student(folder / "student")
    talks = chats.conversations(12_000)     # so many that other processes help to read them
    chats.write(folder / "chats.jsonl", talks[40:])
    chats.write(folder / "eval.jsonl", talks[:40])
    (folder / "made").touch()
    return folder


def command(trainer, way, data, out):
    """(argv, environment) of a chain's command."""
    flags = ["--output_dir", out, "--logging_dir", out.parent / "logs", "--report_to", "none", "--logging_steps", 1,
             "--max_steps", STEPS, "--save_steps", SAVE_STEPS, "--eval_steps", EVAL_STEPS, "--save_total_limit", 2,
             "--learning_rate", 1e-3, "--num_workers", 1]
    adapters = ["--use_lora", "--lora_dropout", 0.1]        # dropout makes the random states matter
    if trainer == "speech":
        flags += ["--model_path", data / "speech" / "model", "--audio_tokenizer_path", data / "speech" / "codec",
                  "--train_data_file", data / "speech" / "train.json", "--preprocess_num_proc", 2, "--warmup_steps", 2,
                  "--validation_split", 0.2, "--per_device_train_batch_size", 1]
        flags += ["--parallel", "fsdp"] if way == "launcher" else adapters
    elif trainer == "chat":
        flags += ["--model_path", data / "student", "--train_data_file", data / "chats.jsonl", "--eval_data_file",
                  data / "eval.jsonl", "--preprocess_num_proc", 2, "--per_device_train_batch_size", 4,
                  "--gradient_accumulation_steps", 1]
        flags += ["--parallel", "ddp", *adapters] if way == "launcher" else []
    else:
        flags += ["--demo", 100, "--model_size", "nano", "--eval_repeats", 1, "--per_device_train_batch_size", 4,
                  "--warmup_steps", 2, "--parallel", "fsdp" if way == "launcher" else "ddp"]
    script = ROOT / TRAINERS[trainer]
    environment = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "SLOW_DISK_S": str(SLOW_DISK_S),
                   "PYTHONPATH": str(ROOT / "tests" / "helpers" / "slow_disk"),
                   "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    start = {"python": [sys.executable, script],
             "torchrun": ["torchrun", "--standalone", "--nproc_per_node=2", script],
             "launcher": ["bash", ROOT / "launch" / "slurm.sh"]}[way]
    if way == "launcher":       # without it, ranks train on for 30 s: to the end of so short a run
        environment |= {"TRAINER": str(script), "NPROC_PER_NODE": "2", "VENV": "none", "ORPHAN_S": "2"}
    return [str(word) for word in [*start, *flags]], environment


# ---------------------------------------------------------------------------------------------------------------------
# One start, seen from outside


def read(path):
    try:
        return Path(path).read_bytes().decode(errors="replace")
    except OSError:         # a process that has ended; a file that is not there yet
        return ""


def children(pid):
    """Pids of a process's children."""
    return [int(child) for task in Path(f"/proc/{pid}/task").glob("*") for child in read(task / "children").split()]


def arguments(pid):
    """Command line of a process, as a list."""
    return read(f"/proc/{pid}/cmdline").split("\0")


def is_running(pid):
    return read(f"/proc/{pid}/stat").rpartition(")")[2].split()[:1] not in ([], ["Z"], ["X"])


def marked(mark):
    """Pids of all living processes that have this NAME=VALUE in the environment they were started with."""
    return [int(folder.name) for folder in Path("/proc").glob("[0-9]*")
            if mark in read(folder / "environ").split("\0") and is_running(folder.name)]


class Start:
    """A chain's command, started in the background."""

    def __init__(self, chain, data, folder, tmp):
        """folder: the chain's; the run's output goes to its out/, what is printed to start-N.out and start-N.err. tmp:
        where Python and torch put their temporary files; its name must be short.
        """
        self.trainer, self.way, self.folder, self.out = chain.trainer, chain.way, folder, folder / "out"
        self.id = uuid.uuid4().hex
        number = len(list(folder.glob("start-*.out")))
        self.stdout, self.stderr = folder / f"start-{number}.out", folder / f"start-{number}.err"
        self.inodes = {path: path.stat().st_ino for path in self.growing()}
        self.starts = read(self.out / "starts.jsonl").count("\n")
        folder.mkdir(parents=True, exist_ok=True)
        argv, environment = command(self.trainer, self.way, data, self.out)
        environment |= {"TMPDIR": str(tmp), "KILLS_START": self.id}
        self.killed = None      # when
        self.record = {}        # of the kill: when the command returned, how long its last process lived on
        self.watcher = threading.Thread(target=self.watch, daemon=True)
        with open(self.stdout, "wb") as out, open(self.stderr, "wb") as err:
            self.process = subprocess.Popen(argv, stdout=out, stderr=err, cwd=folder, start_new_session=True,
                                            env=os.environ | environment)

    def running(self):
        return self.process.poll() is None

    def processes(self):
        """Pids of all of this start's that live."""
        return marked(f"KILLS_START={self.id}")

    def pids(self, role):
        """Pids of one of VICTIMS, in order of rank."""
        top = self.process.pid
        if role == "launcher":
            return [top] * (self.way == "launcher")
        torchrun = [top] if self.way == "torchrun" else [
            pid for pid in children(top) if "torchrun" in {Path(word).name for word in arguments(pid)[1:2]}]
        if role == "torchrun" or not torchrun and self.way == "launcher":
            return torchrun if self.way != "python" else []
        script = str(ROOT / TRAINERS[self.trainer])
        ranks = [top] if self.way == "python" else [pid for pid in children(torchrun[0]) if script in arguments(pid)]
        if role == "rank":
            return ranks
        return [pid for rank in ranks for pid in children(rank) if script in arguments(pid)]    # forks have its name

    def phase(self):
        """Which of PHASES it is in."""
        out, ranks = read(self.stdout), self.pids("rank")
        begun = "\nstart      step " in out and read(self.out / "starts.jsonl").count("\n") > self.starts
        if not begun:
            caught = re.search(r"^SigCgt:\s*(\w+)", read(f"/proc/{ranks[0]}/status") if ranks else "", re.M)
            if not caught or not int(caught[1], 16) >> signal.SIGUSR1 - 1 & 1:      # of the first that a trainer does
                return "import"
            encoding = read(self.stderr)
            return "encoding" if "encoding audio:" in encoding and "audio: 100%" not in encoding else "reading"
        if (self.out / f"checkpoint-{STEPS}").is_dir():
            return "ending"
        step = max(map(int, re.findall(r"^step +(\d+)/", out, re.M)), default=0)
        if step and (step % EVAL_STEPS == 0 or step == STEPS) and f"\neval   step {step:>6} " not in out:
            return "validation"     # perhaps while the last checkpoint is still being written
        return "saving" if any(map(self.is_new, self.growing())) else "training"

    def growing(self):
        """Folders of checkpoints that are not whole."""
        return [path for path in self.out.glob("checkpoint-*.tmp*") if "deleted" not in path.name]

    def is_new(self, path):
        """Whether this start has made a file or folder, and not one before it."""
        try:
            return path.stat().st_ino != self.inodes.get(path)
        except OSError:
            return False

    def kill(self, pid):
        """SIGKILL to one process. Meanwhile a thread notes when the last process of this start has ended."""
        os.kill(pid, signal.SIGKILL)
        self.killed = time.monotonic()
        self.watcher.start()

    def end(self):
        """Kill what still runs of it; {pid: command line} of that."""
        left = {pid: " ".join(arguments(pid))[:200] for pid in self.processes()}
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return left

    def watch(self):
        while self.processes():
            if time.monotonic() > self.killed + GONE_S:
                return
            time.sleep(0.2)
        self.record["outlived_s"] = time.monotonic() - self.killed

    def said(self):
        """The last lines that it printed."""
        return (read(self.stdout)[-1500:] + read(self.stderr)[-2500:]).strip()


REFUSED = re.compile(r"^error: .*(another run|is used by|is running)", re.M)


def looks(start):
    """The phase of a start, again and again until its command has ended. RuntimeError when it does not get on."""
    before, since = None, time.monotonic()
    while start.running():
        phase, now = start.phase(), time.monotonic()
        if (signs := (phase, start.stdout.stat().st_size, start.stderr.stat().st_size)) != before:
            before, since = signs, now
        if now > since + HANG_S:
            raise RuntimeError(f"hangs in {phase}\n{start.said()}")
        yield phase
        time.sleep(LOOK_S)


def observe(start):
    """Let a start come to its end; {"phase victim": mean seconds in a row that there was this victim in this phase}."""
    spans, since = {}, {}
    for phase in looks(start):
        here, now = {f"{phase} {victim}" for victim in VICTIMS if start.pids(victim)}, time.monotonic()
        for what in here - since.keys():
            since[what] = now
        for what in since.keys() - here:
            spans.setdefault(what, []).append(now - since.pop(what))
    if start.process.returncode:
        raise RuntimeError(f"ended with status {start.process.returncode}\n{start.said()}")
    for what, began in since.items():
        spans.setdefault(what, []).append(time.monotonic() - began)
    return {what: sum(seconds) / len(seconds) for what, seconds in spans.items()}


def strike(start, kill, lengths):
    """Wait for the instant of a Kill and do it; the phase it hit, or None when the start ended before.

    A phase that is over sooner than usual is missed. If it comes again, half of the share is waited for; else the kill
    comes at once, and counts for the phase that is.
    """
    wait, seen, since = kill.share * lengths.get(f"{kill.phase} {kill.victim}", 0.0), 0, None
    once, place = kill.phase in ("import", "reading", "encoding", "ending"), PHASES.index(kill.phase)
    for phase in looks(start):
        pids, now = start.pids(kill.victim), time.monotonic()
        on = phase == kill.phase and bool(pids)
        if on and since is None:
            since, seen = now, seen + 1
        elif since is not None and not on:
            wait, since = wait / (2 if seen >= kill.nth else 1), None
        due = on and seen >= kill.nth and now >= since + wait
        late = phase == "ending" != kill.phase or once and PHASES.index(phase) > place
        if due or late:
            if not pids:
                kill.victim, pids = "rank", start.pids("rank")
            with contextlib.suppress(ProcessLookupError):       # ended by itself at this very moment
                if pids:
                    start.kill(pids[int(kill.which * len(pids))])
                    return phase
    return None


# ---------------------------------------------------------------------------------------------------------------------
# A chain


def reference(chain, data, folder):
    """(folder of the chain's command that nobody killed, lengths of its phases); made when first asked for."""
    folder = folder / f"{chain.trainer.replace(' ', '-')}-{chain.way}"
    lengths = folder / "lengths.json"
    if not lengths.exists():
        shutil.rmtree(folder, ignore_errors=True)
        with tempfile.TemporaryDirectory() as tmp:
            start = Start(chain, data, folder, tmp)
            try:
                lengths.write_text(json.dumps(observe(start), indent=1))
            finally:
                start.end()
    return folder, json.loads(lengths.read_text())


def run_chain(chain, data, folder, references):
    """Kill a run as often as the chain says, let it end; {"ok", "why", "kills", ...}. Leaves `folder`, made anew."""
    whole, lengths = reference(chain, data, references)
    shutil.rmtree(folder, ignore_errors=True)
    began, started, killed, waiting, refused, why = time.monotonic(), [], [], list(chain.kills), 0, []
    tmp = Path(tempfile.mkdtemp())
    try:
        while True:
            start = Start(chain, data, folder, tmp)
            started.append(start)
            if waiting and (hit := strike(start, waiting[0], lengths)):
                start.record |= {**asdict(waiting.pop(0)), "hit": hit}
                killed.append(start.record)
                for _ in looks(start):
                    pass
                start.record["returned_s"] = time.monotonic() - start.killed
                continue
            for _ in looks(start):
                pass
            last = max((s.killed for s in started if s.killed), default=began)
            if REFUSED.search(read(start.stderr)) and time.monotonic() < last + GONE_S:
                refused += 1
            elif start.process.returncode:
                raise RuntimeError(f"status {start.process.returncode} without a kill\n{start.said()}")
            elif not waiting:
                break
            elif waiting[0].share > 0.05:       # the run was over before: it is started again, and ends sooner
                waiting[0].share /= 2
            else:
                raise RuntimeError(f"ended before {waiting[0]} came")
        for start in started:
            if start.killed:
                start.watcher.join()
    except RuntimeError as error:
        why.append(str(error))
    finally:        # also when this script is stopped
        left = [words for start in started for words in start.end().values()]
        left_in_tmp = sorted(names(tmp))
        shutil.rmtree(tmp)
    why += [f"process left: {words}" for words in left]
    files = sorted(left_over(folder, whole))
    if not why:
        why += differences(folder / "out", whole / "out")
        why += [f"file left: {name}" for name in files]
    return {"name": chain.name, "trainer": chain.trainer, "way": chain.way, "commit": commit(), "ok": not why,
            "why": why, "kills": killed, "refused": refused, "processes_left": len(left), "files_left": len(files),
            "left_in_tmp": left_in_tmp, "seconds": time.monotonic() - began}


def commit():
    """The commit that runs here, as far as git knows one."""
    done = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip()


def names(folder):
    """Paths of all in a folder, with # for numbers and ids."""
    return {re.sub(r"[0-9a-f]{8,}|\d+", "#", str(path.relative_to(folder))) for path in folder.rglob("*")}


def left_over(folder, whole):
    """Names of files in out/ and logs/ of a chain that the run nobody killed does not have."""
    return {f"{part}/{name}" for part in ("out", "logs") for name in names(folder / part) - names(whole / part)}


def differences(ours, theirs):
    """In what two output folders of finished runs differ, in words: last checkpoint, log."""
    found, folders = [], [checkpoint.checkpoints(folder)[-1][1] for folder in (ours, theirs)]
    for path in ours.glob("checkpoint-*"):
        if wrong := resume.damage(path):
            found.append(f"{path} is damaged: {wrong}")
    if folders[0].name != folders[1].name or names(folders[0]) != names(folders[1]):
        return [*found, f"{folders[0]} and {folders[1]} hold different files"]
    for path in sorted(folders[1].rglob("*.safetensors")):
        name = str(path.relative_to(folders[1]))
        a, b = load_file(folders[0] / name), load_file(path)
        odd = sorted({*(a.keys() ^ b.keys()), *(key for key in a.keys() & b.keys() if not same(a[key], b[key]))})
        found += [f"{name}: {len(odd)} of {len(b)} tensors differ, first {odd[0]}"] if odd else []
    states = [torch.load(folder / checkpoint.STATE_DIR / "rng.pt", weights_only=True) for folder in folders]
    found += ["random states differ"] if states[0] != states[1] else []
    a, b = map(checkpoint.load_meta, folders)
    found += [f"state.json: {key} is {a.get(key)}, not {b[key]}" for key in b if key != "args" and a.get(key) != b[key]]
    logs = [[{key: value for key, value in row.items() if key not in CLOCK}
             for row in metrics.read_metrics(folder / "metrics.jsonl")] for folder in (ours, theirs)]
    odd = [row for row, other in zip(*logs) if row != other]
    if odd or len(logs[0]) != len(logs[1]):
        found.append(f"metrics.jsonl: {len(logs[0])} rows for {len(logs[1])}, {len(odd)} differ, first {odd[:1]}")
    return found


def same(a, b):
    """Whether two tensors have the same bits."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


# ---------------------------------------------------------------------------------------------------------------------
# Report


def table_of_kills(kills):
    """Kills by the phase they hit and by victim."""
    count = Counter((kill["hit"], kill["victim"]) for kill in kills)
    rows = [[phase, *(count[phase, victim] for victim in VICTIMS), sum(count[phase, v] for v in VICTIMS)]
            for phase in PHASES]
    return {"columns": ["phase", *VICTIMS, "all"], "rows": [*rows, ["all", *map(sum, zip(*(row[1:] for row in rows)))]]}


def table_of_ends(chains):
    """What became of the chains of each trainer."""
    columns = ["trainer", "kills", "chains", "same bits at the end", "commands that hung", "processes left",
               "files left", "starts refused", "last process gone, seconds at most"]
    rows = []
    for trainer in TRAINERS:
        mine = [chain for chain in chains if chain["trainer"] == trainer]
        outlived = [kill["outlived_s"] for chain in mine for kill in chain["kills"] if "outlived_s" in kill]
        rows.append([trainer, sum(len(chain["kills"]) for chain in mine), len(mine), sum(c["ok"] for c in mine),
                     sum(any("hang" in why for why in chain["why"]) for chain in mine),
                     *(sum(chain[key] for chain in mine) for key in ("processes_left", "files_left", "refused")),
                     max(outlived, default=None)])
    return {"columns": columns, "rows": rows}


def write_report(chains, seed, results_dir):
    report = measure.new_report("What does a killed run lose?", torch.device("cpu"), "python bench/kills.py")
    kills = [kill for chain in chains for kill in chain["kills"]]
    report |= {"seed": seed, "seconds": sum(chain["seconds"] for chain in chains), "chains": chains,
               "tables": {"kills": table_of_kills(kills), "ends": table_of_ends(chains)}}
    return measure.write_report("kills", report, results_dir)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0],
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--only", default="", help="chains whose name contains this; none: only the report")
    parser.add_argument("--seed", type=int, default=0, help="of all that is drawn")
    parser.add_argument("--work_dir", type=Path, default=Path(tempfile.gettempdir()) / "kills",
                        help="where the runs and chains.jsonl are")
    parser.add_argument("--results_dir", type=Path, default=measure.RESULTS, help="where the JSON goes")
    args = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))     # the runs it has started end with it
    data = make_data(args.work_dir / "data")
    record, chains = args.work_dir / "chains.jsonl", plan(args.seed)

    def done():     # the last word on each chain, in their order
        rows = {row["name"]: row for row in map(json.loads, read(record).splitlines()) if row["seed"] == args.seed}
        return [rows[chain.name] for chain in chains if chain.name in rows]
    for chain in chains:
        if args.only not in chain.name or any(row["ok"] for row in done() if row["name"] == chain.name):
            continue
        result = run_chain(chain, data, args.work_dir / chain.name, args.work_dir / "references")
        with open(record, "a") as f:
            f.write(json.dumps({**result, "seed": args.seed}) + "\n")
        hits = ", ".join(f"{kill['victim']} while {kill['hit']}" for kill in result["kills"])
        print(f"{chain.name:<28} {'same bits' if result['ok'] else 'FAILED'} after {len(result['kills'])} kills in "
              f"{result['seconds']:.0f} s: {hits}", *result["why"], sep="\n    ", flush=True)
        if result["ok"]:
            shutil.rmtree(args.work_dir / chain.name)
    found = done()
    good, kills = sum(row["ok"] for row in found), sum(len(row["kills"]) for row in found)
    print(f"{good} of {CHAINS} chains have the same bits; {kills} kills; wrote "
          f"{write_report(found, args.seed, args.results_dir)}")
    if good < len(found):
        sys.exit(1)


if __name__ == "__main__":
    main()
