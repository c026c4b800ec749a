"""What other projects may import from block diffusion, as docs/diffusion.md lists it."""
import inspect

from diffusion.dit import attention_masks
from diffusion.noise import diffuse
from diffusion.sampler import generate


def test_public_names_keep_their_signatures():
    assert str(inspect.signature(attention_masks)) == "(doc, block, n_noisy, states=None)"
    assert str(inspect.signature(diffuse)) == ("(batch, draws, mask_id, t_range=(0.001, 1.0), "
                                               "weighting='elbo')")
    assert list(inspect.signature(generate).parameters) == ["model", "states", "rooms", "block_size", "end", "how",
                                                            "generator"]
