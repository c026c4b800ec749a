"""What a recogniser hears in the clips of a data set, compared with their texts. For prepare_tts.py.

Each clip is heard once: OUTPUT_DIR/heard/ has a file for each process that listened, a line for
each clip, and a run that was stopped resumes from there. Each rank hears its share.
"""
import contextlib
import itertools
import json
import uuid
from pathlib import Path

import numpy as np

from core import dist
from core.checkpoint import write_text
from core.cli import UserError
from core.watchdog import Stopped, stop_requested
from speech import judges, text_normalization
from speech.codes import (
    SAMPLE_RATE,
    SAVED,
    Progress,
    decoded,
    file_key,
    file_keys,
    holds_codes,
    share_work,
)

BATCH = 32              # clips heard together
NO_SOUND = "{}: saved codes have no sound to hear: drop --asr_model and --asr_command"


def hear(world, clips, numbers, folder, settings, how):
    """{clip: what is heard in it} on rank 0, {} on the others; None where a clip is longer than the
    recogniser hears. Collective; clips (a sequence) and numbers (those to hear) matter on rank 0.

    settings: keywords of judges.load_judges. how: dataset.Encoding, for its processes and time
    limit. Raises UserError; Stopped when asked to stop.
    """
    # the limit changes nothing that is heard
    told = {name: value for name, value in settings.items() if name != "asr_time_limit"}
    folder, name = Path(folder), json.dumps(told, sort_keys=True)
    # one downloads for all
    dist.rank0(world, lambda: judges.load_judges(**settings) and None)
    by = judges.load_judges(**settings)

    def plan():     # before anything is heard; codes known by their bytes alone are found later
        for path in (clips[i].path for i in numbers if clips[i].path.endswith(SAVED)):
            with contextlib.suppress(ValueError):   # what cannot be read is told later, by its row
                if holds_codes(path):
                    raise UserError(NO_SOUND.format(path))
        folder.mkdir(exist_ok=True)
        known = read_heard(folder, name)
        stats, keys = file_keys(clips[i] for i in numbers)
        new = np.array([key not in known for key in hex_keys(keys)], bool)
        return share_work(clips, np.column_stack([numbers, stats])[new], world.size)

    work = dist.rank0(world, plan)
    if any(work):
        progress, problems = Progress(world, work, "hearing", how.wait_limit_s), []
        try:
            with by.on(world.device):
                mine = decoded(world, work[world.rank], how.processes)
                hear_share(mine, by, folder, name, progress)
        except UserError as error:      # told to every rank
            problems.append(str(error))
        except BaseException:
            progress.close()
            raise
        progress.finish()
        dist.raise_problems(world, problems)
        if any(dist.all_gather(world, stop_requested())):
            raise Stopped("asked to stop while clips were being heard; what is done stays in "
                          "OUTPUT_DIR/heard")
    if not world.is_main:
        return {}
    known, (_, keys) = read_heard(folder, name), file_keys(clips[i] for i in numbers)
    return {int(i): known[key] for i, key in zip(numbers, hex_keys(keys)) if key in known}


def hex_keys(keys):
    """[hex digits] of code_cache.file_keys. NumPy alone would lose the zeros at a key's end."""
    return [row.tobytes().hex() for row in keys.view(np.uint8).reshape(-1, keys.itemsize)]


def hear_share(files, by, folder, name, progress):
    """Hear the files of `decoded`, a batch at a time."""
    def waves():
        for _, stat, cuts, _, found in files:
            for clip, wave in zip(cuts.values(), found):
                # what cannot be decoded is told where it is encoded
                if not isinstance(wave, str):
                    if wave[0].ndim == 2:
                        raise UserError(NO_SOUND.format(clip.path))
                    yield file_key(clip, *stat).hex(), wave[0]
                progress.add(1, 0 if isinstance(wave, str) else len(wave[0]) / SAMPLE_RATE)

    with open(folder / f"{uuid.uuid4().hex}.jsonl", "w") as file:
        file.write(json.dumps({"by": name}) + "\n")
        clips = waves()
        while (batch := list(itertools.islice(clips, BATCH))) and not progress.stopping():
            notes = []      # of clips that were heard in part
            names = list(map(str, range(len(batch))))
            heard = by.hear([wave for _, wave in batch], SAMPLE_RATE, names, notes)
            part = {note.split(":")[0] for note in notes}
            for i, (key, _), text in zip(names, batch, heard, strict=True):
                row = {"key": key, "heard": None if i in part else text}
                file.write(json.dumps(row) + "\n")
            file.flush()


def read_heard(folder, name):
    """{file key, hex digits: text} of what this recogniser, by its settings, has heard."""
    known = {}
    for path in sorted(Path(folder).glob("*.jsonl")):
        mine = False
        for line in path.read_text().splitlines():
            try:
                row = json.loads(line)
            except ValueError:      # a last line may be cut off
                continue
            mine = row["by"] == name if "by" in row else mine
            if mine and "key" in row:
                known[row["key"]] = row["heard"]
    return known


def compare(said, heard, targets, language):
    """(n,) character errors per character of samples; NaN where nothing was heard or is to be said.

    said: texts of the samples. heard: of hear. targets: the clips that the samples speak, in order.
    """
    found = np.full(len(targets), np.nan)
    for i, clip in enumerate(targets.tolist()):
        if heard.get(clip) is not None:
            text = text_normalization.heard(said[i])
            errors, length = judges.character_errors([text], [heard[clip]], language)
            found[i] = errors / length if length else np.nan
    return found


def write_list(path, names, said, heard, targets, cer):
    """A line of JSON for each sample that was heard: its place, text, what is heard, errors."""
    rows = [{"entry": names[i], "text": said[i], "heard": heard[int(targets[i])],
             "cer": round(cer[i], 4)} for i in np.flatnonzero(~np.isnan(cer)).tolist()]
    write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
