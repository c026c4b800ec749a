"""Answer questions with the block-diffusion model in this file's folder. Needs only torch,
transformers and tokenizers. Do not use transformers' generate(), which writes nonsense.

    python generate.py "Ben has 3 boxes of 6 pens. How many pens has he?"

The text is written in blocks, counted from the prompt's first token. A block starts as masks; if
the prompt ends inside it, they follow the prompt's last tokens. Attention covers the token's block
in both directions and all earlier blocks, whose keys and values are cached. published.py of
flat-trainers writes this file. Answers equal those of sample_bd3lm.py --order confidence.
"""
import argparse
import inspect
import json
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache


def load(folder, device="cpu", dtype=torch.float32):
    """(transformers model in eval mode, tokenizers.Tokenizer, form) of an exported folder.

    form: block_size, mask_token_id, end_token_id, max_length (tokens of prompt and answer), prompt
    (text with {question}; "": Question: ... Answer:), begin_token_id (used if prompt is "")."""
    config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    kind = config.pop("model_type").replace("sdar", "qwen3")     # SDAR is Qwen3 under another mask
    form = config.pop("block_diffusion")
    config.pop("auto_map", None)
    model = AutoModelForCausalLM.from_pretrained(
        folder, config=AutoConfig.for_model(kind, **config), dtype=dtype,
        attn_implementation="sdpa", trust_remote_code=False)
    return model.to(device).eval(), Tokenizer.from_file(str(Path(folder) / "tokenizer.json")), form


def prompt(tokenizer, form, question):
    """Ids of a question in the trained form. ValueError if it holds a special token."""
    for token in tokenizer.get_added_tokens_decoder().values():
        if token.special and token.content in question:
            raise ValueError(f"the text holds the special token {token.content}")
    text = (form["prompt"] or "Question: {question}\nAnswer:").replace("{question}", question)
    begin = [] if form["prompt"] else [form["begin_token_id"]]
    return begin + tokenizer.encode(text, add_special_tokens=False).ids


def run(model, ids, first, cache, block_size):
    """Logits (n, V) of ids (n,) at positions from `first` on, in blocks; extends the cache."""
    position = torch.arange(first + len(ids), device=ids.device)
    seen = position[first:, None] // block_size >= position // block_size
    bias = torch.zeros(seen.shape, device=ids.device, dtype=model.dtype)
    bias.masked_fill_(~seen, torch.finfo(model.dtype).min)
    # transformers renames it
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    return model(input_ids=ids[None], attention_mask=bias[None, None], use_cache=True,
                 position_ids=position[None, first:], **{name: cache}).logits[0]


@torch.no_grad()
def generate(model, ids, form, threshold=0.9):
    """Ids of the answer to a prompt's ids, up to the end token or max_length. A pass writes all
    tokens above the threshold, at least the most probable one. ValueError without room."""
    size, mask, end = form["block_size"], form["mask_token_id"], form["end_token_id"]
    device, room = model.device, form["max_length"]
    first, cache, written = len(ids) // size * size, DynamicCache(), []
    if first + size > room:
        raise ValueError(f"{len(ids)} tokens of prompt leave no room in {room}")
    if first:
        run(model, torch.tensor(ids[:first], device=device), 0, cache, size)
    pinned = ids[first:]
    while first + size <= room:
        new = torch.tensor(pinned + [mask] * (size - len(pinned)), device=device)
        masked = new == mask
        while masked.any():
            logits = run(model, new, first, cache, size)[masked].double()
            cache.crop(-size)               # drop the keys of an unfinished block
            logits[:, mask] = -torch.inf    # the mask is never an answer
            confidence, best = logits.softmax(-1).max(-1)
            chosen = confidence >= threshold
            chosen[confidence.argmax()] = True
            places = masked.nonzero()[:, 0][chosen]
            new[places], masked[places] = best[chosen], False
        written += new[len(pinned):].tolist()
        if end in written:
            return written[:written.index(end)]
        run(model, new, first, cache, size)     # run the finished block for its keys and values
        first, pinned = first + size, []
    return written


def main():
    parser = argparse.ArgumentParser(description="Answer questions with the model in this folder.")
    parser.add_argument("questions", nargs="+", help="texts to answer")
    parser.add_argument("--threshold", type=float, default=0.9, help="least token probability")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, tokenizer, form = load(Path(__file__).resolve().parent, device)
    try:
        for question in args.questions:
            answer = generate(model, prompt(tokenizer, form, question), form, args.threshold)
            print(tokenizer.decode(answer, skip_special_tokens=False).strip())
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
