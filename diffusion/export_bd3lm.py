"""Write a checkpoint of train_bd3lm.py as BD3-LM's authors publish theirs, for their code and transformers.

    python diffusion/export_bd3lm.py --checkpoint out --output_dir exported

The folder holds config.json, model.safetensors and tokenizer.json. config.json names the classes of the published
models on the hub (Apache-2.0), so that transformers before version 5 loads it with trust_remote_code=True; their
forward takes ids of twice model_length, [noisy | clean]. Weights are the averaged ones, as in the published files.
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))    # common/ stands beside this folder

import argparse

from common import flags


def build_parser():
    p = flags.Parser("Write a checkpoint in the layout of the published BD3-LM models.")
    p.add_argument("--checkpoint", required=True, help="checkpoint folder, or the trainer's OUTPUT_DIR")
    p.add_argument("--pick", choices=("best", "newest"), default="best",
                   help="of an OUTPUT_DIR: the best checkpoint by --best_by, or the newest one")
    p.add_argument("--ema", action=argparse.BooleanOptionalAction, default=True, help="take the averaged weights")
    p.add_argument("--output_dir", required=True, help="folder to write, new or empty")
    return p


def check_flags(args, world_size):
    """Nothing derives."""


# parsed before torch is imported: --help and a mistake in a flag answer at once
ARGS = flags.parse(build_parser(), check_flags) if __name__ == "__main__" else None

from common import checkpoint, parallel, tensor_files
from common.parallel import UserError
from diffusion import dit, official, weights
from diffusion.blocks import Layout
from diffusion.problems import load_tokenizer


def export(folder, ema, output):
    """Write the checkpoint `folder` to the folder `output`. Raises UserError."""
    model, about = weights.load_checkpoint(folder, ema)
    if weights.module_of(model.config) is not dit:
        raise UserError(f"{folder}: was converted from a language model; the published layout is that of BD3-LM's own "
                        "network. sample_bd3lm.py and --init_from take the checkpoint as it is")
    layout = Layout(**about["layout"])
    if layout.region_block(1) != layout.region_block(2) or (layout.system == "hdp" and not layout.flat):
        print(f"note       their code has blocks of one size from the first token on; this is an {layout.system} model "
              "of other blocks, whose weights fit and whose texts need sample_bd3lm.py", flush=True)
    t_range = checkpoint.load_meta(folder)["t_range"]
    state = official.state_dict(model.state_dict(), model.config.heads, t_range)
    checkpoint.prepare_output(output, "--output_dir")
    if any(output.iterdir()):
        raise UserError(f"--output_dir {output}: is not empty; give another folder")
    tensor_files.save({name: tensor.contiguous() for name, tensor in state.items()}, output / "model.safetensors")
    load_tokenizer(folder, layout.system, layout.end_token).save(output)
    text = official.config_json(model.config, layout.block_size, layout.longest, t_range)
    checkpoint.write_atomically(output / "config.json", lambda path: path.write_text(text))     # last: now it is whole
    return state


def main(argv=None):
    args = ARGS or flags.parse(build_parser(), check_flags, argv)
    with parallel.one_clear_error():
        folder = weights.find_checkpoint(args.checkpoint, args.pick)
        state = export(folder, args.ema, Path(args.output_dir))
        print(f"{args.output_dir}: {len(state)} tensors, {'averaged' if args.ema else 'last'} weights of {folder}")


if __name__ == "__main__":
    main()
