"""--clip_search_widths: the noise range under which losses of blocks vary least, as BD3-LM
searches it (var_min).
"""
import torch

from common import distributed
from diffusion import elbo, noise
from diffusion.choices import EXECUTION, FULL, PLAN, range_fits


def candidates(widths, block_sizes):
    """Ranges to try, [(low, high)]: all of (0, 1], and for each width those that start at 0, 0.05,
    0.10 and so on.

    Ranges without a possible number of masked tokens in a full block are left out.
    """
    found = [FULL]
    for width in widths:
        steps = int(round((1 - width) / 0.05, 6)) + 1
        found += [(max(round(0.05 * i, 2), FULL[0]), round(0.05 * i + width, 6))
                  for i in range(steps)]
    return list(dict.fromkeys(t_range for t_range in found
                              if all(range_fits(t_range, size) for size in block_sizes)))


@torch.no_grad()
def search_range(world, model, how, check, args):
    """(low, high) of the candidate under which losses of blocks vary least, or None when asked to
    stop.

    Less variance between blocks means less noise in gradients. Costs one forward pass for each
    candidate and each of the first --clip_search_batches batches. All candidates get the same
    random numbers. how: elbo.Eval; check: as in elbo.bound; args: the trainer's flags.
    """
    layout, device = how.rows.documents.layout, world.device
    tried = candidates(args.clip_search_widths,
                       {layout.region_block(PLAN), layout.region_block(EXECUTION)})
    # sum, sum of squares, number
    moments = torch.zeros(len(tried), 3, dtype=torch.float64, device=device)
    for number, batch in elbo.share_of_batches(world, how.rows, how.batch_rows,
                                               args.clip_search_batches):
        check()
        if elbo.asked_to_stop(world):
            return None
        draws = noise.draw(how.seed, "search", number, batch.n_groups, *batch.doc.shape)
        sizes = torch.bincount(batch.group[batch.target], minlength=batch.n_groups).to(device)
        for index, t_range in enumerate(tried):
            inputs = noise.diffuse(batch, draws, how.mask_id, t_range, args.noise_schedule,
                                   args.loss_weighting)
            losses = elbo.weighted_losses(model, inputs, device, how.bf16)
            per_block = torch.zeros(batch.n_groups, dtype=torch.float64, device=device)
            per_block.index_add_(0, batch.group.flatten()[inputs.places].to(device), losses)
            per_block /= sizes
            moments[index] += torch.stack([per_block.sum(), per_block.square().sum(),
                                           torch.full_like(losses.sum(), batch.n_groups)])
    total, squares, n = distributed.all_sum(world, moments).T
    return tried[int((squares / n - (total / n).square()).argmin())]
