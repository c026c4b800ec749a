"""--best_of, --split_text, --max_cer: the best of several takes, long texts part by part, good takes as data."""
import io
import json
import os
import re
import struct
import tempfile
import textwrap
from dataclasses import replace
from pathlib import Path

import numpy as np

from core.checkpoint import write_atomically
from core.cli import UserError
from core.dist import error_names_file
from speech import text_normalization
from speech.conversations import Clip
from speech.decode import SAVED
from speech.text_normalization import heard
from speech import generate, scores, speech_metrics

STRIDE = 1_000_003      # between the seeds of a prompt's takes: batches number theirs one by one
PAUSE_S = 0.12          # of silence between parts
FADE_S = 0.01           # at both ends of a part, so that a joint makes no click
BEST = "best.jsonl"     # in the output folder: training data
MARK = re.compile(r"\[SPEAKER\d+\]|<\|\w+:\w+\|>")        # holds for what follows it
SENTENCE = r"(?<=[.!?…])\s+|(?<=[。！？])"        # ends there


def speak(native, codec, ids, settings, prompts, seed, takes, judges):
    """[(codes, ended_by, wave, {fact: value})] of each Prompt, of so many takes the best one.

    Best is what ended by itself, of those what has the fewest character errors, of those what is
    likest to the voice. judges: scores.Judges. A prompt that nothing is wrong with is not spoken
    again, unless likeness is asked for.
    """
    kept, left = [None] * len(prompts), list(range(len(prompts)))
    for take in range(takes):
        some = [prompts[i] for i in left]
        spoken = generate.generate(native, some, ids, settings, seed + take * STRIDE,
                                   codec.device)
        waves = [generate.decode(codec, codes) for codes, _ in spoken]
        facts, _ = judge(some, waves, judges, codec.device)
        for i, (codes, ended_by), wave, found in zip(left, spoken, waves, facts):
            bad = ended_by != "eos" or not len(codes)
            likeness = found.get("speaker_similarity") or 0.0
            rank = bad, found.get("cer") or 0.0, -likeness
            if kept[i] is None or rank < kept[i][0]:
                kept[i] = rank, (codes, ended_by, wave, {**found, "take": take})
        left = [i for i in left if kept[i][0][:2] != (False, 0.0) or judges.embed]
        if not left:
            break
    return [found for _, found in kept]


def parts(text, most):
    """[part] of a text, of at most `most` characters but for longer words: cut behind sentences,
    and longer sentences between words.
    """
    found = []
    for sentence in re.split(SENTENCE, text):
        for piece in textwrap.wrap(sentence, most, break_long_words=False, break_on_hyphens=False):
            if found and len(found[-1]) + 1 + len(piece) <= most:
                found[-1] += ("" if found[-1][-1] in "。！？" else " ") + piece
            else:
                found.append(piece)
    return found


def join(waves, rate):
    """(n,) of waves one after another, faded at their ends, with a pause between."""
    ramp, pieces = np.linspace(0, 1, round(FADE_S * rate), dtype=np.float32), []
    for wave in waves:
        wave, n = wave.copy(), min(len(wave) // 2, len(ramp))
        wave[:n] *= ramp[:n]
        wave[len(wave) - n:] *= ramp[:n][::-1]
        pieces += [wave, np.zeros(round(PAUSE_S * rate), np.float32)]
    return np.concatenate(pieces[:-1])


def stream(path):
    """write(wave so far), for --stream: adds what is new to a WAV file, or raw to stdout ("-").

    In a pipe the file's length is the largest there is. UserError for one that nobody reads.
    """
    import soundfile
    raw, rate, done = path == "-", generate.SAMPLE_RATE, 0
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK      # or a pipe would wait
    try:
        number = 1 if raw else os.open(path, flags, 0o666)
    except OSError as error:
        raise UserError(f"--stream {path}: {error.strerror}; of a pipe, start the reader first")
    os.set_blocking(number, True)
    file = open(number, "wb", closefd=False)

    def header(size):
        return struct.pack("<4sI8sIHHIIHH4sI", b"RIFF", size + 36, b"WAVEfmt ", 16, 1, 1, rate,
                           2 * rate, 2, 16, b"data", size)

    def write(wave):
        nonlocal done
        sound = io.BytesIO()
        soundfile.write(sound, wave[done:], rate, "PCM_16", format="RAW")
        with error_names_file(path):
            if not raw and not done:
                file.write(header(2**32 - 38))
            file.write(sound.getvalue())
            file.flush()
            done = len(wave)
            if not raw and file.seekable():
                os.pwrite(number, header(2 * done), 0)
    return write


def speak_parts(texts, references, prepare, speak_some, judges, write=None):
    """[(Prompt, codes, ended_by, wave, facts)] of texts, each a list of parts, spoken part by part.

    references: of each text (path, what it says) or None: then each part is spoken behind the codes
    of the part before. prepare([(number, part, reference)]) -> [Prompt]. speak_some(Prompts, round)
    -> speak()'s list. write: of stream(), where there is one text.
    """
    said = [[] for _ in texts]
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(max(map(len, texts))):
            now = [i for i, text in enumerate(texts) if turn < len(text)]
            asked = []
            for i in now:
                behind = references[i]
                # the least that TTS 3 can hear is 8 frames
                if not behind and said[i] and len(said[i][-1][1]) >= 8:
                    behind = str(Path(folder) / f"{i}-{turn}.npy"), texts[i][turn - 1]
                    generate.save_codes(behind[0], said[i][-1][1])
                asked.append((i, texts[i][turn], behind))
            prompts = prepare(asked)
            for i, prompt, found in zip(now, prompts, speak_some(prompts, turn)):
                said[i].append((prompt, *found))
                if write:
                    write(join([wave for *_, wave, _ in said[i]], generate.SAMPLE_RATE))
    whole = []
    for spoken in said:
        prompts, codes, ends, waves, facts = zip(*spoken)
        about, text = dict(facts[-1]), " ".join(prompt.text for prompt in prompts)
        if judges.hear:
            about["heard"] = " ".join(found["heard"] for found in facts)
            rates, _ = scores.word_rates([heard(text)], [about["heard"]], judges.language)
            about |= rates[0]
        ended_by = next((end for end in ends if end != "eos"), "eos")
        whole.append((replace(prompts[0], text=text), np.concatenate(codes), ended_by,
                      join(waves, generate.SAMPLE_RATE), about))
    return whole


def good_rows(samples, records, max_cer, min_frames):
    """[ChatML row] of the takes that ended by themselves with at most so many errors a character: what a Sample of
    read_prompts asks for, said by the very codes of its take. records: what the JSON file of each says. min_frames: of
    what can be trained.
    """
    def part(found):
        if not isinstance(found, Clip):
            return {"type": "text", "text": found}
        return {"type": "audio", "audio_url": found.path, "offset": found.offset, "duration": found.duration}

    rows = []
    for sample, about in zip(samples, records, strict=True):
        ended = about["ended_by"] == "eos" and about["frames"] >= min_frames
        if ended and about["cer"] is not None and about["cer"] <= max_cer:
            *before, answer = sample.turns
            messages = [{"role": turn.role, "content": list(map(part, turn.parts))}
                        for turn in (*before, replace(answer, parts=[*answer.parts[:-1], Clip(about["name"] + SAVED)]))]
            rows.append({"messages": messages, "cer": about["cer"],
                         "normalize_text": about["normalize_text"]})
    return rows


def write_good(folder, samples, records, max_cer, min_frames):
    """Write good_rows as BEST in a folder -> a line about them."""
    rows = good_rows(samples, records, max_cer, min_frames)
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    write_atomically(Path(folder) / BEST, lambda path: Path(path).write_text(lines, encoding="utf-8"))
    return (f"best       {len(rows)} of {len(records)} ended by themselves with at most {100 * max_cer:g}% character errors; "
            f"{folder}/{BEST}, training data")


def judge(prompts, waves, judges, device):
    """([facts of each prompt], {metric: float}) of what scores.Judges find in waves at generate.SAMPLE_RATE.

    Likeness is to the voice to be cloned, else to the true recording.
    """
    facts, values, likes = [{} for _ in prompts], {}, []
    if not prompts:
        return facts, values
    with judges.on(device):
        if judges.hear:
            names, texts = [prompt.name for prompt in prompts], [text_normalization.heard(prompt.text) for prompt in prompts]
            heard = judges.hear(waves, generate.SAMPLE_RATE, names, [])
            rates, totals = scores.word_rates(texts, heard, judges.language)
            facts = [{"heard": text, **row} for text, row in zip(heard, rates)]
            values |= {f"eval/{key}": value for key, value in totals.items() if value is not None}
        if judges.embed:
            clips = [prompt.references[-1] if prompt.references else prompt.target
                     for prompt in prompts]
            known = {clip: speech_metrics.read_audio(clip.path, clip.offset, clip.duration)
                     for clip in clips if clip}
            references = [known.get(clip, np.zeros(0, np.float32)) for clip in clips]
            likes = scores.likeness(waves, references, generate.SAMPLE_RATE, judges.embed)
    found = {"speaker_similarity": likes, "dnsmos": scores.dnsmos(waves, generate.SAMPLE_RATE) if judges.mos else []}
    for key, numbers in found.items():
        for about, number in zip(facts, numbers):
            about[key] = number
        if known := [number for number in numbers if number is not None]:
            values[f"eval/{key}"] = sum(known) / len(known)
    return facts, values
