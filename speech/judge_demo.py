"""The demo's sentences, and its verdict: has the model the new voice, and is it understood?

    python speech/judge_demo.py draw 240 --seed 42 >sentences.txt
    python speech/judge_demo.py judge BEFORE AFTER

draw prints digit sentences that are in no text of launch/voice, neither training nor held out.
BEFORE and AFTER hold what generate_tts.py --save_codes made of them, by the base and by the
adapter. In this codec one constant, codebook 3, is the voice. So the base is judged as it speaks and
with that constant set to the new voice's, which shows what it takes no training to reach. Exit
status 0 only if each holds, of AFTER:

    word errors     pocketsphinx, with a grammar that knows digits alone, mistakes at most MAX_WER
                    of the words, and fewer than in the base with the new voice's code: the 95 %
                    interval of that gain lies above 0. It mistakes at most MAX_ORIGINAL_WER in the
                    recordings of the held-out sentences, and at least MIN_SHUFFLED_WER against
                    other clips' texts: the text decides what is said
    pitch           MIN_PITCH of the clips are nearer to the new voice's pitch than to the old one's
    pace            seconds per word are nearer to the new voice's: no constant changes them
    endings         all clips end by end-of-stream
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))    # core/ is there

from core import cli

ROOT = Path(__file__).resolve().parent.parent


def build_parser():
    p = cli.Parser("Draw the demo's sentences, or judge what was spoken of them.")
    p.usage = "%(prog)s draw COUNT | judge BEFORE AFTER [--flag value ...]"
    p.add_argument("command", choices=("draw", "judge"))
    p.add_argument("values", nargs="+", metavar="VALUE", help="COUNT, or BEFORE and AFTER")
    p.flag("--seed", 42, "of draw")
    p.flag("--voice_dir", str(ROOT / "launch" / "voice"), "both voices (default: launch/voice)")
    return p


def check_flags(args, world_size):
    wanted = 1 if args.command == "draw" else 2
    cli.require(len(args.values) == wanted and (wanted == 2 or args.values[0].isdigit()),
                "give draw COUNT, or judge BEFORE AFTER")


# parsed before torch is imported: --help and a mistake in a flag answer at once
args = cli.parse(build_parser(), check_flags) if __name__ == "__main__" else None

import json
import random

import numpy as np

DIGITS = "zero one two three four five six seven eight nine".split()
GRAMMAR = f"#JSGF V1.0; grammar digits; public <sentence> = ({' | '.join(DIGITS)})+;"
LENGTHS = 3, 4, 4, 5        # words of a sentence, as those held out when the voice was made
RATE = 24000                # Hz
HOP = RATE // 100           # samples between frames of pitch
VOICE_BOOK, NEW_VOICE = 3, 1    # the codebook that is the voice, and its code for the new one
LOW_HZ, HIGH_HZ = 60, 500   # where pitch is looked for
VOICE_HZ = 2000     # pitch sees nothing above: hiss would look like the highest pitch
HUM_HZ = 80         # no pitch below, but at 75 Hz the hum of the codec's first upsampling step
SHIFT = 7       # how far texts are moved along the clips for the shuffled comparison
DRAWS = 2000    # of the sentences with replacement, for intervals
MAX_WER, MAX_ORIGINAL_WER = 0.2, 0.04       # of the adapter, in recordings
MIN_SHUFFLED_WER = 0.7                      # against other texts
MIN_PITCH = 0.9                             # share of clips nearer to the new voice's pitch


def draw(count, seed, known):
    """[digits]: `count` different ones of LENGTHS digits, none of them in `known`."""
    rng, found = random.Random(seed), {}
    while len(found) < count:
        digits = "".join(rng.choices("0123456789", k=rng.choice(LENGTHS)))
        if digits not in known:
            found[digits] = None
    return list(found)


# --------------------------------------------------------------------------------------------------
# Pitch


def pitch(wave):
    """(n,) at RATE -> (T,) fundamental frequency in Hz every 10 ms, 0 where unvoiced.

    Peak of the autocorrelation divided by the window's own, with the thresholds of Boersma,
    "Accurate short-term analysis of the fundamental frequency", 1993: voiced from 0.45 on, silent
    below 0.03 of the loudest frame, 0.01 per octave in favour of higher pitch.
    """
    size = 3 * RATE // LOW_HZ
    padded = np.pad(wave, (size // 2, size - size // 2))
    cut = np.lib.stride_tricks.sliding_window_view(padded, size)[::HOP][:1 + len(wave) // HOP]
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
    shift = np.where(peak, 0.5 * (left - right) / bend, 0)  # of the parabola through three points
    height = np.where(peak, middle - 0.25 * (left - right) * shift, 0)
    # above 1 is an error of the interpolation: turned back
    height = np.minimum(height, 1 / np.maximum(height, 1))
    best = np.argmax(height - 0.01 * np.log2(lags * LOW_HZ / RATE), axis=1)
    rows = np.arange(len(cut))
    voiced = loud & (height[rows, best] >= 0.45)
    return np.where(voiced, RATE / (lags[best] + shift[rows, best]), 0.0)


def autocorrelation(rows):
    """(T, n) -> (T, n // 2) autocorrelations at lags 0.., by FFT, of what is below VOICE_HZ."""
    size = 2 ** (2 * rows.shape[1] - 1).bit_length()
    power = np.abs(np.fft.rfft(rows, size, axis=1)) ** 2
    power[:, np.fft.rfftfreq(size, 1 / RATE) > VOICE_HZ] = 0
    return np.fft.irfft(power, axis=1)[:, :rows.shape[1] // 2]


def median_pitch(wave):
    """Hz, of the voiced frames; HUM_HZ where there are none."""
    found = pitch(wave) if len(wave) else np.zeros(0)
    found = found[found > HUM_HZ]
    return float(np.median(found)) if len(found) else float(HUM_HZ)


def measure_voice(texts, waves):
    """{"pitch": [Hz of each clip], "pace": seconds per word} of clips and their texts."""
    words = sum(len(text.split()) for text in texts)
    return {"pitch": [median_pitch(wave) for wave in waves],
            "pace": sum(map(len, waves)) / RATE / words}


def nearer(value, new, old):
    """True where `value` is nearer to `new` than to `old`, in octaves."""
    return abs(np.log2(value / new)) < abs(np.log2(value / old))


# --------------------------------------------------------------------------------------------------
# Files


def read_spoken(folder):
    """([text], [wave], [(T, 8) codes], [ended_by]) of what generate_tts.py wrote. UserError."""
    from speech.judges import read_audio
    texts, waves, codes, ends = [], [], [], []
    for path in sorted(path for path in Path(folder).glob("*.json") if path.stem.isdigit()):
        cli.require(path.with_suffix(".npy").exists(),
                    f"{path.with_suffix('.npy')}: is missing; speak with --save_codes")
        about = json.loads(path.read_text())
        texts.append(about["text"].strip(". "))
        ends.append(about["ended_by"])
        waves.append(read_audio(path.with_suffix(".wav")))
        codes.append(np.load(path.with_suffix(".npy")))
    cli.require(texts, f"{folder}: holds no speech; generate_tts.py writes it")
    return texts, waves, codes, ends


def read_originals(path):
    """{text: wave} of a ChatML file of launch/voice."""
    from speech.judges import read_audio
    found, files = {}, {}       # read whole: a seek in ogg decodes all before
    for sample in json.loads(Path(path).read_text()):
        _, user, assistant = sample["messages"]
        clip = assistant["content"]
        file = clip["audio_url"]
        if file not in files:
            files[file] = read_audio(Path(path).parent / file)
        first, length = (round(clip[key] * RATE) for key in ("offset", "duration"))
        found[user["content"]] = files[file][first:first + length]
    return found


# --------------------------------------------------------------------------------------------------
# Judging


def judge(texts, waves, ends, new, old):
    """{measure: value} of what one model spoke; new, old: of measure_voice."""
    from speech import judges
    heard = judges.recognise_pocketsphinx(waves, RATE, GRAMMAR)
    errors = [judges.word_errors([text], [said])[0] for text, said in zip(texts, heard)]
    shuffled, words = judges.word_errors(texts[SHIFT:] + texts[:SHIFT], heard)
    own = measure_voice(texts, waves)
    pitches = [nearer(hertz, np.median(new["pitch"]), np.median(old["pitch"]))
               for hertz in own["pitch"]]
    return {"wer": sum(errors) / words, "shuffled_wer": shuffled / words, "errors": errors,
            "pitch": float(np.median(own["pitch"])), "nearer_pitch": float(np.mean(pitches)),
            "pace": own["pace"], "stop_rate": ends.count("eos") / len(ends),
            "sentences": len(texts), "words": words}


def interval(texts, errors):
    """95 % interval of errors per word when the sentences are drawn again: (low, high)."""
    words, errors = np.array([len(text.split()) for text in texts]), np.array(errors)
    drawn = np.random.default_rng(0).integers(len(words), size=(DRAWS, len(words)))
    rates = errors[drawn].sum(1) / words[drawn].sum(1)
    return tuple(np.percentile(rates, [2.5, 97.5]).tolist())


def judge_all(voice_dir, spoken):
    """([recordings of the new, of the old voice], [base, base in the new voice, adapter]).

    spoken: read_spoken of the base and of the adapter. Raises UserError.
    """
    import torch

    from speech import speak
    from speech.encode import load_codec
    (texts, waves, codes, ends), (texts_after, waves_after, _, ends_after) = spoken
    cli.require(texts == texts_after,
                "BEFORE and AFTER do not say the same sentences; speak both from one list")
    known = {sample["messages"][1]["content"] for name in ("train", "held")
             for sample in json.loads((voice_dir / f"{name}.json").read_text())}
    trained = known & set(texts)
    cli.require(not trained, f"{min(trained, default='')!r} is a sentence of {voice_dir}: judge by "
                "those of judge_demo.py draw")
    originals = [read_originals(voice_dir / f"{name}.json") for name in ("held", "held_base")]
    new, old = (measure_voice(list(of), list(of.values())) for of in originals)
    codec, _ = load_codec(voice_dir / "codec", torch.device("cpu"), codes[0].shape[1])
    changed = [clip.copy() for clip in codes]
    for clip in changed:        # the base with the new voice's code in every frame
        clip[:, VOICE_BOOK] = NEW_VOICE
    in_new_voice = [speak.decode(codec, clip) for clip in changed]
    recordings = [judge(list(of), list(of.values()), ["eos"] * len(of), new, old)
                  for of in originals]
    speakers = ((waves, ends), (in_new_voice, ends), (waves_after, ends_after))
    return recordings, [judge(texts, said, how, new, old) for said, how in speakers]


def gates(recordings, found, gain):
    """[(what, format, [recordings, base, base in the new voice, adapter], passed, gate)].

    gain: interval() of the errors that the adapter saves against the base in the new voice.
    """
    new, old = recordings
    before, control, after = found

    def row(what, form, name, passed, gate):
        return what, form, [of[name] if of else None for of in (new, *found)], passed, gate
    original = max(new["wer"], old["wer"])
    return [
        row("word errors", ".1%", "wer", after["wer"] <= MAX_WER, f"at most {MAX_WER:.0%}"),
        ("fewer than the base in the new voice", ".1%",
         [None, None, None, control["wer"] - after["wer"]], gain[0] > 0,
         f"95 % interval {gain[0]:.1%} to {gain[1]:.1%}, to be above 0"),
        ("word errors, recordings of both voices", ".1%", [original, None, None, None],
         original <= MAX_ORIGINAL_WER, f"at most {MAX_ORIGINAL_WER:.0%}"),
        row("word errors against other texts", ".1%", "shuffled_wer",
            after["shuffled_wer"] >= MIN_SHUFFLED_WER, f"at least {MIN_SHUFFLED_WER:.0%}"),
        row("pitch (Hz)", ".0f", "pitch", True, f"old voice {old['pitch']:.0f}"),
        row("nearer to the new voice's pitch", ".1%", "nearer_pitch",
            after["nearer_pitch"] >= MIN_PITCH, f"at least {MIN_PITCH:.0%}"),
        row("seconds a word", ".3f", "pace", nearer(after["pace"], new["pace"], old["pace"]),
            f"nearer to {new['pace']:.3f} than to {old['pace']:.3f}, the old voice's"),
        row("ended by end-of-stream", ".1%", "stop_rate", after["stop_rate"] == 1, "all")]


def main():
    voice_dir = Path(args.voice_dir)
    if args.command == "draw":
        texts = json.loads((voice_dir / "texts.json").read_text()).values()
        for digits in draw(int(args.values[0]), args.seed, {text for of in texts for text in of}):
            print(" ".join(DIGITS[int(digit)] for digit in digits) + ".")
        return
    from core import checkpoint, dist, metrics
    dist.single_process()
    cli.require_package("pocketsphinx", "the recogniser")
    spoken = [read_spoken(folder) for folder in args.values]
    recordings, found = judge_all(voice_dir, spoken)
    before, control, after = found
    texts = spoken[0][0]
    low, high = interval(texts, after["errors"])
    gain = interval(texts, np.array(control["errors"]) - after["errors"])
    print(f"{after['sentences']} sentences, {after['words']} words, in no training text; heard by "
          'pocketsphinx. "same, code": the base with the new voice\'s code, untrained')
    print(f"{'':40}" + "".join(f"{head:>12}" for head in ("recordings", "base", "same, code",
                                                          "adapter")))
    failed = []
    for what, form, values, passed, gate in gates(recordings, found, gain):
        shown = "".join(f"{'' if value is None else format(value, form):>12}" for value in values)
        print(f"{what:<40}{shown}   {gate}" + ("" if passed else "  <- FAILED"))
        failed += [what] * (not passed)
    clauses = [f"FAILED: {', '.join(failed)}"] if failed else []
    clauses += [f"{metrics.understood(after['wer'])}, 95 % between {low:.1%} and {high:.1%}",
                f"{metrics.percent(after['nearer_pitch'])} of {after['sentences']} clips have the "
                "new voice's pitch", f"{metrics.percent(after['stop_rate'])} ended by themselves"]
    for folder, of in zip(args.values, (before, after)):
        about = {"name": Path(folder).name, "settings": {"recogniser": "pocketsphinx"},
                 "metrics": {name: value for name, value in of.items() if name != "errors"}}
        about |= {"verdict": "; ".join(clauses)} if of is after else {}
        checkpoint.write_json(Path(folder) / "evaluation.json", about)
    print(metrics.verdict_line(clauses))
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
