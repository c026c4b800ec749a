"""Dataset folders and hub datasets of problems: the files of a split; tokenizers of the hub and of slow classes."""
from pathlib import Path

from common import hub
from common.distributed import UserError


def find_split(folder, split):
    """JSONL or JSON file of a split in a dataset folder, or its list of parquet or arrow files."""
    for name in (f"{split}.jsonl", f"{split}.json"):
        if (folder / name).is_file():
            return folder / name
    for pattern in (f"main/{split}-*.parquet", f"{split}-*.parquet", f"data/{split}-*.parquet",
                    f"{split}/*.arrow"):
        if files := sorted(folder.glob(pattern)):
            return files
    raise UserError(f"{folder}: has no {split}.jsonl, {split}.json, {split}-*.parquet (also in "
                    f"main/ or data/) or {split}/*.arrow")


def download(name):
    """Folder of a hub dataset (openai/gsm8k), downloaded or from the cache. Raises UserError."""
    with hub.asking(name):
        from huggingface_hub import snapshot_download
        return Path(snapshot_download(str(name), repo_type="dataset",
                                      allow_patterns=["*.json*", "*.parquet"]))


def download_tokenizer(name, may_be, hint):
    """tokenizer.json of a hub model. may_be: whether the name can be a hub's. UserError + hint."""
    why = ""
    try:
        if may_be:
            from huggingface_hub import hf_hub_download
            return hf_hub_download(str(name), "tokenizer.json")
    except Exception as error:      # a dozen kinds: no network, no such name, not allowed
        why = f", and nothing that could be downloaded ({type(error).__name__})"
    raise UserError(f"--tokenizer {name}: no such file or folder{why}; {hint}")


def auto_tokenizer(folder):
    """transformers' tokenizer of a folder, without its warnings of configs it does not know."""
    import transformers
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        return transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    finally:
        transformers.logging.set_verbosity(before)
