"""Speak with Higgs-Audio V2: a base model, a fine-tuned checkpoint, or a base with a trained adapter.

    python speech/generate_tts.py --model_path bosonai/higgs-audio-v2-generation-3B-base --adapter out/checkpoint-500 \
        --audio_tokenizer_path bosonai/higgs-audio-v2-tokenizer --text "Good morning." --output_dir speech
    torchrun --nproc_per_node=8 speech/generate_tts.py ... --prompts prompts.json   # every GPU takes its share

For each prompt: <name>.wav (24 kHz), <name>.png (mel spectrogram) and <name>.json with text, seed, frames, seconds,
real_time_factor (seconds of computing for a second of speech, its batch as a whole) and ended_by: "eos" when the model
stopped by itself, "length" when --max_seconds cut it off. The same seed and batch size give the same speech on any
number of GPUs.

Files to copy with it: speak.py speech_model.py data.py conversations.py codes.py higgs.py weights.py export.py
lora.py (its own), adapters.py indexing.py loading.py parallel.py optim.py checkpoint.py tensor_files.py
watchdog.py recomputation.py float8.py (shared).
"""
import argparse
import math
import sys
import time
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))    # common/ stands beside this folder

from common import checkpoint, parallel
from common.parallel import UserError
from speech import speak, speech_model, weights
from speech.codes import FRAME_RATE
from speech.conversations import DEFAULT_SYSTEM
from speech.encode import load_codec
from speech.labels import token_ids


def build_parser():
    p = argparse.ArgumentParser(description="Speak with Higgs-Audio V2.", allow_abbrev=False,
                                formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    g = p.add_argument_group("model")
    g.add_argument("--model_path", required=True, help="model or full checkpoint: folder or hub name, native or 2025")
    g.add_argument("--audio_tokenizer_path", required=True, help="native audio tokenizer, folder or hub name")
    g.add_argument("--adapter", help="folder with adapter_model.safetensors, used on top of --model_path")
    g.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto", help="auto: a GPU when there is one")
    g.add_argument("--dtype", choices=("auto", "bfloat16", "float32"), default="auto",
                   help="of the base's weights; adapters stay float32; auto: bfloat16 on a GPU")
    g = p.add_argument_group("what to say")
    g.add_argument("--text", nargs="+", help="one or more texts")
    g.add_argument("--prompts", help="file: one text a line, or ChatML .json/.jsonl with the voice to take in it")
    g.add_argument("--reference_audio", help="clip whose voice is taken, for texts and lines")
    g.add_argument("--reference_text", help="what is said in --reference_audio")
    g.add_argument("--system_prompt", help=f"for texts and lines (default: {DEFAULT_SYSTEM!r})")
    g.add_argument("--scene", help="scene description for texts and lines, e.g. 'Audio is recorded from a quiet room.'")
    g = p.add_argument_group("how")
    g.add_argument("--temperature", type=float, default=1.0, help="of the draws; 0 = greedy")
    g.add_argument("--top_k", type=int, default=50, help="draw from so many likeliest codes, 0 = all")
    g.add_argument("--top_p", type=float, default=0.95, help="draw from the likeliest codes of this total probability")
    g.add_argument("--ras_window", type=int, default=7, help="repetition-aware sampling: rows looked back at, 0 = off")
    g.add_argument("--ras_repeats", type=int, default=2,
                   help="repeats in those rows that make a code be drawn again, 0 = off")
    g.add_argument("--max_seconds", type=float, default=30.0, help="of speech; longer speech is cut, and says so")
    g.add_argument("--seed", type=int, default=42, help="of the draws")
    g.add_argument("--batch_size", type=int, default=4, help="prompts generated together on each device")
    g = p.add_argument_group("output")
    g.add_argument("--output_dir", default="./speech", help="folder for the results; shared by all nodes")
    g.add_argument("--overwrite", action="store_true", help="delete results of an earlier run in there first")
    g.add_argument("--save_codes", action="store_true", help="also write <name>.npy, the codec codes (frames, 8) int16")
    return p


def check_flags(args):
    """Raise UserError for values and combinations that would fail, or do nothing, later."""
    def need(good, message):
        if not good:
            raise UserError(message)

    need(bool(args.text) != bool(args.prompts), "give one of --text and --prompts")
    chatml = bool(args.prompts) and args.prompts.lower().endswith((".json", ".jsonl"))
    for flag in ("reference_audio", "reference_text", "system_prompt", "scene"):
        need(not (chatml and getattr(args, flag)), f"--{flag} is for texts and lines; a ChatML prompt says so itself")
    need(bool(args.reference_audio) == bool(args.reference_text),
         "--reference_audio and --reference_text go together: the model needs to know what the clip says")
    for flag in ("temperature", "top_k", "ras_window", "ras_repeats", "seed"):
        need(0 <= getattr(args, flag) < math.inf, f"--{flag} is {getattr(args, flag)}; it must be 0 or more and finite")
    need(args.seed < 2**62, f"--seed is {args.seed}; it must be below 2**62")
    need(0 < args.top_p <= 1, f"--top_p is {args.top_p}; it must be more than 0 and at most 1")
    need(0 < args.max_seconds < math.inf, f"--max_seconds is {args.max_seconds}; it must be more than 0 and finite")
    need(args.batch_size >= 1, f"--batch_size is {args.batch_size}; it must be at least 1")
    need(args.device != "cuda" or torch.cuda.is_available(), "--device cuda: there is no GPU here")


def read_texts(args):
    """The Samples to speak; raises UserError."""
    if args.prompts and args.prompts.lower().endswith((".json", ".jsonl")):
        return speak.read_prompts(args.prompts)
    lines = speak.read_lines(args.prompts) if args.prompts else [(f"--text {t!r}", t) for t in args.text]
    return speak.text_prompts(lines, args.reference_audio, args.reference_text, args.system_prompt or DEFAULT_SYSTEM,
                              args.scene)


def earlier_results(args):
    """Make the output folder; files of an earlier run in it, which only --overwrite allows. Raises UserError."""
    checkpoint.prepare_output(args.output_dir)
    old = [path for path in Path(args.output_dir).iterdir()
           if path.suffix in (".wav", ".png", ".json", ".npy") and path.stem.isdigit()]
    if old and not args.overwrite:
        raise UserError(f"--output_dir {args.output_dir} holds an earlier run's results ({old[0].name}, {len(old)} "
                        "files): give another folder, or --overwrite")
    return old


def prepare_share(world, args, samples, mine, tokenizer, ids, codec, bandwidth, room):
    """{batch number: Prompts} of this rank's batches; a bad prompt of any rank's raises UserError."""
    share, problems = {}, []
    for batch in mine:
        numbers = range(len(samples))[batch * args.batch_size:(batch + 1) * args.batch_size]
        try:
            share[batch] = speak.prepare([samples[i] for i in numbers], tokenizer, ids, codec, bandwidth, room, numbers)
        except UserError as error:
            problems.append(str(error))
    parallel.all_ranks_ok(world, problems)
    return share


def settings_of(args):
    """The flags that a sample's sound depends on, for its JSON file."""
    names = ("model_path", "adapter", "temperature", "top_k", "top_p", "ras_window", "ras_repeats", "batch_size")
    return {name: getattr(args, name) for name in names}


def speak_batch(args, native, codec, ids, settings, prompts, seed):
    """Generate, decode and write one batch of Prompts; returns what their JSON files say."""
    start = time.monotonic()
    try:
        spoken = speak.generate(native, prompts, ids, settings, seed, codec.device)
        waves = [speak.decode(codec, codes) for codes, _ in spoken]
    except torch.OutOfMemoryError:
        raise UserError(f"the GPU's memory is too small for {len(prompts)} prompts together: lower --batch_size or "
                        "--max_seconds")
    seconds, records = time.monotonic() - start, []
    total = sum(len(codes) for codes, _ in spoken) / FRAME_RATE
    for prompt, (codes, ended_by), wave in zip(prompts, spoken, waves):
        about = {**speak.record(prompt, codes, ended_by, seed, seconds / total if total else None), **settings_of(args)}
        if args.save_codes:
            checkpoint.write_atomically(Path(args.output_dir) / f"{prompt.name}.npy",
                                        lambda path, codes=codes: speak.save_codes(path, codes))
        speak.write_sample(args.output_dir, prompt.name, wave, speak.mel_picture(wave, prompt.text), about)
        tqdm.write(record_line(about))
        records.append(about)
    return records


def record_line(about):
    """One aligned line for the console, with a notice when the speech did not end by itself."""
    rtf = f"{about['real_time_factor']:6.2f}" if about["real_time_factor"] is not None else "     -"
    notice = "" if about["frames"] else "  <- no speech: end-of-stream came at once"
    if about["ended_by"] != "eos":
        notice = "  <- cut off: no end-of-stream came"
    return (f"{about['name']} | {about['seconds']:6.2f} s | {rtf} s/s | ended by {about['ended_by']:<6} | "
            f"{about['text'][:60]!r}{notice}")


def base_dtype(args, device):
    """torch.dtype of --dtype; "auto" is bfloat16 on GPUs that have it."""
    if args.dtype != "auto":
        return getattr(torch, args.dtype)
    has_bf16 = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
    return torch.bfloat16 if has_bf16 else torch.float32


def main(argv=None):
    args = build_parser().parse_args(argv)
    sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")
    with parallel.one_clear_error():
        check_flags(args)
        world = parallel.init(device=None if args.device == "auto" else args.device)
        samples = read_texts(args)
        old = parallel.rank0_first(world, earlier_results, args)
        # hub names are downloaded once, before the other ranks look
        parallel.rank0_first(world, speech_model.find_checkpoints, args)
        (folder, config_dict), codec_dir = speech_model.find_checkpoints(args)
        config = weights.native_config(config_dict)
        tokenizer = weights.load_tokenizer(folder)
        ids = token_ids(tokenizer, config)
        codec, bandwidth = load_codec(codec_dir, world.device, ids.num_codebooks)
        settings = speak.sampling(config, args.max_seconds, args.temperature, args.top_k, args.top_p,
                                  args.ras_window, args.ras_repeats)
        room = config.max_position_embeddings - settings.max_new_tokens
        # batches are cut from the whole list, so that the number of ranks changes nothing in them
        mine = range(-(-len(samples) // args.batch_size))[world.rank::world.size]
        share = prepare_share(world, args, samples, mine, tokenizer, ids, codec, bandwidth, room)
        dtype = base_dtype(args, world.device)
        native = speech_model.load_to_speak(folder, config_dict, args.adapter, dtype, world.device)
        if world.is_main:       # only now that nothing can be wrong any more
            for path in old:
                path.unlink()
        parallel.gather_objects(world, None)        # nobody writes before that is done
        if world.is_main:
            what = f"{args.model_path} + {args.adapter}" if args.adapter else args.model_path
            print(f"model      {what}, {str(dtype).removeprefix('torch.')} on {world.size} x {world.device.type}\n"
                  f"prompts    {len(samples)} in batches of {args.batch_size}; at most {args.max_seconds:g} s each")

        records = []
        for number in tqdm(mine, unit="batch", disable=None if world.is_main else True):
            records += speak_batch(args, native, codec, ids, settings, share[number], args.seed + number)
        records = [record for share in parallel.gather_objects(world, records) for record in share]
        if world.is_main:
            lengths = np.array([record["seconds"] for record in records])
            stopped = sum(record["ended_by"] == "eos" for record in records)
            print(f"done       {len(records)} samples, {lengths.sum():.1f} s of speech (mean {lengths.mean():.1f} s), "
                  f"{stopped} ended by themselves; {args.output_dir}")
            if stopped < len(records):
                print(f"notice     {len(records) - stopped} were cut off at --max_seconds {args.max_seconds:g}: raise "
                      "it, or the model has not learnt to stop")
        parallel.finish()


if __name__ == "__main__":
    main()
