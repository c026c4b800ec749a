"""README and docs: named flags and files exist, links lead somewhere, numbers equal the measured ones."""
import json
import re
import subprocess

import pytest

from speech import convert
from speech.speak import read_samples
from tests.helpers.trainer import ROOT
from tests.launch.test_launchers import environment

PAGES = [ROOT / "README.md", ROOT / ".github/CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
TEXTS = {page.relative_to(ROOT).as_posix(): page.read_text() for page in PAGES}
# Flags of other programs in the documents.
FOREIGN = {"--container-image", "--container-mounts", "--nproc_per_node", "--max-restarts", "--nodes", "--time",
           "--signal", "--batch", "--logdir", "--help", "--no-deps", "--omni", "--dllm-algorithm-config",
           "--model-path", "--trust-remote-code", "--enable-lora", "--max-lora-rank", "--max-logprobs", "--extra",
           "--word_timestamps", "--output_format", "--model", "--partition", "--account", "--repo-type", "--local-dir"}


def fences(text):
    opened = None
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("```"):
            if opened is None:
                opened = (line[3:].strip(), number + 1, [])
            else:
                yield opened
                opened = None
        elif opened:
            opened[2].append(line)
    assert opened is None, f"line {opened[1]}: a block that is not closed"


def without_blocks(text):
    return re.sub(r"^```.*?^```$", lambda fence: "\n" * fence[0].count("\n"), text, flags=re.MULTILINE | re.DOTALL)


# Examples of docs/data.md: {(heading, index of the block): (file name, audio files, {name: text} of other files)}
EXAMPLES = {
    ("ChatML", 0): ("train.json", ["clips/reference.wav", "clips/target.wav"], {}),
    ("A table with a header", 0): ("train.csv", ["clips/0001.wav", "clips/0002.wav"], {}),
    ("A table with a header", 1): ("train.csv", ["talk.flac"], {}),
    ("Long recordings with subtitles", 0): ("NAME.srt", ["NAME.wav"], {}),
    ("LJSpeech and other tables without a header", 0): ("metadata.csv", ["wavs/LJ001-0001.wav"], {}),
    ("GPT-SoVITS and Bert-VITS2", 0): ("train.list", ["wavs/0001.wav"], {}),
    ("Kaldi", 0): ("", ["wavs/0001.wav"], {}),
    ("ms-swift", 0): ("train.jsonl", ["0001.wav"], {}),
    ("VibeVoice", 0): ("train.jsonl", ["1.wav", "a.wav", "b.wav"], {}),
    ("metadata.json of Higgs trainers", 0): ("metadata.json", ["0001.wav"], {"0001.txt": "Good morning."})}


@pytest.mark.parametrize("heading, number", EXAMPLES)
def test_example_of_data_is_read(heading, number, tmp_path):
    name, audio, texts = EXAMPLES[heading, number]
    section = TEXTS["docs/data.md"].partition(f"### {heading}\n")[2].partition("\n##")[0]
    text = "\n".join(list(fences(section))[number][2]) + "\n"
    files = {name: text} | texts if name else dict(re.findall(r"^(\S+): +(.*\n)", text, re.MULTILINE))
    for file, content in (files | dict.fromkeys(audio, "audio")).items():
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(content)
    source, problems = tmp_path if name in ("", "NAME.srt", "metadata.json") else tmp_path / name, []
    assert list(read_samples(source, problems)) and not problems


def test_every_flag_that_is_named_exists():
    code = "".join(path.read_text() for folder in (".", "speech", "diffusion", "distill", "core", "bench")
                   for path in (ROOT / folder).glob("*.py"))
    known = {flag for flag in re.findall(r"""["'](--[a-z]\w*)["']""", code)} | FOREIGN
    for page, text in TEXTS.items():
        for span in [*re.findall("`[^`]+`", without_blocks(text)), *("\n".join(lines) for _, _, lines in fences(text))]:
            for flag in re.findall(r"(?<![\w-])--[a-z][\w-]*", span):
                assert flag in known or flag.replace("--no-", "--") in known, f"{page}: no script has {flag}"


def slug(heading):
    words = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()
    return re.sub(r"[^\w\- ]", "", words).strip().replace(" ", "-")


def test_links_lead_somewhere():
    anchors = {page: {slug(line.lstrip("#")) for line in without_blocks(text).splitlines() if line.startswith("#")}
               for page, text in TEXTS.items()}
    for page, text in TEXTS.items():
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            if target.startswith("http"):
                continue
            path, _, anchor = target.partition("#")
            file = (ROOT / page).parent / path if path else ROOT / page
            assert file.exists(), f"{page}: {target} leads nowhere"
            if anchor and not path.endswith(".py"):     # line numbers: see test_links_to_lines
                name = file.resolve().relative_to(ROOT).as_posix()
                assert anchor in anchors[name], f"{page}: {name} has no heading #{anchor}"


# {words of a link in README: pattern of the line of code that it must point to}
PLACES = {"end-of-stream label": r"delay_rows\(clip, IGNORE, eos", "resume position": r"epoch, first_pack = \(state\.get",
          "averaged over the ranks": r"\(loss \* \(?world\.size", "block is unmasked": r"^def unmask\(",
          "KL divergence": r"^def divergence\("}


@pytest.mark.parametrize("words", PLACES)
def test_links_to_lines(words):
    path, line = re.search(rf"\[[^]]*{words}[^]]*\]\(([\w/.]+)#L(\d+)\)", TEXTS["README.md"]).groups()
    lines = [number for number, text in enumerate((ROOT / path).read_text().splitlines(), 1)
             if re.search(PLACES[words], text)]
    assert lines == [int(line)], f"README.md: the link \"{words}\" to {path} should lead to one of the lines {lines}"


def test_files_that_are_named_exist():
    folders = "speech|diffusion|distill|core|launch|tests|bench|docs"
    named = re.compile(rf"(?<![\w/.~:-])((?:{folders})/[\w/.*-]+\.(?:py|sh|txt|md|json|jinja|png|html))\b")
    for page, text in TEXTS.items():
        for path in named.findall(text):
            assert list(ROOT.glob(path)), f"{page}: there is no {path}"
        for name, path in re.findall(r"`(\w+)` in `([\w/]+\.py)`", text):
            assert f"def {name}(" in (ROOT / path).read_text(), f"{page}: {path} has no {name}"
        for path in re.findall(r"`([\w]+\.py)`", text):
            assert (ROOT / path).is_file() or list(ROOT.glob(f"*/{path}")), f"{page}: there is no {path}"


def test_columns_and_errors_of_data_are_those_of_the_code():
    shown = set(re.findall(r"`(\w+)`", TEXTS["docs/data.md"].partition("## Columns")[2].partition("\n## ")[0]))
    assert shown >= {name for names in convert.COLUMNS.values() for name in names.split()}
    code = "".join(path.read_text() for folder in (".", "speech", "core", "distill", "diffusion")
                   for path in (ROOT / folder).glob("*.py"))
    code = re.sub(r"\"\n\s+f?\"", "", code)     # joins a text over two lines
    tables = TEXTS["docs/troubleshooting.md"].partition("## Errors of speech data")[2].partition("\n## FAQ")[0]
    rows = re.findall(r"^\| (`.*?) \|", tables, re.MULTILINE)
    messages = [text for row in rows for text in re.findall(r"`([^`]+)`", row)]
    assert len(messages) > 30
    for text in messages:
        assert text in code, f"docs/troubleshooting.md: no message contains {text!r}"


def test_readme_is_short_and_links_every_page():
    readme = TEXTS["README.md"]
    assert len(readme.splitlines()) <= 110
    for page in set(TEXTS) - {"README.md"}:
        assert f"]({page}" in readme, f"README does not lead to {page}"


def test_guides_are_short_and_plain():
    """They have few words, lines of at most 100 columns, and no dates, seeds or commits."""
    assert sum(len(text.split()) for page, text in TEXTS.items() if page != "README.md") <= 14_000
    assert len(TEXTS["docs/dropped.md"].splitlines()) <= 100
    for page, text in TEXTS.items():
        text = re.sub(r"<!-- table .*?<!-- end table -->", "", text, flags=re.DOTALL)   # of bench/table.py
        long = [line for line in text.splitlines() if len(line) > 100]
        assert not long, f"{page}: more than 100 columns: {long}"
        if page != "docs/dropped.md":
            matches = re.findall(r"\b20\d\d-\d\d-\d\d\b|\b(?=[a-f]*\d)(?=\d*[a-f])[0-9a-f]{7}\b|\bseed \d+", text)
            assert not matches, f"{page}: {matches}"


def test_speed_on_a_gpu_equals_the_measurements():
    """Each row of README and docs/speed.md equals the row of h200.jsonl with the same tokens/s and MFU."""
    lines = (ROOT / "bench" / "results" / "h200.jsonl").read_text().splitlines()
    measured = {tuple(f"{row[key]:{form}}" for key, form in (("tokens_s", ",.0f"), ("mfu_989", ".1f"))): row
                for row in map(json.loads, lines) if "mfu_989" in row}
    for page, least in (("README.md", 4), ("docs/speed.md", 6)):
        pattern = r"^\| [^|]+ \| ([\d.]+) \| ([\d,]+) \|(?: [\d.]+ % \|)? ([\d.]+) % \| ([\d.]+) \(([\d.]+)\) \|$"
        rows = re.findall(pattern, TEXTS[page], re.MULTILINE)
        assert len(rows) >= least
        for ms, tokens, mfu, peak, planned in rows:
            row = measured[tokens, mfu]
            for shown, key in ((ms, "step_ms"), (peak, "peak_gib"), (planned, "planned_gib")):
                digits = len(shown.partition(".")[2])
                assert shown == f"{row[key]:.{digits}f}", f"{page}: {row['name']}: {key} is {row[key]}"


@pytest.mark.slow
def test_the_demo_of_the_readme(tmp_path, quick):
    """A run on few clips, steps and sentences: every part works, and the verdict is that the voice is not learnt."""
    assert "bash launch/demo.sh " in TEXTS["README.md"]
    voice, settings = ROOT / "launch" / "voice", {"VENV": "none", "OUT": str(tmp_path), "STEPS": "8", "RANKS": "1"}
    samples = json.loads((voice / "train.json").read_text())[:16]
    for sample in samples:
        clip = sample["messages"][-1]["content"]
        clip["audio_url"] = str(voice / clip["audio_url"])
    (tmp_path / "train.json").write_text(json.dumps(samples))
    settings |= {"DATA": str(tmp_path / "train.json"), "SENTENCES": "4", **quick}
    done = subprocess.run(["bash", ROOT / "launch" / "demo.sh"], text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, env=environment(**settings))
    assert done.returncode == 1, done.stdout[-3000:]
    assert "verdict    FAILED: word errors" in done.stdout and "resumed from" in done.stdout, done.stdout[-3000:]
    assert len(done.stdout.splitlines()) <= 55      # 60 with the step lines of the whole demo
    page, = tmp_path.glob("run-*/report.html")
    assert re.search(r"<li>After: word errors \d", page.read_text())
    # the picture shows the page of a whole demo, 1300 x 1440 in Chromium; its caption lists the parts
    parts = ", ".join(re.findall("<h2>([^<]+)</h2>", page.read_text()))
    assert f"![The demo's report: {parts}](docs/report.png)" in " ".join(TEXTS["README.md"].split()), parts
