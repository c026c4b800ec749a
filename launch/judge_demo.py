"""Draw the demo's sentences, and judge whether the adapter speaks them clearly in the new voice.

    python launch/judge_demo.py draw 240 --seed 42 >sentences.txt
    python launch/judge_demo.py judge BEFORE AFTER

draw prints digit sentences that no text of launch/voice contains, neither training nor held out.
BEFORE and AFTER are folders of generate_tts.py --save_codes with these sentences, spoken by the
base and by the adapter. In this codec codebook 3 is constant and determines the voice. Hence there
is a control: the base's speech with that codebook set to the new voice's code, which takes no
training. The exit status is 0 only if all of this holds for AFTER:

    word errors     WER by pocketsphinx, with a grammar of digits, is at most MAX_WER, and lower
                    than the control's: the 95 % interval of the difference lies above 0
    voice           at least MIN_VOICE of the frames have the new voice's code
    endings         all clips end by end-of-stream
"""
import argparse
import json
import random
import sys
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))    # core/ is there

from core import checkpoint, cli, metrics
from speech import judges, speak
from speech.codes import SAMPLE_RATE, load_codec

VOICE = Path(__file__).resolve().parent / "voice"
DIGITS = "zero one two three four five six seven eight nine".split()
GRAMMAR = f"#JSGF V1.0; grammar digits; public <sentence> = ({' | '.join(DIGITS)})+;"
LENGTHS = 3, 4, 4, 5        # words of a sentence, as in those held out when the voice was made
VOICE_BOOK, NEW_VOICE = 3, 1    # the codebook that determines the voice, and the new voice's code
RESAMPLES = 2000        # bootstrap samples of the sentences, for intervals
MAX_WER = 0.2           # of the adapter
MIN_VOICE = 0.9         # share of frames with the new voice's code
FEWER = "fewer word errors than the base with the new voice's code"


def draw(count, seed):
    """`count` different sentences of LENGTHS digits, none of them in launch/voice."""
    splits = json.loads((VOICE / "texts.json").read_text())
    known = {text for texts in splits.values() for text in texts}
    rng, sentences = random.Random(seed), {}
    while len(sentences) < count:
        digits = "".join(rng.choices("0123456789", k=rng.choice(LENGTHS)))
        if digits not in known:
            sentences[digits] = " ".join(DIGITS[int(digit)] for digit in digits)
    return list(sentences.values())


def read_spoken(folder):
    """([text], [wave], [(T, 8) codes], [ended_by]) of what generate_tts.py wrote."""
    paths = sorted(path for path in Path(folder).glob("*.json") if path.stem.isdigit())
    cli.require(paths, f"{folder}: holds no speech; generate_tts.py --save_codes writes it")
    records = [json.loads(path.read_text()) for path in paths]
    return ([record["text"].strip(". ") for record in records],
            [judges.read_audio(path.with_suffix(".wav")) for path in paths],
            [np.load(path.with_suffix(".npy")) for path in paths],
            [record["ended_by"] for record in records])


def judge(texts, waves, codes, ends):
    """{measure: value} of what one model spoke."""
    heard = judges.recognise_pocketsphinx(waves, SAMPLE_RATE, grammar=GRAMMAR)
    errors = [judges.word_errors([text], [transcript])[0] for text, transcript in zip(texts, heard)]
    words = sum(len(text.split()) for text in texts)
    return {"wer": sum(errors) / words, "errors": errors,
            "stop_rate": ends.count("eos") / len(ends),
            "voice": float(np.mean(np.concatenate(codes)[:, VOICE_BOOK] == NEW_VOICE)),
            "sentences": len(texts), "words": words}


def interval(texts, errors):
    """(low, high), the 95 % bootstrap interval over sentences of errors per word."""
    words, errors = np.array([len(text.split()) for text in texts]), np.array(errors)
    drawn = np.random.default_rng(0).integers(len(words), size=(RESAMPLES, len(words)))
    rates = errors[drawn].sum(1) / words[drawn].sum(1)
    return tuple(np.percentile(rates, [2.5, 97.5]).tolist())


def gain_of(texts, before, after):
    """interval() of the errors that `after` avoids; both are from judge()."""
    return interval(texts, np.array(before["errors"]) - after["errors"])


def judge_all(before, after):
    """[judge() of the base, of the control, of the adapter]. before, after: from read_spoken."""
    texts, waves, codes, ends = before
    cli.require(texts == after[0],
                "BEFORE and AFTER do not say the same sentences; speak both from one list")
    codec, _ = load_codec(VOICE / "codec", torch.device("cpu"), codes[0].shape[1])
    changed = [clip.copy() for clip in codes]
    for clip in changed:
        clip[:, VOICE_BOOK] = NEW_VOICE
    return [judge(*before),
            judge(texts, [speak.decode(codec, clip) for clip in changed], changed, ends),
            judge(*after)]


def criteria(after, gain):
    """{requirement: whether it holds} for the adapter's judge(). gain: interval() of the errors
    that the adapter saves against the control."""
    return {f"word errors at most {MAX_WER:.0%}": after["wer"] <= MAX_WER,
            FEWER: gain[0] > 0,
            f"at least {MIN_VOICE:.0%} of frames with the new voice's code":
                after["voice"] >= MIN_VOICE,
            "all ended by end-of-stream": after["stop_rate"] == 1}


def main(before, after):
    """Print and write the verdict on two folders; return the exit status."""
    cli.require_package("pocketsphinx", "the recogniser")
    spoken = [read_spoken(folder) for folder in (before, after)]
    texts, judged = spoken[0][0], judge_all(*spoken)
    base, control, trained = judged
    gain = gain_of(texts, control, trained)
    print(f"{trained['sentences']} sentences, {trained['words']} words, in no training text; "
          "recognised by pocketsphinx")
    for name, row in zip(("base", "base with the new voice's code", "adapter"), judged):
        print(f"{name:<31} word errors {row['wer']:6.1%} | new voice {row['voice']:6.1%} | ended "
              f"{row['stop_rate']:6.1%}")
    print(f"word errors saved by training: 95 % interval {gain[0]:.1%} to {gain[1]:.1%}")
    failed = [name for name, passed in criteria(trained, gain).items() if not passed]
    low, high = interval(texts, trained["errors"])
    clauses = [f"FAILED: {', '.join(failed)}"] * bool(failed) + [
        f"word errors {metrics.percent(trained['wer'])}, 95 % between {low:.1%} and {high:.1%}",
        f"{metrics.percent(trained['voice'])} of the frames have the new voice's code",
        f"{metrics.percent(trained['stop_rate'])} ended by themselves"]
    for folder, row in ((before, base), (after, trained)):
        evaluation = {"name": Path(folder).name, "settings": {"recogniser": "pocketsphinx"},
                      "metrics": {name: value for name, value in row.items() if name != "errors"}}
        if row is trained:
            evaluation["verdict"] = "; ".join(clauses)
        checkpoint.write_json(Path(folder) / "evaluation.json", evaluation)
    print(f"verdict    {'; '.join(clauses)}")
    return bool(failed)


if __name__ == "__main__":
    p = argparse.ArgumentParser(description="Draw the demo's sentences, or judge speech of them.")
    commands = p.add_subparsers(dest="command", required=True)
    drawing, judging = commands.add_parser("draw"), commands.add_parser("judge")
    drawing.add_argument("count", type=int)
    drawing.add_argument("--seed", type=int, default=42)
    judging.add_argument("before", metavar="BEFORE")
    judging.add_argument("after", metavar="AFTER")
    args = p.parse_args()
    if args.command == "draw":
        print(*(f"{sentence}." for sentence in draw(args.count, args.seed)), sep="\n")
        sys.exit()
    try:
        sys.exit(main(args.before, args.after))
    except cli.UserError as error:
        sys.exit(f"error: {error}")
