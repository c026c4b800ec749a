"""Prompts of Higgs TTS 3 written out from the layout, beside what the product makes of conversations."""
import torch


def prompt(ids, text_ids, ref_text_ids=None, ref_rows=None):
    """(input_ids (S,) int64, is_audio (S,) bool) of what stands before the rows to be spoken.

    text_ids, ref_text_ids: tokens of the text to speak and of the reference's. ref_rows: (R, 8)
    delayed rows of the reference; where is_audio they take the place of ids.pad, one a position.
    """
    tokens = [ids.tts]      # task first, then whose voice, then what to say
    if ref_text_ids is not None:
        tokens += [ids.ref_text, *torch.as_tensor(ref_text_ids).tolist()]
    start = stop = 0
    if ref_rows is not None:
        tokens.append(ids.ref_audio)
        start, stop = len(tokens), len(tokens) + len(ref_rows)
        tokens += [ids.pad] * len(ref_rows)
    tokens += [ids.text, *torch.as_tensor(text_ids).tolist(), ids.audio]
    place = torch.arange(len(tokens))
    return torch.tensor(tokens), (place >= start) & (place < stop)
