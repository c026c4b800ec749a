"""Packed batches, against a slow reference in plain Python."""
import pytest
import torch

from data import SpeechSamples, collate
from speech.labels import IGNORE
from tests.helpers.dialogues import BOOKS, BOS, CONVERSATIONS, EOS, codes_of


def slow_sample(turns, tokenizer, ids):
    """[(token id, row of codes or None, text label or None, row of labels or None)] by position."""
    positions = []

    def say(text, trained):
        for token in tokenizer(text, add_special_tokens=False)["input_ids"]:
            positions.append((token, None, token if trained else None, None))
    say("<|begin_of_text|>", False)
    for number, t in enumerate(turns):
        say(f"<|start_header_id|>{t.role}<|end_header_id|>\n\n", False)
        for piece in t.parts:
            if isinstance(piece, str):
                say(piece + " " * (t.role == "system" and len(t.parts) > 1 and piece is t.parts[0]), t.trained)
                continue
            say("<|audio_out_bos|>", t.trained)
            codes = codes_of(piece).tolist()
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


ALL = list(range(len(CONVERSATIONS)))


@pytest.mark.parametrize("numbers, pad_to", [
    *[([i], 0) for i in ALL], (ALL, 0), ([1, 1], 0), ([6, 2, 0], 0), ([0], 200), (ALL, 1500), ([], 0), ([], 256)])
def test_collate_against_slow_reference(table, tokenizer, ids, numbers, pad_to):
    samples = SpeechSamples(table, ids)
    batch = collate([samples[i] for i in numbers], ids, pad_to)
    slow = [slow_sample(CONVERSATIONS[i], tokenizer, ids) for i in numbers]
    total = sum(map(len, slow))
    padding = max(pad_to - total, 0) if slow else max(pad_to, 1)
    pieces = [128] * (padding // 128) + [padding % 128] * (padding % 128 > 0)     # short samples of padding
    slow += [[(ids.pad, None, None, None)] * n for n in pieces]
    flat = [p for sample in slow for p in sample]
    is_audio = [row is not None for _, row, _, _ in flat]
    text_at, audio_at = [i for i, a in enumerate(is_audio) if not a], [i for i, a in enumerate(is_audio) if a]
    order = text_at + audio_at                                  # modality order -> position in the sequence
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
    text_targets, audio_targets = {}, {}                        # {position: label of the next position}
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
    trained = [c for i in numbers for t in CONVERSATIONS[i] if t.trained for c in t.clips]
    assert batch.counts == {
        "tokens": total, "samples": len(numbers), "padding": padding,
        "audio_targets": sum(8 * (int(c.duration) + 1) for c in trained), "text_targets": len(text_targets)}


def test_table_counts_are_those_of_the_batches(table, ids):
    """The loss is divided by counts of the table, so they must equal the counts of the batches."""
    samples = SpeechSamples(table, ids)
    for i in ALL:
        counts = collate([samples[i]], ids).counts
        assert {k: int(getattr(table, k)[i]) for k in ("audio_targets", "text_targets")} == \
            {k: counts[k] for k in ("audio_targets", "text_targets")}
        assert int(table.lengths[i]) == counts["tokens"] and table.name(i) == f"sample {i}"
