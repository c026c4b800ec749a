"""Finished labels on disk: append-only journals, one per process, that a kill at any instant leaves usable.

FOLDER/shard-I-of-N.jsonl: first {"header": {...}}, what the labels depend on, then one record per finished line, synced
to disk every few seconds. The next start cuts off a line that a kill left half written. Every process reads all
journals, also those of another number of shards, so no line is asked twice. A journal with another header is refused.
The results are written, in input order, when all lines are finished.
"""
import base64
import json
import os
import time
import zlib
from collections import Counter
from pathlib import Path

from common.checkpoint import fsync_path, write_atomically
from common.distributed import UserError
from common.text import printable
from core import json_files, run_lock

SYNC_S = 5      # seconds of work that a kill may cost
RECORD = {"id", "label", "by_constraint", "constrained", "began", "at", "prompt_tokens", "completion_tokens",
          "cached_tokens", "answers"}       # of a finished line, at least


class Journal:
    """The journal that this process writes. Raises UserError when another process writes it."""

    def __init__(self, folder, shard, shards, header):
        self.path = Path(folder) / f"shard-{shard}-of-{shards}.jsonl"
        self.lock = run_lock.acquire(folder, "--output_file", self.path.stem)
        self.file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        self.size = self.path.read_bytes().rfind(b"\n") + 1
        os.ftruncate(self.file, self.size)
        self.header, self.pending, self.synced = header, [], time.monotonic()
        fsync_path(folder)

    def add(self, record):
        """Note a record; it is on disk after the next sync, which comes by itself every SYNC_S."""
        if not self.size and not self.pending:      # with the first record: a start that fails before must fix nothing
            self.pending.append(json.dumps({"header": self.header}, ensure_ascii=False) + "\n")
        self.pending.append(json.dumps({**record, "crc32": checksum(record)}, ensure_ascii=False) + "\n")
        if time.monotonic() - self.synced > SYNC_S:
            self.sync()

    def sync(self):
        """Write what is pending to disk; whole, or the journal is as before."""
        data = "".join(self.pending).encode()
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


def checksum(record):
    """CRC-32 of a record as it is written: a flipped bit would be another label, or another line's."""
    return zlib.crc32(json.dumps(record, ensure_ascii=False).encode("utf-8", "surrogatepass"))


def read_journals(folder, header, allowed=None):
    """{line id: record} of all journals; UserError for other headers. allowed: labels, None: any."""
    records = {}
    for path in sorted(Path(folder).glob("shard-*.jsonl")):
        with json_files.open_file(path) as file:
            data = file.read()
        for number, line in enumerate(data.split(b"\n")[:-1], 1):       # the last one may be half written
            try:
                entry = json_files.loads(line)
                if number == 1:
                    compare(folder, dict(entry["header"]), header)
                elif missing := RECORD - entry.keys():
                    raise KeyError(min(missing))
                elif entry.pop("crc32", None) not in (None, checksum(entry)):       # None: of an earlier version
                    raise ValueError("it is not as it was written: another checksum")
                elif allowed and entry["label"] not in (None, *allowed):
                    raise ValueError(f"{entry['label']!r} is not one of the labels")
                else:
                    records.setdefault(entry["id"], entry)
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise UserError(f"{path}: line {number} cannot be read ({printable(error, 200)}); mend the line, or "
                                "move the file away: its lines are labelled again")
    return records


def compare(folder, found, header):
    """Raise UserError with all in which a journal's header differs from this run's."""
    if other := [name for name in header if found.get(name) != header[name]]:
        what = "; ".join(f"{name} was {found.get(name)!r}, is {header[name]!r}" for name in other)
        raise UserError(f"{folder}: holds labels made otherwise ({what}); give the same flags and files, another "
                        "--output_file, or move the folder away to start again")


def write_results(output, conversations, records, first_id, keep_reasoning=False, pack=False):
    """Write the chat JSONL and the rejected file, in input order, each whole or not at all.

    A chat record is {"id": first_id + line, "line": from 0, "messages": [..., assistant]} and, where the teacher gave
    them, "label_tokens" (texts that make up the label) and "logprobs" (of each [[text, log-probability], ...], best
    first). keep_reasoning: thoughts are the answer's "reasoning_content". pack: "logprobs" is one text; see unpack.
    """
    chats, rejected = [], []
    for number, messages in enumerate(conversations):
        record, known = records[number], {"id": first_id + number, "line": number}
        if record["label"] is None:
            rejected.append(known | {"messages": messages, "why": record["answers"][-1]["why"],
                                     "answers": record["answers"]})
            continue
        answer = {"role": "assistant", "content": record["label"]}
        if keep_reasoning and record.get("reasoning"):
            answer["reasoning_content"] = record["reasoning"]
        chat = known | {"messages": [*messages, answer]}
        chat |= {name: record[name] for name in ("label_tokens", "logprobs") if record.get(name)}
        if pack and "logprobs" in chat:
            chat["logprobs"] = packed(chat["logprobs"])
        chats.append(chat)
    for path, rows in ((rejected_path(output), rejected), (output, chats)):
        content = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        write_atomically(path, lambda temporary, content=content: temporary.write_text(content, encoding="utf-8"))


def packed(rows):
    """JSON rows as one text: deflated, in base 64."""
    text = json.dumps(rows, ensure_ascii=False, separators=(",", ":"))
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode()


def unpack(text):
    """packed's rows again; ValueError for another text, or one of more than json_files.LONGEST bytes."""
    try:
        deflated = zlib.decompressobj()
        found = deflated.decompress(base64.b64decode(text, validate=True), json_files.LONGEST)
    except (ValueError, zlib.error):
        raise ValueError("is no packed text")
    if not deflated.eof:
        raise ValueError("is cut off, or too long")
    return json_files.loads(found)


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
        "without_logprobs": sum(row["label"] is not None and "logprobs" in row and not row["logprobs"]
                                for row in rows),
        "seconds": round(busy, 3), "lines_per_minute": 60 * len(rows) / busy if busy else None,
        "prompt_tokens": tokens_in, "prompt_tokens_per_second": tokens_in / busy if busy else None,
        "completion_tokens": tokens_out, "completion_tokens_per_second": tokens_out / busy if busy else None,
        "cached_share": sum(row["cached_tokens"] for row in told) / max(1, sum(row["prompt_tokens"] for row in told))
        if told else None,
    }
