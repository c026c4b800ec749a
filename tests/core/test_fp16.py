"""--fp16: the loss scale equals torch's GradScaler; real runs skip steps, resume and agree on two ranks."""
import shutil

import pytest
import torch
import torch.nn.functional as F

from core import optim
from distill.losses import chunked_loss
from tests.helpers.trainer import speech_main, train_forked
from tests.helpers.runs import assert_same_bits

FLAGS = ("--use_lora", "--lora_rank", 4, "--lora_alpha", 8, "--fp16", "--lora_target_modules", "all-linear",
         "--max_bad_steps", 2, "--disable_eval", "--per_device_train_batch_size", 1)
HIGH = 2.0 ** 19        # at this first scale some steps overflow


def test_the_scale_is_that_of_torch(monkeypatch):
    """An overflow halves the scale, GROW steps without one double it; gradients are divided by it."""
    monkeypatch.setattr(optim, "GROW", 5)
    reference, scaler = torch.amp.GradScaler("cpu", growth_interval=5), optim.Scaler(torch.device("cpu"), True)
    parameter = torch.nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    grad, scales = torch.randn(3), set()
    for step in range(40):
        bad = step in (0, 1, 7, 8, 9, 22)
        reference.scale(torch.zeros(()))
        parameter.grad = grad * reference.get_scale() * (float("inf") if bad else 1)
        unscaled = torch.nn.Parameter(torch.zeros(3))
        unscaled.grad = parameter.grad.clone()
        reference.unscale_(optimizer)
        scaler.unscale([unscaled])
        assert torch.equal(unscaled.grad, parameter.grad) and (bad or torch.equal(unscaled.grad, grad))
        reference.step(optimizer)
        reference.update()
        scaler.update(torch.tensor(float(bad)))
        if step % 3 == 0:       # saved and restored
            scaler = optim.Scaler(torch.device("cpu"), True, scaler.saved())
        assert scaler.scale.item() == reference.get_scale()
        scales.add(reference.get_scale())
    assert len(scales) == 5
    for _ in range(40):
        scaler.update(torch.ones(()))
    assert scaler.scale.item() == 1, "never below"


def high(argv):
    optim.FIRST_SCALE = HIGH
    speech_main(argv)


@pytest.mark.slow
def test_overflows_are_skipped_and_resume_is_exact(pool, tiny, tmp_path):
    """Overflows do not count towards --max_bad_steps. A resumed run has the same bits; two ranks agree."""
    def run(name, *flags, **options):
        return train_forked(pool, tiny, tmp_path / name, *FLAGS, "--max_steps", 8, "--save_steps", 4, *flags,
                            main=f"{__name__}.high", **options)
    one_rank = run("one", "--gradient_accumulation_steps", 2, "--lora_dropout", 0.1)
    scales = one_rank.metrics("train/loss_scale")
    skipped = int(one_rank.metrics("train/bad_steps")[8])
    assert 2 < skipped < 8 and scales[8] == HIGH / 2 ** skipped and scales[1] == HIGH / 2
    assert one_rank.output.count("every loss was finite") == skipped
    shutil.copytree(one_rank.output_dir, tmp_path / "again")
    shutil.rmtree(tmp_path / "again" / "checkpoint-8")
    again = run("again", "--gradient_accumulation_steps", 2, "--lora_dropout", 0.1)
    assert "resumed from" in again.output
    assert_same_bits(one_rank, again)
    two_ranks = run("two", "--lora_dropout", 0.1, ranks=2)
    more = int(two_ranks.metrics("train/bad_steps")[8])      # the loss is first multiplied by the number of ranks
    assert skipped <= more <= skipped + 2 and two_ranks.metrics("train/loss_scale")[8] == HIGH / 2 ** more
    assert two_ranks.metrics("train/loss")[8] == pytest.approx(one_rank.metrics("train/loss")[8], rel=0.02)


def test_no_sum_over_rows_overflows_before_the_scale():
    """The head's weight gradient is a sum over 256 rows before the loss scale applies: a smaller scale cannot help."""
    hidden = torch.full((256, 16), 900.0, dtype=torch.float16, requires_grad=True)
    weight = torch.zeros(8, 16, requires_grad=True)
    targets = torch.zeros(256, dtype=torch.int64)
    with torch.autocast("cpu", torch.float16):
        loss, _ = chunked_loss(hidden, (weight, None), targets, 256)
    (loss * 2.0 ** -8).backward()
    wide = weight.detach().double().requires_grad_()
    F.cross_entropy(hidden.detach().double() @ wide.t(), targets, reduction="sum").mul(2.0 ** -8).backward()
    torch.testing.assert_close(weight.grad.double(), wide.grad, rtol=1e-3, atol=0)
    assert (wide.grad * 2 ** 8).abs().max() > 2 * torch.finfo(torch.float16).max
