"""Filling the code cache, all ranks together: one run at a time, damaged shards set aside, then
what is missing encoded. Imported when a clip is missing or a shard damaged.
"""
import contextlib
from pathlib import Path

from core import checkpoint
from core.checkpoint import move_aside
from core.cli import UserError, problem_text
from core.dist import all_gather, exit_quietly, rank0
from core import run_lock
from core.watchdog import Stopped, stop_requested
from speech.code_cache import CacheIndex, look_up, shard_names
from speech.encode import encode_share, share_work


def fill_cache(world, clips, how, known, bad=None):
    """Encode what is missing -> on rank 0 (folder, shard names, (n, 4) of CacheIndex.find_files).

    clips, how, bad: of dataset.ensure_codes. known: on rank 0 the folder, and what look_up has
    found in it.
    """
    positions = []      # rank 0's: shards and positions as they are at the start
    unusable = {} if bad is None else bad
    with contextlib.ExitStack() as stack:
        def plan():
            folder, index, found, unknown = known
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
            return folder, share_work(clips, unknown, world.size) if len(unknown) else []
        folder, work = rank0(world, plan)
        if work is None:
            raise Stopped("asked to stop while another run was filling the code cache")
        if any(work):
            problems, mine = encode_share(world, work, folder, how)
            failed = list(dict.fromkeys(sum(all_gather(world, problems), [])))
            if failed and not world.is_main:
                exit_quietly()
            if failed:
                raise UserError(problem_text(failed))
            for found in all_gather(world, mine):
                unusable.update(found)
            if any(all_gather(world, stop_requested())):
                raise Stopped("asked to stop while audio was being encoded; what is done stays in "
                              "the code cache")
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
    folder.mkdir(parents=True, exist_ok=True)
    lock = run_lock.acquire(folder, "--code_cache", wait_s=wait_s, waiting=waiting)
    checkpoint.remove_named(folder, checkpoint.TEMPORARY)
    return lock


def set_aside(folder, damaged):
    """Rename shards, {name: what is wrong}, so that nobody takes them for codes. UserError where
    that is impossible.
    """
    for name, why in damaged.items():
        try:
            move_aside(Path(folder) / name, f"is damaged ({why})")
        except OSError as error:
            raise UserError(f"{folder}/{name} is damaged ({why}) and cannot be set aside "
                            f"({error.strerror}); give another --code_cache")


def locate(folder, clips, processes, bad):
    """Shard names and (n, 4) positions of clips, which are all cached but those in bad, {number:
    why}: 0 frames.

    Others that are not cached are added to bad.
    """
    index = CacheIndex(folder)
    found, unknown = index.find_clips(clips, processes)
    for i in unknown[:, 0].tolist():
        bad.setdefault(i, f"{clips[i].path}: changed while it was being read, or is a copy of one "
                          "that cannot be used")
    found[unknown[:, 0], 2] = 0
    return index.shards, found
