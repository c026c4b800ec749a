"""One clip, learnt by heart, is spoken exactly and stops."""
import numpy as np
import pytest
import torch

from core import optim
from data import collate
from speech import v2
from speech.labels import delay_rows
from speech.loss import decays
from tests.helpers import spoken

CLIP = spoken.clip("by heart", 14)


@pytest.fixture(scope="module")
def lesson(tiny, tmp_path_factory):
    """(TokenIds, the one sample) to learn."""
    conversation = [spoken.SYSTEM, *spoken.ask("Good night.", CLIP)]
    ids, samples = spoken.samples_of(tiny.model, spoken.native(tiny.model).config, [conversation],
                                     tmp_path_factory.mktemp("one"))
    return ids, samples[0]


def learn(net, batch, lr, steps, target):
    """Train on one batch until the loss (transformers' scale) is below target; returns it. Raises when it never is."""
    torch.manual_seed(0)
    packed = v2.PackedHiggs(net).train()
    trainable = [p for p in packed.parameters() if p.requires_grad]
    optimizer = optim.build_adamw(packed.named_parameters(), lr, 0.0, (0.9, 0.95), decays)
    for _ in range(steps):
        loss = spoken.total(packed, batch)
        if loss.item() < target:
            break
        loss.backward()
        optim.clip_gradients(trainable, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert loss.item() < target, "never learnt, so generation would say nothing about the labels"
    packed.eval()


def speak(net, sample):
    """(rows, 8) delayed codes that greedy generation gives after the prompt, and whether it stopped by itself."""
    prompt = torch.from_numpy(sample["input_ids"][:np.flatnonzero(sample["is_audio"])[0]])[None]
    assert prompt.shape[1] >= 8     # transformers' delay processor miscounts on shorter prompts
    limit = 3 * len(codes())
    # repetition-aware sampling replaces repeats by random draws: off for an exact comparison
    out = net.generate(input_ids=prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=limit,
                       return_dict_in_generate=True, ras_win_len=None, ras_win_max_num_repeat=None)
    return out.audio_sequences[0].numpy(), out.sequences[0, -1] == net.config.eos_token_id


def codes():
    return spoken.codes_of(CLIP)


def fails(net, sample):
    """What is wrong with what the model says: "codes", "stop", both, or nothing."""
    rows, stopped = speak(net, sample)
    expected = delay_rows(codes(), 1024, 1025)
    wrong = set()
    frames = len(codes())
    said = np.stack([rows[k + 1:k + 1 + frames, k] for k in range(8)], 1) if len(rows) >= frames + 8 else None
    if said is None or not np.array_equal(said, codes()):
        wrong.add("codes")
    if not stopped or not np.array_equal(rows[-8:], expected[-8:]) or len(rows) != len(expected):
        wrong.add("stop")
    assert wrong or np.array_equal(rows, expected)
    return wrong


def test_speaks_the_clip_exactly_and_stops(tiny, lesson):
    ids, sample = lesson
    net = spoken.native(tiny.model)
    assert fails(net, sample) == {"codes", "stop"}      # the check itself sees an untrained model
    learn(net, collate([sample], ids), 3e-3, 150, 0.05)
    assert fails(net, sample) == set()
