"""Is a run that is killed at random instants the same, bit for bit, as one that is not?

    python -m tests.helpers.random_kills 40      # writes bench/results/kills.json

The oracle's LoRA run with dropout, a checkpoint a step, is killed (SIGKILL) again and again, at any moment of imports,
data, training and saving, and started by the same command.
"""
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

from bench import oracle

FLAGS = ("--use_lora --lora_dropout 0.1 --per_device_train_batch_size 2 --max_steps 60 --eval_steps 20 "
         "--save_steps 1 --save_total_limit 2 --validation_split 0.2")

if __name__ == "__main__":
    kills, seed = int(sys.argv[1]), int(os.environ.get("SEED", time.time_ns() % 10**6))
    draw, killed_at, unfinished = random.Random(seed), [], 0
    with tempfile.TemporaryDirectory() as root:
        tiny, whole, out = (Path(root) / name for name in ("v2", "whole", "out"))
        oracle.make_tiny(tiny)
        start = time.monotonic()
        oracle.train(tiny, whole, 1, FLAGS)
        longest = time.monotonic() - start
        while len(killed_at) < kills:
            with open(f"{out}.log", "a") as log:
                job = subprocess.Popen(oracle.command(tiny, out, 1, FLAGS), stdout=log, stderr=log, env=oracle.ENV)
            try:        # a run that gets to its end starts over
                job.wait(draw.uniform(0, longest))
                assert job.returncode == 0, Path(f"{out}.log").read_text()[-3000:]
                out.rename(out.with_name(f"done-{time.monotonic_ns()}"))
            except subprocess.TimeoutExpired:
                job.kill()
                job.wait()
                found = [path.name.removeprefix("checkpoint-") for path in out.glob("checkpoint-*")]
                killed_at.append(max((int(step) for step in found if step.isdigit()), default=0))
                unfinished += any(".tmp-" in name for name in found)
        oracle.train(tiny, out, 1, FLAGS)
        ends = [out, *Path(root).glob("done-*")]
        equal = [oracle.fingerprint(end)[0] == oracle.fingerprint(whole)[0] for end in ends]
    found = {"date": str(date.today()), "seed": seed, "kills": kills, "runs": len(equal), "equal": all(equal),
             "saves_cut": unfinished, "newest_step_when_killed": killed_at}
    print(json.dumps(found))
    if all(equal) and kills >= 40:
        (oracle.RESULT.parent / "kills.json").write_text(json.dumps(found) + "\n")
    sys.exit(not all(equal))
