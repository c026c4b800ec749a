"""Answers of a causal language model of transformers, for teachers, students and rollouts."""
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from core import tensor_io
from distill import causal_lm


def load_whole(folder, dtype, device="cpu"):
    """The model of a folder, on one device. Raises UserError."""
    model = causal_lm.empty_model(causal_lm.load_config(folder), dtype, folder)
    parts = causal_lm.weight_parts(folder, model)
    causal_lm.check_weights(model, parts, folder)
    causal_lm.give_memory(model, device)
    tensor_io.load_base(model, parts, split=causal_lm.split_experts)
    return model.eval()


class Draw(LogitsProcessor):
    """Samples one token per row from its softmax and masks all others. The token is where the
    cumulative probability passes the next random number of the row's generator, on the CPU."""

    def __init__(self, seeds):
        self.generators = [torch.Generator().manual_seed(seed) for seed in seeds]

    def __call__(self, input_ids, scores):
        """scores (B, V) -> (B, V), 0 at the token drawn and -inf elsewhere."""
        numbers = torch.stack([torch.rand(1, generator=generator, dtype=torch.float64)
                               for generator in self.generators]).to(scores.device)
        # float64: a float32 sum over the vocabulary would lose the smallest probabilities
        sums = scores.double().softmax(-1).cumsum(-1)
        drawn = torch.searchsorted(sums, numbers * sums[:, -1:], right=True)
        drawn.clamp_(max=scores.shape[1] - 1)       # the loss detects nan scores
        return torch.full_like(scores, -torch.inf).scatter(1, drawn, 0.0)


@torch.no_grad()
def generate(model, prompts, tokens, ends, processors=()):
    """[ids] of an answer to each prompt (ids), including its end token; at most `tokens` long,
    greedy unless processors sample. The model's generation_config is not used."""
    device = model.get_input_embeddings().weight.device
    prompts = list(map(torch.as_tensor, prompts))
    # left-padded: all answers begin at one index
    ids = pad_sequence(prompts, True, ends[0], "left")
    mask = pad_sequence(list(map(torch.ones_like, prompts)), True, 0, "left")
    usual = model.generation_config
    # set in the model, whose values replace missing arguments
    model.generation_config = GenerationConfig(eos_token_id=list(ends), pad_token_id=ends[0])
    try:
        # not synced: under FSDP2 transformers would wait for ranks with fewer tokens
        output = model.generate(
            input_ids=ids.to(device), attention_mask=mask.to(device), do_sample=False,
            synced_gpus=False, max_new_tokens=tokens,
            logits_processor=LogitsProcessorList(processors))
    finally:
        model.generation_config = usual
    answers = []
    for new in output[:, ids.shape[1]:].tolist():
        stop = next((i for i, token in enumerate(new) if token in ends), len(new))
        answers.append(new[:stop + 1])          # drop the padding after the end
    return answers
