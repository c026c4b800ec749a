"""report.py: its page in a real headless Chromium, against the files it was made from."""
import base64
import json
import math
import os
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
import soundfile

from common import report
from common.checkpoint import Writer
from common.distributed import World
from core.metrics import MetricsLog, read_metrics
from core.watchdog import leave_marker
from tests.helpers.chromium import PROGRAM, Chromium
from tests.helpers.progress import PATIENCE_S
from tests.helpers.trainer import ROOT

needs_browser = pytest.mark.skipif(PROGRAM is None, reason="chromium is not installed (apt-get install chromium)")

RATE, STEPS, EVALS, BAD = 24_000, 40, (10, 20, 30, 40), 13
PROMPTS = ("prompt-1", "prompt-2", "prompt-10")
TEXTS = ['</script><script>window.broken = 1</script><img src=x onerror="window.broken = 2">',
         "\"It's\" {{body}} & <b>bold</b>", "héllo, 你好 \ud800"]
ARGS = {"model_path": "voices/big-model", "use_lora": True, "max_steps": STEPS, "logging_steps": 1,
        "note": TEXTS[0], "learning_rate": 5e-5, "base_url": "http://anna:hush@host/v1?api_key=hush2"}


def train_values(step, scale=1.0):
    values = {"train/loss": scale * (3 + 7 / step), "train/audio_loss": scale * (2.5 + 5 / step),
              "train/text_loss": 0.5 / step, "train/eos_loss": 3 / step, "train/eos_accuracy": step / 50,
              "train/learning_rate": 5e-5 * step / STEPS, "train/grad_norm": 1 + math.sin(step),
              "train/epoch": step / 20, "train/bad_steps": int(step >= BAD), "train/throughput": 9000.0 + step,
              "train/step_seconds": 0.25, "train/padding": 0.01, "train/data_wait_seconds": 0.005,
              "train/memory_gib": 1.5 + step / 1000, "train/spread</script>": 1e-5 * step}
    values |= {f"train/audio_loss_codebook_{k}": scale * (2 + k / 10 + 5 / step) for k in range(8)}
    return {**values, "train/loss": math.nan} if step == BAD else values


def make_run(folder, steps=STEPS, samples=EVALS, scale=1.0, args=ARGS):
    """A run's files, through the classes that write them: resumed at step 20, best at 20, last line cut off."""
    folder.mkdir()
    for start, end in ((0, 20), (20, steps)):
        log = MetricsLog(folder, folder / "logs", "none", args, start)
        for step in range(start + 1, end + 1):
            log.write(step, train_values(step, scale))
            if step in EVALS:
                log.write(step, {"eval/loss": scale * (4 + abs(step - 20) / 100), "eval/eos_accuracy": 0.5,
                                 "eval/stop_recall": 1.0})
        log.close()
        writer = Writer(World(), folder)
        writer.begin(end)
        writer.save(end, {"adapter_model.safetensors": lambda path, size=1000 * end: path.write_bytes(bytes(size))},
                    {"step": end})
        writer.finish()
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 41, "train/lo')
    for step in samples:
        make_samples(folder / "samples" / f"step-{step}", step)
    return folder


def make_samples(folder, step):
    """Three prompts; lengths grow with the step."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    folder.mkdir(parents=True)
    for i, (name, text) in enumerate(zip(PROMPTS, TEXTS)):
        frames = 10 + 5 * i + step
        wave = 0.3 * np.sin(np.arange(frames * 960) * (0.02 + 0.01 * i + step / 5000))
        soundfile.write(folder / f"{name}.wav", wave, RATE, subtype=("PCM_16", "PCM_16", "FLOAT")[i])
        pyplot.imsave(folder / f"{name}.png", np.outer(np.arange(40), np.ones(frames)))
        facts = {"text": text, "seed": 7 + i, "frames": frames, "seconds": frames / 25, "real_time_factor": 0.5,
                 "ended_by": "eos" if step > 20 else "length", "step": step, "reference_audio": "reference.wav"}
        (folder / f"{name}.json").write_text(json.dumps(facts))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with samples, evaluations and its report.html; nobody changes it."""
    folder = make_run(tmp_path_factory.mktemp("report") / "voice & <run>")
    judged = folder / "judged" / "step 40"
    judged.mkdir(parents=True)
    (judged / "evaluation.json").write_text(json.dumps(
        {"name": "<i>step 40<i>", "metrics": {"wer": 0.125, "f0_correlation": None},
         "samples": [{"name": TEXTS[0], "wer": 0.25, "from": "http://anna:hush@host"}]}))
    other = folder.parent / "base.json"
    other.write_text(json.dumps({"name": "base", "verdict": "fair", "metrics": {"wer": 0.5, "similarity": 0.75}}))
    make_samples(folder.parent / "spoken", 99)
    shutil.copy(folder / "samples" / "step-40" / "prompt-1.wav", folder.parent / "spoken" / "reference.wav")
    done = make_report(folder, "--samples", folder.parent / "spoken", "--evaluations", other)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"report     .*/report.html \(\d+\.\d MiB\): 44 lines of metrics, 16 of 16 samples "
                        r"\(--sample_count 8\), 2 evaluations\n", done.stdout)
    return folder


def make_report(*args, cwd=ROOT, python=()):
    """report.py as a user runs it."""
    return subprocess.run([sys.executable, *python, "common/report.py", *map(str, args)], cwd=cwd, text=True,
                          capture_output=True, timeout=PATIENCE_S)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Chromium(tmp_path_factory.mktemp("chromium")) as browser:
        yield browser


@pytest.fixture(scope="module")
def page(browser, run):
    """The report in a window 1280 pixels wide."""
    return browser.open(run / "report.html")


def rows_of(page, selector):
    """Texts of a table's cells, with its head."""
    return page.run(f"[...document.querySelectorAll({json.dumps(selector + ' tr')})]"
                    ".map(row => [...row.cells].map(cell => cell.textContent))")


def place(page, metric, step):
    """Where in the window the curve of a metric has a step; scrolls it there."""
    return page.run(f"""(() => {{
        const svg = document.querySelector('path[data-metric="{metric}"]').closest('svg'), figure = svg.parentNode;
        svg.scrollIntoView({{block: 'center'}});
        const box = svg.getBoundingClientRect();
        return [box.left + figure.view.x({step}), box.top + 60]; }})()""")


def tip(page, metric):
    """What the tooltip beside a metric's curve says, None while there is none."""
    return page.run(f"""(() => {{
        const tip = document.querySelector('path[data-metric="{metric}"]').closest('figure').querySelector('.tip');
        return tip.hidden ? null : tip.innerText; }})()""")


# ---------------------------------------------------------------------------------------------------------------------
# The page


@needs_browser
def test_page_has_every_number_and_stays_offline(page, run):
    rows = read_metrics(run / "metrics.jsonl")
    assert page.run("document.title") == run.name == page.run("document.querySelector('h1').textContent")
    names = dict.fromkeys(name for row in rows for name in row if name != "step")
    expected = {name: [(row["step"], row[name]) for row in rows if name in row] for name in names}
    points = page.run("Object.fromEntries([...document.querySelectorAll('path[data-metric]')]"
                      ".map(path => [path.dataset.metric, path.getAttribute('d').split(/[ML]/).length - 1]))")
    assert points == {name: sum(value is not None for _, value in curve) for name, curve in expected.items()}
    drawn = page.run("panels.flatMap(panel => panel.series.map(one => [one.metric, one.steps, one.values]))")
    assert {name: list(zip(steps, values)) for name, steps, values in drawn} == \
        {name: [(step, value) for step, value in curve] for name, curve in expected.items()}
    assert len(page.run("[...document.querySelectorAll('.missing')].map(mark => mark.x1.baseVal.value)")) == 1

    tiles = page.run("Object.fromEntries([...document.querySelectorAll('.tiles div')]"
                     ".map(tile => [...tile.children].slice(0, 2).map(part => part.textContent)))")
    assert tiles == {"State": "finished", "Step": "40", "Training loss": "3.175", "Validation loss": "4.2",
                     "Throughput": "9020 tok/s", "Peak memory": "1.54 GiB", "Ranks": "1"}
    assert page.run("[...document.querySelectorAll('.verdict li')].map(one => one.textContent)") == [
        "Validation loss was best at step 20 (4.0000) and 5.0 % higher at step 40 while the training loss fell: "
        "overfitting, take checkpoint-20.", "<i>step 40<i>: speech is understood (word errors 12.5 %).",
        "Base: speech is partly understood (word errors 50 %).",
        "Steps skipped because their gradients were not finite: 1."]
    notes = page.run("[...document.querySelectorAll('.tiles small')].map(note => note.textContent)")
    assert {"of 40", "first 10", "best 4 at step 20", "resumed at step 20"} <= set(notes)
    assert [cells[0:3:2] + cells[5:] for cells in rows_of(page, ".checkpoints")[1:]] == \
        [["20", "4", "whole"], ["40", "4.2", "whole"]]
    shown = {**ARGS, "base_url": "http://host/v1?"}
    assert dict(rows_of(page, "#settings")[1:]) == {name: json.dumps(value) for name, value in shown.items()}
    assert "hush" not in (run / "report.html").read_text() and "hush2" in (run / "starts.jsonl").read_text()
    assert rows_of(page, "#evaluations") == [["", "<i>step 40<i>", "base"], ["verdict", "", "fair"], ["wer", "0.125", "0.5"],
                                             ["f0_correlation", "–", "–"], ["similarity", "–", "0.75"]]
    headings = page.run("panels.map(panel => panel.title)")
    assert len(headings) == len(set(headings)) and "train/spread</script>" in headings

    assert page.errors == []
    outside = [url for url in page.requests if not url.startswith("data:")]
    assert outside == [(run / "report.html").as_uri()]


@needs_browser
def test_hover_log_legend_smoothing_zoom(page, run):
    values = {row["step"]: row["train/loss"] for row in read_metrics(run / "metrics.jsonl") if "train/loss" in row}
    page.mouse(*place(page, "train/loss", 30))
    assert tip(page, "train/loss").split() == ["step", "30", "train", f"{values[30]:.5g}", "eval", "4.1"]
    page.mouse(*place(page, "train/loss", BAD))
    assert "step 13" in tip(page, "train/loss") and "not finite" in tip(page, "train/loss")
    page.mouse(*place(page, "train/eos_accuracy", 25))
    assert "50 %" in tip(page, "train/eos_accuracy") and tip(page, "train/loss") is None

    def shape(metric="train/loss"):
        return page.run(f"document.querySelector('path.curve[data-metric=\"{metric}\"]')?.getAttribute('d')")

    def click(selector):
        x, y = page.run(f"(() => {{ const node = document.querySelector('.chart').querySelector({selector!r});"
                        "node.scrollIntoView({block: 'center'}); const box = node.getBoundingClientRect();"
                        "return [box.left + box.width / 2, box.top + box.height / 2]; })()")
        page.click(x, y)
    plain = shape()
    click("figcaption button")
    assert shape() != plain
    click("figcaption button")
    assert shape() == plain
    click("div.tip ~ button:nth-of-type(2)")
    assert shape("eval/loss") is None and shape()
    click("div.tip ~ button:nth-of-type(2)")
    assert shape("eval/loss") and shape() == plain

    page.run("smoothing.value = 0.8; smoothing.oninput()")
    mean = weight = 0
    for step in range(1, 31):
        if values[step] is not None:
            mean, weight = 0.8 * mean + 0.2 * values[step], 0.8 * weight + 0.2
    page.mouse(*place(page, "train/loss", 30))
    assert f"~ {mean / weight:.4g}" in tip(page, "train/loss") and page.run("document.querySelector('.faint') !== null")
    page.run("smoothing.value = 0; smoothing.oninput()")

    (x, y), (end, _) = place(page, "train/loss", 10), place(page, "train/loss", 20)
    page.mouse(x - 1, y, "mousePressed", button="left", clickCount=1)
    page.mouse(end + 1, y, button="left", buttons=1)
    page.mouse(end + 1, y, "mouseReleased", button="left", clickCount=1)
    assert shape() != plain         # every chart now shows these steps
    steps = page.run("figures.map(one => one.view.steps).filter(steps => steps.length)")
    assert all(found in (list(range(10, 21)), [10, 20]) for found in steps)
    for count in (1, 2):
        page.mouse(x, y, "mousePressed", button="left", clickCount=count)
        page.mouse(x, y, "mouseReleased", button="left", clickCount=count)
    assert shape() == plain and page.errors == []


@needs_browser
def test_samples_can_be_heard_and_seen(page, run):
    files = [folder / f"{name}.wav" for name in PROMPTS for folder in
             (*(run / "samples" / f"step-{step}" for step in EVALS), run.parent / "spoken")]
    page.run("""Promise.all([...document.querySelectorAll('audio')].map(audio => audio.readyState >= 1 ||
                new Promise(done => { audio.onloadedmetadata = audio.onerror = done; })))""")
    assert page.run("[...document.querySelectorAll('.sample')].map(one => one.dataset.name)") == [
        *(file.stem for file in files), "reference"]
    heard = page.run("[...document.querySelectorAll('.sample audio')].map(one => [one.src, one.duration])")
    for file, (source, seconds) in zip(files, heard):
        assert base64.b64decode(source.split(",")[1]) == file.read_bytes()
        assert seconds == pytest.approx(soundfile.info(file).duration, abs=1e-3)
    played = page.run("""(async () => {
        const [one, other] = document.querySelectorAll('.sample audio');
        await one.play();
        await other.play();
        await new Promise(done => setTimeout(done, 50));
        const heard = [one.paused, other.paused];
        other.pause();
        return heard; })()""")
    assert played == [True, False]
    page.run("Promise.all([...document.images].map(image => { image.loading = 'eager'; return image.decode(); }))")
    sizes = page.run("[...document.querySelectorAll('.sample img')].map(image => [image.naturalWidth, image.alt])")
    assert [width for width, _ in sizes] == [soundfile.info(file).frames // 960 for file in files]     # one column a frame
    assert sizes[0][1] == "mel spectrogram of prompt-1, step 10"

    cells = page.run("[...document.querySelectorAll('.sample')].map(one => one.innerText)")
    assert "step 10" in cells[0] and "cut off by length" in cells[0] and "0.80 s · 20 frames · seed 7" in cells[0]
    assert "step 40" in cells[3] and "ended by itself" in cells[3] and "real-time factor 0.50" in cells[3]
    heads = page.run("[...document.querySelectorAll('blockquote')].map(one => one.textContent)")
    assert heads[:2] == TEXTS[:2] and heads[2] == TEXTS[2].replace("\ud800", "?")
    assert page.run("document.querySelectorAll('.reference audio').length") == 3
    assert cells[4].startswith("spoken") and page.errors == []


@needs_browser
def test_text_is_never_code(page):
    assert page.run("window.broken") is None and page.run("document.scripts.length") == 2
    assert page.run("document.querySelectorAll('#Samples b, #Evaluation i, [onerror]').length") == 0
    first = rows_of(page, "#Evaluation details:nth-of-type(1)")
    assert [TEXTS[0], "0.25", "http://host"] in first


@needs_browser
def test_page_forbids_itself_network_and_foreign_scripts(browser, run, tmp_path):
    """Also the proof that a request would be seen."""
    image = '<img src="http://127.0.0.1:9/a.png"><script>window.broken = 1</script>'
    text = (run / "report.html").read_text(encoding="utf-8").replace("<nav>", f"{image}<nav>", 1)
    (tmp_path / "planted.html").write_text(text, encoding="utf-8")
    page = browser.open(tmp_path / "planted.html")
    assert len(page.errors) == 2 and all("Content Security Policy" in error for error in page.errors)
    assert page.run("window.broken") is None
    (tmp_path / "open.html").write_text(re.sub(r'<meta http-equiv[^>]*>', "", text), encoding="utf-8")
    page = browser.open(tmp_path / "open.html")
    assert page.run("window.broken") == 1 and any(url.startswith("http:") for url in page.requests)


@needs_browser
def test_phone_and_dark_scheme(browser, page, run):
    phone = browser.open(run / "report.html", width=390, height=800, dark=True)
    assert phone.run("document.documentElement.scrollWidth") <= 390 and phone.errors == []
    right = "Math.max(...[...document.querySelectorAll('.chart, .tiles div, .sample, .verdict, nav, h1')]" \
            ".map(node => node.getBoundingClientRect().right))"
    assert phone.run(right) <= 390 and page.run(right) <= 1280      # no card beyond the page
    assert page.run("document.documentElement.scrollWidth") <= 1280
    look = "getComputedStyle(document.body).backgroundColor + getComputedStyle(document.body).color"
    paper, ink, dark_paper, dark_ink = (sum(map(int, re.findall(r"\d+", color))) for one in (page, phone)
                                        for color in re.findall(r"rgb\([^)]*\)", one.run(look)))
    assert paper > 700 and ink < 100 and dark_paper < 100 and dark_ink > 600


@needs_browser
def test_two_runs_in_one_page(browser, run, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    other = make_run(tmp_path / "other", steps=30, samples=(10, 30), scale=0.5,
                     args={**ARGS, "learning_rate": 1e-4, "max_steps": 60})
    done = make_report(run, other, "--sample_steps", 2)
    assert done.returncode == 0, done.stderr
    assert "comparison.html" in done.stdout and " 12 of 12 samples" in done.stdout
    page = browser.open(run / "comparison.html")
    drawn = page.run("panels.filter(panel => panel.title === 'loss').map(panel => panel.series.map(one => "
                     "[one.label, one.color, one.values.length]))")
    assert drawn == [[[f"{run.name} train", 0, 40], [f"{run.name} eval", 0, 4], ["other train", 1, 30],
                      ["other eval", 1, 3]]]
    page.mouse(*place(page, "train/loss", 25))
    said = tip(page, "train/loss")
    assert f"{train_values(25)['train/loss']:.5g}" in said and f"{train_values(25, 0.5)['train/loss']:.5g}" in said
    assert rows_of(page, "#different")[1:] == [["max_steps", "40", "60"], ["learning_rate", "5e-05", "0.0001"]]
    states = page.run("[...document.querySelectorAll('.state')].map(one => one.textContent)")
    assert states == ["finished", "running"]
    tiles = page.run("[...document.querySelectorAll('.tiles div')].map(tile => tile.innerText.replaceAll('\\n', ' '))")
    assert [tile[:7] for tile in tiles if tile.startswith("Ranks")] == ["Ranks 1", "Ranks 2"]
    labels = page.run("[...document.querySelector('.samples').children].map(one => one.firstChild.textContent)")
    assert [text.split(" · ")[1][:7] for text in labels] == ["step 10", "step 40", "step 10", "step 30"]
    assert page.errors == []


# ---------------------------------------------------------------------------------------------------------------------
# What it reads


def test_states_of_a_run(tmp_path):
    folder = make_run(tmp_path / "run", samples=())

    def state(after=0.0, **args):
        run = report.read_run(folder)
        run.args |= args
        return report.state(run, run.written + after)
    assert state() == ("finished", "at step 40, saved")
    assert state(max_steps=0, num_train_epochs=2)[0] == "finished"      # 20 steps an epoch
    assert state(max_steps=0, num_train_epochs=3)[0] == "running"
    (folder / "checkpoint-40" / "adapter_model.safetensors").write_bytes(b"short")
    damaged = report.read_run(folder).checkpoints[1]["wrong"]
    assert damaged == "adapter_model.safetensors has 5 bytes instead of 40000"
    assert state(30) == ("running", "last line 30 seconds ago")
    word, sentence = state(3 * 86400)
    assert word == "silent" and "72.0 hours ago" in sentence and sentence.endswith("goes on from step 20")
    (folder / "checkpoint-40" / "manifest.json").unlink()
    assert report.read_run(folder).checkpoints[1]["wrong"] == "no readable manifest.json"
    leave_marker(folder, "asked to stop by SIGTERM at step 40")
    assert state() == ("stopped", "asked to stop by SIGTERM at step 40; the same command goes on")


def test_sample_steps_are_spread_from_first_to_last(tmp_path):
    for step in (*range(100, 1300, 100), 50):
        plant(f"samples/step-{step}/a.wav", "")(tmp_path)
    (tmp_path / "samples" / "step-9999").mkdir()        # nothing in it yet

    def steps(wanted):
        return [step for step, _ in report.step_paths(tmp_path, "samples/step-*", wanted)]
    assert steps(0) == [50, *range(100, 1300, 100)] == steps(13) == steps(50)
    assert steps(5) == [50, 300, 600, 900, 1200] and steps(2) == [50, 1200] and steps(1) == [1200]


def test_answers_stand_block_by_block(tmp_path):
    """The texts of a file are a model's and a user's: none of them is markup."""
    folder = make_run(tmp_path / "run")
    (folder / "answers").mkdir()
    for step, text in ((4, "no"), (12, "6*3 = <b>18</b>")):
        growth = [["plan", "Mul"], ["plan", "Multiply."], ["text", text[:2]], ["text", text]]
        (folder / "answers" / f"step-{step}.json").write_text(json.dumps({"step": step, "answers": [
            {"question": "6 boxes <3>?", "answer": "18", "strict": step == 12, "text": text, "growth": growth}]}))
    make_report(folder)
    page = (folder / "report.html").read_text()
    assert page.count("6 boxes &lt;3&gt;? <b>18</b>") == 1
    blocks = [re.sub("<[^>]+>", "", cell) for cell in re.findall(r'<span class="block">(.*?)</span>', page)]
    assert blocks == ["Mul", "tiply.", "no", "", "Mul", "tiply.", "6*", "3 = &lt;b&gt;18&lt;/b&gt;"]
    assert page.index('class="bad">wrong') < page.index('class="good">right')


def test_long_curves_keep_their_spikes():
    rng = np.random.default_rng(0)
    steps, values = list(range(50_000)), rng.normal(size=50_000).tolist()
    values[31_313], values[7_777], values[40_404] = 99.0, -99.0, None
    short, kept = report.thin(steps, values)
    assert len(short) <= report.POINTS + 2 and short == sorted(set(short)) and short[0] == 0 and short[-1] == 49_999
    assert all(values[step] == value for step, value in zip(short, kept))
    assert {31_313, 7_777, 40_404} <= set(short)
    assert report.thin(steps[:2000], values[:2000]) == (steps[:2000], values[:2000])


def test_other_texts_of_the_same_name_stand_apart(tmp_path):
    def column(label, **texts):
        return label, [{"name": name, "text": text, "audio": ROOT / "pyproject.toml", "picture": None, "voice": None}
                       for name, text in texts.items()]
    text = report.sample_rows([column("step 1", a="one", b="two"), column("step 2", a="one"),
                               column("spoken", a="other")])
    assert re.findall(r"<blockquote>(.*?)</blockquote>|<figcaption>(.*?) </figcaption>", text) == [
        ("one", ""), ("", "step 1"), ("", "step 2"), ("other", ""), ("", "spoken"), ("two", ""), ("", "step 1")]


def test_page_has_a_bound(tmp_path, capsys):
    """64 prompts a step: the first 8 by name are shown, the console says so."""
    plant("metrics.jsonl", GOOD)(tmp_path)
    for step in (1, 2):
        for number in range(64):
            plant(f"samples/step-{step}/p{number}.wav", "x" * 999)(tmp_path)
    report.main([str(tmp_path)])
    text = (tmp_path / "report.html").read_text()
    assert re.findall("<h3>(p.*?)</h3>", text) == [f"p{number}" for number in range(8)] and text.count("<audio") == 16
    assert " 16 of 128 samples (--sample_count 8)" in capsys.readouterr().out
    report.main([str(tmp_path), "--sample_count", "0"])
    assert (tmp_path / "report.html").read_text().count("<audio") == 128


@pytest.mark.parametrize("metric, section, title", [
    ("train/stop_recall", "End of speech", "stop recall"), ("eval/wer", "Speech", "wer"),
    ("train/loss", "Loss", "loss"), ("eval/audio_loss_codebook_3", "Loss", "audio loss codebook · eval"),
    ("eval/nll_bound", "Loss", "nll bound"), ("train/padding", "Speed and memory", "padding"),
    ("system/gpu_memory_allocated", "Speed and memory", "gpu memory allocated"), ("surprise", "Other", "surprise"),
    ("a/b/c_d", "Other", "a/b/c d"), ("loss", "Loss", "loss"), ("eval/mask_rate", "Other", "mask rate")])
def test_metrics_find_their_section(metric, section, title, tmp_path):
    run = report.Run(tmp_path, "run", [{"step": 1, metric: 1.0}], [], [], {}, 0.0)
    (panel,) = report.panels([run])
    assert (panel["section"], panel["title"]) == (section, title)


def test_runs_with_the_standard_library_alone(run, tmp_path):
    """A copy of common/ elsewhere, without any installed package."""
    for name in ("common", "core"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(run, tmp_path / "run")
    done = make_report(tmp_path / "run", cwd=tmp_path, python=("-S", "-E"))
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert text.count("<audio") == 12 and text.endswith("</html>\n")


def plant(name, text):
    """A change of a run's folder."""
    def change(folder):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return change


GOOD = '{"step": 1, "train/loss": 2.0}\n'


@pytest.mark.parametrize("change, flags, said", [
    (lambda folder: shutil.rmtree(folder), [], "no metrics.jsonl in it; give the --output_dir"),
    (plant("metrics.jsonl", GOOD + "{oops}\n" + GOOD), [], "metrics.jsonl: 1 lines are not metrics, line 2 first"),
    (plant("samples/step-1/a.json", "{"), [], "samples/step-1/a.json: not valid JSON at line 1"),
    (plant("answers/step-1.json", '{"answers": [1]}'), [], "step-1.json: its answers are not a list of objects"),
    (plant("x/evaluation.json", '{"name": "a"}'), [], "x/evaluation.json: has no metrics; see evaluate_tts.py"),
    (plant("x/evaluation.json", '{"metrics": {}, "samples": [1]}'), [], "its samples are not a list of objects"),
    (plant("a", ""), ["--samples", "nowhere"], "--samples nowhere: no .wav file in it"),
    (plant("a", ""), ["--evaluations", "gone.json"], "gone.json: cannot be read (No such file"),
    (plant("a", ""), ["--sample_steps", "-1"], "--sample_steps is -1; it must be 0 or more"),
])
def test_bad_input_is_one_line(change, flags, said, tmp_path, capsys):
    folder = tmp_path / "run"
    plant("metrics.jsonl", GOOD)(folder)
    plant("samples/step-1/a.wav", "")(folder)
    change(folder)
    with pytest.raises(SystemExit) as stopped:
        report.main([str(folder), *flags])
    printed = capsys.readouterr()
    message = printed.err.rstrip("\n") or str(stopped.value.code)
    assert message.startswith("error: ") and said in message and "\n" not in message
    assert not list(tmp_path.rglob("*.html*")) and not printed.out


def test_no_other_file_of_the_disk_gets_into_the_page_or_is_written(run, tmp_path):
    """Samples may come from somebody else: a link, a FIFO, a JSON file that names a file outside them."""
    secret, folder = tmp_path / "secret.wav", tmp_path / "spoken"
    make_samples(folder, 3)
    shutil.copy(folder / "prompt-1.wav", secret)
    secret.write_bytes(secret.read_bytes() + b"only here")
    notes = folder / "prompt-1.json"
    for named in (str(secret), "../secret.wav"):
        notes.write_text(json.dumps(json.loads(notes.read_text()) | {"reference_audio": named}))
        os.symlink(secret, folder / "link.wav")
        os.mkfifo(folder / "pipe.wav")
        os.mkfifo(folder / "link.json")
        os.mkfifo(run / "evaluation.json")
        os.symlink(tmp_path / "victim", run / ".report.html.tmp")
        (tmp_path / "victim").write_text("whole")
        done = make_report(run, "--samples", folder)
        (run / "evaluation.json").unlink()
        assert done.returncode == 0, done.stderr
        assert base64.b64encode(secret.read_bytes()).decode() not in (run / "report.html").read_text()
        assert (tmp_path / "victim").read_text() == "whole"
        for name in ("link.wav", "pipe.wav", "link.json"):
            (folder / name).unlink()


def test_a_run_that_has_just_begun(tmp_path):
    """Not one whole line yet, no checkpoint, no sample: still a page."""
    plant("metrics.jsonl", '{"step": 1, "tr')(tmp_path)
    done = make_report(tmp_path)
    assert done.returncode == 0 and " 0 lines of metrics" in done.stdout
    assert "nothing logged yet" in (tmp_path / "report.html").read_text()


@pytest.mark.slow
def test_check_fell_on_a_real_run(forked, tmp_path):
    run = forked("--learning_rate", 1e-3, "--max_steps", 10, "--validation_split", 0.2, "--eval_steps", 5)
    done = make_report(run.output_dir, "--check_fell")
    losses = list(run.metrics("train/loss").values())
    first, last = sum(losses[:2]) / 2, sum(losses[-2:]) / 2         # fifths of ten steps
    assert done.returncode == 0 and f"{first:.3f} -> " in done.stdout and f"{last:.3f} fell" in done.stdout
    assert "NOT" not in done.stdout

    # the same run told backwards
    rows = [{**row, "step": 100 - row["step"]} for row in read_metrics(run.output_dir / "metrics.jsonl")]
    (tmp_path / "back").mkdir()
    (tmp_path / "back" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = make_report(tmp_path / "back", "--check_fell")
    assert done.returncode == 1 and "DID NOT FALL" in done.stdout and not done.stderr
    assert make_report(tmp_path / "back").returncode == 0       # without the flag it is a page about it


def test_check_fell_needs_two_losses(tmp_path):
    """Null, a loss that was not finite, is none."""
    rows = [{"step": 1, "train/loss": 2.0}, {"step": 2, "train/loss": None}, {"step": 3, "eval/loss": 1.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = make_report(tmp_path, "--check_fell")
    assert done.returncode == 1 and done.stderr.startswith("error: ") and "holds 1 training steps" in done.stderr
