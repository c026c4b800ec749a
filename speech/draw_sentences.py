"""Draws digit sentences for launch/demo.sh that are in no text of launch/voice, neither training nor held out.

    python speech/draw_sentences.py 240 --seed 42 >sentences.txt
"""
import argparse
import json
import random
from pathlib import Path

VOICE = Path(__file__).resolve().parent.parent / "launch" / "voice"
WORDS = "zero one two three four five six seven eight nine".split()
LENGTHS = 3, 4, 4, 5        # words of a sentence, as those held out when the voice was made


def draw(count, seed, known):
    """[digits]: `count` different ones of LENGTHS digits, none of them in `known`."""
    rng, found = random.Random(seed), {}
    while len(found) < count:
        digits = "".join(rng.choices("0123456789", k=rng.choice(LENGTHS)))
        if digits not in known:
            found[digits] = None
    return list(found)


def main():
    p = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    p.add_argument("count", type=int, metavar="COUNT", help="sentences")
    p.add_argument("--seed", type=int, default=42)
    args = p.parse_args()
    known = {text for texts in json.loads((VOICE / "texts.json").read_text()).values() for text in texts}
    for digits in draw(args.count, args.seed, known):
        print(" ".join(WORDS[int(digit)] for digit in digits) + ".")


if __name__ == "__main__":
    main()
