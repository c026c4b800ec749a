"""Speak with Higgs-Audio V2: prompts as in training, transformers' own generate, codes -> waveform, picture, files.

A prompt takes the trainer's path from conversation to tokens (conversations.py, dataset.py, labels.py) and is cut off
after the last <|audio_out_bos|>, so the model hears what it was trained on. Generation is the native class' with what
it needs beyond its defaults: the end-of-stream id, repetition-aware sampling, room for the delay pattern, and a time
limit.
"""
import contextlib
import io
import json
import re
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from core.checkpoint import write_atomically
from core.cli import UserError, problem_text, require
from core.json_files import read_text
from speech.builder import TableBuilder
from speech.code_cache import FRAME_RATE, SAMPLE_RATE
from speech.conversations import (
    DEFAULT_SYSTEM,
    SCENE,
    BadSample,
    Clip,
    Paths,
    Sample,
    Turn,
    canonical_turns,
    mark_trained,
    normalise_requests,
    system_parts,
    trimmed,
)
from speech.decode import check_codes, decode_audio, filled, holds_codes, read_codes
from speech.encode import encode_clip
from speech.rows import read_samples
from speech import (
    versions,  # imports weights: it explains a torchaudio that breaks every transformers import
)
from speech.labels import TokenIds

from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList  # isort: skip
from transformers.audio_utils import hertz_to_mel, mel_filter_bank, spectrogram, window_function  # isort: skip

MIN_TOKENS = 8          # transformers' delay processor miscounts on shorter prompts
MEL_BANDS, MEL_WINDOW, MEL_HOP = 80, 1024, 240      # 10 ms a column
MEL_HERTZ = (500, 1000, 2000, 4000, 8000)           # marked in a picture
UNDRAWN = re.compile("[\u0590-\u1dff\u2e80-\U0010ffff]")      # scripts that matplotlib's font would draw as boxes

# ---------------------------------------------------------------------------------------------------------------------
# Prompts


@dataclass
class Prompt:
    """What the model gets to see before it speaks."""
    name: str               # of the files to be written
    source: str             # where it stands in the user's files
    text: str               # what is to be heard
    tokens: np.ndarray      # (n,) int64 up to <|audio_out_bos|>, a row of codes for each <|AUDIO_OUT|>
    audio_ids: np.ndarray   # (a, 8) int64 delayed codes of the clips in it
    is_audio: np.ndarray    # (n,) bool, where those stand among the tokens
    references: list        # those clips, as far as they are recordings
    target: Clip | None     # the true recording, where the file has one
    target_seconds: float | None = None


def read_prompts(path, normalize):
    """Samples of a prompt file: ChatML (.json, .jsonl; with or without the target clip), a list of
    Seed-TTS-eval (.lst), else one text a line.

    normalize: the texts to speak, by text_normalization.normalise. Raises UserError with every
    prompt that cannot be used.
    """
    path, problems = Path(path), []
    if path.suffix.lower() == ".lst":
        return list_prompts(path, normalize)
    if path.suffix.lower() not in (".json", ".jsonl"):
        return text_prompts(read_lines(path), normalize)
    samples = list(read_samples(path, problems, canonical_prompt, normalize=normalize))
    if problems:
        raise UserError(problem_text(problems))
    if not samples:
        raise UserError(f"{path}: holds no prompts")
    return samples


def canonical_prompt(name, entry, paths, normalize=False):
    """One raw sample -> Sample to be spoken: its last turn is the assistant's and ends with the
    clip to generate.

    The sample may hold that clip already, as training data does; else it is Clip(""). normalize:
    the text to speak, and those before it that training on this sample would normalise. Raises
    BadSample.
    """
    turns, rewritten, recognised = canonical_turns(entry, paths)
    asked = max((i for i, turn in enumerate(turns) if turn.role == "user"), default=0)
    spoken = [i for i, turn in enumerate(turns)
              if i > asked and turn.role == "assistant" and turn.clips]
    if spoken:
        turns, answer = turns[:spoken[-1] + 1], turns[spoken[-1]]
        last = max(i for i, part in enumerate(answer.parts) if isinstance(part, Clip))
        answer.parts = answer.parts[:last + 1]
    else:
        turns.append(Turn("assistant", [Clip("")], None))
    sample = Sample(name, [trimmed(t) for t in turns], str(entry.get("speaker") or ""), recognised)
    if not spoken_text(sample):
        raise BadSample("has no text to speak: no user text stands before the clip to generate")
    if normalize:
        if entry.get("start_index") is not None:
            # the prompt may lack the clip that would be trained
            with contextlib.suppress(BadSample):
                mark_trained(turns, entry["start_index"], rewritten, len(entry["messages"]))
        turns[-1].trained = True
        normalise_requests(turns)
    return sample


def spoken_text(sample):
    """The text of a canonical_prompt that is to be heard."""
    before, answer = sample.turns[-2:]
    asked = before.text if before.role == "user" else ""
    return (answer.text or asked).strip()


def read_lines(path):
    """[(name, text)] of a file with one text a line; empty lines are left out. Raises UserError."""
    lines = enumerate(read_text(path).splitlines(), 1)
    texts = [(f"{path} line {number}", line.strip()) for number, line in lines if line.strip()]
    if not texts:
        raise UserError(f"{path}: holds no text")
    return texts


def text_prompts(named_texts, normalize, reference_audio=None, reference_text=None, system=None,
                 scene=None):
    """[(name, text)] -> Samples: plain, or in the voice of one reference clip with its transcript.
    Raises UserError.

    normalize: of read_prompts. system: of all of them; None: by each text, as in training.
    """
    reference = []
    if reference_audio:
        reference = [{"role": "user", "content": reference_text}] * bool(reference_text)
        reference += [{"role": "assistant",
                       "content": {"type": "audio", "audio_url": reference_audio}}]
    def messages(text):
        said, heard_in = system, scene
        if not system:
            said, heard_in = system_parts(text, scene, references=bool(reference))
        content = said + ("\n\n" + SCENE.format(heard_in) if heard_in else "")
        return [{"role": "system", "content": content}, *reference,
                {"role": "user", "content": text}]

    return prompts_of(named_texts, messages, Path.cwd(), normalize)


def prompts_of(named, messages, base, normalize):
    """Samples of [(name, line)]. messages(line): ChatML's, may raise BadSample. base: folder of the
    audio files. Raises UserError with all that cannot be used.
    """
    paths, samples, problems = Paths(base), [], []
    for name, line in named:
        try:
            entry = {"messages": messages(line)}
            samples.append(canonical_prompt(name, entry, paths, normalize))
        except BadSample as error:
            problems.append(f"{name}: {error}")
    if problems:
        raise UserError(problem_text(problems))
    return samples


def list_prompts(path, normalize):
    """Samples of a meta.lst of BytedanceSpeech/seed-tts-eval: `name|text of the
    voice|voice.wav|text[|truth.wav]` a line; paths are relative to the list. normalize: of
    read_prompts. Raises UserError.
    """
    def messages(line):
        _, *fields = line.split("|")
        if len(fields) not in (3, 4):
            raise BadSample(f"{len(fields) + 1} fields between |, not 4 or 5 as in Seed-TTS-eval's "
                            "meta.lst")
        said, voice, text, *truth = fields
        clip = {"type": "audio", "audio_url": voice}
        answers = [{"role": "assistant", "content": clip | {"audio_url": url}} for url in truth]
        return [{"role": "system", "content": DEFAULT_SYSTEM}, {"role": "user", "content": said},
                {"role": "assistant", "content": clip}, {"role": "user", "content": text}, *answers]

    lines = read_lines(path)
    samples = prompts_of(lines, messages, path.parent, normalize)
    for sample, (_, line) in zip(samples, lines):
        sample.name = line.partition("|")[0]
    return samples


def prepare(samples, tokenizer, ids, codec, bandwidth, room, numbers=None):
    """Samples of canonical_prompt -> Prompts, their clips encoded. codec: as load_codec gives it.

    room: tokens a prompt may have. numbers: which prompts these are, for their names (default: 0, 1, ...). Raises
    UserError with every prompt that is too long or whose audio is bad.
    """
    builder, problems, codes, sounds = TableBuilder(tokenizer, ids), [], {}, set()
    for sample in samples:
        sample.turns[-1].trained = True         # what is to be spoken is what would be trained
    builder.add(samples, problems)
    for what, n in sorted(builder.left_out.items()):
        print(f"notice     {n} prompts {what}")
    users = {}      # clip: the prompts that it is heard in
    for i in range(len(builder)):
        for number in builder.clips_of(i)[:-1]:
            users.setdefault(number, {})[builder.names[i].tobytes().decode()] = True
    for number in sorted(users):
        clip, why = builder.clips[number], ""
        try:
            if holds_codes(clip.path):          # heard as they are, without a way through sound
                codes[number] = read_codes(clip.path)[1].astype(np.int64)
                check_codes(codes[number], clip.offset, ids.num_codebooks, ids.stream_bos)
                continue
            sounds.add(number)
            wave = decode_audio(clip.path, [(clip.offset, clip.duration)])[1][0]
            codes[number] = encode_clip(codec, filled(wave) if clip.filled else wave, bandwidth, ids.num_codebooks)
        except ValueError as error:
            why = str(error)
        except torch.OutOfMemoryError:
            why = f"{len(wave) / SAMPLE_RATE:.0f} s are too long to encode on this device"
        problems += [f"{name}: its audio {clip.path}: {why}" for name in users[number] if why]
    if problems:
        raise UserError(problem_text(problems))
    prompts = []
    for i, (sample, number) in enumerate(zip(samples, numbers or range(len(samples)))):
        clips, tokens = builder.clips_of(i), builder.tokens[i].astype(np.int64)
        tokens = tokens[:np.flatnonzero(tokens == ids.audio_placeholder_id)[-1]]
        row = ids.assemble(tokens, np.zeros(len(tokens), bool), [codes[c] for c in clips[:-1]])
        target, heard, length = builder.clips[clips[-1]], False, None
        try:
            heard = target.path and not holds_codes(target.path)        # saved codes are no recording
            length = clip_seconds(target) if heard else None
        except ValueError as error:
            problems.append(f"{sample.name}: its true recording {target.path} {error}; mend it, or leave it out")
        prompts.append(Prompt(f"{number:04d}", sample.name, spoken_text(sample), row["input_ids"], row["audio_ids"],
                              row["is_audio"],
                              [builder.clips[c] for c in clips[:-1] if c in sounds],
                              target if heard else None, length))
        assert len(row["input_ids"]) >= MIN_TOKENS or not isinstance(ids, TokenIds)
        if len(row["input_ids"]) > room:
            problems.append(f"{sample.name}: {len(row['input_ids'])} tokens; the model's positions have room for "
                            f"{max(0, room)} beside the speech to come: shorten it, or allow fewer seconds of speech")
    if problems:
        raise UserError(problem_text(problems))
    return prompts


def clip_seconds(clip):
    """Length of a Clip from its file's header; raises ValueError with the reason."""
    import soundfile
    try:
        whole = soundfile.info(clip.path).duration
    except (soundfile.SoundFileError, OSError) as error:
        raise ValueError(f"is not readable audio ({str(error).rpartition(': ')[2].strip().rstrip('.')})")
    left = whole - (clip.offset or 0)
    if left <= 0:
        raise ValueError(f"has nothing from {clip.offset} s on: it is {whole:.2f} s long")
    return min(clip.duration or left, left)


def prompt_batch(prompts, ids):
    """Keyword arguments of generate: tokens padded on the left, code rows on the right, int64 on the CPU."""
    width, rows = max(len(p.tokens) for p in prompts), max(len(p.audio_ids) for p in prompts)
    input_ids = np.full((len(prompts), width), ids.pad)
    audio_ids = np.full((len(prompts), rows, ids.num_codebooks), ids.stream_eos)
    for i, p in enumerate(prompts):
        input_ids[i, width - len(p.tokens):] = p.tokens
        audio_ids[i, :len(p.audio_ids)] = p.audio_ids
    tokens, counts = (np.array([len(getattr(p, key)) for p in prompts])[:, None] for key in ("tokens", "audio_ids"))
    batch = {"input_ids": input_ids, "attention_mask": (np.arange(width) >= width - tokens).astype(np.int64)}
    if rows:        # without any clip transformers wants no audio at all
        batch |= {"audio_input_ids": audio_ids, "audio_input_ids_mask": np.arange(rows) < counts}
    return {name: torch.from_numpy(array) for name, array in batch.items()}


# ---------------------------------------------------------------------------------------------------------------------
# Generation


DRAW_FLAGS = ("temperature", "top_k", "top_p", "ras_window", "ras_repeats")


def draws(config, given):
    """{name of DRAW_FLAGS: value}: what is given, else the model's own default. Raises UserError. None is not given."""
    given, own = {name: value for name, value in given.items() if value is not None}, versions.module(config).DRAWS
    require(given.keys() <= own.keys(), "--ras_window and --ras_repeats: not of Higgs TTS 3")
    return {**own, **given}


def sampling(config, max_seconds, **given):
    """Settings for generate(): a GenerationConfig of the native class, or a v3.Sampling.

    max_seconds: of speech. given: of draws. temperature 0: greedy, without the random draws of repetition-aware
    sampling. ras_window, ras_repeats: a code that stands so often among so many before it is drawn again from the
    untempered distribution (0 = off). Raises UserError. Never without an end-of-stream id: generation would not stop.
    """
    how = draws(config, given)
    if versions.is_third(config.model_type):
        return versions.module(config).Sampling(**how, max_new_tokens=max_frames(max_seconds) + config.num_codebooks - 1)
    ras = how["temperature"] and how["ras_window"] and how["ras_repeats"]
    drawn = {"do_sample": True, **{name: how[name] for name in ("temperature", "top_k", "top_p")}} \
        if how["temperature"] else {"do_sample": False}
    return GenerationConfig(**drawn, ras_win_len=how["ras_window"] if ras else None,
                            ras_win_max_num_repeat=how["ras_repeats"] if ras else None,
                            max_new_tokens=max_frames(max_seconds) + config.num_codebooks + 1,
                            eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id)


def max_frames(seconds):
    """Codec frames in so many seconds, at least one."""
    return max(1, round(seconds * FRAME_RATE))


class Deadline(StoppingCriteria):
    """Ends generation at a time.monotonic() moment, or when asked() says so."""

    def __init__(self, moment, asked):
        self.moment, self.asked = moment, asked

    def __call__(self, input_ids, scores, **kwargs):
        done = bool(time.monotonic() > self.moment or self.asked())
        return torch.full((len(input_ids),), done, device=input_ids.device)


@torch.no_grad()
def generate(native, prompts, ids, settings, seed, device, moment=float("inf"), asked=lambda: False):
    """[(codes (T, 8) int64, ended_by "eos" | "length" | "time")] of a batch of Prompts.

    native: the model on the device, adapters inside, in eval mode. settings: from sampling(). The draws depend
    on seed and batch alone, and leave torch's random state as it was. moment, asked: as for Deadline.
    """
    if versions.is_third(native.config.model_type):
        inputs = [(p.tokens, p.is_audio, p.audio_ids) for p in prompts]
        spoken = versions.module(native.config).generate(native, inputs, settings, seed,
                                                         lambda: time.monotonic() > moment or asked())
        # a row cut off early may hold special codes; the servers decode those as code 0, too
        return [(np.where(codes.numpy() < ids.stream_bos, codes.numpy(), 0), how) for codes, how in spoken]
    batch = {name: tensor.to(device) for name, tensor in prompt_batch(prompts, ids).items()}
    before = batch["audio_input_ids"].shape[1] if "audio_input_ids" in batch else 0
    own, native.generation_config = native.generation_config, settings      # else unset values come from the model's
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(seed)
            # synced_gpus would ask every rank at each step, by default whenever FSDP2 is seen
            out = native.generate(**batch, return_dict_in_generate=True, synced_gpus=False,
                                  stopping_criteria=StoppingCriteriaList([Deadline(moment, asked)]))
    finally:
        native.generation_config = own
    rows = out.audio_sequences[:, before:].cpu().numpy()
    spoken = [undelay(row, ids, "length" if len(row) >= settings.max_new_tokens else "time") for row in rows]
    return [(codes[:settings.max_new_tokens - ids.num_codebooks - 1], ended_by) for codes, ended_by in spoken]


def undelay(rows, ids, cut_by):
    """(R, 8) generated rows, the first all begin-of-stream -> (codes (T, 8), "eos" or cut_by).

    The inverse of labels.delay_rows. Codebook 0's end-of-stream decides the length; a stray special id inside becomes
    the nearest code, as in transformers' processor.
    """
    ended = np.flatnonzero((rows == ids.stream_eos).all(axis=1))
    rows = rows[:ended[0]] if len(ended) else rows
    first_end = np.flatnonzero(rows[:, 0] == ids.stream_eos)
    frames = len(rows) - ids.num_codebooks
    frames = max(0, min(frames, first_end[0] - 1) if len(first_end) else frames)
    codes = np.stack([rows[k + 1:k + 1 + frames, k] for k in range(ids.num_codebooks)], axis=1)
    return codes.clip(0, ids.stream_bos - 1), "eos" if len(ended) else cut_by


@torch.no_grad()
def decode(codec, codes):
    """(T, 8) codes -> (960 T,) float32 mono waveform at 24 kHz, numpy."""
    if not len(codes):
        return np.zeros(0, np.float32)
    codes = torch.from_numpy(codes.T.astype(np.int64))[None].to(codec.device)
    return codec.decode(codes).audio_values[0, 0].float().cpu().numpy()


# ---------------------------------------------------------------------------------------------------------------------
# Pictures and files


def log_mel(wave):
    """(80, columns) mel spectrogram in dB of a 24 kHz waveform, a column every 10 ms."""
    wave = np.pad(wave, (0, max(0, MEL_WINDOW - len(wave))))
    filters = mel_filter_bank(MEL_WINDOW // 2 + 1, MEL_BANDS, 0.0, SAMPLE_RATE / 2, SAMPLE_RATE, "slaney", "slaney")
    return spectrogram(wave, window_function(MEL_WINDOW, "hann"), MEL_WINDOW, MEL_HOP, power=2.0, mel_filters=filters,
                       mel_floor=1e-10, log_mel="dB")


def mel_places(hertz):
    """Where a frequency lies on log_mel's axis of bands: band i is drawn from i to i + 1, its peak in the middle."""
    top = hertz_to_mel(SAMPLE_RATE / 2, mel_scale="slaney")
    return [hertz_to_mel(float(f), mel_scale="slaney") / top * (MEL_BANDS + 1) - 0.5 for f in hertz]


def mel_picture(wave, title):
    """(H, W, 3) uint8 picture of a waveform's mel spectrogram, made to be read when it is shown half as large."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    figure = Figure(figsize=(4.4, 2.5), dpi=160, layout="constrained")
    canvas, axes = FigureCanvasAgg(figure), figure.subplots()
    mel = log_mel(wave)
    picture = axes.imshow(mel, origin="lower", aspect="auto", cmap="magma", vmin=mel.max() - 80, vmax=mel.max(),
                          extent=(0, mel.shape[1] * MEL_HOP / SAMPLE_RATE, 0, MEL_BANDS))
    title = UNDRAWN.sub("\N{MIDDLE DOT}", title)
    axes.set(xlabel="seconds", ylabel="Hz", title=title if len(title) <= 60 else title[:57] + "...")
    axes.set_yticks(mel_places(MEL_HERTZ), MEL_HERTZ)
    axes.title.set(fontsize=9, parse_math=False)
    figure.colorbar(picture, label="dB")
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()


def png(picture):
    """(H, W, 3) uint8 -> bytes of a PNG file."""
    import matplotlib.image
    buffer = io.BytesIO()
    matplotlib.image.imsave(buffer, picture, format="png")
    return buffer.getvalue()


def record(prompt, codes, ended_by, seed, real_time_factor):
    """What is to be known about one spoken Prompt, for its JSON file."""
    clip, voice = prompt.target, prompt.references[-1] if prompt.references else None
    return {"name": prompt.name, "text": prompt.text, "source": prompt.source, "seed": seed, "frames": len(codes),
            "seconds": len(codes) / FRAME_RATE, "real_time_factor": real_time_factor, "ended_by": ended_by,
            "reference_audio": voice and voice.path, "reference_offset": voice and voice.offset,
            "reference_seconds": voice and voice.duration,
            "target_audio": clip and clip.path, "target_offset": clip and clip.offset,
            "target_seconds": prompt.target_seconds}


def save_codes(path, codes):
    """Write (T, 8) codes as a .npy file of int16."""
    with open(path, "wb") as f:
        np.save(f, codes.astype(np.int16))


def write_sample(folder, name, wave, picture, about):
    """Write <name>.wav (24 kHz, 16 bit), <name>.png and, when those stand, <name>.json; each appears whole.

    The JSON file has `about` and "clipped": samples beyond full scale, which 16 bits cut off. Raises UserError for a
    waveform that is not finite.
    """
    import soundfile
    folder = Path(folder)
    if not np.isfinite(wave).all():
        raise UserError(f"{folder / name}.wav: the codec has made samples that are not finite numbers")
    about = {**about, "clipped": int((np.abs(wave) > 1).sum())}
    folder.mkdir(parents=True, exist_ok=True)
    sound = io.BytesIO()        # soundfile cannot say that a disk is full
    soundfile.write(sound, wave, SAMPLE_RATE, subtype="PCM_16", format="WAV")
    write_atomically(folder / f"{name}.wav", lambda path: Path(path).write_bytes(sound.getvalue()))
    write_atomically(folder / f"{name}.png", lambda path: Path(path).write_bytes(png(picture)))
    write_atomically(folder / f"{name}.json", lambda path: Path(path).write_text(json.dumps(about, indent=1) + "\n"))
