"""A teacher, or a student, in this process by generate() of transformers."""
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.utils.logging import disable_progress_bar

from common.flags import UserError
from distill.generate import Draw, generate
from distill.teacher import Answer, fitting, need_template, opens_thought


def open_transformers(name, draw, max_model_len=0, batch_size=16, chunk_size=1024):
    """`answers` of teacher.py by a model folder or hub name on the GPU, or the CPU where there is
    none. draw: Sampling. The others: of answers_of.
    """
    disable_progress_bar()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        # many CPUs are slow in bfloat16
        dtype = "auto" if device.type == "cuda" else torch.float32
        model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise UserError(f"--model_name {name}: cannot be loaded "
                        f"({str(error).splitlines()[0][:200]}); give a folder, or a hub name when "
                        "online")
    need_template(tokenizer, name)
    ends = model.generation_config.eos_token_id
    if ends is None:
        ends = tokenizer.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    return answers_of(model.to(device).eval(), tokenizer, draw, ends, max_model_len, batch_size,
                      chunk_size)


def answers_of(model, tokenizer, draw, ends, max_model_len=0, batch_size=16, chunk_size=1024):
    """`answers` of a loaded causal LM of transformers, adapters inside or not.

    ends: ids that end an answer. batch_size: requests generated together, out of chunk_size sorted
    by length. max_model_len 0: the model's.
    """
    flags = draw.template_flags
    begin = opens_thought(tokenizer, flags)
    limit = max_model_len or getattr(model.config, "max_position_embeddings", None) or 1 << 30

    def processors(seeds):
        if not draw.temperature:
            return []
        kept = [TopKLogitsWarper(draw.top_k)] if draw.top_k else []
        kept += [TopPLogitsWarper(draw.top_p)] if draw.top_p < 1 else []
        return [TemperatureLogitsWarper(draw.temperature), *kept, Draw(seeds)]

    def alternatives(row):
        best = torch.log_softmax(row.float(), -1).topk(draw.logprobs)
        return [(tokenizer.decode([token]), value)
                for token, value in zip(best.indices.tolist(), best.values.tolist())]

    def batch(asked):
        seeds = [request.seed for request, _ in asked]
        found, logits = generate(model, [ids for _, ids in asked], draw.max_tokens, ends,
                                 processors(seeds), bool(draw.logprobs))
        for row, ((request, prompt), ids) in enumerate(zip(asked, found)):
            ended = ids[-1] in ends
            text = ids[:-1] if ended else ids
            tokens = [(tokenizer.decode([token]), alternatives(logits[i][row]))
                      for i, token in enumerate(text)] if draw.logprobs else []
            answer = begin + tokenizer.decode(text, skip_special_tokens=False)
            yield request, Answer(answer, "stop" if ended else "length", len(prompt), len(ids),
                                  tokens=tokens)

    def answers(take):
        while requests := take(chunk_size):
            fits, rest = fitting(requests, tokenizer, flags, limit - draw.max_tokens)
            yield from rest
            fits.sort(key=lambda pair: len(pair[1]))         # less padding
            for i in range(0, len(fits), batch_size):
                yield from batch(fits[i:i + batch_size])
    return answers
