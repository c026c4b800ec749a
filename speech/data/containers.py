"""Audio inside other files: members of tars (WebDataset), rows of parquet and arrow files (Hugging Face datasets).

Such a clip's path is FILE::PLACE::NAME, or FILE::PLACE::COLUMN/NAME where --columns names the audio. PLACE is
START+SIZE, bytes of a tar, or GROUP.ROW, a row of a row group of a parquet file or of a record batch of an arrow file.
Columns and tars are read piece by piece; pyarrow is imported here.
"""
import os
import tarfile

from common import hub
from common.distributed import UserError
from core.json_files import LONGEST, SKIPPED, loads
from speech.data.columns import (
    AUDIO_FILES,
    OTHER_AUDIO,
    TEXTS,
    check_given,
    find_columns,
    unknown_columns,
)
from speech.data.conversations import MEMBER, PLACE, BadSample

_group = {}         # the row group that this process read last, {(file, group): column of bytes}


def read_bytes(path):
    """The bytes of an audio file in another file. Raises OSError and ValueError."""
    found = PLACE.match(os.fspath(path))
    file, start, size, group, row = found.groups()
    if start:
        with hub.open_file(file) as f:
            if int(start) + int(size) > f.seek(0, os.SEEK_END):     # by hand: no tar says so
                raise ValueError(f"the file ends before byte {start}+{size}")
            f.seek(int(start))
            return f.read(int(size))
    column, _, _ = os.fspath(path)[found.end():].rpartition("/")
    if (file, group) not in _group:
        _group.clear()
        kind, table = _open(file)
        name = column or _audio_column(kind, table, file)
        _group[file, group] = _read(kind, table, int(group), [name]).column(0)
    value = _group[file, group][int(row)].as_py()
    data = value["bytes"] if isinstance(value, dict) else value
    if data is None:
        raise ValueError("the row has no bytes of audio")
    return data


def about(kind, path, given):
    """What stands in the first of some shards, for people."""
    if kind == "tar":
        return "texts and audio of one name are a sample"
    opened = _open(path)
    columns = find_columns(_schema(*opened).names, given)
    return ", ".join([f"audio = {_audio_column(*opened, path, given)!r}", *(
        f"{meaning} = {name!r}" for meaning, name in columns.items() if meaning != "audio")])


# ---------------------------------------------------------------------------------------------------------------------
# Columns


def _open(path):
    """(kind, parquet file, arrow file or list of record batches) of a path. Raises UserError."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise UserError(f"{path}: reading parquet and arrow files needs pyarrow: pip install pyarrow")
    with hub.open_file(path) as f:
        magic = f.read(6)
    try:
        if magic[:4] == b"PAR1":
            path = hub.here(path)
            return "parquet", parquet.ParquetFile(hub.open_file(path) if hub.is_there(path) else path)
        source = pyarrow.memory_map(path)
        if magic == b"ARROW1":
            return "file", pyarrow.ipc.open_file(source)
        stream = pyarrow.ipc.open_stream(source)
        return "stream", [stream.schema, *stream]
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path}: cannot be read ({str(error).splitlines()[0]})")


def _schema(kind, table):
    if kind == "parquet":
        return table.schema_arrow
    return table.schema if kind == "file" else table[0]


def _groups(kind, table):
    if kind == "parquet":
        return table.num_row_groups
    return table.num_record_batches if kind == "file" else len(table) - 1


def _read(kind, table, group, columns):
    """Columns of a row group; a dotted name is a field of a struct."""
    if kind == "parquet":
        return table.read_row_group(group, columns=columns, use_threads=False)
    batch = table.get_batch(group) if kind == "file" else table[group + 1]
    return batch.select(columns)


def _holds_bytes(field):
    """Whether a column is of bytes, or of structs with bytes."""
    from pyarrow import types
    plain = types.is_binary(field.type) or types.is_large_binary(field.type)
    return plain or types.is_struct(field.type) and field.type.get_field_index("bytes") >= 0


def _audio_column(kind, table, path, given=""):
    """Name of the column of audio: of structs with bytes, or of bytes; else of paths."""
    schema = _schema(kind, table)
    found = [field.name for field in schema if _holds_bytes(field)]
    named = find_columns(schema.names, given).get("audio")
    if named in found or named and "audio=" in given:
        return named
    if len(found) > 1:
        raise UserError(f"{path}: has several columns of audio, {', '.join(found)}")
    if not found and not named:
        raise unknown_columns(path, schema.names, {"text": ""}, given)
    return found[0] if found else named


def read_columns(paths, wanted, given):
    """Rows of parquet or arrow files. Audio without bytes is looked for by its path."""
    number = -1
    for path in paths:
        kind, table = _open(path)
        audio, schema = _audio_column(kind, table, path, given), _schema(kind, table)
        check_given(path, schema.names, given)
        columns = {meaning: name for meaning, name in find_columns(schema.names, given).items()
                   if meaning != "audio"}
        if "text" not in columns:
            raise unknown_columns(path, schema.names, {"audio": audio}, given)
        for group in range(_groups(kind, table)):
            values = _read(kind, table, group, list(columns.values())).to_pydict()
            names = _paths(kind, table, group, audio)
            inside = None       # which rows have the bytes
            for row, name in enumerate(names):
                number += 1
                if not wanted(number):
                    yield number, SKIPPED
                    continue
                inside = _with_bytes(kind, table, group, audio, len(names)) if inside is None else inside
                label = os.path.basename(name) if name else f"row {number}"
                inner = f"{audio}/{label}" if "audio=" in given else label      # read_bytes would take another one
                where = MEMBER.join((path, f"{group}.{row}", inner)) if inside[row] else name
                entry = {meaning: values[column][row] for meaning, column in columns.items()}
                if not isinstance(entry["text"], str):
                    yield number, BadSample(f"its {columns['text']!r} is {str(entry['text'])[:40]!r}, not text",
                                            "empty_text" if entry["text"] is None else "invalid")
                else:
                    yield number, {**entry, "id": entry.get("id") or label, "audio": where}


def _with_bytes(kind, table, group, audio, n):
    """[whether the audio of a row is in its file, not in one that it names] of the n rows of a group.

    Reads no audio where the file says that all rows have theirs, or none.
    """
    field = _schema(kind, table).field(audio)
    if not _holds_bytes(field):
        return [False] * n
    if kind == "parquet":
        about = table.metadata.row_group(group)
        for column in map(about.column, range(about.num_columns)):
            if column.path_in_schema in (audio, f"{audio}.bytes") and (said := column.statistics) and \
                    said.has_null_count and said.null_count in (0, n):
                return [said.null_count == 0] * n
    value = _read(kind, table, group, [audio]).column(0)
    value = value.combine_chunks() if kind == "parquet" else value
    there = value.is_valid().to_pylist()
    if hasattr(value, "field"):     # of structs
        there = [a and b for a, b in zip(there, value.field("bytes").is_valid().to_pylist())]
    return there


def _paths(kind, table, group, audio):
    """[path that a row's audio has, "" for none] of a row group, its bytes unread."""
    field = _schema(kind, table).field(audio).type
    plain = not hasattr(field, "get_field_index") or not str(field).startswith("struct")
    if plain and str(field) in ("string", "large_string"):
        return [name or "" for name in _read(kind, table, group, [audio]).column(0).to_pylist()]
    rows = table.metadata.row_group(group) if kind == "parquet" else _read(kind, table, group, [audio])
    if plain or field.get_field_index("path") < 0:
        return [""] * rows.num_rows
    if kind == "parquet":
        found = _read(kind, table, group, [f"{audio}.path"]).column(0).to_pylist()
        return [(value or {}).get("path") or "" for value in found]
    return [name or "" for name in _read(kind, table, group, [audio]).column(0).field("path").to_pylist()]


# ---------------------------------------------------------------------------------------------------------------------
# Tars


def read_tars(paths, wanted, given):
    """Rows of WebDataset shards: neighbours whose names are equal up to the first dot are one sample.

    Where that joins two clips (names with dots in them), names are equal up to the last dot.
    """
    number = -1
    for path in paths:
        try:
            with hub.open_file(path) as file, tarfile.open(fileobj=file, mode="r:") as tar:
                size = file.seek(0, os.SEEK_END)
                file.seek(0)
                for members in _samples(tar, size):
                    number += 1
                    yield number, _tar_row(path, tar, members, given, not number) if wanted(number) else SKIPPED
        except (tarfile.TarError, EOFError) as error:
            raise UserError(f"{path}: cannot be read as a tar ({error}); the file may be cut off")


def _samples(tar, size):
    """Lists of members of a tar of so many bytes that are one sample each."""
    waiting, last = [], None
    for member in tar:
        if member.offset_data + member.size > size:     # tarfile takes it for the last one
            raise EOFError(f"{member.name} is not all there")
        base = os.path.basename(member.name)
        if not member.isfile() or base.startswith("."):
            continue
        key = os.path.join(os.path.dirname(member.name), base.split(".")[0])
        if waiting and key != last:
            yield from _split(waiting)
            waiting = []
        waiting.append(member)
        last = key
    tar.fileobj.seek(tar.offset)
    if tar.fileobj.read(512).strip(b"\0") or size < tar.offset + 512:       # tarfile takes a cut header for the end
        raise EOFError("its end is not there")
    if waiting:
        yield from _split(waiting)


def _split(members):
    """The members of one key, or several samples where they have several clips."""
    if sum(_is_audio(member) for member in members) <= 1:
        return [members]
    groups = {}
    for member in members:
        groups.setdefault(member.name.rpartition(".")[0], []).append(member)
    return list(groups.values())


def _is_audio(member):
    return member.name.lower().endswith(AUDIO_FILES + OTHER_AUDIO)


def _tar_row(path, tar, members, given, first):
    audio = next((member for member in members if _is_audio(member)), None)
    names = ", ".join(member.name for member in members)
    try:
        if audio is None:
            raise BadSample(f"has no audio file: {names}")
        row, text, keys = {}, None, []
        for member in members:
            if member.size > LONGEST and member.name.endswith((".json", *TEXTS)):
                raise BadSample(f"{member.name} is longer than {LONGEST >> 20} MiB")
            if member.name.endswith(".json"):
                data = loads(tar.extractfile(member).read())
                if isinstance(data, dict):
                    keys += data
                    columns = find_columns(data, given)
                    row |= {meaning: data[name] for meaning, name in columns.items() if meaning not in ("audio", "id")}
            elif member.name.endswith(TEXTS) and text is None:
                text = tar.extractfile(member).read().decode("utf-8-sig")
        if text is None and row.get("text") is None:
            raise BadSample(f"has no text beside its audio: {names}", "empty_text")
        row["text"] = row.get("text") if text is None else text
        if first:
            check_given(path, keys, given)
    except (UnicodeDecodeError, ValueError) as error:
        return BadSample(f"{names}: {error}")
    except BadSample as error:
        return error
    place = f"{audio.offset_data}+{audio.size}"
    return {**row, "id": audio.name, "audio": MEMBER.join((path, place, os.path.basename(audio.name)))}


READERS = {"parquet": read_columns, "arrow": read_columns, "tar": read_tars}
