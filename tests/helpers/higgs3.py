"""Reference prompts and rows of Higgs TTS 3, built from the layout."""
from pathlib import Path

import torch

from core import json_files
from speech import speak, v3


def prompt(ids, text_ids, ref_text_ids=None, ref_rows=None):
    """(input_ids (S,) int64, is_audio (S,) bool) of the prompt before the spoken rows.

    text_ids, ref_text_ids: tokens of the text to speak and of the reference's text. ref_rows: (R, 8) delayed rows of
    the reference; they replace ids.pad where is_audio.
    """
    tokens = [ids.tts]      # order: task, voice, text
    if ref_text_ids is not None:
        tokens += [ids.ref_text, *torch.as_tensor(ref_text_ids).tolist()]
    start = stop = 0
    if ref_rows is not None:
        tokens.append(ids.ref_audio)
        start, stop = len(tokens), len(tokens) + len(ref_rows)
        tokens += [ids.pad] * len(ref_rows)
    tokens += [ids.text, *torch.as_tensor(text_ids).tolist(), ids.audio]
    position = torch.arange(len(tokens))
    return torch.tensor(tokens), (position >= start) & (position < stop)


def delay(codes, bos=1024, eos=1025):
    """(T, K) codes -> (T + K - 1, K) rows: book k has k BOC, T codes, K - 1 - k EOC."""
    codes = torch.as_tensor(codes).long()
    columns = [[bos] * k + column + [eos] * (codes.shape[1] - 1 - k) for k, column in enumerate(codes.T.tolist())]
    return torch.tensor(columns).T


def label_mask(frames, books=8):
    """(T + K - 1, K) bool, True for trained cells of delay's rows: codes and every EOC."""
    return torch.arange(frames + books - 1)[:, None] >= torch.arange(books)


def load(folder, dtype=torch.float32, device="cpu"):
    """(Higgs3 in eval mode on the device, Ids) of a checkpoint folder; UserError for other folders."""
    config = json_files.read_object(Path(folder) / "config.json")
    model = speak.load_model(folder, config, None, dtype, torch.device(device))
    return model, v3.token_ids(v3.load_tokenizer(folder), model.config)


@torch.no_grad()
def forced_logits(model, prompt, ref_rows, rows):
    """float32 (T + 7, 8, 1026) logits of every row, each from the prompt and the true rows before it.

    prompt: (input_ids, is_audio). ref_rows: (R, 8) or None. rows: (T + 7, 8) of delay().
    """
    device = model.audio_embedding.weight.device
    rows = torch.as_tensor(rows).to(device)
    embedded = torch.cat([v3.embed_prompt(model, *prompt, ref_rows), model.embed_rows(rows[:-1])])
    length = len(embedded)
    hidden = model.body(inputs_embeds=embedded[None], use_cache=False,
                        position_ids=torch.arange(length, device=device)[None], cu_seq_lens_q=torch.tensor(
                            [0, length], dtype=torch.int32, device=device), max_length_q=length).last_hidden_state[0]
    return model.logits(hidden[len(prompt[0]) - 1:])
