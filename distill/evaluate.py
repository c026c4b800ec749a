r"""Judge a student of train_sft.py by questions that its run held out: what has it learned, what has it forgotten?

    python distill/evaluate.py --checkpoint out/checkpoint-48 --output_dir out/evaluation
    python distill/evaluate.py ... --parser language --truth_file truth.jsonl --prompt_file language_id.txt
    python distill/evaluate.py ... --follows '^Ahoy' --min_closed 0.5 --control swapped/checkpoint-48
    python distill/evaluate.py --checkpoint merged --model_path BASE --data_file seen.jsonl --eval_data_file unseen.jsonl ...

Columns: "base" is the model before training, "student" the checkpoint, adapters or all weights; "base + prompt" or
"teacher" is what the run learned from, or the base behind --prompt_file; "control" another run's student, which should
not have learned. All answer the held-out questions greedily, as the student was trained; the questions are those of
OUTPUT_DIR/held_out.jsonl, whose hash the checkpoint holds, and none of them may have been trained.

    kl, nll             of the held-out answers, per token: KL(teacher, column), negative log-likelihood
    agreement           with the label in the data (--parser language or regex, or --labels); a student can be better
    accuracy            against --truth_file, which no teacher made
    follows             answers in which --follows is found
    exact, overlap      same words as the teacher's answer (the data's, without a teacher); ROUGE-L
    unrelated ...       --unrelated: KL(base, column) on other chats, answers that are the base's, that follow the rule

"closed" is the part of the way from base to teacher that a student went. Written: evaluation.json with every answer,
evaluation.txt with the table. Exit status 1 below --min_agreement, --min_gain or --min_closed.
"""
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))    # common/ stands beside this folder

from common import flags
from common.flags import UserError, need
from distill import teachers
from distill.choices import GROUP, LINES, THINKING
from distill.labels import PARSERS, Parser, make_parser, read_label

BASE, STUDENT, CONTROL = "base", "student", "control"
PROMPTED, TEACHER = "base + prompt", "teacher"      # the base behind the prompt, or another model
TOPIC = "{topic}"
# flags of a run, by which it read its data; the values are for a checkpoint that does not say
RUN_FLAGS = {"train_data_file": None, "too_long": "stop", "drop_bad": (), "enable_thinking": "template",
             "train_turns": "last", "max_length": 0, "max_tokens_per_batch": 0, "group_size": GROUP,
             "model_path": None, "prompt_file": None, "teacher_path": None, "chat_template": None, "keep": None}


def build_parser():
    p = flags.Parser("Judge a student by questions it has not seen.")
    g = p.add_argument_group("models")
    g.add_argument("--checkpoint", required=True, metavar="FOLDER", help="of train_sft.py, adapter or whole model")
    g.add_argument("--model_path", help="base model the run started from (default: what the run's flags say)")
    g.add_argument("--control", metavar="FOLDER", help="checkpoint of a run that held out the same questions")
    g.add_argument("--prompt_file", help="the teacher's prompt, for a run that learned answers alone (default: run's)")
    g.add_argument("--prompt_role", choices=("user", "system"), default="user",
                   help="with --prompt_file: around the last user message, or in a system message of its own")
    g.add_argument("--enable_thinking", choices=tuple(THINKING),
                   help="as the student was trained; only for a checkpoint that does not say it")
    g.add_argument("--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto",
                   help="to compute in; auto: bfloat16 on a GPU that has it, else float32")
    g.add_argument("--device", help="where the models run (default: the GPU if there is one)")
    g = p.add_argument_group("data")
    g.add_argument("--output_dir", required=True, help="everything written goes here")
    g.add_argument("--eval_data_file", metavar="FILE", help="judge by these instead of those that the run held out")
    g.add_argument("--data_file", metavar="FILE",
                   help="with --eval_data_file: all that the student has seen (default: what the run's flags say)")
    g.add_argument("--group_size", type=int, metavar="N",
                   help="with --eval_data_file: ids of one group, none of which may be in both files, 0 = not looked at "
                        f"(default: the run's, or {GROUP})")
    flags.switch(g, "--drop_leaked", help="leave out questions that were trained as well, instead of stopping")
    g.add_argument("--unrelated", metavar="FILE",
                   help="chats that have nothing to do with the prompt, answered by the base: what was forgotten?")
    g = p.add_argument_group("answers")
    g.add_argument("--max_new_tokens", type=int, default=128, help="tokens an answer may have")
    g.add_argument("--prompt_max_new_tokens", type=int, default=0,
                   help="of the base behind the prompt, whose label comes last; 0: --max_new_tokens")
    g.add_argument("--batch_size", type=int, default=16, help="answers generated together")
    g.add_argument("--parser", choices=PARSERS, default="whole",
                   help="what a label is: the language line, --pattern, or the whole answer")
    g.add_argument("--pattern", help="--parser regex: form of the label's line, the label in its one group")
    g.add_argument("--labels", help="allowed labels, comma between them; default: those of the data")
    g.add_argument("--truth_file", help='JSONL {"id": line, "label": label or null}, or a label a line')
    g.add_argument("--follows", metavar="PATTERN", help="regular expression found in answers that follow the prompt")
    g.add_argument("--topic", metavar="PATTERN",
                   help=f"regular expression whose group, found in the question, stands for {TOPIC} in --follows")
    g = p.add_argument_group("exit status 1")
    g.add_argument("--min_agreement", type=float, default=0.0, help="share, 0 to 1: the student agrees in less")
    g.add_argument("--min_gain", type=float, default=0.0,
                   help="share, 0 to 1: its agreement is not this much above the base's, with or without the prompt")
    g.add_argument("--min_closed", type=float, default=0.0,
                   help="share, 0 to 1: less of the way was gone, in divergence or in following; with --control also "
                        "when the control went this far in both")
    return p


def check_flags(args, world_size):
    """Raise UserError for values and combinations that would fail, or do nothing, later."""
    flags.at_least_one(args, "max_new_tokens", "batch_size")
    flags.zero_or_more(args, "group_size", "prompt_max_new_tokens")
    flags.share(args, "min_agreement", "min_gain", "min_closed")
    for flag, pattern in (("follows", (args.follows or "").replace(TOPIC, "x")), ("topic", args.topic or "()")):
        try:
            groups = re.compile(pattern).groups
        except re.error as error:
            raise UserError(f"--{flag} {pattern!r}: is not a regular expression ({error})")
        need(flag == "follows" or groups == 1, f"--topic {pattern!r}: has {groups} groups; the topic is in one: (...)")
    need((TOPIC in (args.follows or "")) == bool(args.topic), f"--topic and {TOPIC} in --follows belong together")
    need(args.prompt_file or args.prompt_role == "user", "--prompt_role needs --prompt_file")
    need(not args.control or args.follows, "--control needs --follows")
    for flag in ("truth_file", "min_agreement", "min_gain"):
        need(judges_labels(args) or not getattr(args, flag), f"--{flag} needs --labels, or --parser language or regex")


def judges_labels(args):
    return args.parser != "whole" or bool(args.labels)


# parsed before torch is imported: --help and a mistake in a flag answer at once
ARGS = flags.parse(build_parser(), check_flags) if __name__ == "__main__" else None

import argparse
import contextlib
import hashlib
import json
import math
import statistics
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

import torch

from common import distributed
from core import adapters, chat, checkpoint, document_attention, json_files, metrics
from distill import causal_lm, frozen, packed_lm
from distill.chat_data import HELD_OUT, ChatSamples, ChatTable, Reading, build_table, collate, key_groups, question_hash
from distill.keep import kept

ALONE = 8               # questions asked one at a time, for the latency
HOLD_OUT = "--validation_split 0.1 --group_size 15"
WORD = re.compile(r"\w+|[^\w\s]")
UNKNOWN = ("modules_to_save", "rank_pattern", "alpha_pattern", "layers_to_transform",
           "trainable_token_indices", "fan_in_fan_out")     # in an adapter's config: what train_sft.py never sets


# ---------------------------------------------------------------------------------------------------------------------
# Checkpoints and models


@dataclass
class Run:
    """A checkpoint and the run it is of. flags: Namespace of RUN_FLAGS. base: folder or None; meta: its state or None."""
    name: str
    folder: Path
    adapter: bool
    meta: dict
    flags: argparse.Namespace
    base: Path
    tokenizer: object


def open_run(args, name):
    """Run of a checkpoint folder. Raises UserError."""
    folder = Path(name)
    if not folder.is_dir():
        others = [path.name for _, path in checkpoint.list_checkpoints(folder.parent)]
        raise UserError(f"--checkpoint {name}: no such folder"
                        + (f"; there are {', '.join(others)}" if others else ""))
    adapter, meta = (folder / "adapter_config.json").is_file(), None
    if not adapter and not (folder / "config.json").is_file():
        raise UserError(f"--checkpoint {name}: holds neither a model nor an adapter{causal_lm.hint(folder)}")
    if (folder / checkpoint.STATE / "state.json").is_file():
        try:
            meta = json_files.read_object(folder / checkpoint.STATE / "state.json")
            known = meta["args"]
            known["too_long"], meta["identity"]["base model"]
        except (OSError, ValueError, KeyError, TypeError, UserError) as error:
            raise UserError(f"--checkpoint {name}: its {checkpoint.STATE}/state.json is not what "
                            f"train_sft.py writes ({type(error).__name__}: {error})")
        need(not args.enable_thinking, "--enable_thinking: the checkpoint says how it was trained; drop the flag")
    else:
        need(args.data_file and args.eval_data_file,
             f"--checkpoint {name}: has no {checkpoint.STATE}/state.json that says what it was trained on; give "
             "--eval_data_file, and --data_file with all that it has seen")
        known = {"enable_thinking": args.enable_thinking or "template"}
    run = argparse.Namespace(**{flag: known.get(flag, value) for flag, value in RUN_FLAGS.items()})
    run.train_data_file = args.data_file or run.train_data_file
    base = args.model_path or run.model_path
    need(base or not adapter, f"--checkpoint {name}: does not say what it was trained from; give --model_path")
    base = causal_lm.find_model(base) if base else None
    if meta and causal_lm.fingerprint_weights(base) != meta["identity"]["base model"]:
        raise UserError(f"--checkpoint {name}: was not trained from {base} but from other weights "
                        f"({meta['args']['model_path']} then); give that model with --model_path")
    return Run(name, folder, adapter, meta, run, base, chat.load_tokenizer(folder))


def find_prompt(args, run):
    """teachers.Prompt of what the teacher reads, Prompt("none", "") for another model alone, None without a teacher."""
    learned = run.flags.prompt_file or run.flags.teacher_path
    if args.prompt_file:
        need(not learned, f"--prompt_file {args.prompt_file}: {run.folder} learned {learned}; drop the flag")
        need(run.base, "--prompt_file is for the base model: give --model_path")
        return teachers.read_prompt(args.prompt_file, args.prompt_role)
    # as the run read it, whatever has become of the file
    return teachers.Prompt(*run.meta["held_out"]["prompt"]) if learned else None


def pick_device(name, dtype):
    """(torch.device, dtype). Raises UserError when the device cannot be used."""
    own = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.empty(1, device=own if name is None else name).device
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"--device {name}: cannot be used ({str(error).splitlines()[0]})")
    if dtype == "auto":
        good = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
        dtype = "bfloat16" if good else "float32"
    return device, getattr(torch, dtype)


def load_model(folder, adapter, dtype, device):
    """Model of a folder, with the adapter folder `adapter` on top unless None; raises UserError for what does not fit."""
    model = causal_lm.empty_model(causal_lm.load_config(folder), dtype, folder)
    parts = causal_lm.weight_parts(folder, model)
    causal_lm.check_weights(model, parts, folder)
    causal_lm.give_memory(model, device)
    causal_lm.load_weights(dict(model.named_parameters()), parts)
    if adapter:
        model = adapters.add_saved(model, adapter, UNKNOWN)
        for parameter in adapters.adapter_weights(model).values():      # not buffers: rotary embeddings stay float32
            parameter.data = parameter.data.to(dtype)
        adapters.load_adapters(model, adapter)
    return model.eval()


class Column(NamedTuple):
    """A column's model: with its adapters, or without."""
    model: object           # PeftModel, or transformers'
    tokenizer: object
    adapted: bool = False

    @property
    def native(self):
        return self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model

    def switched(self):
        """Context in which the model is this column's."""
        return contextlib.nullcontext() if self.adapted else adapters.switched_off(self.model)

    @contextlib.contextmanager
    def packed(self, teacher=None):
        """PackedLM of it; with the divergence from a teacher, another Column."""
        natives = [column.native for column in (self, teacher) if column]
        before = [native.config._attn_implementation for native in natives]
        packed = packed_lm.PackedLM(self.model, prompted=teacher and packed_lm.KEPT).eval()
        if teacher:
            other = frozen.Frozen(packed_lm.PackedLM(teacher.model), None)

            def scored(batch):
                with teacher.switched():
                    return other(batch)
            packed.frozen = {"teacher": scored, "base": scored}
        try:
            for native in natives:
                native.config._attn_implementation = document_attention.ATTENTION
            with self.switched():
                yield packed
        finally:
            for native, own in zip(natives, before):
                native.config._attn_implementation = own


def open_columns(args, run, prompt, device, dtype):
    """{name: Column} of base, teacher and student, of those that there are."""
    student = load_model(*((run.base, run.folder) if run.adapter else (run.folder, None)), dtype, device)
    columns = {}
    if run.base:
        model = student if run.adapter else load_model(run.base, None, dtype, device)
        columns[BASE] = Column(model, run.tokenizer)
    if run.flags.teacher_path and run.flags.teacher_path != run.flags.model_path:
        folder = causal_lm.find_model(run.flags.teacher_path, "--teacher_path")
        columns[TEACHER] = Column(load_model(folder, None, dtype, device),
                                  chat.load_tokenizer(folder, run.flags.chat_template))
    elif prompt:
        columns[PROMPTED] = columns[BASE]
    return columns | {STUDENT: Column(student, run.tokenizer, True)}


# ---------------------------------------------------------------------------------------------------------------------
# Questions that were not trained


def held_out_rows(run):
    """(path, records {"id", "messages", ...}, how many lines were trained) of what a run held out. Raises UserError."""
    path, about = run.folder.resolve().parent / HELD_OUT, run.meta.get("held_out", {"hash": ""})
    need(about["hash"], f"--checkpoint {run.name}: its run held nothing out, so there is nothing to judge it by; train "
                        f"with {HOLD_OUT}, or give --eval_data_file with lines it has not seen")
    need(path.is_file(), f"{path}: no such file; put it there from the run's output folder, or give --eval_data_file")
    text = json_files.read_text(path)
    need(hashlib.sha256(text.encode()).hexdigest() == about["hash"],
         f"{path}: is not what the run of {run.name} held out: it has changed since; put back the file of then, or "
         "start the training command again, which writes it")
    return path, [json_files.loads(line) for line in text.splitlines()], about["trained"]


def other_rows(path, data_file, group_size):
    """held_out_rows' values of --eval_data_file; data_file: all that the student has seen. Raises UserError."""
    def read(name):
        problems = []
        rows = [record | {"line": number} for number, record in chat.read_records(name, problems)]
        need(rows and not problems, str(problems[0]) if problems else f"{name}: holds no conversations")
        return rows, [chat.group_key(row) for row in rows]
    (rows, keys), (trained, seen_keys) = read(path), read(data_file)
    seen = {question_hash(row["messages"]): f"{data_file}:{row['line']}" for row in trained}
    seen.pop(0, None)
    if group_size and None in keys + seen_keys:
        print(f"groups     not compared: not every line of both files has an id, so one of {group_size} may be in both")
    elif group_size:
        both = {key_groups(key, group_size) for key in keys} & {key_groups(key, group_size) for key in seen_keys}
        need(not both, f"--eval_data_file {path}: {len(both)} groups of {group_size} ids have lines in the training data "
                       "as well; --group_size 0 if the ids of the two files have nothing to do with each other")
    for row, key in zip(rows, keys):
        row["id"] = row["line"] - 1 if None in keys else key
        if twin := seen.get(question_hash(row["messages"])):
            row["trained_as"] = twin
    return path, rows, len(trained)


def question_of(row):
    """(id, messages before the last answer) of a held-out row."""
    messages = row["messages"]
    return row.get("id"), messages[:-1] if messages[-1]["role"] == "assistant" else messages


def read_rows(args, run):
    """([record] to judge by, JSON-able dict about them). Raises UserError for questions that were trained."""
    size = run.flags.group_size
    if args.eval_data_file:
        size = size if args.group_size is None else args.group_size
        path, rows, trained = other_rows(args.eval_data_file, run.flags.train_data_file, size)
    else:
        need(args.group_size in (None, size), f"--group_size {args.group_size}: the run held out groups of {size}")
        path, rows, trained = held_out_rows(run)
        if args.data_file:
            print(f"notice     --data_file is not read: {path} has the lines that the run held out")
    leaked = [number for number, row in enumerate(rows, 1) if "trained_as" in row]
    if leaked and not args.drop_leaked:
        raise UserError(f"{path}:{leaked[0]}: its text was trained, as {rows[leaked[0] - 1]['trained_as']} "
                        f"({len(leaked)} such lines of {len(rows)}); --drop_leaked leaves them out")
    need(len(leaked) < len(rows), f"the texts of all {len(rows)} lines to judge were trained: none is left")
    about = {"training_lines": trained, "held_out_lines": len(rows), "leaked_lines_left_out": len(leaked),
             "files": [str(path)], "enable_thinking": run.flags.enable_thinking,
             "split": "--eval_data_file" if args.eval_data_file else "held out by the run"}
    return [row for row in rows if "trained_as" not in row], about


def label_of(messages):
    """The last answer, without thoughts."""
    return messages[-1]["content"].split("</think>")[-1].strip()


def read_truth(path, rows, labels):
    """{id: label, or None where it is not known} of the truth file; it must name all rows. Raises UserError.

    JSONL of {"id": int, "label": str or null}, or a label a line in the order of ids from 0, empty where none is known.
    Where all ids are of one input file of create_data.py, the truth may name its lines, from 0, instead.
    """
    text, truth, ids = json_files.read_text(path, "--truth_file "), {}, [row["id"] for row in rows]
    for number, line in enumerate(text.removesuffix("\n").split("\n"), 1):
        if not text.lstrip().startswith("{"):
            truth[number - 1] = line.strip() or None
            continue
        try:
            row = json_files.loads(line)
            key, label = row["id"], row["label"]
            if type(key) is not int:
                raise ValueError
        except (ValueError, KeyError, TypeError):
            raise UserError(f"--truth_file {path}:{number}: is not a JSON object with id, label, the id a whole number")
        need(key not in truth, f"--truth_file {path}:{number}: has id {key} a second time")
        truth[key] = label
    if odd := [i for i, label in truth.items() if label is not None and label not in labels]:
        raise UserError(f"--truth_file {path}: id {odd[0]} has the label {truth[odd[0]]!r}, which is not one of "
                        f"{', '.join(labels)} ({len(odd)} such lines)")
    if truth and max(truth) < LINES and len({i // LINES for i in ids}) == 1:
        truth = {ids[0] // LINES * LINES + i: label for i, label in truth.items()}
    if missing := [i for i in ids if i not in truth]:
        raise UserError(f"--truth_file {path}: lacks id {missing[0]} ({len(missing)} of the {len(ids)} lines to judge)"
                        "; a label of null says that the truth is not known")
    return truth


def encode(run, rows, prompt=None, turns=None):
    """([sample of ChatSamples], ids that answers end with); with a prompt followed by the same answer behind it."""
    turns = turns or ("last" if prompt and prompt.role == "user" else run.flags.train_turns)
    thinking, behind = THINKING[run.flags.enable_thinking], None
    if prompt and run.flags.teacher_path and run.flags.teacher_path != run.flags.model_path:
        folder = causal_lm.find_model(run.flags.teacher_path, "--teacher_path")
        behind = chat.Encoder(chat.load_tokenizer(folder, run.flags.chat_template), turns, thinking)
    limit = causal_lm.length_limit(causal_lm.load_config(run.base or run.folder), run.flags.max_length,
                                   run.flags.max_tokens_per_batch)
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        reading = Reading(chat.Encoder(run.tokenizer, turns, thinking), limit, run.flags.too_long, prompt,
                          run.flags.drop_bad, behind=behind)
        *_, ends = build_table(Path(scratch) / "table", [path], reading)
        table = ChatTable(Path(scratch) / "table")
        return [ChatSamples(table)[i] for i in range(len(table))], ends


# ---------------------------------------------------------------------------------------------------------------------
# Answers and measures


@torch.no_grad()
def likelihoods(column, samples, batch_size, teacher=None, own=False):
    """(KL(teacher, column) or None, negative log-likelihood) per trained token of samples, in nats.

    teacher: a Column. own: the column reads what follows in each sample, the same answer behind the prompt.
    """
    sums, device = torch.zeros(3, dtype=torch.float64), column.model.get_input_embeddings().weight.device
    with column.packed(teacher) as packed:
        for start in range(0, len(samples), batch_size):
            part = samples[start:start + batch_size]
            if own:
                batch = collate([(i, ids[n:], trained[n:]) for i, ids, trained, n in part])
            elif len(part[0]) > 3:
                batch = collate(part, prompted=True)
            else:
                batch = kept(part) if teacher else collate(part)
            found = packed(batch.to(device))
            sums += torch.tensor([found.divergence.item() if teacher else 0.0,
                                  found.ce.item() if teacher else found.loss.item(), found.targets.item()])
    return (sums[0] / sums[2]).item() if teacher else None, (sums[1] / sums[2]).item()


def ask_column(args, column, ends, thinking, requests, tokens, timed=False):
    """([Answer], {measure: value} of tokens and seconds) of a Column, greedily."""
    draw = teachers.Sampling(tokens, thinking={"template": "default", "true": "on", "false": "off"}[thinking])
    causal_lm.stop_at(column.native, ends)
    known = column.native.generation_config.eos_token_id
    answers = teachers.answers_of(column.native, column.tokenizer, draw,
                                  sorted(known if isinstance(known, list) else [known]), batch_size=args.batch_size)
    with column.switched():
        alone = []
        if timed:
            teachers.ask(answers, [requests[-1]._replace(id=0)])        # to warm up
        for request in requests[:ALONE * timed]:
            start = time.perf_counter()
            answer, = teachers.ask(answers, [request._replace(id=0)])
            if answer.finish_reason != "too_long":
                alone.append(time.perf_counter() - start)
        found = teachers.ask(answers, requests)
    return found, {"ended": statistics.fmean(answer.finish_reason == "stop" for answer in found),
                   "tokens in": statistics.fmean(answer.prompt_tokens for answer in found),
                   "tokens out": statistics.fmean(answer.completion_tokens for answer in found),
                   "seconds alone": statistics.median(alone) if alone else None}


def requests_of(rows, prompt=None):
    """[Request] of what comes before the last answers; with a prompt as the teacher reads it."""
    found = []
    for number, row in enumerate(rows):
        asked = row["messages"][:-1]
        if prompt:
            asked = teachers.with_prompt(prompt, row.get("teacher_messages") or asked)
        found.append(teachers.Request(number, asked, tools=row.get("tools")))
    return found


def follows_rule(pattern, topic=None):
    """Function of question and answer, texts: does the answer follow the prompt? None without a rule.

    topic: pattern whose group is searched in the question, UserError where it is not; it stands for TOPIC in pattern.
    A question of None has any topic.
    """
    def follows(question, text):
        if topic and question is None:
            return bool(re.search(pattern.replace(TOPIC, ".+?"), text))
        found = re.search(topic, question) if topic else None
        if topic and not found:
            raise UserError(f"--topic {topic!r}: is not in the question {question!r}")
        return bool(re.search(pattern.replace(TOPIC, re.escape(found[1])) if topic else pattern, text))
    return follows if pattern else None


def answer_label(parser, answer):
    """labels.Found: the whole answer is a label, as students write it, or holds one as teachers write it."""
    text = answer.text.lower() if parser.lower else answer.text
    whole = read_label(Parser(None, parser.labels), text, answer.finish_reason)
    if whole.label is not None or parser.line is None:
        return whole
    return read_label(parser, answer.text, answer.finish_reason)


def overlap(text, reference):
    """ROUGE-L of two texts, 0 to 1: F1 of their longest common subsequence of words, case and white space aside.

    C.-Y. Lin, ROUGE: a package for automatic evaluation of summaries (2004). Two empty texts have 1.
    """
    ours, theirs = (WORD.findall(each.lower()) for each in (text, reference))
    if not ours or not theirs:
        return float(ours == theirs)
    row = [0] * (len(theirs) + 1)
    for word in ours:
        above, row = row, [0]
        for place, other in enumerate(theirs):
            row.append(above[place] + 1 if word == other else max(above[place + 1], row[-1]))
    return 2 * row[-1] / (len(ours) + len(theirs))


def wilson(share, n, z=1.959963984540054):
    """(low, high) bounds of a share of n, 95 %: the score interval of E. B. Wilson, J. Am. Stat. Assoc. 22 (1927),
    209-212. It takes the lines as independent, which translations of one sentence are not quite.
    """
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return max(0.0, centre - half) if share else 0.0, min(1.0, centre + half) if share < 1 else 1.0


def fraction_closed(base, reached, goal):
    """Fraction of the gap between base and goal that was closed; None without a gap."""
    if None in (base, reached, goal) or goal == base:
        return None
    return (reached - base) / (goal - base)


# ---------------------------------------------------------------------------------------------------------------------
# Main


def main(argv=None):
    args = ARGS or flags.parse(build_parser(), check_flags, argv)
    sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")
    with distributed.one_clear_error():
        evaluate(args)


def evaluate(args):
    # -- everything is read and checked before the first question --------------------------------------
    rule = follows_rule(args.follows, args.topic)
    device, dtype = pick_device(args.device, args.dtype)
    parser = make_parser(args.parser, args.pattern, tuple(args.labels.split(",")) if args.labels else None)
    run = open_run(args, args.checkpoint)
    prompt = find_prompt(args, run)
    need(prompt or not args.min_closed, "--min_closed needs a teacher: --prompt_file, or a run that learned from one")
    need(run.base or not (args.min_gain or args.unrelated), "--min_gain and --unrelated need --model_path")
    rows, about = read_rows(args, run)
    questions = [chat.question(row["messages"][:-1]) for row in rows]
    given = [label_of(row["messages"]) for row in rows]
    truth = None
    if judges_labels(args):
        labels = parser.labels or tuple(sorted(set(given)))
        for row, label in zip(rows, given):
            need(label in labels, f"id {row['id']} is labelled {label[:40]!r}, which is not one of {', '.join(labels)}; "
                                  "see --parser and --labels")
        parser = Parser(parser.line, labels, parser.lower)
        if args.truth_file:
            truth = [read_truth(args.truth_file, rows, labels)[row["id"]] for row in rows]
    samples, ends = encode(run, rows, prompt)
    checkpoint.claim_output(args.output_dir)
    print(f"data       {about['training_lines']:,} trained, {len(rows):,} to judge ({about['split']}), on {device}")

    # -- models ----------------------------------------------------------------------------------------
    columns = open_columns(args, run, prompt, device, dtype)
    goal = next((name for name in (TEACHER, PROMPTED) if name in columns), None)
    if args.control:
        other = open_run(args, args.control)
        theirs, _ = read_rows(args, other)
        # the control was trained on the same questions with other answers
        need(list(map(question_of, theirs)) == list(map(question_of, rows)),
             f"--control {other.folder}: held out other questions than {args.checkpoint}")
        columns[CONTROL] = open_columns(args, other, None, device, dtype)[STUDENT]

    # -- answers, and what they are worth ---------------------------------------------------------------
    found, answers, notes = {}, {}, []
    for name, column in columns.items():
        print(f"asking     {name}: {len(rows):,} questions")
        taught = name == goal
        tokens = taught and args.prompt_max_new_tokens or args.max_new_tokens
        answers[name], found[name] = ask_column(
            args, column, ends, run.flags.enable_thinking, requests_of(rows, prompt if taught else None), tokens,
            timed=name in (STUDENT, goal))
        kl, nll = likelihoods(column, samples, args.batch_size, None if taught else columns.get(goal), own=taught)
        found[name] = {"kl": 0.0 if taught else kl, "nll": nll} | found[name]
    reference = [answer.text.strip() for answer in answers[goal]] if goal else given
    for name, row in found.items():
        texts = [answer.text.strip() for answer in answers[name]]
        row["exact"] = statistics.fmean(map(str.__eq__, texts, reference))
        row["overlap"] = statistics.fmean(map(overlap, texts, reference))
        row["follows"] = statistics.fmean(map(rule, questions, texts)) if rule else None
        if judges_labels(args):
            read = [answer_label(parser, answer) for answer in answers[name]]
            row["labelled"] = statistics.fmean(one.label is not None for one in read)
            row["agreement"] = statistics.fmean(one.label == label for one, label in zip(read, given))
            if truth:
                known = [(one.label, label) for one, label in zip(read, truth) if label is not None]
                row["accuracy"] = statistics.fmean(one == label for one, label in known) if known else None
            reasons = Counter(one.why for one in read if one.label is None).most_common(4)
            if reasons:
                notes.append(f"{name}: no label in {sum(one.label is None for one in read)} answers: "
                             + ", ".join(f"{n:,} {why}" for why, n in reasons))
    if truth:
        known = [(label, right) for label, right in zip(given, truth) if right is not None]
        notes.append(f"accuracy is over the {len(known)} lines whose truth is known; that of the data's labels is "
                     f"{metrics.percent(statistics.fmean(a == b for a, b in known) if known else 0)}")
    if args.unrelated:
        measure_forgotten(args, run, columns, found, ends, rule)

    # -- report ------------------------------------------------------------------------------------------
    closed = {name: {measure: fraction_closed(*(found[each][measure] for each in (BASE, name, goal)))
                     for measure in ("kl", "nll", *(["follows"] if rule else []))}
              for name in (STUDENT, CONTROL) if goal and name in found}
    clauses = verdict_clauses(args, found, closed, len(rows), goal)
    figures = {f"{name}: {measure}": value for name, row in found.items() for measure, value in row.items()}
    figures |= {f"{'' if name == STUDENT else name + ' '}closed: {measure}": value
                for name, way in closed.items() for measure, value in way.items()}
    if goal:
        for what, measure in (("tokens saved", "tokens in"), ("seconds saved", "seconds alone")):
            pair = found[goal][measure], found[STUDENT][measure]
            figures[what] = None if None in pair else pair[0] - pair[1]
        notes.append(f"{figures['tokens saved']:.1f} tokens of prompt are saved a request")
    if about["leaked_lines_left_out"]:
        notes.append(f"{about['leaked_lines_left_out']:,} lines left out: their text was trained as well")
    shown = [*table_lines(found, len(rows)), *(f"note       {note}" for note in notes), metrics.verdict_line(clauses)]
    report = {"name": str(args.output_dir), "metrics": figures, "settings": flags.stored(args), "data": about,
              "verdict": "; ".join(clauses), "samples": [
                  {"id": row["id"], "question": question, "held out": label, **({"truth": truth[i]} if truth else {}),
                   **{name: answers[name][i].text for name in answers}}
                  for i, (row, question, label) in enumerate(zip(rows, questions, given))]}
    for name, text in (("evaluation.json", json.dumps(report, indent=1, ensure_ascii=False)),
                       ("evaluation.txt", "\n".join(shown))):
        checkpoint.write_text(Path(args.output_dir) / name, text + "\n")
    print(*shown, f"done       {args.output_dir}/evaluation.json, evaluation.txt", sep="\n")
    check_learned(args, found, closed, goal)


def measure_forgotten(args, run, columns, found, ends, rule):
    """Add what --unrelated says to the columns; None for a teacher."""
    problems = []
    rows = [record for _, record in chat.read_records(args.unrelated, problems)]
    need(rows and not problems, str(problems[0]) if problems else f"{args.unrelated}: holds no conversations")
    if run.flags.keep and Path(run.flags.keep).exists():
        seen = {question_hash(record["messages"]) for _, record in chat.read_records(run.flags.keep, [])}
        both = [row for row in rows if question_hash(row["messages"]) in seen]
        need(not both, f"--unrelated {args.unrelated}: --keep {run.flags.keep} trained {len(both)} of its questions; "
                       "judge by others")
    samples, _ = encode(run, rows, turns="last")
    base = None
    for name, column in columns.items():
        if name in (PROMPTED, TEACHER):
            found[name] |= dict.fromkeys(("unrelated", "unrelated kl", "unrelated same", "unrelated follows"))
            continue
        print(f"asking     {name}: {len(rows):,} unrelated questions")
        answers, _ = ask_column(args, column, ends, run.flags.enable_thinking, requests_of(rows), args.max_new_tokens)
        texts = [answer.text.strip() for answer in answers]
        base = base or texts
        found[name] |= {
            "unrelated": len(rows), "unrelated kl": likelihoods(column, samples, args.batch_size, columns[BASE])[0],
            "unrelated same": statistics.fmean(map(str.__eq__, texts, base)),
            "unrelated follows": statistics.fmean(rule(None, text) for text in texts) if rule else None}


def table_lines(found, n):
    """The measures as text, a line each, a column for each model; shares with their 95 % interval."""
    def cell(measure, value):
        if value is None:
            return "-"
        if measure in ("agreement", "accuracy", "follows", "exact", "labelled", "ended"):
            low, high = wilson(value, n)
            return f"{100 * value:.1f}% ({100 * low:.0f}-{100 * high:.0f})"
        return f"{value:.4g}"
    measures = dict.fromkeys(measure for row in found.values() for measure in row)
    rows = [["", *found], *([measure, *(cell(measure, row.get(measure)) for row in found.values())]
                            for measure in measures)]
    widths = [max(map(len, column)) for column in zip(*rows)]
    return [first.ljust(widths[0]) + "".join(f"  {text:>{width}}" for text, width in zip(more, widths[1:]))
            for first, *more in rows]


def verdict_clauses(args, found, closed, n, goal):
    """[clause] about what was learned and what was forgotten."""
    def way(name):
        return " and ".join(f"{metrics.percent(closed[name][measure])} of the way in {word}" for measure, word in (
            ("kl", "divergence"), ("follows", "following")) if closed[name].get(measure) is not None)
    mine, clauses = found[STUDENT], []
    if judges_labels(args):
        clauses.append(f"student agrees with its teacher on {metrics.percent(mine['agreement'])} of {n} lines that were "
                       "not trained")
        clauses += [f"{name} on {metrics.percent(found[name]['agreement'])}" for name in (BASE, goal) if name in found]
        if mine.get("accuracy") is not None:
            clauses.append(f"{metrics.percent(mine['accuracy'])} of its answers are true")
    elif goal:
        clauses.append(f"the student went {way(STUDENT)}, on {n} answers not trained")
    else:
        clauses.append(f"student gives {metrics.percent(mine['exact'])} of {n} answers word for word as in the data")
    if args.follows:
        clauses.append("following: " + ", ".join(f"{name} {metrics.percent(row['follows'])}"
                                                 for name, row in found.items()))
    if args.unrelated:
        clause = f"on {mine['unrelated']} unrelated questions it is {mine['unrelated kl']:.3f} nats a token from the base"
        if args.follows:
            clause += f" and follows the rule in {metrics.percent(mine['unrelated follows'])}"
        clauses.append(clause)
    if CONTROL in closed:
        clauses.append(f"the control went {way(CONTROL)}")
        if (closed[CONTROL]["follows"] or 0) >= (args.min_closed or 0.5):
            clauses.append("the control follows the rule as well, which therefore shows nothing: the divergence decides")
    return clauses


def check_learned(args, found, closed, goal):
    """Raise UserError unless the student learned as much as --min_... ask for, and the control did not."""
    agreement = found[STUDENT].get("agreement")
    agrees = f"{args.checkpoint} agrees with its teacher on {agreement or 0:.3f} of the lines"
    need(not args.min_agreement or agreement >= args.min_agreement,
         f"{agrees}, less than --min_agreement {args.min_agreement}")
    before = max((found[name].get("agreement", 0) for name in (BASE, goal) if name in found), default=0)
    need(not args.min_gain or round(agreement - before, 9) >= args.min_gain,       # 0.7 - 0.4 is a little below 0.3
         f"{agrees}, its base model on {before:.3f}: it gained less than --min_gain {args.min_gain}")
    asked = [(words, measure) for words, measure in (("divergence", "kl"), ("following rate", "follows"))
             if args.min_closed and measure in closed[STUDENT]]
    for words, measure in asked:
        need(closed[STUDENT][measure] is not None,
             f"{args.checkpoint}: {words}: there is no gap to close: {found[goal][measure]:.3g} of the teacher, "
             f"{found[BASE][measure]:.3g} of the base")
    for words, measure in asked:
        part = closed[STUDENT][measure]
        need(part >= args.min_closed, f"{args.checkpoint}: {words}: {part:.3f} of the gap is closed, less than "
                                      f"--min_closed {args.min_closed}")
    if args.control and args.min_closed:
        way = closed[CONTROL]
        need(min(way["kl"] or 0, way["follows"] or 0) < args.min_closed,
             f"--control {args.control}: closed {way['kl'] or 0:.3f} of the divergence and {way['follows'] or 0:.3f} of "
             f"the following rate, --min_closed {args.min_closed} of both: it learned as well")


if __name__ == "__main__":
    main()
