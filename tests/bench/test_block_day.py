"""The first day of block diffusion on a GPU: its commands are ones that launcher and trainer take."""
import json
import os
import shlex
import subprocess

from bench import block_day
from diffusion import train_bd3lm
from tests.helpers.trainer import ROOT


def test_every_command_starts_a_run_and_has_a_bound(tmp_path, capsys):
    block_day.main(["--results_dir", str(tmp_path), "--output_dir", str(tmp_path / "day")])
    commands = [line.strip() for line in capsys.readouterr().out.splitlines() if line.startswith("    ")]
    rows = json.loads((tmp_path / "block_day-cpu.json").read_text())["tables"]["runs"]["rows"]
    assert len(rows) == len(commands) == len(block_day.RUNS)
    for (name, problems, steps, seconds, hours), command in zip(rows, commands):
        done = subprocess.run(command, shell=True, cwd=ROOT, text=True, capture_output=True,
                              env=os.environ | {"DRY_RUN": "1", "MIN_GPUS": "0"})
        assert done.returncode == 0, done.stderr
        words = shlex.split(done.stdout.splitlines()[0])
        at = next(i for i, word in enumerate(words) if word.endswith("train_bd3lm.py"))
        args = train_bd3lm.build_parser().parse_args(words[at + 1:])
        train_bd3lm.check_flags(args, 1)
        assert args.problems_per_batch * args.gradient_accumulation_steps == problems and args.max_steps == steps
        assert args.use_lora == ("LoRA" in name) and 0 < seconds < 1 and hours == steps * seconds / 3600
