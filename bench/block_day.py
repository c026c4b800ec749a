"""The first day of block diffusion on one H200: which runs, and the hours that they cannot be faster than, by count.

    python bench/block_day.py           # the commands and their bounds; needs no GPU
    python bench/block_day.py --run     # on the GPU, one after the other; the same command goes on where it was

Nothing here was measured on a GPU. The bound of a run is its steps times that of one step: for BD3-LM's own network
what bench/roofline.py counted, kernel by kernel, for 128 problems; for a converted language model its matrix products
alone at the rate assumed there, which leaves out more. Validations, answers and the sampler come on top of both.

Every run trains on GSM8K from the hub (TRAIN_DATA, TEST_DATA: files instead), looks at 128 answers in each validation
and answers the test problems in the end. Writes bench/results/block_day-DEVICE.json.
"""
import argparse
import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import measure
from diffusion import decoder
from diffusion.choices import PRESETS

ROOT = Path(__file__).resolve().parent.parent
LAUNCHER = "launch/train_gsm8k_bd3lm_h200.sh"
COUNTED = "block diffusion 170M, 128 problems"      # of bench/results/roofline-cpu.json
QWEN3 = decoder.Config(151_936, 151_669, hidden_size=1024, layers=28, heads=16, kv_heads=8, head_size=128,
                       mlp_size=3072, theta=1e6, eps=1e-6, tied=True, qk_norm=True, qkv_bias=False)     # Qwen3-0.6B
TOKENS, TARGETS = 195, 125     # of a GSM8K chat, clean ones and its answer's; counted with SmolLM2's tokenizer
OWT, QWEN = "kuleshov-group/bd3lm-owt-block_size16", "Qwen/Qwen3-0.6B"
ACCURACY = "--eval_accuracy 128 --best_by accuracy"
CHAT = f"--chat --lr_scheduler cosine --eval_steps 100 {ACCURACY}"
# {name: (settings, launcher, flags, preset, network)}
RUNS = {
    "bd3lm-owt, fine-tuned": (f"INIT_FROM={OWT}", LAUNCHER, ACCURACY, "finetune", "dit"),
    "Qwen3-0.6B, converted": (f"INIT_FROM={QWEN} PRESET=convert BLOCK_SIZE=4", LAUNCHER, CHAT, "convert", "qwen3"),
    "Qwen3-0.6B, converted by LoRA": (f"INIT_FROM={QWEN} PRESET=convert BLOCK_SIZE=4", LAUNCHER, f"{CHAT} --use_lora",
                                      "convert", "qwen3 lora"),
    "from nothing": ("", LAUNCHER, ACCURACY, "recommended", "dit"),
}


def step_seconds(network, problems, report):
    """Seconds that an optimizer step of so many problems takes at least. report: of bench/roofline.py."""
    if network == "dit":
        columns, rows = report["tables"]["bounds"]["columns"], report["tables"]["bounds"]["rows"]
        row = dict(zip(columns, next(row for row in rows if row[0] == COUNTED)))
        return problems / 128 * sum(row[f"{kind} (ms)"] for kind in ("matmul", "attention", "elementwise")) / 1e3 \
            + row["optimizer (ms)"] / 1e3
    config = dataclasses.replace(QWEN3, lora={"rank": 32} if network.endswith("lora") else None)
    flops = decoder.flops(config, problems * (TOKENS + TARGETS), problems * TARGETS / 2, 0)
    return flops / report["assumed"]["matmul_tflops"] / 1e12


def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--run", action="store_true", help="train; needs the GPU")
    p.add_argument("--output_dir", type=Path, default=Path("outputs/first_day"), help="a folder of each run below it")
    p.add_argument("--results_dir", type=Path, default=measure.RESULTS, help="where the JSON goes")
    args = p.parse_args(argv)
    counted = json.loads((measure.RESULTS / "roofline-cpu.json").read_text())
    table = {"columns": ["run", "problems a step", "steps", "bound (s/step)", "bound (h)"], "rows": []}
    commands = {}
    for name, (settings, launcher, flags, preset, network) in RUNS.items():
        micro, accumulation, _, _, steps = PRESETS[preset]
        seconds = step_seconds(network, micro * accumulation, counted)
        table["rows"].append([name, micro * accumulation, steps, seconds, steps * seconds / 3600])
        folder = args.output_dir / name.replace(", ", "-").replace(" ", "_")
        commands[name] = f"{settings} OUTPUT_DIR={folder} bash {launcher} {flags}".strip()
        print(f"{name}: at least {steps * seconds / 3600:.2f} h by count, not measured\n    {commands[name]}")
    print(f"together at least {sum(row[-1] for row in table['rows']):.1f} h by count, not measured")
    report = measure.new_report("what the first day on an H200 runs, and the least hours by count",
                                torch.device("cpu"), measure.command("block_day", argv))
    report["tables"]["runs"] = table
    if not args.run:
        print(measure.write_report("block_day", report, args.results_dir))
        return
    failed = [name for name, line in commands.items() if subprocess.run(line, shell=True, cwd=ROOT, env=os.environ)
              .returncode]
    if failed:
        raise SystemExit(f"error: block_day.py: failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
