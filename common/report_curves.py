"""The curves of report.py's page: which metrics stand in one chart, what it is called, and which points it draws."""
import re

POINTS = 2000       # of one curve; longer ones keep the smallest and the largest value of each bucket

# what is known about a metric: its name without train/ or eval/ and without a trailing number -> section, title, unit
KNOWN = {
    "loss": ("Loss", "loss", "nats per target"),
    "audio_loss": ("Loss", "audio loss", "nats per code"),
    "text_loss": ("Loss", "text loss", "nats per token"),
    "audio_loss_codebook": ("Loss", "audio loss by codebook", "nats per code"),
    "nll": ("Loss", "negative log-likelihood", "at most, nats per token"),
    "masked_loss": ("Loss", "loss of masked tokens", "nats per token"),
    "masked": ("Loss", "tokens masked", "%"),
    "accuracy": ("Answers", "right answers", "%"),
    "accuracy_flexible": ("Answers", "right by the last number", "%"),
    "accuracy_stderr": ("Answers", "standard error of right answers", "%"),
    "accuracy_seconds": ("Speed and memory", "answering in a validation", "s"),
    "ended": ("Answers", "answers that ended by themselves", "%"),
    "nfe": ("Answers", "network passes", "per problem"),
    "stop_recall": ("End of speech", "stop recall", "%"),
    "false_stop_rate": ("End of speech", "false stops", "%"),
    "eos_loss": ("End of speech", "end-of-stream loss", "nats"),
    "eos_accuracy": ("End of speech", "end-of-stream accuracy", "%"),
    "stop_rate": ("End of speech", "sample prompts that ended by themselves", "%"),
    "length_ratio": ("End of speech", "length of sample prompts", "1 = target"),
    "wer": ("Speech", "word errors of sample prompts", "%"),
    "cer": ("Speech", "character errors of sample prompts", "%"),
    "speaker_similarity": ("Speech", "likeness to the reference voice", "cosine"),
    "dnsmos": ("Speech", "naturalness by DNSMOS", "1 to 5"),
    "real_time_factor": ("Speed and memory", "speaking sample prompts", "s per second of speech"),
    "learning_rate": ("Optimisation", "learning rate", ""),
    "grad_norm": ("Optimisation", "gradient norm", "before clipping"),
    "bad_steps": ("Optimisation", "steps skipped", "in all"),
    "epoch": ("Optimisation", "epoch", ""),
    "throughput": ("Speed and memory", "throughput", "tokens/s"),
    "audio_seconds_per_second": ("Speed and memory", "audio trained on", "s per second"),
    "samples_per_second": ("Speed and memory", "samples", "per second"),
    "step_seconds": ("Speed and memory", "time of a step", "s"),
    "data_wait_seconds": ("Speed and memory", "waiting for data", "s between log lines"),
    "padding": ("Speed and memory", "padding", "%"),
    "mfu": ("Speed and memory", "model FLOPs utilisation", "%"),
    "memory_gib": ("Speed and memory", "peak memory", "GiB"),
    "gpu_memory_allocated": ("Speed and memory", "GPU memory allocated", "GiB"),
}
GUESSES = ((r"loss|nll|perplexity|accuracy|bits|stderr", "Loss"), (r"lr|norm|skipped", "Optimisation"),
           (r"second|memory|tokens_per|flops", "Speed and memory"))
SECTIONS = ("Loss", "Answers", "Speech", "End of speech", "Samples", "Evaluation", "Optimisation",
            "Speed and memory", "Other")


def family(metric):
    """train/audio_loss_codebook_3 -> ("train", "audio_loss_codebook", "3")."""
    prefix, slash, rest = metric.partition("/")
    stem, index = re.fullmatch(r"(.*?)(?:_(\d+))?", rest if slash else metric, re.DOTALL).groups()
    return prefix if slash else "", stem, index


def about(stem):
    """(section, title, unit) of a family, known or guessed by its words."""
    section = next((section for words, section in GUESSES if re.search(words, stem)), "Other")
    return KNOWN.get(stem, (section, stem.replace("_", " "), ""))


def thin(steps, values, points=POINTS):
    """At most so many points of a curve, spikes and gaps kept: of each bucket its smallest, largest and first None."""
    if len(steps) <= points:
        return steps, values
    kept = {0, len(steps) - 1}
    width = len(steps) * 3 / (points - 2)
    for bucket in range((points - 2) // 3):
        places = range(int(bucket * width), min(len(steps), int((bucket + 1) * width)))
        finite = [i for i in places if values[i] is not None]
        kept |= {min(finite, key=values.__getitem__), max(finite, key=values.__getitem__)} if finite else set()
        kept |= {next((i for i in places if values[i] is None), places[0])}
    kept = sorted(kept)
    return [steps[i] for i in kept], [values[i] for i in kept]


def panels(runs):
    """[panel] in the order of the page; a panel has curves of one family, of one prefix and run if it is numbered.

    panel: {"section", "title", "unit", "note": what is not drawn, "scale": panels alike share their limits,
            "series": [{"metric", "run", "label", "color", "dots", "steps", "values"}],
            "starts": [step at which a run was resumed]}
    """
    found = {}
    for place, run in enumerate(runs):
        for metric in run.metrics():
            prefix, stem, index = family(metric)
            found.setdefault((stem, *((prefix, place) if index else ("", 0))), []).append((place, metric, index))
    order = [*KNOWN, *(stem for stem, *_ in found if stem not in KNOWN)]
    made = []
    for (stem, prefix, _), members in sorted(found.items(), key=lambda item: (
            order.index(item[0][0]), item[0][1] != "train", *item[0][1:])):
        section, title, unit = about(stem)
        members.sort(key=lambda member: (member[0], int(member[2] or 0), "eval" in member[1]))
        several = len({place for place, *_ in members}) > 1
        series, note = [], ""
        for place, metric, index in members:
            run, kind = runs[place], family(metric)[0]
            steps, values = run.curve(metric)
            label = index or " ".join(filter(None, (run.name if several else "", kind))) or metric
            color = int(index) if index else place if len(runs) > 1 else len(series)
            shown, values = thin(steps, values)
            note = f"{len(shown):,} of {len(steps):,} values drawn" if len(shown) < len(steps) else note
            series.append({"metric": metric, "run": place, "label": label, "color": color % 8, "steps": shown,
                           "values": values, "dots": kind not in ("train", "system", "")})
        places = sorted({place for place, *_ in members})
        heading = " · ".join([title, *([prefix] if prefix else []),
                              *([runs[places[0]].name] if prefix and len(runs) > 1 else [])])
        made.append({"section": section, "title": heading, "unit": unit, "note": note, "series": series,
                     "scale": f"{stem} {prefix}",
                     "starts": [start["step"] for place in places for start in runs[place].starts if start["step"]]})
    return made
