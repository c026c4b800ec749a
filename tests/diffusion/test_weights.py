"""The average of the weights, and what is no checkpoint."""
import dataclasses
import json
import re

import pytest
import torch
from safetensors.torch import save_file

from core.cli import UserError
from diffusion import elbo, published
from tests.helpers.block_rows import network


def test_average_follows_its_formula_and_swaps():
    model = network()
    average = elbo.Average(model, 0.7)
    weight = model.head.weight
    expected, n = weight.detach().clone(), 0
    for step in range(40):      # from 21 on the decay is the most that it may be
        with torch.no_grad():
            weight += 0.1 * torch.randn_like(weight)
        skip = step == 4        # a step that a bad gradient voided
        average.update(torch.tensor(float(skip)))
        if not skip:
            n += 1
            decay = min(0.7, (1 + n) / (10 + n))
            expected = expected - (1 - decay) * (expected - weight.detach())
    torch.testing.assert_close(average.shadow["head.weight"], expected)
    raw = weight.detach().clone()
    average.swap()
    torch.testing.assert_close(weight.detach(), expected)
    average.swap()
    assert torch.equal(weight.detach(), raw)


def test_a_folder_without_such_a_model_is_named(tmp_path):
    with pytest.raises(UserError, match=re.escape(f"{tmp_path}: no checkpoint of train_bd3lm.py")):
        published.load_checkpoint(tmp_path)
    model = network()
    raw = {name: p.detach() for name, p in model.named_parameters()}
    (tmp_path / "config.json").write_text(json.dumps({"model": dataclasses.asdict(model.config)}))
    save_file(raw, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="ema tensors do not fit this run: .*missing keys"):
        published.load_checkpoint(tmp_path)
    save_file({name: 2 * tensor for name, tensor in raw.items()}, tmp_path / "ema.safetensors")
    loaded, _ = published.load_checkpoint(tmp_path)
    assert torch.equal(loaded.head.weight, 2 * raw["head.weight"]) and not loaded.training
