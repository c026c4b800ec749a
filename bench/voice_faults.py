"""Plants one fault each in the trainer or its adapter: is it heard? Starts from launch/voice and its adapter.

    python bench/voice_faults.py [FAULT ...]        # default: all of FAULTS, each less than a minute of CPU time

`nothing`, `no_delay`, `no_shift` and `no_end` merge the committed adapter into the base and train that for 30 steps of
8 clips with the fault in it; `scale` loads the committed adapter with three times its lora_alpha. Ten held-out
sentences are spoken and judged as in launch/demo.sh, with wider gates: at most 30 % of the words mistaken. Exit status
0 only if `nothing` passes and every fault fails. Writes bench/results/voice_faults-cpu.json.
"""
import argparse
import dataclasses
import json
import multiprocessing
import shutil
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

FAULTS = ("nothing", "no_delay", "no_shift", "no_end", "scale")
VOICE = ROOT / "launch" / "voice"
SENTENCES = 10
MAX_WER = 0.3       # wider than the demo's by what ten sentences scatter


def plant(fault):
    """Changes this process's trainer."""
    import numpy as np

    import data
    from speech import labels

    right_labels, right_collate = labels.delay_labels, data.collate

    def one_row(codes, bos, eos):
        made = np.full((len(codes) + codes.shape[1] + 1, codes.shape[1]), eos, np.int64)
        made[0], made[1:1 + len(codes)] = bos, codes
        return made

    def one_row_labels(codes, eos):
        made = np.full((len(codes) + codes.shape[1] + 1, codes.shape[1]), labels.IGNORE, np.int64)
        made[1:1 + len(codes)], made[1 + len(codes)] = codes, eos
        return made

    def own_row(*args):
        batch = right_collate(*args)
        return dataclasses.replace(batch, audio_rows=batch.audio_rows + 1)

    def endless(codes, eos):
        made = right_labels(codes, eos)
        return np.where(made == eos, codes[-1], made)

    if fault == "no_delay":         # all codebooks in one row, in inputs and labels
        labels.delay_rows, labels.delay_labels = one_row, one_row_labels
    elif fault == "no_shift":       # a row is trained on its own codes, not on the next row's
        data.collate = own_row
    elif fault == "no_end":         # where end-of-stream belongs, the last code is trained once more
        labels.delay_labels = endless


def train(fault, folder):
    """FOLDER/out/checkpoint-30, in a process of its own, from FOLDER/model."""
    import train_v2_ddp
    plant(fault)
    train_v2_ddp.main([
        "--model_path", str(folder / "model"), "--audio_tokenizer_path", str(VOICE / "codec"),
        "--train_data_file", str(folder / "train.json"), "--code_cache", str(folder / "codes"),
        "--output_dir", str(folder / fault), "--report_to", "none", "--disable_eval", "--max_steps", "30",
        "--per_device_train_batch_size", "8", "--learning_rate", "1e-3", "--warmup_steps", "3",
        "--text_loss_weight", "0", "--num_workers", "0", "--preprocess_num_proc", "0"])


def judged(model, adapter=None):
    """What judge_demo finds in SENTENCES held-out sentences."""
    from bench.voice_curve import say
    from speech import judge_demo
    new, old = (judge_demo.read_originals(VOICE / f"{name}.json") for name in ("held", "held_base"))
    texts = list(new)[::4][:SENTENCES]
    return judge_demo.judge(texts, *say(model, VOICE / "codec", texts, adapter), new, old)


def run(fault, folder):
    """Judgement of one fault, with "passes" and the CPU seconds it took here and in its training."""
    if fault == "scale":
        wrong = shutil.copytree(VOICE / "adapter", folder / "wrong")
        config = json.loads((wrong / "adapter_config.json").read_text())
        config["lora_alpha"] *= 3
        (wrong / "adapter_config.json").write_text(json.dumps(config))
        found = judged(VOICE / "model", wrong)
    else:
        process = multiprocessing.get_context("spawn").Process(target=train, args=(fault, folder))
        process.start()
        process.join()
        if process.exitcode:
            sys.exit(f"training with {fault} ended with status {process.exitcode}")
        found = judged(folder / fault / "checkpoint-30")
    found["passes"] = (found["wer"] <= MAX_WER and found["shuffled_wer"] >= 0.6 and found["likeness"] >= 0.9
                       and found["stop_rate"] == 1)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("faults", nargs="*", metavar="FAULT", help=", ".join(FAULTS))
    faults = parser.parse_args().faults or FAULTS
    if unknown := set(faults) - set(FAULTS):
        parser.error(f"{min(unknown)} is none of {', '.join(FAULTS)}")
    import torch

    import lora
    torch.set_num_threads(1)
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        lora.merge(VOICE / "model", VOICE / "adapter", folder / "model")
        samples = json.loads((VOICE / "train.json").read_text())[::6]
        for sample in samples:
            clip = sample["messages"][-1]["content"]
            clip["audio_url"] = str(VOICE / clip["audio_url"])
        (folder / "train.json").write_text(json.dumps(samples))
        for fault in faults:
            start = time.monotonic()
            results[fault] = found = run(fault, folder)
            print(f"{fault:9} word errors {found['wer']:6.1%}  new voice {found['likeness']:4.0%}  ended "
                  f"{found['stop_rate']:4.0%}  {'passes' if found['passes'] else 'FAILS'}  "
                  f"{time.monotonic() - start:.0f} s", flush=True)
    (ROOT / "bench" / "results" / "voice_faults-cpu.json").write_text(json.dumps(results, indent=1) + "\n")
    sys.exit(any(found["passes"] != (fault == "nothing") for fault, found in results.items()))


if __name__ == "__main__":
    main()
