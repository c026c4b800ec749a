"""The control of the demo: the same questions, each with the answer to another one.

    python distill/demo/swap_answers.py answers.jsonl swapped.jsonl

Every conversation of IN_FILE gets the last answer of the one that stands half the file further on, so that none keeps
its own; ids, order and questions stay. Whoever learns from OUT_FILE can learn the form of the answers, not which one
belongs to a question.
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))    # common/ stands there

from common import flags


def build_parser():
    p = flags.Parser(__doc__.split("\n")[0])
    p.usage = "%(prog)s IN_FILE OUT_FILE"
    p.add_argument("in_file", type=Path, metavar="IN_FILE", help="chat JSONL, as create_data.py writes it")
    p.add_argument("out_file", type=Path, metavar="OUT_FILE", help="chat JSONL to write")
    return p


# parsed before anything slow is imported: --help and a mistake in a flag answer at once
ARGS = flags.parse(build_parser()) if __name__ == "__main__" else None

import json

from common import checkpoint, distributed
from common.distributed import UserError
from core import json_files


def main(argv=None):
    args = ARGS or flags.parse(build_parser(), argv=argv)
    with distributed.one_clear_error():
        try:
            records = [json_files.loads(line) for line in json_files.read_text(args.in_file).split("\n") if line]
            turns = [record["messages"][-1] for record in records]
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise UserError(f"{args.in_file}: is no chat JSONL ({error})")
        if len(records) < 2:
            raise UserError(f"{args.in_file}: has {len(records)} conversations; two are needed to swap answers")
        half = len(records) // 2
        lines = [json.dumps(record | {"messages": [*record["messages"][:-1], turns[(i + half) % len(turns)]]},
                            ensure_ascii=False) + "\n" for i, record in enumerate(records)]
        checkpoint.write_atomically(args.out_file, lambda path: path.write_text("".join(lines), encoding="utf-8"))
        print(f"done       {args.out_file}: {len(lines)} questions, each with the answer to another one")


if __name__ == "__main__":
    main()
