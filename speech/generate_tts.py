"""Speak with Higgs-Audio V2: a base model, a fine-tuned checkpoint, or a base with a trained adapter.

    python speech/generate_tts.py --model_path bosonai/higgs-audio-v2-generation-3B-base --adapter out/checkpoint-500 \
        --audio_tokenizer_path bosonai/higgs-audio-v2-tokenizer --text "Good morning." --output_dir spoken
    torchrun --nproc_per_node=8 speech/generate_tts.py ... --prompts prompts.json   # every GPU takes its share

For each prompt: <name>.wav (24 kHz), <name>.png (mel spectrogram) and <name>.json with text, seed, frames, seconds,
real_time_factor (seconds of computing per second of speech, of its whole batch) and ended_by: "eos" when the model
stopped by itself, "length" when --max_seconds cut it off. The same seed and batch size give the same speech on any
number of GPUs.
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))    # core/ is there

from core import cli
from core.cli import UserError, require
from speech import choices
from speech.choices import CHATML, ON_OFF

# flags that a sample's sound depends on, noted in its JSON file
SOUND = ("model_path", "adapter", "base_dtype", "batch_size")


def build_parser():
    p = cli.Parser("Speak with Higgs-Audio V2.")
    g = p.add_argument_group("model")
    g.add_argument("--model_path", required=True, help="model or full checkpoint, folder or hub name: Higgs-Audio V2 "
                   "(native or 2025 format) or Higgs TTS 3")
    choices.codec(g)
    g.add_argument("--adapter", help="folder with adapter_model.safetensors, used on top of --model_path")
    g.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto", help="auto: a GPU when there is one")
    g.add_argument("--dtype", choices=("auto", "bfloat16", "float16", "float32"), default="auto",
                   help="of the base's weights; adapters stay float32; auto: bfloat16 on a GPU, float16 on a T4 or V100")
    choices.base_dtype(g, "nf4 keeps the base's layers in four bits: for 8 to 12 GB")
    g = p.add_argument_group("what to say")
    g.add_argument("--text", nargs="+", help="one or more texts")
    g.add_argument("--prompts", help="file: one text a line, or with the voice to take in it ChatML .json/.jsonl or a "
                                     "list of Seed-TTS-eval, .lst")
    g.add_argument("--reference_audio", help="clip whose voice is taken, for texts and lines")
    g.add_argument("--reference_text", help="what is said in --reference_audio; Higgs TTS 3 clones without it, "
                   "too")
    g.add_argument("--system_prompt", help="for texts and lines (default: as in training, by the [SPEAKER*] tags of "
                   "each text)")
    g.add_argument("--scene", help="scene description for texts and lines, e.g. 'Audio is recorded from a quiet room.'")
    g.add_argument("--normalize_text", choices=ON_OFF, help="punctuation and sound tags as boson-ai's inference gives "
                   "them to the model (default: as the checkpoint was trained; on for a base model)")
    g = p.add_argument_group("how")
    g.add_argument("--temperature", type=float, help="of the draws; 0 = greedy (default: 1 for V2, 0.8 for TTS 3)")
    g.add_argument("--top_k", type=int,
                   help="draw from so many likeliest codes, 0 = all (default: 50 for V2, 30 for TTS 3)")
    g.add_argument("--top_p", type=float,
                   help="draw from the likeliest codes of this total probability (default: 0.95 for V2, 0.8 for TTS 3)")
    g.add_argument("--ras_window", type=int,
                   help="V2's repetition-aware sampling: rows looked back at, 0 = off (default: 7)")
    g.add_argument("--ras_repeats", type=int,
                   help="repeats in those rows that make a code be drawn again, 0 = off (default: 2)")
    g.add_argument("--max_seconds", type=float, default=30.0, help="of speech; longer speech is cut, and says so")
    g.add_argument("--seed", type=int, default=42, help="of the draws")
    g.add_argument("--batch_size", type=int, default=4, help="prompts generated together on each device")
    g.add_argument("--best_of", type=int, default=1, help="takes of each text, of which the best is kept: one that "
                   "ends by itself, of those the one that --asr_model or --asr_command understands best, of those the "
                   "likest by --speaker_model; a faultless one is not tried again")
    g.add_argument("--split_text", type=int, default=0, metavar="N", help="speak texts of more than N characters part "
                   "by part, cut behind sentences; each part behind the reference, or the part before it; 0 = off")
    g.add_argument("--stream", metavar="FILE",
                   help="with --split_text, of one --text: write its sound part by part as it is "
                        "spoken, to this WAV file, or raw (24 kHz, 16 bit) to stdout: -")
    choices.recognisers(g)
    choices.speakers(g)
    g = p.add_argument_group("output")
    g.add_argument("--output_dir", default="./spoken", help="folder for the results; shared by all nodes")
    cli.switch(g, "--overwrite", help="delete results of an earlier run in there first")
    g.add_argument("--max_cer", type=float, metavar="SHARE", help="with --best_of: write best.jsonl, training data, of "
                   "the takes that ended by themselves with at most so many character errors, through their codes")
    cli.switch(g, "--save_codes", help="also write <name>.npy, the codec codes (frames, 8) int16")
    return p


def check_flags(args, world_size):
    """Raise UserError for values and combinations that would fail, or do nothing, later."""
    require(bool(args.text) != bool(args.prompts), "give one of --text and --prompts")
    chatml = bool(args.prompts) and args.prompts.lower().endswith(CHATML)
    for flag in ("reference_audio", "reference_text", "system_prompt", "scene"):
        require(not (chatml and getattr(args, flag)), f"--{flag} is for texts and lines; a ChatML prompt says so itself")
    require(args.reference_audio or not args.reference_text, "--reference_text says what is said in --reference_audio")
    cli.zero_or_more(args, "temperature top_k ras_window ras_repeats seed split_text")
    require(args.seed < 2**62, f"--seed is {args.seed}; it must be below 2**62")
    require(args.top_p is None or 0 < args.top_p <= 1, f"--top_p is {args.top_p}; it must be more than 0 and at most 1")
    cli.above_zero(args, "max_seconds")
    cli.at_least_one(args, "batch_size best_of")
    choices.check_base_dtype(args)
    choices.check_recognisers(args)
    require(args.best_of > 1 or not (args.asr_model or args.asr_command or args.speaker_model),
         "--asr_model, --asr_command and --speaker_model choose among takes: give --best_of; to judge speech, "
         "speech/evaluate_tts.py")
    cli.share(args, "max_cer")
    require(args.max_cer is None or args.asr_model or args.asr_command, "--max_cer needs --best_of and a recogniser")
    require(args.max_cer is None or not args.split_text, "--max_cer does not go with --split_text: a part is no answer to "
                                                      "the whole text")
    require(not (args.split_text and chatml), "--split_text is for texts and lines, not for ChatML prompts")
    require(not args.stream or args.split_text and len(args.text or ()) == world_size == 1,
         "--stream takes one --text, --split_text and one process")
    stream = Path(args.stream or "-")
    require(args.overwrite or not stream.is_file(), f"--stream {stream} is there: --overwrite it")
    require(stream.parent.is_dir(), f"--stream {stream}: there is no such folder; make it first")


if __name__ == "__main__" and any(word in ("-", "--stream=-") for word in sys.argv):
    sys.stdout = sys.stderr     # --stream -: sound alone goes there, no notice of the flags either

# parsed before torch is imported: --help and a mistake in a flag answer at once
ARGS = cli.parse(build_parser(), check_flags) if __name__ == "__main__" else None

import time
from functools import partial

import numpy as np
import torch
from tqdm import tqdm

from core import checkpoint, dist
from speech import text_normalization
from speech.code_cache import FRAME_RATE
from speech.encode import load_codec
from speech import generate, versions, weights

from core import adapters  # isort: skip      # after weights, which explains a broken torchaudio


def read_texts(args, normalize):
    """The Samples to speak; raises UserError. normalize: of generate.read_prompts."""
    if args.prompts and args.prompts.lower().endswith(CHATML):
        return generate.read_prompts(args.prompts, normalize)
    lines = [(f"--text {text!r}", text) for text in args.text or ()]
    lines = generate.read_lines(args.prompts) if args.prompts else lines
    if args.split_text:
        from speech import takes
        for name, text in lines:
            require(len(text) <= args.split_text or not takes.MARK.search(text), f"{name}: --split_text would give a tag "
                 "such as [SPEAKER1] to the first part alone; split this text yourself")
    return generate.text_prompts(lines, normalize, args.reference_audio, args.reference_text,
                                 args.system_prompt, args.scene)


def setting_to_speak(wanted, model, adapter=None):
    """(whether to normalise, a line that says so and why).

    wanted: --normalize_text, or None for what the checkpoint was trained with. model, adapter:
    folders.
    """
    folder = adapter or model
    saved = text_normalization.saved_setting(folder)
    if wanted:
        other = f"; {folder} was trained with {saved}" if saved and saved != wanted else ""
        return wanted == "on", f"--normalize_text {wanted}{other}"
    if saved:
        return saved == "on", f"--normalize_text {saved}, as {folder} was trained"
    return True, f"--normalize_text on, as in boson-ai's inference: {folder} is not a checkpoint of this trainer"


def earlier_results(output_dir, overwrite):
    """Make the output folder, this run's from here on; files of an earlier run in it, which only --overwrite allows.
    Raises UserError.
    """
    checkpoint.claim_output(output_dir)
    old = [path for path in Path(output_dir).iterdir()
           if path.suffix in (".wav", ".png", ".json", ".npy") and path.stem.isdigit() or path.name == "best.jsonl"]
    if old and not overwrite:
        raise UserError(f"--output_dir {output_dir} holds an earlier run's results ({old[0].name}, {len(old)} "
                        "files): give another folder, or --overwrite")
    return old


def prepare_share(world, samples, mine, batch_size, prepare):
    """{batch number: Prompts} of this rank's batches; a bad prompt of any rank's raises UserError.

    prepare(samples, their numbers) -> Prompts.
    """
    share, problems = {}, []
    for batch in mine:
        numbers = range(len(samples))[batch * batch_size:(batch + 1) * batch_size]
        try:
            share[batch] = prepare([samples[i] for i in numbers], numbers)
        except UserError as error:
            problems.append(str(error))
    dist.raise_problems(world, problems)
    return share


def load_judges(args):
    """scores.Judges that choose among takes. Raises UserError."""
    from speech import scores
    return scores.load_judges(args.asr_model, args.asr_command, args.speaker_model, language=args.language,
                              asr_time_limit=args.asr_time_limit)


def speak_takes(native, codec, ids, settings, prompts, seed, prepare, args):
    """speak_batch's Prompts and [(codes, ended_by, wave, facts)] with --best_of and --split_text.

    prepare(samples, their numbers) -> Prompts.
    """
    from speech import takes
    judges = load_judges(args)

    def speak(some, turn=0):
        return takes.speak(native, codec, ids, settings, some, seed + turn * takes.STRIDE * args.best_of,
                           args.best_of, judges)
    if not args.split_text:
        return prompts, speak(prompts)

    def behind(asked):
        samples = [generate.text_prompts([(prompts[i].source, part)], False, *(reference or ()), system=args.system_prompt,
                                         scene=args.scene)[0] for i, part, reference in asked]
        return prepare(samples, [int(prompts[i].name) for i, *_ in asked])
    given = (args.reference_audio, args.reference_text) if args.reference_audio else None
    texts = [takes.parts(prompt.text, args.split_text) for prompt in prompts]
    write = takes.stream(args.stream) if args.stream else None
    whole = takes.speak_parts(texts, [given] * len(texts), behind, speak, judges, write)
    return [prompt for prompt, *_ in whole], [tuple(found) for _, *found in whole]


def speak_batch(native, codec, ids, settings, prompts, seed, noted, prepare, args):
    """Generate, decode and write one batch of Prompts; returns what their JSON files say.

    noted: {name: value} for the JSON files, beside what was spoken. prepare: of speak_takes.
    """
    start = time.monotonic()
    try:
        if args.best_of > 1 or args.split_text:
            prompts, found = speak_takes(native, codec, ids, settings, prompts, seed, prepare, args)
        else:
            spoken = generate.generate(native, prompts, ids, settings, seed, codec.device)
            found = [(codes, ended_by, generate.decode(codec, codes), {}) for codes, ended_by in spoken]
    except torch.OutOfMemoryError:
        raise UserError(f"the GPU's memory is too small for {len(prompts)} prompts together: lower --batch_size or "
                        "--max_seconds")
    seconds, records = time.monotonic() - start, []
    total = sum(len(codes) for codes, *_ in found) / FRAME_RATE
    for prompt, (codes, ended_by, wave, facts) in zip(prompts, found):
        about = {**generate.record(prompt, codes, ended_by, seed, seconds / total if total else None), **noted, **facts}
        if args.save_codes or args.max_cer is not None:
            checkpoint.write_atomically(Path(args.output_dir) / f"{prompt.name}.npy",
                                        lambda path, codes=codes: generate.save_codes(path, codes))
        generate.write_sample(args.output_dir, prompt.name, wave, generate.mel_picture(wave, prompt.text), about)
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


def base_dtype(name, device):
    """torch.dtype of --dtype; "auto" is bfloat16 on GPUs that have it, float16 on others."""
    if name != "auto":
        return getattr(torch, name)
    if device.type != "cuda":
        return torch.float32
    return torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16


def load_to_speak(folder, config, adapter, dtype, device, four_bits=False):
    """Native model for generate on the device, in eval mode; an adapter stays beside its frozen base, in fp32.

    config: the folder's config.json dict. adapter: PEFT folder or None. four_bits: the base's layers as nf4.py has
    them. Raises UserError.
    """
    module = versions.module(config)
    native = net = module.empty_model(config, dtype, folder)
    parts = module.weight_parts(folder, config)
    weights.check_weights(native, parts, folder)
    if adapter:
        net = adapters.add_saved(native, adapter, whole=module.WHOLE_MODULES)
        require(not (four_bits and net.peft_config["default"].use_dora),
             f"--base_dtype nf4: {adapter} is DoRA, which needs the weights themselves")
    load = weights.load_weights
    if four_bits:
        from core import nf4
        for name, parameter in native.named_parameters():      # what is frozen is converted
            parameter.requires_grad_("lora_" in name)
        nf4.convert(module.layers(native))
        load = partial(nf4.load_weights, native, load)
    net.to_empty(device=device)
    module.reset_buffers(native, device)
    loaded = adapters.base_weights(net) if adapter else dict(native.named_parameters())
    load(loaded, parts, None)
    if adapter:
        adapters.load_adapters(net, adapter)
    return native.eval()


def main(argv=None):
    args = ARGS or cli.parse(build_parser(), check_flags, argv)
    sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")
    world = dist.init()
    require(args.device != "cuda" or torch.cuda.is_available(), "--device cuda: there is no GPU here")
    if args.device != "auto":
        world.device = torch.device(args.device)
    old = dist.rank0(world, earlier_results, args.output_dir, args.overwrite)
    folder, config_dict, codec_dir = versions.find_files(world, args.model_path, args.audio_tokenizer_path,
                                                       args.output_dir)
    module = versions.module(config_dict)
    wanted = args.normalize_text or ("off" if versions.is_third(config_dict["model_type"]) else None)
    normalize, why = setting_to_speak(wanted, folder, args.adapter)
    require(args.reference_text or not args.reference_audio or versions.is_third(config_dict["model_type"]),
         "--reference_audio and --reference_text go together: the model needs to know what the clip says")
    samples = read_texts(args, normalize)
    clips = [clip for sample in samples for turn in sample.turns for clip in turn.clips]
    files = [args.prompts or "", *(clip.path for clip in clips)]
    written = (*old, args.stream or "-")
    lost = {Path(file).resolve() for file in files} & {Path(file).resolve() for file in written}
    require(not lost, f"--overwrite would delete {min(lost, default='')}, which is read: "
                   "give another --output_dir")
    config, tokenizer = module.read_config(config_dict), module.load_tokenizer(folder)
    ids = module.token_ids(tokenizer, config)
    codec, bandwidth = load_codec(codec_dir, world.device, ids.num_codebooks)
    draws = generate.draws(config, {name: getattr(args, name) for name in generate.DRAW_FLAGS})
    settings = generate.sampling(config, args.max_seconds, **draws)
    room = module.positions(config) - settings.max_new_tokens
    # batches are cut from the whole list, so that the number of ranks changes nothing in them
    mine = range(-(-len(samples) // args.batch_size))[world.rank::world.size]

    def prepare(some, numbers):
        return generate.prepare(some, tokenizer, ids, codec, bandwidth, room, numbers)
    share = prepare_share(world, samples, mine, args.batch_size, prepare)
    dtype = base_dtype(args.dtype, world.device)
    native = load_to_speak(folder, config_dict, args.adapter, dtype, world.device, args.base_dtype)
    if args.best_of > 1:
        dist.rank0(world, lambda: load_judges(args) and None)      # one downloads for all
    if world.is_main:       # only now that nothing can be wrong any more
        for path in old:
            path.unlink()
    dist.all_gather(world, None)        # nobody writes before that is done
    if world.is_main:
        what = f"{args.model_path} + {args.adapter}" if args.adapter else args.model_path
        print(f"model      {what}, {str(dtype).removeprefix('torch.')} on {world.size} x {world.device.type}"
              f"{', its base in NF4' * bool(args.base_dtype)}\n"
              f"text       {why}\n"
              f"prompts    {len(samples)} in batches of {args.batch_size}; at most {args.max_seconds:g} s each")

    noted = {name: getattr(args, name) for name in SOUND} | draws | {"normalize_text": "on" if normalize else "off"}
    records = []
    for number in tqdm(mine, unit="batch", disable=None if world.is_main else True):
        records += speak_batch(native, codec, ids, settings, share[number], args.seed + number,
                               noted, prepare, args)
    records = [record for share in dist.all_gather(world, records) for record in share]
    if world.is_main:
        lengths = np.array([record["seconds"] for record in records])
        stopped = sum(record["ended_by"] == "eos" for record in records)
        print(f"done       {len(records)} samples, {lengths.sum():.1f} s of speech (mean {lengths.mean():.1f} s), "
              f"{stopped} ended by themselves; {args.output_dir}")
        if stopped < len(records):
            print(f"notice     {len(records) - stopped} were cut off at --max_seconds {args.max_seconds:g}: raise "
                  "it, or the model has not learnt to stop")
        if args.max_cer is not None:
            from speech import takes
            records.sort(key=lambda record: int(record["name"]))
            print(takes.write_good(args.output_dir, samples, records, args.max_cer, ids.min_frames))
    dist.finish()


if __name__ == "__main__":
    main()
