"""Every form of a speech data set becomes the same canonical conversation, and no text is lost."""
import itertools
import json

import pytest

from speech.conversations import DEFAULT_SYSTEM, Clip
from speech.speak import read_samples
from speech.speak import canonical_prompt

REFERENCE, TARGET = "This is how I sound.", "He cried: stop: now."
CANONICAL_SYSTEM = (DEFAULT_SYSTEM + "\n\n<|scene_desc_start|>\nAudio is recorded from a quiet room.\n"
                    "<|scene_desc_end|>")
INSTRUCTION = "Please generate speech for given text in reference audio's voice: "


@pytest.fixture
def folder(tmp_path):
    """A data folder with audio files; readers check that they exist, but never open them."""
    for name in ("ref.wav", "ref2.wav", "target.wav", "other.wav"):
        (tmp_path / name).write_bytes(b"audio")
    return tmp_path


def audio(name, **more):
    return {"type": "audio", "audio_url": name, **more}


def text(words):
    return {"type": "text", "text": words}


def wild(*user, system=DEFAULT_SYSTEM, answer=TARGET, **entry):
    """An entry of the community form: these items as user content, text and audio as the answer."""
    return {"messages": [{"role": "system", "content": system}, {"role": "user", "content": list(user)},
                         {"role": "assistant", "content": [text(answer)] * bool(answer) +
                          [audio("target.wav", raw_audio="", duration=2.5, offset=None)]}],
            "start_index": 0, "speaker": "anna", "misc": {"sample_id": "s1"}, **entry}


def canonical(system=DEFAULT_SYSTEM, **entry):
    return {"messages": [{"role": "system", "content": system}, {"role": "user", "content": REFERENCE},
                         {"role": "assistant", "content": audio("ref.wav")}, {"role": "user", "content": TARGET},
                         {"role": "assistant", "content": audio("target.wav")}], "speaker": "anna", **entry}


def read(folder, entries, name="data.json", **options):
    """Samples of raw entries written as a JSON list; fails on any problem."""
    (folder / name).write_text(json.dumps(entries))
    problems = []
    samples = list(read_samples(folder / name, problems, **options))
    assert not problems
    return samples


def shape(sample):
    """A sample as [(role, text or file name.., trained)]."""
    return [(t.role, *[p.path.rsplit("/")[-1] if isinstance(p, Clip) else p for p in t.parts], t.trained)
            for t in sample.turns]


def cloning(target=TARGET, system=DEFAULT_SYSTEM, reference=REFERENCE):
    return [("system", system, False), ("user", reference, False), ("assistant", "ref.wav", False),
            ("user", target, False), ("assistant", "target.wav", True)]


ASKED = text(INSTRUCTION + TARGET)
SAME_SAMPLE = {
    "instruction last": wild(text(REFERENCE), audio("ref.wav"), ASKED),
    "no instruction": wild(text(REFERENCE), audio("ref.wav"), text(TARGET)),
    "audio first": wild(audio("ref.wav"), text(REFERENCE), ASKED),
    "instruction first, audio first": wild(audio("ref.wav"), ASKED, text(REFERENCE)),
    "instruction first, no text in the answer": wild(ASKED, text(REFERENCE), audio("ref.wav"), answer=""),
    "target only in the answer": wild(text(REFERENCE), audio("ref.wav")),
    "both texts only in misc": wild(audio("ref.wav"), answer="", misc={
        "ref_transcript": REFERENCE, "target_transcript": TARGET}),
    "audio named by url": wild(text(REFERENCE), {"type": "audio", "url": "ref.wav"}, ASKED),
    "canonical": canonical(),
    "canonical, answer repeats the text": {**canonical(), "messages": [
        *canonical()["messages"][:4], {"role": "assistant", "content": [text(TARGET), audio("target.wav")]}]},
    "canonical, no system message": {**canonical(), "messages": canonical()["messages"][1:]}}


@pytest.mark.parametrize("entry", SAME_SAMPLE.values(), ids=SAME_SAMPLE)
def test_every_shape_is_the_same_canonical_sample(folder, entry):
    sample, = read(folder, [entry])
    assert shape(sample) == cloning()
    assert sample.speaker == "anna"
    assert [c.path for t in sample.turns for c in t.clips] == [str(folder / "ref.wav"), str(folder / "target.wav")]


def test_every_container_holds_the_same_samples(folder):
    """With a byte order mark, blank lines, or one object over several lines."""
    wild_json, pairs = (json.dumps(SAME_SAMPLE[name]) for name in ("instruction last", "canonical"))
    indented = json.dumps(SAME_SAMPLE["instruction last"], indent=2)
    for text, n, name in (
            (f"[\n{indented},\n{pairs}\n]\n", 2, "data.jsonl"), (f"\ufeff[{wild_json}, {pairs}]", 2, "data.json"),
            (f"\ufeff\n{wild_json}\n\n{pairs}\n", 2, "data.json"), (indented, 1, "data.json")):
        (folder / name).write_text(text)
        assert [shape(s) for s in read_samples(folder / name, [])] == [cloning()] * n


@pytest.mark.parametrize("entry", [
    {"messages": [{"role": "user", "content": TARGET}, {"role": "assistant", "content": audio("target.wav")}]},
    {"messages": [{"role": "system", "content": DEFAULT_SYSTEM}, {"role": "user", "content": [text(TARGET)]},
                  {"role": "assistant", "content": [audio("target.wav")]}], "start_index": 1},
    wild(text(TARGET)), wild(text(INSTRUCTION + TARGET)), wild(text(TARGET), answer="")])
def test_without_reference(folder, entry):
    sample, = read(folder, [entry])
    assert shape(sample) == [("system", DEFAULT_SYSTEM, False), ("user", TARGET, False),
                             ("assistant", "target.wav", True)]


def test_several_speakers(folder):
    """Canonical pairs and one wild message with two clips mean the same."""
    target = "[SPEAKER0] Did you see it? [SPEAKER1] I did: twice."
    turns = [("[SPEAKER0] First voice.", "ref.wav"), ("[SPEAKER1] Second voice.", "ref2.wav"), (target, "target.wav")]
    pairs = {"messages": [m for words, name in turns for m in
                          ({"role": "user", "content": words}, {"role": "assistant", "content": audio(name)})]}
    user = [item for words, name in turns[:2] for item in (text(words), audio(name))]
    expected = [("system", DEFAULT_SYSTEM, False)] + [
        t for words, name in turns for t in (("user", words, False), ("assistant", name, name == "target.wav"))]
    for entry in (pairs, wild(*user, text(INSTRUCTION + target), answer=target), wild(*user, text(target), answer="")):
        assert shape(read(folder, [entry])[0]) == expected


@pytest.mark.parametrize("target", ["He cried: stop: now.", "Time 10:45: go", "二つ：三つ: 四つ",
                                    "Please generate speech for me: he cried: now"])
def test_target_text_is_never_cut(folder, target):
    prompts = [INSTRUCTION + target, f"Please generate speech for the text: {target}", target]
    for prompt, answer in itertools.product(prompts, (target, "")):
        if answer or prompt != target or not target.startswith("Please"):     # else it looks like a prefix
            entry = wild(text(REFERENCE), audio("ref.wav"), text(prompt), answer=answer)
            assert shape(read(folder, [entry])[0]) == cloning(target)


@pytest.mark.parametrize("entry", [
    canonical(system=CANONICAL_SYSTEM), canonical() | {"scene": "Audio is recorded from a quiet room."},
    {**canonical(), "messages": [canonical()["messages"][0], {"role": "scene", "content":
                                 [text("Audio is recorded from a quiet room. ")]}, *canonical()["messages"][1:]]},
    wild(text(REFERENCE), audio("ref.wav"), ASKED, system=CANONICAL_SYSTEM)])
def test_the_scene_is_kept(folder, entry):
    sample, = read(folder, [entry])
    assert [(t.role, t.text) for t in sample.turns] == [
        ("system", CANONICAL_SYSTEM), ("user", REFERENCE), ("assistant", ""), ("user", TARGET), ("assistant", "")]


def test_start_index_is_the_first_trained_turn_and_zero_trains_only_the_last_of_the_wild_form(folder):
    two = wild(text(REFERENCE), audio("ref.wav"), ASKED)
    two["messages"] += [{"role": "user", "content": "Again."}, {"role": "assistant", "content": audio("other.wav")}]
    last = [False, False, True]
    for entry, trained in ((canonical(), {None: [False, True], 0: [True, True], 3: [False, True]}),
                           (two, {None: last, 0: last, 2: [False, True, True], 3: last})):
        for start, expected in trained.items():
            turns = read(folder, [{**entry, "start_index": start}])[0].turns
            assert [t.trained for t in turns if t.role == "assistant"] == expected
            assert not any(t.trained for t in turns if t.role != "assistant")


def test_only_an_offset_makes_a_cut(folder):
    """The wild form has a duration for each clip; as a cut, its rounding would shorten every target."""
    for offset, duration, kept in ((None, 2.5, (None, None)), (0, 1.5, (0, 1.5)), (2.0, None, (2.0, None))):
        sample, = read(folder, [{"messages": [{"role": "user", "content": TARGET}, {
            "role": "assistant", "content": audio("target.wav", offset=offset, duration=duration)}]}])
        clip = sample.turns[-1].clips[0]
        assert (clip.offset, clip.duration) == kept


def test_folder_and_chatml_give_the_same_texts_and_only_the_target_is_normalised(folder):
    """Like boson-ai's generation.py, which does not normalise the transcript of a reference."""
    target, normalised = "It is cold (today)，isn’t it [laugh]", "It is cold today , isn't it <SE>[Laughter]</SE>"
    (folder / "t1.txt").write_text(target)
    (folder / "metadata.json").write_text(json.dumps({"samples": [
        {"audio_file": "target.wav", "transcript_file": "t1.txt", "ref_audio_file": "ref.wav",
         "ref_transcript": " It is（me）"}]}))
    chat = canonical()["messages"]
    chat[1]["content"], chat[3]["content"] = " It is（me）", target
    for on, spoken in ((True, normalised), (False, target)):
        (by_folder,) = read_samples(folder / "metadata.json", [], normalize=on)
        (by_chat,) = read(folder, [{"messages": chat}], normalize=on)
        assert shape(by_folder) == shape(by_chat) == cloning(spoken, reference="It is（me）")
        prompt, = read(folder, [{"messages": chat[:-1]}], normalize=on, make=canonical_prompt)
        assert [t.parts for t in prompt.turns[:-1]] == [t.parts for t in by_chat.turns[:-1]]


@pytest.mark.parametrize("asked, answer, spoken, shortened", [
    ("Is it late - Anna", "is it late, Anna?", "Is it late - Anna", False),
    (INSTRUCTION + "你好,世界!", "你好，世界！", "你好,世界!", False),
    ("Read this: it is late", "It is late.", "It is late.", True),
    ("请朗读：你好，世界", "你好，世界。", "你好，世界。", True),
    (INSTRUCTION + "it is late", "it is late", "it is late", False),
    ("HELLO  there", "hello there", "HELLO  there", False),
    ("Lies vor: Straße, bitte!", "STRASSE bitte", "STRASSE bitte", True),       # upper case may have more letters
    ("That is unkind", "kind", None, False), ("...", "!", None, False), ("की", "का", None, False)])
def test_a_request_that_the_answer_repeats_is_recognised(folder, asked, answer, spoken, shortened):
    """Then the target turn holds only speech, as in generation; other words of an answer stay and are trained."""
    for user in ([text(REFERENCE), audio("ref.wav"), text(asked)], [text(asked), text(REFERENCE), audio("ref.wav")]):
        if spoken is None and user[0] != text(REFERENCE):
            continue        # either text may be the transcript of the reference
        sample, = read(folder, [wild(*user, answer=answer)])
        assert shape(sample) == cloning(spoken) if spoken else shape(sample)[3:] == [
            ("user", asked, False), ("assistant", answer, "target.wav", True)]
        assert any(t.shortened for t in sample.turns) == shortened
    sample, = read(folder, [wild(text(asked), audio("ref.wav"), answer=answer, misc={"ref_transcript": REFERENCE})])
    if spoken:      # the only text is the target, not the transcript of the reference
        assert shape(sample) == cloning(spoken) and any(t.shortened for t in sample.turns) == shortened
