"""bench/gates.py with launchers of the test's own: each run once that passes, the worst figure of all named."""
import json

import pytest

from bench import gates

LAUNCHER = """#!/bin/bash
echo "$SEED $OUT ${ATEN_CPU_CAPABILITY:-as is}" >>ran
[ "$SEED" != 9 ] || exit 3
wer=0.0$SEED
if [ "$ATEN_CPU_CAPABILITY" = avx2 ]; then wer=0.1$SEED; fi
mkdir -p "$OUT/run-a/after" && cd "$OUT/run-a/after"
echo '{"metrics": {"wer": '$wer', "shuffled_wer": 0.9, "likeness": 1.0, "stop_rate": 1.0}}' >evaluation.json
[ "$wer" != 0.16 ]
"""


def test_each_passed_run_once_and_the_worst_of_all(tmp_path, monkeypatch):
    monkeypatch.setattr(gates, "ROOT", tmp_path)
    monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)
    (tmp_path / "launch").mkdir()
    (tmp_path / "launch" / "demo.sh").write_text(LAUNCHER)
    words = [str(tmp_path / "work"), "--demos", "speech", "--results_dir", str(tmp_path), "--seeds"]

    def table(status):
        with pytest.raises(SystemExit) as end:
            gates.main([*words, "2", "4"] if status == 0 else [*words, "2", "4", "6"])
        assert end.value.code == (status or 0)
        return json.loads((tmp_path / "gates-cpu.json").read_text())["tables"]["gates"]["rows"]

    rows = table(0)
    assert rows[0] == ["speech", "word errors", "<= 0.15", 0.14, pytest.approx(0.01), pytest.approx(0.12), 4]
    assert rows[1] == ["speech", "word errors against other texts", ">= 0.7", 0.9, pytest.approx(0.2), 0.0, 4]
    rows = table("error: did not pass: speech, AVX2, seed 6")
    assert rows[0][3:] == [0.16, pytest.approx(-0.01), pytest.approx(0.14), 6] and len(rows) == 4
    ran = [line.split(maxsplit=2) for line in (tmp_path / "ran").read_text().splitlines()]
    assert [(seed, cpu) for seed, _, cpu in ran] == [(seed, cpu) for seed in "246" for cpu in ("as is", "avx2")]
    (tmp_path / "launch" / "demo.sh").write_text(LAUNCHER.replace("1$SEED", "0$SEED"))      # mended
    path = tmp_path / "gates-cpu.json"
    path.write_text(path.read_text().replace('"cpu": "', '"cpu": "another '))     # and on another machine
    assert table(None)[0][3:] == [0.14, pytest.approx(0.01), pytest.approx(0.12), 6]
    assert len((tmp_path / "ran").read_text().splitlines()) == 7        # what had failed
    cpus = [run["cpu"].startswith("another ") for run in json.loads(path.read_text())["runs"]]
    assert sorted(cpus) == [False] + [True] * 5
    with pytest.raises(SystemExit, match="error: speech, as is, seed 9: status 3, ValueError"):
        gates.main([*words, "9"])


def test_figures_are_as_many_as_gates(tmp_path):
    for name, metrics in (("training", {"closed: kl": 0.9, "closed: follows": 0.8, "control closed: kl": 0.1,
                                        "control closed: follows": 0.3}),
                          ("", {"student: agreement": 0.9, "base: agreement": 0.1, "base + prompt: agreement": 0.2})):
        (tmp_path / name / "evaluation").mkdir(parents=True)
        (tmp_path / name / "evaluation" / "evaluation.json").write_text(json.dumps({"metrics": metrics}))
    assert gates.figures("prompt", tmp_path) == [0.9, 0.8, 0.1]
    assert gates.figures("labels", tmp_path) == [0.9, pytest.approx(0.7)]
    rows = [{"train/loss": loss} for loss in (4.0, 3.0, 2.5, 2.0, 1.0)] + [{"eval/nll": 1.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "answers-checkpoint-5.json").write_text(json.dumps({"summary": {"strict": 0.91}}))
    assert gates.figures("blocks", tmp_path) == gates.figures("plans", tmp_path) == [0.75, 0.91]
    assert [len(figures) for _, _, figures in gates.DEMOS.values()] == [4, 2, 2, 3, 2]
