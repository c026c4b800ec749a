"""Dataset folders and hub datasets of problems: the files of a split, rows of parquet and arrow files."""
from pathlib import Path

from common.distributed import UserError


def find_split(folder, split):
    """The JSONL or JSON file of a split in a dataset folder, or its list of parquet or arrow files."""
    for name in (f"{split}.jsonl", f"{split}.json"):
        if (folder / name).is_file():
            return folder / name
    for pattern in (f"main/{split}-*.parquet", f"{split}-*.parquet", f"data/{split}-*.parquet", f"{split}/*.arrow"):
        if files := sorted(folder.glob(pattern)):
            return files
    raise UserError(f"{folder}: has no {split}.jsonl, {split}.json, {split}-*.parquet (also in main/ or data/) or "
                    f"{split}/*.arrow")


def arrow_entries(files):
    """Yield the rows of parquet files, or of the arrow files that datasets' save_to_disk writes, as dicts."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise UserError(f"{files[0]}: pip install pyarrow to read it, or give JSONL")
    for file in files:
        try:
            if file.suffix == ".parquet":
                table = pyarrow.parquet.read_table(file)
            else:
                with pyarrow.memory_map(str(file)) as source:
                    table = pyarrow.ipc.open_stream(source).read_all()
        except (OSError, pyarrow.ArrowException) as error:
            raise UserError(f"{file}: cannot be read ({error})")
        yield from table.to_pylist()


def download(name):
    """Folder of a hub dataset (openai/gsm8k), downloaded or from the cache; UserError when it cannot be had."""
    from huggingface_hub import snapshot_download
    try:
        return Path(snapshot_download(str(name), repo_type="dataset", allow_patterns=["*.json*", "*.parquet"]))
    except Exception as error:      # a dozen kinds: no network, no such name, not allowed
        raise UserError(f"{name}: no such file or folder, and no dataset that could be downloaded "
                        f"({type(error).__name__}); give a path, or a hub name when online")
