"""Judges what launch/voice learns: has it the new voice, and is it understood? Exit status 0 only if so.

    python speech/judge_demo.py BEFORE AFTER --voice_dir launch/voice

BEFORE and AFTER hold what generate_tts.py --save_codes made of the same sentences, drawn anew by draw_sentences.py.
In this codec one constant, codebook 3, is the voice. So the base is judged as it speaks and with that constant set to
the new voice's, which shows what it takes no training to reach. Each must pass, of AFTER:

    word errors     pocketsphinx, with a grammar that knows digits alone, mistakes at most MAX_WER of the words, and
                    fewer than in the base with the new voice's code; the interval of the difference is printed. It
                    mistakes at most MAX_ORIGINAL_WER in flite's recordings of the held-out sentences; and at least
                    MIN_SHUFFLED_WER against other clips' texts, to show that the text decides what is said
    pitch           MIN_PITCH of the clips are nearer to the new voice's pitch than to the old one's
    pace            seconds a word are nearer to the new voice's than to the old one's: no constant changes them
    endings         all clips end by end-of-stream
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))    # core/ is there

from core import cli
from core.cli import UserError


def build_parser():
    p = cli.Parser(__doc__.partition("\n")[0])
    p.usage = "%(prog)s BEFORE AFTER [--flag value ...]"
    p.add_argument("before", metavar="BEFORE", help="what the base spoke")
    p.add_argument("after", metavar="AFTER", help="what the adapter spoke")
    p.add_argument("--voice_dir", default="launch/voice", help="both voices, as launch/voice has them")
    return p


# parsed before torch is imported: --help and a mistake in a flag answer at once
ARGS = cli.parse(build_parser()) if __name__ == "__main__" else None

import json

import numpy as np
import torch

from core import dist, metrics
from core.checkpoint import write_json
from speech.encode import load_codec
from speech import generate, scores, speech_metrics
from speech.speech_metrics import RATE

DIGITS = "zero one two three four five six seven eight nine".split()
GRAMMAR = f"#JSGF V1.0; grammar digits; public <sentence> = ({' | '.join(DIGITS)})+;"
VOICE_BOOK, NEW_VOICE = 3, 1    # the codebook that is the voice, and its code for the new one
LOW_HZ = 80     # below is no pitch of these voices, but at 75 Hz a hum of the small codec: its first upsampling step
SHIFT = 7       # how far texts are moved along the clips for the shuffled comparison
DRAWS = 2000    # of the sentences with replacement, for intervals
MAX_WER, MAX_ORIGINAL_WER = 0.2, 0.04       # shares of words mistaken: of the adapter, in recordings
MIN_SHUFFLED_WER = 0.7                      # against other texts
MIN_PITCH = 0.9                             # share of clips nearer to the new voice's pitch


def read_spoken(folder):
    """([text], [wave], [(T, 8) codes], [ended_by]) of what generate_tts.py wrote, in order. Raises UserError."""
    texts, waves, codes, ends = [], [], [], []
    for path in sorted(path for path in Path(folder).glob("*.json") if path.stem.isdigit()):
        if not path.with_suffix(".npy").exists():
            raise UserError(f"{path.with_suffix('.npy')}: is missing; speak with --save_codes")
        about = json.loads(path.read_text())
        texts.append(about["text"].strip(". "))
        ends.append(about["ended_by"])
        waves.append(speech_metrics.read_audio(path.with_suffix(".wav")))
        codes.append(np.load(path.with_suffix(".npy")))
    if not texts:
        raise UserError(f"{folder}: holds no speech; generate_tts.py writes it")
    return texts, waves, codes, ends


def read_originals(path):
    """{text: wave} of a ChatML file of launch/voice."""
    found, files = {}, {}       # read whole: a seek in ogg decodes all before
    for sample in json.loads(Path(path).read_text()):
        _, user, assistant = sample["messages"]
        clip = assistant["content"]
        file = clip["audio_url"]
        if file not in files:
            files[file] = speech_metrics.read_audio(Path(path).parent / file)
        first, length = (round(clip[key] * RATE) for key in ("offset", "duration"))
        found[user["content"]] = files[file][first:first + length]
    return found


def in_new_voice(codes, codec):
    """[(T, 8) codes] -> [wave]: what they sound like with the new voice's code in every frame."""
    changed = [clip.copy() for clip in codes]
    for clip in changed:
        clip[:, VOICE_BOOK] = NEW_VOICE
    return [generate.decode(codec, clip) for clip in changed]


def median_pitch(wave):
    """Hz, of the voiced frames; LOW_HZ where there are none."""
    found = speech_metrics.pitch(wave) if len(wave) else np.zeros(0)
    found = found[found > LOW_HZ]
    return float(np.median(found)) if len(found) else float(LOW_HZ)


def measure_voice(texts, waves):
    """{"pitch": [Hz of each clip], "pace": seconds a word} of clips and their texts."""
    words = sum(len(text.split()) for text in texts)
    return {"pitch": [median_pitch(wave) for wave in waves], "pace": sum(map(len, waves)) / RATE / words}


def nearer(value, new, old):
    """True where `value` is nearer to `new` than to `old`, in octaves."""
    return abs(np.log2(value / new)) < abs(np.log2(value / old))


def judge(texts, waves, ends, new, old):
    """{measure: value} of what one model spoke; new, old: of measure_voice. "errors": [of each text]."""
    heard = scores.recognise_pocketsphinx(waves, RATE, GRAMMAR)
    errors = [scores.word_errors([text], [said])[0] for text, said in zip(texts, heard)]
    shuffled, words = scores.word_errors(texts[SHIFT:] + texts[:SHIFT], heard)
    own = measure_voice(texts, waves)
    pitches = [nearer(hertz, np.median(new["pitch"]), np.median(old["pitch"])) for hertz in own["pitch"]]
    return {"wer": sum(errors) / words, "shuffled_wer": shuffled / words, "errors": errors,
            "pitch": float(np.median(own["pitch"])), "nearer_pitch": float(np.mean(pitches)),
            "pace": own["pace"], "stop_rate": ends.count("eos") / len(ends), "sentences": len(texts), "words": words}


def interval(texts, errors):
    """95 % of the values that errors per word take when the sentences are drawn again: (low, high)."""
    words, errors = np.array([len(text.split()) for text in texts]), np.array(errors)
    drawn = np.random.default_rng(0).integers(len(words), size=(DRAWS, len(words)))
    return tuple(np.percentile(errors[drawn].sum(1) / words[drawn].sum(1), [2.5, 97.5]).tolist())


def judge_all(voice_dir, spoken):
    """Judgements of the recordings, the base, the base in the new voice, and the adapter; and both voices.

    spoken: read_spoken of the base and of the adapter.
    """
    (texts, waves, codes, ends), (texts_after, waves_after, _, ends_after) = spoken
    if texts != texts_after:
        raise UserError("BEFORE and AFTER do not say the same sentences; speak both from one list")
    known = {sample["messages"][1]["content"] for name in ("train", "held")
             for sample in json.loads((voice_dir / f"{name}.json").read_text())}
    if trained := known & set(texts):
        raise UserError(f"{min(trained)!r} is a sentence of {voice_dir}: judge by sentences of draw_sentences.py")
    originals = [read_originals(voice_dir / f"{name}.json") for name in ("held", "held_base")]
    new, old = (measure_voice(list(of), list(of.values())) for of in originals)
    codec, _ = load_codec(voice_dir / "codec", torch.device("cpu"), codes[0].shape[1])
    recordings = [judge(list(of), list(of.values()), ["eos"] * len(of), new, old) for of in originals]
    speakers = ((waves, ends), (in_new_voice(codes, codec), ends), (waves_after, ends_after))
    return recordings, [judge(texts, said, how, new, old) for said, how in speakers]


def gates(recordings, found, gain):
    """[(what, format, [recordings, base, base in the new voice, adapter], passed, gate)]."""
    new, old = recordings
    before, control, after = found

    def row(what, form, name, passed, gate):
        return what, form, [of[name] if of else None for of in (new, *found)], passed, gate
    original = max(new["wer"], old["wer"])
    return [
        row("word errors", ".1%", "wer", after["wer"] <= MAX_WER, f"at most {MAX_WER:.0%}"),
        ("fewer than the base in the new voice", ".1%", [None, None, None, control["wer"] - after["wer"]],
         control["wer"] > after["wer"], f"above 0; 95 % between {gain[0]:.1%} and {gain[1]:.1%}"),
        ("word errors, recordings of both voices", ".1%", [original, None, None, None],
         original <= MAX_ORIGINAL_WER, f"at most {MAX_ORIGINAL_WER:.0%}"),
        row("word errors against other texts", ".1%", "shuffled_wer",
            after["shuffled_wer"] >= MIN_SHUFFLED_WER, f"at least {MIN_SHUFFLED_WER:.0%}"),
        row("pitch (Hz)", ".0f", "pitch", True, f"old voice {old['pitch']:.0f}"),
        row("nearer to the new voice's pitch", ".1%", "nearer_pitch", after["nearer_pitch"] >= MIN_PITCH,
            f"at least {MIN_PITCH:.0%}"),
        row("seconds a word", ".3f", "pace", nearer(after["pace"], new["pace"], old["pace"]),
            f"nearer to {new['pace']:.3f} than to {old['pace']:.3f}, the old voice's"),
        row("ended by end-of-stream", ".1%", "stop_rate", after["stop_rate"] == 1, "all")]


def show(rows):
    """Print the table of gates()."""
    heads = "".join(f"{head:>12}" for head in ("recordings", "base", "same, code", "adapter"))
    print(f"{'':40}{heads}")
    for what, form, values, passed, gate in rows:
        shown = "".join(f"{'' if value is None else format(value, form):>12}" for value in values)
        print(f"{what:<40}{shown}   {gate}" + ("" if passed else "  <- FAILED"))


def write(folder, found, said=None):
    """FOLDER/evaluation.json, which common/report.py shows. said: the verdict."""
    kept = {name: value for name, value in found.items() if name != "errors"}
    about = {"name": Path(folder).name, "metrics": kept, "settings": {"recogniser": "pocketsphinx"}}
    if said:
        about["verdict"] = said
    write_json(Path(folder) / "evaluation.json", about)


def main(argv=None):
    args = ARGS or cli.parse(build_parser(), argv=argv)
    dist.single_process()
    cli.require_package("pocketsphinx", "the recogniser")
    spoken = [read_spoken(folder) for folder in (args.before, args.after)]
    recordings, found = judge_all(Path(args.voice_dir), spoken)
    before, control, after = found
    texts = spoken[0][0]
    low, high = interval(texts, after["errors"])
    gain = interval(texts, np.array(control["errors"]) - after["errors"])
    print(f"{after['sentences']} sentences, {after['words']} words, in no training text; heard by pocketsphinx. "
          '"same, code": the base with the new voice\'s code, untrained')
    rows = gates(recordings, found, gain)
    show(rows)
    failed = [what for what, *_, passed, _ in rows if not passed]
    clauses = [f"FAILED: {', '.join(failed)}"] if failed else []
    clauses += [f"{metrics.understood(after['wer'])}, 95 % between {low:.1%} and {high:.1%}",
                f"{metrics.percent(after['nearer_pitch'])} of {after['sentences']} clips have the new voice's pitch",
                f"{metrics.percent(after['stop_rate'])} ended by themselves"]
    write(args.before, before)
    write(args.after, after, "; ".join(clauses))
    print(metrics.verdict_line(clauses))
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
