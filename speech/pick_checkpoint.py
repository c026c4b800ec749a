"""Which checkpoint speaks best: each speaks the same prompts and is judged; OUT/best leads to the best one.

    python speech/pick_checkpoint.py out --prompts prompts.txt --asr_model openai/whisper-small
    python speech/pick_checkpoint.py out --prompts prompts.txt --asr_model ... --follow --patience 3    # beside the run
    python speech/pick_checkpoint.py out --by loss          # by the run's own validation loss; nothing is spoken

The base is judged as well: a checkpoint that is no better is not worth taking. Speech and what was heard stay in
OUT/picked/; the same command again judges what is new alone. Keep all checkpoints for this (--save_total_limit 0).
With --follow it judges checkpoints as they appear, until the run has ended; after --patience of them without a better
one it writes OUT/stop, and the run saves and ends.
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))    # core/ is there

from core import cli
from core.cli import UserError, require
from speech import choices

SCRIPTS = Path(__file__).resolve().parent
POLL_S = 10
# {--by: (metric of evaluation.json or metrics.jsonl, its name, how it is printed, whether more is better)}
MEASURES = {"wer": ("wer", "word errors", "{:.1%}", False), "cer": ("cer", "character errors", "{:.1%}", False),
            "sim": ("speaker_similarity", "likeness", "{:.3f}", True), "loss": ("eval/loss", "validation loss", "{:.4f}", False)}


def build_parser():
    p = cli.Parser(__doc__.partition("\n")[0])
    p.usage = "%(prog)s OUT [--flag value ...]"
    p.add_argument("output_dir", metavar="OUT", help="--output_dir of a run of train_v2_ddp.py")
    p.add_argument("--prompts", help="file of prompts, as generate_tts.py takes it")
    p.add_argument("--by", choices=MEASURES, default="wer", help="what decides; of equal ones the earlier checkpoint is taken")
    choices.recognisers(p)
    choices.speakers(p)
    cli.switch(p, "--follow", help="go on with checkpoints that the run is yet to save")
    p.add_argument("--patience", type=int, default=0, help="with --follow: end the run after so many checkpoints without a "
                   "better one, 0 = never")
    p.add_argument("--max_seconds", type=float, default=15.0, help="of speech of one prompt")
    p.add_argument("--batch_size", type=int, default=4, help="prompts spoken together")
    p.add_argument("--seed", type=int, default=42, help="of the draws, the same for each checkpoint")
    p.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto", help="auto: a GPU when there is one")
    return p


def check_flags(args, world_size):
    """Raise UserError for combinations that would fail, or do nothing, later."""
    require(Path(args.output_dir).is_dir(), f"{args.output_dir}: there is no such folder")
    choices.check_recognisers(args)
    require(args.prompts or args.by == "loss", f"--by {args.by} needs --prompts")
    require(args.by not in ("wer", "cer") or args.asr_model or args.asr_command, f"--by {args.by} needs --asr_model or "
         "--asr_command")
    require(args.by != "sim" or args.speaker_model, "--by sim needs --speaker_model")
    cli.zero_or_more(args, "patience seed")
    require(args.follow or not args.patience, "--patience needs --follow")


# parsed before torch is imported: --help and a mistake in a flag answer at once
ARGS = cli.parse(build_parser(), check_flags) if __name__ == "__main__" else None

import hashlib
import json
import os
import subprocess
import time
import uuid

from core import checkpoint, dist, json_files, metrics, run_lock


def judged(folder, args, place):
    """{metric: number} of evaluation.json of a checkpoint, or of the base (folder None), spoken unless it is there."""
    said = place / (folder.name if folder else "base")
    if not (said / "evaluation.json").exists():
        newest = folder or checkpoint.list_checkpoints(args.output_dir)[-1][1]
        run = json_files.read_object(newest / checkpoint.STATE / "state.json")["args"]
        if folder is None or (folder / "adapter_config.json").exists():
            model = ["--model_path", run["model_path"], *(["--adapter", str(folder)] if folder else [])]
        else:
            model = ["--model_path", str(folder)]
        model += ["--audio_tokenizer_path", run["audio_tokenizer_path"]] if run.get("audio_tokenizer_path") else []
        command([SCRIPTS / "generate_tts.py", *model, "--prompts", args.prompts, "--output_dir", said, "--overwrite",
                 "--max_seconds", args.max_seconds, "--batch_size", args.batch_size, "--seed", args.seed,
                 "--device", args.device, "--normalize_text", run.get("normalize_text") or "on"])
        judges = [word for name in ("asr_model", "asr_command", "asr_time_limit", "language", "speaker_model")
                  if getattr(args, name) and (name != "asr_time_limit" or args.asr_command)
                  for word in (f"--{name}", getattr(args, name))]
        command([SCRIPTS / "evaluate_tts.py", said, *judges, *([] if args.device == "auto" else ["--device", args.device])])
    return json_files.read_object(said / "evaluation.json")["metrics"]


def command(words):
    """Run one of our scripts; UserError with its last line when it fails."""
    done = subprocess.run([sys.executable, *map(str, words)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise UserError(f"{words[0].name}: {last.removeprefix('error: ')}")


def link_best(output_dir, name):
    """OUT/best leads to a checkpoint from now on."""
    best, temporary = output_dir / "best", output_dir / f".best.tmp-{uuid.uuid4().hex}"
    require(best.is_symlink() or not best.exists(), f"{best}: is there and no link; move it away")
    temporary.symlink_to(name)
    os.replace(temporary, best)


def is_running(output_dir):
    """Whether a run owns the folder."""
    try:
        run_lock.check_free(output_dir)
    except UserError:
        return True
    return False


def pick(args):
    """Judge checkpoints until there is none left, or with --follow none to come."""
    out, (metric, words, form, more) = Path(args.output_dir), MEASURES[args.by]
    told = [args.prompts and Path(args.prompts).read_text(errors="replace"), args.asr_model, args.asr_command, args.language,
            args.speaker_model, args.max_seconds, args.seed]
    place, known, best, stale = out / "picked" / hashlib.sha256(json.dumps(told).encode()).hexdigest()[:8], {}, None, 0
    while True:
        going = args.follow and is_running(out)         # asked first: its last checkpoint may come meanwhile
        losses = dict(metrics.curve(metrics.read_metrics(out / "metrics.jsonl"), metric))
        new = [(step, path) for step, path in checkpoint.list_checkpoints(out) if step not in known]
        if new and 0 not in known:
            new = [(0, None), *new]
        for step, path in new:
            value = losses.get(step) if args.by == "loss" else judged(path, args, place).get(metric)
            known[step] = value
            print(f"{'base' if not step else f'checkpoint-{step}':<16} {words} "
                  f"{'not measured' if value is None else form.format(value)}", flush=True)
            if value is None or not step:
                continue
            if best is None or (value > known[best] if more else value < known[best]):
                best, stale = step, 0
                link_best(out, f"checkpoint-{step}")
            else:
                stale += 1
            if args.patience and stale >= args.patience and is_running(out):
                (out / "stop").touch()
                print(f"stop       nothing better in {stale} checkpoints: the run is asked to end", flush=True)
                going = False
        if not going:
            break
        time.sleep(POLL_S)
    require(known, f"{out}: holds no checkpoint")
    require(best is not None, f"{out}: no checkpoint was measured by {words}")
    base = known.get(0)
    said = "" if base is None else f"; the base {form.format(base)}"
    if base is not None and (known[best] <= base if more else known[best] >= base):
        print(f"NO CHECKPOINT IS BETTER THAN THE BASE by {words}: {form.format(known[best])} at best, at step {best}{said}")
    else:
        print(f"best       checkpoint-{best} by {words}: {form.format(known[best])}{said}; {out / 'best'}")


def main(argv=None):
    args = ARGS or cli.parse(build_parser(), check_flags, argv)
    dist.single_process()
    pick(args)


if __name__ == "__main__":
    main()
