"""Codes of the clips of a run, on all ranks together: looked up in the cache, and encoded once ever where they lack.

A run whose cache has all clips imports neither the decoder nor the codec (speech/data/encode.py).
"""
import contextlib
from dataclasses import dataclass
from pathlib import Path

from common import checkpoint, run_lock
from common.distributed import UserError, all_ranks_ok, gather_objects, problem_text, rank0_first
from common.watchdog import Stopped, stop_requested
from speech.data.code_cache import codec_fingerprint, locate, look_up, set_aside, shard_names


@dataclass(frozen=True)
class Encoding:
    """How clips become codes, and where these lie.

    codec_dir: native codec folder. cache_dir: of encoded audio. processes: that decode, on this
    node. wait_limit_s: seconds to wait for another run that fills the cache, and for a rank that
    encodes.
    """
    codec_dir: Path
    cache_dir: Path
    num_codebooks: int
    processes: int = 0
    wait_limit_s: float = 6 * 3600

    def folder(self):
        """The part of the cache that is of this codec. Raises UserError."""
        return Path(self.cache_dir) / codec_fingerprint(self.codec_dir)


def ensure_codes(world, clips, how, bad=None):
    """Encode what is missing, all ranks together. Called by every rank; `clips` (unique Clips)
    matters on rank 0 only.

    Returns on rank 0 (folder, shard names, (n, 4) int64 of CacheIndex.find_files in the order of
    clips), else None. A cache that has all clips is only read. Damaged shards are set aside, and
    their clips encoded again. how: Encoding. bad: a dict that on rank 0 takes {number of a clip that
    cannot be decoded or encoded: file and reason}, whose row says 0 frames; None: UserError with
    all.
    """
    positions = []      # rank 0's: shards and positions as they are at the start
    unusable = {} if bad is None else bad
    with contextlib.ExitStack() as stack:
        def plan():
            folder = how.folder()
            index, found, unknown = look_up(folder, clips, how.processes)
            if len(unknown) or index.damaged:
                try:
                    stack.enter_context(own_cache(folder, 0.9 * how.wait_limit_s))
                except OSError as error:
                    raise UserError(f"--code_cache {how.cache_dir}: lacks {len(unknown)} of "
                                    f"{len(clips)} clips and cannot be written ({error.strerror})")
                except Stopped:
                    return folder, None
                # where another run was filling it
                if shard_names(folder) != sorted([*index.shards, *index.damaged]):
                    index, found, unknown = look_up(folder, clips, how.processes)
                set_aside(folder, index.damaged)
            positions.extend([index.shards, found])
            if index.damaged:
                print("data       damaged shards of the code cache, now set aside: "
                      f"{len(index.damaged)}; clips to encode: {len(unknown)}", flush=True)
            if not len(unknown):
                return folder, []
            from speech.data.encode import share_work
            return folder, share_work(clips, unknown, world.size)
        folder, work = rank0_first(world, plan)
        if work is None:
            raise Stopped("asked to stop while another run was filling the code cache")
        if any(work):
            from speech.data.encode import encode_share
            problems, mine = encode_share(world, work, folder, how)
            all_ranks_ok(world, problems)
            for found in gather_objects(world, mine):
                unusable.update(found)
            if any(gather_objects(world, stop_requested())):
                raise Stopped("asked to stop while audio was being encoded; what is done stays in the "
                              "code cache")
            positions = locate(folder, clips, how.processes, unusable) if world.is_main else []
    if bad is None and unusable and world.is_main:
        raise UserError(problem_text(list(dict.fromkeys(unusable.values()))))
    return (folder, *positions) if world.is_main else None


def own_cache(folder, wait_s):
    """run_lock.RunLock of a cache folder, which is made if need be. OSError; Stopped when asked to
    stop meanwhile.
    """
    def waiting():
        if stop_requested():
            raise Stopped("")
    from common import hub
    folder.mkdir(parents=True, exist_ok=True)
    lock = run_lock.acquire(folder, "--code_cache", wait_s=wait_s, waiting=waiting)
    checkpoint.remove_named(folder, checkpoint.TEMPORARY, hub.COPIES)
    return lock
