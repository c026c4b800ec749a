"""A checkpoint of a run as a folder for the hub: its files, a model card filled from the run, and the upload.

What the card says of the run comes from the checkpoint's trainer_state/state.json and from metrics.jsonl beside it.
What neither says is left out.
"""
import fnmatch
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from common import checkpoint, tensor_files
from common.distributed import UserError
from common.text import printable
from core import metrics
from core.json_files import read_object
from speech.choices import HUB_CODEC
from speech import text_normalization, v3
from speech.export import new_folder

LOGGED = {"train/loss": "training loss", "eval/loss": "validation loss",     # of metrics.jsonl, for the card
          "eval/stop_rate": "share of sample prompts that ended by themselves"}
# what a checkpoint or a merged model of ours holds for others; a folder may hold anything else, secrets too
SHARED = ("adapter_config.json", "adapter_model.safetensors", "model.safetensors", "model-[0-9]*-of-[0-9]*.safetensors",
          "model.safetensors.index.json", "config.json", "generation_config.json", "preprocessor_config.json",
          "processor_config.json", "tokenizer_config.json", "tokenizer.json", "special_tokens_map.json",
          "added_tokens.json", "vocab.json", "merges.txt", "chat_template.*", text_normalization.FILE, "LICENSE*", "NOTICE*")
CARD = """---
{front}
---

# {family}: {title}

{kind} of [{base}](https://huggingface.co/{base}), a text-to-speech model, made with `train_v2_ddp.py`.

## Training

| | |
|---|---|
{facts}

## Use

```{language}
{use}
```

{text}

## Licence

{terms} [The text itself]({licence}) says what is allowed.
"""
PEFT_V2 = """import torch
from peft import PeftModel
from transformers import HiggsAudioV2ForConditionalGeneration

base = HiggsAudioV2ForConditionalGeneration.from_pretrained("{base}", dtype=torch.bfloat16)
model = PeftModel.from_pretrained(base, "{repo}")"""
MODEL_V2 = """import torch
from transformers import HiggsAudioV2ForConditionalGeneration

model = HiggsAudioV2ForConditionalGeneration.from_pretrained("{repo}", dtype=torch.bfloat16)"""
TERMS_V2 = """The base is under the Boson Higgs Audio 2 Community License Agreement, which is built on the Llama 3
licence. It goes with what is made of the base: pass on both licence texts and their notice ("Built with Higgs Materials
licensed from Boson AI USA, Inc. ...")."""
SERVE_3 = """sgl-omni serve --model-path served --port 8000
vllm-omni serve served --omni --trust-remote-code           # or this"""
ADAPTER_3 = """# no server takes an adapter: fold it into the base first, with the scripts that trained it
hf download {repo} --local-dir adapter
python lora.py merge --model_path {base} --adapter adapter --dtype bfloat16 --output_dir served
""" + SERVE_3
CHECKPOINT_3 = """# the servers also want the codec in the folder: export it with the scripts that trained it
hf download {repo} --local-dir checkpoint
python lora.py export --model_path checkpoint --audio_tokenizer_path {codec} --dtype bfloat16 --output_dir served
""" + SERVE_3
SERVED_3 = """hf download {repo} --local-dir served
""" + SERVE_3
TERMS_3 = """For research and non-commercial use only: the base is under the Boson Higgs TTS 3 Research and
Non-Commercial License, which goes with what is made of it. No voice may be cloned without its owner's consent."""


@dataclass(frozen=True)
class Family:
    """What the cards of one family of models say. prompts: of its texts, {} takes how they were trained."""
    name: str
    licence: str
    terms: str
    prompts: str


V2 = Family("Higgs Audio 2", "boson-higgs-audio-2-community-license", TERMS_V2,
            "Prompts have the form of the base model's chat template. The text to speak was {}.")
THIRD = Family("Higgs TTS 3", "boson-higgs-tts-3-research-and-non-commercial-license", TERMS_3,
               "Texts are spoken as they stand, with control tags such as `<|emotion:elation|>` inside; they were {}.")


def write(source, output_dir, repo_id, base=None, languages=()):
    """Write the checkpoint folder `source` and its card into the new folder output_dir; returns notes to print.

    base: hub name of the model it was trained from, None: as the run says. Raises UserError.
    """
    source = Path(source)
    adapter = (source / "adapter_config.json").is_file()
    if not adapter and not (source / "config.json").is_file():
        raise UserError(f"{source}: is not a checkpoint: it has neither adapter_config.json nor config.json")
    meta = checkpoint.load_meta(source) if (source / checkpoint.STATE_DIR).is_dir() else {}
    said = str(meta.get("args", {}).get("model_path", ""))
    if not base:
        if said.count("/") != 1 or said[0] in "./~" or Path(said).exists():
            raise UserError(f"{source}: was trained from {said or 'what it does not say'}, which is not a name on the "
                            "hub; give --base_model OWNER/NAME")
        base = said
    notes = [] if meta else [f"{source} has no {checkpoint.STATE_DIR}: the card says nothing of the run"]
    files, others = [], []
    for path in sorted(source.iterdir()):
        is_ours = any(fnmatch.fnmatchcase(path.name, pattern) for pattern in SHARED)
        (files if is_ours and path.is_file() and not path.is_symlink() else others).append(path)
    others = [path.name for path in others if path.name not in (checkpoint.STATE_DIR, checkpoint.MANIFEST, "README.md")]
    if others:
        notes.append(f"not uploaded: {printable(', '.join(others))}")
    size = sum(path.stat().st_size for path in files)
    with new_folder(output_dir, size) as building:
        for path in files:
            shutil.copyfile(path, building / path.name)
        if adapter:         # it names the folder from which the run read its base
            config = read_object(source / "adapter_config.json") | {"base_model_name_or_path": base}
            (building / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        third = is_third(source, adapter)
        card = text(repo_id, base, adapter, languages, facts(meta, source.parent), source, third)
        (building / "README.md").write_text(card, encoding="utf-8")
    if third:
        notes.append(f"{v3.LICENCE}: read it before you publish")
    return [f"{len(files) + 1} files, {size / 1e9:.3f} GB, {'adapter' if adapter else 'model'}", *notes]


def is_third(source, adapter):
    """Whether a checkpoint folder is of Higgs TTS 3. Raises UserError."""
    if not adapter:
        return read_object(source / "config.json").get("model_type") == v3.MODEL_TYPE
    return any(".body.layers." in name for name in tensor_files.open_tensors([source / "adapter_model.safetensors"]))


def facts(meta, output_dir):
    """[(what, value)] of a run for the card; meta: state.json of the checkpoint, {} if it has none."""
    if not meta:
        return []
    args, data = meta["args"], meta.get("data")
    lora = f"adapters, rank {args['lora_rank']}, alpha {args['lora_alpha']}, {args['lora_target_modules']}"
    kinds = [name for name, flag in (("rsLoRA", "use_rslora"), ("DoRA", "use_dora")) if args.get(flag)]
    kinds += ["on a base in NF4"] * (args.get("base_dtype") == "nf4")
    found = [("data", f"{data['samples']:,} samples, {data['hours']:.2f} h of audio")] if data else []
    found += [("optimizer steps", f"{meta['step']:,}"),
              ("trained", ", ".join([lora, *kinds]) if args["use_lora"] else "all weights"),
              ("peak learning rate", f"{args['learning_rate']:g}, warm-up {args['warmup_steps']} steps"),
              ("precision", "bfloat16" if args["bf16"] else "float16" if args.get("fp16") else "float32")]
    for name, what in LOGGED.items():
        curve = [(row["step"], row[name]) for row in metrics.read_metrics(Path(output_dir) / "metrics.jsonl")
                 if row.get(name) is not None and row["step"] <= meta["step"]]
        if curve:
            first = f" ({curve[0][1]:.4f} at step {curve[0][0]})" if len(curve) > 1 else ""
            found.append((what, f"{curve[-1][1]:.4f} at step {curve[-1][0]}{first}"))
    if meta["best_loss"] is not None:
        found.append(("best validation loss", f"{meta['best_loss']:.4f} at step {meta['best_step']}"))
    return found


def text(repo_id, base, adapter, languages, rows, source, third):
    """The model card as text. third: of Higgs TTS 3, which transformers has no class for."""
    family, licence = THIRD if third else V2, f"https://huggingface.co/{base}/blob/main/LICENSE"
    front = ["license: other", f"license_name: {family.licence}", f"license_link: {licence}", f"base_model: {base}",
             f"base_model_relation: {'adapter' if adapter else 'finetune'}", "pipeline_tag: text-to-speech"]
    if adapter or not third:
        front.append(f"library_name: {'peft' if adapter else 'transformers'}")
    if third:
        front += ["tags:", "- higgs-tts-3"] + (["- lora"] if adapter else [])
    if languages:
        front += ["language:", *(f"- {json.dumps(language)}" for language in languages)]
    how = "normalised as boson-ai's own inference does" if text_normalization.saved_setting(source) == "on" else "not normalised"
    if third:
        served = SERVED_3 if not adapter and v3.codec_parts(source) else CHECKPOINT_3
        use = ADAPTER_3 if adapter else served
    else:
        use = PEFT_V2 if adapter else MODEL_V2
    return CARD.format(
        front="\n".join(front), family=family.name, title=repo_id.rpartition("/")[2] or Path(source).name, base=base,
        kind="An adapter" if adapter else "A fine-tuned version", text=family.prompts.format(how), licence=licence,
        facts="\n".join(f"| {what} | {value} |" for what, value in rows) or "| | not known |", terms=family.terms,
        use=use.format(base=base, repo=repo_id, codec=HUB_CODEC), language="bash" if third else "python")


def upload(folder, repo_id, private):
    """Upload a folder to the hub; returns its address. Raises UserError, which says how to go on."""
    from huggingface_hub import HfApi
    try:
        api = HfApi()
        api.create_repo(repo_id, private=private, exist_ok=True)
        api.upload_folder(repo_id=repo_id, folder_path=folder, commit_message="Upload of a checkpoint")
    except Exception as error:      # of the network, of the hub, of a login that is missing
        why = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(f"--repo_id {repo_id}: not uploaded ({why}); the folder is complete, so go on with: "
                        f"hf upload {repo_id} {os.path.abspath(folder)}")
    return f"https://huggingface.co/{repo_id}"
