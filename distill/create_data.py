"""Generate a teacher's answers: lines or conversations in, chat JSONL out, in input order.

    python distill/create_data.py --input_file lines.txt --output_file labels.jsonl \
        --model_name Qwen/Qwen3-30B-A3B-Instruct-2507

An answer without a valid label (teachers.py) is generated again with another seed. Rejected lines
go to labels.rejected.jsonl, with their answers and the reason. A line of .jsonl is a conversation
in any form that train_sft.py reads; an answer at its end is replaced.

Rerun the same command to resume: finished lines are in labels.jsonl.work/. --shard I/N processes
every N-th line (launch/create_data_h100x8.sh); the last shard to finish writes the results.
"""
import importlib.util
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))    # the folder of core/

from core import cli
from core.cli import ABOVE_0, COUNT, PROBABILITY, UserError, one_line, require
from distill import teachers
from distill.teachers import PARSERS, make_parser, read_label

TEACHER = "Qwen/Qwen3-30B-A3B-Instruct-2507"
LOG_S = 10                  # seconds between log lines
REFUSED_IN_A_ROW = 50       # unanswered lines in random order: then the server is at fault
PROMPT = Path(__file__).resolve().parent / "prompts" / "language_id.txt"
# flags that a label depends on, besides those for the lines, the prompt and the teacher
LABEL_FLAGS = ("prompt_role", "parser", "pattern", "labels", "thinking", "max_tokens",
               "max_model_len", "temperature", "top_p", "top_k", "max_retries", "seed")
ENGINE_FLAGS = {            # of teachers.open_...
    "vllm": ("max_model_len", "chunk_size", "tensor_parallel_size", "pipeline_parallel_size",
             "gpu_memory_utilization", "enforce_eager"),
    "openai": ("base_url", "concurrency", "request_timeout"),
    "transformers": ("max_model_len", "chunk_size", "batch_size")}


def build_parser():
    p = cli.Parser("Generate a teacher's answers to lines of text or to conversations.")
    # data
    p.flag("--input_file", "../tinker-cookbook/example-data/multilingual.txt",
           "UTF-8 text, one sample per line; or .jsonl of conversations")
    p.flag("--output_file", "./data/prompt_distillation_lang.jsonl",
           "chat JSONL to write, next to .rejected.jsonl")
    p.flag("--prompt_file", str(PROMPT), f"prompt; role user: contains {teachers.PLACE} once")
    p.flag("--prompt_role", "user", "message that gets the prompt", choices=("user", "system"))
    p.flag("--parser", "language", "label: language line, --pattern, or whole answer",
           choices=PARSERS)
    p.flag("--pattern", None, "--parser regex: form of the label's line, with the label as group")
    p.flag("--labels", None, "allowed labels, comma between them (default: any, or 13 languages)")
    p.flag("--shard", "0/1", "I/N: only lines with 0-based number modulo N equal to I")
    p.switch("--dry_run", "check flags and files, print the plan and stop")
    # teacher
    p.flag("--model_name", None, f"folder, hub name, or name on a server (default: {TEACHER})")
    p.flag("--engine", "auto", "auto: openai with --base_url, else vllm if installed, else "
           "transformers", choices=("auto", "vllm", "openai", "transformers"))
    p.flag("--max_model_len", 0, f"most tokens of prompt + answer; 0: at most {teachers.LONGEST:,}")
    p.flag("--thinking", "default", "enable_thinking of the chat template; on: reject answers "
           "without a closed thought", choices=("default", "on", "off"))
    # answers
    p.flag("--max_tokens", 1024, "most tokens of an answer, including thoughts", COUNT)
    p.flag("--temperature", 0.15, "sampling temperature; 0: greedy, no retries")
    p.flag("--top_p", 1.0, "sample from likeliest tokens of this total probability", PROBABILITY)
    p.flag("--top_k", 0, "sample from this number of likeliest tokens; 0: all")
    p.flag("--max_retries", 3, "further attempts for a line, each with another seed")
    p.flag("--seed", 0, "seed of the sampling")
    # engines
    p.flag("--chunk_size", 1024, "vllm, transformers: lines per call of the engine", COUNT)
    p.flag("--batch_size", 16, "transformers: lines generated together", COUNT)
    p.flag("--tensor_parallel_size", 1, "vllm: GPUs that share each layer", COUNT)
    p.flag("--pipeline_parallel_size", 1, "vllm: groups of GPUs that share the layers", COUNT)
    p.flag("--gpu_memory_utilization", 0.9, "vllm: share of each GPU's memory, 0 to 1", PROBABILITY)
    p.switch("--enforce_eager", "vllm: no compilation, no CUDA graphs: starts sooner")
    p.flag("--base_url", None, "openai: http://localhost:8000/v1; the key is in OPENAI_API_KEY")
    p.flag("--concurrency", 64, "openai: concurrent requests", COUNT)
    p.flag("--request_timeout", 600.0, "openai: seconds a request; retried twice as long", ABOVE_0)
    return p


def check_flags(args, world_size):
    """Raise UserError for values and combinations that would fail later or have no effect."""
    defaults, vllm = build_parser(), importlib.util.find_spec("vllm")
    if args.engine == "auto":
        args.engine = "openai" if args.base_url else "vllm" if vllm else "transformers"
    openai = args.engine == "openai"
    require(args.base_url or not openai, "--engine openai needs --base_url")
    require(args.model_name or not openai, "--base_url needs --model_name, its name on the server")
    args.model_name = args.model_name or TEACHER
    for other, names in ENGINE_FLAGS.items():
        for flag in names:
            require(flag in ENGINE_FLAGS[args.engine]
                    or getattr(args, flag) == defaults.get_default(flag),
                    f"--{flag} is for the engine {other}, not {args.engine}" + (
                        ": there is no vLLM here, see launch/create_data_h100x8.sh"
                        if other == "vllm" and not vllm else ""))
    require(args.temperature or not args.max_retries, "--temperature 0 needs --max_retries 0")
    require(args.prompt_role == "user" or args.parser != "language",
            "--prompt_role system needs --parser whole or regex")
    shard = re.fullmatch(r"(\d+)/(\d+)", args.shard)
    require(shard and int(shard[1]) < int(shard[2]),
            f"--shard {args.shard}: give I/N with I from 0 to N - 1")


# parsed before torch is imported: --help and wrong flags answer at once
ARGS = cli.parse(build_parser(), check_flags) if __name__ == "__main__" else None

import hashlib
import json
import random
import signal
import time
from collections import Counter

from core import chat, checkpoint, json_files
from distill.chat_data import IDS_PER_FILE

# ---- Requests


def read_input(path, prompt):
    """Return ([(messages, tools or None)], [the same with the teacher's prompt]). UserError."""
    lines, asked = [], []
    # not splitlines: U+2028 does not end a line
    texts = json_files.read_text(path).removesuffix("\n").split("\n")
    for number, text in enumerate(texts, 1):
        record = {"messages": [{"role": "user", "content": text.strip()}]}
        try:
            require(text.strip(), "is empty; delete it")
            if Path(path).suffix == ".jsonl":
                record = json_files.loads(text)
            record = chat.normalize_record(record)
            messages, tools = record["messages"], record.get("tools") or None
            if messages[-1]["role"] == "assistant":     # is asked for again
                messages = messages[:-1]
            require(messages and messages[-1]["role"] in ("user", "tool")
                    and chat.question(messages).strip(),
                    "has no user message with text before the answer asked for")
            asked.append((teachers.add_prompt(prompt, messages), tools))
        except (UserError, ValueError) as error:
            raise UserError(f"--input_file {path}: line {number} {one_line(error)}")
        lines.append((messages, tools))
    return lines, asked


def digest(value):
    """Short SHA-256 of a JSON-able value."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


# ---- Journals of finished lines, one per shard: {"header": ...}, then one record per line


def read_journals(folder, header):
    """{line number: record} of the journals of all shards; UserError if their headers differ."""
    records = {}
    for path in sorted(Path(folder).glob("shard-*.jsonl")):
        # the last line may be incomplete
        for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
            try:
                record = json_files.loads(line)
                if number > 1:
                    records[record["id"]] = record
                    continue
                old = dict(record["header"])
            except (ValueError, LookupError, TypeError) as error:
                raise UserError(f"{path}: line {number} cannot be read ({one_line(error, 200)}); "
                                "repair it, or move the file away: its lines are labelled again")
            changes = [f"{name} was {old.get(name)!r}, is {value!r}"
                       for name, value in header.items() if old.get(name) != value]
            require(not changes, f"{folder}: holds labels made otherwise ({'; '.join(changes)}); "
                    "give the same flags and files, another --output_file, or move the folder away")
    return records


# ---- Asking


def draw_seed(seed, number, attempt):
    """Seed of one attempt for one line, the same in every process and after every restart."""
    return int(digest([seed, number, attempt])[:8], 16) >> 1


def label_lines(args, answers, parser, asked, todo, journal, header, answered):
    """Ask until every line of `todo` has a label or no attempts left; record each in the journal.
    UserError if the teacher answers none of REFUSED_IN_A_ROW lines in a row, or none at all.

    answers: from teachers.open_.... asked: [(messages, tools)] for the teacher. answered: True if
    it answered any line before."""
    records = {number: {"id": number, "label": None, "answers": []} for number in todo}
    waiting, refused, in_a_row = list(todo), [], 0
    random.Random(args.seed).shuffle(waiting)       # refused lines may be neighbours
    count, start = Counter(), time.monotonic()
    last_log = start

    def make_request(number):
        messages, tools = asked[number]
        seed = draw_seed(args.seed, number, len(records[number]["answers"]))
        return teachers.Request(number, messages, seed, tools)

    def finish(number):
        record = records.pop(number)
        count.update({"lines": 1, "labelled": record["label"] is not None})
        # the first record brings the header: before it, nothing depends on these settings
        rows = [record] if Path(journal.name).stat().st_size else [{"header": header}, record]
        with cli.error_names_file(journal.name):
            journal.write("".join(f"{chat.to_json(row)}\n" for row in rows).encode())
            journal.flush()

    def require_answers(limit):
        require(in_a_row < limit, f"the server answered none of {in_a_row} lines in a row ({why}); "
                "finished lines are kept, rerun the same command to resume")

    while waiting:
        requests, waiting = map(make_request, waiting), []      # lazy: few exist at a time
        for (number, *_), answer in answers(requests):
            record = records[number]
            record["label"], why = read_label(parser, answer.text, answer.finish_reason,
                                              args.thinking == "on" and not answer.thought)
            # if the whole answer is the label, tool calls belong to it
            if answer.tool_calls and not parser.line and answer.finish_reason == "stop":
                record |= {"label": answer.text.strip(), "tool_calls": answer.tool_calls}
                why = ""
            record["answers"].append({"text": answer.text, "why": why,
                                      "finish_reason": answer.finish_reason})
            count["answers"] += 1
            if answer.finish_reason == "unanswered":
                refused.append(number)
                in_a_row += 1
                require_answers(REFUSED_IN_A_ROW)
                continue
            in_a_row, answered = 0, True
            again = answer.finish_reason != "too_long" and why and (
                len(record["answers"]) <= args.max_retries)
            waiting.append(number) if again else finish(number)
            if time.monotonic() - last_log > LOG_S:
                last_log = time.monotonic()
                print(log_line(count, len(todo), last_log - start))
    if refused and not answered:
        require_answers(1)
    for number in refused:      # recorded last: after an error the next run asks them again
        finish(number)
    print(log_line(count, len(todo), time.monotonic() - start))


def log_line(count, total, seconds):
    done, left = count["lines"], (total - count["lines"]) * seconds / max(count["lines"], 1)
    return (f"lines {done:>7,}/{total:,} | rejected {done - count['labelled']:,} | "
            f"{count['answers']:,} answers | eta {left:,.0f} s")


# ---- Results


def write_results(output, lines, records):
    """Write the chat JSONL of {"id", "line": from 0, "messages", ...} and the rejected file.
    UserError if no line has a label."""
    labelled, rejected = [], []
    # id of line 0: digest of the input x IDS_PER_FILE, so different inputs have different ids
    first = int(digest(lines)[:6], 16) * IDS_PER_FILE
    for number, (messages, tools) in enumerate(lines):
        record = records[number]
        row = {"id": first + number, "line": number, "messages": messages}
        row |= {"tools": tools} if tools else {}
        if record["label"] is None:
            why = record["answers"][-1]["why"]
            rejected.append(row | {"why": why, "answers": record["answers"]})
            continue
        answer = {"role": "assistant", "content": record["label"]}
        answer |= {"tool_calls": record["tool_calls"]} if record.get("tool_calls") else {}
        labelled.append(row | {"messages": [*messages, answer]})
    rejected_path = output.with_suffix(".rejected.jsonl")
    for path, rows in ((rejected_path, rejected), (output, labelled)):
        checkpoint.write_text(path, "".join(chat.to_json(row) + "\n" for row in rows))
    print(f"labels     {len(labelled):,} of {len(lines):,} lines")
    if rejected:
        print(f"notice     {rejected_path} has {len(rejected):,} lines")
    print(f"done       {output}")
    require(labelled, f"no line has a label; see the raw answers in {rejected_path}")


def main(argv=None):
    args = ARGS or cli.parse(build_parser(), check_flags, argv)
    # on SIGTERM exit as Python does on Ctrl-C, so that the engine ends its child processes
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))

    # requests and teacher
    parser = make_parser(args.parser, args.pattern, args.labels and tuple(args.labels.split(",")))
    prompt, weights = teachers.read_prompt(args.prompt_file, args.prompt_role), None
    lines, asked = read_input(args.input_file, prompt)
    if args.engine != "openai" and Path(args.model_name).is_dir():
        from distill.causal_lm import fingerprint_weights
        weights = fingerprint_weights(args.model_name)
    header = {"input_file": f"{len(lines)} lines {digest(lines)}", "prompt_file": digest(prompt),
              "model_name": args.model_name, "model": weights, "engine": args.engine,
              **{name: getattr(args, name) for name in LABEL_FLAGS}}

    # finished records
    work, output = Path(args.output_file + ".work"), Path(args.output_file)
    require(not output.exists() or work.is_dir(), f"--output_file {output}: exists already, but "
            f"not {work.name}, from which to resume; give another name, or move it away")
    checkpoint.prepare_folder(output.resolve().parent if args.dry_run else work, "--output_file")
    shard, shards = map(int, args.shard.split("/"))
    records = read_journals(work, header)
    todo = [number for number in range(shard, len(lines), shards) if number not in records]
    print(f"teacher    {args.model_name} ({args.engine})\n"
          f"lines      {len(lines):,}, {len(records):,} of them finished, {len(todo):,} to do"
          + (f" here (shard {args.shard})" if shards > 1 else ""))
    if args.dry_run:
        return

    if todo:
        name = f"shard-{shard}-of-{shards}"
        checkpoint.lock_folder(work, "--output_file", name)     # released at the end of the process
        draw = teachers.Sampling(args.max_tokens, args.temperature, args.top_p, args.top_k,
                                 {} if args.thinking == "default" else
                                 {"enable_thinking": args.thinking == "on"})
        answers = getattr(teachers, f"open_{args.engine}")(args.model_name, draw, **{
            name: getattr(args, name) for name in ENGINE_FLAGS[args.engine]})
        answered = any(record["answers"][-1]["finish_reason"] != "unanswered"
                       for record in records.values())
        path = work / f"{name}.jsonl"
        with open(path, "ab") as journal:
            journal.truncate(path.read_bytes().rfind(b"\n") + 1)    # a kill may have cut off a line
            label_lines(args, answers, parser, asked, todo, journal, header, answered)
        records = read_journals(work, header)
    if left := len(lines) - len(records):
        print(f"done       {len(todo):,} lines; {left:,} of other shards are not finished yet")
        return
    write_results(output, lines, records)


if __name__ == "__main__":
    main()
