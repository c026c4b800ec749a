"""Judges what launch/voice learns: has it the new voice, and is it understood? Exit status 0 only if so.

    python speech/demo/judge_demo.py BEFORE AFTER --voice_dir launch/voice

BEFORE and AFTER hold what generate_tts.py made of VOICE_DIR/held.json: sentences in no training text. Each must
pass, of AFTER:

    word errors     pocketsphinx, with a grammar that knows digits alone, mistakes at most --max_wer of the words, and
                    at most --max_original_wer of them in flite's recordings of the same sentences; against other
                    clips' texts, to show that the text decides what is said, it mistakes at least --min_shuffled_wer
    voice           --min_likeness of the clips are more like the new voice than like the old one, each compared with
                    both voices' recordings of its text: by Resemblyzer where that is installed, else by pitch and
                    spectrum (no model: median log pitch in octaves plus mel-cepstral distance of the means in 10 dB)
    endings         all clips end by end-of-stream
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))    # common/ stands there

from common import flags


def build_parser():
    p = flags.Parser(__doc__.partition("\n")[0])
    p.usage = "%(prog)s BEFORE AFTER [--flag value ...]"
    p.add_argument("before", metavar="BEFORE", help="what the base spoke")
    p.add_argument("after", metavar="AFTER", help="what the adapter spoke")
    p.add_argument("--voice_dir", default="launch/voice", help="what make_voice.py made")
    p.add_argument("--max_wer", type=float, default=0.15, help="share of words mistaken")
    p.add_argument("--max_original_wer", type=float, default=0.04, help="share of words mistaken in the recordings")
    p.add_argument("--min_shuffled_wer", type=float, default=0.70, help="share of words mistaken against other texts")
    p.add_argument("--min_likeness", type=float, default=0.90, help="share of clips closer to the new voice")
    return p


def check_flags(args, world_size):
    """Raise UserError for shares that are none."""
    flags.zero_or_more(args, "max_wer", "max_original_wer", "min_shuffled_wer", "min_likeness")


# parsed before torch is imported: --help and a mistake in a flag answer at once
ARGS = flags.parse(build_parser(), check_flags) if __name__ == "__main__" else None

import importlib.util
import json

import numpy as np

from common import metrics
from common.checkpoint import write_atomically
from common.distributed import UserError, one_clear_error
from speech.voice import scores, speech_metrics
from speech.voice.speech_metrics import RATE

DIGITS = "zero one two three four five six seven eight nine".split()
GRAMMAR = f"#JSGF V1.0; grammar digits; public <sentence> = ({' | '.join(DIGITS)})+;"
LOW_HZ = 80     # below is no pitch of these voices, but at 75 Hz a hum of the small codec: its first upsampling step
SHIFT = 7       # how far texts are moved along the clips for the shuffled comparison


def read_spoken(folder):
    """([text], [wave], [ended_by]) of what generate_tts.py wrote, in order. Raises UserError."""
    texts, waves, ends = [], [], []
    for path in sorted(path for path in Path(folder).glob("*.json") if path.stem.isdigit()):
        about = json.loads(path.read_text())
        texts.append(about["text"].strip(". "))
        ends.append(about["ended_by"])
        waves.append(speech_metrics.read_audio(path.with_suffix(".wav")))
    if not texts:
        raise UserError(f"{folder}: holds no speech; generate_tts.py writes it")
    return texts, waves, ends


def read_originals(path):
    """{text: wave} of a ChatML file that make_voice.py wrote."""
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


def word_error_rates(texts, waves):
    """Share of the words that pocketsphinx mistakes: of the clips' own texts, and of those SHIFT clips further on."""
    heard = scores.recognise_pocketsphinx(waves, RATE, GRAMMAR)
    counts = (scores.word_errors(texts[shift:] + texts[:shift], heard) for shift in (0, SHIFT))
    return [errors / words for errors, words in counts]


def plain_likeness(wave, reference):
    """Minus the distance of two voices: octaves between median pitches, plus mean spectra's distance in 10 dB."""
    if not len(wave):
        return -np.inf
    pitches, means = [], []
    for heard in (wave, reference):
        pitch = speech_metrics.pitch(heard)
        pitches.append(np.log2(np.median(pitch[pitch > LOW_HZ]) if (pitch > LOW_HZ).any() else LOW_HZ))
        means.append(speech_metrics.cepstra(speech_metrics.mel_energies(heard)).mean(0, keepdims=True))
    return -abs(pitches[0] - pitches[1]) - float(speech_metrics.cepstral_distances(*means)[0, 0]) / 10


def likenesses(waves, references):
    """[likeness] of each wave and its reference, more is closer."""
    if importlib.util.find_spec("resemblyzer"):
        found = scores.likeness(waves, references, RATE, scores.load_voices())
        return [-1.0 if value is None else value for value in found]
    return [plain_likeness(*pair) for pair in zip(waves, references)]


def judge(texts, waves, ends, new, old):
    """{measure: share} of what one model spoke, as read_spoken gives it. new, old: {text: wave} of both voices."""
    if missing := [text for text in texts if text not in new or text not in old]:
        raise UserError(f"{missing[0]!r} is none of the held-out sentences: speak held.json")
    closer = [a > b for a, b in zip(likenesses(waves, [new[text] for text in texts]),
                                    likenesses(waves, [old[text] for text in texts]))]
    wer, shuffled_wer = word_error_rates(texts, waves)
    return {"wer": wer, "shuffled_wer": shuffled_wer, "likeness": float(np.mean(closer)),
            "stop_rate": ends.count("eos") / len(ends), "sentences": len(texts),
            "words": sum(len(text.split()) for text in texts)}


def main(argv=None):
    args = ARGS or flags.parse(build_parser(), check_flags, argv)
    with one_clear_error():
        flags.need_package("pocketsphinx", "the recogniser")
        folder = Path(args.voice_dir)
        new, old = read_originals(folder / "held.json"), read_originals(folder / "held_base.json")
        spoken = [read_spoken(of) for of in (args.before, args.after)]
        before, after = (judge(*of, new, old) for of in spoken)
        texts = spoken[1][0]
        original = {voice: word_error_rates(texts, [of[text] for text in texts])[0]
                    for voice, of in (("new", new), ("old", old))}
        by = "Resemblyzer" if importlib.util.find_spec("resemblyzer") else "pitch and spectrum"
        rows = [    # what, recordings, before, after, good, gate
            ("word errors", original["new"], before["wer"], after["wer"], after["wer"] <= args.max_wer,
             f"at most {args.max_wer:.0%}"),
            ("word errors, recordings of both voices", max(original.values()), None, None,
             max(original.values()) <= args.max_original_wer, f"at most {args.max_original_wer:.0%}"),
            ("word errors against other texts", None, before["shuffled_wer"], after["shuffled_wer"],
             after["shuffled_wer"] >= args.min_shuffled_wer, f"at least {args.min_shuffled_wer:.0%}"),
            (f"more like the new voice ({by})", None, before["likeness"], after["likeness"],
             after["likeness"] >= args.min_likeness, f"at least {args.min_likeness:.0%}"),
            ("ended by end-of-stream", None, before["stop_rate"], after["stop_rate"], after["stop_rate"] == 1, "all")]
        print(f"{after['sentences']} sentences, {after['words']} words, in no training text; heard by pocketsphinx\n"
              f"{'':40}{'recordings':>12}{'before':>9}{'after':>9}")
        for what, *values, good, gate in rows:
            shown = "".join(f"{'' if v is None else f'{v:.1%}':>{width}}" for v, width in zip(values, (12, 9, 9)))
            print(f"{what:<40}{shown}   {gate + ('' if good else '  <- FAILED')}")
        failed = [what for what, *_, good, _ in rows if not good]
        clauses = [*([f"FAILED: {', '.join(failed)}"] if failed else []), metrics.understood(after["wer"]),
                   f"{metrics.percent(after['likeness'])} of {after['sentences']} clips are more like the new voice",
                   f"{metrics.percent(after['stop_rate'])} ended by themselves"]
        settings = {"recogniser": "pocketsphinx", "voice": by, "word errors in recordings": original}
        for folder, found in ((args.before, before), (args.after, after)):
            about = {"name": Path(folder).name, "metrics": found, "settings": settings}
            if found is after:
                about["verdict"] = "; ".join(clauses)
            write_atomically(Path(folder) / "evaluation.json",
                             lambda path, about=about: path.write_text(json.dumps(about, indent=1) + "\n"))
        print(metrics.verdict_line(clauses))
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
