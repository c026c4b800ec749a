r"""Judge a student of train_sft.py by lines it has not seen: against its teacher, and against the truth.

    python distill/evaluate_sft.py --checkpoint out/checkpoint-48 --output_dir out/evaluation \
        --truth_file truth.jsonl --prompt_file distill/prompts/language_id.txt
    python distill/evaluate_sft.py --checkpoint out/checkpoint-24 --checkpoint out/checkpoint-48 ...     # side by side
    python distill/evaluate_sft.py --checkpoint merged --model_path BASE --data_file seen.jsonl \
        --eval_data_file unseen.jsonl

The student answers the lines that its run held out, greedily and as it was trained (its chat template, no long prompt).
So does the base model before training, with --prompt_file once more behind the teacher's prompt. The lines are those of
OUTPUT_DIR/held_out.jsonl, which train_sft.py writes (held_out.py). Two numbers, never mixed:

    agreement    with the teacher's label: how well the student copies. A student can be better than its teacher
    accuracy     against --truth_file, which no teacher made; the teacher's own accuracy on these lines stands beside it

An answer counts if the model ended by itself and the answer is a label, or has one in the form that --parser reads; any
other is wrong in both and stands in the column "none". Written: evaluation.json with every answer, evaluation.txt with
all tables. Exit status 1 when the first checkpoint is below --min_agreement or --min_gain.
"""
import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))    # common/ stands beside this folder

from common import flags
from common.flags import UserError, need
from distill.choices import GROUP, THINKING
from distill.labels import PARSERS, Parser, make_parser, read_label
from distill.teacher import PLACE, evaluated, read_prompt, with_prompt

MANY = 60                   # different labels; beyond them this is no classification
BASE = ("base", "base + prompt")        # columns of the model before training
ENGINE_FLAGS = {"transformers": ("dtype", "device", "batch_size"), "server": ("base_url", "model_name", "concurrency"),
                "vllm": ("tensor_parallel_size", "gpu_memory_utilization", "max_model_len", "enforce_eager")}


def build_parser():
    p = flags.Parser("Judge a student by lines it has not seen.")
    g = p.add_argument_group("models")
    add = g.add_argument
    add("--checkpoint", action="append", required=True, metavar="FOLDER",
        help="of train_sft.py, adapter or whole model; several are compared")
    add("--base", action=argparse.BooleanOptionalAction, default=True,
        help="ask the base model, before training, as well")
    add("--enable_thinking", choices=tuple(THINKING),
        help="as the student was trained; only for a checkpoint that does not say it")
    g = p.add_argument_group("data")
    add = g.add_argument
    add("--data_file", metavar="LABELS",
        help="with --eval_data_file: all that the student has seen (default: what the run's flags "
             "say)")
    add("--eval_data_file", metavar="LABELS",
        help="judge by these lines instead of those that the run held out")
    add("--group_size", type=int, metavar="N",
        help="ids of one group: with --eval_data_file no group may be in both files, 0 = not "
             f"looked at (default: the run's, or {GROUP} for a checkpoint that does not say it)")
    flags.switch(g, "--drop_leaked",
                 help="leave out lines whose text was trained as well, instead of stopping")
    add("--truth_file", help='JSONL {"id": line, "label": label or null}, or a label a line')
    add("--prompt_file",
        help=f"the teacher's prompt with {PLACE} once: the base is asked with it as well")
    add("--min_agreement", type=float, default=0.0,
        help="share, 0 to 1: exit status 1 when the first checkpoint agrees less with the teacher")
    add("--min_gain", type=float, default=0.0,
        help="share, 0 to 1: exit status 1 when its agreement is not so much above the base "
             "model's, with or without --prompt_file")
    g = p.add_argument_group("answers")
    add = g.add_argument
    add("--parser", choices=PARSERS, default="language",
        help="what a label is: the language line, --pattern, or the whole answer")
    add("--pattern", help="--parser regex: form of the label's line, the label in its one group")
    add("--labels",
        help="allowed labels, comma between them; default: those of the lines, or the 13 codes")
    add("--prompt_max_new_tokens", type=int, default=256,
        help="tokens an answer behind --prompt_file may have: its label comes last")
    add("--engine", choices=tuple(ENGINE_FLAGS), default="transformers",
        help="what generates; server: one with OpenAI's /chat/completions that has the models")
    evaluated(g, max_new_tokens=10)
    g = p.add_argument_group("engine server")
    add = g.add_argument
    add("--base_url", help="of the server, e.g. http://localhost:8000/v1; key in OPENAI_API_KEY")
    add("--model_name", nargs="+", metavar="NAME",
        help="the server's names: of the base, unless --no-base, then of each --checkpoint")
    add("--concurrency", type=int, default=64, help="requests under way at once")
    g = p.add_argument_group("engine vllm")
    add = g.add_argument
    add("--tensor_parallel_size", type=int, default=1, help="GPUs that share each layer")
    add("--gpu_memory_utilization", type=float, default=0.9,
        help="share of each GPU's memory, 0 to 1")
    add("--max_model_len", type=int, default=0,
        help="tokens of prompt and answer; 0: the model's own limit")
    flags.switch(g, "--enforce_eager", help="no compilation, no CUDA graphs: starts sooner")
    return p


def check_flags(args, world_size):
    """Raise UserError for values and combinations that would fail, or do nothing, later."""
    flags.at_least_one(args, "max_new_tokens", "prompt_max_new_tokens", "batch_size",
                       "tensor_parallel_size", "concurrency")
    flags.zero_or_more(args, "max_model_len", "group_size")
    flags.share(args, "min_agreement", "min_gain")
    need(args.base or not args.min_gain,
         "--min_gain compares with the base model: drop it, or --no-base")
    need(0 < args.gpu_memory_utilization <= 1, f"--gpu_memory_utilization is "
         f"{args.gpu_memory_utilization}; it must be more than 0, at most 1")
    need(args.base or not args.prompt_file,
         "--prompt_file is for the base model: drop it, or --no-base")
    need(len({Path(name).resolve() for name in args.checkpoint}) == len(args.checkpoint),
         "the same --checkpoint is given twice")
    default = build_parser().get_default
    need(args.prompt_file or args.prompt_max_new_tokens == default("prompt_max_new_tokens"),
         "--prompt_max_new_tokens needs --prompt_file")
    for engine, names in ENGINE_FLAGS.items():
        for flag in names if engine != args.engine else ():
            need(getattr(args, flag) == default(flag),
                 f"--{flag} is not for the engine {args.engine}")
    need(args.engine != "server" or args.base_url, "--engine server needs --base_url")
    wanted = len(args.checkpoint) + args.base
    need(args.engine != "server" or len(args.model_name or ()) == wanted,
         f"--model_name: give {wanted} names that the server knows: of the base, unless "
         "--no-base, then of each --checkpoint")


# parsed before torch is imported: --help and a mistake in a flag answer at once
ARGS = flags.parse(build_parser(), check_flags) if __name__ == "__main__" else None

import dataclasses
import gc
import signal
import tempfile
from collections import Counter
from typing import NamedTuple

import torch

from common import checkpoint, distributed
from core import chat, metrics
from distill import held_out, scores, student, causal_lm


def pick_labels(parser, lines):
    """Tuple of the labels there are; raises UserError when the lines have others, or too many to be classes."""
    labels = parser.labels or tuple(sorted(set(lines.labels)))
    for number, label in zip(lines.ids, lines.labels):
        if label not in labels:
            raise UserError(f"{lines.path}: id {number} is labelled {label[:40]!r}, which is not one of "
                            f"{', '.join(labels)}; see --parser and --labels")
    if len(labels) > MANY:
        raise UserError(f"{lines.path}: has {len(labels)} different labels; this is for at most {MANY}")
    return labels


def read_answer(parser, answer):
    """labels.Found: the whole answer is a label, as students write it, or holds one as teachers write it."""
    text = answer.text.lower() if parser.lower else answer.text
    whole = read_label(Parser(None, parser.labels), text, answer.finish_reason)
    if whole.label is not None or parser.line is None:
        return whole
    return read_label(parser, answer.text, answer.finish_reason)


def why_not(answer, found):
    """Why an answer has no label, in words that many answers share."""
    if answer.finish_reason == "length":
        return "cut off at the limit of tokens"      # that of the prompt or the other
    return "is none of the labels" if found.why.endswith("is not one of the labels") else found.why


# ---------------------------------------------------------------------------------------------------------------------
# Asking


class Model(NamedTuple):
    """What one column asks."""
    name: str               # of the column
    folder: Path            # with the weights
    adapter: Path           # folder of an adapter on top, or None
    tokenizer: object
    served: str             # the server's name for it, or None


def open_engine(args, model, lines, draw, scratch):
    """`answers` of teacher.py for a Model by --engine. scratch: an empty folder for vLLM."""
    if args.engine == "server":
        from distill.teacher_server import open_server
        return open_server(model.served, draw, args.base_url, args.concurrency)
    if args.engine == "vllm":
        from distill.teacher_vllm import open_vllm
        folder = student.vllm_folder(model.folder, model.adapter, model.tokenizer, lines.ends,
                                     scratch)
        options = {name: getattr(args, name) for name in ENGINE_FLAGS["vllm"]}
        return open_vllm(folder, draw, **options)
    dtype, device = getattr(torch, args.dtype), torch.device(args.device)
    net = student.load_model(model.folder, model.adapter, dtype, device)
    return student.open_transformers(net, model.tokenizer, lines.ends, draw, args.batch_size)


def ask_models(args, models, lines, prompt):
    """{column: ([Answer], speed)}. models: [Model], the base first. prompt: the teacher's for the base, or None."""
    found = {}
    for model in models:
        draw = student.greedy(lines.about["enable_thinking"])
        with tempfile.TemporaryDirectory(dir=args.output_dir, prefix=".serve-") as scratch:
            answers = open_engine(args, model, lines, draw, scratch)
            print(f"asking     {model.name}: {len(lines.ids):,} lines")
            found[model.name] = student.ask_all(answers, draw, lines.chats, args.max_new_tokens)
            if model.name == "base" and prompt:
                print(f"asking     base + prompt: {len(lines.ids):,} lines")
                chats = [with_prompt(prompt, messages) for messages in lines.chats]
                found["base + prompt"] = student.ask_all(answers, draw, chats, args.prompt_max_new_tokens)
            del answers         # its memory, and vLLM's processes, make room for the next
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
    return found


# ---------------------------------------------------------------------------------------------------------------------
# Judging


def judge(parser, lines, truth, answers, speed):
    """(scores of one column, JSON-able; its [Found]). truth: {id: label or None} or None."""
    labels, found = parser.labels, [read_answer(parser, answer) for answer in answers]
    given = [f.label for f in found]
    reasons = Counter(why_not(a, f) for a, f in zip(answers, found) if f.label is None)
    system = {"parsed": scores.proportion(sum(label is not None for label in given), len(given)),
              "no_label": dict(reasons.most_common()),
              "agreement": scores.score(lines.labels, given, labels),
              "accuracy": against_truth(labels, lines, truth, given), "speed": speed}
    if truth:
        known = [i for i, number in enumerate(lines.ids)
                 if truth[number] not in (None, lines.labels[i])]
        system["right_where_teacher_is_wrong"] = scores.proportion(
            sum(given[i] == truth[lines.ids[i]] for i in known), len(known))
    return system, found


def against_truth(labels, lines, truth, given):
    """scores.score of the lines whose truth is known; None without a truth file."""
    if not truth:
        return None
    known = [i for i, number in enumerate(lines.ids) if truth[number] is not None]
    return scores.score([truth[lines.ids[i]] for i in known], [given[i] for i in known], labels)


def sample_rows(lines, truth, columns):
    """[{"id", "text", "truth", "teacher", and of each column its answer, raw, ended and why}]."""
    rows = []
    for i, (number, messages) in enumerate(zip(lines.ids, lines.chats)):
        row = {"id": number, "text": chat.question(messages),
               "truth": truth[number] if truth else None, "teacher": lines.labels[i]}
        for name, (answers, found) in columns.items():
            row |= {name: found[i].label, f"{name} raw": answers[i].text,
                    f"{name} ended": answers[i].finish_reason, f"{name} why": found[i].why}
        rows.append(row)
    return rows


def check_learned(name, student, bases, min_agreement, min_gain):
    """Raise UserError unless a checkpoint agrees with its teacher often enough, and more often than its base.

    student, bases: scores.proportion of the checkpoint `name`, and of its base model with and without the prompt.
    """
    agrees = f"{name} agrees with its teacher on {student['right']} of {student['n']} lines ({student['share']:.3f})"
    if student["share"] < min_agreement:
        raise UserError(f"{agrees}, less than --min_agreement {min_agreement}")
    before = max((base["share"] for base in bases), default=0.0)
    if round(student["share"] - before, 9) < min_gain:       # 0.7 - 0.4 is a little below 0.3
        raise UserError(f"{agrees}, its base model on {before:.3f}: it gained less than --min_gain {min_gain}")


# ---------------------------------------------------------------------------------------------------------------------
# Output


def clauses(name, systems, lines):
    """[clause] of the verdict: what the checkpoint `name` has learnt, beside its base model. lines: how many asked."""
    def agrees(column):
        return metrics.percent(systems[column]["agreement"]["share"] or 0)
    found = [f"{name} agrees with its teacher on {agrees(name)} of {lines} lines that were not trained"]
    found += [f"{column} on {agrees(column)}" for column in BASE if column in systems]
    if accuracy := systems[name]["accuracy"]:
        found.append(f"{metrics.percent(accuracy['share'] or 0)} of its answers are true")
    return found


def student_names(checkpoints):
    """A column's name for each: "student", or as many last parts of their paths as it takes to tell them apart."""
    if len(checkpoints) == 1:
        return ["student"]
    parts = [Path(name).absolute().parts for name in checkpoints]
    return next(names for n in range(1, 1 + max(map(len, parts)))
                if len(set(names := ["/".join(part[-n:]) for part in parts])) == len(parts))


def check_single(lines, flag):
    """Raise UserError unless each line is one user message, which is all that `flag` can ask."""
    if odd := [number for number, chat_ in zip(lines.ids, lines.chats) if [m["role"] for m in chat_] != ["user"]]:
        raise UserError(f"{flag}: id {odd[0]} has more than one user message before its answer; {len(odd)} such lines")


# ---------------------------------------------------------------------------------------------------------------------
# Main


def open_students(args):
    """([Model] of base and checkpoints, run: held_out.run_flags of the checkpoints, state of the first or None)."""
    names = args.checkpoint
    opened = [held_out.open_checkpoint(name) for name in names]
    metas = [meta for _, _, meta in opened]
    held_out.check_same_split(names, metas)
    run = held_out.run_flags(names[0], metas[0], args.eval_data_file, args.data_file, args.enable_thinking)
    base = args.model_path or run.model_path
    if args.base or any(adapter for _, adapter, _ in opened):
        if not base:
            raise UserError(f"--checkpoint {names[0]}: does not say what it was trained from; give "
                            "--model_path" + ("" if opened[0][1] else ", or --no-base"))
        base = causal_lm.find_model(base)
        for name, meta in zip(names, metas):
            held_out.check_base(name, base, meta)
    tokenizers = [chat.load_tokenizer(folder) for folder, _, _ in opened]
    served = iter(args.model_name or [None] * (len(names) + 1))
    models = [Model("base", base, None, tokenizers[0], next(served))] if args.base else []
    for name, (folder, adapter, _), tokenizer in zip(student_names(names), opened, tokenizers):
        models.append(Model(name, base if adapter else folder, folder if adapter else None, tokenizer, next(served)))
    return models, run, metas[0]


def print_lines(args, lines):
    """What is judged, and how."""
    about = lines.about
    groups = f", groups of {about['group_size']}" if about["group_size"] else ""
    print(f"data       {about['training_lines']:,} trained, {about['held_out_lines']:,} to judge "
          f"({about['split']}{groups})")
    for note in lines.notes:
        print(note)
    if args.data_file and not args.eval_data_file:
        print(f"notice     --data_file is not read: {lines.path} has the lines that the run held out")
    print(f"engine     {args.engine}"
          + (f", {args.device}, {args.dtype}" if args.engine == "transformers" else ""))


def main(argv=None):
    args = ARGS or flags.parse(build_parser(), check_flags, argv)
    sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")
    with distributed.one_clear_error():
        # on an exit vLLM ends its own processes
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        if args.engine == "transformers":
            args.device, args.dtype = student.pick_device(args.device, args.dtype)
        # everything is read and checked before the first question
        labels = tuple(args.labels.split(",")) if args.labels else None
        parser = make_parser(args.parser, args.pattern, labels)
        prompt = read_prompt(args.prompt_file) if args.prompt_file else None
        models, run, meta = open_students(args)
        lines = held_out.read_lines(args.checkpoint[0], run, meta, models[args.base].tokenizer,
                                    args.eval_data_file, args.group_size, args.drop_leaked)
        labels = pick_labels(parser, lines)
        parser = dataclasses.replace(parser, labels=labels)
        truth = held_out.read_truth(args.truth_file, lines.ids, labels) if args.truth_file else None
        if prompt:
            check_single(lines, "--prompt_file")
        checkpoint.own_output(args.output_dir)
        print_lines(args, lines)
        systems, columns = {}, {}
        for name, (answers, speed) in ask_models(args, models, lines, prompt).items():
            systems[name], found = judge(parser, lines, truth, answers, speed)
            columns[name] = answers, found
        report(args, lines, truth, labels, systems, columns)


def report(args, lines, truth, labels, systems, columns):
    """Write evaluation.json and evaluation.txt, print its tables. Raises UserError for a
    checkpoint that did not learn.
    """
    known_teacher = against_truth(labels, lines, truth, lines.labels)
    figures = {f"{name}: {key}": system[key]["share"] for name, system in systems.items()
               for key in ("agreement", "accuracy", "parsed") if system[key]}
    if known_teacher:
        figures["teacher: accuracy"] = known_teacher["share"]
    found = {"name": str(args.output_dir), "metrics": figures, "labels": labels,
             "teacher": known_teacher, "systems": systems, "data": lines.about,
             "settings": flags.stored(args), "samples": sample_rows(lines, truth, columns)}
    how = f"batches of {args.batch_size}" if args.engine == "transformers" else args.engine
    table, notes = scores.side_by_side(systems, known_teacher, how), scores.make_notes(found)
    name = student_names(args.checkpoint)[0]
    notes.append(metrics.verdict_line(clauses(name, systems, len(lines.ids))))
    scores.write(args.output_dir, found, [*table, *notes, *scores.detail_lines(systems, labels)])
    print(*table, *notes, sep="\n")
    print(f"done       {args.output_dir}/evaluation.json, evaluation.txt")
    bases = [systems[column]["agreement"] for column in BASE if column in systems]
    check_learned(args.checkpoint[0], systems[name]["agreement"], bases, args.min_agreement,
                  args.min_gain)


if __name__ == "__main__":
    main()
