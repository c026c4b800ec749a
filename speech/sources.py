"""Speech data as people have it -> Samples: a ChatML JSON list or JSONL, the metadata.json folder, audio with texts."""
from pathlib import Path

from common.json_files import SKIPPED, json_entries, json_value, read_text
from common.parallel import UserError
from common.problems import problem
from common.text import NAME, printable
from speech.choices import DEFAULT_SYSTEM, TASK_TYPES
from speech.conversations import SCENE, BadSample, Paths, Sample, canonical_prompt, canonical_sample

AUDIO_FILES = (".wav", ".flac", ".mp3", ".ogg")


def read_samples(path, problems, task_type="single_speaker_smart_voice", ref_in_system=False, prompts=False,
                 normalize=False):
    """Yield the Samples of a data file (JSON, JSONL) or folder (metadata.json or audio + .txt pairs).

    A sample that cannot be used appends one line to the list `problems` (file, sample, reason) and is not yielded; the
    caller decides. task_type and ref_in_system shape the folder format only. prompts: as canonical_prompt makes them.
    normalize: the texts to speak, by wording.normalise. Raises UserError when the file itself cannot be read.
    """
    for _, found in _numbered(path, lambda number: True, task_type, ref_in_system, prompts, normalize):
        if isinstance(found, Sample):
            yield found
        else:
            problems.append(found)


def read_chunks(path, size, first=0, step=1, task_type="single_speaker_smart_voice", ref_in_system=False,
                normalize=False):
    """Yield (Samples, problems) of every `step`-th chunk of `size` entries from chunk `first` on; see read_samples.

    So several processes can share the work: what is not asked for is passed over, lines even unread.
    """
    def wanted(number):
        chunk = number // size
        return chunk >= first and (chunk - first) % step == 0

    stop, samples, problems = (first + 1) * size, [], []
    for number, found in _numbered(path, wanted, task_type, ref_in_system, False, normalize):
        if number >= stop:
            yield samples, problems
            stop, samples, problems = stop + step * size, [], []
        if found is not None:
            (samples if isinstance(found, Sample) else problems).append(found)
    if samples or problems:
        yield samples, problems


def _numbered(path, wanted, task_type, ref_in_system, prompts, normalize):
    """Yield (number, found) of every entry: its Sample, a line on what is wrong with it, or None if it is left out."""
    path = Path(path)
    if path.is_dir():
        paths, entries = Paths(path.resolve()), folder_entries(path, task_type, ref_in_system, wanted)
    else:
        paths, entries = Paths(path.resolve().parent), enumerate(json_entries(path, wanted))
    make, place = canonical_prompt if prompts else canonical_sample, f"{path} sample"
    for number, entry in entries:
        if entry is SKIPPED or not wanted(number):
            yield number, None
            continue
        name = f"{place} {number}"
        try:
            if isinstance(entry, BadSample):
                name = f"{path / 'metadata.json'} sample {number}"
                raise entry
            if isinstance(entry, dict):
                misc = entry.get("misc") if isinstance(entry.get("misc"), dict) else {}
                label = misc.get("sample_id") or entry.get("id") or entry.get("speaker")
                name += f" ({printable(label, NAME)})" if label else ""
            sample = make(name, entry, paths, normalize)
        except BadSample as error:
            yield number, problem(f"{name}{error.place}", "invalid", error, path)
        else:
            yield number, sample


# ---------------------------------------------------------------------------------------------------------------------
# Folders


def folder_entries(folder, task_type, ref_in_system, wanted):
    """Yield (number, raw sample) of a folder: metadata.json, or every audio file with a .txt beside it.

    Instead of a raw sample: SKIPPED where it is not wanted(number), the BadSample that says why it cannot be used.
    """
    meta = folder / "metadata.json"
    if meta.is_file():
        data = json_value(meta)
        samples = data.get("samples") if isinstance(data, dict) else None
        if not isinstance(samples, list):
            raise UserError(f"{meta}: has no list 'samples'")
    else:
        audio = sorted(p for p in folder.iterdir() if p.suffix.lower() in AUDIO_FILES)
        samples = [{"id": p.stem, "audio_file": p.name, "transcript_file": p.with_suffix(".txt").name} for p in audio]
        if not samples:
            raise UserError(f"{folder}: has neither metadata.json nor audio files ({', '.join(AUDIO_FILES)})")
    unused = 0
    for number, raw in enumerate(samples):
        try:
            if not isinstance(raw, dict):
                raise BadSample(f"is a {type(raw).__name__}, not an object")
            task = raw.get("task_type") or task_type
            unused += bool(raw.get("ref_audio_file") or raw.get("ref_speakers")) and not str(task).endswith("cloning")
            yield number, folder_sample(folder, raw, task, ref_in_system) if wanted(number) else SKIPPED
        except BadSample as error:
            error.place = f" ({printable(raw.get('id', '?') if isinstance(raw, dict) else '?', NAME)})"
            yield number, error
    if unused and wanted(len(samples) - 1):     # of several readers one says it
        print(f"{meta}: {unused} samples have reference clips that their task type does not use; "
              f"--task_type zero_shot_voice_cloning trains with them", flush=True)


def _filled(raw, *keys):
    return isinstance(raw, dict) and all(isinstance(raw.get(key), str) and raw[key] for key in keys)


def folder_sample(folder, raw, task, ref_in_system):
    """One metadata.json entry -> a raw ChatML sample."""
    if task not in TASK_TYPES:
        raise BadSample(f"unknown task_type {task!r}; known: {', '.join(TASK_TYPES)}")

    def read(key):
        if not _filled(raw, key):
            raise BadSample(f"has no {key!r}")
        try:
            return read_text(folder / raw[key], f"{key} ")
        except UserError as error:
            raise BadSample(error)

    if not _filled(raw, "audio_file"):
        raise BadSample("has no 'audio_file'")
    references = []                                             # (speaker tag, transcript, audio)
    if task == "zero_shot_voice_cloning":
        if not _filled(raw, "ref_audio_file", "ref_transcript"):
            raise BadSample("zero_shot_voice_cloning needs 'ref_audio_file' and 'ref_transcript'")
        references = [("", raw["ref_transcript"], raw["ref_audio_file"])]
    elif task == "multi_speaker_voice_cloning":
        speakers = raw.get("ref_speakers")
        for speaker in speakers if isinstance(speakers, list) else []:
            if not _filled(speaker, "ref_audio_file", "ref_transcript"):
                raise BadSample("every ref_speakers entry needs 'ref_audio_file' and 'ref_transcript'")
            tag = str(speaker.get("speaker_tag") or f"SPEAKER{len(references)}").strip("[]")
            references.append((f"[{tag}] ", speaker["ref_transcript"], speaker["ref_audio_file"]))
        if not references:
            raise BadSample("multi_speaker_voice_cloning needs a list 'ref_speakers'")
    scene = f"Audio is recorded from {str(raw['scene']).replace('_', ' ')}." if raw.get("scene") else ""
    system, turns = [{"type": "text", "text": DEFAULT_SYSTEM}], []
    if ref_in_system and references:
        scene_parts = [{"type": "text", "text": "\n\n<|scene_desc_start|>\n" + (scene + "\n\n" if scene else "")}]
        for i, (tag, _, audio) in enumerate(references):
            label = tag.strip("[] ") or "SPEAKER0"
            scene_parts += [{"type": "text", "text": ("\n" if i else "") + f"{label}:"},
                            {"type": "audio", "audio_url": audio}]
        system += scene_parts + [{"type": "text", "text": "\n<|scene_desc_end|>"}]
    else:
        if scene:
            system.append({"type": "text", "text": "\n\n" + SCENE.format(scene)})
        for tag, transcript, audio in references:
            turns += [{"role": "user", "content": tag + transcript.strip()},
                      {"role": "assistant", "content": {"type": "audio", "audio_url": audio}}]
    return {"messages": [{"role": "system", "content": system}, *turns,
                         {"role": "user", "content": read("transcript_file")},
                         {"role": "assistant", "content": {"type": "audio", "audio_url": raw["audio_file"],
                                                           "duration": raw.get("duration")}}],
            "speaker": raw.get("speaker_id") or raw.get("speaker_name"), "misc": {"sample_id": raw.get("id")}}
