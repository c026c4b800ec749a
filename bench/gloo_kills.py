"""Does a rank hear of a peer that is killed? From gloo nearly always; else from its own time limit.

    python bench/gloo_kills.py          # twelve minutes; writes bench/results/gloo_kills-cpu.json

Two ranks train a small model with DDP on the CPU, without pause. Then rank 1 gets SIGKILL, while rank 0 runs, or while
it stands still, as on a machine that is swapping: it was stopped a moment before and goes on a moment later. Either
gloo's error ends rank 0, or the watchdog does after --limit seconds and names rank 1.
"""
import argparse
import itertools
import multiprocessing
import os
import random
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import measure
from common import parallel
from common.watchdog import Watchdog

HEARD = {"rank 0 failed": "gloo", "error: no answer from rank 1": "limit"}     # what rank 0 prints: who told it
HANG_S = 600            # a rank 0 that has said nothing by then hangs


def train(rank, port, limit_s, file, ready):
    """Steps without end, as a rank of two does. file: takes what is printed. ready: an event, set after three steps."""
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout, sys.stderr = [os.fdopen(fd, "w", buffering=1, closefd=False) for fd in (1, 2)]  # not the parent's own
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK="0",
                      LOCAL_WORLD_SIZE="1")
    with parallel.one_clear_error():
        world = parallel.init(limit_s, limit_s)
        watch = Watchdog(world, limit_s)
        model = DistributedDataParallel(torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(8)]))
        for step in itertools.count(1):
            watch.moved(f"step {step}")
            model(torch.randn(8, 64)).square().sum().backward()
            parallel.largest(world, step)
            parallel.all_sum(world, torch.zeros(17))
            if step == 3:
                ready.set()


def kill(stopped, limit_s, draw):
    """Who tells rank 0 that rank 1 was killed: "gloo" or "limit". stopped: rank 0 stood still then.

    Raises RuntimeError when rank 0 says something else, or nothing.
    """
    fork = multiprocessing.get_context("fork")      # torch is imported
    with tempfile.NamedTemporaryFile("a") as file, socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
        free.close()
        events = [fork.Event() for _ in range(2)]
        ranks = [fork.Process(target=train, args=(rank, port, limit_s, file.fileno(), events[rank]), daemon=True)
                 for rank in range(2)]
        for process in ranks:
            process.start()
        try:
            if not all(event.wait(HANG_S) for event in events):
                raise RuntimeError("the ranks do not train")
            time.sleep(draw.uniform(0, 0.2))
            if stopped:
                os.kill(ranks[0].pid, signal.SIGSTOP)
                time.sleep(0.3)         # rank 1 comes to where it waits for rank 0
            ranks[1].kill()
            ranks[1].join()
            if stopped:
                os.kill(ranks[0].pid, signal.SIGCONT)
            end, said, alive = time.monotonic() + HANG_S, [], True
            while not said and alive and time.monotonic() < end:
                time.sleep(0.02)
                alive = ranks[0].is_alive()     # asked before the read: its last words are read
                text = Path(file.name).read_text()
                said = [who for words, who in HEARD.items() if words in text]
            if not said:
                raise RuntimeError(f"rank 0 does not say what ended it: {text or 'nothing'}")
            return said[0]
        finally:
            for process in ranks:
                process.kill()
                process.join()


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=40, help="while rank 0 runs, and as many more while it stands "
                        "still (default: %(default)s)")
    parser.add_argument("--limit", type=float, default=10, help="seconds that rank 0 waits for a step at most "
                        "(default: %(default)s)")
    parser.add_argument("--results_dir", default=measure.RESULTS, help="folder of the report")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    report = measure.new_report("Who tells a rank that its peer was killed?", torch.device("cpu"),
                                measure.command("gloo_kills", argv))
    draw, heard = random.Random(0), {False: [], True: []}
    for _ in range(args.kills):
        for stopped, found in heard.items():
            found.append(kill(stopped, args.limit, draw))
    report["tables"]["heard"] = {
        "columns": ["rank 0, when rank 1 is killed", "kills", "told by gloo", "by its own time limit"],
        "rows": [["stands still" if stopped else "runs", len(found), found.count("gloo"), found.count("limit")]
                 for stopped, found in heard.items()]}
    print(measure.write_report("gloo_kills", report, args.results_dir))


if __name__ == "__main__":
    main()
