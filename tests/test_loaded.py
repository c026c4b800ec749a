"""An ordinary run of each trainer loads only the files that it needs: an option that is off imports nothing."""
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from core.dist import World
from diffusion import make_problems
from speech.dataset import Encoding, ensure_codes
from speech.speak import read_samples
from tests.helpers import chats
from tests.helpers.progress import PATIENCE_S
from tests.helpers.trainer import ROOT, trainer_command


def files(folder, names):
    return {f"{folder}{name}.py" for name in (names if not folder else f"__init__ {names}").split()}


ALL = files(
    "core/", "checkpoint cli dist json_files kernels metrics optim packing run tensor_io")
# LoRA on ChatML with cached codes needs no other format, no TTS 3, no judge and no memory plan
SPEECH = files("core/", "adapters") | files("", "train_v2_ddp data") | files(
    "speech/", "conversations dataset labels v2 weights")
CHATS = files("core/", "chat") | files(
    "distill/", "causal_lm chat_data losses packed_lm train_sft")
BLOCKS = files("diffusion/", "blocks choices dit elbo problems train_bd3lm")
# {script: (files that it may load besides ALL, maximum of lines in all of them)}
LIMITS = {"train_v2_ddp.py": (SPEECH, 4_325), "distill/train_sft.py": (CHATS, 3_325),
          "diffusion/train_bd3lm.py": (BLOCKS, 3_755)}
WATCH = """
import atexit, runpy, sys
sys.argv = sys.argv[1:]
sys.path.insert(0, sys.argv[0].rpartition("/")[0])
atexit.register(lambda: print("loaded", *sorted({
    file for module in list(sys.modules.values()) if (file := getattr(module, "__file__", None))}), sep="\\n"))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def command(script, request, folder):
    """A short run's command line, without the interpreter."""
    if script == "train_v2_ddp.py":
        tiny = request.getfixturevalue("tiny")
        turns = [turn for sample in read_samples(tiny.train_json, []) for turn in sample.turns]
        clips = list(dict.fromkeys(clip for turn in turns for clip in turn.clips))
        ensure_codes(World(device=torch.device("cpu")), clips, Encoding(tiny.codec, tiny.codes, 8))
        return trainer_command(tiny, folder / "out", "--use_lora", "--max_steps", 1)[1:]
    short = ["--output_dir", folder / "out", "--max_steps", 1, "--report_to", "none", "--num_workers", 0]
    if script == "distill/train_sft.py":
        chats.student(folder / "model")
        chats.write(folder / "chats.jsonl", chats.conversations(24))
        short += ["--model_path", folder / "model", "--train_data_file", folder / "chats.jsonl",
                  "--validation_split", 0.2]
    else:
        train, held_out, tokenizer = make_problems.prepare_demo(folder / "demo", "gsm8k", 100)
        short += ["--train_data_file", train, "--eval_data_file", held_out, "--tokenizer", tokenizer,
                  "--model_size", "nano", "--per_device_train_batch_size", 2,
                  "--gradient_accumulation_steps", 1, "--eval_repeats", 1]
    return [ROOT / script, *short]


@pytest.mark.slow
@pytest.mark.parametrize("script", LIMITS)
def test_an_ordinary_run_loads_only_needed_files(script, request, tmp_path):
    own, most = LIMITS[script]
    words = map(str, command(script, request, tmp_path))
    done = subprocess.run([sys.executable, "-c", WATCH, *words], cwd=tmp_path, text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, timeout=PATIENCE_S)
    assert done.returncode == 0 and "done       step 1" in done.stdout, done.stdout[-4000:]
    paths = [Path(path) for path in done.stdout.partition("loaded\n")[2].splitlines() if path.endswith(".py")]
    lines = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in paths
             if path.is_relative_to(ROOT) and not path.is_relative_to(Path(sys.prefix))}
    too_many = lines.keys() - ALL - own
    assert script in lines and not too_many, f"too many: {sorted(too_many)}"
    assert sum(lines.values()) <= most, f"{sum(lines.values())} lines; largest: {sorted(lines, key=lines.get)[-9:]}"
