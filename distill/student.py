"""Students for the evaluations: loaded, and asked greedily by the engines of their teachers (teacher.py).

They are asked from the ids that training saw before an answer. Of a model's generation_config only the ids that end an
answer are used. Under transformers an adapter stays an adapter; for vLLM it is merged into a copy in float32.
"""
import os
import statistics
import time
from pathlib import Path

import torch
from transformers import GenerationConfig

from common.distributed import UserError
from core import adapters
from distill import teacher, causal_lm

LATENCY_LINES = 8           # asked one at a time
UNKNOWN = ("modules_to_save", "rank_pattern", "alpha_pattern", "layers_to_transform",
           "trainable_token_indices", "fan_in_fan_out")     # in an adapter's config: what train_sft.py never sets


def pick_device(name, dtype):
    """(device, dtype) as text; None: the GPU if there is one, auto: bfloat16 on a GPU that has it, else float32.

    Raises UserError when the device cannot be used.
    """
    own = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.empty(1, device=own if name is None else name).device
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"--device {name}: cannot be used ({str(error).splitlines()[0]})")
    if dtype == "auto":
        good = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
        dtype = "bfloat16" if good else "float32"
    return str(device), dtype


def load_model(folder, adapter, dtype, device):
    """Model of a folder, with the adapter folder `adapter` on top unless None; raises UserError for what does not fit.

    Each weight must be there, under its name and in its shape; from_pretrained would go on with random ones.
    """
    model = causal_lm.empty_model(causal_lm.load_config(folder), dtype, folder)
    parts = causal_lm.weight_parts(folder, model)
    causal_lm.check_weights(model, parts, folder)
    causal_lm.give_memory(model, device)
    causal_lm.load_weights(dict(model.named_parameters()), parts)
    if adapter:
        model = adapters.add_saved(model, adapter, UNKNOWN)
        for parameter in adapters.adapter_weights(model).values():      # not buffers: rotary embeddings stay float32
            parameter.data = parameter.data.to(dtype)
        adapters.load_adapters(model, adapter)
    return model.eval()


def end_ids(model, ends):
    """Sorted ids at which an answer ends: those of the generation_config and those that training ended with."""
    causal_lm.stop_at(model, ends)
    known = model.generation_config.eos_token_id
    return sorted(known if isinstance(known, list) else [known])


def greedy(enable_thinking):
    """Sampling of the likeliest answers, asked as --enable_thinking says that the student was trained."""
    thinking = {"template": "default", "true": "on", "false": "off"}[enable_thinking]
    return teacher.Sampling(1, thinking=thinking)


def ask_all(answers, draw, chats, max_new_tokens, timed=True):
    """([Answer], speed): one line to warm up, if timed some one at a time, then all together.

    answers: of an engine of teacher.py, opened with the Sampling `draw`, whose max_tokens is set.
    In this order: vLLM would have cached a line that it has answered before, not only the prompt that all share.
    """
    draw.max_tokens = max_new_tokens
    if timed:
        teacher.ask(answers, chats[-1:])
    alone = []
    for messages in chats[:LATENCY_LINES if timed else 0]:
        start = time.perf_counter()
        answer, = teacher.ask(answers, [messages])
        if answer.finish_reason != "too_long":
            alone.append(time.perf_counter() - start)
    start = time.perf_counter()
    found = teacher.ask(answers, chats)
    seconds = time.perf_counter() - start
    fitting = sum(answer.finish_reason != "too_long" for answer in found)
    return found, {"seconds": seconds, "lines_per_second": fitting / seconds,
                   "seconds_per_line_alone": statistics.median(alone) if alone else None,
                   "tokens_in": statistics.fmean(a.prompt_tokens for a in found),
                   "tokens_out": statistics.fmean(a.completion_tokens for a in found)}


def open_transformers(model, tokenizer, ends, draw, batch_size):
    """`answers` of teacher.py by a model of load_model. ends: ids that answers end with."""
    from distill.teacher_transformers import answers_of
    native = model.get_base_model() if hasattr(model, "get_base_model") else model
    return answers_of(native, tokenizer, draw, end_ids(native, ends), batch_size=batch_size)


def vllm_folder(folder, adapter, tokenizer, ends, scratch):
    """A folder for vLLM: the model with the run's template and ends, the adapter merged in. Big files are links.

    scratch: empty folder on a disk with room for a model.
    """
    if adapter:
        model = load_model(folder, adapter, torch.float32, torch.device("cpu")).merge_and_unload()
    else:
        model = causal_lm.empty_model(causal_lm.load_config(folder), torch.float32, folder)
    model.generation_config = GenerationConfig(eos_token_id=end_ids(model, ends))
    if adapter:
        model.save_pretrained(scratch)
    else:
        model.generation_config.save_pretrained(scratch)
        for path in Path(folder).resolve().iterdir():
            if path.name == "config.json" or ".safetensors" in path.name:
                os.symlink(path, Path(scratch) / path.name)
    tokenizer.save_pretrained(scratch)
    return str(scratch)
