"""Audio files and pitch: plain functions on numpy arrays, no trained model (scores.py has those).

Waves are (n,) float32 mono at RATE. Frames are 10 ms apart and centred.
"""
import numpy as np

from core.cli import UserError

RATE = 24000                    # Hz
HOP = RATE // 100               # samples between frames
LOW_HZ, HIGH_HZ = 60, 500       # where pitch is looked for
VOICE_HZ = 2000                 # pitch sees nothing above: hiss would look like the highest pitch


def read_audio(path, offset=None, seconds=None):
    """(n,) float32 mono at RATE: the file, or of it so many seconds from offset on (None: all).

    UserError names the file.
    """
    import soundfile
    try:
        wave, rate = soundfile.read(path, dtype="float32", always_2d=True)
    except (OSError, RuntimeError) as error:        # soundfile's own errors are RuntimeErrors
        raise UserError(f"{path}: cannot be read as audio ({error}); generate it again or take it out")
    if not np.isfinite(wave).all():
        raise UserError(f"{path}: has samples that are not numbers; generate it again or take it out")
    if offset is not None:
        end = None if seconds is None else round((offset + seconds) * rate)
        wave = wave[round(offset * rate):end]
    return resample(wave.mean(axis=1), rate, RATE)


def resample(wave, rate, wanted):
    """(n,) at `rate` Hz -> (about n * wanted / rate,) at `wanted` Hz."""
    if rate == wanted or not len(wave):
        return wave
    import soxr
    return soxr.resample(wave, rate, wanted, quality="HQ")


# ---------------------------------------------------------------------------------------------------------------------
# Pitch


def frames(wave, size):
    """(n,) -> (1 + n // HOP, size): stretches of `size` samples centred on every HOP-th sample, zeros outside."""
    padded = np.pad(wave, (size // 2, size - size // 2))
    return np.lib.stride_tricks.sliding_window_view(padded, size)[::HOP][:1 + len(wave) // HOP]


def pitch(wave):
    """(n,) -> (T,) fundamental frequency in Hz, 0 where unvoiced.

    Peak of the autocorrelation divided by the window's own, with the thresholds of Boersma, "Accurate short-term
    analysis of the fundamental frequency", 1993: voiced from 0.45 on, silent below 0.03 of the loudest frame, 0.01 per
    octave in favour of higher pitch. Frames are judged one by one: no path through them is sought.
    """
    size = 3 * RATE // LOW_HZ
    cut = frames(wave, size)
    cut = cut - cut.mean(axis=1, keepdims=True)
    lags = np.arange(RATE // HIGH_HZ, RATE // LOW_HZ + 1)
    window = np.hanning(size)
    own = autocorrelation(window[None])[0]
    r = autocorrelation(cut * window)
    loud = r[:, 0] > 0.03 ** 2 * r[:, 0].max()
    r = r / np.maximum(r[:, :1], 1e-20) / (own / own[0])
    near = r[:, lags[0] - 1:lags[-1] + 2]
    left, middle, right = near[:, :-2], near[:, 1:-1], near[:, 2:]
    peak = (middle >= left) & (middle > right)
    bend = np.where(peak, left - 2 * middle + right, -1)
    shift = np.where(peak, 0.5 * (left - right) / bend, 0)      # of the parabola through three points
    height = np.where(peak, middle - 0.25 * (left - right) * shift, 0)
    height = np.minimum(height, 1 / np.maximum(height, 1))     # above 1 is an error of the interpolation: turned back
    best = np.argmax(height - 0.01 * np.log2(lags * LOW_HZ / RATE), axis=1)
    rows = np.arange(len(cut))
    voiced = loud & (height[rows, best] >= 0.45)
    return np.where(voiced, RATE / (lags[best] + shift[rows, best]), 0.0)


def autocorrelation(rows):
    """(T, n) -> (T, n // 2) autocorrelations at lags 0.., by FFT, of what lies below VOICE_HZ."""
    size = 2 ** (2 * rows.shape[1] - 1).bit_length()
    power = np.abs(np.fft.rfft(rows, size, axis=1)) ** 2
    power[:, np.fft.rfftfreq(size, 1 / RATE) > VOICE_HZ] = 0
    return np.fft.irfft(power, axis=1)[:, :rows.shape[1] // 2]
