"""--auto: packs, recomputation and the way to use several GPUs, chosen by the memory plan.

Rank 0 tries setups from the fastest on and takes the first whose estimated peak (memory.py) fits one GPU: packs of up
to 16,384 tokens, no recomputation, DDP. What a flag names stays as it is. A run that resumes takes the choice of its
checkpoint, whatever memory there is now, so its packs stay the same.
"""
from dataclasses import replace

from common import checkpoint, flags, plan
from common.distributed import rank0_first
from common.flags import named, need
from common.text import counted

FLAGS = {"parallel": "parallel", "max_tokens_per_batch": "budget", "per_device_train_batch_size": "batch_size",
         "gradient_checkpointing": "recompute", "gradient_accumulation_steps": "accumulation"}     # {flag: of Setup}
BUDGETS = (16384, 8192, 4096, 2048, 1024)       # tokens of a pack
LARGE = 4096        # tokens of a micro-step from which on the GPU, and not the host, is busy: before recomputation
EPOCH_STEPS = 10    # optimizer steps that an epoch has at least, where no flag says how large a step is
WORK = {False: "a third", True: "half"}         # more products with all layers recomputed: 8N for 6N, 6N for 4N (LoRA)


def ways(args, setup):
    """[(recompute, parallel)] from the fastest on, as far as flags leave them open."""
    modes = [setup.recompute] if "gradient_checkpointing" in named(args) else \
        [None, "all"] if args.compile else [None, "selective", "all"]
    fixed = "parallel" in named(args) or setup.ranks == 1 or getattr(args, "float8", False)
    group = getattr(args, "shard_size", 0) or flags.local_ranks(setup.ranks)
    nodes = setup.ranks > group and setup.ranks % group == 0        # then sharding inside each comes first
    kinds = [setup.parallel] if fixed else ["ddp", "hsdp", "fsdp"] if nodes else ["ddp", "fsdp"]
    return [(mode, kind) for mode in modes for kind in kinds]


def by_tokens(args, setup, lengths, packs_of, samples=0):
    """Setups with packs of tokens, from the fastest on.

    setup: as the flags say. lengths: (n,) tokens of the samples. packs_of(budget): how many packs they make. samples:
    of an optimizer step, or 0: at least EPOCH_STEPS steps an epoch.
    """
    fixed = named(args) & {"max_tokens_per_batch", "per_device_train_batch_size"}
    step = samples * lengths.mean() if samples else lengths.sum() / EPOCH_STEPS
    counted = "gradient_accumulation_steps" in named(args)
    each = step / (setup.ranks * (setup.accumulation if counted else 1))
    longest = int(lengths.max())
    room = [budget for budget in BUDGETS if budget >= longest] or [-(-longest // 1024) * 1024]
    budgets = [setup.budget] if fixed else [budget for budget in room if budget <= each] or room[-1:]
    large = [budget for budget in budgets if budget >= LARGE] or budgets[:1]
    found = [(way, budget) for way in ways(args, setup) for budget in large]
    found += [(ways(args, setup)[-1], budget) for budget in budgets if budget not in large]
    for (recompute, parallel), budget in found:
        accumulation = setup.accumulation
        if samples and budget and not counted:
            accumulation = max(1, round(samples * packs_of(budget) / (len(lengths) * setup.ranks)))
        yield replace(setup, recompute=recompute, parallel=parallel, budget=budget, accumulation=accumulation)


def by_rows(args, setup, rows, row_tokens):
    """Setups with micro-steps of rows of one length, from the fastest on: as few micro-steps as fit.

    rows: of an optimizer step, of all ranks; row_tokens: that a row is computed on.
    """
    splits = [(setup.batch_size, setup.accumulation)]
    if not named(args) & {"per_device_train_batch_size", "problems_per_batch", "gradient_accumulation_steps"}:
        each, splits = rows / setup.ranks, []
        while not splits or splits[-1][0] * row_tokens > LARGE and splits[-1][0] > 1:
            accumulation = 2 ** len(splits)
            splits.append((max(1, round(each / accumulation)), accumulation))
    for recompute, parallel in ways(args, setup):
        for batch_size, accumulation in splits:
            yield replace(setup, recompute=recompute, parallel=parallel, batch_size=batch_size,
                          accumulation=accumulation)


def decide(args, world, setups, peak_of, samples_of, what="tokens"):
    """Set the flags FLAGS of args that are open, the same on every rank -> whether any has changed. Prints why.

    setups: iterable of plan.Setup, the fastest first. peak_of(setup): bytes at the peak; samples_of(setup): that an
    average micro-step of a rank holds. what: a budget counts. Raises UserError when none fits; a dry run goes on with
    the last one, and names it as a problem of its own.
    """
    before = {flag: getattr(args, flag) for flag in FLAGS if hasattr(args, flag)}
    chosen, lines = rank0_first(world, _choice, args, setups, peak_of, samples_of, what)
    for flag, value in chosen.items():
        setattr(args, flag, value)
    if world.is_main:
        print(f"auto       {plan.INDENT.join(lines)}")
    return any(getattr(args, flag) != value for flag, value in before.items())


def _choice(args, setups, peak_of, samples_of, what):
    """({flag: value}, lines of text) of decide, on rank 0."""
    earlier = checkpoint.last_args(args.output_dir, args.resume)
    if earlier:
        return _earlier(args, next(iter(setups)), earlier)
    limit, lines = plan.gpu_memory(args.gpu_memory), []
    for setup in setups:
        peak = peak_of(setup)
        fits = peak <= plan.USABLE * limit
        lines.append(f"{setup.parallel:<5}{_pack(setup, what):>15}  {_recomputed(setup):<22} "
                     f"{peak / plan.GIB:8.2f} GiB  {'taken' if fits else 'too much'}")
        if fits:
            break
    if args.dry_run is None:
        plan.check_memory(peak, limit, plan.helps(setup))
    packs = setup.ranks * setup.accumulation
    asked = f", {args.global_batch_size} asked for" if getattr(args, "global_batch_size", 0) else ""
    lines = [f"{'the first' if fits else 'none'} that fits one GPU's {plan.size(limit)}, {plan.MARGIN}, from the "
             "fastest on:", *lines, f"a step: {counted(setup.ranks, 'rank')} x {setup.accumulation} micro-steps, about "
             f"{packs * samples_of(setup):,.0f} samples{asked}"]
    if setup.recompute == "all" and "gradient_checkpointing" not in named(args):
        lines.append(f"recomputation because nothing faster fits: up to {WORK[bool(setup.adapters)]} more products")
    if kept := sorted(named(args) & (FLAGS.keys() | {"problems_per_batch"})):
        lines.append(f"as flags say: {', '.join(f'--{flag}' for flag in kept)}")
    chosen = {flag: getattr(setup, field) for flag, field in FLAGS.items() if hasattr(args, flag)}
    return chosen | {"packs_per_step": packs}, lines


def _earlier(args, setup, earlier):
    """_choice of the run whose flags `earlier` are. setup: any of this one's."""
    chosen = {flag: earlier[flag] for flag in FLAGS if hasattr(args, flag) and flag in earlier and flag not in
              named(args)}
    packs = earlier.get("packs_per_step")
    if packs and "gradient_accumulation_steps" not in named(args):
        need(packs % setup.ranks == 0, f"--auto: this run has {packs} packs a step, which {setup.ranks} ranks cannot "
             "share out; take another number of ranks, or give --gradient_accumulation_steps")
        chosen |= {"gradient_accumulation_steps": packs // setup.ranks, "packs_per_step": packs}
    return chosen, ["as the run that is resumed began: " + ", ".join(
        f"--{flag} {chosen[flag] or 'off'}" for flag in FLAGS if chosen.get(flag) is not None)]


def _pack(setup, what):
    size = f"{setup.budget:,}" if setup.budget else f"{setup.batch_size:,}"
    return f"{size} {what if setup.budget or what != 'tokens' else 'samples'}"


def _recomputed(setup):
    return {None: "no recomputation", "all": "layers recomputed",
            "selective": "cheap parts recomputed"}[setup.recompute]
