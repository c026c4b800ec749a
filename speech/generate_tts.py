"""Speak with Higgs-Audio: a base model, a fine-tuned checkpoint, or a base with a trained adapter.

    python speech/generate_tts.py --model_path bosonai/higgs-audio-v2-generation-3B-base \
        --audio_tokenizer_path bosonai/higgs-audio-v2-tokenizer --adapter out/checkpoint-500 \
        --text "Good morning." --output_dir spoken
    torchrun --nproc_per_node=8 speech/generate_tts.py ... --prompts prompts.json  # GPUs share them

Each prompt gives NUMBER.wav (24 kHz) and NUMBER.json with text, seed, frames, seconds,
real_time_factor (computing time of its batch per second of speech) and ended_by: "eos" if the model
stopped by itself, "length" if --max_seconds cut it off.
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))    # core/ is there

from core import cli
from core.cli import ABOVE_0, COUNT, PROBABILITY, SEED, SHARE, UserError, plural, require
from speech import conversations, judges

# ---- Flags: name, default, help

p = cli.Parser("Speak with Higgs-Audio.")
flag, switch = p.flag, p.switch
# model
flag("--model_path", None, "base model or full checkpoint, folder or hub name", required=True)
flag("--audio_tokenizer_path", None, "native audio tokenizer, folder or hub name")
flag("--adapter", None, "folder with adapter_model.safetensors, applied to --model_path")
flag("--device", "auto", "auto: a GPU if there is one", choices=("auto", "cuda", "cpu"))
flag("--dtype", "auto", "base's dtype; adapters stay float32; auto: bfloat16 on a GPU, "
     "float16 on a T4 or V100", choices=("auto", "bfloat16", "float16", "float32"))
flag("--base_dtype", None, "nf4 keeps the base's layers in four bits, for GPUs of 8 to 12 GB "
     "(default: as in the adapter's run)", choices=("bf16", "nf4"))
# texts to speak
flag("--text", None, "one or more texts", nargs="+")
flag("--prompts", None, "file: one text per line, or ChatML, which may name a reference clip")
flag("--reference_audio", None, "clip of the voice to clone, for texts and lines")
flag("--reference_text", None, "transcript of --reference_audio; optional for Higgs TTS 3")
flag("--scene", None, "scene for texts and lines, e.g. 'Audio is recorded from a quiet room.'")
flag("--normalize_text", None, "normalise punctuation and sound tags as boson-ai's inference does "
     "(default: as in training)", choices=("on", "off"))
# how
flag("--temperature", None, "0 = greedy (default: 1, TTS 3: 0.8)", type=float)
flag("--top_k", None, "draw from this many codes, 0 = all (default: 50, TTS 3: 30)", type=int)
flag("--top_p", None, "probability drawn from (default: 0.95, TTS 3: 0.8)", PROBABILITY, type=float)
flag("--ras_window", None, "V2: a code that occurs twice in this many rows is drawn again, 0 = off "
     "(default: 7)", type=int)
flag("--max_seconds", 30.0, "longest speech; longer speech is cut off and reported", ABOVE_0)
flag("--seed", 42, "seed of the sampling", SEED)
flag("--batch_size", 4, "prompts generated together on each device", COUNT)
flag("--best_of", 1, "takes per text; keep the best by end-of-stream, errors, likeness", COUNT)
flag("--split_text", 0, "speak longer texts in parts of at most N characters, 0 = off", metavar="N")
flag("--stream", None, "write each part of one --text, cut by --split_text, as soon as it is "
     "spoken: to this WAV file, or raw (24 kHz, 16 bit) to stdout: -", metavar="FILE")
judges.judge_flags(p)
# output
flag("--output_dir", "./spoken", "folder for the results; shared by all nodes")
switch("--overwrite", "first delete results of an earlier run in --output_dir")
flag("--max_cer", None, "write best.jsonl, training data: --best_of takes that ended by themselves "
     "with at most this character error rate", SHARE, type=float, metavar="SHARE")
switch("--save_codes", "also write <name>.npy, the codec codes (frames, 8) int16")

BEST = "best.jsonl"     # written with --max_cer


def check_flags(args, world_size):
    require(bool(args.text) != bool(args.prompts), "give one of --text and --prompts")
    chatml = bool(args.prompts) and args.prompts.lower().endswith(conversations.CHATML)
    for name in ("reference_audio", "reference_text", "scene", "split_text"):
        require(not (chatml and getattr(args, name)), f"--{name} is not for ChatML prompts")
    args.reference_text = (args.reference_text or "").strip() or None
    require(args.reference_audio or not args.reference_text,
            "--reference_text is the transcript of --reference_audio")
    judges.check_judges(args)
    listens = args.asr_model or args.asr_command
    require(args.best_of > 1 or not (listens or args.speaker_model),
            "--asr_model, --asr_command and --speaker_model choose among takes: give --best_of")
    require(args.max_cer is None or args.best_of > 1 and listens and not args.split_text,
            "--max_cer needs --best_of and a recogniser, and no --split_text")
    require(not args.stream or args.split_text and len(args.text or ()) == world_size == 1,
            "--stream takes one --text, --split_text and one process")
    file = Path(args.stream or "-")
    require(args.overwrite or not file.is_file(), f"--stream {file} exists: give --overwrite")
    require(file.parent.is_dir(), f"--stream {file}: there is no such folder; make it first")


if any(word in ("-", "--stream=-") for word in sys.argv):
    sys.stdout = sys.stderr     # --stream -: stdout carries only sound

# parsed before torch is imported: --help and wrong flags answer at once
args = cli.parse(p, check_flags)

import json
import time
from functools import partial

import torch

from core import checkpoint, dist
from speech import speak, weights
from speech.codes import load_codec
from speech.conversations import FRAME_RATE

# ---- Ranks, output folder, model, prompts


def earlier_results():
    """Claim the output folder and return its old files. UserError for them without --overwrite."""
    checkpoint.lock_folder(args.output_dir)
    old = [path for path in Path(args.output_dir).iterdir() if path.name == BEST
           or path.suffix in (".wav", ".json", ".npy") and path.stem.isdigit()]
    require(args.overwrite or not old, f"--output_dir {args.output_dir} holds an earlier run's "
            f"results ({len(old)} files): give another folder, or --overwrite")
    return old


speak.check_base_dtype(args)
world = dist.init()
require(args.device != "cuda" or torch.cuda.is_available(), "--device cuda: there is no GPU here")
if args.device != "auto":
    world.device = torch.device(args.device)
device, main_rank = world.device, world.is_main
old = dist.rank0(world, earlier_results)
folder, config_dict, codec_dir = weights.find_files(
    world, args.model_path, args.audio_tokenizer_path)
module, tts3 = weights.module(config_dict), weights.is_tts3(config_dict["model_type"])
require(args.reference_text or not args.reference_audio or tts3,
        "--reference_audio and --reference_text go together")
normalize, why = speak.setting_to_speak(
    args.normalize_text or ("off" if tts3 else None), folder, args.adapter)
voice = args.reference_audio, args.reference_text, args.scene
texts = [(f"--text {text!r}", text) for text in args.text or ()]
samples = (speak.read_prompts(args.prompts, normalize, *voice) if args.prompts else
           speak.text_prompts(texts, normalize, *voice))
for sample in samples if args.split_text and args.reference_audio else ():
    chunks = speak.split_text(speak.spoken_text(sample), args.split_text)
    require(len({speaker for speaker, _ in chunks}) == 1,
            f"{sample.name}: its speakers would all get --reference_audio's voice")
read = {Path(clip.path).resolve() for sample in samples for turn in sample.turns
        for clip in turn.clips} | {Path(args.prompts or "").resolve()}
overwritten = read & {Path(file).resolve() for file in (*old, args.stream or "-")}
require(not overwritten, f"--overwrite would delete {min(overwritten, default='')}, which is read: "
        "give another --output_dir")
config, tokenizer = module.read_config(config_dict), module.load_tokenizer(folder)
ids = module.token_ids(tokenizer, config)
codec, bandwidth = load_codec(codec_dir, device, ids.num_codebooks)
draws = {name: getattr(args, name) for name in speak.DRAW_FLAGS if getattr(args, name) is not None}
settings = speak.sampling(config, args.max_seconds, **draws)
# settings that determine how a sample sounds, for its JSON file
noted = {"model_path": args.model_path, "adapter": args.adapter, "base_dtype": args.base_dtype,
         "batch_size": args.batch_size, "normalize_text": "on" if normalize else "off",
         **module.DRAWS, **draws}
prepare = partial(speak.prepare, tokenizer=tokenizer, ids=ids, codec=codec, bandwidth=bandwidth,
                  room=speak.positions(config) - settings.max_new_tokens)
# batches come from the whole list, so they do not depend on the number of ranks
batches = {first: prepare(samples[first:first + args.batch_size]) for first in range(
    world.rank * args.batch_size, len(samples), world.size * args.batch_size)}
dtype = getattr(torch, args.dtype, torch.float32)
if args.dtype == "auto" and device.type == "cuda":
    dtype = torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16
native = speak.load_model(folder, config_dict, args.adapter, dtype, device, args.base_dtype)
listeners = judges.load_judges(args.asr_model, args.asr_command, args.speaker_model,
                               language=args.language, device=device)
dist.all_gather(world, None)    # only now, after the checks of all ranks
for path in old if main_rank else ():
    path.unlink()
dist.all_gather(world, None)    # no rank writes before that
if main_rank:
    print(f"text       {why}\nmodel      {dtype} on {world.size} x {device.type}")

# ---- Speaking


def say(seed, prompts, turn=0):
    return speak.speak(native, codec, ids, settings, prompts,
                       seed + turn * speak.STRIDE * args.best_of, args.best_of, listeners)


records = []
for first, prompts in batches.items():
    start, seed = time.monotonic(), args.seed + first // args.batch_size
    try:
        if args.split_text:
            write = speak.open_stream(args.stream) if args.stream else None
            results = speak.speak_chunks(samples[first:first + args.batch_size], args.split_text,
                                         prepare, partial(say, seed), listeners, write)
        else:
            results = say(seed, prompts)
    except torch.OutOfMemoryError:
        raise UserError(f"too little GPU memory for {len(prompts)} prompts: lower --batch_size")
    total = sum(len(codes) for codes, *_ in results) / FRAME_RATE
    rtf = (time.monotonic() - start) / total if total else None
    for number, (prompt, (codes, ended_by, wave, facts)) in enumerate(zip(prompts, results), first):
        record = speak.write_sample(args.output_dir, number, prompt, codes, ended_by, wave,
                                    args.save_codes or args.max_cer is not None, seed=seed,
                                    real_time_factor=rtf, **noted, **facts)
        print(f"{record['name']} | {record['seconds']:6.2f} s | ended by {ended_by:<6} | "
              f"{prompt.text[:60]!r}")
        records.append(record)
records = sorted(sum(dist.all_gather(world, records), []), key=lambda record: int(record["name"]))
if main_rank:
    stopped = sum(record["ended_by"] == "eos" for record in records)
    print(f"done       {plural(len(records), 'sample')}, {stopped} ended by themselves, not at "
          f"--max_seconds; {args.output_dir}")
    if args.max_cer is not None:
        rows = speak.good_rows(samples, records, args.max_cer, ids.min_frames)
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        checkpoint.write_text(Path(args.output_dir) / BEST, lines)
        print(f"best       {len(rows)} of {len(records)}; {args.output_dir}/{BEST}, training data")
dist.finish()
