"""The data pipeline's benchmark: its numbers follow from each other. Indices of millions: no Python object a sample."""
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest
from torch.utils.data import DataLoader

from common import json_files
from common.packing import PackOrder, best_fit
from common.parallel import UserError
from common.watchdog import init_loader
from tests.helpers.trainer import ROOT


def load(name):
    spec = importlib.util.spec_from_file_location(f"bench_{name}", ROOT / "bench" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


bench = load("data_pipeline")


# ---------------------------------------------------------------------------------------------------------------------
# The measurement


@pytest.mark.slow
def test_the_numbers_follow_from_each_other(tmp_path):
    flags = ("--clips", "8", "--rounds", "1", "--steps", "3", "--seconds", "0.1", "--workers", "1", "--samples",
             "300,600")
    done = subprocess.run([sys.executable, ROOT / "bench" / "data_pipeline.py", *flags, "--results_dir", tmp_path],
                          text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert done.returncode == 0, done.stdout[-3000:]
    report = json.loads((tmp_path / "data_pipeline-cpu.json").read_text())
    assert report["command"] == f"python bench/data_pipeline.py {' '.join(flags)}"
    tables = report["tables"]
    assert all(len(row) == len(table["columns"]) for table in tables.values() for row in table["rows"])

    common, cold, warm = tables["audio"]["rows"]
    assert [row[0] for row in (common, cold, warm)] == ["encode in __getitem__", "ours, cold", "ours, warm"]
    for _, first, last, rate, audio, faster in (common, cold, warm):
        assert 0 < first <= last and rate * last == pytest.approx(16)
        assert 16 * 2 * 2 <= audio * last <= 16 * 2 * 20           # two clips a sample, 2 to 20 s each
        assert faster == pytest.approx(common[2] / last)

    speech, chats, blocks = tables["wait"]["rows"]
    for _, _, tokens, seconds, rate, workers, steps, waiting, work, cores in (speech, chats, blocks):
        assert rate * seconds == pytest.approx(tokens) and 0.5 * 8192 < tokens <= 8192
        assert workers == 1 and steps == max(3, round(0.1 / seconds))
        assert 0 <= waiting < 100 and cores == pytest.approx(work / seconds)
    layers, head = 2.8e9, 128256 * 3072         # weights; a token costs 4 FLOPs for each under LoRA, and attention
    assert 4 * layers < speech[3] * 0.55 * 989e12 / speech[2] < 1.1 * 4 * (layers + head)
    layers, head = 3.6e9, 151936 * 2560
    assert 6 * layers < chats[3] * 0.55 * 989e12 / chats[2] < 1.1 * 6 * (layers + head)
    layers, head = 12 * 12 * 768 ** 2, 50258 * 768          # each token twice, clean and noisy
    assert 6 * layers < blocks[3] * 0.40 * 989e12 / blocks[2] < 1.3 * 6 * (2 * layers + head)

    assert [row[:2] for row in tables["index"]["rows"]] == [["speech", 300], ["speech", 600], ["chat", 300],
                                                            ["chat", 600]]
    for row, few, many in zip(tables["index_growth"]["rows"], *(tables["index"]["rows"][i::2] for i in (0, 1))):
        assert row[:3] == [few[0], 300, 600] and row[3] == pytest.approx(1e6 * (many[4] - few[4]) / 300)
        assert row[4] == pytest.approx(2**20 * (many[5] - few[5]) / 300) and row[7] > 0


@pytest.mark.race
def test_a_failing_part_does_not_wait_for_its_loader():
    def broken():
        batches = iter(DataLoader(range(8), num_workers=1, multiprocessing_context="fork",
                                  worker_init_fn=init_loader))
        raise ValueError(next(batches))

    with pytest.raises(SystemExit, match="broken ended with status 1"):
        bench.in_child(broken)


# ---------------------------------------------------------------------------------------------------------------------
# What it found


LISTS = ['[]', ' [ ] \n', '[{"a": [1, 2, "]"]}]', '[1, 23.5e3, "x,y]", null, true, {"b": {}}, [[]]]\n', '\ufeff[1,\n2]',
         '["\\ud83d\\ude00", -Infinity]',
         '[1, 2', '[1, 2,', '[1 2]', '[1, 2]]', '[1,\n 2}\n]', '["a\nb"]', '[tru', '[,1]',
         '[1, "abc', '[1,\n\n  {"a" 1}, 3]', '[1] x', '[{"a": 1,}]', '[', '[123456, nul]']


@pytest.mark.parametrize("text", LISTS)
def test_a_list_read_in_pieces_is_the_list_and_its_errors_stand_where_they_are(text, tmp_path, monkeypatch):
    (tmp_path / "data.json").write_text(text, encoding="utf-8")
    try:
        expected = json.loads(text.removeprefix("\ufeff"))
    except json.JSONDecodeError as error:
        expected = f"line {error.lineno} column {error.colno}:"
    for piece in (1, 2, 3, 5, 1000):
        monkeypatch.setattr(json_files, "PIECE", piece)
        try:
            assert list(json_files.json_entries(tmp_path / "data.json")) == expected
        except UserError as error:
            assert isinstance(expected, str) and expected in str(error)


def test_a_list_is_never_whole_in_memory(tmp_path):
    path = tmp_path / "data.json"
    path.write_text("[" + ",\n".join([json.dumps({"text": "x" * 1000})] * 20_000) + "]")
    tracemalloc.start()
    assert sum(1 for _ in json_files.json_entries(path)) == 20_000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < path.stat().st_size / 2


def shuffled(packs, size, rng):
    """Blocks of so many packs in another order; a short last one stays where it is."""
    full = len(packs) // size
    return [pack for block in [*rng.permutation(full), full] for pack in packs[size * block:size * (block + 1)]]


def plain_packs(lengths, epoch, seed, size=0, budget=0, by_length=False):
    """Packs of an epoch in Python lists, as packing.py describes them."""
    rng, n = np.random.default_rng((seed, epoch, 1)), len(lengths)
    if budget:
        bins = best_fit(lengths, np.random.default_rng((seed, 0)).permutation(n), budget)
        return [bins[p] for p in rng.permutation(len(bins))]
    order = rng.permutation(n).tolist()
    if by_length:
        keys = [-float(length) * wrong for length, wrong in zip(lengths, rng.uniform(1, 1.01, n))]
        parts = [order[a:a + 64 * 512 * size] for a in range(0, n, 64 * 512 * size)]
        order = [i for part in parts for i in sorted(part, key=lambda i: keys[i])]
    packs = [order[a:a + size] for a in range(0, n, size)]
    if by_length:
        large = max((block for block in (512, 256, 128, 64, 32, 16) if len(packs) >= 64 * block), default=8)
        packs = shuffled(packs, large, rng)
        packs = [pack for a in range(0, len(packs), large) for pack in shuffled(packs[a:a + large], 8, rng)]
    return packs


@pytest.mark.parametrize("n", [1, 7, 64, 95, 5000])
@pytest.mark.parametrize("kind", [{"size": 3}, {"size": 1, "by_length": True}, {"size": 4, "by_length": True},
                                  {"budget": 2048}], ids=str)
def test_array_packs_are_the_plain_ones(kind, n):
    """A checkpoint's position means the same packs whatever computes them."""
    lengths = np.random.default_rng(n).integers(20, 2000, n)
    order = PackOrder(lengths, seed=3, samples_per_pack=kind.get("size", 0), tokens_per_pack=kind.get("budget", 0),
                      group_by_length=kind.get("by_length", False))
    for epoch in (0, 2):
        plan = order.epoch(epoch)
        assert [plan.pack(p).tolist() for p in range(len(plan))] == plain_packs(lengths, epoch, 3, **kind)


# ---------------------------------------------------------------------------------------------------------------------
# Everything on one GPU


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
    files = ["tests/speech/test_higgs.py", "tests/common/test_loading.py", "tests/common/test_float8.py"]
    assert parity[:2] == ["env", "TEST_DEVICE=cuda"] and parity[-5:] == [*files, "-k", "gpu"]
    assert all("def test_gpu_" in (ROOT / file).read_text() for file in files)
    assert [command[1] for command in scripts] == [f"bench/{name}.py" for name in (
        "tts", "sft", "block_diffusion", "memory_3b", *["profile_step"] * 3)]
    assert [float(command[command.index("--minutes") + 1]) for command in scripts if "--minutes" in command] == [
        1.58, 0.42]         # 120 - 25 and 65 - 40 seconds
    parse = bench.argparse.ArgumentParser.parse_args

    def parse_only(parser, argv=None, namespace=None):
        parse(parser, argv, namespace)
        raise Parsed

    monkeypatch.setattr("argparse.ArgumentParser.parse_args", parse_only)
    for _, script, *flags in (facts, *scripts):
        if not (ROOT / script).exists():
            continue
        monkeypatch.setattr("sys.argv", [script, *flags])
        with pytest.raises(Parsed):
            load(script[len("bench/"):-len(".py")]).main()


@pytest.mark.slow
def test_nothing_that_it_starts_needs_a_package_that_gpu_machines_lack():
    names = ["bench.gpu_facts", "tests.speech.test_higgs", "tests.common.test_loading", "tests.common.test_float8",
             "bench.tts", "bench.sft", "bench.block_diffusion", "bench.memory_3b", "bench.profile_step"]
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
    assert status == 1 and "ran bench/memory_3b.py" in output and f"wrote {tmp_path}/results/tts-gpu.json" in output
    limit = re.search(r"== block diffusion, at most (\d) s\n", output)[1]      # with what the others have left
    assert 3 <= int(limit) <= 6
    assert output.endswith(f"error: gpu.sh: failed: chat (status 3), block diffusion (after {limit} s)\n")


@pytest.mark.slow
def test_without_a_gpu_it_is_one_line(tmp_path):
    status, output = gpu(PYTHON=sys.executable, CUDA_VISIBLE_DEVICES="")
    assert status == 1 and output.startswith("error: gpu.sh: ") and "finds no GPU" in output and output.count("\n") == 1
