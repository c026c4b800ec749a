"""bench/gpu.sh without a GPU: its commands are what the scripts take; what fails is named, and the rest goes on."""
import argparse
import importlib
import json
import os
import re
import shlex
import subprocess
import sys
import tarfile

import pytest

from tests.helpers.trainer import ROOT

PARTS = {"1": ["gpu_facts", "pytest"], "2": ["profile_step"] * 2, "3": ["profile_step", "profile_step", "speed"],
         "4": ["profile_step", "speed", "speed"], "5": ["profile_step"] * 2}


class Parsed(Exception):
    pass


def gpu(part, **env):
    done = subprocess.run(["bash", ROOT / "bench" / "gpu.sh", part], text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, env={**os.environ, **env})
    return done.returncode, done.stdout


@pytest.mark.parametrize("part", PARTS)
def test_gpu_commands_are_what_the_scripts_take(part, monkeypatch):
    status, output = gpu(part, DRY_RUN="1", PYTHON="python")
    commands = [shlex.split(line) for line in output.splitlines()]
    assert status == 0 and all(command[:3] == ["timeout", "-k", "5"] for command in commands)
    assert sum(int(command[3]) for command in commands) + 5 <= 560     # of the 600 s of a call
    parse = argparse.ArgumentParser.parse_args

    def parse_only(parser, argv=None, namespace=None):
        args = parse(parser, argv, namespace)
        assert not getattr(args, "ways", None) or set(args.ways) <= set(WAYS[args.name])
        raise Parsed

    monkeypatch.setattr("argparse.ArgumentParser.parse_args", parse_only)
    for name, command in zip(PARTS[part], (command[4:] for command in commands), strict=True):
        if name == "pytest":
            files = [word for word in command if word.endswith(".py")]
            assert command[:2] == ["env", "TEST_DEVICE=cuda"] and command[-2:] == ["-k", "gpu"]
            assert len(files) == 3 and all("def test_gpu_" in (ROOT / file).read_text() for file in files)
            continue
        assert command[1] == f"bench/{name}.py"
        monkeypatch.setattr("sys.argv", command[1:])
        with pytest.raises(Parsed):
            importlib.import_module(f"bench.{name}").main()


WAYS = {"speech": ("ours, compiled", "Trainer"), "chats": ("ours, packed", "Trainer", "Trainer, no padding"),
        "blocks": ("ours, compiled", "ours, one problem a row", "minimal")}


@pytest.mark.slow
def test_nothing_that_it_starts_needs_a_package_that_gpu_machines_lack():
    names = ["bench.gpu_facts", "tests.speech.test_v2", "tests.common.test_loading", "tests.common.test_float8",
             "bench.shapes", "bench.speed", "bench.hf_trainer", "bench.profile_step"]
    lacking = ("soundfile", "soxr", "cffi", "pycparser", "trl")
    code = f"import importlib as i, sys; sys.modules.update(dict.fromkeys({lacking})); [*map(i.import_module, {names})]"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, stderr=subprocess.PIPE)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_facts_are_found_in_small_on_a_cpu(tmp_path):
    """Those of a GPU alone (flash attention) say that they are not there; none is lost."""
    done = subprocess.run([sys.executable, "bench/gpu_facts.py", "--shape", "tiny", "--only", "a", "--results_dir",
                           tmp_path], cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert done.returncode == 0, done.stdout
    found = json.loads((tmp_path / "gpu_facts-cpu.json").read_text())["tables"]["facts"]["rows"]
    assert {fact for fact, *_ in found} == {"matmul", "float8", "packed_attention"}
    assert {what for fact, what, _ in found if fact == "packed_attention"} >= {"repeated", "as they are, enable_gqa"}


@pytest.mark.slow
def test_a_command_that_fails_is_named_and_stops_nothing(tmp_path):
    python = tmp_path / "python"
    python.write_text("""#!/bin/bash
case "$1 $2" in
    -c*) exit 0 ;;
    *profile_step.py*) echo '{}' >"$RESULTS/profile.txt"; sleep 60 & echo $! >"$RESULTS/left" ;;
    *"speed.py chats")
        case $(ps -o stat= -p "$(cat "$RESULTS/left")") in
            '' | Z*) ;;
            *) echo "an earlier command's child is there" ;;
        esac
        exit 3 ;;
    *"speed.py speech") sleep 60 ;;
esac
echo "ran $1"
""")
    python.chmod(0o755)
    status, output = gpu("4", PYTHON=str(python), RESULTS=str(tmp_path / "results"), KILL_S="1", SCALE="1")
    assert "child is there" not in output and status == 1 and "ran bench/profile_step.py" in output
    limit = re.search(r"== bench/speed.py speech .*, at most (\d) s\n", output)[1]      # with what the others have left
    assert 3 <= int(limit) <= 5
    assert re.search(rf"error: gpu.sh: failed: bench/speed.py chats .* \(status 3\), .* \(after {limit} s\)\n$", output)
    with tarfile.open(tmp_path / "results" / "gpu-4.tar") as archive:
        assert "./profile.txt" in archive.getnames()


@pytest.mark.slow
def test_without_a_gpu_it_is_one_line(tmp_path):
    status, output = gpu("2", PYTHON=sys.executable, CUDA_VISIBLE_DEVICES="")
    assert status == 1 and output.startswith("error: gpu.sh: ") and "finds no GPU" in output and output.count("\n") == 1
    assert gpu("6")[1] == "error: gpu.sh: which part: 1, 2, 3, 4 or 5\n"
