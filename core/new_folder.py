"""A folder that a script fills and that appears whole, or not at all."""
import contextlib
import os
import re
import shutil
import uuid
from pathlib import Path

from safetensors import SafetensorError

from core import checkpoint, run_lock
from core.cli import UserError, require


@contextlib.contextmanager
def new_folder(output_dir, size=0, flag="--output_dir"):
    """A folder to fill; it gets the name output_dir once all is on disk. size: its bytes, about.

    Raises UserError: for a folder that is there and not empty, or that another process is making,
    or for a full disk.
    """
    final = Path(os.path.abspath(output_dir))
    require(not final.exists() or final.is_dir() and not any(final.iterdir()),
            f"{flag} {output_dir}: is there already and not empty; give another name or move it away")
    # in the same folder, so that both are on one disk and a renaming is enough
    building = final.with_name(f".{final.name}.new-{uuid.uuid4().hex}")
    try:
        for left in final.parent.glob(".*.new-*"):      # by a killed process
            if re.fullmatch(rf"\.{re.escape(final.name)}\.new-[0-9a-f]{{32}}", left.name):
                # gone since it was listed: its process has ended well
                with contextlib.suppress(FileNotFoundError), run_lock.acquire(left, flag):
                    shutil.rmtree(left)
                    print(f"removed {left}, which a killed process has left", flush=True)
        building.mkdir(parents=True)
        with run_lock.acquire(building, flag) as lock:
            free = shutil.disk_usage(building).free     # before hours of work, not after
            require(free >= size, f"{flag} {output_dir}: {size / 1e9:.1f} GB are to be written, "
                                  f"{free / 1e9:.1f} GB are free there")
            yield building
            for path in [*building.iterdir(), building]:
                checkpoint.fsync(path)
            # still locked, or another process may take it for what a kill has left
            os.rename(building, final)
        (final / lock.path.name).unlink()
        checkpoint.fsync(final.parent)
    except Exception as error:
        full = "(os error" in str(error)        # of tokenizers, which raises nothing else
        if not full and not isinstance(error, (OSError, SafetensorError)):
            raise
        raise UserError(f"{flag} {output_dir}: cannot be written ({error})")
    finally:
        shutil.rmtree(building, ignore_errors=True)
