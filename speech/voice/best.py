"""--best_by, --early_stop_patience: which checkpoint is the best, and when to look no further."""
import math

# {--best_by: (metric, its name, how it is printed)}; of sim more is better
MEASURES = {"loss": ("eval/loss", "validation loss", "{:.4f}"),
            "wer": ("eval/wer", "word errors", "{:.1%}"),
            "cer": ("eval/cer", "character errors", "{:.1%}"),
            "sim": ("eval/speaker_similarity", "likeness", "{:.3f}")}


def judge(state, values, by, stale):
    """(whether this validation is the best so far, validations since the best one).

    state: run.TrainState. values: {metric: float}. Of equal ones that with the lower loss is
    better. What was not measured, as when the time for speaking was up, counts neither way; nor
    does the base, at step 0: it is no checkpoint.
    """
    name = MEASURES[by][0]
    partial = by != "loss" and values.get("eval/spoken", 1) < 1
    if name not in values or partial or not state.step:
        return False, stale
    loss = values.get("eval/loss", 0.0)
    number = -values[name] if by == "sim" else values[name]
    better = state.better(number, loss if math.isfinite(loss) else 0.0)
    return better, 0 if better else stale + 1


def done(state, by):
    """The best value as TrainState.finish prints it."""
    _, words, form = MEASURES[by]
    return f"{words} {form.format(abs(state.best_loss or 0))}"


def clause(rows, by, step):
    """For the verdict: which checkpoint, and why. rows: of metrics.jsonl; step: the best, or None.
    """
    name, words, form = MEASURES[by]
    known = {row["step"]: row[name] for row in rows if row.get(name) is not None}
    if step not in known:
        return f"no checkpoint is the best by {words}: none was measured"
    last = max(known)
    best, base, end = (form.format(known[at]) if at in known else "unknown"
                       for at in (step, 0, last))
    sign = -1 if by == "sim" else 1
    if 0 in known and sign * known[step] >= sign * known[0]:
        return (f"NO CHECKPOINT IS BETTER THAN THE BASE by {words}: {best} at best, at step "
                f"{step}; the base {base}")
    at_end = "" if step == last else f", at the end {end}"
    return f"checkpoint-{step} is the best by {words}: {best}; the base {base}{at_end}"
