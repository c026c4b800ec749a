"""Make a tiny Higgs-Audio V2, its codec and clips, so tests and demos need no download.

    python speech/make_tiny.py OUT_DIR [--clips 48] [--speakers 4] [--higgs3]

    OUT_DIR/model       a random two-layer language model, with tokenizer, template and processor
    OUT_DIR/codec       a random audio codec of the real geometry: 24 kHz, 25 frames per second
    OUT_DIR/speech      sentences in toy voices, wav files in mixed sample rates, mono and stereo
    OUT_DIR/train.json  one ChatML voice-cloning sample per clip, paths relative to OUT_DIR

Each run writes the same files. OUT_DIR/model names the codec by its absolute path, so make it again
instead of moving it. With --higgs3 OUT_DIR/model is a Higgs TTS 3 under the published names, with
the codec's weights inside.
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))    # core/ is there

from core import cli


p = cli.Parser(__doc__.partition("\n")[0])
p.add_argument("out_dir", metavar="OUT_DIR", type=Path, help="folder for the files")
p.flag("--clips", 48, "number of wav files, and of samples in train.json")
p.flag("--speakers", 4, "number of voices; they take turns", cli.COUNT)
p.switch("--higgs3", "make a Higgs TTS 3 instead of a V2")


def check_flags(args, world_size):
    cli.require(args.clips >= 2 * args.speakers,
                f"--clips is {args.clips}; each speaker needs 2, one of them as a reference")


# parsed before torch is imported: --help and wrong flags answer at once
ARGS = cli.parse(p, check_flags) if __name__ == "__main__" else None

import json
import re

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (DacConfig, HiggsAudioV2Config,
                          HiggsAudioV2ForConditionalGeneration, HiggsAudioV2TokenizerConfig,
                          HiggsAudioV2TokenizerModel, HubertConfig, PreTrainedTokenizerFast)

from core import tensor_io
from speech import layout_2025, v3

VOCAB_SIZE = 600
CODEC_STRIDES = [8, 5, 4, 2, 3]  # product: 960 samples a frame
CLIP_RATES = (22050, 24000, 44100, 16000)  # Hz

# The first 17 have the order of ids 128000 to 128016 in the released tokenizer.
RESERVED = "reserved_special_token_"
SPECIAL_TOKENS = [f"<|{name}|>" for name in (
    f"begin_of_text end_of_text {RESERVED}0 {RESERVED}1 finetune_right_pad_id {RESERVED}2 "
    "start_header_id end_header_id eom_id eot_id python_tag audio_bos audio_eos audio_out_bos "
    f"{RESERVED}6 AUDIO AUDIO_OUT recipient scene_desc_start scene_desc_end {RESERVED}3 "
    f"{RESERVED}4 {RESERVED}5 {RESERVED}7").split()]

# Some of Higgs TTS 3's added tokens, in the order of their ids, and 4 of its 43 control tags.
SPECIAL_TOKENS_3 = [f"<|{name}|>" for name in (
    "endoftext im_start im_end tts audio audio_end text text_end eoc ref_audio ref_text "
    "emotion:elation style:whispering sfx:laughter prosody:pause").split()]

# how the Llama 3 family splits text before byte-pair merging
WORD_PATTERN = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
                r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")

STORY = """\
The kettle is singing on the stove. Please leave the window open tonight. Remember this: the door is
never locked. A small boat drifted past the lighthouse. My sister plays the cello every morning. The
bakery sells warm bread before dawn. He counted the coins twice and sighed. Our train was late
because of the snow. She asked one question: where is the map? The garden smells of mint after the
rain. Nobody expected the old clock to work. They painted the fence a bright yellow. Keep your
gloves dry on the way up. The river is wider than it looks. There are two rules: listen, then
answer. Could you pass me the blue notebook? Winter arrived early in the valley. The violin was
hidden behind the piano. I would rather walk than take the bus. Seven geese crossed the empty field.
Her answer was short: maybe tomorrow. The library closes at six on Fridays. We found a fossil under
the bridge. His coat was too thin for the wind. Turn left where the road meets the mill. A quiet
voice came from the next room. The recipe is simple: flour, salt and water. Both brothers became
excellent sailors. The moon rose slowly over the harbour. Someone left a note under the vase. Fresh
paint makes the hallway look larger. The fox waited until the lamps went out. Write the number down
before you forget. It was the warmest evening of the year. The teacher smiled and closed the book.
One thing is certain: the bridge will hold. Every window in the tower was glowing. The puppy chewed
on a wooden spoon. Do not worry, the storm has passed. An honest friend is hard to replace. The
market opens when the bell rings. Grandfather keeps his letters in a tin. You can hear the sea from
the attic. The last page of the diary was missing. We shared an orange on the station steps. The
captain gave one order: hold the course. Thick fog covered the airport all day. A single candle lit
the whole kitchen. The children built a castle of wet sand. She repairs bicycles in a narrow street.
His laughter carried across the lake. The orchestra tuned and fell silent. Take the umbrella, just
to be safe. Golden leaves gathered by the gate. The museum bought a very strange lamp. Even the cat
refused to go outside. Her plan had a flaw: nobody could swim. The mountain path is steep but short.
I will call you as soon as we land. Good night, and thank you for the soup.
"""
SENTENCES = re.split(r"(?<=[.?]) ", " ".join(STORY.split()))


def make_tokenizer(out_dir):
    """Save train_bpe's tokenizer in OUT_DIR/model and return it."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=train_bpe(SPECIAL_TOKENS), bos_token="<|begin_of_text|>",
        eos_token="<|eot_id|>", pad_token="<|end_of_text|>", clean_up_tokenization_spaces=False,
        model_max_length=2048, model_input_names=["input_ids", "attention_mask"])
    tokenizer.save_pretrained(Path(out_dir) / "model")
    return tokenizer


def train_bpe(special_tokens):
    """A byte-level BPE Tokenizer trained on SENTENCES. special_tokens get the last ids."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(WORD_PATTERN), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=VOCAB_SIZE - len(special_tokens), show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    bpe.train_from_iterator(SENTENCES, trainer)
    bpe.add_special_tokens(special_tokens)
    return bpe


def make_model(out_dir, tokenizer, **config_overrides):
    """Save a random float32 language model with its text head and processor in OUT_DIR/model, and
    return it. config_overrides: fields of HiggsAudioV2Config."""
    token_id = tokenizer.convert_tokens_to_ids
    # a large initializer_range, so adapters alone can lower the loss with frozen heads
    config = {"vocab_size": len(tokenizer), "hidden_size": 128, "intermediate_size": 256,
              "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
              "head_dim": 32, "initializer_range": 0.06,
              "codebook_size": 1026,        # with the stream's begin and end
              "bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id,
              "pad_token_id": tokenizer.pad_token_id, "audio_token_id": token_id("<|AUDIO_OUT|>"),
              "audio_bos_token_id": token_id("<|audio_out_bos|>"),
              "audio_delay_token_id": token_id("<|reserved_special_token_6|>"), **config_overrides}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = HiggsAudioV2ForConditionalGeneration(HiggsAudioV2Config(**config),
                                                     use_text_head=True).eval()
    model.generation_config = layout_2025.generation_config(model.config)
    folder = Path(out_dir) / "model"
    model.save_pretrained(folder)
    layout_2025.save_config(model, tokenizer, folder, out_dir,
                            str((Path(out_dir) / "codec").resolve()))
    return model


def make_codec(out_dir):
    """Save a random codec in OUT_DIR/codec and return it."""
    acoustic = DacConfig(downsampling_ratios=CODEC_STRIDES, upsampling_ratios=CODEC_STRIDES,
                         encoder_hidden_size=2, decoder_hidden_size=64, hidden_size=16)
    semantic = HubertConfig(
        conv_dim=(8,) * 7, mask_time_prob=0.0, num_hidden_layers=1, hidden_size=16,
        intermediate_size=16, num_attention_heads=2, num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=2)
    # the last bandwidth, kbit/s, is 8 codebooks of 10 bits
    config = HiggsAudioV2TokenizerConfig(
        target_bandwidths=[0.5, 1, 1.5, 2], codebook_dim=8, acoustic_model_config=acoustic,
        semantic_model_config=semantic)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        codec = HiggsAudioV2TokenizerModel(config).eval()
        for quantizer in codec.quantizer.quantizers:
            # transformers leaves zeros, for which every code is 0
            quantizer.codebook.embed.normal_(std=0.05)
    folder = Path(out_dir) / "codec"
    codec.save_pretrained(folder)
    layout_2025.feature_extractor().save_pretrained(folder)
    return codec


def make_model3(out_dir, codec):
    """Save a random Higgs TTS 3, with its codec's weights, in OUT_DIR/model; return that folder."""
    folder = Path(out_dir) / "model"
    folder.mkdir(parents=True, exist_ok=True)
    train_bpe(SPECIAL_TOKENS_3).save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>",
                "pad_token": "<|endoftext|>", "model_max_length": 32768}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    text = {"model_type": "qwen3", "vocab_size": VOCAB_SIZE + 8, "hidden_size": 96,
            "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 32, "rms_norm_eps": 1e-6,
            "max_position_embeddings": 2048, "hidden_act": "silu", "attention_bias": False,
            "attention_dropout": 0.0, "tie_word_embeddings": True, "rope_theta": None,
            "dtype": "float32", "initializer_range": 0.06}
    audio = {"model_type": "higgs_audio_encoder", "encoder_type": "discrete", "num_codebooks": 8,
             "vocab_size": 1026, "out_dim": text["hidden_size"], "use_delay_pattern": True,
             "tie_word_embeddings": True}
    config = {"architectures": ["HiggsMultimodalQwen3ForConditionalGeneration"],
              "audio_token_id": -100, "model_type": v3.MODEL_TYPE, "audio_encoder_config": audio,
              "text_config": text, "audio_tokenizer_config": codec.config.to_dict()}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = v3.Higgs3(v3.read_config(config))
        torch.nn.init.normal_(model.audio_embedding.weight, std=text["initializer_range"])
    tensors = v3.published_names({name: value.detach() for name, value in model.named_parameters()})
    tensors |= {head: tensors[table].clone() for head, table in v3.HEADS.items()}
    tensors |= {v3.CODEC + name: value for name, value in codec.state_dict().items()}
    tensor_io.save({name: value.contiguous() for name, value in tensors.items()},
                   folder / "model.safetensors")
    return folder


def synthesise(text, speaker, sample_rate, rng):
    """Text in a toy voice, (n,) float32 mono, 1.6 to 4 s: a tone with overtones per letter.
    speaker: a number that determines pitch and pace. rng: a Generator, for the noise."""
    tone, pace = speaker * 0.618 % 1, speaker * 0.381 % 1   # both spread evenly over 0..1
    hundredths = round(100 * np.clip(len(text) * (0.058 + 0.018 * pace), 1.6, 3.9))
    n = (hundredths + 1) * (sample_rate // 100)
    letters = np.array([(ord(c) - 96) * c.isalpha() for c in text.lower()])
    track = letters[np.arange(n) * len(letters) // n]
    phase = 2 * np.pi * np.cumsum(95 * 2 ** (1.2 * tone + track / 9)) / sample_rate
    wave = (np.sin(phase) + 0.6 * np.sin(2 * phase) + 0.3 * np.sin(5 * phase)) * (track > 0)
    wave += 0.02 * rng.standard_normal(len(wave))
    return (0.6 * wave / np.abs(wave).max()).astype(np.float32)


def make_speech(out_dir, clips, speakers):
    """Write OUT_DIR/speech/*.wav -> [{"text", "speaker", "path" from OUT_DIR on, "seconds"}]."""
    import soundfile
    (Path(out_dir) / "speech").mkdir(parents=True, exist_ok=True)
    speech = []
    for number in range(clips):
        speaker = number % speakers
        text = SENTENCES[(number + number // len(SENTENCES)) % len(SENTENCES)]
        rate = CLIP_RATES[number // speakers % len(CLIP_RATES)]
        path = f"speech/{number:04d}_speaker{speaker}.wav"
        wave = synthesise(text, speaker, rate, np.random.default_rng([0, number]))
        if number % 6 == 5:
            wave = np.stack([wave, 0.7 * wave], axis=1)
        soundfile.write(Path(out_dir) / path, wave, rate, subtype="PCM_16")
        speech.append({"text": text, "speaker": speaker, "path": path,
                       "seconds": round(len(wave) / rate, 3)})
    return speech


def voice_cloning_sample(name, reference, target):
    """A ChatML sample (a dict): hear the reference clip, speak the target's text in its voice."""
    def text(content):
        return {"type": "text", "text": content}

    def audio(clip, duration=None):
        return {"type": "audio", "audio_url": clip["path"], "raw_audio": "", "duration": duration,
                "offset": None}

    system = ("You are a helpful assistant capable of generating speech in the voice of the "
              "provided reference audio.")
    request = f"Please generate speech for given text in reference audio's voice: {target['text']}"
    return {"messages": [
        {"role": "system", "content": system},
        {"role": "user", "content": [text(reference["text"]), audio(reference), text(request)]},
        {"role": "assistant", "content": [text(target["text"]), audio(target, target["seconds"])]}],
        "start_index": 0, "speaker": f"speaker{target['speaker']}",
        "misc": {"sample_id": name, "ref_transcript": reference["text"],
                 "target_transcript": target["text"], "duration": target["seconds"]}}


def main(argv=None):
    args = ARGS or cli.parse(p, check_flags, argv)
    speech, samples = make_speech(args.out_dir, args.clips, args.speakers), []
    for number, target in enumerate(speech):        # the reference is the speaker's next clip
        reference = next(clip for clip in speech[number + 1:] + speech[:number]
                         if clip["speaker"] == target["speaker"])
        samples.append(voice_cloning_sample(f"sample_{number:08d}", reference, target))
    (args.out_dir / "train.json").write_text(json.dumps(samples, indent=1) + "\n")
    codec = make_codec(args.out_dir)
    if args.higgs3:
        make_model3(args.out_dir, codec)
    else:
        make_model(args.out_dir, make_tokenizer(args.out_dir))
    print(f"{args.out_dir}: model, codec and {args.clips} samples in train.json")


if __name__ == "__main__":
    main()
