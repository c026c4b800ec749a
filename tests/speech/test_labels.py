"""Token stream, delay pattern and labels, against literal pictures, transformers, and the native template; the loss."""
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from speech.conversations import Sample
from speech.dataset import tokenise
from speech.labels import (IGNORE, TokenIds, conversation_pieces, delay_rows, step_work,
                           total_loss)
from speech.speak import read_samples
from tests.helpers.dialogues import BOOKS, BOS, EOS, SYSTEM, TARGET, speaker, user

E, _ = 901, IGNORE
A0, A1, A2, B0, B1, B2, C0, C1, C2, D0, D1, D2 = range(12)
CODES = np.array([[A0, B0, C0, D0], [A1, B1, C1, D1], [A2, B2, C2, D2]])        # 3 frames of 4 codebooks


def test_golden_labels():
    assert delay_rows(CODES, IGNORE, E, IGNORE).tolist() == [
        [_, _, _, _], [A0, _, _, _], [A1, B0, _, _], [A2, B1, C0, _],
        [E, B2, C1, D0], [_, E, C2, D1], [_, _, E, D2], [_, _, _, E]]


@pytest.mark.parametrize("frames", [1, 8, 30])
def test_counts_are_those_of_the_rows(frames):
    """Plans and budgets use these counts before codes exist; an untrained clip has no targets."""
    ids = TokenIds(1, 2, 0, BOOKS, BOS, EOS)
    codes = np.random.default_rng(frames).integers(0, 1024, (frames, BOOKS))
    for trained in (True, False):
        sample = ids.assemble(np.array([5, 1, 6]), np.array([True, trained, True]), [codes])
        positions, rows = sample["audio_at"], sample["audio_targets"]
        assert len(sample["audio_ids"]) == sample["is_audio"].sum() == ids.rows(frames, trained)
        assert len(positions) == trained * ids.predictions(frames)
        assert (rows != IGNORE).sum() == trained * ids.targets(frames)
        # position p predicts audio row p, since audio rows begin at position 1
        assert (delay_rows(codes, IGNORE, EOS, IGNORE)[positions] == rows).all()
        assert sample["input_ids"][sample["is_audio"]].tolist() == [1] * (frames + 2) + [2] * (BOOKS - 1)


@pytest.mark.parametrize("frames, books", [(1, 8), (3, 4), (20, 8), (5, 1)])
def test_rows_equal_transformers_delay_pattern(frames, books):
    from transformers import HiggsAudioV2Processor
    codes = np.random.default_rng(0).integers(0, 1024, (frames, books)).astype(np.int16)
    framed = torch.tensor(np.concatenate([np.full((1, books), BOS), codes, np.full((1, books), EOS)]).T)[None]
    special = SimpleNamespace(audio_stream_bos_id=BOS, audio_stream_eos_id=EOS)
    native = HiggsAudioV2Processor.build_delay_pattern(special, framed)[0].T
    assert delay_rows(codes, BOS, EOS, EOS).tolist() == native.tolist()


BY_HAND = ("<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nGenerate audio following instruction.\n\n"
           "<|scene_desc_start|>\nAudio is recorded from a quiet room.\n<|scene_desc_end|><|eot_id|>"
           "<|start_header_id|>user<|end_header_id|>\n\nThis is how I sound.<|eot_id|>"
           "<|start_header_id|>assistant<|end_header_id|>\n\n<|audio_out_bos|><|AUDIO_OUT|><|audio_eos|><|eot_id|>"
           "<|start_header_id|>user<|end_header_id|>\n\nThe door is never locked: try it.<|eot_id|>"
           "<|start_header_id|>assistant<|end_header_id|>\n\n<|audio_out_bos|><|AUDIO_OUT|><|audio_eos|><|eot_id|>")


def stream(sample, tokenizer, ids):
    """(token ids, labelled) of one sample before its clips are expanded."""
    table = tokenise([sample], tokenizer, ids)
    assert not table["refused"]
    return table["tokens"].tolist(), table["labelled"].tolist()


def native_text(tiny, conversation):
    """The prompt string of the processor in the model folder."""
    from transformers import AutoProcessor
    return AutoProcessor.from_pretrained(tiny.model).apply_chat_template(conversation, tokenize=False)


def turn(role, *items):
    return {"role": role, "content": [{"type": "text", "text": i} if isinstance(i, str) else
                                      {"type": "audio", "url": "x"} for i in items]}


def read_one(folder, **entry):
    """The sample of an entry whose clips are files of this folder."""
    for name in ("ref.wav", "x"):
        (folder / name).write_bytes(b"audio")
    (folder / "data.json").write_text(json.dumps([entry]))
    problems = []
    sample, = read_samples(folder / "data.json", problems)
    assert not problems
    return sample


def test_tokens_are_those_of_the_text_written_by_hand(tiny, tmp_path, tokenizer, ids):
    """The zero-shot cloning sample of the model card. The native template writes the same text."""
    messages = [
        {"role": "system", "content": "Generate audio following instruction.\n\n<|scene_desc_start|>\nAudio is "
                                      "recorded from a quiet room.\n<|scene_desc_end|>"},
        {"role": "user", "content": "This is how I sound."},
        {"role": "assistant", "content": {"type": "audio", "audio_url": "ref.wav"}},
        {"role": "user", "content": "The door is never locked: try it."},
        {"role": "assistant", "content": {"type": "audio", "audio_url": "x"}}]
    sample = read_one(tmp_path, messages=messages, start_index=3)
    assert stream(sample, tokenizer, ids)[0] == tokenizer(BY_HAND, add_special_tokens=False)["input_ids"]
    conversation = [turn("system", "Generate audio following instruction."),
                    turn("scene", "Audio is recorded from a quiet room."), turn("user", "This is how I sound."),
                    turn("assistant", 0), turn("user", "The door is never locked: try it."), turn("assistant", 0)]
    assert native_text(tiny, conversation) == BY_HAND


@pytest.mark.parametrize("text", ["'s odd", "123456", "...", "你好，世界", "a", "!\nb", "é", "<|", "1. x", "- x:"])
def test_tokenising_piece_by_piece_is_tokenising_the_whole_text(tokenizer, ids, text):
    """The trainer tokenises pieces one by one, which must not cut a token that spans two pieces."""
    sample = Sample("s", [SYSTEM, user(text), speaker(text, TARGET, text)])
    whole = "".join(p if isinstance(p, str) else "<|AUDIO_OUT|>" for p, _ in conversation_pieces(sample))
    assert stream(sample, tokenizer, ids)[0] == tokenizer(whole, add_special_tokens=False)["input_ids"]


def test_scene_with_audio_is_that_of_the_native_template(tiny, tmp_path, tokenizer, ids):
    conversation = [turn("system", "Speak."), turn("scene", "A hall."), turn("scene", "SPEAKER0:", 0, "SPEAKER1:", 0),
                    turn("user", "Hello."), turn("assistant", 0)]
    tokens, labelled = stream(read_one(tmp_path, messages=conversation), tokenizer, ids)
    text = native_text(tiny, conversation)
    assert tokens == tokenizer(text, add_special_tokens=False)["input_ids"]
    assert "SPEAKER0: <|audio_out_bos|>" in text and labelled.count(True) == 4      # only tokens of the target


def test_text_of_a_trained_turn_is_labelled_and_end_of_message_before_another_turn(tokenizer, ids):
    sample = Sample("s", [SYSTEM, user("Speak"), speaker("Wait", trained=True), speaker("Now ", TARGET, " done")])
    text = "".join(p if isinstance(p, str) else "<|AUDIO_OUT|>" for p, on in conversation_pieces(sample) if on)
    assert text == "Wait<|eom_id|>Now <|audio_out_bos|><|AUDIO_OUT|><|audio_eos|> done<|eot_id|>"
    untrained = Sample("s", [SYSTEM, user("Speak"), speaker("Wait", trained=False), speaker(TARGET)])
    tokens, labelled = stream(untrained, tokenizer, ids)
    assert "<|eom_id|>" in tokenizer.decode(tokens) and tokenizer.convert_ids_to_tokens(
        [token for token, on in zip(tokens, labelled) if on]) == [
        "<|audio_out_bos|>", "<|AUDIO_OUT|>", "<|audio_eos|>", "<|eot_id|>"]


@pytest.mark.parametrize("audio, n_audio, text, n_text, weight, wanted", [
    ([1.0, 2.0, 3.0], 12, 8.0, 4, 1.0, 6 / 12 + 8 / 4), ([1.0, 2.0, 3.0], 12, 8.0, 4, 0.25, 6 / 12 + 0.25 * 8 / 4),
    ([1.0, 2.0, 3.0], 12, 8.0, 4, 0.0, 6 / 12), ([3.0], 1, 8.0, 1, 1.0, 11), ([0.0] * 8, 0, 0.0, 0, 1.0, 0)])
def test_the_loss_is_a_mean_over_global_counts(audio, n_audio, text, n_text, weight, wanted):
    """A single target counts fully; without targets the loss is 0."""
    assert total_loss(torch.tensor(audio), n_audio, torch.tensor(text), n_text, weight).item() == pytest.approx(wanted)


def test_flops_of_a_pack():
    """2 per weight and row: forward, for the gradient of the input and, if trained, of the weight."""
    config = SimpleNamespace(hidden_size=8, head_dim=4, num_attention_heads=2, num_key_value_heads=1,
                             intermediate_size=16, num_hidden_layers=3, codebook_size=10, vocab_size=20)
    layer = 8 * 8 + 2 * 8 * 4 + 8 * 8 + 3 * 8 * 16
    rows, pairs = 5 * 3 * layer + 7 * 8 * 10 + 2 * 8 * 20, 15
    counts = {"lengths": 5, "audio_targets": 7, "text_targets": 2, "frames": 0}
    table = SimpleNamespace(**{name: np.array([count]) for name, count in counts.items()})
    assert step_work(config, table, [0], True)["flops"] == 4 * rows + 12 * 8 * pairs * 3
    assert step_work(config, table, [0], False)["flops"] == 6 * rows + 12 * 8 * pairs * 3
