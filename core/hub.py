"""Data sets on the Hugging Face hub: which files they have, and how those are read.

A shard's path is hf://datasets/OWNER/NAME@COMMIT/FILE; it is downloaded into the hub's cache. huggingface_hub is
imported here, when such a path is met.
"""
import contextlib
import fnmatch
import re
from pathlib import Path

from core.cli import UserError
from core import json_files

PREFIX = "hf://datasets/"
NAME = re.compile(r"([\w-][\w.-]*/[\w.-]+?)(?:@((?:refs/\w+/)?[^/@]+))?(?:/([^@]+))?")     # owner/name@revision/files
LOCAL = (".json", ".jsonl", ".csv", ".tsv", ".txt", ".list", ".lst", ".arrow", ".gz", ".zip")      # a file that is gone


def is_there(path):
    """Whether a file lies on the hub."""
    return str(path).startswith(PREFIX)


def may_be(path):
    """Whether a name that nothing here has is that of a data set on the hub."""
    return is_there(path) or bool(NAME.fullmatch(str(path))) and not str(path).endswith(LOCAL)


@contextlib.contextmanager
def asking(path):
    """What the hub's client raises becomes one line of a UserError."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        what, why = type(error).__name__, (str(error).strip().splitlines() or [""])[0]
        if what == "GatedRepoError":
            raise UserError(f"{path}: its owner gives it to those who ask for it on the hub: do, then `hf auth login`")
        if what in ("RepositoryNotFoundError", "RevisionNotFoundError", "HFValidationError"):
            raise UserError(f"{path}: no such file or folder here, and no such data set on the hub (or a private one: "
                            "`hf auth login`)")
        raise UserError(f"{path}: no such file or folder here, and the hub cannot be reached ({what}: {why[:120]}); "
                        "where there is a network: `hf download OWNER/NAME --repo-type dataset --local-dir FOLDER`, "
                        "then give that folder")


def one_set(path, names, advice):
    """UserError when files are shards of several sets. advice(pattern): what else to give than `path`."""
    groups = {}         # shards of one set: in one folder, with one word before the numbers
    for name in names:
        groups.setdefault(re.sub(r"[-_.][^/]*$", "", name) + "*" + Path(name).suffix, []).append(name)
    if len(groups) > 1:
        raise UserError(f"{path}: holds the sets {', '.join(list(groups)[:12])}; give one: "
                        f"'{advice(next((g for g in groups if 'train' in g), next(iter(groups))))}'")


def find_shards(path, kinds):
    """[path] of the shards that OWNER/NAME, with @REVISION or /PATTERN behind it, names. Raises UserError.

    kinds: endings of their names.
    """
    found = NAME.fullmatch(str(path).removeprefix(PREFIX))
    if not found:
        raise UserError(f"{path}: is not of the form {PREFIX}OWNER/NAME, with @REVISION and /FILES behind it")
    repo, revision, pattern = found.groups()
    with asking(path):
        from huggingface_hub import HfApi
        about = HfApi().dataset_info(repo, revision=revision)
    names = sorted(file.rfilename for file in about.siblings or [] if file.rfilename.endswith(kinds))
    if pattern:
        names = [name for name in names if fnmatch.fnmatch(name, pattern)]
    if not names:
        raise UserError(f"{path}: has no files ending in {' or '.join(kinds)}"
                        + ("" if pattern or revision else f"; the hub may have made some: {repo}@refs/convert/parquet"))
    if not pattern:
        one_set(path, names, lambda files: f"{repo}{f'@{revision}' * bool(revision)}/{files}")
    return [f"{PREFIX}{repo}@{about.sha}/{name}" for name in names]


def saved_shards(folder):
    """[paths], in their order, of a folder that datasets' save_to_disk wrote; [] for others. Raises UserError."""
    if (folder / "dataset_dict.json").is_file():
        splits = list(map(str, json_files.read_object(folder / "dataset_dict.json").get("splits") or ["?"]))
        raise UserError(f"{folder}: holds the splits {', '.join(splits)}; give one: {folder / splits[0]}")
    if not ((folder / "state.json").is_file() and (folder / "dataset_info.json").is_file()):
        return []
    state = json_files.read_object(folder / "state.json")
    if state.get("_indices_files"):
        raise UserError(f"{folder}: its rows are in another order than saved; flatten_indices() before save_to_disk()")
    return [folder / str(file.get("filename")) for file in state.get("_data_files") or [] if isinstance(file, dict)]


def download(path, **where):
    """Path in the hub's cache here of a file on the hub, downloaded unless it is there already."""
    repo, commit, name = NAME.fullmatch(path.removeprefix(PREFIX)).groups()
    with asking(path):
        from huggingface_hub import hf_hub_download
        return hf_hub_download(repo, name, repo_type="dataset", revision=commit, **where)


def table_rows(path, size=1024):
    """Yield the rows of a parquet file, or of an arrow file as datasets' save_to_disk writes it, as
    dicts without fields of null; UserError. size: rows of a parquet file read together.
    """
    path = Path(path)
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise UserError(f"{path}: pip install pyarrow to read it, or give JSONL")

    def without_null(value):
        if isinstance(value, dict):
            return {name: without_null(part) for name, part in value.items() if part is not None}
        return [without_null(part) for part in value] if isinstance(value, list) else value
    try:
        if path.suffix == ".parquet":
            opened = pyarrow.parquet.ParquetFile(path)
        else:
            opened = pyarrow.ipc.open_stream(pyarrow.memory_map(str(path)))
        with opened as file:
            for batch in file.iter_batches(batch_size=size) if path.suffix == ".parquet" else file:
                yield from map(without_null, batch.to_pylist())
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path}: cannot be read as {path.suffix[1:]} "
                        f"({str(error).splitlines()[0]})")
