r"""Evaluate a student of train_sft.py on unseen questions: what has it learned and forgotten?

    python distill/evaluate.py --checkpoint out/checkpoint-48 --output_dir out/evaluation
    python distill/evaluate.py ... --follows '^Ahoy' --min_closed 0.5 --control other/checkpoint-48

Columns: "base" is the model before training, "student" the checkpoint, "base + prompt" or "teacher"
its teacher, "control" the student of another run, which should not learn. All answer the questions
in OUTPUT_DIR/held_out.jsonl greedily, in the student's training format. The checkpoint holds the
hash of that file. None of the questions may have been trained.

    kl, nll         KL(teacher, column) and negative log-likelihood per token of held-out answers
    accuracy        share of answers with the data's label, which is the teacher's or, with
                    --eval_data_file, may be the truth
    follows         share of answers that match --follows
    exact           share equal to the teacher's answer (the data's, without a teacher)
    unrelated kl    --unrelated: KL(base, column) on other chats that the base answered
"closed" is the fraction of the gap from base to teacher that a student closed.
"""
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))    # the folder of core/

from core import cli
from core.cli import UserError, require
from distill import teachers
from distill.teachers import PARSERS, Parser, make_parser, read_label

BASE, STUDENT, CONTROL = "base", "student", "control"
PROMPTED, TEACHER = "base + prompt", "teacher"      # the base with the prompt, or another model
TOPIC, WAYS = "{topic}", {"kl": "divergence", "follows": "following"}
SHARES = {"accuracy": "accuracy", "follows": "following", "exact": "word for word"}
# flags that determine how a run read its data
RUN_FLAGS = ("train_data_file drop_bad enable_thinking train_turns max_length "
             "max_tokens_per_batch model_path prompt_file teacher_path chat_template keep").split()


def build_parser():
    p = cli.Parser("Evaluate a student on unseen questions.")
    # models
    p.flag("--checkpoint", None, "checkpoint of train_sft.py, adapter or full", required=True)
    p.flag("--model_path", None, "base model of the run (default: from the run's flags)")
    p.flag("--control", None, "checkpoint of a run that held out the same questions")
    p.flag("--prompt_file", None, "the teacher's prompt, for a run that learned answers only")
    p.flag("--prompt_role", "user", "message that gets the prompt", choices=("user", "system"))
    # data
    p.flag("--output_dir", None, "folder for all output", required=True)
    p.flag("--eval_data_file", None, "chats to evaluate on, instead of the held-out ones")
    p.switch("--drop_leaked", "leave out questions that were also trained, instead of stopping")
    p.flag("--unrelated", None, "other chats, answered by the base, to measure forgetting")
    # answers
    p.flag("--max_new_tokens", 128, "most tokens of an answer")
    p.flag("--batch_size", 16, "answers generated together")
    p.flag("--parser", "whole", "label: language line, --pattern, or whole answer", choices=PARSERS)
    p.flag("--pattern", None, "--parser regex: form of the label's line, the label as group")
    p.flag("--labels", None, "allowed labels, comma-separated (default: those of the data)")
    p.flag("--follows", None, "regular expression that matches answers that follow the prompt")
    p.flag("--topic", None, f"expression for the question; its group fills {TOPIC} in --follows")
    p.flag("--min_closed", 0.0, "least fraction closed, 0 to 1, in KL and in following; exit "
           "status 1 below it, or if the --control reaches it in both")
    return p


def check_flags(args, world_size):
    """Raise UserError for values and combinations that would fail later or have no effect."""
    cli.at_least_one(args, "max_new_tokens batch_size")
    cli.share(args, "min_closed")
    try:
        re.compile((args.follows or "").replace(TOPIC, "x"))
        groups = re.compile(args.topic or "()").groups
    except re.error as error:
        raise UserError(f"--follows or --topic: is not a regular expression ({error})")
    require(groups == 1, f"--topic {args.topic!r}: has {groups} groups instead of one: (...)")
    require((TOPIC in (args.follows or "")) == bool(args.topic),
            f"--topic and {TOPIC} in --follows belong together")
    require(args.prompt_file or args.prompt_role == "user", "--prompt_role needs --prompt_file")
    require(not args.control or args.follows, "--control needs --follows")


# parsed before torch is imported: --help and wrong flags answer at once
ARGS = cli.parse(build_parser(), check_flags) if __name__ == "__main__" else None

import argparse
import contextlib
import hashlib
import tempfile
from typing import NamedTuple

import numpy as np
import torch

from core import adapters, chat, checkpoint, dist, json_files, kernels, metrics
from core.chat import THINKING
from distill import causal_lm, packed_lm
from distill.chat_data import (HELD_OUT, ChatTable, Reading, collate, kept, question_hash,
                               write_table)
from distill.losses import chunked_loss

# ---- Checkpoints and models


class Run(NamedTuple):
    """A checkpoint of train_sft.py."""
    folder: Path
    meta: dict                  # its state
    flags: argparse.Namespace   # RUN_FLAGS
    base: Path                  # folder
    teacher: Path               # folder of another model that taught, or None
    tokenizer: object


def open_run(args, name):
    """Run of a checkpoint folder. Raises UserError."""
    folder, where = Path(name), f"--checkpoint {name}"
    try:        # the run's flags and training data
        meta = json_files.read_object(folder / checkpoint.STATE / "state.json")
        flags = argparse.Namespace(**{flag: meta["args"][flag] for flag in RUN_FLAGS})
        trained_from = meta["identity"]["base model"]
    except (KeyError, TypeError, UserError) as error:
        raise UserError(f"{where}: is not a checkpoint of train_sft.py ({error!r})")
    base, teacher = causal_lm.find_model(args.model_path or flags.model_path), None
    require(causal_lm.fingerprint_weights(base) == trained_from,
            f"{where}: was not trained from {base} but from other weights ({flags.model_path} "
            "then); give that model with --model_path")
    if flags.teacher_path and flags.teacher_path != flags.model_path:
        teacher = causal_lm.find_model(flags.teacher_path, "--teacher_path")
    return Run(folder, meta, flags, base, teacher, chat.load_tokenizer(folder))


class Column:
    """A column's model: with its adapters, or without."""

    def __init__(self, model, tokenizer, adapted=False):
        self.model, self.tokenizer, self.adapted = model, tokenizer, adapted
        self.packed = packed_lm.PackedLM(model).eval()
        self.native = self.packed.native
        self.usual = self.native.config._attn_implementation

    def switched(self, attention):
        """Context in which the model is this column's and uses the named attention function."""
        self.native.config._attn_implementation = attention
        return contextlib.nullcontext() if self.adapted else adapters.disable(self.model)


def open_columns(run, prompt, device, dtype):
    """{name: Column} of base, teacher (if there is one) and student. Raises UserError."""
    base = causal_lm.load_whole(run.base, dtype, device)
    if (run.folder / "adapter_config.json").is_file():
        student = base = adapters.add_saved(base, run.folder)
        # not buffers: rotary embeddings stay float32
        for parameter in adapters.adapter_weights(student).values():
            parameter.data = parameter.data.to(dtype)
        adapters.load_adapters(student.eval(), run.folder)
    else:
        student = causal_lm.load_whole(run.folder, dtype, device)
    columns = {BASE: Column(base, run.tokenizer)}
    if run.teacher:
        tokenizer = chat.load_tokenizer(run.teacher, run.flags.chat_template)
        columns[TEACHER] = Column(causal_lm.load_whole(run.teacher, dtype, device), tokenizer)
    elif prompt:
        columns[PROMPTED] = columns[BASE]
    return columns | {STUDENT: Column(student, run.tokenizer, True)}


# ---- Held-out questions


def read_chats(path):
    """[record {"messages", ..., "line"}] of a file; UserError for unusable records."""
    problems = []
    rows = [record | {"line": number} for number, record in chat.read_records(path, problems)]
    require(rows and not problems, str([*problems, f"{path}: holds no conversations"][0]))
    return rows


def read_rows(args, run):
    """([record {"id", "messages", ...}] to evaluate on, JSON-able dict about them and their file).
    UserError for questions that were also trained, or that the run did not hold out.
    """
    if args.eval_data_file:
        path, trained = args.eval_data_file, run.flags.train_data_file
        rows, seen = read_chats(path), read_chats(trained)
        places = {question_hash(row["messages"]): f"{trained}:{row['line']}" for row in seen}
        count, rows = len(seen), [row | {"id": row["line"] - 1} for row in rows]
        for row in rows:
            if twin := places.get(question_hash(row["messages"]) or None):
                row["trained_as"] = twin
    else:
        path = run.folder.resolve().parent / HELD_OUT
        about = run.meta.get("held_out", {"hash": ""})
        require(about["hash"], f"--checkpoint {run.folder}: its run held nothing out, so there is "
                "nothing to judge it by; train with --validation_split 0.1, or give "
                "--eval_data_file with lines it has not seen")
        require(hashlib.sha256(json_files.read_text(path).encode()).hexdigest() == about["hash"],
                f"{path}: is not what the run of {run.folder} held out: it has changed since; "
                "start the training command again, which writes it")
        rows, count = read_chats(path), about["trained"]
    leaked = [row for row in rows if "trained_as" in row]
    require(not leaked or args.drop_leaked and len(leaked) < len(rows), leaked and (
        f"{path}:{leaked[0]['line']}: its text was trained, as {leaked[0]['trained_as']} "
        f"({len(leaked)} such lines of {len(rows)}); --drop_leaked leaves them out"))
    about = {"file": str(path), "training_lines": count, "held_out_lines": len(rows),
             "leaked_lines_left_out": len(leaked), "enable_thinking": run.flags.enable_thinking}
    return [row for row in rows if "trained_as" not in row], about


def encode(run, rows, path, prompt=None, turns=None):
    """([sample of a ChatTable], end ids of answers). rows: those of the file `path` to take."""
    around = prompt and prompt.role == "user"
    turns = turns or ("last" if around else run.flags.train_turns)
    thinking, other = THINKING[run.flags.enable_thinking], None
    if prompt and run.teacher:
        theirs = chat.load_tokenizer(run.teacher, run.flags.chat_template)
        other = chat.Encoder(theirs, turns, thinking)
    limit = causal_lm.length_limit(causal_lm.load_config(run.base), run.flags.max_length,
                                   run.flags.max_tokens_per_batch)
    encoder = chat.Encoder(run.tokenizer, turns, thinking, split=not prompt)
    with tempfile.TemporaryDirectory() as folder:
        write_table(folder, [path], Reading(encoder, limit, prompt, run.flags.drop_bad,
                                            teacher=other))
        table, lines = ChatTable(folder), {row["line"] for row in rows}
        samples = [table[i] for i in range(len(table)) if table.lines[i] in lines]
    return samples, sorted(encoder.ends)


# ---- Answers and measures


@torch.no_grad()
def likelihoods(column, samples, batch_size, teacher=None, as_teacher=False):
    """(KL(teacher, column), None without a teacher; negative log-likelihood) per trained token, in
    nats. samples: of encode. teacher: a Column. as_teacher: the column is the teacher.
    """
    sums = torch.zeros(3, dtype=torch.float64)
    for start in range(0, len(samples), batch_size):
        part = samples[start:start + batch_size]
        batch = collate(part, prompted=True) if len(part[0]) > 3 else kept(part)
        batch = batch.to(column.native.get_input_embeddings().weight.device)
        with column.switched(kernels.packed_documents()):
            (rows,), head = column.packed.rows(batch.teacher if as_teacher else batch)
        taught = (), None
        if teacher:
            with teacher.switched(kernels.packed_documents()):
                taught = teacher.packed.rows(batch.teacher)
        loss, _, *more = chunked_loss(rows, head, batch.targets, column.packed.chunk, taught[0],
                                      packed_lm.KEPT if teacher else None, taught[1])
        ce, apart = more or (loss, loss)
        sums += torch.tensor([apart.item(), ce.item(), len(batch.targets)])
    kl, nll = (sums[:2] / sums[2]).tolist()
    return kl if teacher else 0.0 if as_teacher else None, nll


def ask_column(column, ends, thinking, requests, tokens, batch_size):
    """[Answer] of a Column, greedy. ends: end ids of trained answers."""
    causal_lm.stop_at(column.native, ends)
    draw = teachers.Sampling(tokens, thinking=THINKING[thinking])
    answers = teachers.answers_of(column.native, column.tokenizer, draw, batch_size=batch_size)
    with column.switched(column.usual):
        found = {request.id: answer for request, answer in answers(requests)}
    return [found[request.id] for request in requests]


def requests_of(rows, prompt=None):
    """[Request] for the last answers; with a prompt, in the teacher's version."""
    made = []
    for number, row in enumerate(rows):
        messages = row["messages"][:-1]
        if prompt:
            messages = teachers.with_prompt(prompt, row.get("teacher_messages") or messages)
        made.append(teachers.Request(number, messages, tools=row.get("tools")))
    return made


def follows_rule(pattern, topic=None):
    """Function (question, answer) -> True if the answer follows the prompt. TOPIC in pattern is
    replaced by the group of `topic` in the question; UserError if that does not match.
    """
    def follows(question, text):
        if not topic:
            return bool(re.search(pattern, text))
        found = re.search(topic, question)
        require(found, f"--topic {topic!r}: is not in the question {question!r}")
        return bool(re.search(pattern.replace(TOPIC, re.escape(found[1])), text))
    return follows


def label_of(parser, answer):
    """The label of an Answer, from its line or the whole answer; None without one."""
    line = answer.text.lower() if parser.lower else answer.text
    label, _ = read_label(Parser(None, parser.labels), line, answer.finish_reason)
    return label or read_label(parser, answer.text, answer.finish_reason)[0]


# ---- Verdict


def verdict_clauses(args, found, closed, n):
    """[clause] that summarise learning and forgetting."""
    clauses = []
    for measure in [measure for measure in SHARES if measure in found[STUDENT]]:
        shares = [f"{name} {metrics.percent(row[measure])}" for name, row in found.items()]
        clauses.append(f"{SHARES[measure]} of {n} held-out answers: {', '.join(shares)}")
    for name, ways in closed.items():
        words = [f"{metrics.percent(part)} of the way in {WAYS[measure]}"
                 for measure, part in ways.items() if part is not None]
        clauses.append(f"the {name} went {' and '.join(words) or 'no way: there is no gap'}")
    if args.unrelated:
        clauses.append("on unrelated questions the student is "
                       f"{found[STUDENT]['unrelated kl']:.3f} nats per token from the base")
    return clauses


def check_learned(args, found, closed, goal):
    """UserError unless the student closed --min_closed of the gap and the control did not."""
    for measure, part in sorted(closed[STUDENT].items()):
        theirs, before = found[goal][measure], found[BASE][measure]
        where = f"{args.checkpoint}: {WAYS[measure]}"
        require(part is not None and (theirs or measure == "kl"), f"{where}: there is no gap to "
                f"close: {theirs:.3g} of the teacher, {before:.3g} of the base")
        require(part >= args.min_closed, f"{where}: {part:.3f} of the gap is closed, less than "
                                         f"--min_closed {args.min_closed}")
    if args.control:
        least = min(part or 0 for part in closed[CONTROL].values())
        require(least < args.min_closed, f"--control {args.control}: closed {least:.3f} of "
                f"divergence and following, --min_closed {args.min_closed}: it learned as well")


def main(argv=None):
    args = ARGS or cli.parse(build_parser(), check_flags, argv)

    # everything is read and checked before the first question
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    half = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
    dtype = torch.bfloat16 if half else torch.float32
    parser = make_parser(args.parser, args.pattern, args.labels and tuple(args.labels.split(",")))
    run = open_run(args, args.checkpoint)
    prompt = args.prompt_file and teachers.read_prompt(args.prompt_file, args.prompt_role)
    if learned := run.flags.prompt_file or run.flags.teacher_path:
        require(not prompt, f"--prompt_file {args.prompt_file}: {run.folder} learned {learned}; "
                            "drop the flag")
        # as the run read it, even if the file has changed
        prompt = teachers.Prompt(*run.meta["held_out"]["prompt"])
    require(prompt or not args.min_closed,
            "--min_closed needs a teacher: --prompt_file, or a run that learned from one")
    rows, about = read_rows(args, run)
    questions = [chat.question(row["messages"][:-1]) for row in rows]
    given = [chat.answer_text(row["messages"][-1]) for row in rows]
    judges_labels = args.parser != "whole" or args.labels
    if judges_labels:
        parser = parser._replace(labels=parser.labels or tuple(sorted(set(given))))
        for row, label in zip(rows, given):
            require(label in parser.labels, f"id {row['id']} is labelled {label[:40]!r}, which is "
                    f"not one of {', '.join(parser.labels)}; see --parser and --labels")
    samples, ends = encode(run, rows, about["file"], prompt)
    if args.unrelated:      # chats that the base answered, and --keep did not train
        kept_file, others = run.flags.keep, read_chats(args.unrelated)
        seen = read_chats(kept_file) if kept_file and Path(kept_file).exists() else []
        seen = {question_hash(row["messages"]) for row in seen}
        both = sum(question_hash(row["messages"]) in seen for row in others)
        require(not both, f"--unrelated {args.unrelated}: --keep {kept_file} trained {both} of its "
                          "questions; judge by others")
        unrelated, _ = encode(run, others, args.unrelated, turns="last")
    checkpoint.claim_output(args.output_dir)
    print(f"data       {about['training_lines']:,} trained, {len(rows):,} to judge "
          f"({about['file']}), on {device}")

    # models
    columns = open_columns(run, prompt, device, dtype)
    goal = next((name for name in (TEACHER, PROMPTED) if name in columns), None)
    if args.control:
        other = open_run(args, args.control)
        # the control was trained on the same questions with other answers
        theirs, _ = read_rows(args, other)
        require([row["messages"][:-1] for row in theirs] == [row["messages"][:-1] for row in rows],
                f"--control {other.folder}: held out other questions than {args.checkpoint}")
        columns[CONTROL] = open_columns(other, None, device, dtype)[STUDENT]

    # answers and measures
    found, answers, texts = {name: {} for name in columns}, {}, {}
    for name, column in columns.items():
        print(f"asking     {name}: {len(rows):,} questions")
        taught, row = name == goal, found[name]
        some = answers[name] = ask_column(
            column, ends, run.flags.enable_thinking, requests_of(rows, prompt if taught else None),
            args.max_new_tokens, args.batch_size)
        texts[name] = [answer.text.strip() for answer in some]
        row["kl"], row["nll"] = likelihoods(column, samples, args.batch_size,
                                            None if taught else columns.get(goal), taught)
        if args.unrelated and name in (STUDENT, CONTROL):
            row["unrelated kl"], _ = likelihoods(column, unrelated, args.batch_size, columns[BASE])
        row["tokens in"] = np.mean([answer.prompt_tokens for answer in some]).item()
        row["tokens out"] = np.mean([answer.completion_tokens for answer in some]).item()
        if args.follows:
            rule = follows_rule(args.follows, args.topic)
            row["follows"] = np.mean(list(map(rule, questions, texts[name]))).item()
        if judges_labels:
            labels = [label_of(parser, answer) for answer in some]
            row["accuracy"] = np.mean([a == b for a, b in zip(labels, given)]).item()
    for name, row in found.items():
        row["exact"] = np.mean([a == b for a, b in zip(texts[name], texts.get(goal, given))]).item()

    # report
    closed = {}         # {student or control: {measure: share of the gap, None without a gap}}
    for name in [name for name in (STUDENT, CONTROL) if goal and name in found]:
        closed[name] = {}
        for way in WAYS if args.follows else ("kl",):
            before, reached, end = (found[each][way] for each in (BASE, name, goal))
            closed[name][way] = (reached - before) / (end - before) if end != before else None
    clauses = verdict_clauses(args, found, closed, len(rows))
    figures = {f"{name}: {measure}": value for name, row in found.items()
               for measure, value in row.items()}
    figures |= {f"{'' if name == STUDENT else name + ' '}closed: {measure}": value
                for name, way in closed.items() for measure, value in way.items()}
    shown = ["".join(f"{text:<15}" for text in ("", *found)).rstrip()]
    for measure in dict.fromkeys(measure for row in found.values() for measure in row):
        form = "{:<15.1%}" if measure in SHARES else "{:<15.4g}"
        shown.append(f"{measure:<15}" + "".join(
            f"{'-':<15}" if row.get(measure) is None else form.format(row[measure])
            for row in found.values()).rstrip())
    if goal:
        saved = figures["tokens saved"] = found[goal]["tokens in"] - found[STUDENT]["tokens in"]
        shown.append(f"note       {saved:.1f} tokens of prompt are saved a request")
    if gone := about["leaked_lines_left_out"]:
        shown.append(f"note       {gone:,} lines left out: their text was trained as well")
    shown.append(metrics.verdict_line(clauses))
    report = {"name": str(args.output_dir), "metrics": figures, "settings": cli.safe_flags(args),
              "data": about, "verdict": "; ".join(clauses),
              "samples": [{"id": row["id"], "question": questions[i], "held out": given[i],
                           **{name: some[i].text for name, some in answers.items()}}
                          for i, row in enumerate(rows)]}
    checkpoint.write_json(Path(args.output_dir) / "evaluation.json", report)
    checkpoint.write_text(Path(args.output_dir) / "evaluation.txt", "\n".join(shown) + "\n")
    print(*shown, f"done       {args.output_dir}/evaluation.json, evaluation.txt", sep="\n")
    if args.min_closed:
        check_learned(args, found, closed, goal)


if __name__ == "__main__":
    dist.single_process()       # sets sys.excepthook
    main()
