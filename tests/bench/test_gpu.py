"""bench/gpu.sh without a GPU: its commands are what the scripts take; what fails is named, and the rest goes on."""
import argparse
import importlib
import os
import re
import shlex
import subprocess
import sys

import pytest

from tests.helpers.trainer import ROOT


class Parsed(Exception):
    pass


def gpu(**env):
    done = subprocess.run(["bash", ROOT / "bench" / "gpu.sh"], text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, env={**os.environ, **env})
    return done.returncode, done.stdout


def test_gpu_commands_are_what_the_scripts_take(monkeypatch):
    status, output = gpu(DRY_RUN="1", PYTHON="python")
    commands = [shlex.split(line) for line in output.splitlines()]
    assert status == 0 and all(command[:3] == ["timeout", "-k", "5"] for command in commands)
    assert sum(int(command[3]) for command in commands) + 5 <= 540
    facts, parity, *scripts = [command[4:] for command in commands]
    assert facts[1] == "bench/gpu_facts.py" and (ROOT / facts[1]).exists()
    files = ["tests/speech/test_v2.py", "tests/common/test_loading.py", "tests/common/test_float8.py"]
    assert parity[:2] == ["env", "TEST_DEVICE=cuda"] and parity[-5:] == [*files, "-k", "gpu"]
    assert all("def test_gpu_" in (ROOT / file).read_text() for file in files)
    assert [command[1] for command in scripts] == [f"bench/{name}.py" for name in (
        "tts", "sft", "block_diffusion", *["profile_step"] * 3)]
    assert [float(command[command.index("--minutes") + 1]) for command in scripts if "--minutes" in command] == [
        1.58, 0.42]         # 120 - 25 and 65 - 40 seconds
    parse = argparse.ArgumentParser.parse_args

    def parse_only(parser, argv=None, namespace=None):
        parse(parser, argv, namespace)
        raise Parsed

    monkeypatch.setattr("argparse.ArgumentParser.parse_args", parse_only)
    for _, script, *flags in (facts, *scripts):
        monkeypatch.setattr("sys.argv", [script, *flags])
        with pytest.raises(Parsed):
            importlib.import_module(script.removesuffix(".py").replace("/", ".")).main()


@pytest.mark.slow
def test_nothing_that_it_starts_needs_a_package_that_gpu_machines_lack():
    names = ["bench.gpu_facts", "tests.speech.test_v2", "tests.common.test_loading", "tests.common.test_float8",
             "bench.tts", "bench.sft", "bench.block_diffusion", "bench.profile_step"]
    lacking = ("soundfile", "soxr", "cffi", "pycparser", "trl")
    code = f"import importlib as i, sys; sys.modules.update(dict.fromkeys({lacking})); [*map(i.import_module, {names})]"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, stderr=subprocess.PIPE)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_part_that_fails_is_named_and_stops_nothing(tmp_path):
    python = tmp_path / "python"
    python.write_text("""#!/bin/bash
case "$1" in
    -c) exit 0 ;;
    *block_diffusion.py) sleep 60 ;;
    *tts.py) echo '{}' >"$RESULTS/tts-gpu.json"; sleep 60 & echo $! >"$RESULTS/left" ;;
    *sft.py)
        case $(ps -o stat= -p "$(cat "$RESULTS/left")") in
            '' | Z*) ;;
            *) echo "an earlier part's child is there" ;;
        esac
        exit 3 ;;
esac
echo "ran $1"
""")
    python.chmod(0o755)
    status, output = gpu(PYTHON=str(python), RESULTS=str(tmp_path / "results"), KILL_S="1", FACTS_S="1", PARITY_S="1",
                         TTS_S="1", SFT_S="2", BLOCK_S="1")
    assert "child is there" not in output
    assert status == 1 and "ran bench/profile_step.py" in output and f"wrote {tmp_path}/results/tts-gpu.json" in output
    limit = re.search(r"== block diffusion, at most (\d) s\n", output)[1]      # with what the others have left
    assert 3 <= int(limit) <= 6
    assert output.endswith(f"error: gpu.sh: failed: chat (status 3), block diffusion (after {limit} s)\n")


@pytest.mark.slow
def test_without_a_gpu_it_is_one_line(tmp_path):
    status, output = gpu(PYTHON=sys.executable, CUDA_VISIBLE_DEVICES="")
    assert status == 1 and output.startswith("error: gpu.sh: ") and "finds no GPU" in output and output.count("\n") == 1
