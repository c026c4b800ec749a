"""Which lines a student may be judged by: those that its training did not see, and the proof of it.

The held-out lines come from the run's own flags, kept in its checkpoint, and the functions that train_sft.py splits
with. The hashes of both parts must equal those in the checkpoint, so another file or another split is refused. No text
to be judged may stand among the trained ones.
"""
import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from common import checkpoint, json_files
from common.distributed import UserError
from common.json_files import read_text
from distill import chat, weights
from distill.choices import GROUP, LINES, THINKING
from distill.dataset import ChatTable, build_table, group_numbers, key_groups, split_groups, split_samples
from distill.journal import rejected_path
from distill.teacher import read_prompt

HOLD_OUT = "--validation_split 0.1 --group_size 15"
RUN_FLAGS = ("train_data_file", "eval_data_file", "too_long", "enable_thinking", "train_turns", "max_length",
             "max_tokens_per_batch", "group_size", "validation_split", "seed", "model_path")


@dataclass
class Lines:
    """What is to be judged, in the order of the file. ids: the records' "id", or line numbers from 0."""
    ids: list
    chats: list                     # messages each, without the answer
    labels: list                    # the teacher's
    all_labels: list                # that occur in the files, those of trained lines as well
    about: dict                     # JSON-able: how many there are, where from, how they are proven
    ends: list                      # ids that answers end with
    thinking: dict                  # what the chat template gets beside the messages
    rejected: list                  # ids of lines in held-out groups that have no teacher label
    notes: list


# ---------------------------------------------------------------------------------------------------------------------
# Checkpoints


def open_checkpoint(name):
    """(folder, is it an adapter, its trainer's state or None). Raises UserError for what is no checkpoint of ours."""
    folder = Path(name)
    if not folder.is_dir():
        others = [path.name for _, path in checkpoint.checkpoints(folder.parent)]
        raise UserError(f"--checkpoint {name}: no such folder" + (f"; there are {', '.join(others)}" if others else ""))
    adapter = (folder / "adapter_config.json").is_file()
    if not adapter and not (folder / "config.json").is_file():
        inside = [path for _, path in checkpoint.checkpoints(folder)]
        raise UserError(f"--checkpoint {name}: holds neither a model nor an adapter"
                        + (f"; give one of those in it, such as {inside[-1]}" if inside else ""))
    if not (folder / checkpoint.STATE_DIR / "state.json").is_file():
        return folder, adapter, None
    try:
        meta = checkpoint.load_meta(folder)
        if missing := [flag for flag in RUN_FLAGS if flag not in meta["args"]]:
            raise KeyError(missing[0])
        meta["identity"]["training data"], meta["identity"]["base model"], meta["validation"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"--checkpoint {name}: its {checkpoint.STATE_DIR}/state.json is not what train_sft.py writes "
                        f"({type(error).__name__}: {error})")
    return folder, adapter, meta


def check_base(name, base, meta):
    """Raise UserError when a run started from another model than the folder `base`."""
    if meta and weights.fingerprint_weights(base) != meta["identity"]["base model"]:
        raise UserError(f"--checkpoint {name}: was not trained from {base} but from other weights "
                        f"({meta['args']['model_path']} then); give that model with --model_path")


def check_same_split(names, metas):
    """Raise UserError unless all checkpoints trained on, and held out, the same lines: else no table would be fair."""
    def split(meta):
        return meta and (meta["validation"], meta["identity"]["training data"], meta["args"]["enable_thinking"])
    for name, meta in zip(names, metas):
        if split(meta) != split(metas[0]):
            raise UserError(f"--checkpoint {name}: was not trained and held out on the same lines as {names[0]}; "
                            "evaluate it by itself")


# ---------------------------------------------------------------------------------------------------------------------
# Lines


def run_flags(name, meta, data_file=None, eval_data_file=None, enable_thinking=None):
    """The flags RUN_FLAGS with which a checkpoint's run read its data; data_file replaces its train_data_file.

    name: the checkpoint. meta: its state; without one both files must be given, and the other flags are assumed.
    """
    if meta:
        newer = {"drop_bad": (), "prompt_file": None, "prompt_role": "user"}     # than some checkpoints
        flags = {flag: meta["args"][flag] for flag in RUN_FLAGS} | {
            flag: meta["args"].get(flag, value) for flag, value in newer.items()}
        if enable_thinking:
            raise UserError("--enable_thinking: the checkpoint says how it was trained; drop the flag")
    else:
        if not (data_file and eval_data_file):
            raise UserError(f"--checkpoint {name}: has no {checkpoint.STATE_DIR}/state.json that tells "
                            "what it was trained on; give --eval_data_file, and --data_file with all that it has seen")
        flags = {"train_data_file": "", "eval_data_file": None, "too_long": "stop", "train_turns": "last",
                 "enable_thinking": enable_thinking or "template", "max_length": 0, "max_tokens_per_batch": 0,
                 "group_size": GROUP, "validation_split": 0.0, "seed": 0, "model_path": None,
                 "drop_bad": (), "prompt_file": None, "prompt_role": "user"}
    flags["train_data_file"] = data_file or flags["train_data_file"]
    return argparse.Namespace(**flags)


def read_lines(name, run, meta, folder, tokenizer, eval_data_file=None, group_size=None, drop_leaked=False):
    """Lines that a run held out, or those of eval_data_file. Raises UserError.

    name: the checkpoint. run: of run_flags. meta: its state, None where it has none. folder: has the config.json.
    group_size: with eval_data_file, ids of a group that must not be in both files; 0: not compared; None: the run's.
    """
    other = eval_data_file is not None          # lines of which the run's state says nothing
    if not other and not meta["validation"]:
        raise UserError(f"--checkpoint {name}: its run held nothing out, so there is nothing to judge it "
                        f"by; train with {HOLD_OUT}, or give --eval_data_file with lines it has not seen")
    if not other and group_size not in (None, run.group_size):
        raise UserError(f"--group_size {group_size}: the run held out groups of {run.group_size}")
    with tempfile.TemporaryDirectory() as scratch:
        table, train, held_out, found, ends, options = read_table(scratch, name, run, meta, folder, tokenizer,
                                                                  eval_data_file)
        keys, lines = np.array(table.keys), np.array(table.lines)
        chats, names = read_files(table), [table.name(i) for i in range(len(table))]
    notes = [found]
    if other:
        size = run.group_size if group_size is None else group_size
        notes += check_groups(eval_data_file, size, keys[train], keys[held_out])
    kept = without_leaks(chats, names, train, held_out, drop_leaked)
    about = {"training_lines": len(train), "held_out_lines": len(held_out),
             "leaked_lines_left_out": len(held_out) - len(kept), "files": table.paths,
             "group_size": None if other else run.group_size,
             "split": "--eval_data_file" if other else "held out by the run",
             "proven_by_fingerprint": "nothing" if not meta else "training lines" if other else
             "training and held-out lines", "enable_thinking": run.enable_thinking}
    ids = keys if (keys[held_out] >= 0).all() else lines - 1
    groups = None if other or run.eval_data_file else \
        set(group_numbers(keys, lines, run.group_size)[held_out].tolist())
    rejected = rejected_ids(table.paths[-1], groups, run.group_size) if (keys >= 0).all() else []
    return Lines(ids[kept].tolist(), [chats[i][:-1] for i in kept], [label_of(chats[i]) for i in kept],
                 sorted(set(map(label_of, chats))), about, ends, options, rejected, notes)


def read_table(scratch, name, run, meta, folder, tokenizer, eval_data_file=None):
    """(ChatTable in the folder `scratch`, numbers trained, numbers held out, summary, ids that answers end with, what
    the chat template gets), proven to be the run's. The other arguments: of read_lines.
    """
    other = eval_data_file is not None
    paths = [path for path in (run.train_data_file, eval_data_file or run.eval_data_file) if path]
    encoder = chat.Encoder(tokenizer, run.train_turns, THINKING[run.enable_thinking])
    limit = weights.length_limit(weights.load_config(folder), run.max_length, run.max_tokens_per_batch)
    prompt = read_prompt(run.prompt_file, run.prompt_role) if run.prompt_file else None
    n_train, found, ends = build_table(scratch, paths, encoder, limit, run.too_long, drop=run.drop_bad, prompt=prompt)
    table = ChatTable(scratch)
    train, held_out = split(run, table, n_train, other)
    check_fingerprints(name, run.train_data_file, meta, table, train, None if other else held_out)
    return table, train, held_out, found, ends, encoder.options


def split(run, table, n_train, other):
    """(train, to judge) sample numbers; other: what is to be judged is no part of what the run split."""
    if not other:
        return split_samples(table, n_train, run.group_size, run.validation_split, run.seed)
    groups = group_numbers(table.keys[:n_train], table.lines[:n_train], run.group_size)
    return split_groups(groups, run.validation_split, run.seed)[0], np.arange(n_train, len(table))


def check_fingerprints(name, data_file, meta, table, train, held_out):
    """Raise UserError unless the hashes of the lines are those in the state of the checkpoint `name`.

    train, held_out: sample numbers of the table; held_out None: only those that trained are compared.
    """
    if not meta:
        return
    if table.fingerprint(train) != meta["identity"]["training data"]:
        raise UserError(f"--data_file {data_file}: is not what {name} was trained on, or has "
                        f"changed since (the run read {meta['args']['train_data_file']}); give that file")
    if held_out is not None and table.fingerprint(held_out) != meta["validation"]:
        raise UserError(f"{table.paths[-1]}: its held-out lines are not those of the run of {name}: the "
                        "file has changed; give the one of then")


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


def read_files(table):
    """[messages] of the table's samples. UserError for tools."""
    found = {}
    for source, path in enumerate(table.paths):
        for line, record in chat.read_records(path, []):
            if record.get("tools"):
                raise UserError(f"{path}:{line}: has tools, which no evaluation here gives to the model; give a "
                                "--data_file without")
            found[source, line] = record["messages"]
    return [found[place] for place in zip(table.sources.tolist(), table.lines.tolist())]


def without_leaks(chats, names, train, held_out, drop):
    """held_out without the samples whose text was trained as well; UserError when there are some and drop is False."""
    seen = {squeeze(message["content"]): names[i] for i in train for message in chats[i] if message["role"] == "user"}
    twins = {i: seen[text] for i in held_out.tolist() if (text := squeeze(question(chats[i]))) in seen}
    if twins and not drop:
        first = min(twins)
        raise UserError(f"{names[first]}: its text was trained, as {twins[first]} ({len(twins)} such lines of "
                        f"{len(held_out)}); --drop_leaked leaves them out")
    if len(twins) == len(held_out):
        raise UserError(f"the texts of all {len(held_out)} lines to judge were trained: none is left")
    return np.array([i for i in held_out.tolist() if i not in twins])


def question(messages):
    """The text of the last user message, "" without one."""
    return next((m["content"] for m in reversed(messages) if m["role"] == "user"), "")


def label_of(messages):
    """The last answer, without thoughts."""
    return messages[-1]["content"].split("</think>")[-1].strip()


def squeeze(text):
    """Text whose white space does not tell it from another."""
    return " ".join(text.split())


def rejected_ids(path, groups, group_size):
    """Ids in create_data.py's file of rejected lines beside `path`; groups: only of these, None for all."""
    path = rejected_path(path)
    if not path.is_file():
        return []
    ids = [row["id"] for _, row in json_lines(path, "id")]
    return sorted(i for i in ids if groups is None or int(key_groups(i, group_size)) in groups)


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
            raise UserError(f"{path}:{number}: is no JSON object with {', '.join(dict.fromkeys(('id', *keys)))}, the "
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
