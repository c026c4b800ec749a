"""Results of a run: its log without times, and the tensors of its newest checkpoint."""
import json

import torch
from safetensors.torch import load_file

from core import checkpoint

CLOCK = {"train/throughput", "train/audio_seconds_per_second", "train/samples_per_second", "train/step_seconds",
         "train/data_wait_seconds", "train/memory_gib", "system/gpu_memory_allocated", "train/mfu"}
CUTS = {"train/epoch", "train/padding"}     # an epoch's last step depends on the split into packs


def rows(run, after=0, without=CLOCK):
    lines = map(json.loads, (run.output_dir / "metrics.jsonl").read_text().splitlines())
    return [{key: value for key, value in line.items() if key not in without} for line in lines if line["step"] > after]


def newest(run):
    """Folder of the newest checkpoint of a Run or of an output folder."""
    return checkpoint.list_checkpoints(getattr(run, "output_dir", run))[-1][1]


def steps_of(output_dir):
    return [step for step, _ in checkpoint.list_checkpoints(output_dir)]


def tensors(run, stem="model"):
    """{name: tensor} of the newest checkpoint's files of this name, in shards or not; model includes adapter_model."""
    files = [*newest(run).glob(f"{stem}*.safetensors"), *newest(run).glob(f"*_{stem}.safetensors")]
    return {name: tensor for path in files for name, tensor in load_file(path).items()}


def moments(run):
    return tensors(run, f"{checkpoint.STATE}/optimizer")


def assert_same_bits(run, other, after=0, without=CLOCK):
    """The log after a step and every bit of weights and moments are equal."""
    assert rows(run, after, without) == rows(other, after, without)
    for actual, expected in ((tensors(run), tensors(other)), (moments(run), moments(other))):
        assert actual.keys() == expected.keys() and actual
        different = [name for name in actual if not torch.equal(actual[name], expected[name])]
        assert not different, f"{len(different)} of {len(actual)} tensors differ, first {different[0]}"
