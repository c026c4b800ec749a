"""Models of true or small shapes, and recordings, chats and problems to train them on: files.

Each function writes missing files into a folder and returns the flags that name it. Weights
are random, or holes of the file that take no disk and read as zeros.
"""
import json
import sys
import wave
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from diffusion import make_problems
from distill import causal_lm as chat_weights
from speech import make_tiny, v3, weights

from transformers import PreTrainedTokenizerFast, Qwen3Config  # isort: skip

SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads",
         "num_key_value_heads", "head_dim", "num_hidden_layers")
# of Higgs-Audio V2 and of its small brother; what tiny has is make_tiny's
SPEECH = {"tiny": {}, "small": dict(zip(SIZES[1:], (256, 768, 8, 4, 32, 6))),
          "3b": dict(zip(SIZES, (128256, 3072, 8192, 24, 8, 128, 28)))}
# of Qwen3, and the large one of the body of Higgs TTS 3
CHAT = {"tiny": dict(zip(SIZES, (512, 64, 128, 4, 2, 16, 2))),
        "small": dict(zip(SIZES, (32768, 384, 1152, 6, 3, 64, 12))),
        "4b": dict(zip(SIZES, (151936, 2560, 9728, 32, 8, 128, 36)))}
BLOCK_VOCABULARY = 50257        # GPT-2's; the mask comes on top
CHAT_TEMPLATE = """{%- for m in messages -%}
{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"""
WORDS = "the quick brown fox "


def write_holes(named, path):
    """A safetensors file of (name, parameter) pairs in bf16; a sparse file, which takes no disk."""
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name, parameter in named:
        end = offset + 2 * parameter.numel()
        header[name] = {"dtype": "BF16", "shape": list(parameter.shape),
                        "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + offset)


def write_random(named, path, device="cpu"):
    """The same with normal values, the same each time on a device; norms are ones."""
    tensors, generator = {}, torch.Generator(device).manual_seed(0)
    for name, parameter in named:
        values = torch.empty(parameter.shape, dtype=torch.bfloat16, device=device)
        tensors[name] = values.fill_(1) if "norm" in name else values.normal_(
            0, 0.02, generator=generator)
    save_file(tensors, path, {"format": "pt"})


def log_normal(n, mean, sigma, least, most, seed=0):
    """n lengths, clipped."""
    rng = np.random.default_rng((seed, n))
    drawn = np.exp(np.log(mean) - sigma ** 2 / 2 + sigma * rng.standard_normal(n))
    return drawn.clip(least, most)


# ---- Speech


def write_wave(path, seconds, pitch):
    """A sine, 24 kHz mono, by the standard library."""
    sound = 0.1 * np.sin(np.arange(int(24000 * seconds)) * pitch)
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, 24000, 0, "NONE", ""))
        file.writeframes((32767 * sound).astype("<i2").tobytes())


def speech_data(folder, pairs):
    """Codec, and train.json of (seconds of reference, of target) of each sample."""
    if (folder / "codec").exists():
        return
    make_tiny.make_codec(folder)
    clips = {}
    for seconds, pitch in ((s, 0.05 + 0.01 * i) for pair in pairs for i, s in enumerate(pair)):
        name = f"clip-{seconds:.2f}-{pitch:.2f}.wav"
        if name not in clips:
            write_wave(folder / name, seconds, pitch)
            clips[name] = {"path": name, "text": WORDS * int(2 * seconds), "speaker": 0,
                           "seconds": float(seconds)}
    samples = []
    for number, (reference, target) in enumerate(pairs):
        names = f"clip-{reference:.2f}-0.05.wav", f"clip-{target:.2f}-0.06.wav"
        samples.append(make_tiny.voice_cloning_sample(f"sample {number}", *map(clips.get, names)))
    (folder / "train.json").write_text(json.dumps(samples))


def fill_cache(folder):
    """Random codes of the clips in a code cache, for machines that cannot decode audio."""
    from speech import codes, dataset
    from speech.conversations import Clip
    cache = folder / "codes" / dataset.codec_fingerprint(folder / "codec")
    cache.mkdir(parents=True, exist_ok=True)
    encoded, files, rng = {}, {}, np.random.default_rng(0)
    for path in sorted(folder.glob("clip-*.wav")):
        frames = round(float(path.name.split("-")[1]) * codes.FRAME_RATE)
        key = dataset.key_of(clip := Clip(str(path)), False, path.name)
        encoded[key] = rng.integers(0, codes.CODES, (frames, 8), np.int16), [np.nan] * 5
        files[dataset.file_key(clip)] = key
    codes.write_shard(cache, encoded, files)


def copy_but_weights(source, target):
    for path in source.iterdir():
        if path.suffix != ".safetensors":
            (target / path.name).write_bytes(path.read_bytes())


def speech_words(folder, model):
    return ["--model_path", model, "--audio_tokenizer_path", folder / "codec",
            "--train_data_file", folder / "train.json"]


def speech_files(folder, pairs, layers=0, shape="3b", fill=write_holes):
    """Flags that name a Higgs-Audio V2 and samples. pairs: of speech_data; 0 layers: all."""
    speech_data(folder, pairs)
    model = folder / f"speech-{shape}-{layers}"
    if not model.exists():
        if not (folder / "model").exists():
            make_tiny.make_model(folder, make_tiny.make_tokenizer(folder))
        model.mkdir()
        copy_but_weights(folder / "model", model)
        config = json.loads((model / "config.json").read_text()) | SPEECH[shape]
        if layers:
            config["num_hidden_layers"] = layers
        (model / "config.json").write_text(json.dumps(config))
        empty = weights.module(config).empty_model(config, torch.bfloat16)
        fill(empty.named_parameters(), model / "model.safetensors")
    return speech_words(folder, model)


def speech3_files(folder, pairs, layers=0, shape="4b", fill=write_holes):
    """speech_files with a Higgs TTS 3."""
    speech_data(folder, pairs)
    model = folder / f"speech3-{shape}-{layers}"
    if not model.exists():
        if not (folder / "third").exists():
            make_tiny.make_model3(folder / "third", make_tiny.make_codec(folder))
        if shape == "tiny":
            return speech_words(folder, folder / "third" / "model")
        model.mkdir()
        copy_but_weights(folder / "third" / "model", model)
        config = json.loads((model / "config.json").read_text())
        config["text_config"] |= CHAT[shape] | {"max_position_embeddings": 32768}
        if layers:
            config["text_config"]["num_hidden_layers"] = layers
        config["audio_encoder_config"]["out_dim"] = CHAT[shape]["hidden_size"]
        (model / "config.json").write_text(json.dumps(config))
        named = v3.weight_names(v3.empty_model(config, torch.bfloat16))
        fill(named.items(), model / "model.safetensors")
    return speech_words(folder, model)


# ---- Chats and problems


def chat_files(folder, lengths, layers=0, shape="4b", fill=write_holes):
    """Flags that name a Qwen3 and chats of about `tokens` tokens each, half of them trained."""
    model, chats = folder / f"chat-{shape}-{layers}", folder / "chats.jsonl"
    if not model.exists():
        core = make_problems.train_tokenizer([f"user assistant {WORDS}\n"] * 9)
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>",
            additional_special_tokens=["<|im_start|>", "<|im_end|>"])
        tokenizer.chat_template = CHAT_TEMPLATE
        tokenizer.save_pretrained(model)
        sizes = CHAT[shape] | ({"num_hidden_layers": layers} if layers else {})
        config = Qwen3Config(**sizes, tie_word_embeddings=True, max_position_embeddings=262144)
        config.architectures = ["Qwen3ForCausalLM"]
        config.save_pretrained(model)
        empty = chat_weights.empty_model(config, torch.bfloat16)
        fill(empty.named_parameters(), model / "model.safetensors")
    if not chats.exists():
        lines = []
        for n in lengths:
            text = f" {WORDS.strip()}" * (int(n) // 8 + 1)
            messages = [{"role": role, "content": text} for role in ("user", "assistant")]
            lines.append(json.dumps({"messages": messages}) + "\n")
        chats.write_text("".join(lines))
    return ["--model_path", model, "--train_data_file", chats]


def block_files(folder, lengths, answer=0.6):
    """Flags that name GPT-2-sized vocabulary and problems of about `tokens` tokens."""
    data = folder / "problems.jsonl"
    if not data.exists():
        make_problems.write_demo(folder / "demo")
        path = str(folder / "demo" / "tokenizer.json")
        tokenizer = Tokenizer.from_file(path)
        more = BLOCK_VOCABULARY - tokenizer.get_vocab_size()
        tokenizer.add_tokens([f"<unused {i}>" for i in range(more)])
        tokenizer.save(path)
        lines = []
        for n in lengths:
            problem = {}
            for key, share in (("question", 1 - answer), ("answer", answer)):
                text = " has 3 apples"
                while len(tokenizer.encode(text).ids) < share * n - 2:
                    text += " and 3 apples"
                problem[key] = text
            problem["answer"] += "\n#### 3"
            lines.append(json.dumps(problem) + "\n")
        data.write_text("".join(lines))
    return ["--train_data_file", data, "--tokenizer", folder / "demo" / "tokenizer.json"]


def longest_problem(data, tokenizer, block=16):
    """Tokens of the longest problem of block_files, in whole blocks, as minimal/ has them."""
    encode = Tokenizer.from_file(str(tokenizer)).encode
    problems = map(json.loads, data.read_text().splitlines())
    longest = max(len(encode(f"Question: {problem['question']}\nAnswer:").ids) +
                  len(encode(f" {problem['answer']}").ids) + 2 for problem in problems)
    return -(-longest // block) * block
