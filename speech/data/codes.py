"""Codes of the clips of a run, on all ranks together: looked up in the cache, and encoded once ever where they lack.

A run whose cache has all clips imports neither the decoder nor the codec (speech/data/encode.py).
"""
import contextlib
from pathlib import Path

from common import checkpoint, run_lock
from common.distributed import UserError, all_ranks_ok, gather_objects, problem_text, rank0_first
from common.watchdog import Stopped, stop_requested
from speech.data.code_cache import codec_fingerprint, locate, look_up, set_aside, shard_names


def ensure_codes(world, clips, codec_dir, cache_dir, num_codebooks, num_proc, wait_limit_s=6 * 3600, bad=None):
    """Encode what is missing, all ranks together. Called by every rank; `clips` (unique Clips) matters on rank 0 only.

    Returns on rank 0 (folder, shard names, (n, 4) int64 of CacheIndex.find_files in the order of clips), else None.
    A cache that has all clips is only read. Damaged shards are set aside, and their clips encoded again.
    codec_dir: native codec folder. num_proc: decoding processes on this node. bad: a dict that on rank 0 takes {number
    of a clip that cannot be decoded or encoded: file and reason}, whose row says 0 frames; None: UserError with all.
    """
    positions = []      # rank 0's: shards and positions as they are at the start
    unusable = {} if bad is None else bad
    with contextlib.ExitStack() as stack:
        def plan():
            folder = Path(cache_dir) / codec_fingerprint(codec_dir)
            index, found, unknown = look_up(folder, clips, num_proc)
            if len(unknown) or index.damaged:
                try:
                    stack.enter_context(own_cache(folder, 0.9 * wait_limit_s))
                except OSError as error:
                    raise UserError(f"--code_cache {cache_dir}: lacks {len(unknown)} of {len(clips)} clips and cannot "
                                    f"be written ({error.strerror})")
                except Stopped:
                    return folder, None
                if shard_names(folder) != sorted([*index.shards, *index.damaged]):      # another run was filling it
                    index, found, unknown = look_up(folder, clips, num_proc)
                set_aside(folder, index.damaged)
            positions.extend([index.shards, found])
            if index.damaged:
                print(f"data       damaged shards of the code cache, now set aside: {len(index.damaged)}; clips to "
                      f"encode: {len(unknown)}", flush=True)
            if not len(unknown):
                return folder, []
            from speech.data.encode import share_work
            return folder, share_work(clips, unknown, world.size)
        folder, work = rank0_first(world, plan)
        if work is None:
            raise Stopped("asked to stop while another run was filling the code cache")
        if any(work):
            from speech.data.encode import encode_share
            workers = max(1, num_proc // world.local_size) if num_proc else 0
            problems, mine = encode_share(world, work, folder, codec_dir, num_codebooks, workers, wait_limit_s)
            all_ranks_ok(world, problems)
            for found in gather_objects(world, mine):
                unusable.update(found)
            if any(gather_objects(world, stop_requested())):
                raise Stopped("asked to stop while audio was being encoded; what is done stays in the code cache")
            positions = locate(folder, clips, num_proc, unusable) if world.is_main else []
    if bad is None and unusable and world.is_main:
        raise UserError(problem_text(list(dict.fromkeys(unusable.values()))))
    return (folder, *positions) if world.is_main else None


def own_cache(folder, wait_s):
    """run_lock.RunLock of a cache folder, which is made if need be. OSError; Stopped when asked to stop meanwhile."""
    def waiting():
        if stop_requested():
            raise Stopped("")
    from common import hub
    folder.mkdir(parents=True, exist_ok=True)
    lock = run_lock.acquire(folder, "--code_cache", wait_s=wait_s, waiting=waiting)
    checkpoint.remove_named(folder, checkpoint.TEMPORARY, hub.COPIES)
    return lock
