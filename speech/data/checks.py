"""What may be wrong with speech data, found when they are prepared: sound, length, text, duplicates, speakers.

Errors stop prepare_tts.py, warnings are counted; --drop_bad drops the errors and the warnings that it names. All are in
problems.jsonl. A clip is checked wherever it is used, as a target or as a reference.
"""
import numpy as np

from common.problems import problem
from speech.data.code_cache import FRAME_RATE
from speech.data.dataset import file_of, own_references, places
from speech.data.encode import MEASURES

SILENCE_DB = -60.0          # root mean square of a clip; full scale is 0
CLIPPED = 1e-3              # share of samples at full scale
DC = 0.02                   # mean of the samples; full scale is 1
SPREAD = 1.5                # interquartile ranges beyond the quartiles of the logarithm: Tukey's fences
ENOUGH = 20                 # samples of a language, for quartiles


def targets(builder):
    """(n,) numbers of the clips that samples are trained on: the last one of each."""
    numbers, offsets = builder.clips.numbers[builder.entries.values.array()], builder.entries.offsets.array()
    return numbers[np.maximum(offsets[1:], 1) - 1]


def wrong_texts(builder, sources, cer, limit):
    """[Problem] of samples in which more was heard wrong than the limit. cer: of transcripts.compare."""
    return [problem(bytes(builder.names[i]).decode(), "transcript", f"{cer[i]:.0%} of its characters are heard "
                    f"otherwise, more than --max_cer {limit:g}", file_of(sources, i), i)
            for i in np.flatnonzero(np.nan_to_num(cer) > limit).tolist()]


def find_problems(builder, sources, where, measures, min_seconds, max_seconds):
    """[Problem] of samples, in the order of the checks. Those with a clip that has no codes are passed over.

    builder: TableBuilder with facts. sources: of read_all. where: (n_clips, 4) of ensure_codes. measures: (n_clips, 5)
    of measures_of. min_seconds, max_seconds: of a clip.
    """
    numbers, offsets = builder.clips.numbers[builder.entries.values.array()], builder.entries.offsets.array()
    heard = np.diff(offsets) > 0
    target = targets(builder)
    usable = heard & (np.add.reduceat(np.append(where[numbers, 2] <= 0, False), offsets[:-1]) == 0)
    facts, found = builder.facts.array(), []
    column = dict(zip(MEASURES, measures.T))
    seconds = np.where(np.isnan(column["seconds"]), where[:, 2] / FRAME_RATE, column["seconds"])

    def add(check, samples, what):
        """Note samples (numbers); what(i): text about one."""
        found.extend(problem(bytes(builder.names[i]).decode(), check, what(i), file_of(sources, i), i)
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
        add(check, np.sort(order[~new]), lambda i: what(bytes(builder.names[earlier[i]]).decode()))

    of_clips("too_short", (seconds < min_seconds) & (where[:, 2] > 0),
             lambda clip: f"{seconds[clip]:.2f} s, less than --min_clip_seconds {min_seconds:g}")
    of_clips("too_long", seconds > max_seconds, lambda clip: f"{seconds[clip]:.1f} s, more than --max_clip_seconds "
                                                             f"{max_seconds:g}")
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

