"""The documents' tables are what the result files say, and nothing else; a block that cannot be filled is one line."""
import importlib.util

import pytest
import torch

from tests.helpers.trainer import ROOT


def load(name):
    spec = importlib.util.spec_from_file_location(f"bench_{name}", ROOT / "bench" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


table = load("table")


@pytest.fixture
def page(tmp_path):
    """(markdown file with one block, its fill): the report is written as the measuring scripts write theirs."""
    measure = load("measure")
    report = measure.new_report("how fast", torch.device("cpu"), "python bench/speed.py --rounds 3")
    report |= {"cpu": "A processor", "cores": 2, "threads": 1, "date": "2026-01-02",
               "versions": {"python": "3.12.0", "torch": "2.13.0"}}
    report["tables"] = {"speed": {"columns": ["way", "tokens/s", "times as fast", "notes"], "rows": [
        ["ours", 12345.6, 2.0, None], ["a | b", 6172.8, 1.0, "half"]]}}
    assert measure.write_report("speed", report, tmp_path).name == "speed-cpu.json"
    path = tmp_path / "page.md"
    path.write_text("Before.\n\n<!-- table speed-cpu.json speed -->\nold\n<!-- end table -->\n\nAfter | all.\n")
    return path


def run(page, *flags):
    table.main(["--file", str(page), "--results", str(page.parent), *flags])


def test_a_block_is_filled_and_the_rest_is_untouched(page):
    with pytest.raises(SystemExit, match=r"speed-cpu\.json speed; run python bench/table\.py"):
        run(page, "--check")
    assert "old" in page.read_text()
    run(page)
    assert page.read_text() == """Before.

<!-- table speed-cpu.json speed -->
| way | tokens/s | times as fast | notes |
| --- | --: | --: | --- |
| ours | 12,300 | 2.00 |  |
| a \\| b | 6,170 | 1.00 | half |

A processor, 2 cores, 1 thread; 2026-01-02; python 3.12.0, torch 2.13.0; `python bench/speed.py --rounds 3`
<!-- end table -->

After | all.
"""
    run(page, "--check")
    written = page.stat().st_mtime_ns
    run(page)
    assert page.stat().st_mtime_ns == written       # nothing to do, nothing done


@pytest.mark.parametrize("change, error", [
    (("speed-cpu.json speed", "absent-cpu.json speed"), r"line 3: absent-cpu\.json cannot be read \(No such file"),
    (("json speed -->", "json speed; rows theirs -->"), r"line 3: no row has the cells theirs")])
def test_a_block_that_cannot_be_filled_is_one_line_and_changes_nothing(page, change, error):
    page.write_text(page.read_text().replace(*change))
    before = page.read_text()
    for flags in (), ("--check",):
        with pytest.raises(SystemExit, match=rf"^error: {page} {error}"):
            run(page, *flags)
    assert page.read_text() == before


def test_readme_and_docs_show_what_the_result_files_say():
    table.main(["--check"])
    speed = (ROOT / "docs" / "speed.md").read_text()
    assert len(table.BEGIN.findall(speed)) > 1, "docs/speed.md lost its tables"
