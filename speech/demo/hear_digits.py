"""What pocketsphinx hears in wav files when it knows digits alone, a line for each: an --asr_command for launch/voice.

    python speech/demo/hear_digits.py spoken/0000.wav spoken/0001.wav
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))    # common/ stands there

from common import flags

DIGITS = "zero one two three four five six seven eight nine"
GRAMMAR = f"#JSGF V1.0; grammar digits; public <sentence> = ({DIGITS.replace(' ', ' | ')})+;"


def build_parser():
    p = flags.Parser(__doc__.partition("\n")[0])
    p.add_argument("files", nargs="+", metavar="FILE", help="wav files")
    return p


def main(argv=None):
    files = flags.parse(build_parser(), argv=argv).files
    from speech.voice import scores, speech_metrics
    waves = [speech_metrics.read_audio(path) for path in files]
    print(*scores.recognise_pocketsphinx(waves, speech_metrics.RATE, GRAMMAR), sep="\n")


if __name__ == "__main__":
    main()
