"""What pocketsphinx hears in wav files when it knows digits alone, a line for each: an --asr_command for launch/voice.

    python tests/helpers/hear_digits.py spoken/0000.wav spoken/0001.wav
"""
import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))


def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    p.add_argument("files", nargs="+", metavar="FILE", help="wav files")
    files = p.parse_args(argv).files
    from speech.judge_demo import GRAMMAR
    from speech import judges
    waves = [judges.read_audio(path) for path in files]
    print(*judges.recognise_pocketsphinx(waves, 24000, GRAMMAR), sep="\n")


if __name__ == "__main__":
    main()
