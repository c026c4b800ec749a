"""LoRA on Higgs-Audio V2: which layers get adapters, merging, export; the files are PEFT's own format.

    python lora.py merge --model_path BASE --adapter out/checkpoint-500 --output_dir merged     # a native checkpoint
    python lora.py export --model_path BASE --adapter out/checkpoint-500 --output_dir served    # the 2025 layout
    python lora.py export --model_path full/checkpoint-500 --output_dir served                  # of a full fine-tuning
    python lora.py push --adapter out/checkpoint-500 --output_dir card --repo_id me/voice --dry_run     # for the hub
"""
from common import flags
from common.flags import need
from speech.choices import DTYPES, HUB_CODEC, LAYOUTS, LORA_TARGETS


def build_parser():
    p = flags.Parser("Write a Higgs-Audio V2 checkpoint with its adapter folded in, or a folder for the hub.")
    p.usage = "%(prog)s {merge,export,push} [--flag value ...]"
    p.add_argument("command", choices=["merge", "export", "push"],
                   help="merge: adapter and base into a native checkpoint; export: for other code, adapter or not; "
                        "push: an adapter or a full checkpoint as it is, with a model card, to the hub")
    p.add_argument("--model_path", help="base model or full fine-tuning's checkpoint, or hub name")
    p.add_argument("--adapter", help="folder with adapter_model.safetensors; merge needs one")
    p.add_argument("--output_dir", required=True, help="new folder for the checkpoint")
    p.add_argument("--format", choices=LAYOUTS, help="layout to write: native (default of merge), or 2025 for "
                   "boson-ai's own code (default of export)")
    p.add_argument("--dtype", choices=DTYPES, help="of the weights; default float32 with an adapter (bfloat16 halves "
                   "the size and rounds part of the update away), else the source's")
    p.add_argument("--max_shard_gb", type=float, default=5.0,
                   help="largest weight file in GB, so also the memory this takes")
    p.add_argument("--audio_tokenizer_path", help="folder or hub name that the native processor shall name as its "
                   f"codec (default: what the base names, else {HUB_CODEC})")
    g = p.add_argument_group("push")
    g.add_argument("--repo_id", metavar="OWNER/NAME", help="on the hub; made if it is not there")
    flags.switch(g, "--dry_run", help="write the folder with its card, upload nothing")
    flags.switch(g, "--private", help="make a repository that only its owner sees")
    g.add_argument("--base_model", metavar="OWNER/NAME",
                   help="hub name of the base for the card (default: the run's --model_path)")
    g.add_argument("--language", nargs="+", default=[], metavar="CODE", help="languages for the card")
    return p


def check_push(args):
    """check_flags of the command push, which takes one checkpoint as it is."""
    need(bool(args.adapter) != bool(args.model_path), "push: give the checkpoint, as one of --adapter and --model_path")
    need(args.repo_id and args.repo_id.count("/") == 1, "push needs --repo_id OWNER/NAME")
    need(not (args.format or args.dtype or args.audio_tokenizer_path or args.max_shard_gb != 5.0),
         "--format, --dtype, --max_shard_gb and --audio_tokenizer_path: push changes no weights; merge or export first")


def check_flags(args, world_size):
    """Raise UserError for combinations that do not go together; fill in --format."""
    if args.command == "push":
        return check_push(args)
    need(args.model_path, f"{args.command} needs --model_path")
    need(not (args.repo_id or args.dry_run or args.private or args.base_model or args.language),
         "--repo_id, --dry_run, --private, --base_model and --language are for push")
    args.format = args.format or {"merge": "native", "export": "2025"}[args.command]
    need(args.command == "export" or args.adapter,
         "merge needs --adapter FOLDER; to convert a checkpoint without one: lora.py export")
    need(args.max_shard_gb > 0, f"--max_shard_gb {args.max_shard_gb}: must be positive")


# parsed before torch is imported: --help and a mistake in a flag answer at once
ARGS = flags.parse(build_parser(), check_flags) if __name__ == "__main__" else None

from pathlib import Path

import torch

from common import tensor_files
from common.distributed import UserError, one_clear_error
from speech.model import versions

# after speech.model.weights, which explains a torchaudio that breaks every transformers import
from common import adapters  # isort: skip
from peft import LoraConfig  # isort: skip


def add_lora(model, rank, alpha, dropout, targets, base_name, table=False, **kinds):
    """Wrap a native model in fp32 adapters; the base is frozen, but for the audio table of Higgs TTS 3 with `table`.

    targets: a name in LORA_TARGETS, or comma-separated module name endings. base_name: written into
    the adapter's config. kinds: use_rslora, use_dora of PEFT's LoraConfig. Raises UserError when a
    target matches nothing.
    """
    whole = versions.module(model.config).WHOLE_MODULES
    if table and not whole:
        raise UserError("--train_audio_table is for Higgs TTS 3; of V2 --freeze_llm trains audio "
                        "embedding and head")
    names = LORA_TARGETS.get(targets) or [t.strip() for t in targets.split(",") if t.strip()]
    linear = [n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)]
    for name in names or [targets]:     # nothing but commas is a target that matches nothing
        if not any(n == name or n.endswith("." + name) for n in linear):
            raise UserError(f"--lora_target_modules {name!r} matches no linear layer; use one of "
                            f"{', '.join(LORA_TARGETS)} or endings such as q_proj, mlp.gate_proj, audio_mlp.gate_proj")
    config = LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=dropout, target_modules=names, bias="none",
                        modules_to_save=list(whole) if table else None, **kinds)
    net = adapters.attach(model, config, base_name)
    if table:       # one copy, embedding and head alike
        model.audio_embedding.modules_to_save.float()
    return net


def folds(model, adapter):
    """{weight name: function that adds the adapter's update to that weight in fp32}; model: native, on the meta device.

    Raises UserError when the adapter's files and the model do not fit together exactly: PeftModel.from_pretrained would
    only warn about weights that are missing.
    """
    net = adapters.add_saved(model, adapter, whole=(whole := versions.module(model.config).WHOLE_MODULES))
    stored = tensor_files.open_tensors([Path(adapter) / "adapter_model.safetensors"])
    tables = {f"{name}.weight": f"base_model.model.{name}.weight" for name in whole}
    known = (".lora_A.weight", ".lora_B.weight", f".{adapters.MAGNITUDE}", *tables.values())
    if other := [name for name in stored if not name.endswith(known)]:
        raise UserError(f"--adapter {adapter}: only LoRA, rsLoRA and DoRA can be folded in, this has {min(other)}")
    adapters.load_adapters(net, adapter)     # onto the meta device nothing is copied: names and shapes are compared
    tensor_files.check_finite({name: part[:] for name, part in stored.items()}, f"--adapter {adapter}")

    def fold(name, scaling):
        a, b = (stored[f"base_model.model.{name}.lora_{half}.weight"] for half in "AB")
        length = stored.get(f"base_model.model.{name}.{adapters.MAGNITUDE}")

        def updated(weight):
            weight = torch.addmm(weight, b[:].float(), a[:].float(), alpha=scaling)
            if length is not None:      # DoRA (Liu et al. 2024, eq. 5): the rows' direction, times a trained length
                weight *= (length[:].float() / torch.linalg.norm(weight, dim=1))[:, None]
            return weight
        return updated
    found = {name: lambda weight, table=table: stored[table][:].float().clone()
             for name, table in tables.items() if table in stored}
    return found | {f"{name}.weight": fold(name, module.scaling["default"])
                    for name, module in net.get_base_model().named_modules() if hasattr(module, "lora_A")}


def merge(model_path, adapter, output_dir, dtype="float32", shard_bytes=5 * 10**9, layout="native", codec=None):
    """Fold an adapter, or none, into its base in fp32 and write a plain checkpoint; see speech/model/export.py."""
    from speech.model import export
    return export.export(model_path, output_dir, layout, dtype, shard_bytes,
                         (lambda model: folds(model, adapter)) if adapter else None, codec, adapter)


def main(argv=None):
    args = ARGS or flags.parse(build_parser(), check_flags, argv)
    with one_clear_error():
        if args.command == "push":
            from speech.model import card
            notes = card.write(args.adapter or args.model_path, args.output_dir, args.repo_id, args.base_model,
                               args.language)
            print(f"{args.repo_id}: {args.output_dir}", *notes, sep="\n  ")
            if not args.dry_run:
                print(f"uploaded: {card.upload(args.output_dir, args.repo_id, args.private)}")
            return
        notes = merge(args.model_path, args.adapter, args.output_dir, args.dtype, int(args.max_shard_gb * 1e9),
                      args.format, args.audio_tokenizer_path)
        print(f"checkpoint: {args.output_dir}", *notes, sep="\n  ")


if __name__ == "__main__":
    main()
