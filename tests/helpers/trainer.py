"""Runs of the speech trainer on a tiny model: as a command, or forked from a process with its imports."""
import argparse
import contextlib
import copy
import json
import os
import runpy
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import soundfile

from core import cli

ROOT = Path(__file__).resolve().parent.parent.parent
RUN_SCRIPT = f"{__name__}.run_script"       # of pool.run


class Tiny:
    """A tiny native model, codec, speech and train.json, with the audio already encoded in a code cache."""

    def __init__(self, root):
        self.root, self.model, self.codec = root, root / "model", root / "codec"
        self.train_json, self.codes = root / "train.json", root / "codes"

    def samples(self):
        return json.loads(self.train_json.read_text())


@dataclass
class Run:
    """A finished trainer process: exit status, output, and its folder with metrics."""
    status: int
    output: str
    output_dir: Path

    def metrics(self, name):
        rows = [json.loads(line) for line in (self.output_dir / "metrics.jsonl").read_text().splitlines()]
        return {row["step"]: row[name] for row in rows if name in row}


def brief(tiny, root):
    """A Tiny with the same model and codec, and 0.6 s or more of each clip; root: an empty folder."""
    for name in ("model", "codec"):
        (root / name).symlink_to(tiny.root / name)
    (root / "speech").mkdir()
    for number, path in enumerate(sorted((tiny.root / "speech").glob("*.wav"))):
        wave, rate = soundfile.read(path)
        soundfile.write(root / "speech" / path.name, wave[rate:round(rate * (1.6 + 0.02 * number))], rate)
    shutil.copy(tiny.train_json, root / "train.json")
    return Tiny(root)


def unheard(samples):
    """The samples with another cut of each spoken clip: validation data that share no audio with them."""
    samples = copy.deepcopy(samples)
    for sample in samples:
        clip = sample["messages"][-1]["content"][1]
        clip |= {"offset": (clip.get("offset") or 0) + 0.05, "duration": 0.5}
    return samples


def trainer_arguments(tiny, output_dir, *flags):
    """Arguments that train the tiny model; flags override the defaults here."""
    return ["--model_path", str(tiny.model), "--audio_tokenizer_path", str(tiny.codec), "--train_data_file",
            str(tiny.train_json), "--code_cache", str(tiny.codes), "--output_dir", str(output_dir), "--logging_dir",
            str(output_dir) + "-logs", "--report_to", "none", "--logging_steps", "1", "--warmup_steps", "2",
            "--eval_steps", "0", "--save_steps", "0", "--num_workers", "1", "--preprocess_num_proc", "1",
            *map(str, flags)]


def run_script(script, argv):
    """Run a script of module-level code in this process, as `python SCRIPT ARGV` would. SystemExit if it fails."""
    before, sys.argv = (sys.excepthook, sys.argv), [str(ROOT / script), *map(str, argv)]
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise
    except Flags:
        raise
    except BaseException:
        sys.excepthook(*sys.exc_info())     # the script may have set one that exits here
        raise SystemExit(1)
    finally:
        sys.excepthook, sys.argv = before


def run_here(script, argv):
    """Like run_script, but errors are raised and the process is restored."""
    hook = sys.excepthook
    with mock.patch("faulthandler.enable"), mock.patch.object(sys, "argv", [str(ROOT / script), *map(str, argv)]):
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
        except SystemExit as ended:
            if ended.code:
                raise
        finally:
            sys.excepthook = hook


def speech_main(argv):
    run_script("train_v2_ddp.py", argv)


class Flags(Exception):
    """The parser of a script and its check_flags(args, world_size)."""


def script_flags(script="train_v2_ddp.py"):
    """(parser, check_flags) of a script; the script stops after its flags."""
    def stop(parser, check=None, *_, **more):
        if check is not None or isinstance(parser, cli.Parser):
            known = parser._option_string_actions
            for old, new in cli.OLD_NAMES.items():
                if new in known:
                    known.setdefault(old, known[new])
        raise Flags(parser, check)
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(argparse.ArgumentParser, "parse_args", stop))     # of bench/
        stack.enter_context(mock.patch.object(cli, "parse", stop))
        with pytest.raises(Flags) as caught:
            run_script(script, [])
    return caught.value.args


def trainer_of(script, **more):
    """main, build_parser and check_flags of a trainer script, as a namespace."""
    return SimpleNamespace(**{"__name__": script[:-3].replace("/", "."), "main": lambda argv: run_here(script, argv),
                              "build_parser": lambda: script_flags(script)[0], "check_flags": lambda args,
                              world_size: script_flags(script)[1](args, world_size), **more})


def trainer_command(tiny, output_dir, *flags, ranks=1, python=sys.executable):
    """A trainer's whole command line."""
    launcher = [python] if ranks == 1 else \
        [python, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    return [*launcher, str(ROOT / "train_v2_ddp.py"), *trainer_arguments(tiny, output_dir, *flags)]


def train_forked(pool, tiny, output_dir, *flags, ranks=1, ok=True, main="tests.helpers.trainer.speech_main", cwd=None,
                 env=None):
    """Train in ranks of the pool, each a process; returns the Run."""
    statuses, output = pool.run(ranks, main, trainer_arguments(tiny, output_dir, *flags),
                                cwd=cwd or output_dir.parent, env=env)
    assert not ok or not any(statuses), output[-4000:]
    return Run(max(statuses, key=abs), output, output_dir)


def main_with_a_bad_token(argv):
    """speech_main; the text embedding gives NaN for the token BAD_TOKEN. (A base with NaN would be refused.)"""
    import torch
    embed, bad = torch.nn.Embedding.forward, int(os.environ["BAD_TOKEN"])

    def poisoned(self, ids):
        embedded = embed(self, ids)
        is_text = self.num_embeddings == int(os.environ["TEXT_TOKENS"])
        return embedded.masked_fill((ids == bad)[..., None], float("nan")) if is_text else embedded
    torch.nn.Embedding.forward = poisoned
    speech_main(argv)


def bad_token(model_dir):
    """Options of train_forked for a run with NaN for the token of "~"."""
    from transformers import AutoTokenizer
    bad = AutoTokenizer.from_pretrained(model_dir).convert_tokens_to_ids("~")
    size = json.loads((Path(model_dir) / "config.json").read_text())["vocab_size"]
    return {"main": f"{__name__}.main_with_a_bad_token", "env": {"BAD_TOKEN": str(bad), "TEXT_TOKENS": str(size)}}
