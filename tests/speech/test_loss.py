"""The training loss from sums, which parameters decay, FLOPs of a pack: against the formulas."""
from types import SimpleNamespace

import pytest
import torch

from speech import labels


@pytest.mark.parametrize("weight, wanted", [(1.0, 6 / 12 + 8 / 4), (0.25, 6 / 12 + 0.25 * 8 / 4), (0.0, 6 / 12)])
def test_the_loss_is_a_mean_over_global_counts(weight, wanted):
    audio = torch.tensor([1.0, 2.0, 3.0])
    assert labels.total_loss(audio, 12, torch.tensor(8.0), 4, weight).item() == pytest.approx(wanted)


def test_one_target_counts_once():
    """Of text or of audio: the limit that keeps an empty count from dividing by zero is 1."""
    assert labels.total_loss(torch.tensor([3.0]), 1, torch.tensor(8.0), 1, 1.0).item() == 11


def test_a_batch_without_targets_has_no_loss():
    assert labels.total_loss(torch.zeros(8), 0, torch.tensor(0.0), 0, 1.0).item() == 0


def test_matrices_decay_but_no_norms_and_no_embeddings():
    matrix, vector = torch.zeros(2, 2), torch.zeros(2)
    assert labels.decays("layers.0.q_proj.weight", matrix) and not labels.decays("layers.0.norm.weight", vector)
    assert not labels.decays("embed_tokens.weight", matrix)


def test_flops_of_a_pack():
    """2 per weight and row forward, as many for the input's gradient and, where trained, for its own."""
    config = SimpleNamespace(hidden_size=8, head_dim=4, num_attention_heads=2, num_key_value_heads=1,
                             intermediate_size=16, num_hidden_layers=3, codebook_size=10, vocab_size=20)
    layer = 8 * 8 + 2 * 8 * 4 + 8 * 8 + 3 * 8 * 16
    rows, pairs = 5 * 3 * layer + 7 * 8 * 10 + 2 * 8 * 20, 15
    assert labels.flops_per_pack(config, 5, 7, 2, pairs, True) == 4 * rows + 12 * 8 * pairs * 3
    assert labels.flops_per_pack(config, 5, 7, 2, pairs, False) == 6 * rows + 12 * 8 * pairs * 3
