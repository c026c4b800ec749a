"""--sample_prompts: at every validation of a training run, hear a few prompts spoken by the model as it is.

Rank 0 generates while the others wait; under FSDP2 the weights are gathered for that time. Speech goes to
OUTPUT_DIR/samples/step-<N>/ and to TensorBoard or W&B, the stop rate and the length ratio to
metrics.jsonl. The draws are seeded apart, so a run with samples trains exactly as one without.
"""
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from core.gathered import gathered
from core import dist
from core.cli import UserError, require_package
from core.watchdog import stop_requested
from speech.code_cache import FRAME_RATE
from speech.encode import load_codec
from speech import generate, versions

TIME_LIMIT = 120    # seconds that speaking may take at one validation
BATCH = 8           # prompts generated together
MAX_PROMPTS = 64    # a few are meant; generate_tts.py speaks any number


def load(args, tokenizer, ids, config, codec_dir, world):
    """Speaker of --sample_prompts, on every rank; its prompts are checked and encoded before
    training starts. Raises UserError.
    """
    def prepare():
        samples = generate.read_prompts(args.sample_prompts, args.normalize_text == "on")
        if len(samples) > MAX_PROMPTS:
            raise UserError(f"--sample_prompts {args.sample_prompts}: {len(samples)} prompts; each "
                            f"validation generates all of them, so at most {MAX_PROMPTS} are taken "
                            "(generate_tts.py speaks any number)")
        require_package("matplotlib", "--sample_prompts draws spectrograms")
        settings = generate.sampling(config, args.sample_seconds)
        codec, bandwidth = load_codec(codec_dir, world.device, ids.num_codebooks)
        room = versions.module(config).positions(config) - settings.max_new_tokens
        return generate.prepare(samples, tokenizer, ids, codec, bandwidth, room), settings

    prompts, settings = dist.rank0(world, prepare)
    return Speaker(prompts, settings, ids, codec_dir, world.device, args.output_dir, args.seed)


def forget_later(output_dir, step):
    """Delete samples of steps after `step`: work that was lost, or an earlier run's."""
    for folder in Path(output_dir).glob("samples/step-*"):
        if folder.name.removeprefix("step-").isdigit() and int(folder.name.removeprefix("step-")) > step:
            shutil.rmtree(folder)


@dataclass
class Speaker:
    """What speaks the prompts of a run. settings: of generate.sampling. seed: of the draws."""
    prompts: list
    settings: object
    ids: object
    codec_dir: Path
    device: torch.device
    output_dir: str
    seed: int

    def speak(self, world, model, step, log, autocast):
        """{eval/...: float} of the prompts spoken by model, a versions.packed. Rank 0 speaks and
        writes to log, the others wait.
        """
        model.eval()
        with gathered(model), autocast():
            values = dist.rank0(world, lambda: self.speak_all(
                model.base_model, step, log, stop_requested))
        model.train()
        return values

    def speak_all(self, native, step, log, asked):
        """Speak and record every prompt -> {metric: float}. On one rank, with whole weights and in eval mode.

        native: the native model, adapters inside. asked: a request to stop; then, or after TIME_LIMIT
        seconds, the prompts not yet spoken are left out, and the printed line tells so, as it does when
        the GPU's memory does not suffice. Speech that the time limit cut off did not stop by itself: it
        counts in the stop rate, but not in the length ratio.
        """
        forget_later(self.output_dir, step)     # steps that come once more
        end, start, spoken = time.monotonic() + TIME_LIMIT, time.monotonic(), []
        try:
            with torch.compiler.set_stance("force_eager"):      # each new length would compile the layers once more
                for first in range(0, len(self.prompts), BATCH):
                    if time.monotonic() < end and not asked():
                        spoken += generate.generate(native, self.prompts[first:first + BATCH], self.ids, self.settings,
                                                    self.seed + first // BATCH, self.device, end, asked)
            with torch.random.fork_rng(devices=[]):     # building the codec draws numbers, dropout must not feel it
                codec, _ = load_codec(self.codec_dir, self.device, self.ids.num_codebooks)
            waves = [generate.decode(codec, codes) for codes, _ in spoken]
        except torch.OutOfMemoryError:
            print(f"samples step {step:>6} | left out: too little GPU memory is free; give fewer prompts or a "
                       "shorter --sample_seconds")
            return {}
        return self.record(step, log, asked, spoken, waves, time.monotonic() - start)

    def record(self, step, log, asked, spoken, waves, took):
        """Write and log what was spoken -> {metric: float}. spoken: of generate.generate; took: seconds."""
        prompts, total = self.prompts, sum(len(codes) for codes, _ in spoken) / FRAME_RATE
        whole = [number for number, (_, ended_by) in enumerate(spoken) if ended_by != "time"]
        values, ratios = {}, []
        for number, (prompt, (codes, ended_by), wave) in enumerate(zip(prompts, spoken, waves)):
            about = generate.record(prompt, codes, ended_by, self.seed + number // BATCH, took / total if total else None)
            picture = generate.mel_picture(wave, f"step {step}: {prompt.text}")
            generate.write_sample(Path(self.output_dir) / "samples" / f"step-{step}", prompt.name, wave, picture,
                               {**about, "step": step})
            log.write_speech(step, f"samples/{prompt.name}", wave, generate.SAMPLE_RATE, picture)
            if about["target_seconds"] and ended_by != "time":
                ratios.append(about["seconds"] / about["target_seconds"])
        ends = [ended_by for _, ended_by in spoken]
        why = ""
        if len(whole) < len(prompts):
            why = " (asked to stop)" if asked() else " (time limit)"
        if total:
            values["eval/real_time_factor"] = took / total
        if ends and not asked():
            values["eval/stop_rate"] = ends.count("eos") / len(ends)
        if ratios:
            values["eval/length_ratio"] = sum(ratios) / len(ratios)
        print(f"speech step {step:>6} | {len(whole)} of {len(prompts)} prompts, {total:.1f} s in {took:.1f} s{why}" +
                   (f" | stop rate {values['eval/stop_rate'] * 100:5.1f}%" if "eval/stop_rate" in values else "") +
                   (f" | length ratio {values['eval/length_ratio']:5.2f}" if ratios else ""))
        if why:     # what is measured of some prompts alone does not compare
            values["eval/spoken"] = len(whole) / len(prompts)
        return values
