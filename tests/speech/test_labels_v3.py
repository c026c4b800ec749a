"""Conversations of any data set as sequences of Higgs TTS 3: tokens, reference, labels, counts, batches."""
from dataclasses import replace

import numpy as np
import pytest
import torch

from data import SpeechSamples, collate
from speech import v3
from speech.conversations import BadSample, Clip, Sample, Turn
from speech.dataset import tokenise
from speech.labels import IGNORE
from tests.helpers import dialogues, higgs3


@pytest.fixture(scope="module")
def tokenizer3(model3):
    return v3.load_tokenizer(model3)


@pytest.fixture(scope="module")
def ids3(model3, tokenizer3):
    return higgs3.load(model3)[1]


def sample_of(*turns):
    """Sample of turns: (role, text or Clip or a list of them, trained)."""
    return Sample("sample 0", [Turn(role, items if isinstance(items, list) else [items], i, trained)
                               for i, (role, items, trained) in enumerate(turns)])


A, B, C = Clip("a.wav"), Clip("b.wav"), Clip("c.wav")
SYSTEM = ("system", "Generate audio following instruction.", False)


def filled(clip):
    return replace(clip, filled=True)


def words(stream):
    return [piece for piece, _ in stream]


def test_reference_and_target_of_a_cloning_sample(ids3):
    sample = sample_of(SYSTEM, ("user", "Heard.", False), ("assistant", A, False), ("user", "Say this.", False),
                    ("assistant", B, True))
    (name, stream), = ids3.streams(sample)[0]
    assert name == "sample 0" and [labelled for _, labelled in stream] == [False] * 8 + [True]
    assert words(stream) == ["<|tts|>", "<|ref_text|>", "Heard.", "<|ref_audio|>", filled(A), "<|text|>", "Say this.",
                             "<|audio|>", B]
    assert ids3.streams(sample)[1] == ["lose their system or scene text"]


def test_each_trained_clip_is_a_sample(ids3):
    sample = sample_of(("user", "One.", False), ("assistant", A, True), ("user", "Two.", False), ("assistant", B, True))
    streams, left_out = ids3.streams(sample)
    assert [name for name, _ in streams] == ["sample 0 message 1", "sample 0 message 3"] and left_out == []
    assert words(streams[0][1]) == ["<|tts|>", "<|text|>", "One.", "<|audio|>", A]
    assert words(streams[1][1]) == ["<|tts|>", "<|ref_text|>", "One.", "<|ref_audio|>", filled(A), "<|text|>", "Two.",
                                  "<|audio|>", B]


def test_unsupported_parts_are_counted_or_refused(ids3):
    sample = sample_of(("user", "R1.", False), ("assistant", A, False), ("user", "R2.", False), ("assistant", B, False),
                    ("user", "[SPEAKER1] Say <|emotion:elation|>this.", False), ("assistant", C, True))
    (_, stream), = ids3.streams(sample)[0]
    assert words(stream)[2:5] == ["R2.", "<|ref_audio|>", filled(B)]
    assert words(stream)[-3] == "Say <|emotion:elation|>this."
    assert ids3.streams(sample)[1] == ["lose a speaker's mark", "lose an earlier reference: the last one stays"]
    with pytest.raises(BadSample, match="several speakers"):
        ids3.streams(sample_of(("user", "[SPEAKER0] Hi. [SPEAKER1] Ho.", False), ("assistant", A, True)))
    (_, stream), = ids3.streams(sample_of(("user", "[SPEAKER0] Hi.\n[SPEAKER0]Ho.", False), ("assistant", A, True)))[0]
    assert words(stream)[-3] == "Hi.\nHo."
    stream = v3.pieces("Hi.", A, ("Heard.", B), False)
    assert words(stream) == ["<|tts|>", "<|ref_audio|>", filled(B), "<|text|>", "Hi.", "<|audio|>", A]


def test_structural_tokens_are_forbidden_in_texts_and_tags_are_not(ids3, tokenizer3):
    forbidden = set(ids3.forbidden_tokens(tokenizer3))
    assert {"<|tts|>", "<|text|>", "<|audio_end|>", "<|endoftext|>"} <= forbidden
    assert not any(":" in token for token in forbidden)


def test_unknown_control_tags_are_counted(ids3, tokenizer3):
    texts = ["<|emotion:elation|>Hi.", "<|emotion:elaton|>Hi.", "<|emotion:elaton|>Ho <|laugh|>.", "2 <| 3 |> 1"]
    samples = [sample_of(("user", text, False), ("assistant", A, True)) for text in texts]
    table = tokenise(samples, tokenizer3, ids3)
    reason = "which is not a control tag of this model: it is read aloud"
    assert table["notices"] == {f"hold <|emotion:elaton|>, {reason}": 2, f"hold <|laugh|>, {reason}": 1,
                                f"hold <| 3 |>, {reason}": 1} and not table["refused"]


def test_a_message_of_several_clips_or_without_text_is_refused(ids3):
    for parts, why in (["First.", A, "Second.", B], "several clips in one message"), ([" ", A], "no text"):
        with pytest.raises(BadSample, match=why):
            ids3.streams(sample_of(("user", "", False), ("assistant", parts, True)))


@pytest.fixture(scope="module")
def table3(tokenizer3, ids3, tmp_path_factory):
    conversations = [turns for turns in dialogues.CONVERSATIONS if all(len(turn.clips) < 2 for turn in turns)]
    return dialogues.table_of(conversations, tokenizer3, ids3, tmp_path_factory.mktemp("labels3"))


def test_table_counts_are_those_of_the_batches(table3, ids3):
    samples = SpeechSamples(table3, ids3)
    assert len(table3) >= len(dialogues.CONVERSATIONS) - 1
    for i in range(len(table3)):
        counts = collate([samples[i]], ids3).counts
        assert int(table3.audio_targets[i]) == counts["audio_targets"] > 0 == counts["text_targets"]
        assert int(table3.lengths[i]) == counts["tokens"]


def test_a_batch_of_the_table_is_the_prompt_and_rows_of_the_layout(table3, ids3, model3):
    model, _ = higgs3.load(model3)
    samples = [SpeechSamples(table3, ids3)[i] for i in range(len(table3))]
    batch, packed = collate(samples, ids3, 64 * 20), v3.PackedHiggs3(model)
    audio, _, _ = packed(batch)
    expected = 0.0
    for i in range(len(table3)):
        tokens = table3.tokens[table3.token_offsets[i]:table3.token_offsets[i + 1]].tolist()
        where = table3.where[table3.clips[table3.clip_offsets[i]:table3.clip_offsets[i + 1]]]
        *reference, target = (torch.from_numpy(table3.reader.codes(*row).astype(np.int64)) for row in where.tolist())
        text_start = tokens.index(ids3.text)
        ref_text = tokens[2:tokens.index(ids3.ref_audio)] if ids3.ref_text in tokens else None
        ref_rows = higgs3.delay(reference[0]) if reference else None
        rows, mask = higgs3.delay(target), higgs3.label_mask(len(target))
        prompt = higgs3.prompt(ids3, tokens[text_start + 1:-2], ref_text, ref_rows)
        logits = higgs3.forced_logits(model, prompt, ref_rows, rows)
        expected += torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows.masked_fill(~mask, IGNORE).flatten(),
                                                      ignore_index=IGNORE, reduction="sum")
    torch.testing.assert_close(audio.sum(), expected, rtol=1e-5, atol=0)
