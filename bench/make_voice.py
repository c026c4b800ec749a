"""Makes what bench/voice_curve.py trains: digits in one voice of flite, a codec, a random model.

    apt-get install flite
    python bench/make_voice.py work codes       # then: decoder

Stages, each of them kept in OUT_DIR; the same command again goes on where it was ended:

    OUT_DIR/texts.json      digit sequences: for the base, for the new voice, and held out from both
    OUT_DIR/clips/VOICE     flite's speech as wav files: 24 kHz, whole codec frames
    OUT_DIR/latents.pt      how latents are computed from a clip
    OUT_DIR/books           the codec with its codebooks set, encoder and decoder still random
    OUT_DIR/base, codes     the random language model, and the codes that it learns from
    OUT_DIR/decoder.pt      the codec's decoder, trained

The codec is transformers' HiggsAudioV2TokenizerModel, 8 codebooks of 1024; voice_codec.py teaches it
latents that are computed: an envelope and a pitch, both relative to the voice's, and the voice.
Codebooks 0 and 1 hold the envelope (256 live codes each), 2 the pitch (24), 3 the voice. 4 and 5, 6
and 7 (4 codes each) cancel each other, and are noise where one is wrong or late, so that a fault in
any codebook is heard. So a word has about the same codes in both voices. Beside its own voice the
base hears two more of flite's, each clip of them with the base's voice code: from one voice alone it
learns that voice's codes by heart, and loses the words when it learns another.

launch/voice was made so, with the codec's encoder trained as well, by commit a5ef2c7's
speech/demo/make_voice.py.
"""
import argparse
import itertools
import json
import random
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import soundfile
import soxr
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.voice_codec import (
    BASE,
    FRAME,
    NEW,
    OTHERS,
    VOICES,
    encode,
    latents,
    load_codec,
    make_decoder,
    make_latents,
    measure_voice,
    say,
)
from common import flags
from common.checkpoint import write_atomically
from common.distributed import UserError, one_clear_error
from speech.choices import DEFAULT_SYSTEM
from speech.data import code_cache
from speech.data.code_cache import SAMPLE_RATE
from speech.data.conversations import Clip
from speech.data.decode import decode_audio
from speech.data.encode import Batch
from speech.demo import make_tiny

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


def parse(argv=None):
    p = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    p.add_argument("out_dir", metavar="OUT_DIR", type=Path, help="folder for all stages")
    p.add_argument("stage", choices=("codes", "decoder"),
                   help="codes: clips, codebooks, the base's random weights and codes; decoder: of the "
                        "codec, trained")
    p.add_argument("--texts", type=int, default=7000, help="texts that the base learns from")
    p.add_argument("--other_texts", type=int, default=0, help="that it hears in each of kal16 and awb")
    p.add_argument("--clips", type=int, default=400, help="texts of the new voice")
    p.add_argument("--held_out", type=int, default=40, help="texts of 3 to 5 words in no other list")
    p.add_argument("--decoder_steps", type=int, default=1300, help="of 4 crops of 0.8 s")
    p.add_argument("--seed", type=int, default=0, help="of texts, weights and order")
    p.add_argument("--flite", default="flite", help="the program; not needed where the clips are there")
    return p.parse_args(argv)


def main(argv=None):
    args = parse(argv)
    with one_clear_error():
        out_dir = args.out_dir.resolve()
        out_dir.mkdir(parents=True, exist_ok=True)
        texts = read_texts(out_dir / "texts.json", args.seed, args.texts, args.clips, args.held_out,
                           args.other_texts)
        clips = out_dir / "clips"
        longer = {voice: [text for text in texts[voice] if len(text) > 2][:CODEC_CLIPS]
                  for voice in VOICES}
        for voice in VOICES:
            make_clips(args.flite, clips, voice, longer[voice] + texts["held_out"])
        waves = {voice: read_clips(clips, voice, longer[voice]) for voice in VOICES}
        make_latents(out_dir, waves, args.seed)
        if args.stage == "decoder":
            make_decoder(out_dir, waves, args.decoder_steps, args.seed)
            return
        for voice in (*VOICES, *OTHERS):
            make_clips(args.flite, clips, voice, texts[voice])
        make_base(out_dir, texts, args.seed)


if __name__ == "__main__":
    main()
