"""What became of a run, in words: from the numbers of its metrics.jsonl alone. Standard library only.

    verdict    validation loss was best at step 420 (4.8123) and 2.1 % higher at step 525 while the training loss fell:
               overfitting, take checkpoint-420; 90 % of the sample prompts ended by themselves; ...

Used by the trainers' last line, by report.py and by the demos.
"""
import math
from pathlib import PurePath

SMALL = 0.005           # share of a loss that counts as no change: less than validation losses differ by seed
UNDERSTOOD, PARTLY = 0.15, 0.5      # word error rates: up to here speech is understood, or partly


def curve(rows, name):
    """[(step, value)] of one metric by step, without what is missing or not finite."""
    found = sorted((row["step"], row[name]) for row in rows if isinstance(row.get(name), (int, float)))
    return [(step, value) for step, value in found if math.isfinite(value)]


def percent(share):
    """0.98 -> "98 %", 0.925 -> "92.5 %"; what only rounds to 0 or 100 is not called so."""
    text = f"{share * 100:.1f}".removesuffix(".0")
    if text in ("0", "100") and share not in (0, 1):
        return "less than 0.1 %" if share < 0.5 else "more than 99.9 %" if share < 1 else "100 %"
    return f"{text} %"


def loss_clause(rows):
    """How the validation loss went: best where, and what since."""
    name, what = next(((key, words) for key, words in (("eval/nll", "the validation bound"), ("eval/loss",
                      "validation loss")) if curve(rows, key)), (None, None))
    training = curve(rows, "train/loss")
    if name is None:
        if not training:
            return "nothing was logged"
        return f"nothing was validated; training loss {training[0][1]:.4f} -> {training[-1][1]:.4f}"
    found = curve(rows, name)
    (first, start), (last, end) = found[0], found[-1]
    best, step = min((value, step) for step, value in found)
    if len(found) == 1:
        return f"{what} {end:.4f}, validated once, at step {last}"
    if step == last:
        return f"{what} was best at the end ({end:.4f} at step {last}, {start:.4f} at step {first}): " \
               + ("it still fell" if start - end > SMALL * abs(start) else "it hardly moved")
    rise = (end - best) / max(abs(best), 1e-12)
    where = f"{what} was best at step {step} ({best:.4f})"
    if rise <= SMALL:
        return f"{where} and is as good at step {last} ({end:.4f})"
    near = [value for at, value in training if at <= step]
    fell = bool(near) and training[-1][1] < near[-1]
    return f"{where} and {rise * 100:.1f} % higher at step {last}" + (
        f" while the training loss fell: overfitting, take checkpoint-{step}" if fell else
        f": the run diverged, take checkpoint-{step} and a lower rate")


def understood(share):
    """A word error rate in words."""
    word = "understood" if share <= UNDERSTOOD else "partly understood" if share <= PARTLY else "not understood"
    return f"speech is {word} (word errors {percent(share)})"


def speech_clauses(rows, evaluations):
    """What the last sample prompts say: ended by themselves, understood, like the voice; and what evaluations heard."""
    stops, errors, voices = (curve(rows, f"eval/{name}") for name in ("stop_rate", "wer", "speaker_similarity"))
    judged = [(PurePath(found["name"]).name, share) for found in evaluations
              if (share := found["metrics"].get("wer")) is not None and math.isfinite(share)]
    clauses = []
    if stops:
        clauses.append(f"{percent(stops[-1][1])} of the sample prompts ended by themselves")
        if not errors and not judged:
            clauses.append("whether they are understood was not measured (--asr_model)")
    if errors:
        clauses.append(understood(errors[-1][1]))
    if voices:
        clauses.append(f"likeness to the reference voice {voices[-1][1]:.2f}")
    return clauses + [f"{name}: {understood(share)}" for name, share in judged]


def verdict(rows, evaluations=()):
    """[clause] about a run. rows: of metrics.jsonl, {"step": int, metric: number or None}.

    evaluations: what an evaluation.json has, {"name", "metrics": {metric: number or None}}.
    """
    clauses = [loss_clause(rows), *speech_clauses(rows, evaluations)]
    skipped = curve(rows, "train/bad_steps")
    if skipped and skipped[-1][1]:
        clauses.append(f"steps skipped because their gradients were not finite: {skipped[-1][1]:.0f}")
    return clauses


def line(clauses):
    """The one line of a verdict, as every script prints it."""
    return f"verdict    {'; '.join(clauses)}"
