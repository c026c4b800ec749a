"""transformers' generate for ids: greedy, or drawn from the softmax with a seed of each row.

The one way in which teachers, students and rollouts write answers without a server. Of a model's
generation_config nothing is used: its sampling settings and penalties are for chatting.
"""
import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList


class Draw(LogitsProcessor):
    """Leaves the one token of each row that is drawn from its softmax, by a generator of the row.

    A row takes one number a token, on the CPU: its draws depend neither on the rows beside it nor
    on the device. The token is where the running sum of the probabilities passes that number.
    """

    def __init__(self, seeds):
        self.generators = [torch.Generator().manual_seed(seed) for seed in seeds]

    def __call__(self, input_ids, scores):
        """scores (B, V) -> (B, V), 0 at the token drawn and -inf elsewhere."""
        numbers = torch.stack([torch.rand(1, generator=one, dtype=torch.float64)
                               for one in self.generators]).to(scores.device)
        # float64: the smallest probabilities would vanish in a float32 sum of a whole vocabulary
        sums = scores.double().softmax(-1).cumsum(-1)
        drawn = torch.searchsorted(sums, numbers * sums[:, -1:], right=True)
        drawn.clamp_(max=scores.shape[1] - 1)       # scores of nan are found by the loss
        return torch.full_like(scores, -torch.inf).scatter(1, drawn, 0.0)


@torch.no_grad()
def generate(model, prompts, tokens, ends, processors=(), with_logits=False):
    """(answers, logits): ids of an answer to each prompt, the token that ends it included.

    prompts: ids, a sequence of ints each. tokens: an answer may have. ends: ids that end one.
    logits: with with_logits a (B, V) tensor for each place of the answers, before processors; else None.
    """
    device = model.get_input_embeddings().weight.device
    width = max(map(len, prompts))
    ids = torch.full((len(prompts), width), ends[0])
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):          # on the left, so that all answers begin at one place
        ids[row, width - len(prompt):] = torch.as_tensor(prompt)
        mask[row, width - len(prompt):] = 1
    own = model.generation_config
    # in the model, not beside it: what an argument leaves open is taken from the model's
    model.generation_config = GenerationConfig(eos_token_id=list(ends), pad_token_id=ends[0])
    try:
        # not synced: under FSDP2 transformers would wait for the other ranks, which may draw fewer
        out = model.generate(input_ids=ids.to(device), attention_mask=mask.to(device), do_sample=False,
                             synced_gpus=False, max_new_tokens=tokens, logits_processor=LogitsProcessorList(processors),
                             return_dict_in_generate=True, output_logits=with_logits)
    finally:
        model.generation_config = own
    answers = []
    for new in out.sequences[:, width:].tolist():
        stop = next((i for i, token in enumerate(new) if token in ends), None)
        answers.append(new if stop is None else new[:stop + 1])     # behind its end there is padding
    return answers, out.logits if with_logits else None
