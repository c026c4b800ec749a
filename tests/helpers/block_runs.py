"""train_bd3lm.py, a script of module-level code, in this process."""
import json

from core import checkpoint
from diffusion import choices
from tests.helpers.trainer import trainer_of

SCRIPT = "diffusion/train_bd3lm.py"


def as_checkpoint(folder, state):
    """Make a folder of files a checkpoint with this state, as the trainer leaves them."""
    (folder / "trainer_state").mkdir(exist_ok=True)
    (folder / "trainer_state" / "state.json").write_text(json.dumps(state))
    files = {str(path.relative_to(folder)): {"bytes": path.stat().st_size, "sha256": checkpoint.sha256(path)}
             for path in folder.rglob("*") if path.is_file() and path.name != checkpoint.MANIFEST}
    (folder / checkpoint.MANIFEST).write_text(json.dumps({"step": state.get("step", 0), "files": files}))


train_bd3lm = trainer_of(SCRIPT, layout_of=choices.layout_of, check_flags=lambda args,
                         world_size: choices.check_flags(args, world_size, train_bd3lm.build_parser()))
SHORT = ("--max_steps 1 --num_workers 0 --problems_per_batch 4 --gradient_accumulation_steps 1 --max_length 96 "
         "--report_to none --warmup_steps 0 --eval_repeats 1")


def short_run(out, *flags):
    """A run of one step in this process; flags, each of one or more words, override SHORT."""
    train_bd3lm.main(" ".join([SHORT, f"--output_dir {out} --logging_dir {out}-logs", *map(str, flags)]).split())
