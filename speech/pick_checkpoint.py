"""Pick the checkpoint that speaks best: each speaks the same prompts and is evaluated.

OUT/best links to the best one.

    python speech/pick_checkpoint.py out --prompts prompts.txt --asr_model openai/whisper-small
    python speech/pick_checkpoint.py out --prompts prompts.txt --asr_model ... --follow --patience 3
    python speech/pick_checkpoint.py out --by loss      # by validation loss; nothing is spoken

The base is evaluated too. Speech and results stay in OUT/picked/; the same command evaluates only
new checkpoints. With --follow it evaluates checkpoints as they appear, until the run ends. After
--patience checkpoints without a better one it writes OUT/stop, and the run saves and ends.
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))    # core/ is there

from core import cli
from core.cli import UserError, require
from speech import judges

SCRIPTS = Path(__file__).resolve().parent
POLL_S = 10
# {--by: (metric of evaluation.json or metrics.jsonl, name, format, 1 or -1 where more is better)}
MEASURES = {"wer": ("wer", "word errors", "{:.1%}", 1),
            "cer": ("cer", "character errors", "{:.1%}", 1),
            "sim": ("speaker_similarity", "likeness", "{:.3f}", -1),
            "loss": ("eval/loss", "validation loss", "{:.4f}", 1)}

p = cli.Parser(__doc__.partition("\n")[0])
p.add_argument("output_dir", metavar="OUT", help="--output_dir of a run of train_v2_ddp.py")
p.flag("--prompts", None, "file of prompts, as generate_tts.py takes it")
p.flag("--by", "wer", "deciding metric; of equal checkpoints the earlier wins", choices=MEASURES)
judges.judge_flags(p)
p.switch("--follow", "wait for new checkpoints until the run ends")
p.flag("--patience", 0, "--follow: end after this many checkpoints without a better one, 0 = never")
p.flag("--max_seconds", 15.0, "longest speech per prompt")
p.flag("--batch_size", 4, "prompts spoken together")
p.flag("--seed", 42, "seed of the sampling, the same for each checkpoint")
p.flag("--device", "auto", "auto: a GPU if there is one", choices=("auto", "cuda", "cpu"))


def check_flags(args, world_size):
    require(Path(args.output_dir).is_dir(), f"{args.output_dir}: there is no such folder")
    judges.check_judges(args)
    judge = args.speaker_model if args.by == "sim" else args.asr_model or args.asr_command
    require(args.by == "loss" or args.prompts and judge, f"--by {args.by} needs --prompts and "
            f"{'--speaker_model' if args.by == 'sim' else '--asr_model or --asr_command'}")
    require(args.follow or not args.patience, "--patience needs --follow")


# parsed before torch is imported: --help and wrong flags answer at once
args = cli.parse(p, check_flags)

import hashlib
import json
import subprocess
import time
from functools import partial

from core import checkpoint, json_files, metrics

judges.load_judges(asr_command=args.asr_command)        # detect a wrong path now
out, (metric, name, form, sign) = Path(args.output_dir), MEASURES[args.by]


def command(script, *words):
    """Run a script of this repository; UserError with its last line if it fails."""
    words = map(str, [sys.executable, SCRIPTS / script, *words, "--device", args.device])
    done = subprocess.run([*words], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    last = (done.stderr.strip().splitlines() or ["no message"])[-1]
    require(done.returncode == 0, f"{script}: {last.removeprefix('error: ')}")


def judge(folder, samples):
    """The metric of a checkpoint, or of the base (folder None). Its speech goes into the folder
    `samples`; if that is already evaluated, nothing is spoken."""
    if not (samples / "evaluation.json").exists():
        newest = folder or checkpoint.list_checkpoints(out)[-1][1]
        run = json_files.read_object(newest / checkpoint.STATE / "state.json")["args"]
        model = ["--model_path", folder or run["model_path"]]
        if folder and (folder / "adapter_config.json").exists():
            model = ["--model_path", run["model_path"], "--adapter", folder]
        if codec := run.get("audio_tokenizer_path"):
            model += ["--audio_tokenizer_path", codec]
        command("generate_tts.py", *model, "--prompts", args.prompts, "--output_dir", samples,
                "--overwrite", "--max_seconds", args.max_seconds, "--batch_size", args.batch_size,
                "--seed", args.seed, "--normalize_text", run.get("normalize_text") or "on")
        command("evaluate_tts.py", samples, *(
            word for flag in ("asr_command", "asr_model", "language", "speaker_model")
            if getattr(args, flag) for word in (f"--{flag}", getattr(args, flag))))
    return json_files.read_object(samples / "evaluation.json")["metrics"].get(metric)


def is_running():
    try:
        checkpoint.lock_folder(out, wait_s=0).close()
    except UserError:
        return True


settings = [args.prompts and Path(args.prompts).read_text(errors="replace"), args.asr_model,
            args.asr_command, args.language, args.speaker_model, args.max_seconds, args.seed]
picked = out / "picked" / hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:8]
link, following = out / "best", True
require(link.is_symlink() or not link.exists(), f"{link}: is there and no link; move it away")
known, best, stale = {}, None, 0       # known: {step, 0 for the base: metric}
while following:
    # checked first, as the run may still save its last checkpoint
    following = args.follow and is_running()
    losses = dict(metrics.curve(metrics.read_metrics(out / "metrics.jsonl"), metric))
    new = [(step, path) for step, path in checkpoint.list_checkpoints(out) if step not in known]
    for step, path in [(0, None), *new] if new and 0 not in known else new:
        label = f"checkpoint-{step}" if step else "base"
        known[step] = losses.get(step) if args.by == "loss" else judge(path, picked / label)
        value = "not measured" if known[step] is None else form.format(known[step])
        print(f"{label:<16} {name} {value}")
        if known[step] is None or not step:
            continue
        stale += 1
        if best is None or sign * known[step] < sign * known[best]:
            best, stale = step, 0
            checkpoint.write_atomically(link, partial(Path.symlink_to, target=f"checkpoint-{step}"))
        if args.patience and stale >= args.patience and is_running():
            (out / "stop").touch()
            print(f"stop       nothing better in {cli.plural(stale, 'checkpoint')}: the run ends")
            following = False
            break
    if following:
        time.sleep(POLL_S)
require(best is not None, f"{out}: holds no checkpoint with {name}")
base_value = "" if (base := known.get(0)) is None else f"; the base {form.format(base)}"
print(f"best       checkpoint-{best} by {name}: {form.format(known[best])}{base_value}; {link}")
if base is not None and sign * known[best] >= sign * base:
    print("NO CHECKPOINT IS BETTER THAN THE BASE")
