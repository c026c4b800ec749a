"""transformers' Trainer on the samples that our trainer has read, in the same batches; speed.py's.

    python bench/hf_trainer.py speech --tables OUR_OUTPUT_DIR --model_path M --output_dir OUT ...

Right-padded batches as people use it, or for chats without padding (--flat). Prints a line for each
step and writes metrics.jsonl, as our trainers do.
"""
import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Subset

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from peft import LoraConfig, get_peft_model
from transformers import (AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq,
                          DataCollatorWithFlattening, HiggsAudioV2ForConditionalGeneration,
                          PrinterCallback, Trainer, TrainerCallback, TrainingArguments)
from transformers.utils import is_flash_attn_2_available

from bench import measure
from core.packing import PackOrder

IGNORE = -100


def audio_labels(sample):
    """(a, 8) labels of a sample's audio rows, not shifted."""
    labels = np.full((len(sample["input_ids"]) + 1, 8), IGNORE)
    labels[sample["audio_at"] + 1] = sample["audio_targets"]
    return labels[:-1][sample["is_audio"]]


def padded_batch(samples, ids):
    """Speech samples -> what transformers' forward takes, padded on the right, with our labels."""
    samples = [{**sample, "audio_labels": audio_labels(sample)} for sample in samples]
    length, rows = (max(len(s[key]) for s in samples) for key in ("input_ids", "audio_ids"))

    def padded(key, fill, size):
        out = np.full((len(samples), size, *samples[0][key].shape[1:]), fill, np.int64)
        for row, sample in zip(out, samples):
            row[:len(sample[key])] = sample[key]
        return torch.from_numpy(out)

    def present(key, size):
        return torch.from_numpy(np.stack([np.arange(size) < len(s[key]) for s in samples]))
    return {"input_ids": padded("input_ids", ids.pad, length),
            "labels": padded("text_labels", IGNORE, length),
            "attention_mask": present("input_ids", length).long(),
            "audio_input_ids": padded("audio_ids", ids.stream_eos, rows),
            "audio_labels": padded("audio_labels", IGNORE, rows),
            "audio_input_ids_mask": present("audio_ids", rows)}


def speech(args, attention, dtype):
    """(model, dataset, lengths, collator, modules that get adapters)"""
    from data import SpeechSamples, Table
    from speech import v2, weights
    config = json.loads((args.model_path / "config.json").read_text())
    ids = v2.token_ids(v2.load_tokenizer(args.model_path), v2.read_config(config))
    table = Table(next(args.tables.glob("table-*")))
    model = HiggsAudioV2ForConditionalGeneration.from_pretrained(
        args.model_path, dtype=dtype, attn_implementation=attention)
    # autocast on CUDA adds the codebooks' embeddings up in fp32, which a bf16 model does not take
    model.model.embed_audio_tokens.register_forward_hook(lambda *seen: seen[-1].to(dtype))
    return (model, SpeechSamples(table, ids), table.lengths,
            lambda samples: padded_batch(samples, ids), weights.LORA_TARGETS["attention"])


class Chats(torch.utils.data.Dataset):
    """A ChatTable as Trainer takes them."""

    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, i):
        _, ids, trained = self.samples[i]
        return {"input_ids": ids.tolist(), "labels": np.where(trained, ids, IGNORE).tolist(),
                "attention_mask": [1] * len(ids)}


def chats(args, attention, dtype):
    from distill.chat_data import ChatTable
    table = ChatTable(next(args.tables.glob("table-*")))
    model = AutoModelForCausalLM.from_pretrained(args.model_path, dtype=dtype,
                                                 attn_implementation=attention)
    tokenizer = AutoTokenizer.from_pretrained(args.model_path)
    collate = DataCollatorWithFlattening() if args.flat else DataCollatorForSeq2Seq(tokenizer)
    return model, Chats(table), table.lengths, collate, "all-linear"


class Lines(TrainerCallback):
    """Prints and keeps what Trainer logs of each step."""

    def __init__(self, out):
        self.file, self.since = (out / "metrics.jsonl").open("w"), time.perf_counter()

    def on_log(self, args, state, control, logs=None, **_):
        if "loss" in logs:
            print(f"step {state.global_step} | loss {logs['loss']:.4f}", flush=True)
            device = torch.device(args.device.type)
            measure.synchronize(device)
            memory, now = measure.peak_memory_gib(device), time.perf_counter()
            row = {"step": state.global_step, "train/loss": logs["loss"],
                   "train/step_seconds": now - self.since,
                   "train/grad_norm": logs["grad_norm"], "train/memory_gib": memory}
            self.file.write(json.dumps(row) + "\n")
            self.file.flush()
            self.since = now


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=("speech", "chats"))
    parser.add_argument("--tables", type=Path, required=True, help="output folder of our trainer")
    parser.add_argument("--model_path", type=Path, required=True)
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--per_device_train_batch_size", type=int, required=True)
    parser.add_argument("--max_steps", type=int, required=True)
    parser.add_argument("--learning_rate", type=float, required=True)
    parser.add_argument("--seed", type=int, default=42, help="seed of our trainer's order")
    for name in ("--use_lora", "--bf16", "--compile", "--flat"):
        parser.add_argument(name, action="store_true")
    for name in ("--audio_tokenizer_path", "--train_data_file", "--logging_steps"):
        parser.add_argument(name, help="not used")
    args = parser.parse_args(argv)
    cuda = torch.cuda.is_available()
    flash = cuda and args.bf16 and is_flash_attn_2_available()
    dtype = torch.bfloat16 if args.bf16 and args.use_lora else torch.float32
    make = {"speech": speech, "chats": chats}[args.name]
    model, data, lengths, collate, targets = make(
        args, "flash_attention_2" if flash else "sdpa", dtype)
    model.config.use_cache = False
    if args.use_lora:
        model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules=targets))
    order = PackOrder(lengths, samples_per_pack=args.per_device_train_batch_size, seed=args.seed)
    numbers = [int(i) for epoch in range(3) for pack in range(order.packs_per_epoch)
               for i in order.window(epoch, pack)]
    args.output_dir.mkdir(parents=True, exist_ok=True)
    settings = TrainingArguments(
        output_dir=str(args.output_dir), max_steps=args.max_steps, logging_steps=1,
        per_device_train_batch_size=args.per_device_train_batch_size,
        learning_rate=args.learning_rate, bf16=args.bf16,
        torch_compile=args.compile, use_cpu=not cuda, train_sampling_strategy="sequential",
        gradient_checkpointing=False, save_strategy="no", report_to="none", disable_tqdm=True,
        remove_unused_columns=False)
    trainer = Trainer(model, settings, train_dataset=Subset(data, numbers), data_collator=collate,
                      callbacks=[Lines(args.output_dir)])
    trainer.remove_callback(PrinterCallback)
    trainer.train()


if __name__ == "__main__":
    main()
