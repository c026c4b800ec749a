"""What pocketsphinx hears in wav files when it knows digits alone, a line for each: an --asr_command for launch/voice.

    python speech/demo/hear_digits.py demo_out/run-*/after/0000.wav
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))    # common/ stands there

from speech.demo.judge_demo import GRAMMAR
from speech.voice import scores, speech_metrics

if __name__ == "__main__":
    waves = [speech_metrics.read_audio(path) for path in sys.argv[1:]]
    print(*scores.recognise_pocketsphinx(waves, speech_metrics.RATE, GRAMMAR), sep="\n")
