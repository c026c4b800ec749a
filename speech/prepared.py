"""Folders that prepare_tts.py makes: a table of tokenised samples, the codes of their audio, and what they fit to."""
import hashlib
import json
import os
from dataclasses import asdict
from pathlib import Path

import numpy as np

from core import checkpoint
from core.cli import UserError
from core.dist import error_names_file, rank0
from core.problems import LIST
from core import json_files
from speech.code_cache import codec_fingerprint
from speech.dataset import PREPARED, TABLE, Table, is_prepared, keep_prepared, new_table
from speech.rows import flag_of


def tokenizer_fingerprint(tokenizer, ids):
    """16 hex digits of a tokenizer's words and of the ids that the trainer uses."""
    text = json.dumps([sorted(tokenizer.get_vocab().items()), asdict(ids)])
    return hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()[:16]


def write(folder, table, tokenizer, ids, codec_dir, reading, report):
    """Finish a folder whose table is there: prepared.json. report: JSON-able, what people want to know of the data."""
    codes = json.loads((Path(table) / "codes.json").read_text())
    shards = [Path(os.path.normpath(Path(table) / codes["folder"] / name)) for name in codes["shards"]]
    sizes = {str(path.relative_to(folder) if path.is_relative_to(folder) else path): path.stat().st_size
             for path in [*sorted(Path(table).iterdir()), *shards]}
    sums = {path.relative_to(folder).as_posix(): checkpoint.sha256(path) for path in Path(table).iterdir()}
    about = {"table": Path(table).name, "files": sizes, "sha256": sums, "tokenizer": tokenizer_fingerprint(tokenizer, ids),
             "codec": codec_fingerprint(codec_dir), "reading": asdict(reading), "report": report}
    checkpoint.write_atomically(Path(folder) / PREPARED, lambda path: path.write_text(json.dumps(about, indent=1) + "\n"))


def look_into(folder):
    """The contents of prepared.json of a folder that has all its files. Raises UserError."""
    def need(fits, why):
        if not fits:
            raise UserError(f"{folder}: is damaged, {why}; copy it again from where it was prepared, or prepare it "
                            "again")
    try:
        about = json_files.read_object(Path(folder) / PREPARED)
    except UserError as error:
        need(False, str(error))
    for name, kind in (("table", str), ("tokenizer", str), ("codec", str), ("reading", dict)):
        need(isinstance(about.get(name), kind), f"{PREPARED} has no {name!r}")
    need((Path(folder) / about["table"]).is_dir(), f"{about['table']} is not there")
    need(isinstance(about.get("files"), dict), f"{PREPARED} has no list 'files'")
    for name, size in about["files"].items():
        path = Path(folder) / name
        need(path.is_file(), f"{name} is not there")
        need(path.stat().st_size == size, f"{name} has {path.stat().st_size} bytes, not {size}")
    for name, digest in about.get("sha256", {}).items():       # of the table; codes have checksums of their own
        need(checkpoint.sha256(Path(folder) / name) == digest, f"{name} has another checksum than when it was made")
    return about


def open_prepared(world, sources, tokenizer, ids, codec_dir, output_dir):
    """Table of prepared folders, on every rank; several are joined into one in output_dir. Raises
    UserError.

    sources: rows.Sources, whose reading must have the defaults or what the folders were prepared
    with.
    """
    paths, reading = [path for path, *_ in sources.all()], sources.reading

    def check():
        for path in paths:
            if not is_prepared(path):
                raise UserError(f"{path}: is not prepared, and other data here are; prepare it too "
                                "(prepare_tts.py)")
        words, codec = tokenizer_fingerprint(tokenizer, ids), codec_fingerprint(codec_dir)
        abouts = [look_into(path) for path in paths]
        for path, about in zip(paths, abouts):
            for what, mine, flag in (("tokenizer", words, "--model_path"),
                                     ("codec", codec, "--audio_tokenizer_path")):
                if about.get(what) != mine:
                    raise UserError(f"{path}: was prepared with another {what} than that of "
                                    f"{flag}; prepare it again")
            for name, default in asdict(type(reading)()).items():
                value, was = getattr(reading, name), about["reading"].get(name, default)
                # a default may stand for any value, but of the texts, as checkpoints keep that
                fits = (was,) if name == "normalize" else (default, was)
                if value not in fits and name not in ("seed", "lone_reference"):
                    was, value = ({True: "on", False: "off"}.get(x, x) for x in (was, value))
                    raise UserError(f"{path}: was prepared with {flag_of(name)} {was}, not "
                                    f"{value}; drop the flag, or prepare it again")
        found = [str(Path(path) / about["table"]) for path, about in zip(paths, abouts)]
        (Path(output_dir) / LIST).unlink(missing_ok=True)       # of the run before
        if len(found) > 1:
            keep_prepared(output_dir)
            checkpoint.remove_named(output_dir, TABLE)
            folder = new_table(output_dir)
            join(found, folder)
            found = [str(folder)]
        print(f"data       prepared: {', '.join(map(str, paths))}", flush=True)
        tables = [Path(path) / about["table"] for path, about in zip(paths, abouts)]
        return found[0], [json.loads((table / "codes.json").read_text())["sources"]
                          for table in tables]

    folder, parts = rank0(world, check)
    table, before, table.sources = Table(folder), 0, []
    for part, (_, weight, held_out) in zip(parts, sources.all()):
        for source in part:
            table.sources.append({
                **source, "weight": source["weight"] * weight, "first": before + source["first"],
                "stop": before + source["stop"], "held_out": source["held_out"] or held_out})
        before = table.sources[-1]["stop"]
    return table


def join(folders, folder):
    """Tables -> one table in a new folder, whose samples stand behind each other; codes stay where they are."""
    tables = [Table(path) for path in folders]
    shards = [[os.path.abspath(os.path.join(t.reader.folder, name)) for name in t.reader.shards] for t in tables]
    behind = {"clips": [len(t.where) for t in tables], "token_offsets": [len(t.tokens) for t in tables],
              "clip_offsets": [len(t.clips) for t in tables], "name_offsets": [len(t.names) for t in tables]}
    columns = [name for name, value in vars(tables[0]).items() if isinstance(value, np.ndarray)]
    Path(folder).mkdir(parents=True)
    for name in columns:
        shift, parts = 0, []
        for i, table in enumerate(tables):
            part = getattr(table, name)
            if name == "where":
                part = part + np.array([sum(map(len, shards[:i])), 0, 0, 0])
            elif name in behind:
                part = part[bool(i and name.endswith("offsets")):] + shift
                shift += behind[name][i]
            parts.append(part)
        with error_names_file(folder):
            np.save(Path(folder) / f"{name}.npy", np.concatenate(parts).astype(parts[0].dtype, copy=False))
    codes = {"folder": os.path.abspath(tables[0].reader.folder), "shards": sum(shards, []), "sources": []}
    (Path(folder) / "codes.json").write_text(json.dumps(codes))
