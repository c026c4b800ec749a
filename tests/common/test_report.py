"""report.py: its page in a real headless Chromium, against the files it was made from."""
import http.server
import json
import math
import re
import shutil
import subprocess
import sys
import threading

import numpy as np
import pytest
import soundfile

from common import report, report_curves, report_files
from common.checkpoint import Writer
from common.distributed import UserError, World
from common.metrics import MetricsLog, read_metrics
from common.watchdog import leave_marker
from tests.helpers.chromium import PROGRAM, Chromium
from tests.helpers.progress import PATIENCE_S
from tests.helpers.trainer import ROOT

needs_browser = pytest.mark.skipif(PROGRAM is None, reason="chromium is not installed (apt-get install chromium)")

RATE, STEPS, EVALS, BAD = 24_000, 40, (10, 20, 30, 40), 13
PROMPTS = ("prompt-1", "prompt-2", "prompt-10")
TEXTS = ['</script><script>window.broken = 1</script><img src=x onerror="window.broken = 2">',
         "\"It's\" {{body}} & <b>bold</b>", "héllo, 你好 \ud800"]
ARGS = {"model_path": "voices/big-model", "use_lora": True, "max_steps": STEPS, "logging_steps": 1,
        "note": TEXTS[0], "learning_rate": 5e-5}


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
                    {"step": end, "best_step": 20, "best_loss": 4.0, "args": args})
        writer.wait()
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
         "samples": [{"name": TEXTS[0], "wer": 0.25}], "settings": {"asr": "small"}}))
    other = folder.parent / "base.json"
    other.write_text(json.dumps({"name": "base", "metrics": {"wer": 0.5, "similarity": 0.75,
                                                                  "f0_correlation": math.nan}}))
    make_samples(folder.parent / "spoken", 99)
    shutil.copy(folder / "samples" / "step-40" / "prompt-1.wav", folder.parent / "spoken" / "reference.wav")
    done = make_report(folder, "--samples", folder.parent / "spoken", "--evaluations", other)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"report     .*/report.html \(\d+\.\d [KM]iB\): 44 lines of metrics, 16 samples, "
                        r"2 evaluations\n", done.stdout)
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


def points(page):
    """{metric: number of points that its curve draws}, from the SVG paths themselves."""
    return page.run("Object.fromEntries([...document.querySelectorAll('path[data-metric]')]"
                    ".map(path => [path.dataset.metric, path.getAttribute('d').split(/[ML]/).length - 1]))")


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
    assert points(page) == {name: sum(value is not None for _, value in curve) for name, curve in expected.items()}
    drawn = page.run("panels.flatMap(panel => panel.series.map(one => [one.metric, one.steps, one.values]))")
    assert {name: list(zip(steps, values)) for name, steps, values in drawn} == \
        {name: [(step, value) for step, value in curve] for name, curve in expected.items()}
    assert len(page.run("[...document.querySelectorAll('.missing')].map(mark => mark.x1.baseVal.value)")) == 1

    table = {cells[0]: cells[1:] for cells in rows_of(page, "#numbers")[1:]}
    assert table.keys() == expected.keys()
    for name, curve in expected.items():
        values = [value for _, value in curve if value is not None]
        shown = [float(cell.replace(",", "")) for cell in table[name]]
        assert shown == pytest.approx([len(values), values[0], min(values), max(values), values[-1]], rel=1e-3), name
    tiles = page.run("Object.fromEntries([...document.querySelectorAll('.tiles div')]"
                     ".map(tile => [...tile.children].slice(0, 2).map(part => part.textContent)))")
    assert tiles == {"State": "finished", "Step": "40", "Training loss": "3.175", "Validation loss": "4.2",
                     "Throughput": "9,020 tok/s", "Time in steps": "0:00:10", "Peak memory": "1.54 GiB", "Ranks": "1",
                     "Resumed at": "20", "Model": "voices/big-model"}
    assert page.run("[...document.querySelectorAll('.verdict li')].map(one => one.textContent)") == [
        "Validation loss was best at step 20 (4.0000) and 5.0 % higher at step 40 while the training loss fell: "
        "overfitting, take checkpoint-20.", "<i>step 40<i>: speech is understood (word errors 12.5 %).",
        "Base: speech is partly understood (word errors 50 %).",
        "Steps skipped because their gradients were not finite: 1."]
    notes = page.run("[...document.querySelectorAll('.tiles small')].map(note => note.textContent)")
    assert {"2.0% of it waiting for data", "of 40", "first 10", "best 4 at step 20", "2 starts", "LoRA"} <= set(notes)
    assert [cells[0:3:2] + cells[5:] for cells in rows_of(page, ".checkpoints")[1:]] == \
        [["20 best", "4", "whole"], ["40", "4.2", "whole"]]
    assert dict(rows_of(page, "#settings")[1:]) == {name: json.dumps(value) for name, value in ARGS.items()}
    assert rows_of(page, "#evaluations") == [["metric", "<i>step 40<i>", "base"], ["wer", "0.125", "0.5"],
                                             ["f0_correlation", "–", "–"], ["similarity", "–", "0.75"]]
    headings = page.run("[...document.querySelectorAll('.chart figcaption span')].map(span => span.textContent)")
    assert len(headings) == len(set(headings)) and "spread</script>" in headings

    assert page.errors == []
    outside = [url for url in page.requests if not url.startswith("data:")]
    assert outside == [(run / "report.html").as_uri()]


@needs_browser
def test_hover_log_legend_smoothing_zoom(page, run):
    values = {row["step"]: row["train/loss"] for row in read_metrics(run / "metrics.jsonl") if "train/loss" in row}
    page.mouse(*place(page, "train/loss", 30))
    assert tip(page, "train/loss").split() == ["step", "30", "train", f"{values[30]:.5g}", "eval", "4.1"]
    left, top, right, bottom = page.run("""(() => {
        const tip = document.querySelector('.tip:not([hidden])'), box = tip.getBoundingClientRect();
        const one = tip.closest('figure').getBoundingClientRect();
        return [box.left - one.left, box.top - one.top, one.right - box.right, one.bottom - box.bottom]; })()""")
    assert min(left, top, right) >= 0 and bottom > 100     # in its chart, beside the line
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
    click(".legend button:nth-child(2)")
    assert shape("eval/loss") is None and shape()
    click(".legend button:nth-child(2)")
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
    steps = "[...document.querySelectorAll('.chart')].map(one => one.view.all).filter(all => all.length)"
    assert all(all_ in (list(range(10, 21)), [10, 20]) for all_ in page.run(steps))
    for count in (1, 2):
        page.mouse(x, y, "mousePressed", button="left", clickCount=count)
        page.mouse(x, y, "mouseReleased", button="left", clickCount=count)
    assert shape() == plain and page.errors == []


@needs_browser
def test_first_values_do_not_crush_the_rest_and_what_is_steady_is_flat(page):
    figure = "document.querySelector('[data-metric=\"{}\"]').closest('figure')"
    loss, speed = figure.format("train/loss"), figure.format("train/throughput")
    height = "{}.querySelector('.curve').getBBox().height"
    assert page.run(f"{loss}.view.y(10)") < 0 < page.run(f"{loss}.view.y(4.4)")       # where it begins, and goes on
    assert page.run(f"{loss}.all.hidden") is False and page.run(height.format(loss)) > 220
    page.run(f"{loss}.all.click()")
    assert page.run(f"{loss}.view.y(10)") > 0 and page.run(height.format(loss)) < 220
    page.run(f"{loss}.all.click()")
    assert page.run(height.format(speed)) < 60 and page.run(f"{speed}.all.hidden") is True      # 9,001 to 9,040
    labels = "[...{}.querySelectorAll('svg text')].map(text => text.textContent)"
    labels = page.run(labels.format(figure.format("eval/stop_recall")))
    assert "100 %" in labels and "101 %" not in labels


@needs_browser
def test_samples_can_be_heard_and_seen(page, run):
    files = [folder / f"{name}.wav" for name in PROMPTS for folder in
             (*(run / "samples" / f"step-{step}" for step in EVALS), run.parent / "spoken")]
    page.run("""Promise.all([...document.querySelectorAll('audio')].map(audio => audio.readyState >= 1 ||
                new Promise(done => { audio.onloadedmetadata = audio.onerror = done; })))""")
    names = page.run("[...document.querySelectorAll('.sample')].map(one => one.dataset.name)")
    assert names == [file.stem for file in files] + ["reference"]
    durations = page.run("[...document.querySelectorAll('.sample audio')].map(a => a.error ? null : a.duration)")
    waves = [soundfile.read(file)[0] for file in files]
    assert durations[:-1] == pytest.approx([len(wave) / RATE for wave in waves], abs=1e-3)
    for place_, wave in enumerate(waves):       # the very samples of the file
        heard = page.run(f"""(async () => {{
            const source = document.querySelectorAll('.sample audio')[{place_}].src.split(',')[1];
            const bytes = Uint8Array.from(atob(source), letter => letter.charCodeAt(0));
            const audio = await new OfflineAudioContext(1, 1, {RATE}).decodeAudioData(bytes.buffer);
            return [audio.length, ...audio.getChannelData(0).filter((_, i) => i % 1000 === 0)]; }})()""")
        assert heard == pytest.approx([len(wave), *wave[::1000]], abs=1e-4)
    played = page.run("""(async () => {
        const [one, other] = document.querySelectorAll('.sample audio');
        await one.play();
        await new Promise(done => { one.ontimeupdate = () => one.currentTime > 0 && done(); });
        await other.play();
        await new Promise(done => setTimeout(done, 50));
        const heard = [one.currentTime > 0, one.paused, other.paused];
        other.pause();
        return heard; })()""")
    assert played == [True, True, False]

    page.run("Promise.all([...document.images].map(image => { image.loading = 'eager'; return image.decode(); }))")
    sizes = page.run("[...document.querySelectorAll('.sample img')].map(image => [image.naturalWidth, image.alt])")
    assert [width for width, _ in sizes] == [len(wave) // 960 for wave in waves]      # one column a frame
    assert sizes[0][1] == "mel spectrogram of prompt-1, step 10"

    cells = page.run("[...document.querySelectorAll('.sample')].map(one => one.innerText)")
    assert "step 10" in cells[0] and "cut off by length" in cells[0] and "0.80 s · 20 frames · seed 7" in cells[0]
    assert "step 40" in cells[3] and "ended by itself" in cells[3] and "real-time factor 0.50" in cells[3]
    assert cells[4].startswith("spoken") and page.errors == []
    heads = page.run("[...document.querySelectorAll('blockquote')].map(one => one.textContent)")
    assert heads[:2] == TEXTS[:2] and heads[2] == TEXTS[2].replace("\ud800", "?")
    assert page.run("document.querySelectorAll('.reference audio').length") == 3


@needs_browser
def test_text_is_never_code(page):
    assert page.run("window.broken") is None and page.run("document.scripts.length") == 2
    assert page.run("document.querySelectorAll('#Samples b, #Evaluation i, [onerror]').length") == 0
    first = rows_of(page, "#Evaluation details:nth-of-type(1)")
    assert [TEXTS[0], "0.25"] in first and ["asr", '"small"'] in first


@needs_browser
def test_page_forbids_itself_network_and_foreign_scripts(browser, run, tmp_path):
    """Also the proof that a request or an error would be seen."""
    asked = []

    class Server(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_error(404)

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    image = f'<img src="http://127.0.0.1:{server.server_port}/a.png"><script>window.broken = 1</script>'
    text = (run / "report.html").read_text(encoding="utf-8").replace("<nav>", f"{image}<nav>", 1)
    (tmp_path / "planted.html").write_text(text, encoding="utf-8")
    page = browser.open(tmp_path / "planted.html")
    assert len(page.errors) == 2 and all("Content Security Policy" in error for error in page.errors)
    assert not asked and page.run("window.broken") is None
    open_ = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", text)
    (tmp_path / "open.html").write_text(open_, encoding="utf-8")
    page = browser.open(tmp_path / "open.html")
    assert asked == ["/a.png"] and page.run("window.broken") == 1
    assert any(url.startswith("http:") for url in page.requests)
    seen = len(page.errors)
    page.run("console.error('planted'); setTimeout(() => { throw Error('planted'); })")
    page.run("new Promise(done => setTimeout(done, 20))")
    assert sum("planted" in error for error in page.errors) == 2 <= len(page.errors) - seen
    server.shutdown()


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
    assert "comparison.html" in done.stdout and " 12 samples" in done.stdout
    page = browser.open(run / "comparison.html")
    drawn = page.run("panels.filter(panel => panel.title === 'loss').map(panel => panel.series.map(one => "
                     "[one.label, one.color, one.values.length]))")
    assert drawn == [[[f"{run.name} train", 0, 40], [f"{run.name} eval", 0, 4], ["other train", 1, 30],
                      ["other eval", 1, 3]]]
    limits = page.run("[...document.querySelectorAll('.chart')].filter(one => one.textContent.includes('codebook'))"
                      ".map(one => [one.view.y(2), one.view.y(5)])")
    assert len(limits) == 2 and limits[0] == limits[1]      # one scale, so that they compare
    page.mouse(*place(page, "train/loss", 25))
    said = tip(page, "train/loss")
    assert f"{train_values(25)['train/loss']:.5g}" in said and f"{train_values(25, 0.5)['train/loss']:.5g}" in said
    assert rows_of(page, "#different")[1:] == [["max_steps", "40", "60"], ["learning_rate", "5e-05", "0.0001"]]
    states = page.run("[...document.querySelectorAll('.state')].map(one => one.textContent)")
    assert states == ["finished", "running"]
    tiles = page.run("[...document.querySelectorAll('.tiles div')].map(tile => tile.innerText.replaceAll('\\n', ' '))")
    assert [tile for tile in tiles if tile.startswith("Ranks")] == ["Ranks 1 2 starts", "Ranks 2 2 starts"]
    labels = page.run("[...document.querySelector('.samples').parentNode.querySelectorAll('.samples')].slice(0, 2)"
                      ".map(row => [...row.querySelectorAll('figcaption')].map(one => one.textContent))")
    assert [[text.split(" · ")[1][:7] for text in row] for row in labels] == [["step 10", "step 40"],
                                                                             ["step 10", "step 30"]]
    assert page.errors == []


# ---------------------------------------------------------------------------------------------------------------------
# What it reads


def test_states_of_a_run(tmp_path):
    folder = make_run(tmp_path / "run", samples=())

    def state(after=0.0):
        run = report_files.read_run(folder)
        return report_files.state(run, run.written + after)
    assert state() == ("finished", "at step 40, saved")
    (folder / "checkpoint-40" / "adapter_model.safetensors").write_bytes(b"short")
    damaged = report_files.read_run(folder).checkpoints[1]["wrong"]
    assert damaged == "adapter_model.safetensors has 5 bytes instead of 40000"
    assert state(30) == ("running", "last line 30 seconds ago")
    word, sentence = state(3 * 86400)
    assert word == "silent" and "3 days ago" in sentence and sentence.endswith("goes on from step 20")
    (folder / "checkpoint-40" / "manifest.json").unlink()
    assert report_files.read_run(folder).checkpoints[1]["wrong"] == "no manifest.json"
    leave_marker(folder, "asked to stop by SIGTERM at step 40")
    assert state() == ("stopped", "asked to stop by SIGTERM at step 40; the same command goes on")
    (folder / "requeue").unlink()
    (folder / "starts.jsonl").unlink()      # of a run from before it was written: flags come from a checkpoint
    assert report_files.read_run(folder).args == ARGS


def test_epochs_tell_the_end_as_well(tmp_path):
    args = {"num_train_epochs": 2, "max_steps": 0}
    folder = make_run(tmp_path / "run", samples=(), args=args)
    run = report_files.read_run(folder)        # 20 steps an epoch
    assert report_files.total_steps(run) == 40 and report_files.state(run)[0] == "finished"
    run.args = {"num_train_epochs": 2, "max_steps": None}
    assert report_files.total_steps(run) == 40 and report_files.state(run)[0] == "finished"
    run.args = {**args, "num_train_epochs": 3}
    assert report_files.total_steps(run) == 60 and report_files.state(run)[0] == "running"


def test_sample_steps_are_spread_from_first_to_last(tmp_path):
    for step in (*range(100, 1300, 100), 50):
        (tmp_path / "samples" / f"step-{step}").mkdir(parents=True)
        (tmp_path / "samples" / f"step-{step}" / "a.wav").touch()
    (tmp_path / "samples" / "step-9999").mkdir()        # nothing in it yet

    def steps(wanted):
        return [step for step, _ in report_files.sample_steps(tmp_path, wanted)]
    assert steps(0) == [50, *range(100, 1300, 100)]
    assert steps(5) == [50, 300, 600, 900, 1200] and steps(2) == [50, 1200] and steps(1) == [1200]
    assert steps(13) == steps(50) == steps(0)


def test_answers_stand_block_by_block(tmp_path):
    """The texts of a file are a model's and a user's: none of them is markup."""
    folder = make_run(tmp_path / "run")
    (folder / "answers").mkdir()
    for step, text in ((4, "no"), (12, "6*3 = <b>18</b>")):
        growth = [["plan", "Mul"], ["plan", "Multiply."], ["text", text[:2]], ["text", text]]
        (folder / "answers" / f"step-{step}.json").write_text(json.dumps({"step": step, "answers": [
            {"question": "6 boxes <3>?", "answer": "18", "strict": step == 12, "text": text, "growth": growth}]}))
    assert [step for step, _ in report_files.answer_steps(folder, 1)] == [12]
    make_report(folder)
    page = (folder / "report.html").read_text()
    assert page.count("6 boxes &lt;3&gt;? <b>18</b>") == 1
    blocks = [re.sub("<[^>]+>", "", cell) for cell in re.findall(r'<span class="block">(.*?)</span>', page)]
    assert blocks == ["Mul", "tiply.", "no", "", "Mul", "tiply.", "6*", "3 = &lt;b&gt;18&lt;/b&gt;"]
    assert page.index('class="bad">wrong') < page.index('class="good">right')
    (folder / "answers" / "step-12.json").write_text('{"answers": [1]}')
    with pytest.raises(UserError, match="step-12.json: its answers are not a list of objects"):
        report_files.answer_steps(folder, 0)


def test_long_curves_keep_their_spikes():
    rng = np.random.default_rng(0)
    steps, values = list(range(50_000)), rng.normal(size=50_000).tolist()
    values[31_313], values[7_777], values[40_404] = 99.0, -99.0, None
    short, kept = report_curves.thin(steps, values)
    assert len(short) <= report_curves.POINTS and short == sorted(set(short)) and short[0] == 0 and short[-1] == 49_999
    assert all(values[step] == value for step, value in zip(short, kept))
    assert {31_313, 7_777, 40_404} <= set(short)
    assert report_curves.thin(steps[:2000], values[:2000]) == (steps[:2000], values[:2000])


def columns_of(*columns):
    """[(row, label, [(name, text)])] -> what sample_rows takes."""
    return [(row, label, [report_files.Sample(name, ROOT / "pyproject.toml", facts={"text": text} if text else {})
                          for name, text in prompts]) for row, label, prompts in columns]


def test_other_texts_of_the_same_name_stand_apart():
    text = report.sample_rows(columns_of((0, "step 1", [("0000", "one"), ("0001", "two")]),
                                         (0, "step 2", [("0000", "one"), ("0001", "two")]),
                                         (0, "spoken", [("0000", "other"), ("0001", None)])))
    parts = [re.findall(r"<blockquote>(.*?)</blockquote>|<figcaption>(.*?) </figcaption>", part)
             for part in text.split("<h3>")[1:]]
    assert [[heading or label for heading, label in part] for part in parts] == [
        ["one", "step 1", "step 2"], ["other", "spoken"], ["two", "step 1", "step 2", "spoken"]]


def test_page_has_a_bound(tmp_path, monkeypatch, capsys):
    """64 prompts a step: the first 8 by name are shown, the page and the console say so."""
    plant("metrics.jsonl", GOOD)(tmp_path)
    for step in (1, 2):
        for number in range(64):
            plant(f"samples/step-{step}/p{number}.wav", "x" * 999)(tmp_path)
    report.main([str(tmp_path)])
    said, text = capsys.readouterr().out, (tmp_path / "report.html").read_text()
    left_out = ("112 of 128 samples left out: of each step and folder the first 8 are shown (--sample_count, 0 = all)")
    assert text.count("<audio") == 16 and f'<p class="path" id="left-out">{left_out}</p>' in text
    assert re.findall("<h3>(.*?)</h3>", text)[:8] == [f"p{number}" for number in range(8)]
    assert f" 16 samples, 0 evaluations; {left_out}\n" in said and "notice" not in said
    monkeypatch.setattr(report, "NOTICE_BYTES", len(text) + 1000)
    report.main([str(tmp_path), "--sample_count", "0"])
    said, text = capsys.readouterr().out, (tmp_path / "report.html").read_text()
    assert text.count("<audio") == 128 and "left-out" not in text and "left out" not in said
    assert re.search(r"^notice: .*report.html is large \(.*\): a smaller --sample_steps \(now 5\) or --sample_count "
                     r"\(now 0\)", said, re.M)


@needs_browser
def test_reference_voices_of_any_kind_play(browser, tmp_path):
    wave, names = 0.3 * np.sin(np.arange(RATE) * 0.05), ("a.wav", "b.WAV", "c.flac", "d.mp3", "e.ogg")
    plant("metrics.jsonl", GOOD)(tmp_path)
    for name in names:
        soundfile.write(tmp_path / name, wave, RATE)
        plant(f"spoken/{name[0]}.json", json.dumps({"reference_audio": str(tmp_path / name)}))(tmp_path)
        shutil.copy(tmp_path / "a.wav", tmp_path / "spoken" / f"{name[0]}.wav")
    plant("spoken/z.json", json.dumps({"reference_audio": str(tmp_path / "metrics.jsonl")}))(tmp_path)
    shutil.copy(tmp_path / "a.wav", tmp_path / "spoken" / "z.wav")
    assert make_report(tmp_path, "--samples", tmp_path / "spoken").returncode == 0
    page = browser.open(tmp_path / "report.html")
    page.run("""Promise.all([...document.querySelectorAll('audio')].map(audio => audio.readyState >= 1 ||
                new Promise(done => { audio.onloadedmetadata = audio.onerror = done; })))""")
    voices = page.run("[...document.querySelectorAll('.reference')].map(one => [one.innerText.trim(), "
                      "one.firstElementChild.error === null, one.firstElementChild.duration])")
    assert [voice[:2] for voice in voices] == [[f"reference voice: {name}", True] for name in names]
    assert [voice[2] for voice in voices] == pytest.approx([1.0] * 5, abs=0.1)


@pytest.mark.parametrize("metric, section, title", [
    ("train/stop_recall", "End of speech", "stop recall"), ("eval/false_stop_rate", "End of speech", "false stops"),
    ("eval/stop_rate", "End of speech", "sample prompts that ended by themselves"),
    ("eval/length_ratio", "End of speech", "length of sample prompts"),
    ("train/loss", "Loss", "loss"), ("eval/audio_loss_codebook_3", "Loss", "audio loss by codebook · eval"),
    ("eval/nll_bound", "Loss", "nll bound"), ("train/tokens_per_second", "Speed and memory", "tokens per second"),
    ("system/gpu_memory_allocated", "Speed and memory", "GPU memory allocated"), ("surprise", "Other", "surprise"),
    ("a/b/c_d", "Other", "b/c d"), ("train/exact_match_accuracy", "Loss", "exact match accuracy"),
    ("loss", "Loss", "loss"), ("eval/mask_rate", "Other", "mask rate")])
def test_metrics_find_their_section(metric, section, title, tmp_path):
    run = report_files.Run(tmp_path, "run", [{"step": 1, metric: 1.0}])
    (panel,) = report_curves.panels([run])
    assert (panel["section"], panel["title"]) == (section, title)


def test_runs_with_the_standard_library_alone(run, tmp_path):
    """A copy of common/ elsewhere, without any installed package."""
    shutil.copytree(ROOT / "common", tmp_path / "common", ignore=shutil.ignore_patterns("__pycache__"))
    done = make_report(run, "--output", tmp_path / "copy.html", cwd=tmp_path, python=("-S", "-E"))
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "copy.html").read_text(encoding="utf-8")
    assert text.count("<audio") == 12 and text.endswith("</html>\n")
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["copy.html"]


def plant(name, text):
    """A change of a run's folder."""
    def change(folder):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return change


GOOD = '{"step": 1, "train/loss": 2.0}\n'


@pytest.mark.parametrize("change, flags, said", [
    (lambda folder: shutil.rmtree(folder), [], "no such folder; give the --output_dir of a run"),
    (lambda folder: (folder / "metrics.jsonl").unlink(), [], "no metrics.jsonl in it; give the --output_dir"),
    (plant("metrics.jsonl", GOOD + "{oops}\n" + GOOD), [], "metrics.jsonl: line 2 cannot be read (is not JSON (Exp"),
    (plant("metrics.jsonl", GOOD + GOOD + "{oops}\n"), [], "metrics.jsonl: line 3 cannot be read"),
    (plant("metrics.jsonl", GOOD + "[1]\n"), [], "line 2 cannot be read (not an object): '[1]'"),
    (plant("metrics.jsonl", '{"train/loss": 2.0}\n'), [], "a line has no whole number as its step"),
    (plant("metrics.jsonl", '{"step": 1, "train/loss": "low"}\n'), [], 'step 1: train/loss is "low", not a number'),
    (plant("samples/step-1/a.json", "{"), [], "samples/step-1/a.json: not valid JSON at line 1"),
    (plant("samples/step-1/a.json", "[]"), [], "samples/step-1/a.json: holds a JSON list, not an object"),
    (plant("x/evaluation.json", '{"name": "a"}'), [], "x/evaluation.json: has no metrics; evaluate_tts.py writes"),
    (plant("x/evaluation.json", '{"metrics": {"wer": "low"}}'), [], 'evaluation.json: wer is "low", not a number'),
    (plant("x/evaluation.json", '{"metrics": {}, "samples": [1]}'), [], "its samples are not a list of objects"),
    (plant("x/evaluation.json", '{"metrics": {}, "settings": []}'), [], "its settings are not an object"),
    (plant("a", ""), ["--samples", "nowhere"], "--samples nowhere: no .wav file in it"),
    (plant("a", ""), ["--evaluations", "gone.json"], "gone.json: cannot be read (No such file"),
    (plant("a", ""), ["--sample_steps", "-1"], "--sample_steps is -1; it must be 0 or more"),
    (plant("a", ""), ["--sample_count", "-1"], "--sample_count is -1; it must be 0 or more"),
    (plant("a", ""), ["--output", "no/where.html"], "--output no/where.html: there is no folder no"),
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
    assert "train/audio_loss" in done.stdout and "NOT" not in done.stdout

    # the same run told backwards
    rows = (run.output_dir / "metrics.jsonl").read_text().splitlines()
    (tmp_path / "back").mkdir()
    (tmp_path / "back" / "metrics.jsonl").write_text("".join(row + "\n" for row in reversed(rows)))
    done = make_report(tmp_path / "back", "--check_fell")
    assert done.returncode == 1 and "DID NOT FALL" in done.stdout and not done.stderr
    assert make_report(tmp_path / "back").returncode == 0       # without the flag it is a page about it


def test_check_fell_needs_two_losses(tmp_path):
    """Null, a loss that was not finite, is none."""
    rows = [{"step": 1, "train/loss": 2.0}, {"step": 2, "train/loss": None}, {"step": 3, "eval/loss": 1.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = make_report(tmp_path, "--check_fell")
    assert done.returncode == 1 and done.stderr.startswith("error: ") and "holds 1 training steps" in done.stderr
