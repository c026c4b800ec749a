"""Write a checkpoint of train_bd3lm.py as others read it: BD3-LM's published layout, or a transformers language model.

    python diffusion/export_bd3lm.py --checkpoint out --output_dir exported
    python diffusion/export_bd3lm.py --checkpoint out --output_dir served --format sdar     # of Qwen3, for servers

The folder holds config.json, model.safetensors and tokenizer.json; weights are the averaged ones, as in published
files.

A network of BD3-LM's own goes out in the published layout. config.json names the classes of the published models on
the hub (Apache-2.0), so that transformers before version 5 loads it with trust_remote_code=True; their forward takes
ids of twice model_length, [noisy | clean].

What was converted from a language model goes out as that model's own class, float32, adapters merged, with a row for
the mask, its chat template, and the form it was trained on; --init_from takes it back bit for bit and goes on in that
form. generate.py in it samples it, without this repository; its README.md says how that is done.

With --format sdar a converted Qwen3 goes out as an SDAR model (github.com/JetAstra/SDAR), which it is: config.json,
the mask's name in the tokenizer, and a head of its own are SDAR's. Servers know the mask by its id, 151669: that is
where training puts it for a Qwen3 tokenizer without a mask. --init_from takes such folders, and SDAR's own;
what started from one goes out so without --format, too.
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))    # common/ stands beside this folder

from common import flags
from diffusion.model_flags import checkpoint_flags


def build_parser():
    p = flags.Parser("Write a checkpoint in the layout of the published BD3-LM models, or as a language model.")
    checkpoint_flags(p)
    p.add_argument("--output_dir", required=True, help="folder to write, new or empty")
    p.add_argument("--format", choices=("usual", "sdar"), default="usual",
                   help="of a converted Qwen3: sdar, which servers of SDAR read")
    return p


# parsed before torch is imported: --help and a mistake in a flag answer at once
ARGS = flags.parse(build_parser()) if __name__ == "__main__" else None

import json
import shutil

from common import checkpoint, distributed, tensor_files
from common.distributed import UserError
from common.new_folder import new_folder
from diffusion import decoder, init_from, official, weights
from diffusion.blocks import Layout
from diffusion.problems import END, SDAR_MASK, load_tokenizer

SAMPLING = """# A language model converted to block diffusion

Tensors have the names of a transformers language model, but this is no autoregressive model: its own `generate()` would
write nonsense. `python generate.py "a question"` answers, with torch and transformers alone:

- Blocks of {block} tokens, counted from the first token of the prompt. A token sees its own block, both ways, and all
  earlier blocks.
- The block to be written begins as mask tokens (id {mask}), the prompt's last tokens in front where it ends inside a
  block. The head is not shifted: logits at a masked place are those of the token at that place. The mask is never an
  answer. Passes replace masks, the surest first, until none is left; then the next block follows.
- Trained on the form {prompt!r}, answers end with {end!r}.

`python diffusion/train_bd3lm.py --init_from THIS_FOLDER` trains on from here in that form; `diffusion/sample_bd3lm.py` samples its
checkpoints.
"""


def language_config(model, source, layout, tokens):
    """Text of config.json: the language model's own (source), with the rows and the dtype of what is written."""
    source = source | {"vocab_size": model.config.vocab_size, "dtype": "float32", "eos_token_id": tokens.end,
                       "block_diffusion": {
        "block_size": layout.block_size, "mask_token_id": model.config.mask_id, "shift": False,
        "prompt": layout.prompt, "end_token": layout.end_token, "end_token_id": tokens.end,
        "begin_token_id": tokens.bos, "max_length": layout.max_length}}
    source.pop("torch_dtype", None)
    return json.dumps(source, indent=2) + "\n"


SDAR_MASK_ID = 151669       # the first behind Qwen3's tokens; SGLang knows SDAR's mask by this number
SDAR_CODE = "JetLM/SDAR-1.7B-Chat"      # where transformers finds the classes


def sdar_state(model):
    """{name: tensor} of a converted Qwen3 as an SDAR model, with a head. Raises UserError."""
    config = model.config
    if not config.qk_norm or config.qkv_bias:
        raise UserError("--format sdar: SDAR is Qwen3; this model is of another kind: leave --format out, or "
                        "start from a Qwen3 model (--init_from)")
    if config.mask_id != SDAR_MASK_ID:
        raise UserError(f"--format sdar: the mask has id {config.mask_id}, and servers look for "
                        f"{SDAR_MASK_ID}: train with Qwen3's own tokenizer (151,669 tokens) and --system gsm8k, "
                        "or leave --format out")
    return dict(model.named_parameters()) | {"lm_head.weight": model.lm_head.weight.clone()}


def sdar_config(text, model, layout):
    """Text of an SDAR model's config.json. text: of language_config."""
    kinds = {"AutoConfig": "configuration_sdar.SDARConfig", "AutoModel": "modeling_sdar.SDARModel",
             "AutoModelForCausalLM": "modeling_sdar.SDARForCausalLM"}
    found = json.loads(text)
    for name in ("rope_parameters", "dtype"):       # SDAR's class and SGLang's read the names before transformers 5
        found.pop(name, None)
    return json.dumps(found | {
        "model_type": "sdar", "architectures": ["SDARForCausalLM"], "tie_word_embeddings": False,
        "rope_theta": model.config.theta, "rope_scaling": None, "torch_dtype": "float32", "fuse_cross_entropy": True,
        "block_size": layout.block_size, "mask_token_id": model.config.mask_id,
        "auto_map": {kind: f"{SDAR_CODE}--{name}" for kind, name in kinds.items()}}, indent=2) + "\n"


def name_mask(folder, mask):
    """Give the mask of a tokenizer folder SDAR's name. mask: its id."""
    path = folder / "tokenizer.json"
    found = json.loads(path.read_text(encoding="utf-8"))
    for token in found["added_tokens"]:
        if token["id"] == mask:
            token["content"] = SDAR_MASK
    path.write_text(json.dumps(found, ensure_ascii=False), encoding="utf-8")
    path = folder / "tokenizer_config.json"
    if path.exists():
        found = json.loads(path.read_text(encoding="utf-8")) | {"mask_token": SDAR_MASK}
        path.write_text(json.dumps(found, indent=2), encoding="utf-8")


def note(config, layout):
    """Text of README.md of an exported language model: how to sample it."""
    prompt = layout.prompt or "Question: {question}\nAnswer: "
    return SAMPLING.format(block=layout.block_size, mask=config.mask_id,
                           prompt=prompt, end=layout.end_token or END)


def export(folder, ema, output, layout_of="usual"):
    """Write the checkpoint `folder` to the folder `output`. layout_of: --format. Raises UserError."""
    model, about = weights.load_checkpoint(folder, ema)
    layout = Layout(**about["layout"])
    tokens = load_tokenizer(folder, layout.system, layout.end_token)
    converted = weights.module_of(model.config) is decoder
    # what began as SDAR stays it: its config.json names files that are not here
    began = about["source"].get("model_type") == "sdar" and model.config.mask_id == SDAR_MASK_ID
    sdar = layout_of == "sdar" or began
    if sdar and not converted:
        raise UserError("--format sdar: this is a network of BD3-LM's own, SDAR is Qwen3; leave it out")
    if sdar:
        state = sdar_state(model)
        text = sdar_config(language_config(model, about["source"], layout, tokens), model, layout)
    elif converted:
        state, text = dict(model.named_parameters()), language_config(model, about["source"], layout, tokens)
    else:
        t_range = checkpoint.load_meta(folder)["t_range"]
        state = official.state_dict(model.state_dict(), model.config.heads, t_range)
        text = official.config_json(model.config, layout.block_size, layout.longest, t_range)
        if layout.region_block(1) != layout.region_block(2) or (layout.system == "hdp" and not layout.flat):
            print(f"note       their code has blocks of one size from the first token on; this is an {layout.system} "
                  "model of other blocks, whose weights fit and whose texts need sample_bd3lm.py", flush=True)
    with new_folder(output, sum(tensor.nbytes for tensor in state.values())) as output:
        tensor_files.save({name: tensor.contiguous() for name, tensor in state.items()}, output / "model.safetensors")
        tokens.save(output)
        for name, held in init_from.chat_files(folder).items():
            (output / name).write_bytes(held)
        if sdar:
            name_mask(output, tokens.mask)
        if converted:       # servers stop where answers ended in training
            ends = {name: about["source"].get(name) for name in ("bos_token_id", "pad_token_id")}
            checkpoint.write_json(output / "generation_config.json", ends | {"eos_token_id": tokens.end})
            shutil.copyfile(Path(__file__).with_name("generate.py"), output / "generate.py")
            (output / "README.md").write_text(note(model.config, layout), encoding="utf-8")
        (output / "config.json").write_text(text)
    return state


def main(argv=None):
    args = ARGS or flags.parse(build_parser(), None, argv)
    with distributed.one_clear_error():
        folder = weights.find_checkpoint(args.checkpoint, args.pick)
        state = export(folder, args.ema, Path(args.output_dir), args.format)
        print(f"{args.output_dir}: {len(state)} tensors, {'averaged' if args.ema else 'last'} weights of {folder}")


if __name__ == "__main__":
    main()
