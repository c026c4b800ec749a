"""Audio files -> waveforms of clips, and the codec frames that they will give, from their headers alone.

A file is opened once: its bytes are hashed and decoded from memory (soundfile), averaged to mono, cut, and resampled to
24 kHz (soxr HQ). What is wrong with a file is a ValueError with the reason.
"""
import hashlib
import io
import os

import numpy as np

from speech.choices import LONGEST_CLIP_S
from speech.data.code_cache import SAMPLE_RATE
from speech.data.conversations import FILLED_S, file_of

MIN_SAMPLES = 960               # one codec frame
UNKNOWN = 2**63 - 1             # length of a FLAC file that was written into a pipe, in libsndfile's words
PIECE = 2**20                   # samples of such a file that are read at a time
LONGEST_FILE = 500_000_000      # samples, 2 GB as float32: 2.9 h at 48 kHz, of which clips may be cut
WHOLE = 0.99                    # of the samples that a header promises: with fewer a file is cut off
LOUDEST = 10.0                  # peak of a clip; full scale is 1, float files and mp3 may go a little beyond it


def decode_audio(path, cuts):
    """Open a file once -> (sha256 hex of its bytes, [mono float32 waveform at 24 kHz per cut]).

    cuts: [(offset seconds or None, duration seconds or None)]. Raises ValueError with the reason.
    """
    digest, mono, rate = decode_file(path, all(cut == (None, None) for cut in cuts))
    return digest, [cut_wave(mono, rate, *cut) for cut in cuts]


def read_bytes(path):
    """The bytes of an audio file, wherever it lies. Raises OSError and ValueError."""
    if file_of(path) != os.fspath(path):
        from speech.data import containers
        return containers.read_bytes(path)
    with open(path, "rb") as file:
        return file.read()


class TooLong(ValueError):
    """A file, or a clip, that would take too much memory."""


def decode_file(path, one_clip=False):
    """A whole file -> (sha256 hex of its bytes, mono float32 waveform (n,), its rate in Hz). Raises ValueError.

    one_clip: the whole file is the only clip wanted of it, so that it may not be longer than one.
    """
    import soundfile
    try:
        data = read_bytes(path)
    except OSError as error:
        raise ValueError(f"cannot be read ({error.strerror})")
    if not data:
        raise ValueError("is an empty file")
    try:
        with soundfile.SoundFile(_said(data)) as file:
            rate, promised = file.samplerate, file.frames if file.frames < UNKNOWN else 0
            limit = min(LONGEST_FILE, LONGEST_CLIP_S * rate if one_clip else LONGEST_FILE)
            check_size(promised, rate, limit)
            mono = _mono(file, limit)
    except TooLong:
        raise
    except Exception as error:
        why = str(error).rpartition(": ")[2].strip().rstrip(".")        # without the name of a buffer in memory
        raise ValueError(f"is not readable audio ({why}); wav, flac, mp3 and ogg are read")
    promised = max(promised, len(mono) * wav_share(data))
    if len(mono) < WHOLE * promised:
        raise ValueError(f"is cut off: its header promises {promised / rate:.2f} s, {len(mono) / rate:.2f} s are there")
    return hashlib.sha256(data).hexdigest(), mono, rate


def check_size(samples, rate, limit):
    """Raise TooLong for more samples than a limit."""
    if samples > limit:
        raise TooLong(f"lasts {samples / rate / 60:.1f} minutes, of which at most {limit / rate / 60:.1f} are decoded: "
                      f"cut it into clips of at most {LONGEST_CLIP_S} s")


def _said(data):
    """A binary file of the bytes of an audio file, which says how long it is."""
    file = io.BytesIO(data)
    from speech.data import mp3
    known = not (data[:3] == b"ID3" or data[:1] == b"\xff") or mp3.says_length(file)
    return io.BytesIO(data if known else mp3.with_length(data))


def _mono(file, limit):
    """The mean (n,) float32 of the channels of an open SoundFile, of which no more than a piece is held at a time.

    Raises TooLong for more than `limit` samples.
    """
    if file.frames == UNKNOWN:
        file.seekable = lambda: False       # soundfile would seek to the end, which cannot be found
    parts, total, size = [], 0, PIECE
    while size == PIECE:
        piece = file.read(PIECE, dtype="float32", always_2d=True)
        with np.errstate(over="ignore", invalid="ignore"):      # what is not finite then, cut_wave refuses
            parts.append(piece.mean(axis=1))
        size, total = len(piece), total + len(piece)
        check_size(total, file.samplerate, limit)
    return np.concatenate(parts)


def wav_share(data):
    """Size that a wav file gives for its samples, over how much of that is there; 1 for what is whole or no wav."""
    at = 12
    while data[:4] == b"RIFF" and at + 8 <= len(data):
        size = int.from_bytes(data[at + 4:at + 8], "little")
        if data[at:at + 4] == b"data":
            open_end = size >= 0x7FFF0000       # a program that writes into a pipe does not know it
            return 1.0 if open_end else max(1.0, size / max(1, len(data) - at - 8))
        at += 8 + size + size % 2
    return 1.0


def part_of(mono, rate, offset, length):
    """The samples of one cut of decode_file's."""
    start = round((offset or 0) * rate)
    return mono[start:start + round(length * rate)] if length else mono[start:]


def cut_wave(mono, rate, offset, length):
    """Waveform at 24 kHz (m,) float32 of one cut of decode_file's; ValueError when nobody can be heard in it."""
    import soxr
    part = part_of(mono, rate, offset, length)
    check_size(len(part), rate, LONGEST_CLIP_S * rate)
    where = f" from offset {offset} s" if offset else ""
    if not np.isfinite(part).all():
        raise ValueError(f"contains samples that are not finite numbers{where}")
    low, high = (float(part.min()), float(part.max())) if len(part) else (0.0, 0.0)
    if max(-low, high) > LOUDEST:
        raise ValueError(f"peaks at {max(-low, high):.3g}{where}; full scale is 1, so its samples have another scale")
    wave = soxr.resample(part, rate, SAMPLE_RATE, quality="HQ") if len(part) else part
    check_length(len(wave), offset)
    if low == high:
        raise ValueError(f"is silent: every sample{where} is {low:g}")
    return np.ascontiguousarray(wave, np.float32)


def filled(wave):
    """A waveform at 24 kHz with zeros behind it up to FILLED_S seconds; itself where it is as long."""
    return np.pad(wave, (0, max(0, round(FILLED_S * SAMPLE_RATE) - len(wave))))


def check_length(samples, offset):
    """Raise ValueError unless a cut has enough samples at 24 kHz for one codec frame."""
    if samples < MIN_SAMPLES:
        where = f" from offset {offset} s" if offset else ""
        raise ValueError(f"is too short: {samples / SAMPLE_RATE:.3f} s{where}; "
                         f"a clip needs {MIN_SAMPLES / SAMPLE_RATE} s")


# ---------------------------------------------------------------------------------------------------------------------
# Lengths from headers


def wave_samples(frames, rate):
    """Samples at 24 kHz that soxr makes of `frames` samples at `rate` Hz: the exact length, rounded half up."""
    return (2 * frames * SAMPLE_RATE + rate) // (2 * rate)


def codec_frames(samples, config):
    """Codec frames of a waveform of `samples` at 24 kHz; config: of codec_config.

    The semantic branch decides and the acoustic one is padded to fit: 24 -> 16 kHz, 160 zeros at both ends, HuBERT's
    unpadded convolutions, then every semantic_downsample_factor-th vector (transformers' encode).
    """
    n = -(-samples * config.semantic_sample_rate // config.sample_rate) + 2 * 160
    for kernel, stride in zip(config.semantic_model_config.conv_kernel, config.semantic_model_config.conv_stride):
        n = (n - kernel) // stride + 1
    return -(-n // config.semantic_downsample_factor)


def count_samples(path, said):
    """Samples of an MP3, or of a FLAC file of UNKNOWN length; said: by soundfile, for an MP3 a guess where it has none.

    Reads all of a file that does not say how long it is. Raises OSError and soundfile's errors.
    """
    import soundfile

    from speech.data import mp3
    if said < UNKNOWN and file_of(path) == str(path):
        with open(path, "rb") as file:
            if mp3.says_length(file):
                return said
    with soundfile.SoundFile(_said(read_bytes(path))) as file:
        return file.frames if file.frames < UNKNOWN else len(_mono(file, LONGEST_FILE))


def header_frames(path, cuts, config):
    """Codec frames of each cut (offset, duration, filled) of a file, from its header alone -> [int].

    Raises ValueError with the reason. A file damaged behind its header is only found when it is decoded.
    """
    import soundfile
    try:
        if not os.path.getsize(file_of(path)):
            raise ValueError("is an empty file")
        info = soundfile.info(path if file_of(path) == str(path) else io.BytesIO(read_bytes(path)))
        frames = info.frames
        if frames == UNKNOWN or info.format == "MP3":
            frames = count_samples(path, frames)
        check_size(frames, info.samplerate, LONGEST_FILE)
    except OSError as error:
        raise ValueError(f"cannot be read ({error.strerror})")
    except soundfile.SoundFileError as error:
        why = str(error).rpartition(": ")[2].strip().rstrip(".")
        raise ValueError(f"is not readable audio ({why}); wav, flac, mp3 and ogg are read")
    found = []
    for offset, length, fill in cuts:
        start = round((offset or 0) * info.samplerate)
        stop = min(frames, start + round(length * info.samplerate)) if length else frames
        samples = wave_samples(max(0, stop - start), info.samplerate)
        check_size(samples, SAMPLE_RATE, LONGEST_CLIP_S * SAMPLE_RATE)
        check_length(samples, offset)
        found.append(codec_frames(max(samples, round(FILLED_S * SAMPLE_RATE)) if fill else samples, config))
    return found
