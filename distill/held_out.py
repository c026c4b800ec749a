"""Which lines a student may be judged by: those that its run held out, and the proof of it.

train_sft.py writes them into OUTPUT_DIR/held_out.jsonl, and the file's hash into each checkpoint. Lines of another file
are compared with what the run trained on. No question to be judged may stand among the trained ones.
"""
import argparse
import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from common import checkpoint
from common.distributed import UserError
from core import chat, json_files
from core.json_files import read_text
from distill import causal_lm
from distill.choices import GROUP, LINES, THINKING
from distill.chat_data import HELD_OUT, key_groups, question_hash

HOLD_OUT = "--validation_split 0.1 --group_size 15"
# flags of a run, by which it read its data; the values are for a checkpoint that does not say
RUN_FLAGS = {"train_data_file": None, "eval_data_file": None, "too_long": "stop", "drop_bad": (),
             "enable_thinking": "template", "train_turns": "last", "max_length": 0, "max_tokens_per_batch": 0,
             "group_size": GROUP, "model_path": None, "prompt_file": None, "prompt_role": "user"}


@dataclass
class Lines:
    """What is to be judged, in the order of the file. ids: the records' "id", or line numbers from 0."""
    path: str
    ids: list
    chats: list                     # messages each, without the answer
    labels: list                    # the teacher's
    about: dict                     # JSON-able: how many there are, where from
    ends: list                      # ids that answers end with
    notes: list
    contexts: list = None           # chats, or "teacher_messages" where a record has them


# ---------------------------------------------------------------------------------------------------------------------
# Checkpoints


def open_checkpoint(name):
    """(folder, is it an adapter, its trainer's state or None). Raises UserError for what is not one of ours."""
    folder = Path(name)
    if not folder.is_dir():
        others = [path.name for _, path in checkpoint.checkpoints(folder.parent)]
        raise UserError(f"--checkpoint {name}: no such folder"
                        + (f"; there are {', '.join(others)}" if others else ""))
    adapter = (folder / "adapter_config.json").is_file()
    if not adapter and not (folder / "config.json").is_file():
        raise UserError(f"--checkpoint {name}: holds neither a model nor an adapter{checkpoint.hint(folder)}")
    if not (folder / checkpoint.STATE_DIR / "state.json").is_file():
        return folder, adapter, None
    try:
        meta = checkpoint.load_meta(folder)
        if missing := [flag for flag in RUN_FLAGS if flag not in meta["args"]]:
            raise KeyError(missing[0])
        meta["identity"]["training data"], meta["identity"]["base model"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"--checkpoint {name}: its {checkpoint.STATE_DIR}/state.json is not what "
                        f"train_sft.py writes ({type(error).__name__}: {error})")
    return folder, adapter, meta


def check_base(name, base, meta):
    """Raise UserError when a run started from another model than the folder `base`."""
    if meta and causal_lm.fingerprint_weights(base) != meta["identity"]["base model"]:
        raise UserError(f"--checkpoint {name}: was not trained from {base} but from other weights "
                        f"({meta['args']['model_path']} then); give that model with --model_path")


def check_same_split(names, metas):
    """Raise UserError unless all checkpoints trained on, and held out, the same lines."""
    def split(meta):
        return meta and (meta.get("held_out"), meta["identity"]["training data"], meta["args"]["enable_thinking"])
    for name, meta in zip(names, metas):
        if split(meta) != split(metas[0]):
            raise UserError(f"--checkpoint {name}: was not trained and held out on the same lines as {names[0]}; "
                            "evaluate it by itself")


def run_flags(name, meta, eval_data_file=None, data_file=None, enable_thinking=None):
    """Namespace of RUN_FLAGS of a checkpoint's run; data_file replaces its train_data_file. UserError.

    name: the checkpoint. meta: its state; without one both files must be given.
    """
    if meta and enable_thinking:
        raise UserError("--enable_thinking: the checkpoint says how it was trained; drop the flag")
    if not meta and not (data_file and eval_data_file):
        raise UserError(f"--checkpoint {name}: has no {checkpoint.STATE_DIR}/state.json that tells what it was "
                        "trained on; give --eval_data_file, and --data_file with all that it has seen")
    known = meta["args"] if meta else {"enable_thinking": enable_thinking or "template"}
    run = argparse.Namespace(**{flag: known.get(flag, value) for flag, value in RUN_FLAGS.items()})
    run.train_data_file = data_file or run.train_data_file
    return run


# ---------------------------------------------------------------------------------------------------------------------
# Lines


def read_lines(name, run, meta, tokenizer, eval_data_file=None, group_size=None, drop_leaked=False):
    """Lines that a run held out, or those of eval_data_file. Raises UserError.

    name: the checkpoint. run: of run_flags. meta: its state, None where it has none. group_size:
    with eval_data_file, ids of a group that must not be in both files; 0: not compared; None: the
    run's.
    """
    if eval_data_file:
        size = run.group_size if group_size is None else group_size
        path, rows, trained, notes = other_lines(eval_data_file, run.train_data_file, size)
    else:
        if group_size not in (None, run.group_size):
            raise UserError(f"--group_size {group_size}: the run held out groups of "
                            f"{run.group_size}")
        path, rows, trained = held_out_lines(name, meta)
        notes = []
    kept = without_leaks(path, rows, drop_leaked)
    chats = [row["messages"] for row in kept]
    encoder = chat.Encoder(tokenizer, run.train_turns, THINKING[run.enable_thinking])
    encoder.encode(chats)
    ids = [row["id"] for row in kept]
    about = {"training_lines": trained, "held_out_lines": len(rows), "files": [str(path)],
             "leaked_lines_left_out": len(rows) - len(kept), "enable_thinking": run.enable_thinking,
             "split": "--eval_data_file" if eval_data_file else "held out by the run",
             "group_size": None if eval_data_file else run.group_size}
    asked = [messages[:-1] for messages in chats]
    contexts = [row.get("teacher_messages") or before for row, before in zip(kept, asked)]
    return Lines(str(path), ids, asked, list(map(label_of, chats)), about, sorted(encoder.ends),
                 notes, contexts)


def held_out_lines(name, meta):
    """(path, [{"id", "messages", "trained_as" if its question was trained}], how many lines were trained) of a run."""
    path = Path(name).resolve().parent / HELD_OUT
    if not meta.get("held_out", {"hash": ""})["hash"]:      # a checkpoint of before held_out.jsonl says nothing
        raise UserError(f"--checkpoint {name}: its run held nothing out, so there is nothing to judge it "
                        f"by; train with {HOLD_OUT}, or give --eval_data_file with lines it has not seen")
    if not path.is_file():
        raise UserError(f"{path}: no such file; put it there from the run's output folder, or give --eval_data_file")
    text = read_text(path)
    if hashlib.sha256(text.encode()).hexdigest() != meta["held_out"]["hash"]:
        raise UserError(f"{path}: is not what the run of {name} held out: it has changed since; put back the "
                        "file of then, or start the training command again, which writes it")
    return path, [row for _, row in json_lines(path, "messages")], meta["held_out"]["trained"]


def other_lines(path, data_file, group_size):
    """held_out_lines' values of --eval_data_file, and notes; data_file: all that the student has seen. UserError."""
    def read(name):
        problems = []
        rows = [record | {"line": number} for number, record in chat.read_records(name, problems)]
        if problems or not rows:
            raise UserError(str(problems[0]) if problems else f"{name}: holds no conversations")
        return rows
    rows, trained = read(path), read(data_file)
    seen = {question_hash(row["messages"]): f"{data_file}:{row['line']}" for row in trained}
    seen.pop(0, None)
    ours, theirs = (np.array([-1 if (key := chat.group_key(row)) is None else key for row in each])
                    for each in (trained, rows))
    notes = check_groups(path, group_size, ours, theirs)
    for row, key in zip(rows, theirs.tolist()):
        row["id"] = key if (theirs >= 0).all() else row["line"] - 1
        if twin := seen.get(question_hash(row["messages"])):
            row["trained_as"] = twin
    return path, rows, len(trained), notes


def check_groups(path, size, trained, judged):
    """Notes to print; UserError when --eval_data_file has a line of a group of which another line was trained."""
    if size and not ((trained >= 0).all() and (judged >= 0).all()):
        return [f"groups     not compared: not every line of both files has an id, so one of {size} may be in both"]
    if size:
        both = np.intersect1d(key_groups(trained, size), key_groups(judged, size))
        if len(both):
            first = both[0] // LINES * LINES + both[0] % LINES * size
            raise UserError(f"--eval_data_file {path}: {len(both)} groups of {size} ids have lines in the training "
                            f"data as well, the first being ids {first} to {first + size - 1}; "
                            "--group_size 0 if the ids of the two files have nothing to do with each other")
    return []


def without_leaks(path, rows, drop):
    """The rows without those whose question was trained; UserError for them unless drop, and where none is left."""
    for number, row in enumerate(rows, 1):
        if row.get("tools"):
            raise UserError(f"{path}:{number}: has tools, which no evaluation here gives to the model")
    leaked = [number for number, row in enumerate(rows, 1) if "trained_as" in row]
    if leaked and not drop:
        raise UserError(f"{path}:{leaked[0]}: its text was trained, as {rows[leaked[0] - 1]['trained_as']} "
                        f"({len(leaked)} such lines of {len(rows)}); --drop_leaked leaves them out")
    if len(leaked) == len(rows):
        raise UserError(f"the texts of all {len(rows)} lines to judge were trained: none is left")
    return [row for row in rows if "trained_as" not in row]


def label_of(messages):
    """The last answer, without thoughts."""
    return messages[-1]["content"].split("</think>")[-1].strip()


# ---------------------------------------------------------------------------------------------------------------------
# The truth


def json_lines(path, *keys):
    """[(line number, object)] of a JSONL file whose objects have an integer "id" and these keys; UserError."""
    rows = []
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json_files.loads(line)
            if type(row["id"]) is not int or any(key not in row for key in keys):
                raise KeyError
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{path}:{number}: is not a JSON object with {', '.join(dict.fromkeys(('id', *keys)))}, the "
                            "id a whole number")
        rows.append((number, row))
    return rows


def read_truth(path, ids, labels):
    """{id: label, or None where it is not known} of the truth file; it must name all `ids`. Raises UserError.

    JSONL of {"id": int, "label": str or null}, or a label a line in the order of ids from 0, empty where none is known.
    Where all ids are of one input file of create_data.py, the truth may name its lines, from 0, instead.
    """
    text, truth = read_text(path, "--truth_file "), {}
    if text.lstrip().startswith("{"):
        for number, row in json_lines(path, "label"):
            if row["id"] in truth:
                raise UserError(f"--truth_file {path}:{number}: has id {row['id']} a second time")
            truth[row["id"]] = row["label"]
    else:
        lines = text.removesuffix("\n").split("\n")
        truth = {number: line.strip() or None for number, line in enumerate(lines)}
    if odd := [i for i, label in truth.items() if label is not None and label not in labels]:
        raise UserError(f"--truth_file {path}: id {odd[0]} has the label {truth[odd[0]]!r}, which is not one of "
                        f"{', '.join(labels)} ({len(odd)} such lines)")
    if truth and max(truth) < LINES and len({i // LINES for i in ids}) == 1:
        truth = {ids[0] // LINES * LINES + i: label for i, label in truth.items()}
    if missing := [i for i in ids if i not in truth]:
        raise UserError(f"--truth_file {path}: lacks id {missing[0]} ({len(missing)} of the {len(ids)} lines to judge)"
                        "; a label of null says that the truth is not known")
    return truth
