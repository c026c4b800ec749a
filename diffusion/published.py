"""Import weights into a run (--init_from), and export checkpoints for other code.

    python diffusion/published.py --checkpoint out --output_dir exported
    python diffusion/published.py --checkpoint out --output_dir served --format sdar

Import reads BD3-LM or MDLM as published (kuleshov-group/bd3lm-owt-*, mdlm-owt), causal language
models of transformers, SDAR, and checkpoints or exports of this trainer. Rows of known markers,
prompt form, end token and block size are kept. New rows get the mean row and a little noise.

Export writes averaged weights. A DiT gets the published layout, which transformers before version 5
loads with trust_remote_code=True. A converted language model keeps its class; a Qwen3 may get
SDAR's (github.com/JetAstra/SDAR). Both get generate.py, which samples them.
"""
import dataclasses
import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))    # core/ is next to this folder

from core import cli
from diffusion import choices


def build_parser():
    p = cli.Parser("Export a checkpoint in the layout of BD3-LM's models, or as a language model.")
    p.flag("--checkpoint", None, "checkpoint, or OUTPUT_DIR with its best one", required=True)
    p.flag("--output_dir", None, "folder to write, new or empty", required=True)
    p.flag("--format", "usual", "sdar: for a converted Qwen3, for servers of SDAR",
           choices=("usual", "sdar"))
    return p


# parsed before torch is imported: --help and wrong flags answer at once
ARGS = cli.parse(build_parser()) if __name__ == "__main__" else None

import torch

from core import chat, checkpoint, dist, json_files, tensor_io
from core.cli import UserError, first_line, require
from diffusion import dit
from diffusion.problems import MARKERS, SDAR_MASK, Problem, load_tokenizer, read_tokenizer

ROWS = ("embed.weight", "head.weight", "head.bias", "model.embed_tokens.weight", "lm_head.weight")
# files that transformers reads besides tokenizer.json, so chat templates stay usable
CHAT_FILES = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
HUB_CODE = "kuleshov-group/bd3lm-owt-block_size16"      # has their classes, for transformers
SDAR_CODE = "JetLM/SDAR-1.7B-Chat"
CHAT_HINT = re.compile(r"(; give|[.] Try) .*--chat_template.*")    # a flag of the chat trainer only
SDAR_MASK_ID = 151669       # first id after Qwen3's tokens: SDAR's mask in SGLang


def load_checkpoint(folder):
    """(network in eval mode, with averaged weights and merged adapters; config.json). UserError."""
    folder, backbone = Path(folder), dit
    stored = json_files.read_object(folder / "config.json")
    require("layout" in stored, f"{folder}: is no checkpoint of train_bd3lm.py")
    if "hidden_size" not in stored["model"]:
        from diffusion import decoder as backbone
    config = backbone.Config(**stored["model"])
    config.lora = config.lora and config.lora | {"dtype": "float32"}
    model = config.network(config)
    tensor_io.load(dist.World(), folder, "ema", dit.trained_parameters(model))
    return (backbone.merge_adapters(model) if config.lora else model).eval(), stored


def find_checkpoint(name, flag="--checkpoint"):
    """A checkpoint folder; for an OUTPUT_DIR the best intact one, else the newest. UserError."""
    folder = Path(name)
    newest, state = checkpoint.find_newest(folder, "auto")      # UserError if all are damaged
    if not newest:
        wrong = checkpoint.find_damage(folder)
        require(not wrong, f"{flag} {name}: is not a checkpoint, and holds none ({wrong})")
        return folder
    best = folder / f"checkpoint-{state.get('best_step')}"
    return newest if checkpoint.find_damage(best) else best


class Origin(NamedTuple):
    """The weights that --init_from names."""
    path: Path
    kind: str           # ours, causal (a language model) or published (a DiT of BD3-LM or MDLM)
    form: dict          # prompt, end_token, block_size, mask_token_id, vocab_size, if given
    source: dict        # config.json of the original language model; {}: none


def find(name):
    """Origin of --init_from: a folder, an OUTPUT_DIR of this trainer, or a download. UserError."""
    path = tensor_io.find_folder(str(name), "--init_from")
    if checkpoint.list_checkpoints(path) or (path / checkpoint.MANIFEST).exists():
        path = find_checkpoint(path, "--init_from")
    require(not (path / "adapter_config.json").is_file(),
            f"--init_from {path}: is an adapter; merge it into its base with PEFT")
    config = json_files.read_object(path / "config.json")
    if (path / checkpoint.MANIFEST).exists() and "model" in config:
        form = config["layout"] | {"vocab_size": config["model"]["vocab_size"]}
        return Origin(path, "ours", form, config.get("source", {}))
    tensor_io.files_of(path, "model")       # UserError without weights
    if config.get("model_type") in ("bd3lm", "mdlm", None):
        for key, value in (("time_conditioning", False), ("causal", False), ("adaln", True)):
            require(config.get(key, value) == value, f"{path}: its config.json has {key} "
                                                     f"{config.get(key)}, which is not supported")
        return Origin(path, "published", {}, {})
    return Origin(path, "causal", config | config.get("block_diffusion", {}), config)


def open_start(world, args, layout, tokenizer):
    """(Layout, Origin of --init_from or None, tokenizer); sets args.tokenizer. Collective."""
    # one rank downloads for all
    origin = dist.rank0(world, find, args.init_from) if args.init_from else None
    has_tokenizer = origin and (origin.source or (origin.path / "tokenizer.json").is_file())
    tokenizer = origin.path if has_tokenizer and not args.tokenizer else tokenizer
    if args.chat or args.system == "chat":
        args.tokenizer, layout = str(tokenizer), add_chat_form(layout, tokenizer)
    elif args.system != "hdp":
        layout = add_form(layout, origin.form)
    size = origin and origin.form.get("block_size")
    if size and "block_size" not in args.named:
        layout = dataclasses.replace(layout, block_size=size)
        layout.check()
    return layout, origin, tokenizer


def add_form(layout, form):
    """A Layout with the prompt form of an Origin and, if it has none, its end token."""
    return dataclasses.replace(layout, prompt=form.get("prompt", ""),
                               end_token=layout.end_token or form.get("end_token", ""))


def add_chat_form(layout, folder):
    """A Layout with prompt and end token from a tokenizer folder's chat template. UserError."""
    tokenizer = chat.load_tokenizer(folder)
    try:
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": "{question}"}], tokenize=False, add_generation_prompt=True,
            enable_thinking=False)
    except Exception as error:      # of Jinja, or raised by the template
        raise UserError(f"--chat: the chat template of {folder} fails ({first_line(error)})")
    require(prompt.count("{question}") == 1,
            f"--chat: the chat template of {folder} does not write the question once")
    return add_form(layout, {"prompt": prompt, "end_token": tokenizer.eos_token})


def read_chats(path, folder, tokens, bad):
    """Problems of a chat file or data set, with ids: one for each trained answer, whose question is
    all text before it in the chat template of the tokenizer's folder. Those of one chat share a
    name. bad: list to which unusable problems are added. UserError if the template does not end
    answers with the end token of `tokens`."""
    encoder = chat.Encoder(chat.load_tokenizer(folder), "last", chat.THINKING["false"])
    problems = []
    for line, record in chat.read_records(path, bad):
        name, messages = f"{path}:{line}", record["messages"]
        places = [i for i, message in enumerate(messages)
                  if message["role"] == "assistant" and message.get("weight", 1)]
        # without a trained answer use the last message: the encoder gives the reason
        for i in places or [len(messages) - 1]:
            try:
                (ids, mask), = encoder.encode(
                    {"messages": messages[:i + 1], "tools": record.get("tools")})
            except UserError as error:
                why = f"answer in message {i + 1}: {CHAT_HINT.sub('', str(error))}"
                bad.append(json_files.Problem(name, "invalid", why, path))
                continue
            # up to the last trained id, since the sampler fills the last block with end tokens
            ids = ids[:len(mask) - mask[::-1].index(True)]
            last, end = map(tokens.tokenizer.id_to_token, (ids[-1], tokens.end))
            require(last == end, f"{folder}: its chat template ends answers with {last}, its end "
                                 f"token is {end}; give --end_token '{last}'")
            problems.append(Problem(name, chat.question(messages[:i]), "", "", ids=ids,
                                    prompt_length=mask.index(True)))
    require(problems or bad, f"{path}: holds no chats")
    return problems


def read_older_tokenizer(folder):
    """Tokenizer of a folder of Qwen or SDAR without tokenizer.json. Raises UserError."""
    # transformers makes an empty tokenizer without these files or a class
    slow = [folder / name for name in ("vocab.json", "merges.txt", "tokenizer_config.json")]
    require(all(path.exists() for path in slow) and '"tokenizer_class"' in
            json_files.read_text(slow[-1]), f"{folder}: has no tokenizer.json")
    from transformers import AutoTokenizer
    return AutoTokenizer.from_pretrained(folder, trust_remote_code=False).backend_tokenizer


def copy_chat_files(folder, to):
    """Copy the CHAT_FILES that a tokenizer folder has."""
    for path in filter(Path.is_file, (Path(folder) / name for name in CHAT_FILES)):
        shutil.copyfile(path, to / path.name)


def read(origin, config, tokens, seed=0):
    """({our name: CPU tensor} for the vocabulary, hash of an Origin's files). UserError if they do
    not fit. config: of the run's network. seed: for new rows."""
    path, mask = origin.path, origin.form.get("mask_token_id")
    if origin.kind == "ours":
        tensors = dict(load_checkpoint(path)[0].named_parameters())
    elif origin.kind == "causal":
        from diffusion import decoder
        tensors = decoder.read_folder(path, config)
    else:
        stored = tensor_io.open_tensors(tensor_io.files_of(path, "model"))
        tensors = from_official({name: rows[...] for name, rows in stored.items()}, config, path)
    rows = next((len(tensors[name]) for name in ROWS if name in tensors), 0)
    vocabulary = {text: number for text, number in tokens.tokenizer.get_vocab().items()
                  if text not in tokens.markers}
    known = vocabulary | {"<|mask|>": rows - 1}     # published: GPT-2's tokens and a mask
    if origin.kind != "published":
        known = read_tokenizer(path).get_vocab()
    most = max(known.values()) + 1
    require(most <= rows if origin.source else len(known) == most == rows,
            f"--init_from {path}: tokenizer and model disagree: {most} tokens and {rows} rows")
    markers = {name: known.pop(name) for name in (*MARKERS["hdp"], SDAR_MASK) if name in known}
    require(mask in (None, tokens.mask), f"--init_from {path}: its config.json has mask_token_id "
            f"{mask}, its tokenizer has the mask at {tokens.mask}: correct one of them")
    require(known == vocabulary, f"--init_from {path}: its tokenizer is not that of "
            "--tokenizer, so ids would mean other words; drop --tokenizer")
    with torch.device("meta"):      # shapes, without the vocabulary's rows
        wanted = {name: p.shape[1:] if name in ROWS else p.shape
                  for name, p in config.network(config).named_parameters()}
    shapes = {name: t.shape[1:] if name in ROWS else t.shape for name, t in tensors.items()}
    wrong = sorted(name for name in wanted | shapes if wanted.get(name) != shapes.get(name))
    require(not wrong, f"--init_from {path}: {len(wrong)} names are missing, unknown or of another "
                       f"shape (--model_size), first {', '.join(wrong[:5])}")
    return (fit_vocabulary(tensors, len(vocabulary), markers, tokens, config.vocab_size, seed),
            tensor_io.fingerprint_files(sorted(path.glob("*.safetensors"))))


def add_lora(config, origin, bf16, name, lora):
    """A Config whose network has adapters; frozen weights are bfloat16 with bf16. UserError."""
    require(origin.kind == "causal",
            "--use_lora needs --init_from of a language model; other weights are trained whole")
    files = tensor_io.files_of(origin.path, "model")
    lora = lora | {"base": os.path.abspath(origin.path) if Path(name).is_dir() else name,
                   "identity": tensor_io.fingerprint_files(files),
                   "dtype": "bfloat16" if bf16 else "float32"}
    return dataclasses.replace(config, lora=lora)


def base_weights(model):
    """{name: parameter}: all of a network, or the frozen ones under its adapters."""
    return {name.replace(".base_layer.", "."): parameter
            for name, parameter in model.named_parameters()
            if ".lora_" not in name and name != "mask_row"}


def fill(model, tensors, seed, resumed):
    """Load the weights of read() into a network and initialise its adapters with zero update.
    resumed: a checkpoint will replace the trained weights, but not the base under adapters."""
    lora = model.config.lora
    if lora or not resumed:
        for name, parameter in base_weights(model).items():
            tensor_io.fill(parameter, tensors[name], name)
    if lora and not resumed:
        from core import adapters
        adapters.init_adapters(model.adapted[0], seed)
        row = tensors["model.embed_tokens.weight"][model.config.mask_id]
        tensor_io.fill(model.mask_row, row, "mask_row")


def fit_vocabulary(tensors, count, markers, tokens, size, seed):
    """Tensors of `size` rows for `tokens`. count: tokens that are no markers. markers: {name:
    source row}; other markers get new rows."""
    generator, fitted = torch.Generator().manual_seed(seed), {}
    for name, rows in tensors.items():
        fitted[name] = rows = rows.detach()
        if name in ROWS:
            mean, spread = rows[:count].float().mean(0), rows[:count].float().std(0)
            fitted[name] = table = torch.zeros(size, *rows.shape[1:], dtype=rows.dtype)
            table[:len(rows)] = rows[:size]
            for marker, number in tokens.markers.items():
                if marker in markers:
                    table[number] = rows[markers[marker]]
                elif rows.ndim == 1:        # a bias has one number per token
                    table[number] = mean
                else:
                    noise = torch.randn(rows.shape[1:], generator=generator)
                    table[number] = mean + 0.02 * spread * noise
    return fitted


# BD3-LM's and MDLM's names (kuleshov-group/bd3lms 1c3e8f4: models/dit.py, models/hf)
FREQUENCIES = "rotary_emb.inv_freq"
# {our module: theirs}, of a layer and of the rest
LAYER = {"norm_attention": "norm1", "qkv": "attn_qkv", "out": "attn_out", "norm_mlp": "norm2",
         "up": "mlp.0", "down": "mlp.2", "modulation": "adaLN_modulation"}
OTHER = {"condition_in": "sigma_map.mlp.0", "condition_out": "sigma_map.mlp.2",
         "norm": "output_layer.norm_final", "head": "output_layer.linear",
         "modulation": "output_layer.adaLN_modulation"}


def official_name(name):
    """The published name of a parameter, without prefixes."""
    *layer, module, kind = name.split(".")
    if module == "embed":
        return "vocab_embed.embedding"
    return f"blocks.{layer[1]}.{LAYER[module]}.{kind}" if layer else f"{OTHER[module]}.{kind}"


def official_state(tensors, heads, t_range):
    """{published name: tensor} from {our name: tensor} of a DiT. t_range: trained noise levels."""
    size = tensors["embed.weight"].shape[1] // heads
    low, high = (torch.tensor(float(t)) for t in t_range)
    # as they write it, to the last bit
    frequencies = 1.0 / (10_000 ** (torch.arange(0, size, 2).float() / size))
    return {f"backbone.{official_name(name)}": tensor for name, tensor in tensors.items()} | {
        f"backbone.{FREQUENCIES}": frequencies, "sampling_eps_min": low, "sampling_eps_max": high}


def from_official(state, config, path):
    """{our name: tensor} from a published state dict, for a DiT of this Config. UserError."""
    plain = {name.removeprefix("backbone."): tensor for name, tensor in state.items()
             if not name.startswith("sampling_eps_")}       # noise range: a setting of a run
    frequencies = plain.pop(FREQUENCIES, ())
    require(len(frequencies) in (0, config.head_size // 2),
            f"{path}: heads of {2 * len(frequencies)}, --model_size has them of {config.head_size}")
    with torch.device("meta"):
        names = {official_name(name): name for name, _ in config.network(config).named_parameters()}
    return {names.get(name, name): tensor for name, tensor in plain.items()}


def export(folder, output, file_format="usual"):
    """Write a checkpoint to a folder in a --format -> its tensors by name. UserError."""
    model, stored = load_checkpoint(folder)
    config, layout = model.config, choices.Layout(**stored["layout"])
    tokens = load_tokenizer(folder, layout.system, layout.end_token)
    source = stored.get("source", {})
    kind = source.get("model_type") if config.mask_id == SDAR_MASK_ID else ""
    # an SDAR source stays SDAR: its config.json names files that are not here
    is_sdar = "sdar" in (file_format, kind)
    require(not is_sdar or kind in ("qwen3", "sdar"),
            "--format sdar: train from a Qwen3 model with its tokenizer, so that the mask has id "
            f"{SDAR_MASK_ID}, not {config.mask_id}")
    if not source:
        trained = json_files.read_object(folder / checkpoint.STATE / "state.json")
        t_range = trained.get("t_range", choices.FULL)
        state = official_state(model.state_dict(), config.heads, t_range)
        written = {
            "architectures": ["BD3LM"], "model_type": "bd3lm", "torch_dtype": "float32",
            "return_dict": False,
            "auto_map": {"AutoConfig": f"{HUB_CODE}--configuration_bd3lm.BD3LMConfig",
                         "AutoModelForMaskedLM": f"{HUB_CODE}--modeling_bd3lm.BD3LM"},
            "block_size": layout.block_size, "vocab_size": config.vocab_size,
            "model_length": layout.longest, "cross_attn": True, "adaln": True,
            "attn_backend": "sdpa", "causal": False, "hidden_dim": config.hidden_size,
            "cond_dim": config.cond_size, "n_blocks": config.layers, "n_heads": config.heads,
            "dropout": config.dropout, "time_conditioning": False, "var_min": True,
            "sampling_eps_min": t_range[0], "sampling_eps_max": t_range[1]}
    else:       # the source's, and how it was trained
        state = dict(model.named_parameters())
        form = {"block_size": layout.block_size, "mask_token_id": config.mask_id, "shift": False,
                "prompt": layout.prompt, "end_token": layout.end_token, "end_token_id": tokens.end,
                "begin_token_id": tokens.bos, "max_length": layout.max_length}
        written = {key: value for key, value in config.source.items() if key != "torch_dtype"}
        written |= {"vocab_size": config.vocab_size, "dtype": "float32",
                    "eos_token_id": tokens.end, "block_diffusion": form}
    if is_sdar:
        state |= {"lm_head.weight": model.lm_head.weight.clone()}
        kinds = {"AutoConfig": "configuration_sdar.SDARConfig",
                 "AutoModel": "modeling_sdar.SDARModel",
                 "AutoModelForCausalLM": "modeling_sdar.SDARForCausalLM"}
        # the classes of SDAR and SGLang read the keys from before transformers 5
        written = {k: v for k, v in written.items() if k not in ("rope_parameters", "dtype")} | {
            "model_type": "sdar", "architectures": ["SDARForCausalLM"],
            "tie_word_embeddings": False, "rope_scaling": None, "torch_dtype": "float32",
            "rope_theta": config.native.rope_parameters["rope_theta"], "fuse_cross_entropy": True,
            "mask_token_id": config.mask_id, "block_size": layout.block_size,
            "auto_map": {kind: f"{SDAR_CODE}--{name}" for kind, name in kinds.items()}}
    state = {name: tensor.contiguous() for name, tensor in state.items()}
    with checkpoint.new_folder(output) as output:
        tensor_io.save(state, output / "model.safetensors")
        tokens.tokenizer.save(str(output / "tokenizer.json"))
        copy_chat_files(folder, output)
        if is_sdar:     # servers find the mask by this name
            for path in output.glob("tokenizer*.json"):
                text = path.read_text(encoding="utf-8").replace('"<|mask|>"', f'"{SDAR_MASK}"')
                if path.name == "tokenizer_config.json":
                    text = json.dumps(json.loads(text) | {"mask_token": SDAR_MASK})
                path.write_text(text, encoding="utf-8")
        if source:          # servers stop at the trained end token
            ends = {name: config.source.get(name) for name in ("bos_token_id", "pad_token_id")}
            checkpoint.write_json(output / "generation_config.json",
                                  ends | {"eos_token_id": tokens.end})
            shutil.copyfile(Path(__file__).with_name("generate.py"), output / "generate.py")
        (output / "config.json").write_text(json.dumps(written, indent=2) + "\n")
    return state


def main(argv=None):
    args = ARGS or cli.parse(build_parser(), None, argv)
    folder = find_checkpoint(args.checkpoint)
    state = export(folder, Path(args.output_dir), args.format)
    print(f"{args.output_dir}: {len(state)} tensors, averaged weights of {folder}")


if __name__ == "__main__":
    main()
