"""The hub's client, whose errors become one line, and rows of parquet and arrow files."""
import contextlib
from pathlib import Path

from core.cli import UserError


@contextlib.contextmanager
def asking(path):
    """What the hub's client raises becomes one line of a UserError."""
    try:
        yield
    except Exception as error:
        what, why = type(error).__name__, (str(error).strip().splitlines() or [""])[0]
        raise UserError(f"{path}: no such file or folder here, and the hub does not give it "
                        f"({what}: {why[:120]}); private ones need `hf auth login`; where there is "
                        "a network: `hf download OWNER/NAME --repo-type dataset --local-dir "
                        "FOLDER`, then give that folder")


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
