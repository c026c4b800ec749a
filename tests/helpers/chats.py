"""Chat templates in the styles of released models, a small tokenizer, tiny students and conversations."""
import json
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3MoeConfig)

from core import chat

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>",
           "<|end_header_id|>", "<|eot_id|>"]
TEXTS = ["the quick brown fox jumps over the lazy dog\n\nand again\n",
         "Which language is this?\n\nFinal Answer: en", "Das ist ein Satz, der etwas länger ist.",
         "Où est la bibliothèque ?", "system user assistant think en de fr ru", "two line feeds are one token\n\n"]
# Qwen and Llama 3 split text like this: consecutive line feeds stay together
SPLIT = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
         r"\s+(?!\S)|\s+")
LABELS = ("en", "de", "fr", "ru")

# Qwen2.5 and Qwen3-Instruct-2507: all turns have one form, with a line feed after the end token.
QWEN = """{%- for m in messages -%}
{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"""

# Qwen3 with tools: schemas in a system turn, calls as JSON between tags.
QWEN_TOOLS = QWEN.replace("m.content +", """m.content + (('<tool_call>\n' + (m.tool_calls[0].function | tojson)
+ '\n</tool_call>') if m.tool_calls else '') +""")
QWEN_TOOLS = ("{%- if tools -%}{{ '<|im_start|>system\n' + (tools | tojson) + '<|im_end|>\n' }}{%- endif -%}"
              + QWEN_TOOLS)

# Qwen3 (hybrid): only answers after the last question have a think block; with enable_thinking=False the
# generation prompt ends with an empty one.
QWEN_THINK = """{%- set last = namespace(user=-1) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set last.user = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}
{%- set thoughts = m.reasoning_content if m.reasoning_content is defined and m.reasoning_content else '' -%}
{%- set content = m.content -%}
{%- if '</think>' in content -%}
{%- set thoughts = content.split('</think>')[0].split('<think>')[-1].strip('\n') -%}
{%- set content = content.split('</think>')[-1].lstrip('\n') -%}
{%- endif -%}
{{ '<|im_start|>assistant\n' }}
{%- if loop.index0 > last.user -%}{{ '<think>\n' + thoughts + '\n</think>\n\n' }}{%- endif -%}
{{ content + '<|im_end|>\n' }}
{%- else -%}
{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and enable_thinking is false -%}{{ '<think>\n\n</think>\n\n' }}{%- endif -%}
{%- endif -%}"""

# Qwen3-Thinking-2507 and Qwen3.5: the generation prompt opens the block.
QWEN_OPEN = QWEN_THINK.replace("{{ '<think>\n\n</think>\n\n' }}{%- endif -%}", "{{ '<think>\n\n</think>\n\n' }}"
                               "{%- else -%}{{ '<think>\n' }}{%- endif -%}")

# Llama 3: the template writes begin-of-text, trims contents, and writes nothing after the end of a turn.
LLAMA = """{{- bos_token -}}
{%- for m in messages -%}
{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif -%}"""


def tokenizer(template=QWEN, eos="<|im_end|>"):
    """Byte-level BPE of 400 tokens with the special tokens of both families; think tags are plain added tokens."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(SPLIT), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)])
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(TEXTS * 20, trainers.BpeTrainer(
        vocab_size=380, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False))
    wrapped = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<|begin_of_text|>", eos_token=eos,
                                   pad_token="<|endoftext|>", additional_special_tokens=SPECIAL)
    wrapped.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in ("<think>", "</think>")])
    wrapped.chat_template = template
    return wrapped


def ask(question, answer, **more):
    """A user message and its answer."""
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer, **more}]


def encode(encoder, messages, tools=None, **more):
    """(ids, mask) of a conversation that is one sample, or the UserError that refuses it."""
    try:
        sample, = encoder.encode({"messages": messages, "tools": tools, **more})
        return sample
    except chat.UserError as error:
        return error


def conversations(n):
    """n labelled sentences of different lengths, every third with a system message, every fourth with two answers."""
    words, talks = " ".join(TEXTS).split(), []
    for i in range(n):
        text = " ".join(words[(3 * i + k) % len(words)] for k in range(2 + (7 * i) % 13))
        messages = ask(text, LABELS[i % 4])
        if i % 4 == 3:
            messages += ask(text[::-1], f"{LABELS[i % 3]} or {LABELS[i % 4]}")
        talks.append(([{"role": "system", "content": "Name the language."}] if i % 3 == 0 else []) + messages)
    return talks


def write(path, chats, **more):
    """JSONL of conversations; returns the path."""
    Path(path).write_text("".join(json.dumps({"messages": messages, **more}) + "\n" for messages in chats))
    return path


def student(folder, kind="qwen", **settings):
    """Write a tiny random model with its tokenizer.

    qwen: tied weights, normed queries; llama: untied weights, scaled rotary positions; moe: Qwen3 of 5 experts.
    """
    sizes = {"vocab_size": 401, "hidden_size": 36, "intermediate_size": 43, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6, "max_position_embeddings": 256}
    if kind == "qwen":
        config, text_tokenizer = Qwen3Config(**sizes | {"tie_word_embeddings": True} | settings), tokenizer()
    elif kind == "moe":
        experts = {"num_experts": 5, "num_experts_per_tok": 2, "norm_topk_prob": True, "moe_intermediate_size": 20}
        config, text_tokenizer = Qwen3MoeConfig(**sizes | experts | settings), tokenizer()
    else:
        rope = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
        config = LlamaConfig(**sizes | {"rope_parameters": rope, "tie_word_embeddings": False,
                                        "attention_bias": True} | settings)
        text_tokenizer = tokenizer(LLAMA, "<|eot_id|>")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if "norm" in name or "bias" in name:        # new ones are all ones or zeros
            parameter.data += 0.3 * torch.randn(parameter.shape)
        elif "embed" not in name:
            parameter.data *= 4
    model.generation_config.eos_token_id = text_tokenizer.eos_token_id
    model.save_pretrained(folder)
    text_tokenizer.save_pretrained(folder)
    return Path(folder)


def encoder(tokenizer, template, *options):
    """chat.Encoder of a tokenizer with a template."""
    tokenizer.chat_template = template
    return chat.Encoder(tokenizer, *options)
