"""Higgs TTS 3 (higgs-audio-v3-tts-4b, higgs-tts-3-4b): the model, its sequences, its loss and its step machine.

The model is a plain Qwen3 body and one audio table of num_codebooks x codebook_size rows that is both the embedding and
the head. labels_v3.py has the layout of its sequences.

The weights are for research and non-commercial use (Boson Higgs TTS 3 licence); none are part of this project.
"""
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from core import tensor_io
from core.cli import UserError
from core.new_folder import new_folder
from core import fused, json_files
from core.document_attention import ATTENTION
from speech import (
    weights,  # first: it explains a torchaudio that breaks every transformers import
)
from speech.labels import IGNORE
from speech.labels_v3 import (  # noqa: F401  (offered here, too)
    TOKENS,
    Ids,
    delay,
    label_mask,
    undelay,
)
from speech.loss import Sums, divergence, named

from transformers import DynamicCache, PreTrainedTokenizerFast, Qwen3Config, Qwen3Model  # isort: skip

MODEL_TYPE = "higgs_multimodal_qwen3"
TERMS = """For research and non-commercial use only: the base is under the Boson Higgs TTS 3 Research and
Non-Commercial License, which goes with what is made of it. No voice may be cloned without its
owner's consent."""
LICENCE = "Higgs TTS 3 weights and what is fine-tuned from them: research and non-commercial use (see their LICENSE)"
LORA_TARGETS = "all-linear"     # all seven of a layer, where --lora_target_modules says nothing
DRAWS = {"temperature": 0.8, "top_k": 30, "top_p": 0.8}        # of sglang-omni's speech endpoint
ROPE_THETA = 1e6        # config.json may hold null, and transformers would then take another
TEXT_TABLE = "tied.embedding.text_embedding.weight"
AUDIO_TABLE = "tied.embedding.modality_embeddings.0.embedding.weight"
OURS = {TEXT_TABLE: "body.embed_tokens.weight", AUDIO_TABLE: "audio_embedding.weight"}      # file's name: ours
HEADS = {"tied.head.text_head.weight": TEXT_TABLE, "tied.head.modality_heads.0.weight": AUDIO_TABLE}    # copies
TABLE = "audio_embedding"       # the audio table's module: embedding and head
WHOLE_MODULES = (TABLE,)        # modules that an adapter may hold as a whole
CODEC = "tied.embedding.modality_embeddings.0.model."       # prefix of the codec's weights
RELEASED_CODEC = {      # what transformers' defaults for HiggsAudioV2TokenizerConfig have otherwise: 25 frames a second
    "target_bandwidths": [0.5, 1, 1.5, 2], "acoustic_model_config": {
        "model_type": "dac", "encoder_hidden_size": 64, "downsampling_ratios": [8, 5, 4, 2, 3], "hidden_size": 256,
        "decoder_hidden_size": 1024, "upsampling_ratios": [8, 5, 4, 2, 3], "hop_length": 960},
    "semantic_model_config": {"model_type": "hubert", "mask_time_prob": 0.0}}    # 5.17 of transformers: 0.05
NORMED = {"g": "parametrizations.weight.original0", "v": "parametrizations.weight.original1"}
OWN_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.json",
             "merges.txt", "chat_template.jinja", "LICENSE", "NOTICE")      # of a folder, beside its weights

# ---------------------------------------------------------------------------------------------------------------------
# What speech/versions.py's module() promises, beside what is imported above and follows below


def text_setting(wanted):
    """--normalize_text as "on" or "off"; off where nothing is wanted, as the servers have it. Raises UserError."""
    if wanted == "on":
        raise UserError("--normalize_text on: Higgs TTS 3 is served texts as they are; leave it off")
    return "off"


def positions(config):
    """Tokens that a prompt and its speech may have."""
    return config.max_position_embeddings


def layers(native):
    """The decoder layers."""
    return native.body.layers


def freeze_unreachable(native, text_loss_weight):
    """Nothing to freeze: the audio loss reaches every weight. UserError for a weight of text."""
    if text_loss_weight != 1:       # the default, which nothing reads
        raise UserError("--text_loss_weight: Higgs TTS 3 learns no text; leave it out")


def weight_names(native):
    """{name in a checkpoint's files: parameter} of a full model."""
    return published(dict(native.named_parameters()))


def save_config(native, tokenizer, folder, source, codec=None):
    """The files of a checkpoint beside its weights, as they stand in `source` -> {}: nothing is made.

    source: the folder of the model that was trained from.
    """
    for path in Path(source).iterdir():
        if path.name in OWN_FILES:
            shutil.copyfile(path, Path(folder) / path.name)
    return {}


# ---------------------------------------------------------------------------------------------------------------------
# Ids and configuration


def load_tokenizer(folder):
    """The checkpoint's own tokenizer; Qwen3's has other tokens at the same ids. Raises UserError."""
    path = Path(folder) / "tokenizer.json"
    try:
        return PreTrainedTokenizerFast(tokenizer_file=str(path), clean_up_tokenization_spaces=False)
    except Exception as error:
        raise UserError(f"{path}: no tokenizer can be loaded from it ({str(error).splitlines()[0]})")


def token_ids(tokenizer, config):
    """Ids by the tokens' names. Raises UserError where one is missing, or has no row in the model."""
    vocabulary = tokenizer.get_vocab()
    found = {name: vocabulary.get(token) for name, token in TOKENS.items()}
    if missing := [TOKENS[name] for name, i in found.items() if i is None and name != "ref_text"]:
        raise UserError(f"the tokenizer in --model_path has no token {missing[0]}: it is not that of Higgs TTS 3")
    if max(vocabulary.values()) >= config.vocab_size:
        raise UserError(f"tokenizer and model disagree: token {max(vocabulary.values())}, {config.vocab_size} rows")
    return Ids(**found, num_codebooks=config.num_codebooks, stream_bos=config.audio_stream_bos_id,
               stream_eos=config.audio_stream_eos_id)


def read_config(config):
    """Qwen3Config of a config.json dict, with num_codebooks, codebook_size and the two stream ids of the audio table.

    Raises UserError for another model type and for variants whose sequences would be others.
    """
    audio, text = config.get("audio_encoder_config") or {}, config.get("text_config") or {}

    def need(fits, what):
        if not fits:
            raise UserError(f"config.json: {what}; only the released form of Higgs TTS 3 is read")
    need(config.get("model_type") == MODEL_TYPE, f"model_type is {config.get('model_type')!r}, not {MODEL_TYPE!r}")
    need(audio.get("encoder_type") == "discrete", f"encoder_type is {audio.get('encoder_type')!r}, not 'discrete'")
    need(audio.get("use_delay_pattern") is True, "use_delay_pattern is not true")
    need(audio.get("tie_word_embeddings") is True, "the audio table and its head are not tied")
    need(text.get("tie_word_embeddings") is True, "the text table and its head are not tied")
    rope = text.get("rope_parameters") or {}
    kind = rope.get("rope_type", "default")
    need(not text.get("rope_scaling") and kind == "default", f"its rotary embedding is scaled ({kind})")
    theta = rope.get("rope_theta") or text.get("rope_theta") or ROPE_THETA
    books, size = audio.get("num_codebooks"), audio.get("vocab_size")
    need(isinstance(books, int) and books > 0 and isinstance(size, int) and size > 2,
         f"num_codebooks is {books!r} and vocab_size of the audio table {size!r}")
    plain = {key: value for key, value in text.items() if key not in ("rope_theta", "rope_scaling", "rope_parameters")}
    native = Qwen3Config(**plain, rope_parameters={"rope_theta": float(theta), "rope_type": "default"})
    need(audio.get("out_dim", native.hidden_size) == native.hidden_size, "the audio table is not as wide as the body")
    native.num_codebooks, native.codebook_size = books, size
    native.audio_stream_bos_id, native.audio_stream_eos_id = size - 2, size - 1
    return native


# ---------------------------------------------------------------------------------------------------------------------
# Model


class Higgs3(nn.Module):
    """Qwen3 body and the audio table. Parameter names of the layers are the published ones; see OURS for the tables."""

    def __init__(self, config):
        """config: of read_config."""
        super().__init__()
        self.config = config
        self.body = Qwen3Model._from_config(config, attn_implementation=ATTENTION)
        self.audio_embedding = nn.Embedding(config.num_codebooks * config.codebook_size, config.hidden_size)

    def embed_rows(self, rows):
        """(A, 8) codes -> (A, H): the sum of their rows in the audio table."""
        first = torch.arange(self.config.num_codebooks, device=rows.device) * self.config.codebook_size
        return self.audio_embedding(rows + first).sum(-2)

    def logits(self, hidden):
        """(R, H) hidden states -> (R, 8, 1026) fp32 logits of the row that follows."""
        table = self.audio_embedding.weight     # in fp32 where adapters train it
        flat = F.linear(hidden.to(table.dtype), table).float()
        return flat.view(*hidden.shape[:-1], self.config.num_codebooks, self.config.codebook_size)


class PackedHiggs3(weights.Wrapped):
    """What DDP wraps, as PackedHiggs: forward(batch) -> sums."""

    def __init__(self, net, recompute=None):
        super().__init__(net)
        fused.use(self.base_model)
        if recompute:
            from core import recomputation
            recomputation.set_mode(self, layers(self.base_model), recompute)

    def hidden_states(self, batch):
        """Final hidden states (S, H) in sequence order of a labels.PackedBatch."""
        base = self.base_model
        text = base.body.embed_tokens(batch.input_ids.index_select(0, batch.text_pos))
        text = text.to(fused.stream_dtype(text))
        rows = torch.cat([text, base.embed_rows(batch.audio_ids).to(text.dtype)])
        return base.body(inputs_embeds=rows.index_select(0, batch.seq_index)[None], use_cache=False,
                         position_ids=batch.position_ids[None], cu_seq_lens_q=batch.cu_seqlens,
                         max_length_q=batch.longest).last_hidden_state[0]

    def audio_logits(self, hidden, batch):
        """(R, K, C) fp32 logits of the rows that predict audio. hidden: of hidden_states."""
        places = torch.cat([batch.text_pos, batch.audio_pos]).index_select(0, batch.audio_rows)
        return self.base_model.logits(hidden.index_select(0, places))

    def forward(self, batch, keep=False):
        """(audio (K,), text (), eos (5,)) of a labels.PackedBatch: fp32 sums over its targets, as PackedHiggs has them.

        text is 0: text is not trained. eos (detached): of the EOC targets cross-entropy, correct argmax and number;
        of codebook 0, whose first EOC ends speech, how many of those first ones are right, and how many codes are
        taken for EOC.
        """
        if keep:        # instead: how far it is from its base
            return divergence(self, batch)
        config, books = self.base_model.config, self.base_model.config.num_codebooks
        logits, targets = self.audio_logits(self.hidden_states(batch), batch).flatten(0, 1), batch.audio_targets.view(-1)
        losses = F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="none")
        with torch.no_grad():
            is_eos, says_eos = targets == config.audio_stream_eos_id, logits.argmax(-1) == config.audio_stream_eos_id
            by_book, says = is_eos.view(-1, books), says_eos.view(-1, books)
            first = by_book[:, 0] & ~by_book[:, 1] if books > 1 else by_book[:, 0]
            false = says[:, 0] & ~by_book[:, 0] & (batch.audio_targets[:, 0] != IGNORE)
            eos = torch.stack([(losses.detach() * is_eos).sum(), (says_eos & is_eos).sum(), is_eos.sum(),
                               (first & says[:, 0]).sum(), false.sum()]).float()
        return losses.view(-1, books).sum(0), losses.new_zeros(()), eos


packed = PackedHiggs3       # of module()


def loss_report(sums, reduction, text_weight, prefix):
    """v2.loss_report with the counts of this layout; text is not trained.

    A clip of T frames has T codes in each codebook and K - 1 - k EOC in codebook k.
    """
    sums = Sums.of(sums)
    audio, ends, n_audio = sums.audio, sums.ends, sums.audio_targets
    books = len(audio)
    clips, loss = 2 * ends.targets / (books * (books - 1)), sum(audio) / max(1, n_audio)
    codes = (n_audio - ends.targets) / books
    values = {"loss": loss * (books if reduction == "sum" else 1), "audio_loss": loss, "text_loss": 0.0,
              "eos_loss": ends.loss / max(1, ends.targets),
              "eos_accuracy": ends.correct / max(1, ends.targets),
              "stop_recall": ends.stops / max(1, clips),
              "false_stop_rate": ends.false_stops / max(1, codes)}
    values |= {f"audio_loss_codebook_{k}": s / max(1, codes + clips * (books - 1 - k))
               for k, s in enumerate(audio)}
    return named(values, sums, prefix)


# ---------------------------------------------------------------------------------------------------------------------
# Files


def empty_model(config_dict, dtype, folder=None):
    """Higgs3 with its parameters on the meta device: names, shapes and dtypes, no memory; reset_buffers is to follow.

    config_dict: of config.json. folder: where that stands; nothing else is read there.
    """
    config = read_config(config_dict)
    with torch.device("meta"):
        model = Higgs3(config).to(dtype)
    config.dtype = dtype
    return model


def reset_buffers(model, device):
    """Compute the buffers that no file holds on `device`."""
    model.body.rotary_emb = type(model.body.rotary_emb)(model.config).to(device)
    if unknown := {name for name, _ in model.named_buffers()} - {"body.rotary_emb.inv_freq",
                                                                 "body.rotary_emb.original_inv_freq"}:
        raise UserError(f"this version of transformers has buffers that v3.py does not know: {sorted(unknown)}")


def weight_parts(folder, config_dict=None):
    """{our name: [slice handle]} of a folder's model weights, the codec's aside. Raises UserError.

    The files hold both tables twice, as embedding and as head; copies that differ are refused: served, the model would
    be another than the one trained.
    """
    found = weights.open_model(folder)
    for head, table in HEADS.items():
        if head in found and table in found and not same(found[head], found[table]):
            raise UserError(f"{folder}: {head} and {table} differ, but the model has one table for both; a trainer or "
                            "an export has untied them")
    return {OURS.get(name, name): [part] for name, part in found.items()
            if name not in HEADS and not name.startswith(CODEC)}


def same(a, b, rows=16384):
    """Whether two slice handles hold the same values, read piece by piece."""
    if a.get_shape() != b.get_shape():
        return False
    return all(torch.equal(a[at:at + rows], b[at:at + rows]) for at in range(0, a.get_shape()[0], rows))


def published(named):
    """{our name: value} -> {name in the files: value}."""
    names = {ours: name for name, ours in OURS.items()}
    return {names.get(name, name): value for name, value in named.items()}


def whole_files(tensors, folder, codec=None):
    """{name in the files: (slice handles, dtype, fold)} of a folder as servers want it, from that of our names.

    Both heads beside their tables, and the codec: that of `codec`, a native folder, or the one inside `folder`. Raises
    UserError without any: no server loads such a folder.
    """
    tensors = published(tensors)
    for head, table in HEADS.items():
        parts, dtype, fold = tensors[table]
        tensors[head] = (parts, dtype, fold or torch.clone)     # its own memory: the file holds both
    inside = tensor_io.open_tensors(tensor_io.files_of(weights.find_codec(codec)[0], "model")) if codec else \
        codec_parts(folder)
    if not inside:
        raise UserError(f"{folder}: holds no codec, which the servers read from there; give --audio_tokenizer_path, or "
                        "merge the adapter into the released folder")
    return tensors | {CODEC + name: ([part], part[:1].dtype if part.get_shape() else part[...].dtype, None)
                      for name, part in inside.items()}


def codec_parts(folder):
    """{codec's own name: slice handle} of the codec that a folder's weights contain; {} if none. Raises UserError."""
    found = tensor_io.open_tensors(tensor_io.files_of(folder, "model"))
    return {name.removeprefix(CODEC): part for name, part in found.items() if name.startswith(CODEC)}


def unpack_codec(folder, config_dict, into):
    """Write the codec inside a checkpoint to the folder `into` as a native one in fp32, unless it is there; -> into.

    Its configuration is that of the released tokenizer, which the servers ship, unless config.json has another under
    "audio_tokenizer_config". Raises UserError unless every weight is there, and where `into` is something else.
    """
    from transformers import HiggsAudioV2TokenizerConfig, HiggsAudioV2TokenizerModel
    into, parts = Path(into), codec_parts(folder)
    if not parts:
        raise UserError(f"{folder}: holds no codec weights; give --audio_tokenizer_path")
    config = HiggsAudioV2TokenizerConfig(**config_dict.get("audio_tokenizer_config", RELEASED_CODEC))
    with torch.device("meta"):
        wanted = {name: value.shape for name, value in HiggsAudioV2TokenizerModel(config).state_dict().items()}
    for name in parts.keys() - wanted.keys():       # weight norm as older torch names it
        stem, _, half = name.rpartition(".weight_")
        parts[f"{stem}.{NORMED[half]}" if half in NORMED else name] = parts.pop(name)
    if other := [name for name in wanted if name in parts and tuple(parts[name].get_shape()) != tuple(wanted[name])]:
        raise UserError(f"{folder}: its codec is another one than the released: {other[0]} has the shape "
                        f"{parts[other[0]].get_shape()}; give --audio_tokenizer_path")
    if missing := sorted(wanted.keys() - parts.keys()):
        raise UserError(f"{folder}: its codec lacks {len(missing)} weights, first {', '.join(missing[:5])}; give "
                        "--audio_tokenizer_path")
    if extra := sorted(parts.keys() - wanted.keys()):
        print(f"codec      {len(extra)} tensors of the checkpoint's codec are not used, first {', '.join(extra[:3])}")
    if into.exists():
        if not holds(into, {name: parts[name] for name in wanted}):
            raise UserError(f"{into}: is not the codec inside {folder}; delete that folder, or give another "
                            "--output_dir")
        return into
    with new_folder(into) as building:
        config.save_pretrained(building)
        values = {name: parts[name][:].float().contiguous() for name in wanted}
        tensor_io.save(values, building / "model.safetensors")
    return into


def holds(folder, parts):
    """Whether a folder is a codec with the values {name: slice handle}, in fp32."""
    if not (Path(folder) / "config.json").is_file():
        return False
    there = tensor_io.open_tensors(tensor_io.files_of(folder, "model"))
    return there.keys() == parts.keys() and all(torch.equal(there[name][:], part[:].float())
                                                for name, part in parts.items())


def load(folder, dtype=torch.float32, device="cpu"):
    """(Higgs3 in eval mode on the device, Ids) of a checkpoint folder. Raises UserError unless it is exactly that."""
    folder = Path(folder)
    model = empty_model(json_files.read_object(folder / "config.json"), dtype)
    ids, parts = token_ids(load_tokenizer(folder), model.config), weight_parts(folder)
    weights.check_weights(model, parts, folder)
    model.to_empty(device=device)
    reset_buffers(model, device)
    weights.load_weights(dict(model.named_parameters()), parts)
    return model.eval(), ids


# ---------------------------------------------------------------------------------------------------------------------
# Speaking


@dataclass(frozen=True)
class Sampling:
    """How a code is drawn, by itself in each codebook; the defaults are those of sglang-omni's speech endpoint.

    temperature 0: the likeliest. top_k 0 and top_p 1: off. max_new_tokens: rows that a prompt may take.
    """
    temperature: float = DRAWS["temperature"]
    top_p: float = DRAWS["top_p"]
    top_k: int = DRAWS["top_k"]
    max_new_tokens: int = 2048


@dataclass(frozen=True)
class State:
    """Where a stream stands: rows so far, up to num_codebooks; rows left after codebook 0's EOC, None before it."""
    rows: int = 0
    left: int | None = None


def draw(logits, sampling, generator=None):
    """(..., V) logits -> (...) int64 codes."""
    logits = torch.as_tensor(logits).float()
    if not sampling.temperature:
        return logits.argmax(-1)
    logits = logits / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        logits = logits.masked_fill(logits < logits.topk(sampling.top_k).values[..., -1:], float("-inf"))
    probabilities = logits.softmax(-1)
    if sampling.top_p < 1:
        ordered, order = probabilities.sort(dim=-1, descending=True)
        ordered = ordered.masked_fill(ordered.cumsum(-1) - ordered >= sampling.top_p, 0)       # the first one stays
        probabilities = torch.zeros_like(probabilities).scatter(-1, order, ordered)
    flat = probabilities.reshape(-1, probabilities.shape[-1])
    return torch.multinomial(flat, 1, generator=generator).view(logits.shape[:-1])


def step(logits, state, sampling, generator=None):
    """(row (8,) int64, State, done): one row from logits (8, 1026); sglang-omni's machine.

    state: State() at the start (or None). While the delay builds up, codebooks that have not begun get BOC; the first
    EOC of codebook 0 after that lets K - 2 more rows follow, the last of which is kept. Nothing else is forced.
    """
    state = state or State()
    row = draw(logits, sampling, generator)
    books = len(row)
    if state.rows < books:
        row[state.rows + 1:] = logits.shape[-1] - 2
        return row, State(state.rows + 1), False
    if state.left is not None:
        return row, State(state.rows, state.left - 1), state.left == 1
    ended = row[0].item() == logits.shape[-1] - 1
    return row, State(state.rows, books - 2 if ended else None), ended and books == 2


@torch.no_grad()
def forced_logits(model, prompt, ref_rows, rows):
    """float32 (T + 7, 8, 1026) logits of every row, each from the prompt and the true rows before
    it.

    prompt: (input_ids, is_audio). ref_rows: (R, 8) or None. rows: (T + 7, 8) of delay().
    """
    input_ids, is_audio = (torch.as_tensor(values).to(model.audio_embedding.weight.device) for values in prompt)
    rows = torch.as_tensor(rows).to(input_ids.device)
    embedded = torch.cat([embed_prompt(model, input_ids, is_audio, ref_rows), model.embed_rows(rows[:-1])])
    length = len(embedded)
    hidden = model.body(inputs_embeds=embedded[None], use_cache=False,
                        position_ids=torch.arange(length, device=input_ids.device)[None],
                        cu_seq_lens_q=torch.tensor([0, length], dtype=torch.int32, device=input_ids.device),
                        max_length_q=length).last_hidden_state[0]
    return model.logits(hidden[len(input_ids) - 1:])


def embed_prompt(model, input_ids, is_audio, ref_rows):
    """(S, H) embedding of a prompt; the reference's rows stand where is_audio."""
    embedded = model.body.embed_tokens(input_ids)
    if ref_rows is not None and len(ref_rows):
        embedded[is_audio] = model.embed_rows(torch.as_tensor(ref_rows).to(input_ids.device)).to(embedded.dtype)
    return embedded


@torch.no_grad()
def generate(model, prompts, sampling, seed, asked=lambda: False):
    """[(codes (T, 8) int64 on the CPU, ended_by "eos" | "length" | "time")] of a batch of prompts.

    prompts: [(input_ids, is_audio, ref_rows or None)]. asked: asked once a row; True ends all. The draws of a prompt
    depend on seed and its place in the batch, not on the other prompts.
    """
    device, books = model.audio_embedding.weight.device, model.config.num_codebooks
    embedded = [embed_prompt(model, torch.as_tensor(i).to(device), torch.as_tensor(a).to(device), r)
                for i, a, r in prompts]
    lengths = torch.tensor([len(e) for e in embedded], device=device)
    width, n = int(lengths.max()), len(embedded)
    inputs = torch.stack([F.pad(e, (0, 0, width - len(e), 0)) for e in embedded])       # padded on the left
    mask = (torch.arange(width, device=device) >= width - lengths[:, None]).long()
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    generators = [torch.Generator().manual_seed(seed * 1_000_003 + i) for i in range(n)]
    states, cache = [State()] * n, DynamicCache()
    spoken, ended = [[] for _ in range(n)], [None] * n
    kept = model.body.config._attn_implementation
    model.body.set_attn_implementation("sdpa")          # the packed attention keeps no cache
    try:
        for _ in range(sampling.max_new_tokens):
            hidden = model.body(inputs_embeds=inputs, attention_mask=mask, position_ids=positions, use_cache=True,
                                past_key_values=cache).last_hidden_state[:, -1]
            logits, rows = model.logits(hidden).cpu(), torch.full((n, books), model.config.audio_stream_eos_id)
            for i in range(n):
                if ended[i] is None:
                    rows[i], states[i], done = step(logits[i], states[i], sampling, generators[i])
                    spoken[i].append(rows[i].clone())
                    ended[i] = "eos" if done else None
            if all(ended) or asked():
                break
            inputs = model.embed_rows(rows.to(device))[:, None].to(inputs.dtype)
            mask = F.pad(mask, (0, 1), value=1)
            positions = positions[:, -1:] + 1
    finally:
        model.body.set_attn_implementation(kept)
    return [(undelay(torch.stack(rows)), how or ("length" if len(rows) == sampling.max_new_tokens else "time"))
            for rows, how in zip(spoken, ended)]
