"""Conversations with random codes for tests of the model, from the trainer's data path without the codec."""
import hashlib

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoTokenizer, HiggsAudioV2ForConditionalGeneration

from core.json_files import read_object
from data import SpeechSamples
from speech.codes import decode_clips
from speech.conversations import FRAME_RATE, Clip, Turn
from speech.labels import IGNORE, token_ids, total_loss
from speech.weights import read_config
from tests.helpers import dialogues


def native(folder):
    """The tiny model in fp32 with its text head and random norms: new ones are all ones."""
    model = HiggsAudioV2ForConditionalGeneration.from_pretrained(folder, use_text_head=True)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
    return model.eval()


def decode_audio(path, cuts=((None, None),)):
    """[waveform (n,) at 24 kHz] of cuts of a file: (offset, duration) in seconds. ValueError."""
    results = decode_clips([Clip(str(path), *cut) for cut in cuts])
    for result in results:
        if isinstance(result, str):
            raise ValueError(result)
    return [wave for _, _, wave, _ in results]


def clip(name, frames):
    """A Clip of `frames` codec frames; codes_of draws its codes by its name."""
    return Clip(name, 0.0, frames / FRAME_RATE)


def codes_of(clip):
    """(T, 8) int16 random codes, always the same for the same clip name."""
    seed = int(hashlib.sha256(clip.path.encode()).hexdigest()[:8], 16)
    return np.random.default_rng(seed).integers(0, 1024, (round(clip.duration * FRAME_RATE), 8), np.int16)


def ask(text, answer, trained=True):
    """A user turn and its assistant turn; answer: a Clip or a text."""
    return [Turn("user", [text], None), Turn("assistant", [answer], None, trained)]


SYSTEM = Turn("system", ["Generate audio following instruction."], None)
SINGLE = [SYSTEM, *ask("The kettle is singing.", clip("single", 7))]
SHORT = [SYSTEM, *ask("Yes.", clip("short", 1))]
LONG = [SYSTEM, *ask("The river is wider than it looks, and the moon rose slowly.", clip("long", 19))]
CLONING = [SYSTEM, *ask("This is how I sound.", clip("reference", 9), trained=False),
           *ask("The door is never locked.", clip("target", 11))]
MULTI_TURN = [SYSTEM, *ask("Good night.", clip("first", 5)), *ask("Where is the map?", clip("second", 8)),
              *ask("And in words?", "under the vase")]
TEXT_ONLY = [SYSTEM, *ask("Which way?", "Turn left where the road meets the mill.")]


def samples_of(model_folder, conversations, folder):
    """(TokenIds, [sample dict as SpeechSamples gives it]) of lists of Turns; folder: an empty one to write in."""
    tokenizer, config = AutoTokenizer.from_pretrained(model_folder), read_object(model_folder / "config.json")
    ids = token_ids(tokenizer, read_config(config))
    data = SpeechSamples(dialogues.table_of(conversations, tokenizer, ids, folder, codes_of), ids)
    return ids, [data[i] for i in range(len(data.table))]


def audio_labels(sample):
    """(a, 8) labels of a sample's audio rows, not shifted, as transformers takes them."""
    labels = np.full((len(sample["input_ids"]) + 1, 8), IGNORE)
    labels[sample["audio_at"] + 1] = sample["audio_targets"]
    return labels[:-1][sample["is_audio"]]


def native_batch(samples, ids):
    """Sample dicts -> keyword arguments of transformers' forward, padded on the right, with our labels unshifted."""
    def padded(rows, fill=0):
        return pad_sequence([torch.as_tensor(row, dtype=torch.int64) for row in rows], True, fill)

    def of(key, fill):
        return padded((s[key] for s in samples), fill)
    batch = {"input_ids": of("input_ids", ids.pad), "labels": of("text_labels", IGNORE),
             "attention_mask": padded(np.ones(len(s["input_ids"])) for s in samples)}
    if any(len(s["audio_ids"]) for s in samples):       # without audio, transformers takes no audio inputs
        batch |= {"audio_input_ids": of("audio_ids", ids.stream_eos),
                  "audio_labels": padded(map(audio_labels, samples), IGNORE), "audio_input_ids_mask": padded(
                      np.ones(len(s["audio_ids"])) for s in samples).bool()}
    return batch


def inputs_of(model_folder, conversations, folder):
    """Keyword arguments of transformers' forward for lists of Turns, without labels; folder: one to write in."""
    folder.mkdir(exist_ok=True)
    ids, samples = samples_of(model_folder, conversations, folder)
    return {name: value for name, value in native_batch(samples, ids).items() if "labels" not in name}


@torch.no_grad()
def logits(net, inputs):
    """(n, audio and text) logits of transformers' own forward at all real positions, with or without adapters."""
    model = net.get_base_model() if hasattr(net, "get_base_model") else net
    state = model.eval().model(**inputs).last_hidden_state[inputs["attention_mask"].bool()]
    return torch.cat([model.audio_lm_head(state), model.text_lm_head(state)], -1)


def total(model, batch):
    """One pack's loss on transformers' scale: the sum of the codebooks' means plus the text mean."""
    audio, text, _ = model(batch)
    books = len(audio)
    return books * total_loss(audio, batch.counts["audio_targets"], text, batch.counts["text_targets"], 1 / books)


def gradients(module):
    """{name: gradient} with zeros where a parameter got none."""
    return {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in module.named_parameters()}
