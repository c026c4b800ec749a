r"""Evaluate a student of train_sft.py on unseen questions: what has it learned and forgotten?

    python distill/evaluate.py --checkpoint out/checkpoint-48 --output_dir out/evaluation
    python distill/evaluate.py ... --follows '^Ahoy' --min_closed 0.5 --control other/checkpoint-48

Columns: "base" is the model before training, "student" the checkpoint, "base + prompt" or "teacher"
its teacher, "control" a student that was trained on other answers. All answer the questions in
OUTPUT_DIR/held_out.jsonl greedily, in the student's training format.

    kl, nll         KL(teacher, column) and negative log-likelihood per token of held-out answers
    accuracy        share of answers with the data's label
    follows         share of answers that match --follows
    exact           share equal to the teacher's answer (the data's, without a teacher)
    unrelated kl    KL(base, column) on --unrelated
"closed" is the fraction of the gap from base to teacher that a student closed.
"""
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))    # the folder of core/

from core import cli
from core.cli import COUNT, SHARE, UserError, require
from distill import teachers
from distill.teachers import PARSERS, Parser, make_parser, read_label

BASE, STUDENT, CONTROL = "base", "student", "control"
PROMPTED, TEACHER = "base + prompt", "teacher"      # the base with the prompt, or another model
TOPIC = "{topic}"           # in --follows: replaced by the topic of the question
# measures and their names in the verdict: of gaps that a student closes, and of shares
GAPS = {"kl": "divergence", "follows": "following"}
SHARES = {"accuracy": "accuracy", "follows": "following", "exact": "word for word"}


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
    p.flag("--unrelated", None, "other chats, answered by the base, to measure forgetting")
    # answers
    p.flag("--max_new_tokens", 128, "most tokens of an answer", COUNT)
    p.flag("--batch_size", 16, "answers generated together", COUNT)
    p.flag("--parser", "whole", "label: language line, --pattern, or whole answer", choices=PARSERS)
    p.flag("--pattern", None, "--parser regex: form of the label's line, the label as group")
    p.flag("--labels", None, "allowed labels, comma-separated (default: those of the data)")
    p.flag("--follows", None, "regular expression that matches answers that follow the prompt")
    p.flag("--topic", None, f"expression for the question; its group fills {TOPIC} in --follows")
    p.flag("--min_closed", 0.0, "least fraction closed, 0 to 1, in KL and in following; exit "
           "status 1 below it, or if the --control reaches it in both", SHARE)
    return p


def check_flags(args, world_size):
    """Raise UserError for values and combinations that would fail later or have no effect."""
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

from core import adapters, chat, checkpoint, json_files, kernels, metrics
from distill import causal_lm, packed_lm, teaching
from distill.chat_data import HELD_OUT, ChatTable, question_hash, write_table
from distill.divergence import teacher_sums
from distill.frozen import KEPT, collate_kept, collate_prompted
from distill.generation import load_whole
from distill.losses import chunked_loss, loss_sums

# ---- Checkpoints and models


class Run(NamedTuple):
    """A checkpoint of train_sft.py."""
    folder: Path
    held_out: dict              # of chat_data.write_held_out
    flags: argparse.Namespace   # of the training command
    base: Path                  # folder
    teacher: Path               # folder of another model that taught, or None
    tokenizer: object
    teacher_tokenizer: object   # the same, unless another model taught


def open_run(args, name):
    """Open the Run of a checkpoint folder. Raises UserError."""
    folder = Path(name)
    try:
        meta = json_files.read_object(folder / checkpoint.STATE / "state.json")
        flags = argparse.Namespace(**meta["args"])
        trained_from, held_out = meta["identity"]["base model"], meta["held_out"]
    except (KeyError, TypeError, UserError) as error:
        raise UserError(f"--checkpoint {name}: is not a checkpoint of train_sft.py ({error!r})")
    base, teacher = causal_lm.find_model(args.model_path or flags.model_path), None
    tokenizer = teacher_tokenizer = chat.load_tokenizer(folder)
    require(causal_lm.fingerprint_weights(base) == trained_from,
            f"--checkpoint {name}: was not trained from {base} but from other weights "
            f"({flags.model_path} then); give --model_path")
    if flags.teacher_path and flags.teacher_path != flags.model_path:
        teacher = causal_lm.find_model(flags.teacher_path, "--teacher_path")
        teacher_tokenizer = chat.load_tokenizer(teacher, flags.chat_template)
    return Run(folder, held_out, flags, base, teacher, tokenizer, teacher_tokenizer)


class Column:
    """The model of one column of the report, used with its adapters or without them."""

    def __init__(self, model, tokenizer, adapted=False):
        self.model, self.tokenizer, self.adapted = model, tokenizer, adapted
        self.packed = packed_lm.PackedLM(model).eval()
        self.native = self.packed.native
        self.usual = self.native.config._attn_implementation

    def use(self, attention):
        """Context with this column's adapters, or none, and the named attention function."""
        self.native.config._attn_implementation = attention
        return contextlib.nullcontext() if self.adapted else adapters.disable(self.model)


def open_columns(run, prompt, device, dtype):
    """{name: Column} of base, teacher (if there is one) and student. Raises UserError."""
    base = load_whole(run.base, dtype, device)
    if (run.folder / "adapter_config.json").is_file():
        student = base = adapters.add_saved_lora(base, run.folder)
        # not buffers: rotary embeddings stay float32
        for parameter in adapters.adapter_weights(student).values():
            parameter.data = parameter.data.to(dtype)
        adapters.load_adapters(student.eval(), run.folder)
    else:
        student = load_whole(run.folder, dtype, device)
    columns = {BASE: Column(base, run.tokenizer)}
    if run.teacher:
        model = load_whole(run.teacher, dtype, device)
        columns[TEACHER] = Column(model, run.teacher_tokenizer)
    elif prompt:
        columns[PROMPTED] = columns[BASE]
    return columns | {STUDENT: Column(student, run.tokenizer, True)}


# ---- Held-out questions


def read_chats(path):
    """[record {"messages", ..., "line", "question", "answer"}] of a file. Raises UserError."""
    problems = []
    rows = [record | {"line": line, "question": chat.question(record["messages"][:-1]),
                      "answer": record["messages"][-1]["content"].split("</think>")[-1].strip()}
            for line, record in chat.read_records(path, problems)]
    require(rows and not problems, str([*problems, f"{path}: holds no conversations"][0]))
    return rows


def drop_trained(rows, trained_rows):
    """The records whose questions are not among those of trained_rows."""
    trained = {question_hash(row["messages"]) for row in trained_rows} - {0}    # 0: no question
    return [row for row in rows if question_hash(row["messages"]) not in trained]


def read_rows(args, run):
    """Return ([record {"id", "messages", ...}] of questions that were not trained, JSON-able dict
    about the data). UserError if the run did not hold them out."""
    if args.eval_data_file:
        path = args.eval_data_file
        rows = [row | {"id": row["line"] - 1} for row in read_chats(path)]
        trained_rows = read_chats(run.flags.train_data_file)
        unseen, n_trained = drop_trained(rows, trained_rows), len(trained_rows)
    else:
        path = run.folder.resolve().parent / HELD_OUT
        require(run.held_out["hash"], f"--checkpoint {run.folder}: its run held out no questions; "
                "give --eval_data_file with unseen lines")
        file_hash = hashlib.sha256(json_files.read_text(path).encode()).hexdigest()
        require(file_hash == run.held_out["hash"], f"{path}: has changed since the run of "
                f"{run.folder} held it out; rerun the training command, which writes it")
        rows, n_trained = read_chats(path), run.held_out["trained"]
        unseen = [row for row in rows if "trained_as" not in row]
    require(unseen, f"{path}: each of its questions was trained")
    return unseen, {"file": str(path), "training_lines": n_trained, "held_out_lines": len(rows),
                    "leaked_lines_left_out": len(rows) - len(unseen),
                    "enable_thinking": run.flags.enable_thinking}


def encode(run, rows, path, prompt=None, turns=None):
    """Return ([sample of a ChatTable], end ids of answers). rows: records of the file `path`."""
    last_only = prompt and prompt.role == "user"
    turns = turns or ("last" if last_only else run.flags.train_turns)
    options = chat.THINKING[run.flags.enable_thinking]
    encoder = chat.Encoder(run.tokenizer, turns, options, split=not prompt)
    if prompt:
        teacher = chat.Encoder(run.teacher_tokenizer, turns, options)
        encoder = teaching.PairEncoder(encoder, teacher, prompt)
    limit = causal_lm.length_limit(causal_lm.load_config(run.base), run.flags.max_length,
                                   run.flags.max_tokens_per_batch)
    with tempfile.TemporaryDirectory() as folder:
        write_table(folder, [path], encoder, limit, run.flags.drop_bad)
        table, lines = ChatTable(folder), {row["line"] for row in rows}
        samples = [table[i] for i in range(len(table)) if table.lines[i] in lines]
    return samples, table.ends


def teacher_prompt(args, run):
    """The teachers.Prompt of the run's teacher or of --prompt_file; None without a teacher."""
    if learned := run.flags.prompt_file or run.flags.teacher_path:
        require(not args.prompt_file, f"--prompt_file: {run.folder} learned {learned}; drop it")
        # as the run read it: the file may have changed
        return teachers.Prompt(*run.held_out["prompt"])
    require(args.prompt_file or not args.min_closed, "--min_closed needs a teacher: --prompt_file")
    return args.prompt_file and teachers.read_prompt(args.prompt_file, args.prompt_role)


def label_parser(args, rows):
    """Parser of the labels; None: accuracy is not measured. UserError for other labels in rows."""
    parser = make_parser(args.parser, args.pattern, args.labels and tuple(args.labels.split(",")))
    if args.parser == "whole" and not args.labels:
        return None
    parser = parser._replace(labels=parser.labels or tuple(sorted({row["answer"] for row in rows})))
    for row in rows:
        label = row["answer"]
        require(label in parser.labels, f"id {row['id']} is labelled {label[:40]!r}, which is not "
                f"one of {', '.join(parser.labels)}; see --parser and --labels")
    return parser


# ---- Answers and measures


@torch.no_grad()
def likelihoods(column, samples, batch_size, teacher=None, is_teacher=False):
    """Return (KL(teacher, column), negative log-likelihood) in nats per trained token. The KL is
    None without a teacher Column, and 0 if the column is_teacher. samples: from encode()."""
    sums = torch.zeros(3, dtype=torch.float64)
    for start in range(0, len(samples), batch_size):
        chunk = samples[start:start + batch_size]
        batch = collate_prompted(chunk) if len(chunk[0]) > 3 else collate_kept(chunk)
        batch = batch.to(column.native.get_input_embeddings().weight.device)
        with column.use(kernels.packed_documents()):
            (rows,), head = column.packed.rows(batch.teacher if is_teacher else batch)
        function, teacher_rows = loss_sums, ()
        if teacher:
            with teacher.use(kernels.packed_documents()):
                teacher_rows, teacher_head = teacher.packed.rows(batch.teacher)
            function = teacher_sums(KEPT, *teacher_head)
        loss, _, *more = chunked_loss(rows, head, batch.targets, column.packed.chunk, function,
                                      teacher_rows)
        ce, kl = more or (loss, loss)
        sums += torch.tensor([kl.item(), ce.item(), len(batch.targets)])
    kl, nll = (sums[:2] / sums[2]).tolist()
    if is_teacher:
        return 0.0, nll
    return kl if teacher else None, nll


def ask_column(args, column, ends, thinking, rows, prompt=None):
    """[Answer] of a Column to each row, greedy. ends: end ids of trained answers."""
    requests = []
    for number, row in enumerate(rows):
        messages = row["messages"][:-1]
        if prompt:
            messages = teachers.add_prompt(prompt, row.get("teacher_messages") or messages)
        requests.append(teachers.Request(number, messages, tools=row.get("tools")))
    causal_lm.stop_at(column.native, ends)
    draw = teachers.Sampling(args.max_new_tokens, options=chat.THINKING[thinking])
    answers = teachers.answers_of(column.native, column.tokenizer, draw, batch_size=args.batch_size)
    with column.use(column.usual):
        by_id = {request.id: answer for request, answer in answers(requests)}
    return [by_id[number] for number in range(len(rows))]


def follows_rule(args, question, text):
    """True if an answer follows the prompt, by --follows and --topic. UserError without a topic."""
    pattern = args.follows
    if args.topic:
        match = re.search(args.topic, question)
        require(match, f"--topic {args.topic!r}: is not in the question {question!r}")
        pattern = pattern.replace(TOPIC, re.escape(match[1]))
    return bool(re.search(pattern, text))


def label_of(parser, answer):
    """The label of an Answer (all of its text, or a line of it), or None if it has none."""
    text = answer.text.lower() if parser.lower else answer.text
    label, _ = read_label(Parser(None, parser.labels), text, answer.finish_reason)
    return label or read_label(parser, answer.text, answer.finish_reason)[0]


def measure_answers(args, parser, rows, answers):
    """{measure: value} of a column's Answers to these rows."""
    values = {"tokens in": np.mean([answer.prompt_tokens for answer in answers]).item(),
              "tokens out": np.mean([answer.completion_tokens for answer in answers]).item()}
    if args.follows:
        values["follows"] = np.mean([follows_rule(args, row["question"], answer.text.strip())
                                     for row, answer in zip(rows, answers)]).item()
    if parser:
        values["accuracy"] = np.mean([label_of(parser, answer) == row["answer"]
                                      for row, answer in zip(rows, answers)]).item()
    return values


# ---- Verdict


def closed_gaps(args, measures, goal):
    """{student or control: {measure: fraction of the gap from base to goal, None without a gap}}.
    measures: {column: {measure: value}}. goal: name of the teacher's column, or None."""
    closed = {name: {} for name in (STUDENT, CONTROL) if goal and name in measures}
    for name, fractions in closed.items():
        for measure in GAPS if args.follows else ("kl",):
            start, reached, end = (measures[column][measure] for column in (BASE, name, goal))
            fractions[measure] = (reached - start) / (end - start) if end != start else None
    return closed


def verdict_clauses(measures, closed, n):
    """[clause] that summarise what was learned."""
    clauses = []
    for measure in [measure for measure in SHARES if measure in measures[STUDENT]]:
        shares = [f"{name} {metrics.percent(row[measure])}" for name, row in measures.items()]
        clauses.append(f"{SHARES[measure]} of {n} held-out answers: {', '.join(shares)}")
    for name, fractions in closed.items():
        words = [f"{metrics.percent(fraction)} of the way in {GAPS[measure]}"
                 for measure, fraction in fractions.items() if fraction is not None]
        clauses.append(f"the {name} went {' and '.join(words) or 'no way: there is no gap'}")
    return clauses


def write_report(args, rows, data, answers, measures, closed, goal):
    """Write evaluation.json and evaluation.txt, print the latter. answers: {column: [Answer]}."""
    clauses = verdict_clauses(measures, closed, len(rows))
    figures = {f"{name}: {measure}": value for name, row in measures.items()
               for measure, value in row.items()}
    figures |= {f"{'' if name == STUDENT else name + ' '}closed: {measure}": fraction
                for name, fractions in closed.items() for measure, fraction in fractions.items()}
    lines = ["".join(f"{text:<15}" for text in ("", *measures)).rstrip()]      # the table
    for measure in dict.fromkeys(measure for row in measures.values() for measure in row):
        form = "{:<15.1%}" if measure in SHARES else "{:<15.4g}"
        cells = [f"{'-':<15}" if row.get(measure) is None else form.format(row[measure])
                 for row in measures.values()]
        lines.append(f"{measure:<15}{''.join(cells)}".rstrip())
    if goal:
        figures["tokens saved"] = measures[goal]["tokens in"] - measures[STUDENT]["tokens in"]
    if leaked := data["leaked_lines_left_out"]:
        lines.append(f"note       {leaked:,} lines left out: their text was trained as well")
    if kept := data.get("unrelated_lines_left_out"):
        lines.append(f"note       {kept:,} lines of --unrelated left out: --keep trained them")
    lines.append(f"verdict    {'; '.join(clauses)}")
    samples = [{"id": row["id"], "question": row["question"], "held out": row["answer"],
                **{name: column[i].text for name, column in answers.items()}}
               for i, row in enumerate(rows)]
    checkpoint.write_json(Path(args.output_dir) / "evaluation.json", {
        "name": str(args.output_dir), "metrics": figures, "data": data,
        "settings": cli.remove_secrets(vars(args)), "verdict": "; ".join(clauses),
        "samples": samples})
    checkpoint.write_text(Path(args.output_dir) / "evaluation.txt", "\n".join(lines) + "\n")
    print(*lines, f"done       {args.output_dir}/evaluation.json, evaluation.txt", sep="\n")


def check_learned(args, measures, closed, goal):
    """UserError unless the student closed --min_closed of the gap and the control did not."""
    for measure, fraction in sorted(closed[STUDENT].items()):
        end, start = measures[goal][measure], measures[BASE][measure]
        require(fraction is not None and (end or measure == "kl"), f"{GAPS[measure]}: there is no "
                f"gap to close: {end:.3g} of the teacher, {start:.3g} of the base")
        require(fraction >= args.min_closed, f"{args.checkpoint}: closed {fraction:.3f} of the gap "
                f"in {GAPS[measure]}, less than --min_closed {args.min_closed}")
    if args.control:
        least = min(fraction or 0 for fraction in closed[CONTROL].values())
        require(least < args.min_closed, f"--control {args.control}: closed {least:.3f} of "
                f"divergence and following, --min_closed {args.min_closed}: it learned as well")


def main(argv=None):
    args = ARGS or cli.parse(build_parser(), check_flags, argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    # everything is read and checked before a model is loaded
    run = open_run(args, args.checkpoint)
    control = open_run(args, args.control) if args.control else None
    prompt = teacher_prompt(args, run)
    rows, data = read_rows(args, run)
    if control:     # it was trained on the same questions with other answers
        control_rows, _ = read_rows(args, control)
        require([row["messages"][:-1] for row in control_rows]
                == [row["messages"][:-1] for row in rows],
                f"--control {args.control}: held out other questions than {args.checkpoint}")
    parser = label_parser(args, rows)
    samples, ends = encode(run, rows, data["file"], prompt)
    unrelated = None
    if args.unrelated:      # chats that the base answered
        chats = read_chats(args.unrelated)
        unseen = drop_trained(chats, read_chats(run.flags.keep)) if run.flags.keep else chats
        data["unrelated_lines_left_out"] = len(chats) - len(unseen)
        unrelated, _ = encode(run, unseen, args.unrelated, turns="last")
        require(unrelated, f"--unrelated {args.unrelated}: --keep trained each of its questions")
    checkpoint.lock_folder(args.output_dir)

    # models
    columns = open_columns(run, prompt, device, dtype)
    goal = next((name for name in (TEACHER, PROMPTED) if name in columns), None)
    if control:
        columns[CONTROL] = open_columns(control, None, device, dtype)[STUDENT]

    # answers and measures
    answers, measures = {}, {}
    for name, column in columns.items():
        print(f"asking     {name}: {len(rows):,} questions")
        is_goal = name == goal
        answers[name] = ask_column(args, column, ends, run.flags.enable_thinking, rows,
                                   prompt if is_goal else None)
        teacher = None if is_goal else columns.get(goal)
        kl, nll = likelihoods(column, samples, args.batch_size, teacher, is_goal)
        measures[name] = {"kl": kl, "nll": nll}
        if unrelated and name in (STUDENT, CONTROL):
            kl, _ = likelihoods(column, unrelated, args.batch_size, columns[BASE])
            measures[name]["unrelated kl"] = kl
        measures[name] |= measure_answers(args, parser, rows, answers[name])
    texts = {name: [answer.text.strip() for answer in column] for name, column in answers.items()}
    reference = texts[goal] if goal else [row["answer"] for row in rows]
    for name in columns:
        measures[name]["exact"] = np.mean([a == b for a, b in zip(texts[name], reference)]).item()

    closed = closed_gaps(args, measures, goal)
    write_report(args, rows, data, answers, measures, closed, goal)
    if args.min_closed:
        check_learned(args, measures, closed, goal)


if __name__ == "__main__":
    main()
