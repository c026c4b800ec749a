"""What may be wrong with speech data, found when they are prepared: sound, length, text, duplicates, speakers.

Errors stop prepare_tts.py, warnings are counted; --drop_bad drops the errors and the warnings that it names. All are in
problems.jsonl. A clip is checked wherever it is used, as a target or as a reference.
"""
import hashlib
from typing import NamedTuple

import numpy as np

from core.problems import problem
from speech.code_cache import FRAME_RATE
from speech.dataset import own_references, places
from speech.encode import MEASURES
from speech.rows import file_of

SILENCE_DB = -60.0          # root mean square of a clip; full scale is 0
CLIPPED = 1e-3              # share of samples at full scale
DC = 0.02                   # mean of the samples; full scale is 1
SPREAD = 1.5                # interquartile ranges beyond the quartiles of the logarithm: Tukey's fences
ENOUGH = 20                 # samples of a language, for quartiles


# a sample's speaker and text, and the letters and digits of that text: 0 are no words
FACTS = np.dtype([("said", np.uint64), ("letters", np.int32), ("speaker", np.uint64),
                  ("language", np.uint64)])


class Limits(NamedTuple):
    """Seconds of a clip, and the share of a text's characters that may be heard otherwise, or None.
    """
    min_seconds: float
    max_seconds: float
    max_cer: float | None = None


def about(sample):
    """FACTS of a Sample and what is spoken in its last clip, as bytes, for a TableBuilder."""
    said = next((turn.text for turn in reversed(sample.turns) if turn.text.strip()), "")
    said = " ".join(said.split())
    facts = (_hash(sample.speaker, said.casefold()), sum(map(str.isalnum, said.casefold())),
             _hash(sample.speaker), _hash(sample.language))
    return np.array([facts], FACTS).tobytes() + said.encode("utf-8", "backslashreplace")


def _hash(*parts):
    text = "\0".join(parts).encode("utf-8", "backslashreplace")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest())


def facts_of(builder):
    """(n,) FACTS of the samples of a TableBuilder."""
    starts, values = builder.about.offsets.array()[:-1], builder.about.values.array()
    found = np.empty(len(starts), FACTS)
    for at in range(0, len(starts), 4096):      # places take eight times the memory of what they hold
        places = starts[at:at + 4096, None] + np.arange(FACTS.itemsize)
        found[at:at + 4096] = values[places].view(FACTS)[:, 0]
    return found


def said_in(builder, i):
    """What is spoken in the last clip of sample i."""
    return builder.about[i][FACTS.itemsize:].tobytes().decode()


def targets(builder):
    """(n,) numbers of the clips that samples are trained on: the last one of each."""
    numbers, offsets = builder.used_clips()
    return numbers[np.maximum(offsets[1:], 1) - 1]


def wrong_texts(builder, sources, cer, limit):
    """[Problem] of samples in which more was heard wrong than the limit. cer: of
    transcripts.compare.
    """
    return [problem(builder.name(i), "transcript", f"{cer[i]:.0%} of its characters are heard "
                    f"otherwise, more than --max_cer {limit:g}", file_of(sources, i), i)
            for i in np.flatnonzero(np.nan_to_num(cer) > limit).tolist()]


def find_problems(builder, sources, where, measures, limits):
    """[Problem] of samples, in the order of the checks. Those with a clip that has no codes are
    passed over.

    builder: TableBuilder of `about`. sources: of read_all. where: (n_clips, 4) of ensure_codes.
    measures: (n_clips, 5) of measures_of.
    """
    numbers, offsets = builder.used_clips()
    heard = np.diff(offsets) > 0
    target = targets(builder)
    usable = heard & (np.add.reduceat(np.append(where[numbers, 2] <= 0, False), offsets[:-1]) == 0)
    facts, found = facts_of(builder), []
    column = dict(zip(MEASURES, measures.T))
    seconds = np.where(np.isnan(column["seconds"]), where[:, 2] / FRAME_RATE, column["seconds"])

    def add(check, samples, what):
        """Note samples (numbers); what(i): text about one."""
        found.extend(problem(builder.name(i), check, what(i), file_of(sources, i), i)
                     for i in samples.tolist())

    def of_clips(check, wrong, what):
        """Note the samples with a clip for which wrong (n_clips,) is true; what(clip): text about it."""
        at = np.flatnonzero(wrong[numbers])
        samples, first = np.unique(np.searchsorted(offsets, at, "right") - 1, return_index=True)
        clip = dict(zip(samples.tolist(), numbers[at[first]].tolist()))
        add(check, samples[usable[samples]], lambda i: f"{what(clip[i])}: {builder.clips[clip[i]].path}")

    def again(check, values, samples, what):
        """Note those of samples whose value an earlier one has; what(i, earlier)."""
        order, values = samples[np.argsort(values, kind="stable")], np.sort(values, kind="stable")
        new = np.append(True, values[1:] != values[:-1])[:len(values)]
        first = order[np.maximum.accumulate(np.where(new, np.arange(len(order)), 0))]
        earlier = dict(zip(order[~new].tolist(), first[~new].tolist()))
        add(check, np.sort(order[~new]), lambda i: what(builder.name(earlier[i])))

    least, most = limits.min_seconds, limits.max_seconds
    of_clips("too_short", (seconds < least) & (where[:, 2] > 0),
             lambda clip: f"{seconds[clip]:.2f} s, less than --min_clip_seconds {least:g}")
    of_clips("too_long", seconds > most,
             lambda clip: f"{seconds[clip]:.1f} s, more than --max_clip_seconds {most:g}")
    with np.errstate(invalid="ignore", divide="ignore"):
        decibels = 20 * np.log10(column["rms"])
        of_clips("silence", decibels < SILENCE_DB, lambda clip: f"is silent, {decibels[clip]:.0f} dB of full scale")
        of_clips("clipping", column["clipped"] > CLIPPED,
                 lambda clip: f"{column['clipped'][clip] * 100:.1f} % of its samples are at full scale")
        of_clips("dc_offset", np.abs(column["dc"]) > DC, lambda clip: f"its mean is {column['dc'][clip]:.3f}, not 0")
    add("no_words", np.flatnonzero(usable & (facts["letters"] == 0)), lambda i: "its text has no letter and no digit")
    samples = np.flatnonzero(usable)
    place = places(where, target[samples])
    train = np.ones(len(samples), bool)
    for source in sources:
        if source["held_out"]:
            train &= (samples < source["first"]) | (samples >= source["stop"])
    inside = np.isin(place, place[~train]) & train
    add("in_validation", samples[inside], lambda i: "its audio is in the validation data as well")
    add("own_reference", np.intersect1d(samples, own_references(places(where, numbers), offsets)),
        lambda i: "its reference is its own clip")
    again("duplicate_audio", place, samples, lambda earlier: f"has the same audio as {earlier}")
    again("duplicate_text", facts["said"][samples], samples, lambda earlier: f"has speaker and text of {earlier}")
    with np.errstate(divide="ignore", invalid="ignore"):
        pace = np.log(facts["letters"] / seconds[target])       # letters a second
    for language in np.unique(facts["language"]):
        mine = np.flatnonzero(usable & (facts["letters"] > 0) & (facts["language"] == language))
        if len(mine) >= ENOUGH:
            low, high = np.quantile(pace[mine], (0.25, 0.75))
            far = SPREAD * (high - low)
            odd = mine[(pace[mine] < low - far) | (pace[mine] > high + far)]
            usual = f"usual are {np.exp(low - far):.1f} to {np.exp(high + far):.1f}"
            add("text_rate", odd, lambda i, usual=usual: f"{np.exp(pace[i]):.1f} letters a second; {usual}")
    return found
