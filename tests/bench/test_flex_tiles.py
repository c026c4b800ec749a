"""bench/flex_tiles.py counts the tiles that training visits, and rows of the head that it adds."""
import json

import numpy as np

from bench import block_diffusion, flex_tiles
from diffusion import blocks, dit


def test_tiles_are_those_of_training():
    rows = blocks.make_rows(block_diffusion.make_documents(16, 512, 1), range(16), 512, True, 1)
    for row in rows:
        _, _, pairs = flex_tiles.pairs_of(row, rows)
        states = blocks.collate([row], 1, 512, rows.noisy_length, rows.documents.pad).tiles
        assert flex_tiles.area(pairs, (128, 128)) == 128 ** 2 * int((states > 0).sum())
        assert flex_tiles.area(pairs, (1, 1)) == pairs.sum()


def test_the_command_leaves_its_numbers(tmp_path, monkeypatch):
    monkeypatch.setattr(flex_tiles, "ROWS", 2)
    monkeypatch.setattr(flex_tiles, "BATCH", 2)
    flex_tiles.main(["--problems", "24", "--steps", "6", "--results_dir", str(tmp_path)])
    tables = json.loads((tmp_path / "flex_tiles-cpu.json").read_text())["tables"]
    shares = np.array([row[1:] for row in tables["tiles"]["rows"]])
    assert (shares[:, 3] > shares[:, 0]).all() and (shares[4] >= shares[0]).all() and (shares <= 100).all()
    (one, sizes, none), *_, (_, fewest, most) = tables["masked"]["rows"]
    assert (one, none) == (1, 0) and sizes > fewest and most > 0 and dit.ROW_STEP in flex_tiles.MULTIPLES
