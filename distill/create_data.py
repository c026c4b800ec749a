r"""A teacher's answers: lines or conversations in, chat JSONL out, {"id", "messages": [...]}, in input order.

    python distill/create_data.py --input_file lines.txt --output_file labels.jsonl \
        --model_name Qwen/Qwen3-30B-A3B-Instruct-2507 --max_model_len 8192
    python distill/create_data.py --input_file chats.jsonl --output_file answers.jsonl \
        --prompt_file system.txt --prompt_role system --model_name NAME --base_url http://localhost:8000/v1

The long prompt goes to the teacher only; a student trained on the result learns to do without it. Each line is asked
through the teacher's chat template. An answer without a proper label (labels.py) is asked for again with another
seed; a line that never gets one, or that a server refuses, is in labels.rejected.jsonl with all raw answers and the
reason. Every input line is in one of the two files, known by its number; ids differ between input files.

A line of a .jsonl file is a conversation in any form that train_sft.py reads, "tools" among them, whose last answer, if
it ends with one, is asked for again; or {"text": "..."}, which may have several lines, with "history": [[question,
answer], ...] where there is one.

Rerun the same command to resume: finished lines are in labels.jsonl.work/, and another prompt, model or flag that
matters is refused there. --shard I/N does every N-th line; the process that finds all lines finished writes the results
(launch/create_data_h100x8.sh does that on 8 GPUs).
"""
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))    # common/ stands beside this folder

from common import flags
from common.flags import UserError, need
from distill import teachers
from distill.labels import PARSERS, UNANSWERED, Found, make_parser, read_label, thoughts

TEACHER = "Qwen/Qwen3-30B-A3B-Instruct-2507"
LOG_S = 10                  # seconds between log lines
SYNC_S = 5                  # seconds of work that a kill may cost
REFUSED_IN_A_ROW = 50       # lines, asked in random order: then it is not the lines that the server refuses
PROMPT = Path(__file__).resolve().parent / "prompts" / "language_id.txt"
# flags that a label depends on, beside those that name the lines, the prompt and the teacher
LABEL_FLAGS = ("prompt_role", "parser", "pattern", "labels", "thinking", "max_tokens", "max_model_len", "temperature",
               "top_p", "top_k", "max_retries", "constrain", "seed")
ENGINE_FLAGS = {            # of teachers.open_...
    "vllm": ("max_model_len", "seed", "chunk_size", "tensor_parallel_size", "pipeline_parallel_size",
             "gpu_memory_utilization", "enforce_eager"),
    "openai": ("base_url", "concurrency", "request_timeout", "server_patience"),
    "transformers": ("max_model_len", "chunk_size", "batch_size"),
}
ANY_ENGINE = ("max_model_len", "seed", "chunk_size")        # what another one may be given as well


def build_parser():
    p = flags.Parser("Answer lines of text, or conversations, with a teacher.")
    g = p.add_argument_group("data")
    g.add_argument("--input_file", default="../tinker-cookbook/example-data/multilingual.txt",
                   help="UTF-8 text, one line a sample; or .jsonl of conversations")
    g.add_argument("--output_file", default="./data/prompt_distillation_lang.jsonl",
                   help="chat JSONL to write; .rejected.jsonl, .stats.json beside it")
    g.add_argument("--prompt_file", default=str(PROMPT),
                   help=f"UTF-8 text; for the role user with {teachers.PLACE} once, best at its end")
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
                   f"{TEACHER})")
    g.add_argument("--engine", choices=("auto", "vllm", "openai", "transformers"), default="auto",
                   help="auto: openai with --base_url, else vllm where it is installed, else transformers")
    g.add_argument("--max_model_len", type=int, default=0, help="tokens of prompt and answer; 0: "
                   f"{teachers.LONGEST:,}, or fewer where the model has fewer positions")
    g.add_argument("--thinking", choices=("default", "on", "off"), default="default",
                   help="enable_thinking of the chat template; on: answers without a closed thought do not count")
    g = p.add_argument_group("answers")
    g.add_argument("--max_tokens", type=int, default=1024, help="tokens an answer may have, thoughts included")
    g.add_argument("--temperature", type=float, default=0.15, help="of the draws; 0: the likeliest token, no retries")
    g.add_argument("--top_p", type=float, default=1.0, help="draw from the likeliest tokens of this total probability")
    g.add_argument("--top_k", type=int, default=0, help="draw from this number of likeliest tokens; 0: all")
    g.add_argument("--max_retries", type=int, default=3, help="further attempts for a line, each with another seed")
    g.add_argument("--constrain", choices=("never", "last", "always"), default="never",
                   help="let the engine force the wanted form: at the last attempt, or at all (vllm, openai)")
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
    engine, defaults = teachers.pick_engine(args.engine, args.base_url), build_parser()
    need(args.model_name or engine != "openai", "--base_url needs --model_name, the server's name for its model")
    args.model_name = args.model_name or TEACHER
    flags.at_least_one(args, "max_tokens", "chunk_size", "tensor_parallel_size", "pipeline_parallel_size",
                       "concurrency", "batch_size")
    flags.zero_or_more(args, "temperature", "top_k", "max_retries", "max_model_len", "seed")
    flags.above_zero(args, "request_timeout", "server_patience")
    for flag in ("top_p", "gpu_memory_utilization"):
        need(0 < getattr(args, flag) <= 1, f"--{flag} is {getattr(args, flag)}; it must be more than 0, at most 1")
    need(args.temperature or not args.max_retries,
         "--temperature 0 gives the same answer at every retry: add --max_retries 0")
    need(args.prompt_role != "system" or args.parser != "language" or args.prompt_file == str(PROMPT),
         "--prompt_role system: say what counts as an answer, --parser whole (or regex)")
    need(engine != "openai" or args.base_url, "--engine openai needs --base_url")
    if args.base_url:
        from distill.server import address
        address(args.base_url, "--base_url")
    need(engine != "transformers" or args.constrain == "never", "--constrain needs the engine vllm or a server")
    for other, names in ENGINE_FLAGS.items():
        for flag in names if other != engine else ():
            need(flag in ANY_ENGINE or getattr(args, flag) == defaults.get_default(flag),
                 f"--{flag} is for the engine {other}, not {engine}"
                 + (": there is no vLLM here, see launch/create_data_h100x8.sh; vLLM needs an environment of its own"
                    if (args.engine, other, engine) == ("auto", "vllm", "transformers") else ""))
    need(not (engine == "openai" and args.max_model_len), "--max_model_len is the server's own matter: set it there")
    shard_of(args.shard)


# parsed before torch is imported: --help and a mistake in a flag answer at once
ARGS = flags.parse(build_parser(), check_flags) if __name__ == "__main__" else None

import hashlib
import json
import os
import random
import signal
import time
from collections import Counter, deque
from typing import NamedTuple

from common import distributed
from core import chat, checkpoint, json_files, run_lock
from core.cli import printable
from distill.choices import LINES


class Line(NamedTuple):
    """What one line asks."""
    messages: list          # the last one is the question
    tools: list = None

    def text(self):
        """Equal only for equal lines: for digests."""
        if [message["role"] for message in self.messages] == ["user"] and not self.tools:
            return self.messages[0]["content"]
        return json.dumps([self.messages, self.tools] if self.tools else self.messages)


def read_input(path):
    """([Line], notices). UserError for what is no line or conversation.

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
    return [Line([{"role": "user", "content": line}]) for line in lines], []


def read_conversations(path):
    """read_input of a .jsonl file; each line of it is one record."""
    found, answered, unread = [], 0, set()
    for number, line in enumerate(json_files.read_text(path, "--input_file ").removesuffix("\n").split("\n"), 1):
        try:
            record = json_files.loads(line)
            if not isinstance(record, dict):
                raise ValueError("is no JSON object")
            messages, tools, had_answer = chat.as_question(record)
        except ValueError as error:
            raise UserError(f"--input_file {path}: line {number} {printable(error)}; a line is "
                            '{"messages": [{"role": ..., "content": ...}, ...]} or {"text": "..."}')
        answered += had_answer
        unread |= record.keys() - {"messages", "tools", "text", "history", "conversations"}
        found.append(Line(messages, tools))
    notices = [f"{answered:,} conversations end with an answer, which is asked for again"] if answered else []
    if unread:
        notices.append(f"not read: {printable(', '.join(sorted(map(str, unread))))} of the records")
    return found, notices


def first_id(lines):
    """Id of line 0: a digest of the input, so that records of several input files have different ids, x LINES."""
    return int(digest(*(line.text() for line in lines))[:6], 16) * LINES


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


def describe(lines, prompt, model_name, engine, settings):
    """The header of the journals: all that a label depends on. settings: {flag: value} of LABEL_FLAGS."""
    return {"input_file": f"{len(lines)} lines {digest(*(line.text() for line in lines))}",
            "prompt_file": digest(prompt.before, prompt.after),
            "model_name": model_name, "model": model_digest(model_name) if engine != "openai" else None,
            "engine": engine, **settings}


# ---------------------------------------------------------------------------------------------------------------------
# Journals of finished lines


class Journal:
    """What this process has finished: {"header": ...}, then a record a line, appended and synced every SYNC_S seconds.

    A line that a kill leaves half written is cut off at the next start. Raises UserError when another process writes it.
    """

    def __init__(self, folder, shard, shards, header):
        self.path = Path(folder) / f"shard-{shard}-of-{shards}.jsonl"
        self.lock = run_lock.acquire(folder, "--output_file", self.path.stem)
        self.file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        self.size = self.path.read_bytes().rfind(b"\n") + 1
        os.ftruncate(self.file, self.size)
        self.header, self.pending, self.synced = header, [], time.monotonic()
        checkpoint.fsync(folder)

    def add(self, record):
        """Note a record; it is on disk after the next sync."""
        if not self.size and not self.pending:      # with the first record: a start that fails before must fix nothing
            self.pending.append({"header": self.header})
        self.pending.append(record)
        if time.monotonic() - self.synced > SYNC_S:
            self.sync()

    def sync(self):
        """Write what is pending to disk; whole, or the journal is as before."""
        data = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in self.pending).encode()
        try:
            written = 0
            while written < len(data):
                written += os.write(self.file, data[written:])
            os.fsync(self.file)
            self.size, self.pending = self.size + len(data), []
        except BaseException:           # no room, or a signal that ends the process and syncs once more
            os.ftruncate(self.file, self.size)
            raise
        self.synced = time.monotonic()


def read_journals(folder, header, allowed=None):
    """{line number: record} of all journals, whatever their number; UserError for other headers.

    allowed: labels, None: any.
    """
    records = {}
    for path in sorted(Path(folder).glob("shard-*.jsonl")):
        with json_files.open_file(path) as file:
            data = file.read()
        for number, line in enumerate(data.split(b"\n")[:-1], 1):       # the last one may be half written
            try:
                entry = json_files.loads(line)
                if number == 1:
                    check_header(folder, dict(entry["header"]), header)
                elif allowed and entry["label"] not in (None, *allowed):
                    raise ValueError(f"{entry['label']!r} is not one of the labels")
                else:
                    entry["answers"][-1]["why"], entry["began"], entry["at"]
                    records.setdefault(entry["id"], entry)
            except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
                raise UserError(f"{path}: line {number} cannot be read ({printable(error, 200)}); mend the line, or "
                                "move the file away: its lines are labelled again")
    return records


def check_header(folder, found, header):
    """Raise UserError with all in which a journal's header differs from this run's."""
    if other := [name for name in header if found.get(name) != header[name]]:
        what = "; ".join(f"{name} was {found.get(name)!r}, is {header[name]!r}" for name in other)
        raise UserError(f"{folder}: holds labels made otherwise ({what}); give the same flags and files, another "
                        "--output_file, or move the folder away to start again")


def write_results(output, lines, records, first_id, keep_reasoning=False):
    """Write the chat JSONL and the rejected file, in input order, each whole or not at all.

    A chat record is {"id": first_id + line, "line": from 0, "messages": [..., assistant]}, with "tools" where the line
    has them. keep_reasoning: thoughts are the answer's "reasoning_content".
    """
    chats, rejected = [], []
    for number, line in enumerate(lines):
        record, known = records[number], {"id": first_id + number, "line": number}
        tools = {"tools": line.tools} if line.tools else {}
        if record["label"] is None:
            rejected.append(known | {"messages": line.messages, **tools, "why": record["answers"][-1]["why"],
                                     "answers": record["answers"]})
            continue
        answer = {"role": "assistant", "content": record["label"]}
        if record.get("tool_calls"):
            answer["tool_calls"] = record["tool_calls"]
        if keep_reasoning and record.get("reasoning"):
            answer["reasoning_content"] = record["reasoning"]
        chats.append(known | {"messages": [*line.messages, answer], **tools})
    for path, rows in ((rejected_path(output), rejected), (output, chats)):
        checkpoint.write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def rejected_path(output):
    """labels.jsonl -> labels.rejected.jsonl"""
    return Path(output).with_suffix(".rejected.jsonl")


def statistics(records):
    """Counts per label, parse rate, retries and speed of the records. Rates are per second or minute of work."""
    rows, sessions = list(records.values()), {}
    for row in rows:
        sessions[row["began"]] = max(row["at"], sessions.get(row["began"], 0))
    busy, reached = 0.0, 0.0
    for start, end in sorted(sessions.items()):         # processes side by side count once
        busy, reached = busy + max(0.0, end - max(start, reached)), max(reached, end)
    free = sum(len(row["answers"]) - row["constrained"] for row in rows)
    parsed_free = sum(row["label"] is not None and not row["by_constraint"] for row in rows)
    told = [row for row in rows if row["cached_tokens"] is not None]
    counts = Counter(row["label"] for row in rows if row["label"] is not None)
    tokens_in, tokens_out = (sum(row[name] for row in rows) for name in ("prompt_tokens", "completion_tokens"))
    return {
        "lines": len(rows), "labelled": sum(counts.values()), "rejected": len(rows) - sum(counts.values()),
        "labels": dict(sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))),
        "reasons": dict(Counter(row["answers"][-1]["why"] for row in rows if row["label"] is None).most_common()),
        "parse_rate": parsed_free / free if free else None,         # of the answers that nothing constrained
        "retries": sum(len(row["answers"]) - 1 for row in rows),
        "labelled_by_constraint": sum(row["by_constraint"] for row in rows),
        "seconds": round(busy, 3), "lines_per_minute": 60 * len(rows) / busy if busy else None,
        "prompt_tokens": tokens_in, "prompt_tokens_per_second": tokens_in / busy if busy else None,
        "completion_tokens": tokens_out, "completion_tokens_per_second": tokens_out / busy if busy else None,
        "cached_share": sum(row["cached_tokens"] for row in told) / max(1, sum(row["prompt_tokens"] for row in told))
        if told else None,
    }


def report(output_file, stats):
    """Print the figures of the whole file, of all its processes and starts. stats: of statistics."""
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
    if stats["rejected"]:
        why = ", ".join(f"{n:,} {printable(why, 60)}" for why, n in list(stats["reasons"].items())[:3])
        print(f"notice     {stats['rejected']:,} lines without a label ({why}): {rejected_path(output_file)}")


# ---------------------------------------------------------------------------------------------------------------------
# Asking


def draw_seed(seed, number, attempt):
    """Seed of one attempt for one line, the same in every process and after every restart; 31 bits."""
    return int(digest(f"{seed}/{number}/{attempt}")[:8], 16) >> 1


def find_label(parser, answer, thinking):
    """labels.Found of an Answer. Where the whole answer counts, tool calls without a text do as well."""
    if answer.tool_calls and parser.line is None and answer.finish_reason == "stop":
        return Found(answer.text.strip())
    return read_label(parser, answer.text, answer.finish_reason,
                      must_think=thinking == "on" and not answer.reasoning)


def label_lines(args, answers, draw, parser, asked, todo, journal, answered=False):
    """Ask until every line of `todo` has a label or no attempts left; note each in the journal when it is finished.

    args: its seed, max_retries and constrain, the attempts that are held to the parser's form. answers: of
    open_teacher, with the Sampling `draw`. asked(number): (messages, tools) that a line's teacher gets. answered:
    whether the teacher has answered any line before. Raises UserError when it refuses, or leaves unanswered, one line
    after the other.
    """
    tries = {number: [] for number in todo}         # line: [(Answer, Found, constrained)]
    waiting, start, logged = deque(todo), time.monotonic(), time.monotonic()
    # lines that a server refuses may stand together
    random.Random(args.seed).shuffle(waiting)
    count, held = Counter(), []
    began = time.time()

    def take(n):
        requests = []
        for _ in range(min(n, len(waiting))):
            number = waiting.popleft()
            attempt = len(tries[number])
            forced = args.constrain == "always" or (args.constrain == "last" and attempt == args.max_retries)
            messages, tools = asked(number)
            requests.append(teachers.Request(number, messages, draw_seed(args.seed, number, attempt),
                                             parser.constraint() if forced else None, tools))
        return requests

    def note(records):
        for record in records:
            journal.add(record)
            count["lines"] += 1
            count["labelled"] += record["label"] is not None

    try:
        for request, answer in answers(take):
            mine = tries[request.id]
            found = find_label(parser, answer, draw.thinking)
            mine.append((answer, found, request.constraint is not None))
            count.update({"answers": 1, "in": answer.prompt_tokens, "out": answer.completion_tokens})
            unanswered = answer.finish_reason in UNANSWERED
            if found.label is None and len(mine) <= args.max_retries and not unanswered \
                    and answer.finish_reason != "too_long":
                waiting.append(request.id)
            else:
                record = finished(request.id, tries.pop(request.id), began)
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
                            "finished is kept, rerun the same command to resume")
        note(held)
    finally:
        journal.sync()          # what was finished when a signal or an error came


def finished(number, tries, began):
    """The journal's record of a line, from [(Answer, Found, constrained)] of its attempts.

    began: time when this process began, in seconds.
    """
    answer, found, forced = tries[-1]
    cached = [a.cached_tokens for a, _, _ in tries]
    record = {"id": number, "label": found.label, "by_constraint": forced and found.label is not None,
              "constrained": sum(f for _, _, f in tries), "began": began, "at": time.time(),
              "prompt_tokens": sum(a.prompt_tokens for a, _, _ in tries),
              "completion_tokens": sum(a.completion_tokens for a, _, _ in tries),
              "cached_tokens": None if None in cached else sum(cached),
              "answers": [{"text": a.text, "finish_reason": a.finish_reason, "why": f.why} for a, f, _ in tries]}
    if found.label is not None and answer.tool_calls:
        record["tool_calls"] = answer.tool_calls
    if found.label is not None and (reasoning := answer.reasoning or thoughts(answer.text, max(0, found.start))):
        record["reasoning"] = reasoning
    return record


def log_line(count, total, seconds):
    left = (total - count["lines"]) * seconds / max(1, count["lines"])
    return (f"lines {count['lines']:>7,}/{total:,} | parsed {100 * count['labelled'] / count['answers']:5.1f}% of "
            f"{count['answers']:,} answers | rejected {count['lines'] - count['labelled']:,} | "
            f"{60 * count['lines'] / seconds:,.0f} lines/min | in {count['in'] / seconds:,.0f} tok/s | "
            f"out {count['out'] / seconds:,.0f} tok/s | eta {left:,.0f} s")


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
    """(parser, [Line], prompt, header of the journals). Raises UserError."""
    labels = tuple(args.labels.split(",")) if args.labels else None
    parser = make_parser(args.parser, args.pattern, labels)
    if args.constrain != "never":
        parser.constraint()
    lines, notices = read_input(args.input_file)
    prompt = teachers.read_prompt(args.prompt_file, args.prompt_role)
    for number, line in enumerate(lines, 1):
        try:
            teachers.with_prompt(prompt, line.messages)
        except ValueError as error:
            raise UserError(f"--input_file {args.input_file}: line {number} {error}")
    if prompt.after.strip():
        notices = [*notices, f"{len(prompt.after):,} characters of the prompt stand behind "
                             f"{teachers.PLACE}: they cannot be cached"]
    for notice in notices:
        print(f"notice     {notice}")
    settings = {name: getattr(args, name) for name in LABEL_FLAGS}
    return parser, lines, prompt, describe(lines, prompt, args.model_name, engine, settings)


def main(argv=None):
    args = ARGS or flags.parse(build_parser(), check_flags, argv)
    sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")
    with distributed.one_clear_error():
        leave_on_signals()
        engine = teachers.pick_engine(args.engine, args.base_url)
        shard, shards = shard_of(args.shard)
        parser, lines, prompt, header = prepare(args, engine)

        work, output = Path(args.output_file + ".work"), Path(args.output_file)
        need(not output.exists() or work.is_dir(),
             f"--output_file {output}: is there already, without {work.name} to go on from; give "
             "another name, or move it away")
        checkpoint.prepare_folder(output.resolve().parent if args.dry_run else work,
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
            draw = teachers.Sampling(args.max_tokens, args.temperature, args.top_p, args.top_k, args.thinking)
            answers = teachers.open_teacher(engine, args.model_name, draw, **{
                name: getattr(args, name) for name in ENGINE_FLAGS[engine]})
            answered = any(row["answers"][-1]["finish_reason"] not in UNANSWERED
                           for row in records.values())
            label_lines(args, answers, draw, parser,
                        lambda number: (teachers.with_prompt(prompt, lines[number].messages), lines[number].tools),
                        todo, journal, answered)
        records = read_journals(work, header, parser.labels)
        if left := len(lines) - len(records):
            print(f"done       {len(todo):,} lines; {left:,} of other shards are not finished yet")
            return
        write_results(output, lines, records, first_id(lines), args.keep_reasoning)
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
