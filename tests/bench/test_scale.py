"""bench/scale.py counts what grows more slowly than the number of ranks, and its command leaves the numbers."""
import json

from bench import scale


def test_messages_grow_more_slowly_than_ranks(tmp_path):
    scale.main(["--samples", "150000", "--results_dir", str(tmp_path)])
    tables = json.loads((tmp_path / "scale-cpu.json").read_text())["tables"]
    rows = {what: values for what, *values in tables["messages"]["rows"]}
    assert rows["a save: random states that a rank takes in, at most"] == [1, 3, 6, 9]      # log2
    assert rows["the same, one behind the other"] == [1, 3, 6, 9]
    assert rows["a save: ranks that write, and report to rank 0"] == [2, 8, 16, 16]
    assert rows["a save, HSDP: percent of the checkpoint that a rank gathers"] == [100, 100, 12.5, 6.25]
    few, node, nodes, many = rows["watching: requests to the store, per second"]
    assert nodes < 4 * node and many < 8 * nodes        # for 8 times the ranks each
    assert len(tables["balance"]["rows"]) == 4 and all(
        0 < share <= 100 for _, _, *shares in tables["balance"]["rows"] for share in shares)
