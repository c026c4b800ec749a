"""--keep: what the base can do, and training shall not undo: other voices, tags, languages, dialogues.

The base speaks the rows of a file once, before the first step. Every so many steps the model being trained gets packs
of that speech beside its own, and is held near the base there: KL(base || model) over the codebooks, at every code.
The base is the model with its adapters switched off, so no second one is in memory. No recordings are needed.
"""
import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from common import adapters, distributed
from common.checkpoint import write_atomically
from common.distributed import UserError
from common.packing import pack_order
from common.watchdog import Stopped, stop_requested
from speech.data.conversations import Clip
from speech.data.encode import load_codec
from speech.model import versions
from speech.model.labels import IGNORE, TokenIds
from speech.model.loss import total_loss
from speech.voice import generate

FILE = "keep.npz"       # in OUTPUT_DIR: the codes that the base spoke
SECONDS = 30.0          # that a row's speech may take
BATCH = 8               # rows spoken together


def load(args, tokenizer, ids, config, codec_dir, base, world):
    """Keeper of --keep, on every rank; its rows are checked and their references encoded, nothing is spoken yet.

    base: fingerprint of the base model. Raises UserError with every row that cannot be used.
    """
    def prepare():
        samples = generate.read_prompts(args.keep, args.normalize_text == "on")
        for sample in samples:      # the base says it anew
            sample.turns[-1].parts[-1] = Clip("")
        settings = generate.sampling(config, SECONDS)
        codec, bandwidth = load_codec(codec_dir, world.device, ids.num_codebooks)
        room = min(args.max_length or versions.module(config).positions(config),
                   args.max_tokens_per_batch or 2**62) - settings.max_new_tokens
        return generate.prepare(samples, tokenizer, ids, codec, bandwidth, room), settings

    prompts, settings = distributed.rank0_first(world, prepare)
    digest = hashlib.sha256(json.dumps([base, args.seed]).encode())
    for prompt in prompts:
        digest.update(prompt.tokens.tobytes() + prompt.audio_ids.tobytes())
    return Keeper(prompts, settings, ids, args, digest.hexdigest()[:16])


def with_speech(prompt, codes, ids):
    """What labels.assemble makes of a prompt and the (T, K) codes spoken behind it, which are trained."""
    spoken = ids.assemble(np.array([ids.audio_placeholder_id]), np.array([True]), [codes])
    heard, before = prompt.audio_ids, len(prompt.tokens)
    sample = {"input_ids": np.concatenate([prompt.tokens, spoken["input_ids"]]),
              "is_audio": np.concatenate([prompt.is_audio, spoken["is_audio"]]),
              "audio_ids": np.concatenate([heard, spoken["audio_ids"]])}
    sample["text_labels"] = np.full(len(sample["input_ids"]), IGNORE)
    if isinstance(ids, TokenIds):
        untrained = np.full_like(heard, IGNORE)
        return {**sample, "audio_labels": np.concatenate([untrained, spoken["audio_labels"]])}
    return {**sample, "audio_at": spoken["audio_at"] + before, "audio_targets": spoken["audio_targets"]}


@dataclass
class Keeper:
    """Rows that the base has spoken, and where they come into training. settings: of generate.sampling."""
    prompts: list
    settings: object
    ids: object
    args: object            # the trainer's flags
    fingerprint: str        # of the rows, their references, the base and the seed
    samples: list = field(default_factory=list)     # of with_speech

    def speak(self, world, model):
        """Have the base speak the rows, unless OUTPUT_DIR has its codes -> a line about it. Rank 0 speaks, the others
        wait. Collective.

        model: a versions.packed with adapters. Raises UserError when too little speech comes to an end, and Stopped.
        """
        path, model_ids = Path(self.args.output_dir) / FILE, self.ids

        def codes_of_base():
            if path.exists():
                with np.load(path) as saved:
                    if str(saved["fingerprint"]) == self.fingerprint:
                        return [saved[f"codes_{i}"] for i in range(len(self.prompts))]
            found = []
            with torch.compiler.set_stance("force_eager"), adapters.switched_off(model.net):
                for first in range(0, len(self.prompts), BATCH):
                    found += generate.generate(model.base_model, self.prompts[first:first + BATCH], model_ids,
                                               self.settings, self.args.seed + first // BATCH, world.device,
                                               asked=stop_requested)
                    if stop_requested():
                        return None
            # without its end, or shorter than the model can end: nothing to learn from
            codes = [spoken.astype(np.int16) if how == "eos" and len(spoken) >= model_ids.min_frames else
                     np.zeros((0, model_ids.num_codebooks), np.int16) for spoken, how in found]
            arrays = {f"codes_{i}": spoken for i, spoken in enumerate(codes)}

            def write(to):
                with open(to, "wb") as file:
                    np.savez_compressed(file, fingerprint=self.fingerprint, **arrays)
            write_atomically(path, write)
            return codes

        model.eval()
        autocast = torch.autocast(world.device.type, torch.bfloat16, enabled=self.args.bf16)
        with distributed.gathered(model), autocast:
            codes = distributed.rank0_first(world, codes_of_base)
        model.train()
        if codes is None:
            raise Stopped("asked to stop while the base spoke --keep")
        self.samples = [with_speech(prompt, spoken.astype(np.int64), self.ids)
                        for prompt, spoken in zip(self.prompts, codes) if len(spoken)]
        if len(self.samples) * 2 < len(codes):
            raise UserError(f"--keep {self.args.keep}: the base ended {len(self.samples)} of {len(codes)} rows within "
                            f"{SECONDS:g} s: it does not speak these rows, so there is nothing to keep")
        for number, sample in enumerate(self.samples):
            sample["number"] = number
        self.targets = np.array([self.ids.targets(len(spoken)) for spoken in codes if len(spoken)])
        self.order = pack_order(np.array([len(sample["input_ids"]) for sample in self.samples]), seed=self.args.seed,
                                tokens_per_pack=self.args.max_tokens_per_batch,
                                samples_per_pack=self.args.per_device_train_batch_size)
        silent = len(codes) - len(self.samples)
        every = f"every {self.args.keep_every} steps" if self.args.keep_every > 1 else "every step"
        return (f"keep       {len(self.samples)} rows as the base speaks them, weight {self.args.keep_weight:g} "
                f"{every}" + (f"; {silent} that it did not end are left out" if silent else ""))

    def packs(self, step, world):
        """[[row numbers]] of a step on all ranks, in the order of packing.py: micro-step by micro-step; [] when none
        is due.
        """
        turn, late = divmod(step, self.args.keep_every)
        if late:
            return []
        count = world.size * self.args.gradient_accumulation_steps
        places = (divmod(turn * count + i, self.order.packs_per_epoch) for i in range(count))
        return [self.order.epoch(epoch).pack(pack).tolist() for epoch, pack in places]

    def hold(self, wrapped, collate, world, step, micro):
        """Add the gradients of one micro-step's pack -> (2,) float64: divergence and its cells, for the log.

        The divergence is divided by the cells of all packs of the step, on all ranks. Ranks do not sum gradients here:
        the training pass that follows does. collate: data.collate.
        """
        packs = self.packs(step, world)
        if not packs:
            return torch.zeros(2, dtype=torch.float64, device=world.device)
        mine = packs[micro * world.size + world.rank]
        batch = collate([self.samples[i] for i in mine], self.ids, self.args.max_tokens_per_batch).to(world.device)
        cells = sum(int(self.targets[pack].sum()) for pack in packs)
        with distributed.gradient_sync(wrapped, False):
            with torch.autocast(world.device.type, torch.bfloat16, enabled=self.args.bf16):
                apart = wrapped(batch, keep=True)
            loss = total_loss(apart, cells, 0.0, 1, self.args.audio_loss_reduction, 0.0)
            (loss * self.args.keep_weight * world.size).backward()
        found = torch.full((2,), float(self.targets[mine].sum()), dtype=torch.float64, device=world.device)
        found[0] = apart.detach().sum()
        return found
