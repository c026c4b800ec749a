"""Higgs TTS 3 (higgs-audio-v3-tts-4b, higgs-tts-3-4b): model, loss, files and step machine.

The model is a plain Qwen3 body with one audio table of num_codebooks x codebook_size rows, used as
embedding and as head.

A prompt has no roles and no system text:

    plain             <|tts|> <|text|> text <|audio|>
    clone             <|tts|> <|ref_text|> text <|ref_audio|> rows <|text|> text <|audio|>
    clone, no text    <|tts|> <|ref_audio|> rows <|text|> text <|audio|>

T frames of codes become T + 7 rows: codebook k holds k begin-of-codes (BOC), its T codes, 7 - k
end-of-codes (EOC). The hidden state at <|audio|> predicts row 0; row r predicts row r + 1; the last
row is never an input. Targets are the codes and all EOC, since no server fills ended codebooks.
sglang-omni 0.1.9 and vllm-omni 0.30 use this layout.
"""
import re
import shutil
from collections import namedtuple
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import (DynamicCache, PreTrainedTokenizerFast, Qwen3Config, Qwen3Model,
                          TopKLogitsWarper, TopPLogitsWarper)

from core import kernels, tensor_io
from core.cli import require
from speech import labels, weights
from speech.conversations import BadSample

TOKENS = {"tts": "<|tts|>", "text": "<|text|>", "audio": "<|audio|>", "ref_audio": "<|ref_audio|>",
          "ref_text": "<|ref_text|>"}
TAG = re.compile(r"<\|[a-z_]+:[a-z_]+\|>")          # control tags, as <|emotion:elation|>
SPEAKER = re.compile(r"\[SPEAKER\d+\]\s*")
MODEL_TYPE = "higgs_multimodal_qwen3"
LICENCE = ("Higgs TTS 3 weights and models fine-tuned from them: research and non-commercial use "
           "(see their LICENSE)")
LORA_TARGETS = "all-linear"     # default of --lora_target_modules: seven linear layers
# defaults of sglang-omni's speech endpoint
DRAWS = {"temperature": 0.8, "top_k": 30, "top_p": 0.8}
TEXT_TABLE = "tied.embedding.text_embedding.weight"
AUDIO_TABLE = "tied.embedding.modality_embeddings.0.embedding.weight"
# {name in the files: name in Higgs3}
NAMES = {TEXT_TABLE: "body.embed_tokens.weight", AUDIO_TABLE: "audio_embedding.weight"}
HEADS = {"tied.head.text_head.weight": TEXT_TABLE,      # copies of the tables in the files
         "tied.head.modality_heads.0.weight": AUDIO_TABLE}
WHOLE_MODULES = ("audio_embedding",)    # modules that an adapter may contain in full
CODEC = "tied.embedding.modality_embeddings.0.model."       # prefix of the codec's weights
# files next to the weights
OWN_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
             "vocab.json", "merges.txt", "chat_template.jinja", "LICENSE", "NOTICE")

# ---- The interface of weights.module(), with the code below


def text_setting(wanted):
    """--normalize_text as "on" or "off"; the default is off, as in servers. UserError."""
    require(wanted != "on", "--normalize_text on: Higgs TTS 3 is served texts as they are")
    return "off"


def layers(native):
    return native.body.layers


def freeze_unreachable(native, text_loss_weight):
    """Freeze nothing: the audio loss depends on all weights. UserError for --text_loss_weight."""
    # 1 is the default, which has no effect
    require(text_loss_weight == 1, "--text_loss_weight: Higgs TTS 3 learns no text; drop it")


def weight_names(native):
    """{name in a checkpoint's files: parameter} of a full model."""
    return published_names(dict(native.named_parameters()))


def save_config(native, tokenizer, folder, source, codec=None):
    """Copy a checkpoint's files except its weights from the base's folder `source`."""
    for path in Path(source).iterdir():
        if path.name in OWN_FILES:
            shutil.copyfile(path, Path(folder) / path.name)


# ---- From a conversation to rows


@dataclass(frozen=True)
class Ids(labels.Layout):
    """Ids and layout, as labels.TokenIds. ref_text: None if the tokenizer has no such token."""
    tts: int
    text: int
    audio: int
    ref_audio: int
    ref_text: int | None = None
    pad: int = 0                # at audio rows and padding; never read
    num_codebooks: int = 8
    stream_bos: int = 1024      # BOC
    stream_eos: int = 1025      # EOC
    # no row of BOC alone; servers force BOC, but never fill in EOC: the model must learn it
    first, all_ends = 1, True
    audio_placeholder_id = -100     # a clip in a table, as in the released config.json
    min_frames = 8              # servers check for the end from row 8 on: shorter clips cannot end
    lone_reference = True       # a reference may have no text

    def forbidden_tokens(self, tokenizer):
        return [token for token in tokenizer.get_added_vocab() if not TAG.fullmatch(token)]

    def known_tags(self, tokenizer):
        return frozenset(filter(TAG.fullmatch, tokenizer.get_added_vocab()))

    def streams(self, sample):
        """([(name, [(text or Clip, labelled)])], [omission]) of a canonical Sample: a stream for
        each trained clip, with its text, and as reference the previous assistant clip with its
        text. BadSample for a text of several speakers, or a clip without text."""
        streams, left_out, reference, request = [], [], None, ""
        several = sum(turn.trained for turn in sample.turns) > 1
        for turn in sample.turns:
            if turn.role == "system":       # prompts have no system text
                left_out += ["lose their scene's clip"] * bool(turn.clips)
                left_out += ["lose their system or scene text"] * bool(turn.text.strip())
            elif turn.role == "user":
                request = turn.text.strip()
            clips = turn.clips if turn.role == "assistant" else []
            if len(clips) > 1:
                raise BadSample("has several clips in one message: give each one")
            for clip in clips:
                text = turn.text.strip() or request
                if turn.trained and len(set(map(str.strip, SPEAKER.findall(text)))) > 1:
                    raise BadSample("has several speakers in one clip; Higgs TTS 3 has no marks")
                if SPEAKER.search(text):    # the model would read it aloud
                    left_out.append("lose a speaker's mark")
                    text = SPEAKER.sub("", text)
                if turn.trained:
                    if not text:
                        raise BadSample("the trained clip has no text")
                    name = sample.name + f" message {turn.source}" * several
                    streams.append((name, pieces(text, clip, reference, self.ref_text is not None)))
                elif reference:     # a prompt has room for one: the previous clip
                    left_out.append("lose an earlier reference: the last one stays")
                reference = (text, clip)
        if not streams:
            left_out.append("are dropped: they train no clip")
        return streams, sorted(set(left_out))

    def placeholders(self, rows):
        return [self.pad] * rows


def undelay(rows):
    """(T + K - 1, K) rows -> (T, K) codes; (0, K) for fewer than K rows."""
    books = rows.shape[1]
    frames = max(0, len(rows) - books + 1)
    return torch.stack([rows[k:k + frames, k] for k in range(books)], dim=1)


def pieces(text, clip, reference, marks_text):
    """[(text or Clip, labelled)] of a prompt and its clip. reference: (text, Clip) or None."""
    stream = [TOKENS["tts"]]
    # the reference's text is used only if the tokenizer can mark it
    if reference and reference[0] and marks_text:
        stream += [TOKENS["ref_text"], reference[0]]
    if reference:       # short ones are padded with silence, as servers do
        stream += [TOKENS["ref_audio"], replace(reference[1], filled=True)]
    stream += [TOKENS["text"], text, TOKENS["audio"]]
    return [*((piece, False) for piece in stream), (clip, True)]


# ---- Ids and configuration


def load_tokenizer(folder):
    """The checkpoint's tokenizer; its ids differ from Qwen3's. Raises UserError."""
    return weights.load_tokenizer(f"{folder}/tokenizer.json", lambda path: PreTrainedTokenizerFast(
        tokenizer_file=path, clean_up_tokenization_spaces=False))


def token_ids(tokenizer, config):
    """Ids of the named tokens. UserError if one is missing, or has no row in the model."""
    vocabulary = tokenizer.get_vocab()
    named_ids = {name: vocabulary.get(token) for name, token in TOKENS.items()}
    for name, number in named_ids.items():
        require(number is not None or name == "ref_text", "the tokenizer in --model_path has no "
                f"token {TOKENS[name]}: it is not that of Higgs TTS 3")
    last = max(vocabulary.values())
    require(last < config.vocab_size,
            f"tokenizer and model disagree: token {last}, {config.vocab_size} rows")
    return Ids(**named_ids, num_codebooks=config.num_codebooks,
               stream_bos=config.audio_stream_bos_id,
               stream_eos=config.audio_stream_eos_id)


def read_config(config):
    """Qwen3Config of a config.json dict, with num_codebooks, codebook_size and the two stream ids.
    UserError for another model type, and for variants with another sequence layout."""
    audio, text = config.get("audio_encoder_config") or {}, config.get("text_config") or {}
    rope, books = text.get("rope_parameters") or {}, audio.get("num_codebooks")
    size = audio.get("vocab_size")
    for fits, field in (
            (config.get("model_type") == MODEL_TYPE, "model_type"),
            (audio.get("encoder_type") == "discrete", "encoder_type"),
            (audio.get("use_delay_pattern"), "use_delay_pattern"),
            (audio.get("tie_word_embeddings"), "tie_word_embeddings of the audio table"),
            (text.get("tie_word_embeddings"), "tie_word_embeddings of the text table"),
            (not text.get("rope_scaling") and rope.get("rope_type", "default") == "default",
             "rope_scaling"), (books and size, "num_codebooks or vocab_size of the audio table")):
        require(fits, f"config.json: {field} is not that of the released Higgs TTS 3")
    # config.json may hold null, for which transformers has another default
    theta = rope.get("rope_theta") or text.get("rope_theta") or 1e6
    plain = {key: value for key, value in text.items() if not key.startswith("rope_")}
    native = Qwen3Config(**plain, rope_parameters={"rope_theta": float(theta),
                                                   "rope_type": "default"})
    native.num_codebooks, native.codebook_size = books, size
    native.audio_stream_bos_id, native.audio_stream_eos_id = size - 2, size - 1
    return native


# ---- Model


class Higgs3(nn.Module):
    """Qwen3 body and audio table. Layers have the published names; NAMES has the others."""

    def __init__(self, config):
        """config: of read_config."""
        super().__init__()
        self.config = config
        self.body = Qwen3Model._from_config(config, attn_implementation=kernels.packed_documents())
        self.audio_embedding = nn.Embedding(config.num_codebooks * config.codebook_size,
                                            config.hidden_size)

    def embed_rows(self, rows):
        """(A, 8) codes -> (A, H): the sum of their rows in the audio table."""
        books = torch.arange(self.config.num_codebooks, device=rows.device)
        return self.audio_embedding(rows + books * self.config.codebook_size).sum(-2)

    def logits(self, hidden):
        """(R, H) hidden states -> (R, 8, 1026) fp32 logits of the row that follows."""
        table = self.audio_embedding.weight     # fp32 if trained with adapters
        flat = F.linear(hidden.to(table.dtype), table).float()
        return flat.view(*hidden.shape[:-1], self.config.num_codebooks, self.config.codebook_size)


class PackedHiggs3(labels.PackedBase):
    """Higgs3 on packed batches, with adapters or without; text is not trained."""
    layers = staticmethod(layers)

    def hidden_states(self, batch):
        """Final hidden states (S, H) in sequence order of a data.PackedBatch."""
        base = self.base_model
        text = base.body.embed_tokens(batch.input_ids.index_select(0, batch.text_pos))
        text = text.to(kernels.stream_dtype(text))
        rows = torch.cat([text, base.embed_rows(batch.audio_ids).to(text.dtype)])
        return base.body(inputs_embeds=rows.index_select(0, batch.seq_index)[None], use_cache=False,
                         position_ids=batch.position_ids[None], cu_seq_lens_q=batch.cu_seqlens,
                         max_length_q=batch.longest).last_hidden_state[0]

    def audio_logits(self, hidden, batch):
        """(R, K, C) fp32 logits of the rows that predict audio. hidden: of hidden_states."""
        order = torch.cat([batch.text_pos, batch.audio_pos])
        positions = order.index_select(0, batch.audio_rows)
        return self.base_model.logits(hidden.index_select(0, positions))


packed = PackedHiggs3       # of module()
# EOC is a target in every row after a codebook's last code
loss_report = partial(labels.loss_report, all_ends=True)


# ---- Files


def empty_model(config_dict, dtype):
    """Higgs3 on the meta device, of a config.json dict. Call reset_buffers later."""
    config = read_config(config_dict)
    with torch.device("meta"):
        model = Higgs3(config).to(dtype)
    config.dtype = dtype
    return model


def reset_buffers(model, device):
    """Compute on `device` the buffers that no file contains."""
    model.body.rotary_emb = type(model.body.rotary_emb)(model.config).to(device)
    weights.check_buffers(model.body, {"rotary_emb.inv_freq", "rotary_emb.original_inv_freq"})


def weight_parts(folder, config_dict=None):
    """{name in Higgs3: slice} of a folder's model weights, without the codec's. UserError where
    the two copies of a table differ: servers would run another model than the trained one."""
    slices = tensor_io.open_tensors(tensor_io.files_of(folder, "model"))
    for head, table in HEADS.items():
        if head in slices and table in slices:
            require(torch.equal(slices[head][:], slices[table][:]),
                    f"{folder}: {head} and {table} differ: a trainer has untied them")
    return {NAMES.get(name, name): tensor for name, tensor in slices.items()
            if name not in HEADS and not name.startswith(CODEC)}


def published_names(values):
    """{name in Higgs3: value} -> {name in the files: value}."""
    names = {name: published for published, name in NAMES.items()}
    return {names.get(name, name): value for name, value in values.items()}


def whole_files(tensors, folder, codec=None):
    """{name in the files: (slice, dtype, fold)} of a folder for servers. tensors has the names of
    Higgs3; added are both heads, and the codec from `codec` (a native folder) or from `folder`."""
    tensors = published_names(tensors)
    for head, table in HEADS.items():
        rows, dtype, fold = tensors[table]
        tensors[head] = (rows, dtype, fold or torch.clone)    # a copy, as both are written
    source, prefix = folder, CODEC
    if codec:
        source, prefix = weights.find_model(codec, weights.CODEC_FLAG)[0], ""
    stored = tensor_io.open_tensors(tensor_io.files_of(source, "model"))
    require(any(name.startswith(prefix) for name in stored),
            f"{folder}: holds no codec, which servers need; give --audio_tokenizer_path")
    for name, tensor in stored.items():
        if name.startswith(prefix):
            dtype = tensor[:1].dtype if tensor.get_shape() else tensor[...].dtype
            tensors[CODEC + name.removeprefix(prefix)] = tensor, dtype, None
    return tensors


# ---- Speaking


# temperature 0: greedy; top_k 0 and top_p 1: off; max_new_tokens: rows per prompt
Sampling = namedtuple("Sampling", [*DRAWS, "max_new_tokens"], defaults=[*DRAWS.values(), 2048])


def draw(logits, sampling, generator=None):
    """(N, V) logits, of N codebooks -> (N,) int64 codes."""
    logits = logits.float()
    if not sampling.temperature:
        return logits.argmax(-1)
    logits = logits / sampling.temperature
    if sampling.top_k:
        logits = TopKLogitsWarper(sampling.top_k)(None, logits)
    if sampling.top_p < 1:
        logits = TopPLogitsWarper(sampling.top_p)(None, logits)
    return torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]


def step(logits, rows, end, sampling, generator=None):
    """(row (8,) int64, end): one row from logits (8, 1026) after `rows` rows, as in sglang-omni's
    state machine. end: number of the last row, None until it is known.

    While the delay builds up, codebooks that have not begun get BOC. The first EOC of codebook 0
    after that is followed by K - 2 more rows. Nothing else is forced."""
    row = draw(logits, sampling, generator)
    books = len(row)
    if rows < books:
        row[rows + 1:] = logits.shape[-1] - 2
    elif end is None and row[0] == logits.shape[-1] - 1:
        end = rows + books - 2
    return row, end


def embed_prompt(model, input_ids, is_audio, ref_rows):
    """(S, H) embedding of a prompt; is_audio marks the positions of the reference's rows."""
    device = model.audio_embedding.weight.device
    embedded = model.body.embed_tokens(torch.as_tensor(input_ids).to(device))
    if ref_rows is not None and len(ref_rows):
        rows = model.embed_rows(torch.as_tensor(ref_rows).to(device))
        embedded[torch.as_tensor(is_audio).to(device)] = rows.to(embedded.dtype)
    return embedded


@torch.no_grad()
def generate(model, prompts, sampling, seed, should_stop=lambda: False):
    """[(codes (T, 8) int64 on the CPU, ended_by "eos" | "length")] of a batch of prompts.

    prompts: [(input_ids, is_audio, ref_rows or None)]. should_stop() is called once per row; True
    ends all speech. A prompt's draws depend on seed and its index, not on other prompts."""
    device, config = model.audio_embedding.weight.device, model.config
    embedded = [embed_prompt(model, *prompt) for prompt in prompts]
    n, inputs = len(embedded), pad_sequence(embedded, batch_first=True, padding_side="left")
    mask = pad_sequence([torch.ones(len(prompt), dtype=torch.int64, device=device)
                         for prompt in embedded], batch_first=True, padding_side="left")
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    generators = [torch.Generator().manual_seed(seed * 1_000_003 + i) for i in range(n)]
    cache, spoken, ends = DynamicCache(), [[] for _ in range(n)], [None] * n
    training_attention = model.body.config._attn_implementation
    model.body.set_attn_implementation("sdpa")          # packed attention has no KV cache
    try:
        for count in range(sampling.max_new_tokens):
            hidden = model.body(inputs_embeds=inputs, attention_mask=mask, position_ids=positions,
                                use_cache=True, past_key_values=cache).last_hidden_state[:, -1]
            logits = model.logits(hidden).cpu()
            rows = torch.full((n, config.num_codebooks), config.audio_stream_eos_id)
            for i in range(n):
                if ends[i] is None or count <= ends[i]:
                    rows[i], ends[i] = step(logits[i], count, ends[i], sampling, generators[i])
                    spoken[i].append(rows[i].clone())
            if all(end is not None and count >= end for end in ends) or should_stop():
                break
            inputs = model.embed_rows(rows.to(device))[:, None].to(inputs.dtype)
            mask = F.pad(mask, (0, 1), value=1)
            positions = positions[:, -1:] + 1
    finally:
        model.body.set_attn_implementation(training_attention)
    return [(undelay(torch.stack(rows)), "eos" if end is not None and len(rows) > end else "length")
            for rows, end in zip(spoken, ends)]
