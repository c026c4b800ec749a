r"""Judge a student of train_sft.py --prompt_file by answers it has not seen: how much of the prompt has it learned?

    python distill/evaluate_prompt.py --checkpoint out/checkpoint-48 --output_dir out/evaluation
    python distill/evaluate_prompt.py --checkpoint out/checkpoint-48 --output_dir out/evaluation \
        --follows '^Ahoy' --min_closed 0.5

Three columns: "base" is the model without prompt and adapters, "student" has the adapters, "base + prompt" is their
teacher. On the answers that the run held out (held_out.py proves which): the divergence KL(teacher, column) and the
negative log-likelihood, per token. Then all three answer the held-out questions, greedily: how many answers follow the
rule --follows, how many are the teacher's very words, how many end by themselves; tokens and seconds for each.

"closed" is the part of the way from base to base + prompt that the student went, 1 being all of it. Written:
evaluation.json with all answers side by side, which common/report.py shows, and evaluation.txt.
"""
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))    # common/ stands beside this folder

from common import flags
from common.flags import UserError, need

COLUMNS = ("base", "student", "base + prompt")


def build_parser():
    p = flags.Parser("Judge a student that has learned a prompt.")
    p.add_argument("--checkpoint", required=True, metavar="FOLDER", help="of train_sft.py --prompt_file")
    p.add_argument("--model_path", help="base model the run started from (default: what the run's flags say)")
    p.add_argument("--data_file", metavar="ANSWERS", help="what the run trained on (default: what the run's flags say)")
    p.add_argument("--output_dir", required=True, help="everything written goes here")
    p.add_argument("--follows", metavar="PATTERN", help="regular expression found in answers that follow the prompt")
    p.add_argument("--follows_language", metavar="CODE",
                   help="or the language (ISO 639-1) that it is in, told by py3langid")
    p.add_argument("--min_closed", type=float, default=0.0,
                   help="share, 0 to 1: exit status 1 when less of the way was gone, in divergence or in following")
    p.add_argument("--max_new_tokens", type=int, default=128, help="tokens an answer may have")
    p.add_argument("--batch_size", type=int, default=16, help="answers scored, and generated, together")
    p.add_argument("--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto",
                   help="to compute in; auto: bfloat16 on a GPU that has it, else float32")
    p.add_argument("--device", help="where the model runs (default: the GPU if there is one)")
    return p


def check_flags(args, world_size):
    """Raise UserError for values and combinations that would fail, or do nothing, later."""
    flags.at_least_one(args, "max_new_tokens", "batch_size")
    flags.share(args, "min_closed")
    need(not (args.follows and args.follows_language), "give one of --follows and --follows_language")
    try:
        re.compile(args.follows or "")
    except re.error as error:
        raise UserError(f"--follows {args.follows!r}: is not a regular expression ({error})")


# parsed before torch is imported: --help and a mistake in a flag answer at once
ARGS = flags.parse(build_parser(), check_flags) if __name__ == "__main__" else None

import contextlib
import json
import tempfile

import torch

from common import adapters, checkpoint, document_attention, parallel, verdict
from distill import chat, held_out, packed_lm, scores, student, weights
from distill.table import ChatSamples, collate
from distill.teacher import read_prompt, with_prompt


def follows_rule(pattern, language):
    """Function of an answer's text: does it follow the prompt? None without a rule."""
    if pattern:
        return lambda text: bool(re.search(pattern, text))
    if not language:
        return None
    try:
        from py3langid import langid
    except ImportError:
        raise UserError("--follows_language: the package py3langid is missing: pip install py3langid==0.4.0")
    return lambda text: langid.classify(text)[0] == language


@torch.no_grad()
def likelihoods(model, samples, batch_size):
    """{column: {"kl", "nll"}} per trained token of the samples, in nats.

    model: PeftModel with document_attention. samples: of table.ChatSamples, with a prompt.
    """
    packed, found = packed_lm.PackedLM(model, share=1.0, prompted=("forward", 0.5, 0)).eval(), {}
    plain = packed_lm.PackedLM(model).eval()
    batches = [samples[i:i + batch_size] for i in range(0, len(samples), batch_size)]
    device = model.get_input_embeddings().weight.device
    for column in COLUMNS:
        sums = torch.zeros(3, dtype=torch.float64)
        for part in batches:
            if column == "base + prompt":       # the teacher's own likelihood of the same answers
                batch = collate([(i, ids[own:], trained[own:]) for i, ids, trained, own in part]).to(device)
                with adapters.switched_off(model):
                    nll, _ = plain(batch)
                row = (0.0, nll.item(), batch.counts["targets"])
            else:
                batch = collate(part, prompted=True).to(device)
                with adapters.switched_off(model) if column == "base" else contextlib.nullcontext():
                    apart, _, nll, _, n = packed(batch)
                row = (apart.item(), nll.item(), n.item())
            sums += torch.tensor(row, dtype=torch.float64)
        found[column] = {"kl": (sums[0] / sums[2]).item(), "nll": (sums[1] / sums[2]).item()}
    return found


def answer_all(model, tokenizer, lines, prompt, max_new_tokens, batch_size):
    """{column: ([Answer], speed)} of student.ask_all. model: PeftModel; lines: held_out.Lines."""
    ask, found = student.open_transformers(model, tokenizer, lines.ends, lines.thinking), {}
    for column in COLUMNS:
        chats = lines.chats if column != "base + prompt" else [with_prompt(prompt, asked) for asked in lines.chats]
        print(f"asking     {column}: {len(chats):,} questions")
        with contextlib.nullcontext() if column == "student" else adapters.switched_off(model):
            found[column] = student.ask_all(ask, chats, max_new_tokens, batch_size)
    return found


def closed(base, reached, goal):
    """Part of the way from base to goal that was gone; None where there is no way."""
    return (reached - base) / (goal - base) if goal != base else None


def judge(answers, likely, rule):
    """({column: {measure: value}}, {measure: part of the way closed})."""
    columns, theirs = {}, [answer.text.strip() for answer in answers["base + prompt"][0]]
    for name, (given, speed) in answers.items():
        texts = [answer.text.strip() for answer in given]
        columns[name] = likely[name] | {
            "follows": scores.proportion(sum(map(rule, texts)), len(texts))["share"] if rule else None,
            "exact": scores.proportion(sum(map(str.__eq__, texts, theirs)), len(texts))["share"],
            "ended": scores.proportion(sum(answer.finish_reason == "stop" for answer in given), len(given))["share"],
            "tokens in": speed["tokens_in"], "tokens out": speed["tokens_out"],
            "seconds alone": speed["seconds_per_line_alone"]}
    ways = {measure: closed(*(columns[name][measure] for name in COLUMNS))
            for measure in ("kl", "nll", *(["follows"] if rule else []))}
    return columns, ways


def table_lines(columns):
    """The columns as text, a line each."""
    measures = list(next(iter(columns.values())))
    rows = [["", *measures], *([name, *("-" if row[m] is None else f"{row[m]:.4g}" for m in measures)]
                               for name, row in columns.items())]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.rjust(width) if i else cell.ljust(width) for i, (cell, width) in enumerate(zip(row, widths)))
            for row in rows]


def check_closed(name, ways, least):
    """Raise UserError unless a student went at least this part of each way but that of the likelihood."""
    for measure, words in (("kl", "divergence"), ("follows", "following rate")):
        if measure in ways and (ways[measure] is None or ways[measure] < least):
            part = "there is no gap" if ways[measure] is None else f"{ways[measure]:.3f} of the gap"
            raise UserError(f"{name}: {words}: {part} is closed, less than --min_closed {least}")


def main(argv=None):
    args = ARGS or flags.parse(build_parser(), check_flags, argv)
    sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")
    with parallel.one_clear_error():
        rule = follows_rule(args.follows, args.follows_language)
        device, dtype = student.pick_device(args.device, args.dtype)
        folder, adapter, meta = held_out.open_checkpoint(args.checkpoint)
        run = held_out.run_flags(args.checkpoint, meta, args.data_file, None if meta else args.data_file)
        if not (adapter and run.prompt_file):
            raise UserError(f"--checkpoint {folder}: was not trained with --prompt_file; evaluate_sft.py judges labels")
        base, tokenizer = weights.find_model(args.model_path or run.model_path), chat.load_tokenizer(folder)
        held_out.check_base(args.checkpoint, base, meta)
        prompt = read_prompt(run.prompt_file, run.prompt_role)
        lines = held_out.read_lines(args.checkpoint, run, meta, base, tokenizer)
        with tempfile.TemporaryDirectory() as scratch:
            table, _, numbers, *_ = held_out.read_table(scratch, args.checkpoint, run, meta, base, tokenizer)
            samples = [ChatSamples(table)[int(i)] for i in numbers]
        checkpoint.own_output(args.output_dir)
        print(f"data       {lines.about['training_lines']:,} answers trained, {len(samples):,} to judge")
        model = student.load_model(base, folder, getattr(torch, dtype), torch.device(device))
        packed_lm.check_model(model.get_base_model())
        config = model.get_base_model().config
        own, config._attn_implementation = config._attn_implementation, document_attention.ATTENTION
        likely = likelihoods(model, samples, args.batch_size)
        config._attn_implementation = own
        answers = answer_all(model, tokenizer, lines, prompt, args.max_new_tokens, args.batch_size)
        columns, ways = judge(answers, likely, rule)
        saved = columns["base + prompt"]["tokens in"] - columns["student"]["tokens in"]
        metrics = {f"{name}: {measure}": value for name, row in columns.items() for measure, value in row.items()}
        metrics |= {f"closed: {measure}": value for measure, value in ways.items()} | {"tokens saved": saved}
        texts = [held_out.question(asked) for asked in lines.chats]
        rows = [{"id": number, "question": text, "held out": label,
                 **{name: found[i].text for name, (found, _) in answers.items()}}
                for i, (number, text, label) in enumerate(zip(lines.ids, texts, lines.labels))]
        report = {"name": str(args.output_dir), "metrics": metrics, "settings": vars(args), "data": lines.about,
                  "samples": rows}
        done = [f"{verdict.percent(part)} of the way in {name}" for name, part in (
            ("divergence", ways["kl"]), ("following", ways.get("follows"))) if part is not None]
        notes = [f"saved      {saved:.1f} tokens of prompt a request",
                 verdict.line([f"the student went {' and '.join(done)}, on {len(samples)} answers not trained"])]
        shown = "\n".join([*table_lines(columns), *notes])
        out = Path(args.output_dir)
        for name, text in (("evaluation.json", json.dumps(report, indent=1, ensure_ascii=False)),
                           ("evaluation.txt", shown)):
            checkpoint.write_atomically(out / name,
                                        lambda path, text=text: path.write_text(text + "\n", encoding="utf-8"))
        print(shown)
        print(f"done       {out}/evaluation.json, evaluation.txt")
        check_closed(args.checkpoint, ways, args.min_closed)


if __name__ == "__main__":
    main()
