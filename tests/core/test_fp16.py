"""--fp16: real runs skip steps that overflow, resume and agree on two ranks."""
import functools
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


def test_a_scale_of_older_checkpoints_is_read():
    scaler = optim.loss_scaler(torch.device("cpu"), True, [1024.0, 7.0])
    assert scaler.get_scale() == 1024 and scaler.state_dict()["_growth_tracker"] == 7
    again = optim.loss_scaler(torch.device("cpu"), True, scaler.state_dict())
    assert again.state_dict() == scaler.state_dict()


def high(argv):
    torch.amp.GradScaler = functools.partial(torch.amp.GradScaler, init_scale=HIGH)
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
