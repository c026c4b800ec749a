r"""A teacher's answers: lines or conversations in, chat JSONL out, {"id", "messages": [...]}, in input order.

    python distill/create_data.py --input_file lines.txt --output_file labels.jsonl \
        --model_name Qwen/Qwen3-30B-A3B-Instruct-2507 --max_model_len 8192
    python distill/create_data.py --input_file chats.jsonl --output_file answers.jsonl \
        --prompt_file system.txt --prompt_role system --model_name NAME --base_url http://localhost:8000/v1

The long prompt goes to the teacher only; a student trained on the result learns to do without it. Each line is asked
through the teacher's chat template. An answer without a proper label (labels.py) is asked for again with another
seed; a line that never gets one, or that a server refuses, is in labels.rejected.jsonl with all raw answers and the
reason. Every input line is in one of the two files, known by its number; ids differ between input files.

A line of a .jsonl file is {"messages": [...]}, whose last answer, if it ends with one, is asked for again; or {"text":
"..."}, which may have several lines, with "history": [[question, answer], ...] where there is one.

The same command goes on after any end: finished lines are in labels.jsonl.work/, and another prompt, model or flag that
matters is refused there. --shard I/N does every N-th line; the process that finds all lines finished writes the results
(launch/create_data_h100x8.sh does that on 8 GPUs).
"""
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))    # common/ stands beside this folder

from common import flags
from common.flags import UserError, need
from distill import teacher
from distill.labels import PARSERS, UNANSWERED, label_logprobs, make_parser, read_label, thoughts

TEACHER, TEACHER_LEN = "Qwen/Qwen3-30B-A3B-Instruct-2507", 8192       # its own 262,144 tokens take a GPU's memory
LOG_S = 10                  # seconds between log lines
REFUSED_IN_A_ROW = 50       # lines, asked in random order: then it is not the lines that the server refuses
PROMPT = Path(__file__).resolve().parent / "prompts" / "language_id.txt"
# flags that a label depends on, beside those that name the lines, the prompt and the teacher
LABEL_FLAGS = ("prompt_role", "parser", "pattern", "labels", "thinking", "max_tokens", "max_model_len", "temperature",
               "top_p", "top_k", "max_retries", "constrain", "logprobs", "seed")
ENGINE_FLAGS = {
    "vllm": ("tensor_parallel_size", "pipeline_parallel_size", "gpu_memory_utilization", "enforce_eager"),
    "openai": ("base_url", "concurrency", "request_timeout", "server_patience"),
    "transformers": ("batch_size",),
}


def build_parser():
    p = flags.Parser("Answer lines of text, or conversations, with a teacher.")
    g = p.add_argument_group("data")
    g.add_argument("--input_file", default="../tinker-cookbook/example-data/multilingual.txt",
                   help="UTF-8 text, one line a sample; or .jsonl of conversations")
    g.add_argument("--output_file", default="./data/prompt_distillation_lang.jsonl",
                   help="chat JSONL to write; .rejected.jsonl, .stats.json beside it")
    g.add_argument("--prompt_file", default=str(PROMPT),
                   help=f"UTF-8 text; for the role user with {teacher.PLACE} once, best at its end")
    g.add_argument("--prompt_role", choices=("user", "system"), default="user",
                   help="where the prompt goes: around the last user message, or in a system message of its own")
    g.add_argument("--parser", choices=PARSERS, default="language",
                   help="what a label is: the language line, --pattern, or the whole answer, for free-form answers")
    g.add_argument("--pattern", help="--parser regex: form of the label's line, the label in its one group")
    g.add_argument("--labels", help="allowed labels, comma between them; default: any, or the 13 language codes")
    g.add_argument("--shard", default="0/1", help="I/N: only lines whose 0-based number leaves remainder I by N")
    flags.switch(g, "--keep_reasoning", help="write the teacher's thoughts as reasoning_content of its answers; for "
                 "students whose chat template writes them")
    flags.switch(g, "--dry_run", help="check flags and files, say what there is to do, end")
    g = p.add_argument_group("teacher")
    g.add_argument("--model_name", help="folder or hub name; with --base_url the server's name for it (default: "
                   f"{TEACHER} with --max_model_len {TEACHER_LEN})")
    g.add_argument("--engine", choices=("auto", "vllm", "openai", "transformers"), default="auto",
                   help="auto: openai with --base_url, else vllm where it is installed, else transformers")
    g.add_argument("--max_model_len", type=int, default=0, help="tokens of prompt and answer; 0: the model's own limit")
    g.add_argument("--thinking", choices=("default", "on", "off"), default="default",
                   help="enable_thinking of the chat template; on: answers without a closed thought do not count")
    g = p.add_argument_group("answers")
    g.add_argument("--max_tokens", type=int, default=1024, help="tokens an answer may have, thoughts included")
    g.add_argument("--temperature", type=float, default=0.15, help="of the draws; 0: the likeliest token, no retries")
    g.add_argument("--top_p", type=float, default=1.0, help="draw from the likeliest tokens of this total probability")
    g.add_argument("--top_k", type=int, default=0, help="draw from so many tokens; 0: all")
    g.add_argument("--max_retries", type=int, default=3, help="further attempts for a line, each with another seed")
    g.add_argument("--constrain", choices=("never", "last", "always"), default="never",
                   help="let the engine force the wanted form: at the last attempt, or at all (vllm, openai)")
    g.add_argument("--logprobs", type=int, default=0,
                   help="store so many log-probabilities for each token of a label or answer")
    g.add_argument("--seed", type=int, default=0, help="of the draws")
    g.add_argument("--chunk_size", type=int, default=1024, help="lines given to vllm or transformers together; a "
                   "server gets the next line as soon as one is answered")
    g = p.add_argument_group("engine vllm")
    g.add_argument("--tensor_parallel_size", type=int, default=1, help="GPUs that share each layer")
    g.add_argument("--pipeline_parallel_size", type=int, default=1, help="groups of GPUs that share out the layers")
    g.add_argument("--gpu_memory_utilization", type=float, default=0.9, help="share of each GPU's memory, 0 to 1")
    flags.switch(g, "--enforce_eager", help="no compilation, no CUDA graphs: starts sooner")
    g = p.add_argument_group("engine openai")
    g.add_argument("--base_url", help="of the server, e.g. http://localhost:8000/v1; key in OPENAI_API_KEY")
    g.add_argument("--concurrency", type=int, default=64, help="requests under way at once")
    g.add_argument("--request_timeout", type=float, default=600.0, help="seconds that one request may take in all")
    g.add_argument("--server_patience", type=float, default=600.0,
                   help="seconds one line's failed calls are repeated; then it is rejected, or, with the server gone, "
                   "the run ends")
    g = p.add_argument_group("engine transformers")
    g.add_argument("--batch_size", type=int, default=16, help="lines generated together")
    return p


def shard_of(text):
    """(this shard, shards) of --shard I/N."""
    shard = re.fullmatch(r"(\d+)/(\d+)", text)
    need(shard and int(shard[1]) < int(shard[2]), f"--shard {text}: give I/N with I from 0 to N - 1")
    return int(shard[1]), int(shard[2])


def check_flags(args, world_size):
    """Raise UserError for values and combinations that would fail, or do nothing, later."""
    engine, defaults = teacher.pick_engine(args.engine, args.base_url), build_parser()
    need(args.model_name or engine != "openai", "--base_url needs --model_name, the server's name for its model")
    if not args.model_name:
        args.model_name, args.max_model_len = TEACHER, args.max_model_len or TEACHER_LEN
    flags.at_least_one(args, "max_tokens", "chunk_size", "tensor_parallel_size", "pipeline_parallel_size",
                       "concurrency", "batch_size")
    flags.zero_or_more(args, "temperature", "top_k", "max_retries", "max_model_len", "logprobs", "seed")
    flags.above_zero(args, "request_timeout", "server_patience")
    for flag in ("top_p", "gpu_memory_utilization"):
        need(0 < getattr(args, flag) <= 1, f"--{flag} is {getattr(args, flag)}; it must be more than 0, at most 1")
    need(args.temperature or not args.max_retries,
         "--temperature 0 gives the same answer at every retry: add --max_retries 0")
    need(args.prompt_role != "system" or args.parser != "language" or args.prompt_file == str(PROMPT),
         "--prompt_role system: say what counts as an answer, --parser whole (or regex)")
    need(engine != "openai" or args.base_url, "--engine openai needs --base_url")
    if args.base_url:
        from distill.teacher_server import address
        address(args.base_url, "--base_url")
    need(engine != "transformers" or args.constrain == "never", "--constrain needs the engine vllm or a server")
    for other, names in ENGINE_FLAGS.items():
        for flag in names if other != engine else ():
            need(getattr(args, flag) == defaults.get_default(flag), f"--{flag} is for the engine {other}, not {engine}"
                 + (": there is no vLLM here, see launch/create_data_h100x8.sh; vLLM needs an environment of its own"
                    if (args.engine, other, engine) == ("auto", "vllm", "transformers") else ""))
    need(not (engine == "openai" and args.max_model_len), "--max_model_len is the server's own matter: set it there")
    shard_of(args.shard)


# parsed before torch is imported: --help and a mistake in a flag answer at once
ARGS = flags.parse(build_parser(), check_flags) if __name__ == "__main__" else None

import hashlib
import json
import random
import signal
import time
from collections import deque

from common import checkpoint, distributed
from common.text import printable
from core import json_files
from distill.choices import LINES
from distill.journal import Journal, read_journals, rejected_path, statistics, write_results

ROLES = ("system", "developer", "user", "assistant", "tool")


def read_input(path):
    """(conversations, [messages] each ending with the user's; notices). UserError for what is no line or conversation.

    One line of text is one user message; .jsonl: see the top of this file.
    """
    if Path(path).suffix == ".jsonl":
        return read_conversations(path)
    text = json_files.read_text(path, "--input_file ")
    lines = [line.strip() for line in text.split("\n")]        # not splitlines: U+2028 does not end a line
    if lines and not lines[-1]:
        lines.pop()
    if not lines:
        raise UserError(f"--input_file {path}: is empty")
    if empty := [number for number, line in enumerate(lines, 1) if not line]:
        raise UserError(f"--input_file {path}: line {empty[0]} is empty ({len(empty)} such lines); delete them")
    return [[{"role": "user", "content": line}] for line in lines], []


def read_conversations(path):
    """read_input of a .jsonl file; each line of it is one record."""
    found, answered, unread = [], 0, set()
    for number, line in enumerate(json_files.read_text(path, "--input_file ").removesuffix("\n").split("\n"), 1):
        try:
            record = json_files.loads(line)
            if not isinstance(record, dict):
                raise ValueError("is no JSON object")
            messages = messages_of(record)
            if messages[-1]["role"] == "assistant":
                messages, answered = messages[:-1], answered + 1
            if not messages or messages[-1]["role"] not in ("user", "tool"):
                raise ValueError("has no user message before the answer that is asked for")
        except ValueError as error:
            raise UserError(f"--input_file {path}: line {number} {printable(error)}; a line is "
                            '{"messages": [{"role": ..., "content": ...}, ...]} or {"text": "..."}')
        unread |= record.keys() - {"messages", "text", "history"}
        found.append(messages)
    notices = [f"{answered:,} conversations end with an answer, which is asked for again"] if answered else []
    if unread:
        notices.append(f"not read: {printable(', '.join(sorted(map(str, unread))))} of the records")
    return found, notices


def messages_of(record):
    """The messages of one record of a .jsonl file; ValueError says what is wrong with them."""
    if ("messages" in record) == ("text" in record):
        raise ValueError('has to have one of "messages" and "text"')
    messages = record.get("messages")
    if messages is None:
        history = record.get("history") or []
        if not isinstance(history, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in history):
            raise ValueError('has a "history" that is no list of [question, answer]')
        texts = [text for pair in history for text in pair] + [record["text"]]
        messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    if not isinstance(messages, list) or not messages:
        raise ValueError('has no list "messages"')
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            raise ValueError(f"has no role out of {', '.join(ROLES)} in message {number}")
        if not isinstance(message.get("content"), str) or not message["content"].strip():
            raise ValueError(f"has no text in message {number}")
        if json_files.HALF_CHARACTER.search(message["content"]):
            raise ValueError(f"has half a character (\\ud800 to \\udfff) in message {number}")
        if other := message.keys() - {"role", "content", "reasoning_content"}:
            raise ValueError(f"has {', '.join(sorted(other))} in message {number}, which no student of ours is taught")
    return [{"role": message["role"], "content": message["content"]} for message in messages]


def as_text(conversations):
    """A text of each conversation, equal only for equal ones: for digests."""
    return [messages[0]["content"] if len(messages) == 1 and messages[0]["role"] == "user" else json.dumps(messages)
            for messages in conversations]


def first_id(conversations):
    """Id of line 0: a digest of the input, so that records of several input files have different ids, x LINES."""
    return int(digest(*as_text(conversations))[:6], 16) * LINES


def digest(*parts):
    """Short SHA-256 of texts."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def model_digest(name):
    """Digest of a model folder: names and sizes of all files, text of the small ones. None for other names."""
    folder, parts = Path(name), []
    if not folder.is_dir():
        return None
    for path in sorted(p for p in folder.iterdir() if p.is_file() and not p.name.startswith(".")):
        small = path.suffix in (".json", ".jinja") and path.stat().st_size < 1 << 20
        parts += [path.name, str(path.stat().st_size), path.read_text(errors="replace") if small else ""]
    return digest(*parts)


def describe(conversations, prompt, model_name, engine, settings):
    """The header of the journals: all that a label depends on. settings: {flag: value} of LABEL_FLAGS."""
    return {"input_file": f"{len(conversations)} lines {digest(*as_text(conversations))}",
            "prompt_file": digest(prompt.before, prompt.after),
            "model_name": model_name, "model": model_digest(model_name) if engine != "openai" else None,
            "engine": engine, **settings}


def draw_seed(seed, number, attempt):
    """Seed of one attempt for one line, the same in every process and after every restart; 31 bits."""
    return int(digest(f"{seed}/{number}/{attempt}")[:8], 16) >> 1


def label_lines(args, answers, draw, parser, asked, todo, journal, answered=False):
    """Ask until every line of `todo` has a label or no attempts left; note each in the journal when
    it is finished.

    args: its seed, max_retries and constrain, the attempts that are held to the parser's form.
    answers: of open_teacher, with the Sampling `draw`. asked(number): the messages that a line's
    teacher gets. answered: whether the teacher has answered any line before. Raises UserError when
    it refuses, or leaves unanswered, one line after the other.
    """
    tries = {number: [] for number in todo}         # line: [(Answer, Found, constrained)]
    waiting, start, logged = deque(todo), time.monotonic(), time.monotonic()
    # lines that a server refuses may stand together
    random.Random(args.seed).shuffle(waiting)
    count, held = {"lines": 0, "labelled": 0, "answers": 0, "in": 0, "out": 0}, []
    began = time.time()

    def take(n):
        requests = []
        for _ in range(min(n, len(waiting))):
            number = waiting.popleft()
            attempt = len(tries[number])
            forced = args.constrain == "always" or (
                args.constrain == "last" and attempt == args.max_retries)
            requests.append(teacher.Request(
                number, asked(number), draw_seed(args.seed, number, attempt),
                parser.constraint() if forced else None))
        return requests

    def note(records):
        for record in records:
            journal.add(record)
            count["lines"] += 1
            count["labelled"] += record["label"] is not None

    try:
        for request, answer in answers(take):
            mine = tries[request.id]
            found = read_label(parser, answer.text, answer.finish_reason,
                               must_think=draw.thinking == "on" and not answer.reasoning)
            mine.append((answer, found, request.constraint is not None))
            count["answers"] += 1
            count["in"] += answer.prompt_tokens
            count["out"] += answer.completion_tokens
            unanswered = answer.finish_reason in UNANSWERED
            if found.label is None and len(mine) <= args.max_retries and not unanswered \
                    and answer.finish_reason != "too_long":
                waiting.append(request.id)
            else:
                record = finished(request.id, tries.pop(request.id), began, draw.logprobs > 0)
                if unanswered:      # the line's fault only if the teacher answers others
                    held.append(record)
                else:
                    note([record])
            if not unanswered:
                note(held)
                answered, held = True, []
            elif len(held) >= REFUSED_IN_A_ROW:
                break
            if time.monotonic() - logged > LOG_S:
                logged = time.monotonic()
                print(log_line(count, len(todo), logged - start))
        if held and (len(held) >= REFUSED_IN_A_ROW or not answered):
            raise UserError(f"the server answers none of {len(held)} lines, the last being line "
                            f"{held[-1]['id'] + 1}: {held[-1]['answers'][-1]['text']}; what is "
                            "finished is kept, the same command goes on")
        note(held)
    finally:
        journal.sync()          # what was finished when a signal or an error came


def finished(number, tries, began, logprobs):
    """The journal's record of a line, from [(Answer, Found, constrained)] of its attempts.

    began: time when this process began, in seconds; logprobs: whether they are stored.
    """
    answer, found, forced = tries[-1]
    cached = [a.cached_tokens for a, _, _ in tries]
    record = {"id": number, "label": found.label, "by_constraint": forced and found.label is not None,
              "constrained": sum(f for _, _, f in tries), "began": began, "at": time.time(),
              "prompt_tokens": sum(a.prompt_tokens for a, _, _ in tries),
              "completion_tokens": sum(a.completion_tokens for a, _, _ in tries),
              "cached_tokens": None if None in cached else sum(cached),
              "answers": [{"text": a.text, "finish_reason": a.finish_reason, "why": f.why} for a, f, _ in tries]}
    if found.label is not None and (reasoning := answer.reasoning or thoughts(answer.text, found.start)):
        record["reasoning"] = reasoning
    if logprobs:        # under a constraint they are of the allowed tokens, not of the teacher's choice
        free = found.label is not None and not forced
        record["label_tokens"], record["logprobs"] = (label_logprobs(answer.tokens, answer.text, found)
                                                      if free else None) or (None, None)
    return record


def log_line(count, total, seconds):
    left = (total - count["lines"]) * seconds / max(1, count["lines"])
    return (f"lines {count['lines']:>7,}/{total:,} | parsed {100 * count['labelled'] / count['answers']:5.1f}% of "
            f"{count['answers']:,} answers | rejected {count['lines'] - count['labelled']:,} | "
            f"{60 * count['lines'] / seconds:,.0f} lines/min | in {count['in'] / seconds:,.0f} tok/s | "
            f"out {count['out'] / seconds:,.0f} tok/s | eta {left:,.0f} s")


def report(output_file, stats):
    """Print the figures of the whole file, of all its processes and starts. stats: of journal.statistics."""
    def share(value):
        return "-" if value is None else f"{100 * value:.1f}%"

    labels = stats["labels"]
    print(f"labels     {stats['labelled']:,} of {stats['lines']:,} lines: "
          + (f"{len(labels):,} different answers" if len(labels) > 20 else
             ", ".join(f"{printable(label, 40)} {n:,}" for label, n in labels.items())))
    print(f"answers    {share(stats['parse_rate'])} of the free ones had a label; {stats['retries']:,} retries, "
          f"{stats['labelled_by_constraint']:,} labels by constraint, {stats['rejected']:,} lines rejected")
    if stats["seconds"]:
        print(f"speed      {stats['lines_per_minute']:,.0f} lines/min over {stats['seconds']:,.1f} s, "
              f"in {stats['prompt_tokens_per_second']:,.0f} tok/s ({share(stats['cached_share'])} cached), "
              f"out {stats['completion_tokens_per_second']:,.0f} tok/s")
    if stats["without_logprobs"]:
        print(f"notice     {stats['without_logprobs']:,} labels have no log-probabilities: by constraint, or their "
              "tokens do not end where the label ends")
    if stats["rejected"]:
        why = ", ".join(f"{n:,} {printable(why, 60)}" for why, n in list(stats["reasons"].items())[:3])
        print(f"notice     {stats['rejected']:,} lines without a label ({why}): {rejected_path(output_file)}")


def open_teacher(args, engine, draw):
    """`answers` of teacher.py by the engine of this name. draw: Sampling."""
    if engine == "openai":
        from distill.teacher_server import open_server
        return open_server(args.model_name, draw, args.base_url, args.concurrency,
                           args.request_timeout, args.server_patience)
    if engine == "transformers":
        from distill.teacher_transformers import open_transformers
        return open_transformers(args.model_name, draw, args.max_model_len, args.batch_size,
                                 args.chunk_size)
    from distill.teacher_vllm import open_vllm
    own = {name: getattr(args, name) for name in ENGINE_FLAGS["vllm"]}
    return open_vllm(args.model_name, draw, max_model_len=args.max_model_len, seed=args.seed,
                     chunk_size=args.chunk_size, **own)


def leave_on_signals():
    """A signal ends this process as an exception would: finished lines are noted, the engine ends its children.

    Set for Ctrl-C as well: a shell starts background processes with it ignored. The first one counts.
    """
    signals = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:       # nohup keeps it from us
        signals.append(signal.SIGHUP)

    def leave(number, frame):
        for other in signals:
            signal.signal(other, signal.SIG_IGN)
        sys.exit(128 + number)
    for number in signals:
        signal.signal(number, leave)


def prepare(args, engine):
    """(parser, conversations, prompt, header of the journals). Raises UserError."""
    labels = tuple(args.labels.split(",")) if args.labels else None
    parser = make_parser(args.parser, args.pattern, labels)
    if args.constrain != "never":
        parser.constraint()
    lines, notices = read_input(args.input_file)
    prompt = teacher.read_prompt(args.prompt_file, args.prompt_role)
    for number, messages in enumerate(lines, 1):
        try:
            teacher.with_prompt(prompt, messages)
        except ValueError as error:
            raise UserError(f"--input_file {args.input_file}: line {number} {error}")
    if prompt.after.strip():
        notices = [*notices, f"{len(prompt.after):,} characters of the prompt stand behind "
                             f"{teacher.PLACE}: they cannot be cached"]
    for notice in notices:
        print(f"notice     {notice}")
    settings = {name: getattr(args, name) for name in LABEL_FLAGS}
    return parser, lines, prompt, describe(lines, prompt, args.model_name, engine, settings)


def main(argv=None):
    args = ARGS or flags.parse(build_parser(), check_flags, argv)
    sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")
    with distributed.one_clear_error():
        leave_on_signals()
        engine = teacher.pick_engine(args.engine, args.base_url)
        shard, shards = shard_of(args.shard)
        parser, lines, prompt, header = prepare(args, engine)

        work, output = Path(args.output_file + ".work"), Path(args.output_file)
        need(not output.exists() or work.is_dir(),
             f"--output_file {output}: is there already, without {work.name} to go on from; give "
             "another name, or move it away")
        checkpoint.prepare_output(output.resolve().parent if args.dry_run else work,
                                  "--output_file")
        records = read_journals(work, header, parser.labels)
        todo = [number for number in range(shard, len(lines), shards) if number not in records]
        print(f"teacher    {args.model_name} ({engine})\n"
              f"lines      {len(lines):,}, {len(records):,} of them finished, {len(todo):,} to do"
              + (f" here (shard {args.shard})" if shards > 1 else ""))
        if args.dry_run:
            return
        if todo:
            journal = Journal(work, shard, shards, header)
            draw = teacher.Sampling(args.max_tokens, args.temperature, args.top_p, args.top_k,
                                    args.logprobs, args.thinking)
            answered = any(row["answers"][-1]["finish_reason"] not in UNANSWERED
                           for row in records.values())
            label_lines(args, open_teacher(args, engine, draw), draw, parser,
                        lambda number: teacher.with_prompt(prompt, lines[number]), todo, journal,
                        answered)
        records = read_journals(work, header, parser.labels)
        if left := len(lines) - len(records):
            print(f"done       {len(todo):,} lines; {left:,} of other shards are not finished yet")
            return
        write_results(output, lines, records, first_id(lines), args.keep_reasoning,
                      pack=args.parser == "whole")
        stats = statistics(records)
        checkpoint.write_text(output.with_suffix(".stats.json"),
                              json.dumps({"made_with": header, **stats}, indent=1))
        report(output, stats)
        print(f"done       {output}")
        why = printable(next(iter(stats["reasons"]), ""), 60)
        need(stats["labelled"],
             f"no line has a label ({why}); see the raw answers in {rejected_path(output)}")


if __name__ == "__main__":
    main()
