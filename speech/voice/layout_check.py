"""Which layout of rows a Higgs TTS 3 checkpoint was made with: the losses of some real speech under four of them.

    python speech/evaluate_tts.py --check_layout --model_path bosonai/higgs-tts-3-4b FOLDER_OR_FILE_OF_SPEECH

For the first who has the released weights: labels_v3.py has the layout from the source of two servers. Each layout is
given to the model as its input and asked back from it; the true one has the lowest loss (guessing: 6.93).
"""
import itertools
import math

import torch
import torch.nn.functional as F

from common.distributed import UserError, World
from speech.data.decode import decode_audio
from speech.data.encode import encode_clip, load_codec
from speech.data.rows import read_samples
from speech.model import v3, versions
from speech.model.labels_v3 import delay, label_mask

OURS = "as trained here"
GUESS = 0.5     # nats below guessing that weights must come to know anything
# rows of each clip that are judged: layouts differ most in the first ones. Of a half-trained tiny model the
# true layout is lower by 2.9 standard errors over 24 clips with 9 rows, by 6.3 with 30
ROWS = 30


def layouts(codes, bos, eos):
    """{layout: (rows given to the model, the first prediction that counts, rows asked for, mask)} of (T, 8) codes."""
    books = codes.shape[1]
    rows, mask = delay(codes, bos, eos), label_mask(len(codes), books)
    first = torch.cat([torch.full((1, books), bos), rows])
    return {OURS: (rows, 0, rows, mask), "one row later": (rows, 0, rows[1:], mask[1:]),
            "a row of BOC first, as V2": (first, 1, rows, mask),
            "BOC and EOC swapped": (swapped := delay(codes, eos, bos), 0, swapped, mask)}


def losses(model, ids, samples):
    """{layout: (n, 9)} over n samples [(text ids, (T, 8) codes)]: cross-entropy of each one's first
    ROWS rows, mean of all labelled cells and of each codebook's.
    """
    found = {}
    for text, codes in samples:
        tokens = torch.tensor([ids.tts, ids.text, *text, ids.audio])
        codes = torch.as_tensor(codes).long()
        of_layouts = layouts(codes, ids.stream_bos, ids.stream_eos)
        for name, (rows, start, asked, mask) in of_layouts.items():
            logits = v3.forced_logits(model, (tokens, torch.zeros_like(tokens)), None, rows)
            logits = logits[start:start + len(asked)].cpu()
            loss = F.cross_entropy(logits.flatten(0, 1), asked.flatten(), reduction="none")
            loss, mask = (loss.view(asked.shape) * mask)[:ROWS], mask[:ROWS]
            means = torch.cat([(loss.sum() / mask.sum())[None], loss.sum(0) / mask.sum(0)])
            found.setdefault(name, []).append(means)
    return {name: torch.stack(of_clips) for name, of_clips in found.items()}


def verdict(found, guessing):
    """Line that says which layout of `losses` is lowest, and whether that is sure. guessing: the loss of a guess.

    Sure is what is lower by three standard errors, clip by clip: layouts that share most inputs lie close together.
    """
    best, second = sorted(found, key=lambda name: found[name][:, 0].mean())[:2]
    apart = (found[second] - found[best])[:, 0]
    if found[best][:, 0].mean() > guessing - GUESS:
        said = "no better than guessing: random weights, or another model's"
    elif len(apart) < 2 or apart.mean() < 3 * apart.std() / len(apart) ** 0.5:
        said = "too close to tell: give more speech"
    elif best == OURS:
        said = "these weights were made with the layout that is trained here"
    else:
        said = "another layout than the one that is trained here: do not train, report these lines"
    return f"lowest: {best}, by {apart.mean():.3f} over {len(apart)} clips; {said}"


def check(model_path, codec_path, source, n, device, scratch):
    """Lines that say the losses of the first n samples of a source of speech under each layout. Raises UserError.

    scratch: folder for the codec inside a checkpoint.
    """
    world = World(device=torch.device(device))
    folder, config_dict, codec_dir = versions.find_files(world, model_path, codec_path, scratch)
    if not versions.is_third(config_dict["model_type"]):
        raise UserError(f"--check_layout: {model_path} is not a Higgs TTS 3; the layout of V2 is known")
    dtype = torch.bfloat16 if world.device.type == "cuda" else torch.float32
    model, ids = v3.load(folder, dtype, world.device)
    tokenizer, problems, samples = v3.load_tokenizer(folder), [], []
    codec, bandwidth = load_codec(codec_dir, world.device, ids.num_codebooks)
    for sample in itertools.islice(read_samples(source, problems), n):
        clip, text = sample.turns[-1].clips[-1], sample.turns[-1].text.strip() or sample.turns[-2].text.strip()
        try:
            wave = decode_audio(clip.path, [(clip.offset, clip.duration)])[1][0]
        except ValueError as error:
            raise UserError(f"{sample.name}: its audio {clip.path}: {error}")
        codes = encode_clip(codec, wave, bandwidth, ids.num_codebooks)
        samples.append((tokenizer.encode(text, add_special_tokens=False), codes))
    if not samples:
        raise UserError(f"{source}: holds no samples that can be used" + "".join(f"\n  {p}" for p in problems[:5]))
    found = losses(model, ids, samples)
    lines = [f"{'layout':<26}{'all':>8}" + "".join(f"{f'book {k}':>8}" for k in range(ids.num_codebooks))]
    lines += [f"{name:<26}" + "".join(f"{value:8.3f}" for value in values.mean(0).tolist())
              for name, values in found.items()]
    return [*lines, verdict(found, math.log(model.config.codebook_size))]
