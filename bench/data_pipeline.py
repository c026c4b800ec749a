"""How fast does data reach the trainers, what would encoding on the fly cost, and does an index of millions fit?

    python bench/data_pipeline.py           # needs no GPU; minutes, most of them for indices of a million
    python bench/data_pipeline.py --parts index --samples 1000000,10000000 --name data_pipeline_10m      # an hour

Writes bench/results/data_pipeline-cpu.json. Three parts, all with the trainers' own code:

audio   A tiny codec of the real architecture, synthetic speech of log-normal lengths, 2 to 20 s, two clips a sample.
        Ours, cold (each clip encoded once, then read) and warm (only read), beside the common way: load, resample and
        encode in __getitem__, in DataLoader workers, in every epoch. The sum of all codes must be the same.
wait    Loaders at the rate of one GPU, read ahead as the trainers do. The GPU is simulated: the process sleeps for as
        long as a step would take, which is the step's model FLOPs, as the trainer counts them, over a share of 989e12,
        an H200's dense bf16 peak. Nothing is copied to a GPU, and the trainer does nothing else between two batches.
index   Reading, packing and loading many short samples, in a fresh process each: seconds and memory. Every sample has
        an audio file of its own; files and codes are names of a few real ones, as only the index is measured.
"""
import argparse
import contextlib
import gc
import itertools
import json
import multiprocessing
import os
import shutil
import signal
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import soundfile
import soxr
import torch
from transformers import AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import data
from bench import measure
from common import loading, parallel
from common.packing import PackOrder, rank_packs
from diffusion import blocks, demo_problems, dit, problems
from distill import chat, packed_lm, weights
from distill.table import make_loader, prepare_table
from speech import higgs, make_tiny
from speech.codes import FRAME_RATE, SAMPLE_RATE, Batch, codec_fingerprint, file_key
from speech.conversations import Clip
from speech.encode import encode_clip, load_codec
from speech.labels import assemble, token_ids
from speech.make_tiny import SENTENCES
from speech.sources import Reading
from speech.table import read_all
from speech.weights import native_config

MIB = 2**20
CLIP_SECONDS = 1.8, 0.5, 2, 20      # log-normal: mean and standard deviation of the logarithm, shortest, longest
PEAK = 989e12                       # FLOP/s of an H200 in bf16, dense (datasheet)
PACK = 8192                         # tokens a step
HIGGS_3B = {"vocab_size": 128256, "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28,
            "num_attention_heads": 24, "num_key_value_heads": 8, "head_dim": 128}
QWEN3_4B = {"vocab_size": 151936, "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
            "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True}
THREADS = torch.get_num_threads()   # of a process that encodes into the cache
WORLD = parallel.World(device=torch.device("cpu"))
TEMPLATE = """{{- bos_token -}}{%- for m in messages -%}
{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim + '<|eot_id|>' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif -%}"""


def in_child(function, *args):
    """function(*args) in a forked process: its memory is its own, and nothing it loads is there for the next one."""
    def run():
        try:
            connection.send(function(*args))
        finally:        # loader processes ignore SIGTERM: after an error the exit would wait for them for ever
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for loader in multiprocessing.active_children():
                loader.kill()

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
    """Yields {"peak": most bytes this process had of its own}, looked at 50 times a second until the block ends."""
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


BLOCK = 10_000          # samples whose files share a folder


def make_blocks(make, n):
    """Yield make(first, stop) of blocks of n samples in order, made by several processes."""
    starts = range(0, n, BLOCK)
    with multiprocessing.get_context("fork").Pool(len(os.sched_getaffinity(0))) as pool:
        for start, block in zip(starts, pool.imap(make, [(start, min(start + BLOCK, n)) for start in starts])):
            if start and start % 1_000_000 == 0:
                print(f"made       {start:,} of {n:,} samples", flush=True)
            yield block


class SpeechBlock:
    """Files of samples first to stop: names of a few real ones -> (JSON of their samples, their file keys)."""

    def __init__(self, folder, stats):
        self.folder, self.stats = folder, stats

    def __call__(self, bounds):
        """bounds: (first, stop)."""
        part = f"{bounds[0] // BLOCK:04d}"
        place, samples, keys = (self.folder / part).resolve(), [], []
        place.mkdir()
        for i in range(*bounds):
            at = i % len(self.stats)
            os.link(f"{self.folder}/{at}.wav", path := f"{place}/{i:08d}.wav")
            keys.append(file_key(Clip(path), *self.stats[at]))
            reference = {"text": SENTENCES[i % len(SENTENCES)], "path": f"{at}.wav"}
            target = {"text": f"{SENTENCES[i % (len(SENTENCES) - 1)]} Number {i}.", "speaker": i % 7, "seconds": 9.5,
                      "path": f"{part}/{i:08d}.wav"}
            samples.append(json.dumps(make_tiny.voice_cloning_sample(f"sample_{i:08d}", reference, target)))
        return ",\n".join(samples), keys


def write_speech_index(folder, n, contents=256):
    """train.json, a list of n voice-cloning samples with a file each, and a cache that has the codes of all of them.

    The files are names of a few real ones, and so are their codes.
    """
    cache = folder / "codes" / codec_fingerprint(folder.parent / "codec")
    cache.mkdir(parents=True)
    rng, batch, stats = np.random.default_rng(0), Batch(cache, 8), []
    keys = [f"{i:016d}".encode() for i in range(contents)]
    for i, seconds in enumerate(np.exp(rng.normal(*CLIP_SECONDS[:2], contents)).clip(*CLIP_SECONDS[2:])):
        path = (folder / f"{i}.wav").resolve()
        soundfile.write(path, np.zeros(24000, np.float32), 24000)
        stats.append((path.stat().st_size, path.stat().st_mtime_ns))
        batch.add_codes(keys[i], rng.integers(0, 1024, (round(seconds * FRAME_RATE), 8), np.int16))
        batch.add_file(file_key(Clip(str(path)), *stats[i]), keys[i])
    with open(folder / "train.json", "w") as out:
        for number, (samples, files) in enumerate(make_blocks(SpeechBlock(folder, stats), n)):
            out.write((",\n" if number else "[") + samples)
            batch.files += files
            batch.file_keys += [keys[(number * BLOCK + i) % contents] for i in range(len(files))]
            if len(batch.files) >= 1_000_000:
                batch.write()
        out.write("]\n")
    batch.write()


def chat_block(bounds):
    """JSONL of samples first to stop."""
    lines = []
    for i in range(*bounds):
        messages = [{"role": "user", "content": f"{SENTENCES[i % len(SENTENCES)]} Which one is {i}?"},
                    {"role": "assistant", "content": SENTENCES[i % (len(SENTENCES) - 1)]}]
        lines.append(json.dumps({"id": i, "messages": messages}) + "\n")
    return "".join(lines)


def write_chat_index(folder, n):
    """train.jsonl of n short conversations."""
    folder.mkdir()
    with open(folder / "train.jsonl", "w") as out:
        for block in make_blocks(chat_block, n):
            out.write(block)


def remove_index(folder):
    """Delete an index, its folders of files side by side."""
    with multiprocessing.get_context("fork").Pool(len(os.sched_getaffinity(0))) as pool:
        pool.map(shutil.rmtree, [path for path in folder.iterdir() if path.is_dir()], chunksize=1)
    shutil.rmtree(folder)


def speech_tools(work):
    """(tokenizer, TokenIds) of the tiny model."""
    tokenizer = AutoTokenizer.from_pretrained(work / "model")
    config = native_config(json.loads((work / "model" / "config.json").read_text()))
    return tokenizer, token_ids(tokenizer, config)


def make_table(folder, tokenizer, ids, codec_dir):
    """Table of a folder's train.json, its audio encoded once, as train_v2_ddp.py makes it."""
    return data.prepare_table(WORLD, tokenizer, ids, codec_dir, train=[(folder / "train.json", 1.0)], held_out=None,
                              output_dir=folder / "out", cache_dir=folder / "codes", reading=Reading(),
                              processes=len(os.sched_getaffinity(0)), wait_limit_s=3600)


def speech_table(work, folder):
    """(Table, function of packs and workers that makes the loader), as train_v2_ddp.py has them."""
    tokenizer, ids = speech_tools(work)
    table = make_table(folder, tokenizer, ids, work / "codec")
    return table, lambda packs, workers: data.make_loader(table, ids, packs, num_workers=workers, prefetch_factor=4,
                                                          pad_to=PACK)


def chats_table(work, folder):
    """(ChatTable, function of packs and workers that makes the loader), as train_sft.py has them."""
    tokenizer = AutoTokenizer.from_pretrained(work / "model")
    tokenizer.chat_template = TEMPLATE
    table, _, _ = prepare_table(WORLD, folder / "out", [folder / "train.jsonl"], chat.Encoder(tokenizer),
                                           2048, "stop", processes=len(os.sched_getaffinity(0)))
    return table, lambda packs, workers: make_loader(table, packs, num_workers=workers, prefetch_factor=4,
                                                                pad_to=PACK)


KINDS = {"speech": (write_speech_index, speech_table), "chat": (write_chat_index, chats_table)}


def measure_index(kind, work, folder, workers=2, batches=20):
    """Start as a trainer does on one rank and take some batches -> {name: number}; bytes and seconds."""
    gc.collect()
    before, start = anonymous(), time.perf_counter()
    with peak_memory() as memory:
        table, loader_of = KINDS[kind][1](work, folder)
        read = time.perf_counter() - start
        order = PackOrder(table.lengths, seed=42, tokens_per_pack=PACK)
        order.epoch(0)
        packed = time.perf_counter() - start - read
        loader = iter(loader_of(rank_packs(order, 0, 1, 1, 1), workers))
        next(loader)
        total = time.perf_counter() - start
        for _ in itertools.islice(loader, batches):
            pass
        in_workers = max(written_by(worker.pid) for worker in loader._workers)
    gc.collect()
    return {"samples": len(table), "read": read, "pack": packed, "total": total, "peak": memory["peak"] - before,
            "kept": anonymous() - before, "worker": in_workers,
            "disk": sum(path.stat().st_size for path in (folder / "out").glob("*/*.npy"))}


def index_tables(results):
    """{name: table} of measure_index's results, {kind: one of each size}."""
    rows = [[kind, r["samples"], r["read"], r["pack"], r["total"], r["peak"] / MIB, r["kept"] / MIB, r["worker"] / MIB]
            for kind, sizes in results.items() for r in sizes]
    tables = {"index": {"columns": ["samples are", "samples", "s to read", "s to pack", "s to the first batch",
                                    "MiB at most", "MiB kept", "MiB in a worker"], "rows": rows}}
    growth = []
    for kind, (few, *_, many) in ((kind, sizes) for kind, sizes in results.items() if len(sizes) > 1):
        more = many["samples"] - few["samples"]
        growth.append([kind, few["samples"], many["samples"], 1e6 * (many["total"] - few["total"]) / more,
                       *((many[name] - few[name]) / more for name in ("peak", "kept", "worker", "disk"))])
    if growth:
        tables["index_growth"] = {"columns": ["samples are", "from", "to", "µs to the first batch, a sample more",
                                              "bytes at most", "bytes kept", "bytes in a worker", "bytes on disk"],
                                  "rows": growth}
    return tables


def index_part(work, args):
    """Tables of reading indices of args.samples samples, after each other."""
    results = {}
    for kind in args.kinds:
        for n in args.samples:
            start = time.perf_counter()
            in_child(KINDS[kind][0], work / "index", n)
            print(f"made       {n:,} samples ({kind}) in {time.perf_counter() - start:.0f} s; reading them", flush=True)
            results.setdefault(kind, []).append(in_child(measure_index, kind, work, work / "index"))
            remove_index(work / "index")
            print(json.dumps({"index of": kind, **results[kind][-1]}), flush=True)
    return index_tables(results)


# ---------------------------------------------------------------------------------------------------------------------
# Cached codes beside encoding in every epoch


def write_clips(folder, n, speakers=4, seed=0):
    """n clips of log-normal lengths and train.json, as make_tiny.py writes them; returns seconds of audio an epoch."""
    (folder / "speech").mkdir(parents=True)
    rng, speech = np.random.default_rng(seed), []
    for i, seconds in enumerate(np.exp(rng.normal(*CLIP_SECONDS[:2], n)).clip(*CLIP_SECONDS[2:])):
        rate, parts = make_tiny.CLIP_RATES[i % 4], []
        while sum(map(len, parts)) < seconds * rate:
            parts.append(make_tiny.synthesise(SENTENCES[rng.integers(len(SENTENCES))], i % speakers, rate, rng))
        wave = np.concatenate(parts)[:round(seconds * rate)]
        path = f"speech/{i:04d}.wav"
        soundfile.write(folder / path, wave, rate, subtype="PCM_16")
        speech.append({"text": SENTENCES[i % len(SENTENCES)], "speaker": i % speakers, "path": path,
                       "seconds": round(len(wave) / rate, 3)})
    samples = json.loads(make_tiny.make_dataset(folder, speech).read_text())
    lengths = {clip["path"]: clip["seconds"] for clip in speech}
    return sum(lengths[item["audio_url"]] for sample in samples for message in sample["messages"]
               for item in message["content"] if isinstance(item, dict) and item["type"] == "audio")


class EncodeEachTime(data.SpeechSamples):
    """The common way: a sample's clips are loaded, resampled and encoded whenever it is asked for."""

    def __init__(self, builder, ids, codec, bandwidth):
        self.builder, self.ids, self.codec, self.bandwidth = builder, ids, codec, bandwidth

    def __len__(self):
        return len(self.builder)

    def __getitem__(self, i):
        codes = []
        for number in self.builder.clips_of(i):
            wave, rate = soundfile.read(self.builder.clips[number].path, dtype="float32", always_2d=True)
            wave = soxr.resample(wave.mean(axis=1), rate, SAMPLE_RATE, quality="HQ")
            codes.append(encode_clip(self.codec, wave, self.bandwidth, self.ids.num_codebooks))
        tokens, start = self.builder.tokens[i].astype(np.int64), self.builder.tokens.offsets.array()[i]
        labelled = self.builder.labelled.array()[start:start + len(tokens)]
        return {"number": i, **assemble(tokens, labelled, codes, self.ids)}


def two_epochs(loader, start):
    """Take all batches -> (seconds to the first one, to the last one, all codes summed: a check that ways agree)."""
    first, total = None, 0
    for batch in loader:
        first = first or time.perf_counter() - start
        total += int(batch.audio_ids.sum())
    return first, time.perf_counter() - start, total


def cached_way(work, folder, workers, batch):
    """Two epochs with the code cache, filled before if it was empty; as two_epochs."""
    start = time.perf_counter()
    torch.set_num_threads(THREADS)
    tokenizer, ids = speech_tools(work)
    table = make_table(folder, tokenizer, ids, work / "codec")
    order = PackOrder(table.lengths, samples_per_pack=batch, seed=42)
    return two_epochs(data.make_loader(table, ids, rank_packs(order, 0, 1, 1, 2), num_workers=workers,
                                       prefetch_factor=4), start)


def common_way(work, folder, workers, batch):
    """Two epochs that encode in __getitem__; as two_epochs."""
    start = time.perf_counter()
    tokenizer, ids = speech_tools(work)
    builder, _ = read_all([(folder / "train.json", 1.0)], None, tokenizer, ids, Reading())
    samples = EncodeEachTime(builder, ids, *load_codec(work / "codec", torch.device("cpu"), 8))
    order = PackOrder(np.ones(len(builder)), samples_per_pack=batch, seed=42)
    return two_epochs(torch.utils.data.DataLoader(
        samples, batch_sampler=rank_packs(order, 0, 1, 1, 2), num_workers=workers, prefetch_factor=4,
        collate_fn=lambda some: data.collate(some, ids), multiprocessing_context="fork"), start)


def audio_part(work, args):
    """Table of the three ways, medians of args.rounds rounds."""
    workers, folder, results = len(os.sched_getaffinity(0)), work / "audio", {}
    seconds = 2 * write_clips(folder, args.clips)
    ways = {"encode in __getitem__": common_way, "ours, cold": cached_way, "ours, warm": cached_way}
    for _ in range(args.rounds):
        for name, way in ways.items():      # the warm way finds what the cold one left
            results.setdefault(name, []).append(in_child(way, work, folder, workers, 8))
            print(json.dumps({"way": name, "seconds": results[name][-1][:2]}), flush=True)
        shutil.rmtree(folder / "codes")
    if len({total for way in results.values() for _, _, total in way}) > 1:
        raise SystemExit(f"error: the ways give other codes: {results}")
    rows = []
    for name, way in results.items():
        first, last = (statistics.median(column) for column in list(zip(*way))[:2])
        rows.append([name, first, last, 2 * args.clips / last, seconds / last,
                     measure.ratio([r[1] for r in way], [r[1] for r in results["encode in __getitem__"]])])
    return {"audio": {"columns": ["way", "s to the first batch", "s for 2 epochs", "samples/s", "s of audio/s",
                                  "times as fast"], "rows": rows}}


# ---------------------------------------------------------------------------------------------------------------------
# Does a GPU wait?


def take(loader_of, workers, seconds, steps):
    """A GPU that computes `seconds` a step and asks for the next batch then -> (seconds waited, of how many)."""
    batches, waited = loading.ahead(loader_of(workers)), 0.0       # its workers end when this function does
    next(batches)
    time.sleep(seconds)
    start = time.perf_counter()
    for _ in range(steps):
        asked = time.perf_counter()
        next(batches)
        waited += time.perf_counter() - asked
        time.sleep(seconds)
    return waited, time.perf_counter() - start


def wait_row(name, share, flops, n_packs, tokens, loader_of, args):
    """One row of the table. flops, tokens: of all packs; loader_of(workers): the loader of n_packs batches or more."""
    seconds = flops / n_packs / (share * PEAK)
    steps = min(n_packs - 1, max(args.steps, round(args.seconds / seconds)))
    start = time.process_time()
    made = sum(1 for _ in itertools.islice(loader_of(0), args.steps))
    work = (time.process_time() - start) / made
    waited, whole = in_child(take, loader_of, args.workers, seconds, steps)
    row = [name, 100 * share, tokens / n_packs, seconds, tokens / n_packs / seconds, args.workers, steps,
           100 * waited / whole, work, work / seconds]
    print(json.dumps({"waiting": row}), flush=True)
    return row


def wait_part(work, args):
    """Table of three jobs at the rate each is meant to have on an H200."""
    rows, n = [], args.steps + 1
    with contextlib.redirect_stdout(sys.stderr):
        write_speech_index(work / "wait_speech", 25 * n)
        table, loader_of = speech_table(work, work / "wait_speech")
    order = PackOrder(table.lengths, tokens_per_pack=PACK, seed=42)
    config = native_config(json.loads((work / "model" / "config.json").read_text()) | HIGGS_3B)
    lengths, jobs = table.lengths.astype(np.int64), len(order.epoch(0))
    flops = higgs.flops_per_pack(config, int(lengths.sum()), int(table.audio_targets.sum()),
                                 int(table.text_targets.sum()), int((lengths * (lengths + 1) // 2).sum()), lora=True)
    rows.append(wait_row("speech, Higgs 3B, LoRA", 0.55, flops, jobs, int(lengths.sum()),
                         lambda workers, of=loader_of, by=order: of(rank_packs(by, 0, 1, 1, 1), workers), args))

    write_chat_index(work / "wait_chat", 160 * n)
    with contextlib.redirect_stdout(sys.stderr):
        table, loader_of = chats_table(work, work / "wait_chat")
    order = PackOrder(table.lengths, tokens_per_pack=PACK, seed=42)
    from transformers import Qwen3Config
    model = weights.empty_model(Qwen3Config(**QWEN3_4B), torch.bfloat16)
    lengths, jobs = table.lengths.astype(np.int64), len(order.epoch(0))
    flops = packed_lm.flops(packed_lm.layer_weights(model), model.config, int(lengths.sum()), int(table.targets.sum()),
                            int((lengths * (lengths + 1) // 2).sum()), lora=False)
    rows.append(wait_row("chat, Qwen3 4B, full", 0.55, flops, jobs, int(lengths.sum()),
                         lambda workers, of=loader_of, by=order: of(rank_packs(by, 0, 1, 1, 1), workers), args))

    train_data, _, tokenizer = demo_problems.prepare(work / "demo", "gsm8k", 1500)
    gsm_rows, _ = blocks.prepare_rows(WORLD, blocks.Layout(max_length=512), problems.load_tokenizer(tokenizer, "gsm8k"),
                                      train_data, None, validation_split=0, row_length=512, pack=True,
                                      seed=42)
    sums = {name: int(values.sum()) for name, values in blocks.row_table(gsm_rows).items()}
    flops = dit.flops(dit.config_of("small", 50258, 50257), sums["noisy"] + sums["clean"], sums["targets"] / 2,
                      sums["pairs"])
    order = PackOrder(gsm_rows.tokens, samples_per_pack=PACK // 512, seed=42)
    turns = -(-n // len(order.epoch(0))) * 20         # its steps are short
    rows.append(wait_row("block diffusion, small", 0.40, flops * turns, len(order.epoch(0)) * turns,
                         sums["tokens"] * turns, lambda workers: blocks.make_loader(
                             gsm_rows, rank_packs(order, 0, 1, 1, turns), PACK // 512, gsm_rows.noisy_length,
                             num_workers=workers, prefetch_factor=4), args))
    return {"wait": {"columns": ["job", "% of 989 TFLOP/s", "tokens a step", "s a step", "tokens/s", "workers", "steps",
                                 "% of time waiting", "CPU s of loading a step", "cores a GPU"], "rows": rows}}


# ---------------------------------------------------------------------------------------------------------------------

PARTS = {"audio": audio_part, "wait": wait_part, "index": index_part}


def main(argv=None):
    def words(text):
        return text.split(",")

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", type=words, default=list(PARTS), help="audio, wait, index, comma-separated")
    parser.add_argument("--clips", type=int, default=64, help="audio files, and samples an epoch, of the part audio")
    parser.add_argument("--rounds", type=int, default=3, help="of the part audio; medians count")
    parser.add_argument("--steps", type=int, default=60, help="simulated steps of each job of the part wait, at least")
    parser.add_argument("--seconds", type=float, default=10, help="that those steps last, at least")
    parser.add_argument("--workers", type=int, default=4, help="loader processes of the GPU of the part wait")
    parser.add_argument("--samples", type=lambda text: sorted(map(int, words(text))),
                        default=[10_000, 100_000, 1_000_000], help="sizes of the indices, comma-separated")
    parser.add_argument("--kinds", type=words, default=list(KINDS), help="of indices: speech, chat, comma-separated")
    parser.add_argument("--name", default="data_pipeline", help="of the report")
    parser.add_argument("--work_dir", help="where data goes meanwhile, 2 GB a million samples (default: a temporary "
                                           "folder)")
    parser.add_argument("--results_dir", type=Path, default=measure.RESULTS, help="where the JSON goes")
    args = parser.parse_args(argv)
    for flag, names, known in ("--parts", args.parts, PARTS), ("--kinds", args.kinds, KINDS):
        if unknown := set(names) - set(known):
            parser.error(f"{flag}: {', '.join(sorted(unknown))} is not of {', '.join(known)}")
    report = measure.new_report("how fast data reaches the trainers", torch.device("cpu"),
                                measure.command("data_pipeline", argv))
    torch.set_num_threads(1)                        # forked processes may use threads only if this one has not
    with tempfile.TemporaryDirectory(dir=args.work_dir) as work:
        work = Path(work)
        with contextlib.redirect_stdout(sys.stderr):
            make_tiny.main([str(work), "--clips", "8", "--voice", "numpy"])
        for part in args.parts:
            report["tables"] |= PARTS[part](work, args)
    print(f"wrote {measure.write_report(args.name, report, args.results_dir)}")


if __name__ == "__main__":
    main()
