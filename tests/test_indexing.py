"""Indices of millions of samples: what several processes make is what one makes, and little of it is in memory."""
import json
import multiprocessing
import os
import signal
import threading
import tracemalloc
from dataclasses import replace

import chats
import numpy as np
import pytest
from transformers import AutoTokenizer

import chat
import chat_table
import code_cache
import data
import indexing
from chatml import Clip, Sample, Turn
from data import TableBuilder, read_all, token_ids
from higgs_io import native_config
from indexing import Column, Lists, in_order, token_lists
from parallel import UserError


# ---------------------------------------------------------------------------------------------------------------------
# Columns, parts, texts


@pytest.mark.parametrize("parts, width", [([], None), ([[1, 2], [], [3]], None), ([], 2), ([[[1, 2]], [[3, 4]]], 2),
                                          ([list(range(1000))] * 200, None)], ids=str)
def test_a_column_is_the_file_that_numpy_saves(tmp_path, parts, width):
    column = Column(tmp_path / "grown.npy", np.int32, width)
    for part in parts:
        column.append(np.array(part).reshape(-1, *([width] if width else [])))
        assert column.array().shape[0] == len(column)
    whole = np.concatenate([np.empty((0, *([width] if width else [])), np.int32),
                            *[np.array(part, np.int32).reshape(-1, *([width] if width else [])) for part in parts]])
    assert (column.array() == whole).all()
    column.close()
    np.save(tmp_path / "saved.npy", whole)
    assert (tmp_path / "grown.npy").read_bytes() == (tmp_path / "saved.npy").read_bytes()


def test_lists(tmp_path):
    lists = Lists(tmp_path, "values", "offsets", np.uint8)
    lists.append(np.array([1, 2, 3], np.uint8), [2, 0, 1])
    lists.append(np.array([4], np.uint8), np.array([1]))
    assert [found.tolist() for found in lists] == [[1, 2], [], [3], [4]] and len(lists) == 4


@pytest.mark.parametrize("processes", [0, 1, 2])
@pytest.mark.parametrize("n", [0, 3, 4, 5, 23])
def test_parts_come_in_order(n, processes):
    def share(first, step):
        for i in range(first, n, step):
            yield i, os.getpid()

    found = []
    in_order(share, processes, found.append)
    assert [i for i, _ in found] == list(range(n))
    elsewhere = {pid for i, pid in found if pid != os.getpid()}
    assert len(elsewhere) == min(processes, max(0, n - indexing.HERE))


def test_few_parts_start_no_process(monkeypatch):
    monkeypatch.setattr(indexing, "DataLoader", None)
    found = []
    in_order(lambda first, step: iter(range(first, indexing.HERE - 1, step)), 2, found.append)
    assert found == list(range(indexing.HERE - 1))


@pytest.mark.race
def test_a_process_that_is_killed_ends_it_with_one_line():
    def share(first, step):
        for i in range(first, 100, step):
            if i == 17:
                os.kill(os.getpid(), signal.SIGKILL)
            yield i

    found = []
    with pytest.raises(UserError) as caught:
        in_order(share, 2, found.append)
    assert "\n" not in str(caught.value) and "is killed by signal: Killed" in str(caught.value)
    assert "--preprocess_num_proc" in str(caught.value) and not multiprocessing.active_children()
    assert found == list(range(len(found)))


def test_errors_come_in_their_place():
    def share(first, step):
        for i in range(first, 100, step):
            if i > 8:
                raise UserError(f"error {i}")
            yield i

    for processes in (0, 2):
        found = []
        with pytest.raises(UserError, match="^error 9$"):
            in_order(share, processes, found.append)
        assert found == list(range(9))


@pytest.mark.parametrize("with_limits", [False, True])
def test_fast_tokens_are_the_tokenizers(tiny, with_limits):
    tokenizer = AutoTokenizer.from_pretrained(tiny.model)
    texts = ["The kettle is singing.", "<|eot_id|>\n", "x" * 50, "", "two <|AUDIO_OUT|> three"]
    expected = tokenizer(texts, add_special_tokens=False)["input_ids"]
    if with_limits:     # as a tokenizer.json may have them
        tokenizer.backend_tokenizer.enable_truncation(4)
        tokenizer.backend_tokenizer.enable_padding()
    lists = token_lists(tokenizer)
    assert lists([]) == [] and lists(texts) == expected and lists(texts[::-1]) == expected[::-1]


# ---------------------------------------------------------------------------------------------------------------------
# Speech


@pytest.fixture(scope="module")
def tools(tiny):
    tokenizer = AutoTokenizer.from_pretrained(tiny.model)
    return tokenizer, token_ids(tokenizer, native_config(json.loads((tiny.model / "config.json").read_text())))


def entry(i, **more):
    """A sample whose reference comes again in other chunks, with a cut here and there."""
    audio = {"type": "audio", "audio_url": f"{i % 29}.wav"}
    if i % 5 == 0:
        audio |= {"offset": i % 3, "duration": 0.5 + i % 2}
    return {"messages": [{"role": "user", "content": f"Reference {i % 7}."},
                         {"role": "assistant", "content": {"type": "audio", "audio_url": f"r{i % 7}.wav"}},
                         {"role": "user", "content": f"Number {i}, über {'and so on ' * (i % 11)}."},
                         {"role": "assistant", "content": audio}], "misc": {"sample_id": f"s{i}"}, **more}


def write_entries(folder, kind, n, change=lambda i, raw: raw):
    """A data source of n entries and the audio files they name -> its path."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in [*range(29), *(f"r{i}" for i in range(7))]:
        (folder / f"{name}.wav").write_bytes(b"audio")
    entries = [change(i, entry(i)) for i in range(n)]
    if kind == "folder":
        for i in range(n):
            (folder / f"{i}.txt").write_text(f"Number {i}, (really).")
        (folder / "metadata.json").write_text(json.dumps({"samples": [
            change(i, {"id": i, "audio_file": f"{i % 29}.wav", "transcript_file": f"{i}.txt", "scene": "a_room",
                       "ref_audio_file": f"r{i % 7}.wav", "ref_transcript": f"Reference {i % 7}."})
            for i in range(n)]}))
        return folder
    path = folder / f"{kind}.json"
    path.write_text("\n\n".join(map(json.dumps, entries)) if kind == "lines" else json.dumps(entries, indent=1))
    return path


def table_of(sources, tools, folder, processes, task="zero_shot_voice_cloning"):
    """{file name: bytes} of the table of (training source, validation source or None), its clips, training samples."""
    builder, n_train = read_all(*sources, *tools, task, False, folder, processes)
    clips = builder.clips[:]
    frames = np.array([7 + len(clip.path) + i % 13 for i, clip in enumerate(clips)], np.int64)
    builder.write(folder, folder / "cache", ["shard"], np.stack([frames * 0, np.cumsum(frames), frames], axis=1))
    return {path.name: path.read_bytes().replace(str(folder).encode(), b"")
            for path in folder.iterdir()}, clips, n_train


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr(data, "CHUNK", 3)
    monkeypatch.setattr(data, "ROWS", 8)
    monkeypatch.setattr(indexing, "HERE", 1)


@pytest.mark.parametrize("kind", ["list", "lines", "folder"])
def test_several_processes_make_the_table_of_one(tmp_path, tools, kind, small_parts, capfd):
    sources = write_entries(tmp_path / "train", kind, 61), write_entries(tmp_path / "held_out", "lines", 20)
    one, clips, n_train = table_of(sources, tools, tmp_path / "table", 0)
    assert n_train == 61 and set(one) == {f"{name}.npy" for name in (
        "tokens", "labelled", "token_offsets", "clips", "clip_offsets", "where", "lengths", "frames", "audio_targets",
        "text_targets", "names", "name_offsets")} | {"codes.json"}
    for processes in (1, 2):
        many, again, n = table_of(sources, tools, tmp_path / f"table{processes}", processes)
        assert n == n_train and again == clips and list(map(repr, again)) == list(map(repr, clips))
        assert {name: many[name] == one[name] for name in one} == dict.fromkeys(many, True)
    plain = {}      # order of first use, and what a clip is, told by Python
    for i in range(61):
        cut = {} if kind == "folder" or i % 5 else {"offset": i % 3, "duration": 0.5 + i % 2}
        for name, more in ((f"r{i % 7}", {}), (f"{i % 29}", cut)):
            plain.setdefault(Clip(str(tmp_path / "train" / f"{name}.wav"), **more))
    assert clips[:len(plain)] == list(plain)
    assert "reference clips" not in capfd.readouterr().out


def test_what_a_folder_says_is_said_once(tmp_path, tools, small_parts, capfd):
    source = write_entries(tmp_path / "train", "folder", 20)
    for processes in (0, 2):
        table_of((source, None), tools, tmp_path / f"table{processes}", processes, "single_speaker_smart_voice")
        assert capfd.readouterr().out.count("20 samples have reference clips that their task type does not use") == 1


@pytest.mark.parametrize("kind", ["list", "lines", "folder"])
def test_problems_are_the_same_in_the_same_order(tmp_path, tools, kind, small_parts):
    def spoil(i, raw):
        if i in (1, 7, 19, 20, 21, 22, 23, 24, 38):
            return {**raw, "audio_file": "none.wav" if i % 2 else None,
                    "messages": raw.get("messages", [])[:2] + [{"role": "nobody"}]}
        return {**raw, "messages": [{"role": "user", "content": "<|eot_id|>"}, *raw["messages"][1:]]} \
            if i in (2, 30) and "messages" in raw else raw

    sources, texts = (write_entries(tmp_path / "train", kind, 40, spoil),
                      write_entries(tmp_path / "held_out", "list", 8, spoil)), []
    for processes in (0, 2):
        with pytest.raises(UserError) as caught:
            table_of(sources, tools, tmp_path / f"table{processes}", processes)
        texts.append(str(caught.value))
    assert texts[0] == texts[1] and texts[0].startswith(f"{12 if kind == 'folder' else 14} problems:")
    assert "sample 38" in texts[0] and "control token <|eot_id|>" in texts[0]


@pytest.mark.parametrize("kind, damage, said", [
    ("lines", lambda text: text.replace('"Number 25,', '"Number 25"', 1), "line 51 column"),
    ("lines", lambda text: text.replace("Number 25,", "\udcff", 1), "is not UTF-8 text"),
    ("list", lambda text: text.replace('"Number 25,', '"Number 25"', 1), "not valid JSON at line"),
    ("list", lambda text: text[:text.index('"Number 25,')], "looks truncated"),
    ("list", lambda text: text + "\n{}]", "Extra data"), ("list", lambda text: "[]", "holds no samples")])
def test_an_error_of_the_file_is_the_same(tmp_path, tools, kind, damage, said, small_parts):
    path, texts = write_entries(tmp_path / "train", kind, 40), []
    path.write_text(damage(path.read_text()), errors="surrogateescape")
    for processes in (0, 1, 2):
        with pytest.raises(UserError) as caught:
            table_of((path, None), tools, tmp_path / f"table{processes}", processes)
        texts.append(str(caught.value))
    assert texts == texts[:1] * 3 and said in texts[0] and "\n" not in texts[0]


def test_clips_are_what_they_were(tools):
    """Offsets keep their kind, by which the code cache tells them; equal ones are one clip, the first."""
    given = [Clip("a.wav"), Clip("a.wav", 3, 2.5, 1.5), Clip("a.wav", 3.0, 2.5), Clip("a.wav", 3), Clip("é\udcff.wav"),
             Clip("a.wav", 0, 2), Clip("a.wav", seconds=9.0), Clip("", None, None, 1.0)]
    builder = TableBuilder(*tools)
    for part in (given[:5], given[2:]):
        builder.add([Sample("s", [Turn("user", ["Hm."], 0), Turn("assistant", [clip], 1, True)]) for clip in part], [])
    distinct = list(dict.fromkeys(given))
    assert list(map(repr, builder.clips)) == list(map(repr, distinct)) and len(builder.clips) == 6
    assert [builder.clips[n] for i in range(len(builder)) for n in builder.clips_of(i)] == given[:5] + given[2:]
    assert builder.clips[1:3] == distinct[1:3] and builder.clips[-1] == distinct[-1]
    with pytest.raises(IndexError):
        builder.clips[6]


def test_a_sample_takes_little_memory(tools, tmp_path):
    """Ten million samples with a clip each: the arrays of what is asked for often, and no Python object."""
    builder = TableBuilder(*tools, tmp_path / "table")
    chunk = builder.chunk([Sample(f"some/where/data.json sample {i}", [
        Turn("user", ["What shall be said, in some words."], 0),
        Turn("assistant", [Clip(f"/data/of/some/one/{i:04d}.wav", seconds=3.0)], 1, True)]) for i in range(2048)], [])
    rounds, rng = 50, np.random.default_rng(0)
    n = rounds * 2048
    tracemalloc.start()
    for _ in range(rounds):
        builder.append({**chunk, "digests": rng.integers(0, 2**63, chunk["digests"].shape).astype(np.uint64)})
    reading = tracemalloc.get_traced_memory()[1]
    assert len(builder.clips) == n
    builder.write(tmp_path / "table", tmp_path, [], np.ones((n, 3), np.int64))      # of which 24 bytes
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert reading < 8 * 2**20 and peak / n < 150
    assert np.load(tmp_path / "table" / "lengths.npy", mmap_mode="r").shape == (n,)


def test_file_dates_are_asked_for_by_several_processes(tmp_path, monkeypatch):
    monkeypatch.setattr(code_cache, "BLOCK", 2)
    monkeypatch.setattr(indexing, "HERE", 1)
    clips = [Clip(str(tmp_path / f"{i}.wav"), *((i, 1.0) if i % 3 else ())) for i in range(23)]
    for i in range(23):
        (tmp_path / f"{i}.wav").write_bytes(b"x" * i)
    cache, batch = tmp_path / "codes", code_cache.Batch(tmp_path / "codes", 8)
    cache.mkdir()
    for i in range(0, 23, 2):
        batch.add_codes(bytes([65 + i] * 16), np.zeros((i + 1, 8), np.int16))
        batch.add_file(code_cache.file_key(clips[i], os.stat(clips[i].path)), bytes([65 + i] * 16))
    batch.write()
    for processes in (0, 2):
        found, unknown = code_cache.CacheIndex(cache).find_clips(clips, processes)
        assert found[::2, 2].tolist() == list(range(1, 24, 2)) and (found[1::2] == -1).all()
        assert unknown.tolist() == [[i, i, os.stat(clips[i].path).st_mtime_ns] for i in range(1, 23, 2)]
        with pytest.raises(UserError, match="gone.wav: cannot be read any more"):
            code_cache.CacheIndex(cache).find_clips([*clips, replace(clips[0], path=str(tmp_path / "gone.wav"))],
                                                    processes)


# ---------------------------------------------------------------------------------------------------------------------
# Chats


def chat_lines(n):
    """JSONL text of conversations of all kinds that can be used, empty lines among them."""
    lines = [json.dumps({"id": 3 * i, "messages": chats.ask(f"Satz {i}, {'so ' * (i % 9)}", "de"[:1 + i % 2]) + (
        chats.ask("Und nun?", "fr") if i % 4 == 0 else [])}) + "\n" * (1 + (i % 13 == 0)) for i in range(n)]
    return "\n".join(lines)


def chat_table_of(paths, folder, processes, limit=60, policy="cut_left"):
    encoder = chat.Encoder(chats.tokenizer())
    found = chat_table.write_table(folder, paths, encoder, limit, policy, processes=processes)
    return {path.name: path.read_bytes() for path in folder.iterdir()}, found, encoder.ends


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(chat_table, "CHUNK", 4)
    monkeypatch.setattr(indexing, "HERE", 1)


def test_a_pipe_is_read_whole(tmp_path, small_chunks):
    text, pipe = chat_lines(40), tmp_path / "pipe.jsonl"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=[text])
    writer.start()
    _, found, _ = chat_table_of([pipe], tmp_path / "table", 2)
    writer.join(10)
    assert sum(found["samples"]) == 40


@pytest.mark.parametrize("policy", ["drop", "cut_left", "cut_right"])
def test_several_processes_make_the_chats_of_one(tmp_path, policy, small_chunks):
    paths = [tmp_path / "train.jsonl", tmp_path / "held_out.jsonl"]
    for path, n in zip(paths, (50, 21)):
        path.write_text(chat_lines(n))
    one, found, ends = chat_table_of(paths, tmp_path / "table", 0, policy=policy)
    assert sum(found["long"]) and sum(found["samples"]) + sum(found["dropped"]) == 71 and len(one) == 9
    assert ends == {chats.tokenizer().convert_tokens_to_ids("<|im_end|>"): 71 + 13 + 6}     # all answers
    for processes in (1, 2):
        many, again, its_ends = chat_table_of(paths, tmp_path / f"table{processes}", processes, policy=policy)
        assert (again, its_ends) == (found, ends)
        assert {name: many[name] == one[name] for name in one} == dict.fromkeys(many, True)
    table, encoder = chat_table.ChatTable(tmp_path / "table"), chat.Encoder(chats.tokenizer())
    every = [(line, *encoder.encode([messages])[0], source, key) for source, path in enumerate(paths)
             for line, key, messages in chat.read_chats(path, [])]
    every = [(line, *part, source, key) for line, ids, mask, source, key in every
             if (part := chat.cut(ids, mask, 60, policy))]
    for i, (line, ids, mask, source, key) in enumerate(every):
        part = slice(table.offsets[i], table.offsets[i + 1])
        assert (table.tokens[part].tolist(), table.trained[part].tolist()) == (ids, mask)
        assert (table.lines[i], table.lengths[i], table.targets[i], table.sources[i], table.keys[i]) == (
            line, len(ids), sum(mask[1:]), source, key)
    assert len(table) == len(every)


def test_problems_of_chats_are_the_same_in_the_same_order(tmp_path, small_chunks):
    lines, texts = chat_lines(40).split("\n"), []
    control, long = (json.dumps({"messages": chats.ask(text, "de")}) for text in ("<|im_end|>", "lang " * 90))
    for at, line in ((2, "{"), (6, '{"messages": []}'), (17, "\udcff"), (25, control), (26, long)):
        lines[at] = line
    path = tmp_path / "train.jsonl"
    path.write_text("\n".join(lines), errors="surrogateescape")
    for processes in (0, 1, 2):
        with pytest.raises(UserError) as caught:
            chat_table_of([path], tmp_path / f"table{processes}", processes, policy="stop", limit=100)
        texts.append(str(caught.value))
        assert not (tmp_path / f"table{processes}").exists()
    assert texts == texts[:1] * 3 and texts[0].startswith("5 problems:") and "fix: shorten them" in texts[0]
    places = [texts[0].index(f"{path}:{number}:") for number in (3, 7, 18, 26, 27)]
    assert places == sorted(places)


@pytest.mark.parametrize("turns", ["all", "last"])
def test_chats_rendered_together_are_rendered_alone(turns):
    """With ones among them that a template refuses, or that begin with an answer."""
    refusing = chats.QWEN.replace("{%- for", "{%- if messages[0].content == 'no' %}{{ raise_exception('never') }}"
                                             "{%- endif %}{%- for", 1)
    assert refusing != chats.QWEN
    answer, no = {"role": "assistant", "content": "Hm."}, chats.ask("no", "de")
    plain = [*chats.conversations(5), chats.ask("a", "b") + chats.ask("c", "d")]
    for template in (chats.QWEN, refusing):
        encoder = chat.Encoder(chats.tokenizer(template), turns)
        for some in (plain, [*plain[:2], no, *plain[2:]], [plain[0], [answer], *plain[1:]]):
            together, alone = encoder.encode(some), [encoder.encode([messages])[0] for messages in some]
            assert list(map(repr, together)) == list(map(repr, alone))
            assert all(isinstance(result, tuple) for result, messages in zip(together, some) if messages in plain)


def test_a_chat_takes_no_memory(tmp_path, monkeypatch):
    path = tmp_path / "train.jsonl"
    path.write_text(chat_lines(500))
    tokenizer = chats.tokenizer()
    made = chat_table.encode_chunk(list(next(chat.read_chunks(path, 10_000))[0]), path, chat.Encoder(tokenizer), 100,
                                   "stop", [])
    monkeypatch.setattr(chat_table, "encode_chunk", lambda *_: made)
    path.write_text("\n" * 1024 * 100)
    tracemalloc.start()
    found = chat_table.write_table(tmp_path / "table", [path], chat.Encoder(tokenizer), 100, "stop")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found["samples"] == [50_000] and peak < 4 * 2**20
