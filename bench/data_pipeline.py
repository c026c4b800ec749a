"""How fast does data reach the trainers, what does it cost to encode on the fly, and does an index of millions fit?

    python bench/data_pipeline.py                               # on any machine; needs no GPU
    python bench/data_pipeline.py --parts index --samples 10000000 --report data_pipeline_10m   # how 10 million start

Writes bench/results/data_pipeline-cpu.json. Three parts, each with the trainers' own code:

audio   A tiny codec of the real architecture encodes synthetic speech of log-normal lengths, 2 to 20 s. Ours, cold (every
        clip encoded once, then read) and warm (only read), beside the common way: load, resample and encode both clips
        of every sample in __getitem__, in DataLoader workers, in every epoch. All three end in the same batches.
wait    Loaders at the rate of one GPU, which is simulated: it sleeps for as long as a step takes there. The step's time
        is its model FLOPs (the trainers' own count) over a share of 989e12, an H200's dense bf16 peak.
index   Reading, packing and loading many short samples: seconds and memory, in a fresh process each. Every sample has a
        clip of its own; their codes are shared, as only the index is measured.
"""
import argparse
import contextlib
import dataclasses
import gc
import itertools
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import measure
import numpy as np
import soundfile
import torch
from safetensors.numpy import save_file

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import chat  # noqa: E402
import chat_table  # noqa: E402
import code_cache  # noqa: E402
import data  # noqa: E402
import higgs_io  # noqa: E402
import make_tiny  # noqa: E402
import parallel  # noqa: E402
from chatml import Clip  # noqa: E402
from make_tiny import SENTENCES  # noqa: E402
from packing import PackOrder, rank_packs  # noqa: E402

MIB = 2**20
CLIP_SECONDS = 1.8, 0.5, 2, 20      # log-normal: mean and standard deviation of the logarithm, shortest, longest
WORLD = parallel.World(device=torch.device("cpu"))
TEMPLATE = """{{- bos_token -}}{%- for m in messages -%}
{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim + '<|eot_id|>' }}
{%- endfor -%}{%- if add_generation_prompt -%}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif -%}"""


def in_child(function, *args):
    """function(*args) in a forked process: its memory is its own, and nothing it loads is there for the next one."""
    def run():
        connection.send(function(*args))

    answer, connection = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    connection.close()
    try:
        result = answer.recv()
    except EOFError:
        process.join()
        raise SystemExit(f"error: {function.__name__} ended with status {process.exitcode}")
    process.join()
    return result


# ---------------------------------------------------------------------------------------------------------------------
# An index of many samples


def anonymous(pid="self"):
    """Bytes of memory a process has of its own; mapped files, which the system may drop, are not counted."""
    fields = dict(line.split(":", 1) for line in open(f"/proc/{pid}/status"))
    return int(fields["RssAnon"].split()[0]) * 1024


def written_by(pid):
    """Bytes of memory that a forked process does not share with its parent any more."""
    fields = dict(line.split(":", 1) for line in list(open(f"/proc/{pid}/smaps_rollup"))[1:])
    return int(fields["Private_Dirty"].split()[0]) * 1024


@contextlib.contextmanager
def peak_memory():
    """Yields a dict; when the block ends it has `peak`: most bytes this process had of its own, looked at 50 times/s."""
    found, done = {"peak": anonymous()}, threading.Event()

    def look():
        while not done.wait(0.02):
            found["peak"] = max(found["peak"], anonymous())

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield found
    finally:
        done.set()
        thread.join()


def write_speech_index(folder, n, contents=256):
    """train.json, a list of n voice-cloning samples with a file each, and a cache that has the codes of all of them.

    The files are names of a few real ones, and so are their codes.
    """
    cache = folder / "codes" / code_cache.codec_fingerprint(folder.parent / "codec")
    cache.mkdir(parents=True)
    rng, batch, stats = np.random.default_rng(0), code_cache.Batch(cache, 8), []
    keys = [f"{i:016d}".encode() for i in range(contents)]
    for i, seconds in enumerate(np.exp(rng.normal(*CLIP_SECONDS[:2], contents)).clip(*CLIP_SECONDS[2:])):
        path = (folder / f"{i}.wav").resolve()
        soundfile.write(path, np.zeros(24000, np.float32), 24000)
        stats.append(path.stat())
        batch.add_codes(keys[i], rng.integers(0, 1024, (round(seconds * code_cache.FRAME_RATE), 8), np.int16))
        batch.add_file(code_cache.file_key(Clip(str(path)), stats[i]), keys[i])
    with open(folder / "train.json", "w") as out:
        for i in range(n):
            at, path = i % contents, folder / f"{i // 10_000:04d}" / f"{i:08d}.wav"
            if i % 10_000 == 0:
                path.parent.mkdir()
            os.link(folder / f"{at}.wav", path)
            batch.add_file(code_cache.file_key(Clip(str(path.resolve())), stats[at]), keys[at])
            reference = {"text": SENTENCES[i % len(SENTENCES)], "path": f"{at}.wav"}
            target = {"text": f"{SENTENCES[i % (len(SENTENCES) - 1)]} Number {i}.", "path": f"{path.parent.name}/{path.name}",
                      "speaker": i % 7, "seconds": 9.5}
            sample = make_tiny.voice_cloning_sample(f"sample_{i:08d}", reference, target)
            out.write((",\n" if i else "[") + json.dumps(sample))
            if len(batch.files) >= 1_000_000:
                batch.write()
        out.write("]\n")
    batch.write()


def write_chat_index(folder, n):
    """train.jsonl of n short conversations."""
    folder.mkdir()
    with open(folder / "train.jsonl", "w") as out:
        for i in range(n):
            messages = [{"role": "user", "content": f"{SENTENCES[i % len(SENTENCES)]} Which one is {i}?"},
                        {"role": "assistant", "content": SENTENCES[i % (len(SENTENCES) - 1)]}]
            out.write(json.dumps({"id": i, "messages": messages}) + "\n")


def speech_tools(work):
    """(tokenizer, data.TokenIds) of the tiny model."""
    tokenizer = higgs_io.load_tokenizer(work / "model")
    config = higgs_io.native_config(json.loads((work / "model" / "config.json").read_text()))
    return tokenizer, data.token_ids(tokenizer, config)


def speech_flags(folder, output_dir, cache):
    """The trainer's flags that its table depends on."""
    return SimpleNamespace(train_data_file=folder / "train.json", train_data_dir=None, eval_data_file=None,
                           eval_data_dir=None, task_type=None, ref_audio_in_system_message=False, seed=42,
                           output_dir=output_dir, code_cache=cache, preprocess_num_proc=os.cpu_count(),
                           wait_timeout=3600, disable_eval=True, validation_split=0)


def speech_table(work, folder):
    """(Table, sample numbers, function of packs and workers that makes the loader), as train_v2_ddp.py has them."""
    tokenizer, ids = speech_tools(work)
    table, numbers, _ = data.prepare_table(WORLD, speech_flags(folder, folder / "out", folder / "codes"), tokenizer, ids,
                                           work / "codec")
    return table, numbers, lambda packs, workers: data.make_loader(
        table, ids, packs, num_workers=workers, prefetch_factor=4, pin_memory=False, pad_to=8192)


def chats_table(work, folder):
    """(ChatTable, sample numbers, function of packs and workers that makes the loader), as train_sft.py has them."""
    tokenizer = higgs_io.load_tokenizer(work / "model")
    tokenizer.chat_template = TEMPLATE
    args = SimpleNamespace(train_data_file=folder / "train.jsonl", eval_data_file=None, output_dir=folder / "out",
                           too_long="stop", group_size=1, validation_split=0, seed=42)
    table, numbers, _, _ = chat_table.prepare_table(WORLD, args, chat.Encoder(tokenizer), 2048)
    return table, numbers, lambda packs, workers: chat_table.make_loader(
        table, packs, num_workers=workers, prefetch_factor=4, pin_memory=False, pad_to=8192)


KINDS = {"speech": (write_speech_index, speech_table), "chat": (write_chat_index, chats_table)}


def measure_index(kind, work, folder, workers=2, batches=20):
    """Start as a trainer does on one rank and take some batches -> {name: number}; bytes and seconds."""
    gc.collect()
    before, start = anonymous(), time.perf_counter()
    with peak_memory() as memory:
        table, numbers, loader_of = KINDS[kind][1](work, folder)
        read = time.perf_counter() - start
        order = PackOrder(table.lengths[numbers], seed=42, tokens_per_pack=8192)
        packed = time.perf_counter() - start - read
        at = time.perf_counter()
        order.epoch(0)
        shuffled = time.perf_counter() - at
        at = time.perf_counter()
        batches_of = iter(loader_of(rank_packs(order, 0, 1, 1, 1), workers))
        next(batches_of)
        first = time.perf_counter() - at
        for _ in range(batches):
            next(batches_of, None)
        in_workers = max(written_by(worker.pid) for worker in batches_of._workers)
    gc.collect()
    return {"read_seconds": read, "pack_seconds": packed, "epoch_seconds": shuffled, "first_batch_seconds": first,
            "total_seconds": read + packed + shuffled + first, "peak_bytes": memory["peak"] - before,
            "kept_bytes": anonymous() - before, "worker_bytes": in_workers,
            "disk_bytes": sum(path.stat().st_size for path in (folder / "out").glob("*/*.npy"))}


if __name__ == "__main__":
    torch.set_num_threads(1)
    kind, n = sys.argv[1], int(sys.argv[2])
    with tempfile.TemporaryDirectory() as work:
        work = Path(work)
        make_tiny.main([str(work), "--clips", "8", "--voice", "numpy"])
        t = time.time()
        KINDS[kind][0](work / "x", n)
        print("made", time.time() - t)
        r = in_child(measure_index, kind, work, work / "x")
        for k, v in r.items():
            print(kind, n, k, f"{v/1e6:.1f} MB {v/n:.0f} B/sample" if "bytes" in k else f"{v:.2f} s {v/n*1e6:.1f} us/sample")
