"""Flags about speech data that the trainer and prepare_tts.py share. Imports no torch: flags are parsed before it."""
import os
import re

from common import flags
from common.flags import need
from speech.choices import FORMATS, MEANINGS, ON_OFF, REFERENCES, TASK_TYPES


def add(group):
    """Flags of data sources and of what becomes of their rows."""
    g = group
    g.add_argument("--train_data_file", nargs="+", metavar="PATH[:WEIGHT]",
                   help="data of any format that docs/speech.md lists; several are mixed: the weight is how often an "
                        "epoch goes over one (1 without it)")
    g.add_argument("--train_data_dir", nargs="+", metavar="PATH[:WEIGHT]",
                   help="the same for folders: made by prepare_tts.py, with metadata.json, audio with texts beside it")
    g.add_argument("--eval_data_file", help="validation data; without it --validation_split is held out")
    g.add_argument("--eval_data_dir", help="validation folder, as --train_data_dir")
    g.add_argument("--data_format", choices=("auto", *FORMATS), default="auto",
                   help="format of the data, where it cannot be told from what is in them")
    g.add_argument("--columns", default="", metavar="MEANING=NAME,...",
                   help="columns of a table by their names: audio=clip,text=caption; also speaker, language, ref_audio "
                        "and the others that docs/speech.md lists")
    g.add_argument("--task_type", choices=TASK_TYPES, default="single_speaker_smart_voice",
                   help="shape of the prompt, of samples that name none themselves; ChatML has its own")
    flags.switch(g, "--ref_audio_in_system_message", help="put reference clips into the scene description; not ChatML")
    g.add_argument("--normalize_text", choices=ON_OFF, help="texts to speak: punctuation and sound tags "
                   "as boson-ai's inference gives them to the model; the checkpoint keeps the setting for speaking "
                   "(default: on for Higgs-Audio V2, off for Higgs TTS 3)")
    g.add_argument("--reference", choices=REFERENCES, default="given",
                   help="clip before the text, to clone: the one that the data give, another clip of the same speaker, "
                        "none; not ChatML")
    g.add_argument("--reference_share", type=float, default=1.0,
                   help="share of the samples that keep their reference, 0 to 1, drawn by --seed")


def check(args):
    """Raise UserError for values and combinations of them that are wrong."""
    for name in ("train_data_file", "train_data_dir"):
        setattr(args, name, [word for word in getattr(args, name) or [] if word])
    need(bool(args.train_data_file) != bool(args.train_data_dir), "give one of --train_data_file and --train_data_dir")
    need(not (args.eval_data_file and args.eval_data_dir), "give one of --eval_data_file and --eval_data_dir, not both")
    for pair in filter(None, args.columns.split(",")):
        need(re.fullmatch(r"\w+=.+", pair) and pair.split("=")[0] in MEANINGS,
             f"--columns {pair}: is not of the form MEANING=NAME; meanings are {', '.join(MEANINGS)}")
    flags.share(args, "reference_share")
    need(args.reference != "none" or args.reference_share == 1, "--reference none: drop --reference_share")
    for path, weight in sources(args)[0]:
        need(0 < weight <= 1000, f"{path}:{weight:g}: a weight lies above 0 and is at most 1000")


def sources(args):
    """([(training file or folder, weight)], validation file or folder or None)."""
    found = []
    for word in args.train_data_file or args.train_data_dir:
        weighted = re.fullmatch(r"(.+):(\d+\.?\d*|\.\d+)", word)
        found.append((weighted[1], float(weighted[2])) if weighted and not os.path.exists(word) else (word, 1.0))
    return found, args.eval_data_file or args.eval_data_dir


def reading(args):
    """What rows.Reading takes of the flags, by name."""
    return {"task_type": args.task_type, "ref_in_system": args.ref_audio_in_system_message,
            "data_format": args.data_format, "columns": args.columns, "reference": args.reference,
            "reference_share": args.reference_share, "seed": args.seed, "normalize": args.normalize_text == "on"}
