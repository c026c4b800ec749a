"""Generation for the evaluation: ask = open_transformers(...) or open_vllm(...), then ask(chats, ...).

ask returns a teacher.Answer for each conversation, in order: greedy, from the ids that training saw before an answer.
Of a model's generation_config only the ids that end an answer are used, no sampling settings and no penalties. Under
transformers an adapter stays an adapter; for vLLM it is merged into a copy of the base in float32.
"""
import os
import statistics
import time
from pathlib import Path

import torch
from transformers import GenerationConfig

from common import adapters
from common.distributed import UserError
from distill import teacher, weights

LATENCY_LINES = 8           # asked one at a time
UNKNOWN = ("modules_to_save", "rank_pattern", "alpha_pattern", "layers_to_transform",
           "trainable_token_indices", "fan_in_fan_out")     # in an adapter's config: what train_sft.py never sets


def pick_device(name, dtype):
    """(device, dtype) as text; None: the GPU if there is one, auto: bfloat16 on a GPU that has it, else float32.

    Raises UserError when the device cannot be used.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu") if name is None else name
    try:
        device = torch.empty(1, device=device).device
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"--device {name}: cannot be used ({str(error).splitlines()[0]})")
    good = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
    return str(device), dtype if dtype != "auto" else "bfloat16" if good else "float32"


def load_model(folder, adapter, dtype, device):
    """Model of a folder, with the adapter folder `adapter` on top unless None; raises UserError for what does not fit.

    Each weight must be there, under its name and in its shape; from_pretrained would go on with random ones.
    """
    model = weights.empty_model(weights.load_config(folder), dtype, folder)
    parts = weights.weight_parts(folder, model)
    weights.check_weights(model, parts, folder)
    weights.give_memory(model, device)
    weights.load_weights(dict(model.named_parameters()), parts)
    if adapter:
        model = adapters.add_saved(model, adapter, UNKNOWN)
        for parameter in adapters.adapter_weights(model).values():      # not buffers: rotary embeddings stay float32
            parameter.data = parameter.data.to(dtype)
        adapters.load_adapters(model, adapter)
    return model.eval()


def end_ids(model, ends):
    """Sorted ids at which an answer ends: those of the generation_config and those that training ended with."""
    weights.stop_at(model, ends)
    known = model.generation_config.eos_token_id
    return sorted(known if isinstance(known, list) else [known])


def ask_all(ask, chats, max_new_tokens, batch_size, timed=True):
    """([Answer], speed): one line to warm up, if timed some one at a time, then all together.

    In this order: vLLM would have cached a line that it has answered before, not only the prompt that all share.
    """
    if timed:
        ask(chats[-1:], max_new_tokens, 1)
    alone = []
    for messages in chats[:LATENCY_LINES if timed else 0]:
        start = time.perf_counter()
        answer, = ask([messages], max_new_tokens, 1)
        if answer.finish_reason != "too_long":
            alone.append(time.perf_counter() - start)
    start = time.perf_counter()
    answers = ask(chats, max_new_tokens, batch_size)
    seconds = time.perf_counter() - start
    fitting = sum(answer.finish_reason != "too_long" for answer in answers)
    return answers, {"seconds": seconds, "lines_per_second": fitting / seconds,
                     "seconds_per_line_alone": statistics.median(alone) if alone else None,
                     "tokens_in": statistics.fmean(a.prompt_tokens for a in answers),
                     "tokens_out": statistics.fmean(a.completion_tokens for a in answers)}


# ---------------------------------------------------------------------------------------------------------------------
# transformers


def open_transformers(model, tokenizer, ends, thinking):
    """ask(chats, max_new_tokens, batch_size) -> [Answer]. thinking: what the template gets beside the messages."""
    native = model.get_base_model() if hasattr(model, "get_base_model") else model
    stops = end_ids(native, ends)
    native.generation_config = GenerationConfig(eos_token_id=stops, pad_token_id=stops[0])  # else it is merged in
    limit = getattr(native.config, "max_position_embeddings", None) or 1 << 30
    begin = teacher.opens_thought(tokenizer, thinking)

    def ask(chats, max_new_tokens, batch_size):
        texts = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True, **thinking)
                 for chat in chats]
        prompts = tokenizer(texts, add_special_tokens=False)["input_ids"]
        found = {i: teacher.Answer("", "too_long", len(ids)) for i, ids in enumerate(prompts)
                 if len(ids) + max_new_tokens > limit}
        order = sorted((i for i in range(len(prompts)) if i not in found), key=lambda i: len(prompts[i]))
        for start in range(0, len(order), batch_size):      # like lengths together: less padding
            chosen = order[start:start + batch_size]
            found |= zip(chosen, generate([prompts[i] for i in chosen], max_new_tokens))
        return [found[i] for i in range(len(prompts))]

    @torch.inference_mode()
    def generate(prompts, max_new_tokens):
        width = max(map(len, prompts))
        ids = torch.full((len(prompts), width), stops[0])
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):              # on the left, so that all answers begin at one place
            ids[row, width - len(prompt):] = torch.tensor(prompt)
            mask[row, width - len(prompt):] = 1
        out = model.generate(input_ids=ids.to(native.device), attention_mask=mask.to(native.device), do_sample=False,
                             max_new_tokens=max_new_tokens)
        answers = []
        for prompt, new in zip(prompts, out[:, width:].tolist()):
            stop = next((i for i, token in enumerate(new) if token in stops), None)
            answers.append(teacher.Answer(begin + tokenizer.decode(new[:stop], skip_special_tokens=False),
                                          "length" if stop is None else "stop", len(prompt),
                                          len(new) if stop is None else stop + 1))
        return answers
    return ask


# ---------------------------------------------------------------------------------------------------------------------
# vLLM


def open_vllm(folder, adapter, tokenizer, ends, thinking, scratch, **engine):
    """As open_transformers, by the engine that create_data.py uses. engine: of teacher.open_vllm.

    scratch: empty folder on a disk with room for a model.
    """
    served = prepare_folder(folder, adapter, tokenizer, ends, Path(scratch))
    draw = teacher.Sampling(0, thinking={None: "default", True: "on", False: "off"}[thinking.get("enable_thinking")])
    answers = teacher.open_vllm(str(served), draw, **engine)

    def ask(chats, max_new_tokens, batch_size):
        draw.max_tokens = max_new_tokens
        requests = [teacher.Request(i, chat, 0) for i, chat in enumerate(chats)]        # greedy: no draws
        found = {request.id: answer for request, answer in answers(teacher.taker(requests))}
        return [found[i] for i in range(len(chats))]
    return ask


def prepare_folder(folder, adapter, tokenizer, ends, scratch):
    """A folder for vLLM: the model with the run's template and ends, the adapter merged in. Big files are links."""
    if adapter:
        model = load_model(folder, adapter, torch.float32, torch.device("cpu")).merge_and_unload()
    else:
        model = weights.empty_model(weights.load_config(folder), torch.float32, folder)
    model.generation_config = GenerationConfig(eos_token_id=end_ids(model, ends))
    if adapter:
        model.save_pretrained(scratch)
    else:
        model.generation_config.save_pretrained(scratch)
        for path in Path(folder).resolve().iterdir():
            if path.name == "config.json" or ".safetensors" in path.name:
                os.symlink(path, scratch / path.name)
    tokenizer.save_pretrained(scratch)
    return scratch
