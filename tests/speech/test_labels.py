"""Token stream, delay pattern, labels and packed batches, against literal pictures, transformers, and slow Python."""
import json
import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from data import (
    IGNORE,
    SpeechSamples,
    Table,
    TableBuilder,
    collate,
    conversation_pieces,
    delay_labels,
    delay_rows,
    make_loader,
    token_ids,
)
from speech.conversations import Clip, Sample, Turn, read_samples

BOS, EOS, BOOKS = 1024, 1025, 8


@pytest.fixture(scope="module")
def tokenizer(tiny):
    from transformers import AutoTokenizer
    return AutoTokenizer.from_pretrained(tiny.model)


@pytest.fixture(scope="module")
def ids(tiny, tokenizer):
    config = json.loads((tiny.model / "config.json").read_text())
    return token_ids(tokenizer, SimpleNamespace(**config))


def codes_of(clip):
    """(T, 8) random codes of a clip that never exists as a file; its seconds field holds T."""
    return np.random.default_rng(len(clip.path)).integers(0, 1024, (int(clip.seconds), BOOKS)).astype(np.int16)


def user(text):
    return Turn("user", [text], None)


def speaker(*parts, trained=True):
    return Turn("assistant", list(parts), None, trained)


SYSTEM = Turn("system", ["Speak."], None)
REF, TARGET, ONE_FRAME, LONG = (Clip("r" * n, seconds=t) for n, t in ((1, 5), (2, 3), (3, 1), (4, 30)))
CONVERSATIONS = [
    [SYSTEM, user("Hello there."), speaker(TARGET)],
    [SYSTEM, user("I am Anna."), speaker(REF, trained=False), user("Say this: now."), speaker(LONG)],
    [SYSTEM, user("One."), speaker(ONE_FRAME), user("Two."), speaker(TARGET), user("Three."), speaker(REF)],
    [SYSTEM, user("Only words?"), speaker("Yes, only words.")],
    [Turn("system", ["Speak.\n", REF, "\nEnd."], None), user("Go."), speaker("Well: ", TARGET, " so.")],
    [SYSTEM, user("Two clips."), speaker(ONE_FRAME, LONG), speaker("Once more.")],
    [SYSTEM, user("Heard, not trained."), speaker(LONG, trained=False), user("And?"), speaker("Nothing.")],
]


def table_of(conversations, tokenizer, ids, folder):
    """A Table of conversations whose clips have random codes, through the trainer's own writer and reader."""
    builder, problems = TableBuilder(tokenizer, ids), []
    builder.add([Sample(f"sample {i}", turns) for i, turns in enumerate(conversations)], problems)
    assert not problems
    frames = np.array([int(c.seconds) for c in builder.clips], np.int64)
    folder.mkdir(exist_ok=True)
    codes = [codes_of(c) for c in builder.clips] or [np.empty((0, BOOKS), np.int16)]
    save_file({"codes": np.concatenate(codes)}, folder / "codes-0.safetensors")
    where = np.stack([np.zeros_like(frames), np.cumsum(frames) - frames, frames], axis=1)
    builder.write(folder / "table", folder, ["codes-0.safetensors"], where)
    return Table(folder / "table")


@pytest.fixture(scope="module")
def table(tokenizer, ids, tmp_path_factory):
    return table_of(CONVERSATIONS, tokenizer, ids, tmp_path_factory.mktemp("labels"))


# ---------------------------------------------------------------------------------------------------------------------
# Delay pattern

B, E, _ = 900, 901, IGNORE
A0, A1, A2, B0, B1, B2, C0, C1, C2, D0, D1, D2 = range(12)
CODES = np.array([[A0, B0, C0, D0], [A1, B1, C1, D1], [A2, B2, C2, D2]])        # 3 frames of 4 codebooks


def test_golden_input_rows():
    assert delay_rows(CODES, B, E).tolist() == [
        [B, B, B, B],
        [A0, B, B, B],
        [A1, B0, B, B],
        [A2, B1, C0, B],
        [E, B2, C1, D0],
        [E, E, C2, D1],
        [E, E, E, D2],
        [E, E, E, E]]


def test_golden_labels():
    assert delay_labels(CODES, E).tolist() == [
        [_, _, _, _],
        [A0, _, _, _],
        [A1, B0, _, _],
        [A2, B1, C0, _],
        [E, B2, C1, D0],
        [_, E, C2, D1],
        [_, _, E, D2],
        [_, _, _, E]]


@pytest.mark.parametrize("frames", [1, 2, 7, 8, 9, 250])
def test_eight_codebooks(frames):
    codes = np.random.default_rng(frames).integers(0, 1024, (frames, BOOKS)).astype(np.int16)
    rows, labels = delay_rows(codes, BOS, EOS), delay_labels(codes, EOS)
    assert rows.shape == labels.shape == (frames + 9, BOOKS) and rows.dtype == labels.dtype == np.int64
    assert (rows[0] == BOS).all() and (rows[-1] == EOS).all() and (labels[0] == IGNORE).all()
    assert (labels != BOS).all()
    for k in range(BOOKS):
        assert (labels[:, k] != IGNORE).sum() == frames + 1
        assert np.flatnonzero(labels[:, k] == EOS).tolist() == [frames + 1 + k]
        assert labels[k + 1:k + 1 + frames, k].tolist() == codes[:, k].tolist()
    trained = labels != IGNORE
    assert (rows[trained] == labels[trained]).all()             # a label is the input of its own row


@pytest.mark.parametrize("frames, books", [(1, 8), (3, 4), (20, 8), (5, 1)])
def test_rows_equal_transformers_delay_pattern(frames, books):
    from transformers import HiggsAudioV2Processor
    codes = np.random.default_rng(0).integers(0, 1024, (frames, books)).astype(np.int16)
    framed = torch.tensor(np.concatenate([np.full((1, books), BOS), codes, np.full((1, books), EOS)]).T)[None]
    special = SimpleNamespace(audio_stream_bos_id=BOS, audio_stream_eos_id=EOS)
    native = HiggsAudioV2Processor.build_delay_pattern(special, framed)[0].T
    assert delay_rows(codes, BOS, EOS).tolist() == native.tolist()


# ---------------------------------------------------------------------------------------------------------------------
# Token stream and text labels


@pytest.fixture
def zero_shot(tmp_path):
    """The canonical zero-shot cloning sample of the model card, read from a file."""
    for name in ("ref.wav", "target.wav"):
        (tmp_path / name).write_bytes(b"audio")
    messages = [
        {"role": "system", "content": "Generate audio following instruction.\n\n<|scene_desc_start|>\nAudio is "
                                      "recorded from a quiet room.\n<|scene_desc_end|>"},
        {"role": "user", "content": "This is how I sound."},
        {"role": "assistant", "content": {"type": "audio", "audio_url": "ref.wav"}},
        {"role": "user", "content": "The door is never locked: try it."},
        {"role": "assistant", "content": {"type": "audio", "audio_url": "target.wav"}}]
    (tmp_path / "data.json").write_text(json.dumps([{"messages": messages, "start_index": 3}]))
    problems = []
    sample, = read_samples(tmp_path / "data.json", problems)
    assert not problems
    return sample


BY_HAND = (
    "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nGenerate audio following instruction.\n\n"
    "<|scene_desc_start|>\nAudio is recorded from a quiet room.\n<|scene_desc_end|><|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nThis is how I sound.<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n<|audio_out_bos|><|AUDIO_OUT|><|audio_eos|><|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nThe door is never locked: try it.<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n<|audio_out_bos|><|AUDIO_OUT|><|audio_eos|><|eot_id|>")


def stream(sample, tokenizer, ids):
    """(token ids, labelled) of one sample before its clips are expanded."""
    builder, problems = TableBuilder(tokenizer, ids), []
    builder.add([sample], problems)
    assert not problems
    return builder.tokens[0].tolist(), builder.labelled.array().tolist()


def native_text(tiny, conversation):
    """The prompt string of the processor saved beside the model."""
    from transformers import AutoProcessor
    return AutoProcessor.from_pretrained(tiny.model).apply_chat_template(conversation, tokenize=False)


def turn(role, *items):
    return {"role": role, "content": [{"type": "text", "text": i} if isinstance(i, str) else
                                      {"type": "audio", "url": "x"} for i in items]}


def test_tokens_are_those_of_the_text_written_by_hand(zero_shot, tokenizer, ids):
    tokens, _ = stream(zero_shot, tokenizer, ids)
    assert tokens == tokenizer(BY_HAND, add_special_tokens=False)["input_ids"]
    assert tokens.count(tokenizer.bos_token_id) == 1


@pytest.mark.parametrize("text", ["'s odd", "123456", "...", "你好，世界", "a", "!\nb", "é", "<|", "1. x", "- x:"])
def test_tokenising_piece_by_piece_is_tokenising_the_whole_text(tokenizer, ids, text):
    """Pieces are tokenised apart, which saves work; that must not cut a token that spans two of them."""
    sample = Sample("s", [SYSTEM, user(text), speaker(text, TARGET, text)])
    whole = "".join(p if isinstance(p, str) else "<|AUDIO_OUT|>" for p, _ in conversation_pieces(sample))
    assert stream(sample, tokenizer, ids)[0] == tokenizer(whole, add_special_tokens=False)["input_ids"]


def test_tokens_are_those_of_the_native_template(tiny, zero_shot, tokenizer, ids):
    conversation = [turn("system", "Generate audio following instruction."),
                    turn("scene", "Audio is recorded from a quiet room."), turn("user", "This is how I sound."),
                    turn("assistant", 0), turn("user", "The door is never locked: try it."), turn("assistant", 0)]
    assert native_text(tiny, conversation) == BY_HAND
    assert tokenizer.decode(stream(zero_shot, tokenizer, ids)[0]) == BY_HAND


def test_scene_with_audio_is_that_of_the_native_template(tiny, tmp_path, tokenizer, ids):
    (tmp_path / "x").write_bytes(b"audio")
    conversation = [turn("system", "Speak."), turn("scene", "A hall."), turn("scene", "SPEAKER0:", 0, "SPEAKER1:", 0),
                    turn("user", "Hello."), turn("assistant", 0)]
    (tmp_path / "data.json").write_text(json.dumps([{"messages": conversation}]))
    problems = []
    sample, = read_samples(tmp_path / "data.json", problems)
    tokens, labelled = stream(sample, tokenizer, ids)
    text = native_text(tiny, conversation)
    assert not problems and tokens == tokenizer(text, add_special_tokens=False)["input_ids"]
    assert "SPEAKER0: <|audio_out_bos|>" in text and labelled.count(True) == 4      # the target's alone, with its clip


def labelled_words(sample, tokenizer, ids):
    tokens, labelled = stream(sample, tokenizer, ids)
    return [t for t, on in zip(tokenizer.convert_ids_to_tokens(tokens), labelled) if on]


def test_three_text_labels_of_a_speech_sample(zero_shot, tokenizer, ids):
    spoken = ["<|audio_out_bos|>", "<|AUDIO_OUT|>", "<|audio_eos|>", "<|eot_id|>"]
    assert labelled_words(zero_shot, tokenizer, ids) == spoken          # the clip's place becomes rows of codes
    tokens, labelled = stream(zero_shot, tokenizer, ids)
    assert labelled[-4:] == [True] * 4
    for t in zero_shot.turns:
        t.trained = t.role == "assistant"
    assert labelled_words(zero_shot, tokenizer, ids) == spoken * 2


def test_text_of_a_trained_turn_is_labelled_and_end_of_message_before_another_turn(tokenizer, ids):
    sample = Sample("s", [SYSTEM, user("Speak"), speaker("Wait", trained=True), speaker("Now ", TARGET, " done")])
    text = "".join(p if isinstance(p, str) else "<|AUDIO_OUT|>" for p, on in conversation_pieces(sample) if on)
    assert text == "Wait<|eom_id|>Now <|audio_out_bos|><|AUDIO_OUT|><|audio_eos|> done<|eot_id|>"
    tokens, labelled = stream(sample, tokenizer, ids)
    assert tokenizer.decode([t for t, on in zip(tokens, labelled) if on]) == text
    untrained = Sample("s", [SYSTEM, user("Speak"), speaker("Wait", trained=False), speaker(TARGET)])
    assert labelled_words(untrained, tokenizer, ids) == ["<|audio_out_bos|>", "<|AUDIO_OUT|>", "<|audio_eos|>",
                                                         "<|eot_id|>"]
    assert "<|eom_id|>" in tokenizer.decode(stream(untrained, tokenizer, ids)[0])


# ---------------------------------------------------------------------------------------------------------------------
# Slow reference: one cell at a time, written from the picture above and not from the code


def slow_sample(turns, tokenizer, ids):
    """[(token id, row of codes or None, text label or None, row of labels or None)] by position."""
    positions = []

    def say(text, trained):
        for token in tokenizer(text, add_special_tokens=False)["input_ids"]:
            positions.append((token, None, token if trained else None, None))

    say("<|begin_of_text|>", False)
    for number, t in enumerate(turns):
        say(f"<|start_header_id|>{t.role}<|end_header_id|>\n\n", False)
        for part in t.parts:
            if isinstance(part, str):
                say(part + " " * (t.role == "system" and len(t.parts) > 1 and part is t.parts[0]), t.trained)
                continue
            say("<|audio_out_bos|>", t.trained)
            codes = codes_of(part).tolist()
            n = len(codes)
            for row in range(n + 9):
                frame = [row - k - 1 for k in range(BOOKS)]
                cells = [BOS if f < 0 else codes[f][k] if f < n else EOS for k, f in enumerate(frame)]
                label = [IGNORE if f < 0 or f > n else cells[k] for k, f in enumerate(frame)]
                placeholder = ids.delay if row >= n + 9 - 7 else ids.audio
                positions.append((placeholder, cells, None, label if t.trained else None))
            say("<|audio_eos|>", t.trained)
        another = number + 1 < len(turns) and turns[number + 1].role == "assistant"
        say("<|eom_id|>" if t.role == "assistant" and another else "<|eot_id|>", t.trained)
    return positions


def check_against_slow(batch, numbers, tokenizer, ids, pad_to=0):
    """Every tensor of a PackedBatch against the slow reference of the samples in it."""
    slow = [slow_sample(CONVERSATIONS[i], tokenizer, ids) for i in numbers]
    total = sum(map(len, slow))
    padding = max(pad_to - total, 0) if slow else max(pad_to, 1)
    if padding:
        pieces = [128] * (padding // 128) + [padding % 128] * (padding % 128 > 0)     # short samples of padding
        slow = [*slow, *([(ids.pad, None, None, None)] * n for n in pieces)]
    flat = [p for sample in slow for p in sample]
    is_audio = [row is not None for _, row, _, _ in flat]
    text_at, audio_at = [i for i, a in enumerate(is_audio) if not a], [i for i, a in enumerate(is_audio) if a]
    order = text_at + audio_at                                  # modality order -> place in the sequence

    assert batch.input_ids.tolist() == [p[0] for p in flat]
    assert batch.position_ids.tolist() == [i for sample in slow for i in range(len(sample))]
    assert batch.seqlens == tuple(map(len, slow))
    assert batch.cu_seqlens.tolist() == [sum(map(len, slow[:i])) for i in range(len(slow) + 1)]
    assert batch.cu_seqlens.dtype == torch.int32
    assert batch.longest % 128 == 0 and 0 <= batch.longest - max(map(len, slow)) < 128
    assert batch.text_pos.tolist() == text_at and batch.audio_pos.tolist() == audio_at
    assert [order[i] for i in batch.seq_index.tolist()] == list(range(len(flat)))
    assert batch.audio_ids.tolist() == [row for _, row, _, _ in flat if row is not None]
    assert batch.audio_ids.shape == (len(audio_at), BOOKS)
    assert batch.samples == tuple(numbers)

    text_targets, audio_targets = {}, {}                        # what each place must predict: the next place's label
    start = 0
    for sample in slow:
        for i in range(len(sample) - 1):
            _, _, text, row = sample[i + 1]
            if text is not None:
                text_targets[start + i] = text
            if row is not None and set(row) != {IGNORE}:
                audio_targets[start + i] = row
        start += len(sample)
    assert {order[r]: t for r, t in zip(batch.text_rows.tolist(), batch.text_targets.tolist())} == text_targets
    assert {order[r]: t for r, t in zip(batch.audio_rows.tolist(), batch.audio_targets.tolist())} == audio_targets
    assert len(batch.text_rows) == len(text_targets) and len(batch.audio_rows) == len(audio_targets)
    assert all(is_audio[p] for p in audio_targets)              # codes are predicted from audio positions only

    clips = [c for i in numbers for t in CONVERSATIONS[i] for c in t.clips]
    trained = [c for i in numbers for t in CONVERSATIONS[i] if t.trained for c in t.clips]
    assert batch.counts == {
        "tokens": total, "samples": len(numbers), "padding": padding, "frames": sum(int(c.seconds) for c in clips),
        "audio_targets": sum(8 * (int(c.seconds) + 1) for c in trained), "text_targets": len(text_targets)}


ALL = list(range(len(CONVERSATIONS)))


@pytest.mark.parametrize("numbers, pad_to", [
    *[([i], 0) for i in ALL], (ALL, 0), (ALL[::-1], 0), ([1, 1], 0), ([0, 3], 0), ([3], 0), ([6, 2, 0], 0),
    ([0], 200), (ALL, 1500), ([3], 64), ([], 0), ([], 256)])
def test_collate_against_slow_reference(table, tokenizer, ids, numbers, pad_to):
    samples = SpeechSamples(table, ids)
    check_against_slow(collate([samples[i] for i in numbers], ids, pad_to), numbers, tokenizer, ids, pad_to)


def test_exactly_full_budget_needs_no_padding(table, tokenizer, ids):
    samples = SpeechSamples(table, ids)
    total = int(table.lengths[[0, 1]].sum())
    batch = collate([samples[0], samples[1]], ids, total)
    check_against_slow(batch, [0, 1], tokenizer, ids, total)
    assert batch.counts["padding"] == 0 and len(batch.seqlens) == 2


def test_empty_pack_weighs_nothing(ids):
    batch = collate([], ids, 256)
    assert len(batch.audio_rows) == len(batch.text_rows) == 0 and batch.samples == ()
    assert batch.counts == {"tokens": 0, "samples": 0, "padding": 256, "frames": 0, "audio_targets": 0,
                            "text_targets": 0}


def test_table_counts_are_those_of_the_batches(table, ids):
    """The loss is divided by counts of the table before any batch exists, so they must be the batches' own."""
    samples = SpeechSamples(table, ids)
    for i in ALL:
        counts = collate([samples[i]], ids).counts
        assert {k: int(getattr(table, k)[i]) for k in ("frames", "audio_targets", "text_targets")} == \
            {k: counts[k] for k in ("frames", "audio_targets", "text_targets")}
        assert int(table.lengths[i]) == counts["tokens"] and table.name(i) == f"sample {i}"


@pytest.mark.parametrize("num_workers", [0, 2])
def test_loader_gives_the_same_batches_in_order(table, tokenizer, ids, num_workers):
    packs = [[1, 0], [], [2, 3, 4], [5, 6]]
    batches = make_loader(table, ids, packs, num_workers=num_workers, prefetch_factor=2, pad_to=400)
    for numbers, batch in zip(packs, batches, strict=True):
        check_against_slow(batch, numbers, tokenizer, ids, 400)


def test_loader_leaves_the_trainers_random_state_alone(table, ids):
    """Drawing its seed from torch's generator would make dropout depend on the number of loaders."""
    before = torch.get_rng_state()
    assert len(list(make_loader(table, ids, [[0], [1]], num_workers=1, prefetch_factor=2))) == 2
    assert torch.equal(before, torch.get_rng_state())


def test_texts_alone_make_a_table_too(tokenizer, ids, tmp_path):
    table = table_of([CONVERSATIONS[3], CONVERSATIONS[3]], tokenizer, ids, tmp_path / "texts")
    batch = collate([SpeechSamples(table, ids)[1]], ids)
    assert table.audio_targets.tolist() == [0, 0] and batch.audio_ids.shape == (0, BOOKS)
    assert batch.counts["text_targets"] == int(table.text_targets[1]) > 0


def test_codes_of_a_clip_are_shared_and_written_once(table, tokenizer, ids, tmp_path):
    """Two samples that use a clip point at the same codes; the table grows by numbers, not by audio."""
    two = table_of([CONVERSATIONS[1], CONVERSATIONS[1]], tokenizer, ids, tmp_path / "twice")
    assert two.where.shape == (2, 3) and two.clips.tolist() == [0, 1, 0, 1]
    assert os.path.getsize(tmp_path / "twice" / "codes-0.safetensors") < 2 * 8 * (5 + 30) + 200


@pytest.mark.parametrize("token", ["<|eot_id|>", "<|AUDIO_OUT|>", "<|audio_eos|>", "<|begin_of_text|>",
                                   "<|reserved_special_token_6|>"])
def test_control_tokens_in_text_are_refused(tokenizer, ids, token):
    builder, problems = TableBuilder(tokenizer, ids), []
    builder.add([Sample("bad one", [SYSTEM, user(f"Hello {token} there"), speaker(TARGET)]),
                 Sample("good one", [SYSTEM, user("a <| b |> c <|eot"), speaker(TARGET)])], problems)
    assert len(builder) == 1 and bytes(builder.names[0]) == b"good one"
    assert problems == [f"bad one: text contains the control token {token}; remove it"]
