"""The packed model against transformers: losses, gradients, stops, empty packs, frozen weights."""
import pytest
import torch
from transformers import HiggsAudioV2Config, HiggsAudioV2ForConditionalGeneration

from core.json_files import read_object
from data import collate
from speech import v2
from speech.weights import add_lora
from tests.helpers import spoken

CONVERSATIONS = {"single": spoken.SINGLE, "short": spoken.SHORT, "long": spoken.LONG, "cloning": spoken.CLONING,
                 "multi-turn": spoken.MULTI_TURN, "text only": spoken.TEXT_ONLY}
PACKS = {name: [name] for name in CONVERSATIONS} | {"mixed": list(CONVERSATIONS)}


@pytest.fixture(scope="module")
def data(tiny, tmp_path_factory):
    """(TokenIds, {name: sample}) of CONVERSATIONS."""
    ids, samples = spoken.samples_of(tiny.model, list(CONVERSATIONS.values()), tmp_path_factory.mktemp("table"))
    return ids, dict(zip(CONVERSATIONS, samples))


@pytest.fixture
def packed(tiny):
    return v2.PackedHiggs(spoken.native(tiny.model))


@pytest.mark.parametrize("pack", PACKS)
def test_loss_and_every_gradient_equal_transformers(tiny, data, packed, pack):
    ids, samples = data
    picked = [samples[name] for name in PACKS[pack]]
    native = spoken.native(tiny.model)
    expected = native(**spoken.native_batch(picked, ids)).loss
    expected.backward()
    loss = spoken.total(packed, collate(picked, ids))
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    gradients, expected = spoken.gradients(packed.net), spoken.gradients(native)
    assert gradients.keys() == expected.keys()
    for name, grad in gradients.items():
        torch.testing.assert_close(grad, expected[name], rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
    reached = [name for name, grad in expected.items() if grad.abs().max() > 1e-3]
    assert len(reached) > (15 if pack == "text only" else 30)       # else equality proves little


def test_each_codebook_and_the_text_have_the_right_sum(tiny, data, packed):
    """The total could hide swapped codebooks, or a loss that moved from text to audio."""
    ids, samples = data
    batch = collate([samples["cloning"], samples["multi-turn"]], ids)
    native = spoken.native(tiny.model)
    with torch.no_grad():
        audio, text, eos = packed(batch)
        inputs = spoken.native_batch([samples["cloning"], samples["multi-turn"]], ids)
        labels, audio_labels = inputs.pop("labels"), inputs.pop("audio_labels")
        for k in range(8):
            only = torch.full_like(audio_labels, -100)
            only[..., k] = audio_labels[..., k]
            # transformers divides by num_items_in_batch; the 7 codebooks without labels give 0
            loss = native(**inputs, audio_labels=only, num_items_in_batch=1).loss
            torch.testing.assert_close(audio[k], loss, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(text, native(**inputs, labels=labels, num_items_in_batch=1).loss, rtol=1e-5, atol=0)
        is_eos = torch.where(audio_labels == ids.stream_eos, audio_labels, -100)
        torch.testing.assert_close(eos[0], native(**inputs, audio_labels=is_eos, num_items_in_batch=1).loss,
                                   rtol=1e-5, atol=1e-5)
    assert eos[2] == 8 * 3      # one for each codebook of the three trained clips


@pytest.mark.parametrize("speaks", [(0,), (1, 7), ()])
def test_stops_count_codebook_0_alone(data, packed, speaks):
    """Codebook 0's end-of-stream decides when speech stops; the others only follow it."""
    ids, samples = data
    batch = collate([samples["cloning"], samples["long"]], ids, pad_to=700)
    first = batch.audio_targets.view(-1, 8)[:, 0]
    clips, codes = (first == ids.stream_eos).sum(), ((first != ids.stream_eos) & (first >= 0)).sum()
    with torch.no_grad():
        heads = packed.net.audio_lm_head.weight.view(8, 1026, -1)
        heads[:] = 0.0
        heads[list(speaks), ids.stream_eos] = 1.0       # predict end-of-stream if the sum of the state is positive
        state = packed.hidden_states(batch).index_select(0, batch.audio_rows).sum(-1)
        audio, text, (*_, stops, false_stops) = sums = packed(batch)
        targets = [(batch.audio_targets >= 0).sum(), (batch.text_targets >= 0).sum()]
    says = (state > 0) & (0 in speaks)
    assert stops == (says & (first == ids.stream_eos)).sum() and false_stops == (says & (first < 1024)
                                                                                 & (first >= 0)).sum()
    assert (0 < false_stops < codes) == (0 in speaks) and len(audio) + 1 + len(sums[2]) == 14
    values = v2.loss_report([*audio.tolist(), text.item(), *sums[2].tolist(), *map(int, targets)], 1.0, "x")
    assert values["x/stop_recall"] == pytest.approx((stops / clips).item())
    assert values["x/false_stop_rate"] == pytest.approx((false_stops / codes).item())


@pytest.mark.parametrize("pad_to", [0, 64])
@pytest.mark.parametrize("method", ["full", "lora"])
def test_empty_pack_weighs_nothing_and_touches_every_trainable_weight(tiny, data, method, pad_to):
    """Without a gradient of each weight DDP would wait; 0/0 would make the sum over ranks NaN."""
    net = spoken.native(tiny.model)
    if method == "lora":
        net = add_lora(net, 4, 8, 0.0, "all-linear", "base")
    packed = v2.PackedHiggs(net)
    audio, text, eos = packed(collate([], data[0], pad_to))
    assert audio.tolist() == [0.0] * 8 and text.item() == 0.0 and eos.tolist() == [0.0] * 5
    (audio.sum() + text).backward()
    trainable = {n: p for n, p in packed.named_parameters() if p.requires_grad}
    assert len(trainable) == (2 * 2 * 10 if method == "lora" else 33)
    for name, parameter in trainable.items():
        assert parameter.grad is not None and not parameter.grad.any(), name


def unreached(net, batch, text_weight):
    """Names of trainable parameters that the loss gives no gradient, by autograd."""
    audio, text, _ = v2.PackedHiggs(net)(batch)
    trainable = {n: p for n, p in net.named_parameters() if p.requires_grad}
    loss = audio.sum() + text_weight * text if text_weight else audio.sum()
    grads = torch.autograd.grad(loss, list(trainable.values()), allow_unused=True)
    return {n for n, g in zip(trainable, grads) if g is None or not g.any()}


@pytest.mark.parametrize("layers", [2, 12])      # 12: "layers.1" is no part of "layers.11"
@pytest.mark.parametrize("method", ["full", "lora"])
def test_exactly_the_weights_without_a_gradient_are_frozen(tiny, data, method, layers):
    ids, samples = data
    sizes = {"num_hidden_layers": layers, "hidden_size": 64}
    config = HiggsAudioV2Config(**read_object(tiny.model / "config.json") | sizes)
    torch.manual_seed(0)
    native = net = HiggsAudioV2ForConditionalGeneration(config, use_text_head=True)
    if method == "lora":
        net = add_lora(native, 4, 8, 0.0, "all-linear", "base")
        for name, parameter in net.named_parameters():
            if "lora_B" in name:        # new ones are zero, so A has no gradient
                parameter.data = torch.randn(parameter.shape) * 0.05
    batch = collate([samples["cloning"], samples["multi-turn"]], ids)
    assert unreached(native, batch, text_weight=1.0) == set()
    trained = {name for name, p in native.named_parameters() if p.requires_grad}
    v2.freeze_unreachable(native, text_loss_weight=1.0)
    assert trained == {name for name, p in native.named_parameters() if p.requires_grad}
    assert all(p.requires_grad for p in native.parameters()) == (method == "full")
    expected = unreached(native, batch, text_weight=0.0)
    assert len(expected) == (6 if method == "lora" else 5)
    v2.freeze_unreachable(native, text_loss_weight=0.0)
    assert trained - {name for name, p in native.named_parameters() if p.requires_grad} == expected
    assert unreached(native, batch, text_weight=0.0) == set()
