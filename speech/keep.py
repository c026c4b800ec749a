"""--keep: preserve abilities of the base in training: voices, tags, languages, dialogues.

The base speaks the rows of a file once, before the first step. At intervals the trained model also
gets packs of that speech, and the loss adds KL(base || model) at every code of each codebook. The
base is the model with its adapters switched off, so memory holds one model. No recordings are
needed.
"""
import hashlib
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from core import adapters, dist
from core.checkpoint import write_atomically
from core.cli import require
from core.packing import PackOrder
from core.run import Stopped
from speech import speak
from speech.conversations import FRAME_RATE
from speech.labels import IGNORE, total_loss

FILE = "keep.npz"       # in OUTPUT_DIR: the codes that the base spoke
SECONDS = 30.0          # longest speech of a row


def divergence(model, batch):
    """(K,) fp32: KL(base || model) of each codebook in nats, summed over the batch's trained cells.
    model: a PackedBase. The base is the same, without its adapters, gradient and dropout."""
    training = model.training
    model.eval()
    with torch.no_grad(), adapters.disable(model.net):
        base = model.audio_logits(model.hidden_states(batch), batch).log_softmax(-1)
    model.train(training)
    trained = model.audio_logits(model.hidden_states(batch), batch).log_softmax(-1)
    cells = F.kl_div(trained, base, log_target=True, reduction="none").sum(-1)
    return (cells * (batch.audio_targets != IGNORE)).sum(0)


class Keeper:
    """Rows that the base has spoken, and their schedule."""

    def __init__(self, args, tokenizer, ids, config, codec_dir, world):
        """On every rank. args: the trainer's flags. UserError lists all unusable rows."""
        self.args, self.ids = args, ids
        longest = args.max_length or speak.positions(config)
        longest = min(longest, args.max_tokens_per_batch or longest)
        # a small pack keeps half of its room for the prompt
        self.settings = speak.sampling(config, min(SECONDS, longest / 2 / FRAME_RATE))
        self.prompts = speak.prepare_file(args.keep, args, tokenizer, ids, codec_dir,
                                          longest - self.settings.max_new_tokens, world)
        digest = hashlib.sha256(str(args.seed).encode())
        for row in (prompt.row(ids) for prompt in self.prompts):
            digest.update(row["input_ids"].tobytes() + row["audio_ids"].tobytes())
        self.fingerprint = digest.hexdigest()[:16]      # on rank 0, the trainer appends the base's

    def longest(self):
        """Most tokens of a row with its speech."""
        rows = (prompt.row(self.ids) for prompt in self.prompts)
        return self.settings.max_new_tokens + max(len(row["input_ids"]) for row in rows)

    def speak(self, world, model, autocast):
        """Have the base of a packed model with adapters speak the rows, unless OUTPUT_DIR has its
        codes, and return a log line. Collective. UserError if too few rows end by themselves."""
        codes = speak.use_on_rank0(world, model, autocast, self._codes, world, model)
        if codes is None:
            raise Stopped("asked to stop while the base spoke --keep")
        rows = [(prompt, spoken) for prompt, spoken in zip(self.prompts, codes) if len(spoken)]
        require(len(rows) * 2 >= len(codes), f"--keep {self.args.keep}: the base ended only "
                f"{len(rows)} of {len(codes)} rows within {SECONDS:g} s or half a pack")
        self.samples = []
        for i, (prompt, spoken) in enumerate(rows):         # only this speech is trained
            tokens = np.append(prompt.tokens, self.ids.audio_placeholder_id)
            self.samples.append({"number": i, **self.ids.assemble(
                tokens, np.arange(len(tokens)) == len(tokens) - 1, [*prompt.codes, spoken])})
        self.targets = np.array([self.ids.targets(len(spoken)) for _, spoken in rows])
        self.order = PackOrder(np.array([len(sample["input_ids"]) for sample in self.samples]),
                               seed=self.args.seed, tokens_per_pack=self.args.max_tokens_per_batch,
                               samples_per_pack=self.args.per_device_train_batch_size)
        return f"keep       {len(rows)} of {len(codes)} rows, which the base ended by itself"

    def _codes(self, world, model):
        """[(T, K) int16 codes] of the rows, read from FILE, or spoken and saved there. T is 0 if
        the row did not end. None after a stop request."""
        path, empty = Path(self.args.output_dir) / FILE, np.zeros((0, self.ids.num_codebooks))
        if path.exists():
            try:
                with np.load(path) as saved:        # each array of a zip file has a checksum
                    if str(saved["fingerprint"]) == self.fingerprint:
                        return [saved[f"codes_{i}"] for i in range(len(self.prompts))]
            except Exception as error:      # damage raises many kinds
                path.rename(f"{path}.damaged")
                print(f"{path} cannot be read ({error}), so the base speaks again")
        with adapters.disable(model.net):
            spoken = speak.generate_all(model.base_model, self.prompts, self.ids, self.settings,
                                        self.args.seed, world.device)
        if spoken is None:
            return None
        # without an end, or too short to have one, a clip is unusable
        codes = [clip if ended_by == "eos" and len(clip) >= self.ids.min_frames else empty
                 for clip, ended_by in spoken]
        codes = [clip.astype(np.int16) for clip in codes]

        def write(temporary):
            with open(temporary, "wb") as file:
                np.savez_compressed(file, fingerprint=self.fingerprint,
                                    **{f"codes_{i}": clip for i, clip in enumerate(codes)})
        write_atomically(path, write)
        return codes

    def packs(self, step, world):
        """[[row numbers]] of a step on all ranks, in packing.py's order; [] if none is due."""
        turn, steps_since = divmod(step, self.args.keep_every)
        if steps_since:
            return []
        count = world.size * self.args.gradient_accumulation_steps
        positions = (divmod(turn * count + i, self.order.packs_per_epoch) for i in range(count))
        return [self.order.window(epoch, pack).tolist() for epoch, pack in positions]

    def backward(self, wrapped, collate, world, step, micro, autocast, scale):
        """Add the gradients of one micro-step's pack -> (2,) float64 for the log: divergence and
        its number of cells. scale: GradScaler.scale.

        The divergence is divided by the cells of the step's packs on all ranks. The training pass
        that follows reduces the gradients over ranks."""
        sums = torch.zeros(2, dtype=torch.float64, device=world.device)
        packs = self.packs(step, world)
        if not packs:
            return sums
        mine = packs[micro * world.size + world.rank]
        batch = collate([self.samples[i] for i in mine], self.ids, self.args.max_tokens_per_batch)
        cells = sum(int(self.targets[pack].sum()) for pack in packs)
        with dist.gradient_sync(wrapped, False):
            with autocast():
                divergence = wrapped(batch.to(world.device), keep=True)
            loss = total_loss(divergence, cells, 0.0, 1, 0.0)
            # so that the average over all steps has the given weight
            weight = self.args.keep_weight * self.args.keep_every * world.size
            scale(loss * weight).backward()
        sums[0] = divergence.detach().sum()
        sums[1] = float(self.targets[mine].sum())
        return sums
