"""Layouts of all kinds, and the demo's problems in them, for the tests of block diffusion."""
from core.json_files import Problems
from diffusion import blocks
from diffusion.choices import Layout
from diffusion.problems import load_tokenizer, read_problems

SMALL = {"question_budget": 48, "plan_budget": 32, "execution_budget": 48, "max_length": 96}
LAYOUTS = {
    "gsm8k": Layout("gsm8k", block_size=8, **SMALL), "gsm8k-1": Layout("gsm8k", block_size=1, **SMALL),
    "gsm8k-whole": Layout("gsm8k", block_size=96, **SMALL),
    "gsm8k-question": Layout("gsm8k", block_size=8, loss_on_question=True, strip_calculator=True, **SMALL),
    "hdp": Layout("hdp", block_size=8, **SMALL),
    "hdp-sizes": Layout("hdp", block_size=8, plan_block_size=32, execution_block_size=4, **SMALL),
    "hdp-question": Layout("hdp", block_size=16, loss_on_question=True, **SMALL)}


def load(demo, layout):
    """(problems, Tokens, Documents) of the demo's training file."""
    file = demo / ("train.jsonl" if layout.system == "gsm8k" else "train_hdp.json")
    problems = read_problems(file, "train", layout.system, layout.strip_calculator)
    tokens = load_tokenizer(demo, layout.system)
    return problems, tokens, documents_of(problems, tokens, layout)


def documents_of(problems, tokens, layout):
    """Documents of problems; UserError names all unusable ones."""
    documents = blocks.make_documents(problems, tokens, layout, bad := [])
    Problems().add(bad).settle()
    return documents
