"""Arithmetic word problems with plans and a small tokenizer of their own: training without a download."""
import json
import random
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from common import checkpoint
from common.distributed import UserError
from diffusion.problems import CALCULATOR, END

NAMES = ("Anna", "Ben", "Carla", "David", "Emma", "Felix", "Grace", "Hugo")
THINGS = ("apples", "books", "coins", "marbles", "pens", "shells", "stamps", "stickers")
VOCAB_SIZE = 512        # of the demo's tokenizer, <|endoftext|> included

# (question, [solution step], [plan sentence]); a and b are drawn, c and d follow
KINDS = (
    ("{name} has {a} {things} and gets {b} more. How many {things} does {name} have now?",
     ["{name} has {a}+{b} = <<{a}+{b}={plus}>>{plus} {things}."],
     ["Add the new {things} to the first ones."], "plus"),
    ("{name} has {big} {things} and gives away {b}. How many {things} does {name} have left?",
     ["{name} has {big}-{b} = <<{big}-{b}={a}>>{a} {things} left."],
     ["Subtract the {things} given away from all {things}."], "a"),
    ("{name} has {a} boxes with {b} {things} each. How many {things} does {name} have?",
     ["{name} has {a}*{b} = <<{a}*{b}={times}>>{times} {things}."],
     ["Multiply the boxes by the {things} in a box."], "times"),
    ("{name} has {a} {things}, gets {b} more and gives away {c}. How many {things} does {name} have left?",
     ["{name} has {a}+{b} = <<{a}+{b}={plus}>>{plus} {things}.",
      "Then {plus}-{c} = <<{plus}-{c}={rest}>>{rest} are left."],
     ["Add the new {things} to the first ones.", "Subtract the {things} given away."], "rest"),
)


def draw_problems(n, seed=0):
    """n different problems as dicts {id, question, plan, execution, answer, solution}; given numbers from 2 to 6.

    solution is GSM8K's form of the answer, marks and #### included. Raises UserError when there are not so many.
    """
    rng, found, repeats = random.Random(seed), {}, 0
    while len(found) < n:
        question, steps, plan, result = rng.choice(KINDS)
        a, b = rng.randint(2, 6), rng.randint(2, 6)
        values = {"name": rng.choice(NAMES), "things": rng.choice(THINGS), "a": a, "b": b, "plus": a + b, "big": a + b,
                  "times": a * b, "c": (c := rng.randint(2, a + b - 1)), "rest": a + b - c}
        steps = [step.format(**values) for step in steps]
        question, answer = question.format(**values), str(values[result])
        repeats = repeats + 1 if question in found else 0
        if repeats > 1000:
            raise UserError(f"there are not {n} different demo problems; ask for fewer")
        if not repeats:
            found[question] = {"id": f"demo_{len(found)}", "question": question,
                               "plan": " ".join(sentence.format(**values) for sentence in plan),
                               "execution": CALCULATOR.sub("", " ".join(steps)), "answer": answer,
                               "solution": "\n".join(steps) + f"\n#### {answer}"}
    return list(found.values())


def train_tokenizer(texts):
    """A byte-level BPE of VOCAB_SIZE ids at most, <|endoftext|> last, trained on the texts."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - 1, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    bpe.add_special_tokens([END])
    return bpe


def write_demo(folder, n_train=2000, n_test=200, seed=0):
    """Write train.jsonl, test.jsonl (GSM8K's form), train_hdp.json, test_hdp.json and tokenizer.json to a folder."""
    folder = Path(folder)
    checkpoint.prepare_output(folder, "demo folder")
    problems = draw_problems(n_train + n_test, seed)
    parts = {"train": problems[:n_train], "test": problems[n_train:]}
    for split, part in parts.items():
        gsm8k = [{"question": p["question"], "answer": p["solution"]} for p in part]
        hdp = [{key: p[key] for key in ("id", "question", "plan", "execution", "answer")} for p in part]
        checkpoint.write_text(folder / f"{split}.jsonl",
                              "".join(json.dumps(entry) + "\n" for entry in gsm8k))
        checkpoint.write_json(folder / f"{split}_hdp.json", hdp)
    texts = [text for p in parts["train"] for text in (f"Question: {p['question']}\nAnswer: {p['solution']}",
                                                       f" {p['plan']}", f" {p['execution']} ")]
    train_tokenizer(texts).save(str(folder / "tokenizer.json"))


CHAT = ("{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")


def write_chats(folder):
    """Write train_chat.jsonl, test_chat.jsonl and chat/, a tokenizer with a template, from write_demo's files."""
    folder = Path(folder)
    for split in ("train", "test"):
        problems = map(json.loads, (folder / f"{split}.jsonl").read_text(encoding="utf-8").splitlines())
        chats = [{"messages": [{"role": "user", "content": p["question"]},
                               {"role": "assistant", "content": CALCULATOR.sub("", p["answer"])}]}
                 for p in problems]
        checkpoint.write_text(folder / f"{split}_chat.jsonl",
                              "".join(json.dumps(chat) + "\n" for chat in chats))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    checkpoint.prepare_output(folder / "chat", "demo folder")
    tokenizer.save(str(folder / "chat" / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "chat_template": CHAT}
    checkpoint.write_json(folder / "chat" / "tokenizer_config.json", about)


def prepare(folder, system, n):
    """write_demo of n training problems, and a tenth of that, but 8 at least, to validate, for a system of problems.py.

    -> (training file, validation file, tokenizer folder), as text.
    """
    write_demo(folder, n, max(8, n // 10))
    if system == "chat":
        write_chats(folder)
        return *(str(Path(folder) / f"{split}_chat.jsonl") for split in ("train", "test")), str(Path(folder) / "chat")
    ending = ".jsonl" if system == "gsm8k" else "_hdp.json"
    return str(Path(folder) / f"train{ending}"), str(Path(folder) / f"test{ending}"), str(folder)
