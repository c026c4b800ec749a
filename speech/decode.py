"""Audio files -> waveforms of clips, and the codec frames that they will give, from their headers alone.

A file's bytes are hashed and decoded piece by piece (soundfile), averaged to mono, cut, and
resampled to 24 kHz (soxr HQ). What is wrong with a file is a ValueError with the reason.
"""
import hashlib
import io
import os

import numpy as np

from speech.choices import LONGEST_CLIP_S
from speech.code_cache import SAMPLE_RATE
from speech.conversations import FILLED_S

AUDIO_FILES = (".wav", ".flac", ".mp3", ".ogg", ".opus", ".oga", ".aiff", ".aif", ".au", ".caf", ".w64", ".rf64")
MIN_SAMPLES = 960               # one codec frame
SAVED = ".npy"                  # codes that generate_tts.py --save_codes wrote: taken as they are, without sound
UNKNOWN = 2**63 - 1             # length of a FLAC file that was written into a pipe, in libsndfile's words
PIECE = 2**20                   # samples of such a file that are read at a time
WHOLE = 0.99                    # of the samples that a header promises: with fewer a file is cut off
PAST_S = 0.3                    # that a cut may reach past the end of its recording
LOUDEST = 10.0                  # peak of a clip; full scale is 1, float files and mp3 may go a little beyond it


def decode_audio(path, cuts):
    """Open a file once -> (sha256 hex of its bytes, [mono float32 waveform at 24 kHz per cut]).

    cuts: [(offset seconds or None, duration seconds or None)]. Raises ValueError with the reason.
    """
    digest, rate, parts = decode_file(path, cuts)
    return digest, [cut_wave(part, rate, *cut) for part, cut in zip(parts, cuts)]


def holds_codes(path):
    """Whether a file is one of saved codes, not of sound, by its first bytes. Raises ValueError with the reason."""
    if path.endswith(AUDIO_FILES):      # opened once, to be decoded; codes of such a name are refused there
        return False
    try:
        with open(path, "rb") as file:
            return file.read(6) == b"\x93NUMPY"
    except OSError as error:
        raise ValueError(f"cannot be read ({error.strerror})")


def read_codes(path):
    """(sha256 hex of a .npy file of generate_tts.py --save_codes, its (T, K) codes). Raises ValueError with the reason."""
    try:
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            file.seek(0)
            codes = np.lib.format.read_array(file, allow_pickle=False)
    except Exception as error:      # numpy has many
        raise ValueError(f"cannot be read ({getattr(error, 'strerror', None) or error})")
    if codes.dtype.kind not in "iu" or codes.ndim != 2:
        raise ValueError("not (frames, codebooks) whole numbers, as --save_codes writes them")
    return digest, codes


def check_codes(codes, offset, num_codebooks, size):
    """Raise ValueError unless these are (T, num_codebooks) codes from 0 to size - 1, at least one, and taken whole."""
    if offset is not None:
        raise ValueError("a part of saved codes cannot be taken: drop offset and duration")
    if codes.shape[1] != num_codebooks:
        raise ValueError(f"has codes of {codes.shape[1]} codebooks, not of {num_codebooks}")
    if not len(codes) or codes.min() < 0 or codes.max() >= size:
        raise ValueError(f"has codes beyond 0 to {size - 1}, or none")


class TooLong(ValueError):
    """A clip that would take too much memory."""


def decode_file(path, cuts):
    """(sha256 hex of a file's bytes, its rate in Hz, [mono float32 samples (n,) of each cut]). Raises ValueError.

    cuts: of decode_audio. The file is decoded piece by piece, so that a recording may last for hours; no more is kept
    of a cut than a little beyond LONGEST_CLIP_S, which cut_wave refuses.
    """
    import soundfile
    try:
        with open(path, "rb") as data:
            digest = hashlib.file_digest(data, "sha256").hexdigest()
            size = data.seek(0, os.SEEK_END)
            if not size:
                raise ValueError("is an empty file")
            share = wav_share(data, size)
            try:
                with soundfile.SoundFile(_said(data)) as file:
                    rate, promised = file.samplerate, file.frames if file.frames < UNKNOWN else 0
                    if all(cut == (None, None) for cut in cuts):
                        check_size(promised, rate, LONGEST_CLIP_S * rate)
                    parts, total = _parts(file, [bounds(*cut, rate) for cut in cuts])
            except TooLong:
                raise
            except Exception as error:
                raise ValueError(unreadable(error, path))
    except OSError as error:
        raise ValueError(f"cannot be read ({error.strerror})")
    promised = max(promised, total * share)
    if total < WHOLE * promised:
        raise ValueError(f"is cut off: its header promises {promised / rate:.2f} s, {total / rate:.2f} s are there")
    return digest, rate, parts


def unreadable(error, path):
    """What is wrong with a file that libsndfile does not read, and what to do. error: its own."""
    why, name = str(error).rpartition(": ")[2].strip().rstrip("."), os.path.basename(path)      # without a buffer's name
    return (f"is not readable audio ({why}); wav, flac, mp3 and ogg are read; convert others: "
            f"ffmpeg -i {name} {os.path.splitext(name)[0]}.flac")


def check_size(samples, rate, limit):
    """Raise TooLong for more samples than a limit."""
    if samples > limit:
        raise TooLong(f"lasts {samples / rate / 60:.1f} minutes, of which at most {limit / rate / 60:.1f} are decoded: "
                      f"cut it into clips of at most {LONGEST_CLIP_S} s")


def _said(file):
    """A binary audio file, or a copy of an MP3, that says how long it is."""
    file.seek(0)
    head = file.read(3)
    file.seek(0)
    if head == b"ID3" or head[:1] == b"\xff":
        from speech import mp3
        if not mp3.says_length(file):
            file.seek(0)
            return io.BytesIO(mp3.with_length(file.read()))
        file.seek(0)
    return file


def _parts(file, wanted):
    """([mono float32 samples (n,) of each range], samples in all) of an open SoundFile, decoded piece by piece."""
    if file.frames == UNKNOWN:
        file.seekable = lambda: False       # soundfile would seek to the end, which cannot be found
    parts, total, size = [[np.empty(0, np.float32)] for _ in wanted], 0, PIECE
    while size == PIECE:
        piece = file.read(PIECE, dtype="float32", always_2d=True)
        size = len(piece)
        with np.errstate(over="ignore", invalid="ignore"):      # what is not finite then, cut_wave refuses
            mono = piece.mean(axis=1)
        for part, (start, stop) in zip(parts, wanted):
            if start < total + size and stop > total:
                part.append(mono[max(0, start - total):stop - total])
        total += size
    return [np.concatenate(part) for part in parts], total


def wav_share(file, size):
    """Size that a wav file gives for its samples, over how much of that is there; 1 for what is whole or not wav."""
    file.seek(0)
    at, found = 12, file.read(4) == b"RIFF"
    while found and at + 8 <= size:
        file.seek(at)
        name, length = file.read(4), int.from_bytes(file.read(4), "little")
        if name == b"data":
            open_end = length >= 0x7FFF0000     # a program that writes into a pipe does not know it
            return 1.0 if open_end else max(1.0, length / max(1, size - at - 8))
        at += 8 + length + length % 2
    return 1.0


def bounds(offset, length, rate):
    """(first sample, one behind the last) of a cut, of which no more is wanted than cut_wave refuses."""
    start, most = round((offset or 0) * rate), LONGEST_CLIP_S * rate + 1
    return start, start + (min(most, round(length * rate)) if length else most)


def check_end(there, offset, length):
    """Raise ValueError for a cut that reaches past the end of its recording. there: seconds of the cut that are in it."""
    if length and there and length - there > PAST_S:
        raise ValueError(f"ends {length - there:.2f} s before the cut from {offset:g} to {offset + length:g} s does: the "
                         "times are of another recording, or not in seconds")


def cut_wave(part, rate, offset, length=None):
    """Waveform at 24 kHz (m,) float32 of one part of decode_file's; ValueError when nobody can be heard in it."""
    import soxr
    check_size(len(part), rate, LONGEST_CLIP_S * rate)
    check_end(len(part) / rate, offset, length)
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


def count_samples(file, info):
    """Samples of an open file; info: soundfile's, which guesses for an MP3 that does not say it, and for a FLAC file of
    UNKNOWN length. Reads all of such a file. Raises OSError and soundfile's errors.
    """
    if info.frames < UNKNOWN and info.format != "MP3":
        return info.frames
    import soundfile
    with soundfile.SoundFile(_said(file)) as audio:
        return audio.frames if audio.frames < UNKNOWN else _parts(audio, [])[1]


def header_frames(path, cuts, config, num_codebooks):
    """Codec frames of each cut (offset, duration, filled) of a file, from its header alone -> [int].

    Raises ValueError with the reason. A file damaged behind its header is only found when it is decoded.
    """
    if holds_codes(path):
        codes = read_codes(path)[1]
        for offset, *_ in cuts:
            check_codes(codes, offset, num_codebooks, config.codebook_size)
        return [len(codes)] * len(cuts)
    import soundfile
    try:
        if not os.path.getsize(path):
            raise ValueError("is an empty file")
        with open(path, "rb") as file:
            info = soundfile.info(file)
            frames = count_samples(file, info)
    except OSError as error:
        raise ValueError(f"cannot be read ({error.strerror})")
    except soundfile.SoundFileError as error:
        raise ValueError(unreadable(error, path))
    found = []
    for offset, length, fill in cuts:
        start = round((offset or 0) * info.samplerate)
        stop = min(frames, start + round(length * info.samplerate)) if length else frames
        samples = wave_samples(max(0, stop - start), info.samplerate)
        check_size(samples, SAMPLE_RATE, LONGEST_CLIP_S * SAMPLE_RATE)
        check_end(samples / SAMPLE_RATE, offset, length)
        check_length(samples, offset)
        found.append(codec_frames(max(samples, round(FILLED_S * SAMPLE_RATE)) if fill else samples, config))
    return found
