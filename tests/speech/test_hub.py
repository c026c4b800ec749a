"""Data sets on the hub are read there: texts by ranges, audio shard by shard, and nothing of them is left behind."""
import numpy as np
import pytest
import soundfile
from huggingface_hub import constants

from common import hub
from common.distributed import UserError
from tests.helpers.hub import COMMIT, Hub
from tests.speech.test_formats import parquet_of, tar_members, tar_of, waves
from tests.speech.test_prepare_tts import prepared


@pytest.fixture
def ask(monkeypatch, tiny, tokenizer, ids, tmp_path):
    """ask(name, url): the report of preparing a data set from a hub at this address."""
    def run(name, url, out="out"):
        monkeypatch.setattr(constants, "ENDPOINT", url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE",
                            url + "/{repo_id}/resolve/{revision}/{filename}")
        return prepared(tiny, tokenizer, ids, name, tmp_path / out)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    return run


@pytest.fixture
def server(tmp_path):
    """me/voices: a set of two shards of four clips with 2 MB of noise behind them, another set, and a tar."""
    clips, noise = waves(8), np.random.default_rng(0).normal(0, 0.1, 500_000)
    for i, name in enumerate(clips):
        soundfile.write(tmp_path / name, np.concatenate([noise[:40_000 + i], noise]), 48000)
        clips[name] = (tmp_path / name).read_bytes()
    parts = [dict(list(clips.items())[i:i + 4]) for i in (0, 4)]
    shards = {f"data/train-0000{i}-of-00002.parquet": parquet_of(tmp_path / f"{i}.parquet", part, "struct", rows=2)
              for i, part in enumerate(parts)}
    shards |= {"data/test-00000-of-00001.parquet": shards["data/train-00000-of-00002.parquet"],
               "tars/a.tar": tar_of(tmp_path / "a.tar", tar_members(waves(3)))}
    with Hub("me/voices", {name: path.read_bytes() for name, path in shards.items()} | {"README.md": b"x"}) as found:
        yield found


@pytest.mark.slow
def test_a_data_set_is_prepared_from_the_hub(ask, server, tmp_path, capsys):
    out, sizes = tmp_path / "out", {name: len(data) for name, data in server.files.items()}
    with pytest.raises(UserError, match=r"holds the sets data/test\*.parquet, data/train\*.parquet, tars/a\*.tar; give "
                                        r"one: 'me/voices/data/train\*.parquet'"):
        ask("me/voices", server.url)
    report = ask("me/voices/data/train*.parquet", server.url)
    said = capsys.readouterr().out
    assert "parquet (2 files on the hub, audio = 'audio', text = 'text', speaker = 'speaker_id'); 8 rows = 8" in said
    assert report["samples"] == 8 and report["sources"][0]["path"] == "me/voices/data/train*.parquet"
    assert not list(out.rglob(".hub-*")) and not list(out.rglob("*.parquet"))
    for name, size in sizes.items():        # once for the audio, and less than a third of it for the texts
        low, high = (size, 1.3 * size) if "train" in name else (0, 0)
        assert low <= server.read[name] <= high, (name, size, server.read[name])
    report = ask("hf://datasets/me/voices/tars/a.tar", server.url, "tars")
    assert report["samples"] == 3 and "tar (1 files on the hub" in capsys.readouterr().out


def test_without_the_hub_one_line_says_what_to_do(ask, server, monkeypatch):
    for name, url, said in (("me/other", server.url, "no such data set on the hub"),
                            ("me/voices", "http://127.0.0.1:9", "the hub cannot be reached .*`hf download OWNER/NAME"),
                            ("data/gone.json", server.url, "data/gone.json: cannot be read")):
        with pytest.raises(UserError, match=said) as caught:
            ask(name, url)
        assert "\n" not in str(caught.value)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="the hub cannot be reached .OfflineModeIsEnabled"):
        ask("me/voices", server.url)


def test_which_names_may_be_data_sets():
    assert all(map(hub.may_be, ("me/voices", "me/voices@refs/convert/parquet", "me/v-1.0/data/*.parquet",
                                "hf://datasets/me/voices@main")))
    assert not any(map(hub.may_be, ("voices", "./me/voices", "/me/voices", "../a/b", "data/train.json", "~/a/b")))
    assert hub.NAME.fullmatch(f"me/v@{COMMIT}/data/a-0.parquet").groups() == ("me/v", COMMIT, "data/a-0.parquet")
    assert hub.NAME.fullmatch("me/v@refs/convert/parquet/de/*.parquet").groups() == (
        "me/v", "refs/convert/parquet", "de/*.parquet")
