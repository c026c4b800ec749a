"""--keep: how far a fine-tuned model has gone from its base; one set of weights computes both."""
import torch
import torch.nn.functional as F

from core import adapters
from speech.labels import IGNORE


def from_base(model, batch):
    """(K,) fp32: KL(base || model) of each codebook in nats, summed over the batch's trained cells.

    model: a versions.packed with adapters; switched off they leave the base, which gets no gradient
    and no dropout. Where the model knows what the base knows, it is 0, whatever the codes.
    """
    training = model.training
    model.eval()
    with torch.no_grad(), adapters.switched_off(model.net):
        base = model.audio_logits(model.hidden_states(batch), batch).log_softmax(-1)
    model.train(training)
    ours = model.audio_logits(model.hidden_states(batch), batch).log_softmax(-1)
    apart = F.kl_div(ours, base, log_target=True, reduction="none").sum(-1)
    return (apart * (batch.audio_targets != IGNORE)).sum(0)
