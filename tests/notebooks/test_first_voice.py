"""Every code cell of notebooks/first_voice.ipynb runs on the CPU with the tiny model of launch/voice."""
import json
import re
import sys
import types

import pytest

from tests.helpers.trainer import ROOT

BOOK = ROOT / "notebooks" / "first_voice.ipynb"
CELLS = json.loads(BOOK.read_text())["cells"]


@pytest.mark.slow
def test_its_cells_run(tmp_path, monkeypatch, capsys, quick_python):
    """Ten clips, a plan, a training in float16, and speech. Only the settings differ from those of a T4."""
    voice, heard = ROOT / "launch" / "voice", []
    screen = types.ModuleType("IPython.display")        # the notebook needs IPython, the test does not
    screen.Audio, screen.display = lambda filename: filename, heard.append
    monkeypatch.setitem(sys.modules, "IPython", types.ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", screen)
    for name, value in {"MODEL": voice / "model", "CODEC": voice / "codec", "WORK": tmp_path / "work", "VENV": "none",
                        "LENGTH": "--max_steps 2"}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(sys, "executable", quick_python)
    monkeypatch.chdir(BOOK.parent)
    variables, outputs = {}, {}
    for cell in CELLS:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), cell["id"], "exec"), variables)
            outputs[cell["id"]] = capsys.readouterr().out
    plan = outputs["plan"]
    assert "GPU: " in outputs["set-up"] and "ddp, fp16\n" in plan and plan.endswith("dry run ok\n")
    assert re.search(r"^source .* 10 kept \+ 0 refused$", plan, re.M), plan
    lines = map(json.loads, (tmp_path / "work/out/metrics.jsonl").read_text().splitlines())
    assert any("train/loss_scale" in line for line in lines) and "done       step 2" in outputs["train"]
    assert len(heard) == 2 and all(len(open(path, "rb").read()) > 1000 for path in heard)
    with pytest.raises(SystemExit, match="train_v2_ddp.py ended with status"):
        variables["run"](variables["PYTHON"], "train_v2_ddp.py", "--no_such_flag")
