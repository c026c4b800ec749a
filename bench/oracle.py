"""Did a change of the speech trainer change a single bit of what it trains?

    python bench/oracle.py record           # run each setting, write bench/results/oracle.json
    python bench/oracle.py check            # run each again and compare, tensor by tensor
    python bench/oracle.py check lora keep  # only these settings

A setting is one or two short runs of train_v2_ddp.py on a tiny model, on the CPU. Of the last
checkpoint the SHA-256 of each tensor is kept by the parameter's name, weights, exp_avg and
exp_avg_sq, and of metrics.jsonl all that is not a time. The numbers hold for one machine and one
version of torch, so record on the commit before the change, on the same machine.
"""
import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "bench" / "results" / "oracle.json"
ENV = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
TIMES = ("second", "mfu", "throughput", "memory", "wait", "share")     # in names of metrics

SHORT = "--max_steps 4 --eval_steps 2 --save_steps 2 --validation_split 0.2"
LORA = f"--use_lora --per_device_train_batch_size 2 {SHORT}"
PACKS = f"--use_lora --max_tokens_per_batch 700 {SHORT}"
# {name: [(ranks, flags) of each run into one folder]}; a second run resumes the first
SETTINGS = {
    "lora": [(1, f"{LORA} --bf16")],
    "dropout": [(2, f"{LORA} --bf16 --gradient_accumulation_steps 2 --lora_dropout 0.1")],
    "fsdp": [(2, f"{PACKS} --bf16 --parallel fsdp")],
    "full": [(2, f"{SHORT} --per_device_train_batch_size 2 --group_by_length")],
    "fsdp_full": [(2, f"{SHORT} --per_device_train_batch_size 2 --parallel fsdp --cpu_offload")],
    "hsdp": [(4, f"{PACKS} --parallel hsdp:2 --no-reshard_after_forward")],
    "dora_fp16": [(1, f"{LORA} --fp16 --use_dora --gradient_checkpointing")],
    "nf4": [(1, f"{LORA} --bf16 --base_dtype nf4 --lora_target_modules all-linear")],
    "tts3": [(1, f"{LORA} --bf16 --train_audio_table")],
    "keep": [(2, f"{LORA} --keep KEEP --keep_every 2")],
    "resume": [(1, f"{LORA} --lora_dropout 0.1 --max_steps 3 --lr_scheduler constant"),
               (1, f"{LORA} --lora_dropout 0.1 --max_steps 6 --lr_scheduler constant")],
    "more_ranks": [(1, f"{LORA} --max_steps 3 --lr_scheduler constant"),
                   (4, f"{LORA} --max_steps 5 --lr_scheduler constant --parallel fsdp")],
}


def make_tiny(folder, *flags):
    script = ROOT / "speech" / "make_tiny.py"
    subprocess.run([sys.executable, script, folder, "--clips", "24", "--speakers", "3", *flags],
                   check=True, stdout=subprocess.DEVNULL)


def command(folder, output_dir, ranks, flags):
    """The command line of one run."""
    words = flags.replace("KEEP", str(folder / "keep.txt")).split()
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    return [
        sys.executable, *(launcher if ranks > 1 else []), str(ROOT / "train_v2_ddp.py"),
        "--model_path", str(folder / "model"), "--audio_tokenizer_path", str(folder / "codec"),
        "--train_data_file", str(folder / "train.json"), "--code_cache", str(folder / "codes"),
        "--output_dir", str(output_dir), "--report_to", "none", "--logging_steps", "1",
        "--warmup_steps", "2", "--num_workers", "1", "--preprocess_num_proc", "1", *words]


def train(folder, output_dir, ranks, flags):
    """One run; its output goes to OUTPUT_DIR.log."""
    with open(f"{output_dir}.log", "a") as log:
        done = subprocess.run(command(folder, output_dir, ranks, flags), stdout=log, stderr=log,
                              env=ENV)
    if done.returncode:
        sys.exit(f"{output_dir.name} failed:\n{Path(log.name).read_text()[-3000:]}")


def fingerprint(output_dir):
    """{tensor name or "metrics": hash} of the last checkpoint and the metrics of a run."""
    last = max(output_dir.glob("checkpoint-*[0-9]"), key=lambda path: int(path.name[11:]))
    hashes = {}
    for path in sorted([*last.glob("*.safetensors"), *last.glob("trainer_state/*.safetensors")]):
        for name, tensor in load_file(path).items():
            if not name.endswith(".step"):
                hashes[name] = hashlib.sha256(tensor.numpy(force=True).tobytes()).hexdigest()[:12]
    lines = (output_dir / "metrics.jsonl").read_text().splitlines()
    rows = [{name: value for name, value in json.loads(line).items()
             if not any(word in name for word in TIMES)} for line in lines]
    return hashes, rows


def compare(name, before, now):
    """Print what differs in a setting; True where nothing does."""
    tensors, rows = before[0], before[1]
    wrong = sorted(key for key in tensors.keys() | now[0].keys()
                   if tensors.get(key) != now[0].get(key))
    if wrong:
        print(f"{name}: {len(wrong)} of {len(tensors)} tensors differ, first {wrong[0]}")
        return False
    names = sorted({key for old, new in zip(rows, now[1]) for key in old.keys() & new.keys()
                    if old[key] != new[key]})
    gone = sorted({key for row in rows for key in row}
                  - {key for row in now[1] for key in row})
    count = ""
    if len(rows) != len(now[1]):
        count = f"{len(rows)} rows before, {len(now[1])} now"
    notes = [*([f"metrics that differ: {', '.join(names)}"] if names else []),
             *([f"metrics gone: {', '.join(gone)}"] if gone else []), *([count] if count else [])]
    note = "; ".join(notes)
    print(f"{name}: {len(tensors)} tensors equal{'; ' + note if notes else ''}", flush=True)
    return not names


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("action", choices=("record", "check"))
    p.add_argument("settings", nargs="*", default=list(SETTINGS), metavar="SETTING")
    p.add_argument("--file", type=Path, default=RESULT, help="where the hashes are kept")
    args = p.parse_args()
    known = json.loads(args.file.read_text()) if args.file.exists() else {}
    good = True
    with tempfile.TemporaryDirectory() as root:
        v2, v3 = Path(root) / "v2", Path(root) / "v3"
        make_tiny(v2)
        if "tts3" in args.settings:
            make_tiny(v3, "--higgs3")
        (v2 / "keep.txt").write_text("The door is never locked.\nTwo boats crossed the bay.\n")
        for name in args.settings:
            folder, output_dir = v3 if name == "tts3" else v2, Path(root) / name
            for ranks, flags in SETTINGS[name]:
                train(folder, output_dir, ranks, flags)
            now = fingerprint(output_dir)
            if args.action == "record":
                known[name] = now
                print(f"{name}: {len(now[0])} tensors, {len(now[1])} rows", flush=True)
                lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in known.items()]
                args.file.write_text("{" + ",\n".join(lines) + "}\n")
            else:
                good &= compare(name, known[name], now)
    sys.exit(not good)


if __name__ == "__main__":
    main()
