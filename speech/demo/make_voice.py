"""Makes launch/voice, a base that speaks: digits in one voice of flite, and clips of another voice to learn.

    apt-get install flite
    python speech/demo/make_voice.py work --product_dir launch/voice     # on two cores, no GPU, about an hour

Stages, each of them kept in OUT_DIR; the same command again goes on where it was ended:

    OUT_DIR/texts.json      digit sequences: for the base, for the new voice, and held out from both
    OUT_DIR/clips/VOICE     flite's speech as wav files: 24 kHz, whole codec frames
    OUT_DIR/latents.pt      how latents are computed from a clip
    OUT_DIR/books           the codec with its codebooks set, encoder and decoder still random
    OUT_DIR/encoder.pt, decoder.pt      the codec's other parts, trained side by side
    OUT_DIR/base, codes, run            the random language model, the base's codes, and train_v2_ddp.py's run
    PRODUCT_DIR             model and codec as float16, clips as ogg, train.json, held.json, about.json

The codec is transformers' HiggsAudioV2TokenizerModel, 8 codebooks of 1024; voice_codec.py teaches it latents that are
computed: an envelope and a pitch, both relative to the voice's, and the voice. Codebooks 0 and 1 hold the envelope (256
live codes each), 2 the pitch (24), 3 the voice. 4 and 5, 6 and 7 (4 codes each) cancel each other, and are noise where
one is wrong or late, so that a fault in any codebook is heard. So a word has about the same codes in both voices. The base learns from codes of the computed latents; every later clip is encoded by the codec itself. Beside
its own voice the base hears two more of flite's, each clip of them with the base's voice code: one timbre, three ways
to speak a word. From one voice alone it learns that voice's codes by heart, and loses the words when it learns another.
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))    # common/ stands there

from common import flags


def build_parser():
    p = flags.Parser(__doc__.partition("\n")[0])
    p.usage = "%(prog)s OUT_DIR [--flag value ...]"
    p.add_argument("out_dir", metavar="OUT_DIR", type=Path, help="folder for all stages")
    p.add_argument("--product_dir", type=Path, help="where the product is put (default: OUT_DIR/voice)")
    p.add_argument("--texts", type=int, default=7000, help="texts that the base learns from")
    p.add_argument("--other_texts", type=int, default=3500, help="texts that it hears in each of kal16 and awb")
    p.add_argument("--clips", type=int, default=600, help="clips of the new voice to fine-tune on")
    p.add_argument("--held_out", type=int, default=40, help="texts of 3 to 5 words that are in no training list")
    p.add_argument("--encoder_steps", type=int, default=1850, help="steps of the codec's encoder, 4 crops of 0.8 s")
    p.add_argument("--decoder_steps", type=int, default=1300, help="steps of the codec's decoder, likewise")
    p.add_argument("--base_steps", type=int, default=4000, help="steps of the base, 16 clips each")
    p.add_argument("--ranks", type=int, default=2, help="processes that train the base; 16 is a multiple of it")
    p.add_argument("--seed", type=int, default=0, help="of texts, weights and order")
    p.add_argument("--only", choices=("codes", "encoder", "decoder", "base"),
                   help="of what is trained side by side, only this; codes: the base's random weights, clips and codes")
    p.add_argument("--flite", default="flite", help="the program; not needed for clips that are there already")
    return p


# parsed before torch is imported: --help and a mistake in a flag answer at once
def check_flags(args, world_size):
    """Raise UserError for counts that make no voice."""
    flags.at_least_one(args, "texts", "clips", "held_out", "encoder_steps", "decoder_steps",
                       "base_steps", "ranks")
    flags.zero_or_more(args, "other_texts", "seed")
    flags.need(16 % args.ranks == 0, f"--ranks is {args.ranks}; the 16 clips of a step cannot be shared by so many")
    flags.need(args.texts <= 50_000, f"--texts is {args.texts}; there are not many more than 100000 of so few words")


ARGS = flags.parse(build_parser(), check_flags) if __name__ == "__main__" else None

import itertools
import json
import platform
import random
import shlex
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import soundfile
import soxr
import torch
from safetensors.torch import load_file, save_file

from common import lifetime
from common.checkpoint import move_aside, sha256_file, write_atomically
from common.distributed import UserError, one_clear_error
from speech.choices import DEFAULT_SYSTEM
from speech.data import code_cache
from speech.data.code_cache import SAMPLE_RATE
from speech.data.conversations import Clip
from speech.data.decode import decode_audio
from speech.data.encode import Batch
from speech.demo import make_tiny
from speech.demo.voice_codec import (
    BASE,
    FRAME,
    NEW,
    OTHERS,
    VOICES,
    encode,
    latents,
    load_codec,
    make_decoder,
    make_encoder,
    make_latents,
    measure_voice,
    save_codec,
    say,
)

WORDS = "zero one two three four five six seven eight nine".split()
PEAK = 0.6                      # of every clip
CODEC_CLIPS = 450               # of each voice, at most, that the codec learns from


# ---------------------------------------------------------------------------------------------------------------------
# Texts and clips


def choose_texts(seed, base, new, held_out, other):
    """{"held_out", each voice: [digits]}: texts such as "314", distinct within a list; held-out ones are in no other.

    The base hears every text of one and two words, then longer ones.
    """
    draw = random.Random(seed)

    def distinct(count, lengths, taken=()):
        found = {}
        while len(found) < count:
            text = "".join(draw.choices("0123456789", k=draw.choice(lengths)))
            if text not in taken:
                found[text] = None
        return list(found)
    quarter = held_out // 4
    held = distinct(quarter, [3]) + distinct(held_out - 2 * quarter, [4]) + distinct(quarter, [5])
    short = ["".join(digits) for n in (1, 2) for digits in itertools.product("0123456789", repeat=n)][:base // 4]
    learnt = distinct(new, [2, 3, 4, 4, 5, 5], set(held))
    longer = distinct(base - len(short), [3, 4, 4, 4, 4, 5, 5, 5, 5, 5], {*held, *short})
    others = {voice: distinct(other, [2, 3, 3, 4, 4, 4, 5, 5, 5, 5], set(held)) for voice in OTHERS}
    return {"held_out": held, BASE: short + longer, NEW: learnt, **others}


def read_texts(path, seed, base, new, held_out, other):
    """choose_texts, kept in a file. Raises UserError where that has other counts."""
    if not path.exists():
        texts = choose_texts(seed, base, new, held_out, other)
        write_atomically(path, lambda temporary: temporary.write_text(json.dumps(texts) + "\n"))
    texts = json.loads(path.read_text())
    meant = {BASE: base, NEW: new, "held_out": held_out, **dict.fromkeys(OTHERS, other)}
    counts = {name: len(texts.get(name, ())) for name in meant}
    if counts != meant:
        raise UserError(f"{path} has texts: {counts}, the flags say {meant}: give another OUT_DIR")
    return texts


def spoken(digits):
    """"314" -> "three one four"."""
    return " ".join(WORDS[int(digit)] for digit in digits)


def make_clips(flite, folder, voice, texts):
    """Speaks each text into FOLDER/VOICE/DIGITS.wav, unless it is there. Raises UserError without flite."""
    (folder / voice).mkdir(parents=True, exist_ok=True)
    missing = [text for text in texts if not (folder / voice / f"{text}.wav").exists()]
    if missing and not shutil.which(flite):
        raise UserError(f"{len(missing)} clips are to be spoken and there is no {flite}: apt-get install flite")

    def make(text):
        with tempfile.NamedTemporaryFile(suffix=".wav") as file:
            subprocess.run([flite, "-voice", voice, "-t", spoken(text), "-o", file.name], check=True)
            wave, rate = soundfile.read(file.name, dtype="float32")
        wave = tidy(soxr.resample(wave, rate, SAMPLE_RATE))
        write_atomically(folder / voice / f"{text}.wav", lambda path: soundfile.write(
            path, wave, SAMPLE_RATE, subtype="PCM_16", format="WAV"))

    with ThreadPoolExecutor(flags.usable_cpus()) as pool:
        for count, _ in enumerate(pool.map(make, missing), 1):
            if count % 500 == 0 or count == len(missing):
                say(f"{voice}: {count} of {len(missing)} clips spoken")


def tidy(wave):
    """Peak at PEAK, silence cut to 40 ms before and 80 ms behind, padded to whole frames: the codec adds no padding."""
    wave = wave * (PEAK / max(np.abs(wave).max(), 1e-6))
    loud = np.flatnonzero(np.abs(wave) > 0.01)
    wave = wave[max(0, loud[0] - FRAME):loud[-1] + 2 * FRAME]
    return np.pad(wave, (0, -len(wave) % FRAME))


def read_clips(folder, voice, texts):
    """[(n,) float32 tensor at 24 kHz]."""
    return [torch.from_numpy(soundfile.read(folder / voice / f"{text}.wav", dtype="float32")[0]) for text in texts]


# ---------------------------------------------------------------------------------------------------------------------
# Language model


def sample(text, **audio):
    """ChatML sample: speak digits `text`. audio: where the clip is."""
    return {"messages": [{"role": "system", "content": DEFAULT_SYSTEM}, {"role": "user", "content": spoken(text)},
                         {"role": "assistant", "content": {"type": "audio", **audio}}], "start_index": 1}


def make_base(out_dir, texts, seed):
    """OUT_DIR/base: random weights and the samples to learn from, unless they are there; OUT_DIR/codes: their codes."""
    folder, clips = out_dir / "base", {voice: [out_dir / "clips" / voice / f"{text}.wav" for text in texts[voice]]
                                       for voice in (BASE, *OTHERS)}
    if not (folder / "train.json").exists():
        every = [f"{DEFAULT_SYSTEM} system user assistant", *(spoken(text) for text in texts[BASE][:500])]
        tokenizer = make_tiny.make_tokenizer(folder, every * 4)
        model = make_tiny.make_model(folder, tokenizer, seed, hidden_size=96, num_hidden_layers=4,
                                      intermediate_size=192, num_attention_heads=3, num_key_value_heads=3,
                                      initializer_range=0.05)
        say(f"base: {model.num_parameters():,} parameters, {len(tokenizer)} token ids")
        samples = [sample(path.stem, audio_url=str(path)) for paths in clips.values() for path in paths]
        write_atomically(folder / "train.json", lambda path: path.write_text(json.dumps(samples)))
    fill_cache(out_dir, clips)


def train_base(out_dir, steps, seed, ranks):
    """Runs train_v2_ddp.py on OUT_DIR/base, all weights; it resumes by itself."""
    folder = out_dir / "base"
    command = ["torchrun", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1",
               f"--nproc-per-node={ranks}", "train_v2_ddp.py",
               "--model_path", folder / "model", "--audio_tokenizer_path", out_dir / "books",
               "--train_data_file", folder / "train.json", "--code_cache", out_dir / "codes",
               "--output_dir", out_dir / "run", "--report_to", "none", "--seed", seed, "--max_steps", steps,
               "--per_device_train_batch_size", 16 // ranks, "--num_workers", 0, "--preprocess_num_proc", 0,
               "--learning_rate", 2e-3, "--warmup_steps", 50, "--weight_decay", 0.1, "--adam_beta2", 0.99,
               "--text_loss_weight", 0, "--validation_split", 0.01, "--per_device_eval_batch_size", 16,
               "--logging_steps", 50, "--eval_steps", min(500, steps), "--save_steps", min(250, steps),
               "--save_total_limit", 1]
    repository = Path(__file__).resolve().parent.parent.parent
    training = lifetime.start([str(word) for word in command], cwd=repository)
    try:
        if status := training.wait():
            raise UserError(f"train_v2_ddp.py ended with status {status}; its last lines say why")
    finally:
        lifetime.end(training)


def fill_cache(out_dir, paths):
    """Writes codes of the clips' computed latents where train_v2_ddp.py looks for them, unless there.

    paths: {voice: [Path]}
    """
    folder = out_dir / "codes" / code_cache.codec_fingerprint(out_dir / "books")
    folder.mkdir(parents=True, exist_ok=True)
    codec, known = load_codec(out_dir / "books"), torch.load(out_dir / "latents.pt")
    for voice, of in paths.items():
        if voice in OTHERS and of:
            known[voice] = measure_voice(voice, read_clips(out_dir / "clips", voice, [
                path.stem for path in of if len(path.stem) > 2][:CODEC_CLIPS]))
        clips = [Clip(str(path), None, None) for path in of]
        _, unknown = code_cache.CacheIndex(folder).find_clips(clips)
        batch = Batch(folder, len(codec.quantizer.quantizers))
        for number, size, modified in unknown.tolist():
            clip = clips[number]
            digest, (wave,) = decode_audio(clip.path, [(None, None)])
            key = code_cache.content_key(digest, clip)
            found = encode(codec, latents(torch.from_numpy(wave), voice, known))
            batch.add_codes(key, found.to(torch.int16).numpy())
            batch.add_file(code_cache.file_key(clip, size, modified), key)
        batch.write()
        say(f"base: {len(unknown)} clips of {voice} encoded")


# ---------------------------------------------------------------------------------------------------------------------
# Product


def write_ogg(path, waves):
    """Waves one behind the other in an ogg file -> [{"offset", "duration"} in seconds] of each."""
    with soundfile.SoundFile(path, "w", SAMPLE_RATE, 1, "OPUS", format="OGG", compression_level=0.975) as file:
        for wave in waves:      # one by one: libsndfile 1.2.2 crashes where it gets minutes at once
            file.write(wave)
    ends = np.cumsum([len(wave) for wave in waves])
    return [{"offset": round((end - len(wave)) / SAMPLE_RATE, 2), "duration": round(len(wave) / SAMPLE_RATE, 2)}
            for end, wave in zip(ends.tolist(), waves)]


def save_clips(product, stem, folder, voice, texts, per_file=100):
    """Ogg files of a voice's texts -> their samples."""
    samples = []
    for first in range(0, len(texts), per_file):
        part, name = texts[first:first + per_file], f"{stem}-{first // per_file}.ogg"
        places = write_ogg(product / name, [wave.numpy() for wave in read_clips(folder, voice, part)])
        samples += [sample(text, audio_url=name, **place) for text, place in zip(part, places)]
    return samples


def make_product(args, given, texts, product):
    """Everything that the demo needs, as small as it goes, and where it came from."""
    building = product.with_name(f".{product.name}.tmp")
    shutil.rmtree(building, ignore_errors=True)
    trained = args.out_dir / "run" / f"checkpoint-{args.base_steps}"
    shutil.copytree(trained, building / "model", ignore=shutil.ignore_patterns("trainer_state", "manifest.json"))
    weights = building / "model" / "model.safetensors"
    save_file({name: t.half() for name, t in load_file(weights).items()}, weights, {"format": "pt"})
    path = building / "model" / "processor_config.json"
    config = json.loads(path.read_text())
    config["audio_tokenizer"]["audio_tokenizer_name_or_path"] = str(product / "codec")
    path.write_text(json.dumps(config, indent=2) + "\n")
    codec = load_codec(args.out_dir / "books")
    codec.acoustic_encoder.load_state_dict(torch.load(args.out_dir / "encoder.pt")["module"])
    codec.acoustic_decoder.load_state_dict(torch.load(args.out_dir / "decoder.pt")["module"])
    save_codec(codec, building / "codec")
    clips = args.out_dir / "clips"
    for name, made in (("train", save_clips(building, NEW, clips, NEW, texts[NEW])),
                       ("held", save_clips(building, f"held-{NEW}", clips, NEW, texts["held_out"])),
                       ("held_base", save_clips(building, f"held-{BASE}", clips, BASE, texts["held_out"]))):
        (building / f"{name}.json").write_text(json.dumps(made, separators=(",", ":")) + "\n")
    shutil.copy(args.out_dir / "texts.json", building)
    write_about(args, given, building)
    if product.exists():
        for kept in product.glob("LICENSE*"):
            shutil.copy(kept, building)
        move_aside(product, "was made by an earlier run", "earlier")
    building.rename(product)


def write_about(args, given, folder):
    """about.json: the command with the flags given, the versions, and the hashes of all files."""
    flite = subprocess.run([args.flite, "--version"], text=True, capture_output=True).stdout if shutil.which(
        args.flite) else ""
    version = next((line for line in flite.splitlines() if "version" in line), "flite: not there")
    import transformers
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    about = {"command": shlex.join(["python", "speech/demo/make_voice.py", *given]),
             "versions": {"python": platform.python_version(), "torch": torch.__version__,
                          "transformers": transformers.__version__, "flite": version.strip()},
             "voices": {"base": BASE, "new": NEW, "heard by the base, too": OTHERS},
             "sha256": {str(path.relative_to(folder)): sha256_file(path) for path in files}}
    (folder / "about.json").write_text(json.dumps(about, indent=1) + "\n")
    say(f"product: {sum(path.stat().st_size for path in files) / 1e6:.2f} MB in {len(files)} files")


def main(argv=None):
    args = ARGS or flags.parse(build_parser(), check_flags, argv)
    given = sys.argv[1:] if argv is None else argv
    with one_clear_error():
        args.out_dir.mkdir(parents=True, exist_ok=True)
        args.out_dir = args.out_dir.resolve()
        texts = read_texts(args.out_dir / "texts.json", args.seed, args.texts, args.clips, args.held_out,
                           args.other_texts)
        clips = args.out_dir / "clips"
        longer = {voice: [text for text in texts[voice] if len(text) > 2][:CODEC_CLIPS] for voice in VOICES}
        if args.only in (None, "codes"):
            for voice in VOICES:
                make_clips(args.flite, clips, voice, longer[voice] + texts["held_out"])
        waves = {voice: read_clips(clips, voice, longer[voice]) for voice in VOICES}
        make_latents(args.out_dir, waves, args.seed)
        beside = [] if args.only else [lifetime.start([sys.executable, __file__, *given, "--only", part])
                                       for part in ("encoder", "decoder")]
        try:
            if args.only == "encoder":
                make_encoder(args.out_dir, waves, args.encoder_steps, args.seed)
            elif args.only == "decoder":
                make_decoder(args.out_dir, waves, args.decoder_steps, args.seed)
            else:
                for voice in (*VOICES, *OTHERS):
                    make_clips(args.flite, clips, voice, texts[voice])
                make_base(args.out_dir, texts, args.seed)
                if args.only != "codes":
                    train_base(args.out_dir, args.base_steps, args.seed, args.ranks)
            if any([process.wait() for process in beside]):
                raise UserError("the encoder's or the decoder's training failed; the lines above say why")
        finally:
            for process in beside:
                lifetime.end(process)
        if not args.only:
            make_product(args, given, texts, args.product_dir or args.out_dir / "voice")


if __name__ == "__main__":
    main()
