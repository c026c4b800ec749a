"""Conversations of every kind, with random codes, and their table on disk."""
import zlib

import numpy as np
from safetensors.numpy import save_file

from data import Table
from speech.conversations import Clip, Sample, Turn
from speech.dataset import TableBuilder, tokenise

BOS, EOS, BOOKS = 1024, 1025, 8


def codes_of(clip):
    """(T, 8) random codes of a clip without a file; its duration is T."""
    return np.random.default_rng(len(clip.path)).integers(0, 1024, (int(clip.duration), BOOKS)).astype(np.int16)


def user(text):
    return Turn("user", [text], None)


def speaker(*parts, trained=True):
    return Turn("assistant", list(parts), None, trained)


SYSTEM = Turn("system", ["Speak."], None)
REF, TARGET, ONE_FRAME, LONG = (Clip("r" * n, duration=t) for n, t in ((1, 5), (2, 3), (3, 1), (4, 30)))
CONVERSATIONS = [
    [SYSTEM, user("Hello there."), speaker(TARGET)],
    [SYSTEM, user("I am Anna."), speaker(REF, trained=False), user("Say this: now."), speaker(LONG)],
    [SYSTEM, user("One."), speaker(ONE_FRAME), user("Two."), speaker(TARGET), user("Three."), speaker(REF)],
    [SYSTEM, user("Only words?"), speaker("Yes, only words.")],
    [Turn("system", ["Speak.\n", REF, "\nEnd."], None), user("Go."), speaker("Well: ", TARGET, " so.")],
    [SYSTEM, user("Two clips."), speaker(ONE_FRAME, "And then.", LONG), speaker("Once more.")],
    [SYSTEM, user("Heard, not trained."), speaker(LONG, trained=False), user("And?"), speaker("Nothing.")],
]


def table_of(conversations, tokenizer, ids, folder, codes_of=codes_of):
    """A Table of conversations whose clips have random codes, through the trainer's own writer and reader."""
    builder = TableBuilder(tokenizer, ids, folder / "table")
    samples = [Sample(f"sample {i}", turns) for i, turns in enumerate(conversations)]
    chunk = tokenise(samples, tokenizer, ids)
    assert not chunk["refused"]
    builder.append(chunk)
    folder.mkdir(exist_ok=True)
    codes = [codes_of(c) for c in builder.clips]
    frames = np.array([len(c) for c in codes], np.int64)
    save_file({"codes": np.concatenate([*codes, np.empty((0, BOOKS), np.int16)])}, folder / "codes-0.safetensors")
    where = np.stack([frames * 0, np.cumsum(frames) - frames, frames, [*map(zlib.crc32, codes)]], 1, dtype=np.int64)
    builder.write(folder, ["codes-0.safetensors"], where)
    return Table(folder / "table")
