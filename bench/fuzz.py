"""Broken files of every format against every reader: each must give its content, or one line that names the file.

    python bench/fuzz.py --minutes 10           # all formats in turn; writes bench/results/fuzz-cpu.json
    python bench/fuzz.py --format chats --seed 7

A file begins as a good one. Values in it are replaced by others of any type, deleted or doubled; the text is cut off,
bytes in it are changed, and snippets that break readers are put in (thousands of brackets or digits, half characters,
terminal escapes, megabytes). A failure is printed with the smallest file that hypothesis finds for it. Exit status 1
if there was one. tests/test_broken_files.py runs some seconds of it.
"""
import argparse
import contextlib
import copy
import hashlib
import io
import json
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import hypothesis.configuration
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from bench import measure
from common import report, resume, run
from common.flags import UserError
from common.text import HIDDEN, error_text
from core import chat, json_files, metrics
from distill import create_data, teachers
from distill import server as servers
from speech.data.conversations import canonical_sample
from speech.data.rows import read_samples
from speech.model.labels import conversation_pieces
from speech.voice.generate import canonical_prompt

from core import adapters  # isort: skip
from diffusion import make_problems  # isort: skip
from diffusion.problems import Problem, read_problems  # isort: skip

SECONDS = 20        # that one file may take; more counts as a hang
LONGEST = 20_000    # characters of an error
LONGEST_PROBLEM = 8000      # of what is said of one sample


# ---------------------------------------------------------------------------------------------------------------------
# What may be said of a file


def check_said(text, *parts, longest=LONGEST):
    """A message for the terminal: bounded, printable, one line and indented ones, with all parts in it."""
    first, *rest = text.split("\n")
    assert len(text) <= longest, f"{len(text)} characters"
    assert not HIDDEN.search(text.replace("\n", " ")), ascii(text[:500])
    assert all(line.startswith("  ") for line in rest), text[:500]
    for part in parts:
        assert str(part) in text, (part, text[:500])


def check_problems(problems, path):
    """Lines about samples: one line each, which names the file and the entry."""
    for problem in problems:
        assert "\n" not in problem
        check_said(problem, path, longest=LONGEST_PROBLEM)
        check_said(problem.name, path, longest=LONGEST_PROBLEM)


def check_texts(*texts):
    """What a tokenizer gets."""
    for text in texts:
        text.encode()


# ---------------------------------------------------------------------------------------------------------------------
# Readers: read(folder, data) writes data into the empty folder and reads it as the scripts do; UserError is fine


def chatml(folder, data, name="data.json"):
    (folder / "a.wav").touch()
    path = folder / name
    path.write_bytes(data)
    for make in (canonical_sample, canonical_prompt):
        problems = []
        with contextlib.nullcontext() if make is canonical_sample else contextlib.suppress(UserError):
            for sample in read_samples(path, problems, make):
                check_said(sample.name, path, longest=LONGEST_PROBLEM)
                check_texts(*(part for part, _ in conversation_pieces(sample) if isinstance(part, str)))
        check_problems(problems, path)


def chatml_lines(folder, data):
    chatml(folder, data, "data.jsonl")


def metadata(folder, data):
    for name in ("a.wav", "b.wav"):
        (folder / name).touch()
    (folder / "a.txt").write_text("words")
    (folder / "metadata.json").write_bytes(data)
    for in_system in (False, True):
        problems = []
        for sample in read_samples(folder, problems, ref_in_system=in_system):
            check_texts(*(part for part, _ in conversation_pieces(sample) if isinstance(part, str)))
        check_problems(problems, folder)


def chats(folder, data):
    path, problems = folder / "chats.jsonl", []
    path.write_bytes(data)
    for _, record in chat.read_records(path, problems):
        check_texts(*(message["content"] for message in record["messages"]))
        chat.group_key(record)
    check_problems(problems, path)


def block_problems(system):
    def read(folder, data):
        path, bad = folder / "problems.json", []
        path.write_bytes(data)
        for problem in read_problems(path, "train", system, True, bad):
            check_texts(problem.question, problem.solution, problem.answer, problem.plan)
            check_said(problem.name, path, longest=LONGEST_PROBLEM)
        check_problems(bad, path)
    return read


def journals(folder, data):
    (folder / "shard-0-of-1.jsonl").write_bytes(data)
    create_data.read_journals(folder, HEADER)


def plans(folder, data):
    (folder / "plans.jsonl").write_bytes(data)
    make_problems.read_teacher(folder / "plans.jsonl", ASKED)


def server(folder, data):
    """What a server answers; ask_server tries again after these errors."""
    try:
        answer = teachers.read_answer(data)
        json.dumps(answer.text, ensure_ascii=False).encode()
    except servers.MALFORMED as error:
        check_said(error_text(servers.explain(error)))


def manifest(folder, data):
    (folder / "checkpoint-3" / "trainer_state").mkdir(parents=True)
    (folder / "checkpoint-3" / "manifest.json").write_bytes(data)
    (folder / "checkpoint-3" / "trainer_state" / "state.json").write_text("{}")
    said = []
    resume.newest_whole(folder, said.append)
    for line in said:
        check_said(error_text(line), folder / "checkpoint-3")
    report.read_checkpoints(folder)


def state(folder, data):
    """A state whose checksum is right, so that the checkpoint counts as whole unless its content is wrong."""
    path = folder / "checkpoint-3" / "trainer_state" / "state.json"
    path.parent.mkdir(parents=True)
    path.write_bytes(data)
    files = {"trainer_state/state.json": {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}}
    (folder / "checkpoint-3" / "manifest.json").write_text(json.dumps({"step": 3, "files": files}))
    (folder / "metrics.jsonl").write_text('{"step": 3, "train/loss": 1.0}\n')
    report.page([report.read_run(folder)], [], [])
    resume, meta = run.find_resume(folder, "auto", {"seed": 1})
    assert resume is None or run.position(meta)["step"] == meta["step"]


def log(folder, data):
    path = folder / "metrics.jsonl"
    path.write_bytes(data)
    rows, wrong = metrics.read_rows(path)
    check_said(wrong)
    "".join(json.dumps(row) for row in rows)
    report.page([report.read_run(folder)], [], []).encode("utf-8", "replace")


def starts(folder, data):
    (folder / "metrics.jsonl").write_text('{"step": 1, "train/loss": 2.0, "train/epoch": 0.5}\n')
    (folder / "starts.jsonl").write_bytes(data)
    found = report.read_run(folder)
    report.page([found, found], [], []).encode("utf-8", "replace")


def evaluation(folder, data):
    (folder / "evaluation.json").write_bytes(data)
    report.evaluation_tables([report.read_evaluation(folder / "evaluation.json")])


def adapter(folder, data):
    (folder / "adapter_config.json").write_bytes(data)
    adapters.check_config(folder)


SAMPLE = {"messages": [{"role": "system", "content": "Speak."},
                       {"role": "user", "content": [{"type": "text", "text": "Said before."},
                                                    {"type": "audio", "audio_url": "a.wav", "offset": 0.5,
                                                     "duration": 2.0}, "Please generate speech: Hello: you."]},
                       {"role": "assistant", "content": [{"type": "text", "text": "Hello: you."},
                                                         {"type": "audio", "audio_url": "a.wav"}]}],
          "start_index": 0, "speaker": "anna", "scene": "a room", "misc": {"sample_id": "s1", "ref_transcript": "Said"}}
META = {"samples": [{"id": "s1", "audio_file": "a.wav", "transcript_file": "a.txt", "scene": "quiet_room"},
                    {"id": "s2", "audio_file": "a.wav", "transcript_file": "a.txt", "duration": 2.5,
                     "task_type": "zero_shot_voice_cloning", "ref_audio_file": "b.wav", "ref_transcript": "Before."},
                    {"id": "s3", "audio_file": "a.wav", "transcript_file": "a.txt", "speaker_id": "anna",
                     "task_type": "multi_speaker_voice_cloning", "ref_speakers": [
                         {"speaker_tag": "[A]", "ref_audio_file": "b.wav", "ref_transcript": "Before."}]}]}
CHAT = {"id": 3, "messages": [{"role": "system", "content": "Short."}, {"role": "user", "content": "Which?"},
                              {"role": "assistant", "content": "en", "reasoning_content": "It is English."}]}
GSM8K = {"question": "Anna has 2 coins and gets 3.", "answer": "She has 2+3 = <<2+3=5>>5 coins.\n#### 5"}
HDP = {"id": "q1", "question": "Anna has 2 coins.", "plan": "Add them.", "execution": "2+3 = 5", "answer": "5"}
HEADER = {"input_file": "2 lines", "seed": 0}
RECORD = {"id": 0, "label": "en", "by_constraint": False, "constrained": 0, "began": 1.0, "at": 2.0, "prompt_tokens": 9,
          "completion_tokens": 2, "cached_tokens": None,
          "answers": [{"text": "en", "finish_reason": "stop", "why": ""}]}
ASKED = [Problem("p line 1", GSM8K["question"], GSM8K["answer"], "5")]
PLANNED = {"id": 0, "messages": [{"role": "user", "content": make_problems.teacher_line(ASKED[0])},
                                 {"role": "assistant", "content": "Add the coins."}]}
ANSWER = {"choices": [{"message": {"content": "Final Answer: en", "reasoning_content": None}, "finish_reason": "stop",
                       "logprobs": {"content": [{"token": "en", "top_logprobs": [{"token": "en", "logprob": -0.1}]}]}}],
          "usage": {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}}
FILE = {"bytes": 2, "sha256": "ab" * 32}
MANIFEST = {"step": 3, "files": {"trainer_state/state.json": FILE, "model.safetensors": FILE}}
STATE = {"step": 3, "epoch": 0, "first": 2, "identity": {"seed": 1}, "validation": None, "best_step": 3,
         "best_loss": 1.5, "skipped": 0, "unlogged": [0.0, 1.0],
         "args": {"max_steps": 9, "num_train_epochs": 2, "logging_steps": 1, "model_path": "a/b", "use_lora": True}}
ROW = {"step": 3, "train/loss": 2.5, "train/epoch": 0.5, "train/step_seconds": 0.1, "eval/audio_loss_codebook_1": None}
START = {"time": 1.7e9, "step": 3, "ranks": 2, "host": "node1", "config": STATE["args"]}
EVALUATION = {"name": "spoken", "metrics": {"wer": 0.1, "mcd": None}, "samples": [{"name": "0000", "wer": 0.5}],
              "settings": {"asr_model": None}}
ADAPTER = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "bias": "none",
           "init_lora_weights": True, "modules_to_save": None, "use_dora": False}

# name: (reader, good entries, the forms that a file of them may have)
FORMATS = {
    "chatml": (chatml, [SAMPLE], ("list", "lines", "object")), "chatml_lines": (chatml_lines, [SAMPLE], ("lines",)),
    "metadata": (metadata, [META], ("object",)), "chats": (chats, [CHAT], ("lines",)),
    "gsm8k": (block_problems("gsm8k"), [GSM8K], ("list", "lines")), "hdp": (block_problems("hdp"), [HDP], ("list",)),
    "journals": (journals, [{"header": HEADER}, RECORD], ("lines",)), "plans": (plans, [PLANNED], ("lines",)),
    "server": (server, [ANSWER], ("object",)), "manifest": (manifest, [MANIFEST], ("object",)),
    "state": (state, [STATE], ("object",)), "metrics": (log, [ROW, ROW | {"step": 4}], ("lines",)),
    "starts": (starts, [START], ("lines",)), "evaluation": (evaluation, [EVALUATION], ("object",)),
    "adapter": (adapter, [ADAPTER], ("object",)),
}

# ---------------------------------------------------------------------------------------------------------------------
# Broken files

# stand-ins for what json.dumps cannot write
RAW = {'"@digits"': "9" * 5000, '"@minus"': "-" + "7" * 25, '"@deep"': "[" * 3000 + "]" * 3000, '"@objects"':
       '{"a":' * 150 + "1" + "}" * 150, '"@huge"': "1e999", '"@tiny"': "1e-320", '"@twice"': '{"step": 1, "step": "x"}'}
TEXTS = ["", " ", "\n", "\x1b[2J\x1b[Herror: forged", "x\nerror: forged", "half \ud83d", "a\x00b", "\u202egnp.exe",
         "http://anna:secret@host/v1", "../" * 20, "/dev/zero", "n" * 5000, "<|eot_id|>", "\u2028", "1e5", "NaN",
         *(name.strip('"') for name in RAW)]
SNIPPETS = [b"[" * 5000, b"]", b"}", b",", b'"', b"\xff", b"\xed\xa0\x80", b"\x00", b"\xef\xbb\xbf", b"\r", b"\n\n",
            b"\\ud800", b"9" * 5000, b"NaN", b"-", b"1e999", b"\\", b'{"', b"\x1b]0;x\x07"]

texts = st.sampled_from(TEXTS) | st.text(st.characters(codec=None), max_size=12)
numbers = st.integers(-2**66, 2**66) | st.floats() | st.sampled_from([0, 1, -1, 3])
values = st.recursive(st.none() | st.booleans() | numbers | texts, lambda inner: st.lists(inner, max_size=3) |
                      st.dictionaries(texts, inner, max_size=3), max_leaves=5)


def places(value):
    """[(list or object, index or key)] of every value inside a value."""
    found, waiting = [], [value]
    while waiting:
        holder = waiting.pop()
        keys = list(holder) if isinstance(holder, dict) else range(len(holder))
        found += [(holder, key) for key in keys]
        waiting += [holder[key] for key in keys if isinstance(holder[key], (dict, list))]
    return found


@st.composite
def broken(draw, good, forms):
    """Bytes of a file."""
    entries = copy.deepcopy(good) * draw(st.integers(1, 2))
    for _ in range(draw(st.integers(0, 3))):
        known = places(entries)
        if not known:
            break
        holder, key = known[draw(st.integers(0, len(known) - 1))]
        change = draw(st.sampled_from(["value", "value", "delete", "rename", "add"]))
        if change == "delete":
            del holder[key]
        elif change == "value":
            holder[key] = draw(values)
        elif isinstance(holder, dict):
            holder[draw(texts)] = holder.pop(key) if change == "rename" else draw(values)
        else:
            holder.insert(key, draw(values))
    form, ascii_only = draw(st.sampled_from(forms)), draw(st.booleans())

    def dump(value, **options):
        text = json.dumps(value, ensure_ascii=ascii_only, **options)
        for stand_in, raw in RAW.items():
            text = text.replace(stand_in, raw)
        return text.encode("utf-8", "surrogatepass")
    if form == "lines":
        data = b"".join(dump(entry) + b"\n" for entry in entries)
    else:
        whole = entries if form == "list" else entries[0] if entries else {}
        data = dump(whole, indent=draw(st.sampled_from([None, 1])))
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 2]))):
        at = draw(st.integers(0, len(data)))
        snippet = draw(st.sampled_from(SNIPPETS) | st.binary(max_size=3))
        data = draw(st.sampled_from([data[:at], data[:at] + snippet + data[at:], data[:at] + snippet + data[at + 1:]]))
    return data


def overdue(*_):
    raise AssertionError(f"hangs: more than {SECONDS} s")


def check(name, data, endings):
    """Read one file; AssertionError, or whatever the reader raises, when it is not handled as it should be.

    endings: a Counter that takes how it ended.
    """
    reader = FORMATS[name][0]
    with tempfile.TemporaryDirectory() as folder:
        before = signal.signal(signal.SIGALRM, overdue)
        signal.alarm(SECONDS)
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                reader(Path(folder), data)
            endings["read"] += 1
        except UserError as error:
            check_said(error_text(f"error: {error}"), folder)
            endings["refused"] += 1
        finally:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, before)


def run_format(name, examples, number=None):
    """{how files ended: how many} of so many broken files of a format. number: the seed; None: always the same files.

    Raises what `check` raises for the smallest file that hypothesis finds.
    """
    endings = Counter()
    hypothesis.configuration.set_hypothesis_home_dir(tempfile.gettempdir())

    @settings(max_examples=examples, deadline=None, database=None, derandomize=number is None, print_blob=False,
              phases=(Phase.generate, Phase.shrink), suppress_health_check=list(HealthCheck))
    @given(broken(*FORMATS[name][1:]))
    def one(data):
        check(name, data, endings)
    (one if number is None else seed(number)(one))()
    return endings


# ---------------------------------------------------------------------------------------------------------------------


def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    p.add_argument("--minutes", type=float, default=10.0, help="a turn that has begun is finished")
    p.add_argument("--format", choices=FORMATS, nargs="+", default=list(FORMATS), help="default: all")
    p.add_argument("--examples", type=int, default=300, help="files of a format before the next one's turn")
    p.add_argument("--seed", type=int, help="of the first turn (default: drawn)")
    p.add_argument("--results_dir", default=measure.RESULTS)
    args = p.parse_args(argv)
    number = random.SystemRandom().randrange(2**32) if args.seed is None else args.seed
    totals, failed = {name: Counter() for name in args.format}, dict.fromkeys(args.format, 0)
    start, first = time.monotonic(), number
    while time.monotonic() - start < 60 * args.minutes:
        for name in args.format:
            try:
                totals[name].update(run_format(name, args.examples, number))
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt):
                    raise
                failed[name] += 1
                print(f"{name}, seed {number}: {type(error).__name__}: {ascii(str(error))[:500]}\n"
                      f"  {ascii(getattr(error, '__notes__', ''))[:1500]}", flush=True)
        number += 1
    result = measure.new_report("Do the readers handle every broken file?", torch.device("cpu"),
                                measure.command("fuzz", argv))
    result["seeds"], result["seconds"] = [first, number - 1], round(time.monotonic() - start)
    result["cpu_seconds"] = round(time.process_time())
    rows = [[name, sum(totals[name].values()), totals[name]["read"], totals[name]["refused"], failed[name]]
            for name in args.format]
    rows.append(["all", *(sum(row[i] for row in rows) for i in range(1, 5))])
    result["tables"]["formats"] = {"columns": ["format", "files", "read", "refused as a whole", "failures"],
                                   "rows": rows}
    for row in rows:
        print(f"{row[0]:<14} {row[1]:>9,} files, {row[2]:>9,} read, {row[3]:>9,} refused, {row[4]:>3} failures")
    print(measure.write_report("fuzz", result, args.results_dir))
    sys.exit(any(failed.values()))


if __name__ == "__main__":
    main()
