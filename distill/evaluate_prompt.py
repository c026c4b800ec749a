r"""Judge a student of train_sft.py by answers it has not seen: how much has it learned of what its teacher reads?

    python distill/evaluate_prompt.py --checkpoint out/checkpoint-48 --output_dir out/evaluation
    python distill/evaluate_prompt.py --checkpoint out/checkpoint-48 --output_dir out/evaluation \
        --follows '^Ahoy' --min_closed 0.5 --control swapped/checkpoint-48

Three columns: "base" is the model without prompt, as it was before training, "student" is the checkpoint, adapters or
all weights, "base + prompt" its teacher ("teacher", where the run had another model in its place). On the answers that
the run held out, of OUTPUT_DIR/held_out.jsonl: the divergence KL(teacher, column) and the negative log-likelihood, per
token. Then all three answer the held-out questions, greedily: how many answers follow the rule --follows, how many are
the teacher's very words and how much of the wording is the same (ROUGE-L, scores.py), how many end by themselves;
tokens of each, and for student and teacher the seconds of a request alone. With --control another run's student, which
should not have learned, is a fourth column. With --unrelated it says what was forgotten: KL(base, student) on other
chats, and how many answers to those follow the rule although nobody asked for it.

"closed" is the part of the way from base to base + prompt that the student went, 1 being all of it. Written:
evaluation.json with all answers side by side, which common/report.py shows, and evaluation.txt.
"""
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))    # common/ stands beside this folder

from common import flags
from common.flags import UserError, need
from distill.teacher import Prompt, evaluated, read_prompt, with_prompt

BASE, STUDENT, CONTROL = "base", "student", "control"
PROMPTED, TEACHER = "base + prompt", "teacher"      # the base behind the prompt, or another model
TOPIC = "{topic}"
HALF = 0.5              # part of the way that counts as learned where --min_closed does not say


def build_parser():
    p = flags.Parser("Judge a student that has learned a prompt.")
    p.add_argument("--checkpoint", required=True, metavar="FOLDER", help="of train_sft.py")
    p.add_argument("--prompt_file", help="the teacher's prompt, for a run that learned answers alone (default: run's)")
    p.add_argument("--prompt_role", choices=("user", "system"), default="user",
                   help="with --prompt_file: around the last user message, or in a system message of its own")
    flags.switch(p, "--drop_leaked", help="leave out questions that were trained as well, instead of stopping")
    p.add_argument("--follows", metavar="PATTERN", help="regular expression found in answers that follow the prompt")
    p.add_argument("--follows_language", metavar="CODE",
                   help="or the language (ISO 639-1) that it is in, told by py3langid")
    p.add_argument("--topic", metavar="PATTERN",
                   help="regular expression; what its group is in the question stands for {topic} in --follows")
    p.add_argument("--min_closed", type=float, default=0.0,
                   help="share, 0 to 1: exit status 1 when less of the way was gone, in divergence or in following; "
                        "with --control also when the control went so far in both")
    p.add_argument("--control", metavar="FOLDER", help="checkpoint of a run that held out the same questions")
    p.add_argument("--unrelated", metavar="FILE",
                   help="chats that have nothing to do with the prompt, answered by the base: what was forgotten?")
    evaluated(p, max_new_tokens=128)
    return p


def check_flags(args, world_size):
    """Raise UserError for values and combinations that would fail, or do nothing, later."""
    flags.at_least_one(args, "max_new_tokens", "batch_size")
    flags.share(args, "min_closed")
    need(not (args.follows and args.follows_language), "give one of --follows and --follows_language")
    for flag, pattern in (("follows", (args.follows or "").replace(TOPIC, "x")), ("topic", args.topic or "()")):
        try:
            groups = re.compile(pattern).groups
        except re.error as error:
            raise UserError(f"--{flag} {pattern!r}: is not a regular expression ({error})")
        need(flag == "follows" or groups == 1, f"--topic {pattern!r}: has {groups} groups; the topic is in one: (...)")
    need((TOPIC in (args.follows or "")) == bool(args.topic), f"--topic and {TOPIC} in --follows belong together")
    need(args.prompt_file or args.prompt_role == "user", "--prompt_role needs --prompt_file")
    need(not args.control or args.follows or args.follows_language, "--control needs --follows or --follows_language")


# parsed before torch is imported: --help and a mistake in a flag answer at once
ARGS = flags.parse(build_parser(), check_flags) if __name__ == "__main__" else None

import contextlib
import math
import tempfile
from typing import NamedTuple

import torch

from common import checkpoint, distributed
from core import adapters, chat, document_attention, metrics
from distill import frozen, held_out, packed_lm, scores, student, causal_lm
from distill.choices import THINKING
from distill.chat_data import ChatSamples, ChatTable, Reading, build_table, collate
from distill.keep import kept


def follows_rule(pattern, language, topic=None):
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
    if pattern:
        return follows
    if not language:
        return None
    flags.need_package("py3langid", "--follows_language")
    from py3langid import langid
    return lambda question, text: langid.classify(text)[0] == language


class Voice(NamedTuple):
    """A column's model: with its adapters, or without."""
    model: object           # PeftModel, or transformers'
    adapted: bool = False

    @contextlib.contextmanager
    def packed(self, teacher=None):
        """PackedLM of it, whose teacher is another Voice; None: its own base."""
        models = [voice.model for voice in (self, teacher) if voice]
        natives = [getattr(model, "get_base_model", lambda model=model: model)() for model in models]
        before = [native.config._attn_implementation for native in natives]
        packed = packed_lm.PackedLM(self.model, share=1.0, prompted=packed_lm.KEPT).eval()
        if teacher and teacher.model is not self.model:
            other = frozen.Frozen(packed_lm.PackedLM(teacher.model), None)

            def scored(batch):
                with teacher.speaking():
                    return other(batch)
            packed.frozen = {"teacher": scored, "base": scored}
        try:
            for native in natives:
                native.config._attn_implementation = document_attention.ATTENTION
            with self.speaking():
                yield packed
        finally:
            for native, own in zip(natives, before):
                native.config._attn_implementation = own

    def speaking(self):
        return contextlib.nullcontext() if self.adapted else adapters.switched_off(self.model)


@torch.no_grad()
def likelihoods(voices, samples, batch_size, teacher):
    """{column: {"kl", "nll"}} per trained token of the samples, in nats.

    voices: {column: Voice}; teacher: the Voice of one of them. samples: of table.ChatSamples, with a prompt.
    """
    found = {}
    batches = [samples[i:i + batch_size] for i in range(0, len(samples), batch_size)]
    for column, voice in voices.items():
        sums, device = torch.zeros(3, dtype=torch.float64), voice.model.get_input_embeddings().weight.device
        with voice.packed(teacher) as packed:
            for part in batches:
                theirs = column in (PROMPTED, TEACHER)      # the teacher's own likelihood of the same answers
                batch = kept([(i, ids[own:], trained[own:]) for i, ids, trained, own in part]) if theirs else (
                    collate(part, prompted=True))
                parts = packed(batch.to(device))
                row = parts.divergence.item() * (not theirs), parts.ce.item(), parts.targets.item()
                sums += torch.tensor(row, dtype=torch.float64)
        found[column] = {"kl": (sums[0] / sums[2]).item(), "nll": (sums[1] / sums[2]).item()}
    return found


def answer_all(args, voices, tokenizer, lines, prompt):
    """{column: ([Answer], speed)} of student.ask_all. voices: {column: Voice}; lines: held_out.Lines."""
    draw, found = student.greedy(lines.about["enable_thinking"]), {}
    for column, voice in voices.items():
        chats, theirs = lines.chats, column in (PROMPTED, TEACHER)
        if theirs:
            chats = [with_prompt(prompt, asked) for asked in lines.contexts]
        print(f"asking     {column}: {len(chats):,} questions")
        answers = student.open_transformers(voice.model, tokenizer, lines.ends, draw, args.batch_size)
        with voice.speaking():
            found[column] = student.ask_all(answers, draw, chats, args.max_new_tokens,
                                            timed=theirs or column == STUDENT)
    return found


def closed(base, reached, goal):
    """Part of the way from base to goal that was gone; None where there is no way."""
    return (reached - base) / (goal - base) if goal != base else None


def judge(answers, likely, rule, questions):
    """({column: {measure: value}}, {column: {measure: part of the way closed}} of those that learned)."""
    teacher = next(name for name in answers if name in (PROMPTED, TEACHER))
    columns, theirs = {}, [answer.text.strip() for answer in answers[teacher][0]]
    for name, (given, speed) in answers.items():
        texts = [answer.text.strip() for answer in given]
        columns[name] = likely[name] | {
            "follows": scores.proportion(sum(map(rule, questions, texts)), len(texts))["share"] if rule else None,
            "exact": scores.proportion(sum(map(str.__eq__, texts, theirs)), len(texts))["share"],
            "overlap": math.fsum(map(scores.overlap, texts, theirs)) / len(texts),
            "ended": scores.proportion(sum(answer.finish_reason == "stop" for answer in given), len(given))["share"],
            "tokens in": speed["tokens_in"], "tokens out": speed["tokens_out"],
            "seconds alone": speed["seconds_per_line_alone"]}
    ways = {name: {measure: closed(*(columns[each][measure] for each in (BASE, name, teacher)))
                   for measure in ("kl", "nll", *(["follows"] if rule else []))}
            for name in columns if name not in (BASE, teacher)}
    return columns, ways


def table_lines(columns):
    """The columns as text, a line each."""
    measures = list(next(iter(columns.values())))
    rows = [[name, *("-" if row[m] is None else f"{row[m]:.4g}" for m in measures)]
            for name, row in columns.items()]
    return scores.aligned([["", *measures], *rows])


def check_closed(name, ways, least):
    """Raise UserError unless a student went at least this part of each way but that of the likelihood."""
    for measure, words in (("kl", "divergence"), ("follows", "following rate")):
        if measure in ways and (ways[measure] is None or ways[measure] < least):
            part = "there is no gap" if ways[measure] is None else f"{ways[measure]:.3f} of the gap"
            raise UserError(f"{name}: {words}: {part} is closed, less than --min_closed {least}")


def check_control(name, ways, least):
    """Raise UserError when a control went this part of both ways: then the test shows nothing."""
    if min(ways["kl"] or 0, ways["follows"] or 0) >= least:
        raise UserError(f"--control {name}: closed {ways['kl']:.3f} of the divergence and {ways['follows']:.3f} of the "
                        f"following rate, --min_closed {least} of both: it learned as well")


def control_clauses(way, least):
    """[clause] about how far the control went; a rule that it passes as well, by `least` of the way, shows nothing."""
    found = [f"the control went {words_of(way)}"]
    if way.get("follows") is not None and way["follows"] >= least:
        found.append("the control follows the rule as well, which therefore shows nothing: the divergence decides")
    return found


def words_of(way):
    """A part of the way in divergence and following, for the verdict."""
    return " and ".join(f"{metrics.percent(part)} of the way in {name}" for name, part in (
        ("divergence", way["kl"]), ("following", way.get("follows"))) if part is not None)


def open_run(args, name):
    """(checkpoint folder, its state, its run's flags, folder of its base, its tokenizer); run.adapter: has adapters."""
    folder, adapter, meta = held_out.open_checkpoint(name)
    if not meta:
        raise UserError(f"--checkpoint {folder}: has no {checkpoint.STATE_DIR}; evaluate_sft.py judges labels")
    run = held_out.run_flags(name, meta)
    run.adapter = adapter
    for flag in ("teacher_path", "chat_template", "keep"):
        setattr(run, flag, meta["args"].get(flag))
    learned = run.prompt_file or run.teacher_path
    if name == args.checkpoint and bool(learned) == bool(args.prompt_file):
        raise UserError(f"--prompt_file {args.prompt_file}: {folder} learned {learned}; drop the flag"
                        if learned else f"--checkpoint {folder}: was not trained with --prompt_file; give that "
                        "flag here, or evaluate_sft.py, which judges labels")
    base = causal_lm.find_model(args.model_path or run.model_path)
    held_out.check_base(name, base, meta)
    return folder, meta, run, base, chat.load_tokenizer(folder)


def open_student(run, folder, base, device, dtype):
    """Voice of a checkpoint: adapters on its base, or all weights."""
    return Voice(student.load_model(*((base, folder) if run.adapter else (folder, None)), dtype, device), True)


def open_voices(run, folder, base, device, dtype):
    """{column: Voice} of base, student and teacher of a run."""
    mine = open_student(run, folder, base, device, dtype)
    plain = Voice(mine.model if run.adapter else student.load_model(base, None, dtype, device))
    voices = {BASE: plain, STUDENT: mine, PROMPTED: plain}
    if run.teacher_path and run.teacher_path != run.model_path:
        del voices[PROMPTED]
        voices[TEACHER] = Voice(student.load_model(causal_lm.find_model(run.teacher_path, "--teacher_path"), None, dtype,
                                                   device))
    return voices


def prompted_samples(run, base, tokenizer, lines, prompt):
    """The lines' samples of ChatSamples, each followed by the same answer as the teacher reads it."""
    turns = "last" if prompt.role == "user" else run.train_turns
    encoder = chat.Encoder(tokenizer, turns, THINKING[run.enable_thinking])
    limit = causal_lm.length_limit(causal_lm.load_config(base), run.max_length, run.max_tokens_per_batch)
    theirs = None
    if run.teacher_path and run.teacher_path != run.model_path:
        own = chat.load_tokenizer(causal_lm.find_model(run.teacher_path, "--teacher_path"), run.chat_template)
        theirs = chat.Encoder(own, turns, THINKING[run.enable_thinking])
    with tempfile.TemporaryDirectory() as scratch:
        build_table(scratch, [lines.path], Reading(encoder, limit, run.too_long, prompt=prompt, drop=run.drop_bad,
                                                   behind=theirs))
        table = ChatTable(scratch)
        return [ChatSamples(table)[i] for i in range(len(table)) if table.keys[i] in set(lines.ids)]


def open_control(args, device, dtype, lines):
    """The Voice of --control. Raises UserError unless it held out the same questions."""
    folder, meta, run, base, tokenizer = open_run(args, args.control)
    theirs = held_out.read_lines(args.control, run, meta, tokenizer, drop_leaked=args.drop_leaked)
    if (theirs.ids, theirs.chats) != (lines.ids, lines.chats):
        raise UserError(f"--control {folder}: held out other questions than {args.checkpoint}")
    return open_student(run, folder, base, device, dtype)


def main(argv=None):
    args = ARGS or flags.parse(build_parser(), check_flags, argv)
    sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")
    with distributed.one_clear_error():
        rule = follows_rule(args.follows, args.follows_language, args.topic)
        device, dtype = student.pick_device(args.device, args.dtype)
        device, dtype = torch.device(device), getattr(torch, dtype)
        folder, meta, run, base, tokenizer = open_run(args, args.checkpoint)
        lines = held_out.read_lines(args.checkpoint, run, meta, tokenizer, drop_leaked=args.drop_leaked)
        questions = [chat.question(asked) for asked in lines.chats]
        if args.prompt_file:
            prompt = read_prompt(args.prompt_file, args.prompt_role)
        else:       # as the run read it, whatever has become of the file
            prompt = Prompt(*meta["held_out"]["prompt"])
        samples = prompted_samples(run, base, tokenizer, lines, prompt)
        checkpoint.own_output(args.output_dir)
        print(f"data       {lines.about['training_lines']:,} answers trained, {len(samples):,} to judge")
        voices = open_voices(run, folder, base, device, dtype)
        if args.control:
            voices[CONTROL] = open_control(args, device, dtype, lines)
        likely = likelihoods(voices, samples, args.batch_size, voices.get(TEACHER, voices[BASE]))
        answers = answer_all(args, voices, tokenizer, lines, prompt)
        columns, ways = judge(answers, likely, rule, questions)
        about = []
        if args.unrelated:
            from distill import forgotten
            about.append(forgotten.add(args, columns, voices, run, tokenizer, lines, rule))
        write_results(args, lines, questions, answers, columns, ways, about)


def latency(without, behind):
    """[line] about a request alone, of the columns of student and teacher; [] where one was too long to be asked."""
    if None in (without["seconds alone"], behind["seconds alone"]):
        return []
    parts = (f"{row['seconds alone']:.3g} s {what} the prompt ({row['tokens in']:.1f} tokens in, "
             f"{row['tokens out']:.1f} out)" for what, row in (("behind", behind), ("without", without)))
    return [f"latency    a request alone: {', '.join(parts)}; medians of {student.LATENCY_LINES} or all"]


def write_results(args, lines, questions, answers, columns, ways, about):
    """evaluation.json and evaluation.txt; prints the latter. UserError for less than --min_closed.

    about: clauses of the verdict on what was forgotten.
    """
    without, behind = columns[STUDENT], columns.get(TEACHER) or columns[PROMPTED]
    saved = {what: None if None in (behind[name], without[name]) else behind[name] - without[name]
             for what, name in (("tokens saved", "tokens in"), ("seconds saved", "seconds alone"))}
    figures = {f"{name}: {measure}": value for name, row in columns.items()
               for measure, value in row.items()}
    figures |= {f"{'' if name == STUDENT else name + ' '}closed: {measure}": value
                for name, way in ways.items() for measure, value in way.items()} | saved
    rows = [{"id": number, "question": text, "held out": label,
             **{name: found[i].text for name, (found, _) in answers.items()}}
            for i, (number, text, label) in enumerate(zip(lines.ids, questions, lines.labels))]
    clauses = [f"the student went {words_of(ways['student'])}, on {len(rows)} answers not trained"]
    if rates := [f"{name} {metrics.percent(row['follows'])}" for name, row in columns.items()
                 if row["follows"] is not None]:
        clauses.append(f"following: {', '.join(rates)}")
    clauses += about
    if args.control:
        clauses += control_clauses(ways[CONTROL], args.min_closed or HALF)
    notes = [f"saved      {saved['tokens saved']:.1f} tokens of prompt a request",
             *latency(without, behind), metrics.verdict_line(clauses)]
    report = {"name": str(args.output_dir), "metrics": figures, "settings": flags.stored(args),
              "data": lines.about, "verdict": "; ".join(clauses), "samples": rows}
    shown = [*table_lines(columns), *notes]
    scores.write(args.output_dir, report, shown)
    print(*shown, sep="\n")
    print(f"done       {args.output_dir}/evaluation.json, evaluation.txt")
    if args.min_closed:
        check_closed(args.checkpoint, ways["student"], args.min_closed)
    if args.control and args.min_closed:
        check_control(args.control, ways[CONTROL], args.min_closed)


if __name__ == "__main__":
    main()
