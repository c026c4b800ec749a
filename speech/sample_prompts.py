"""--sample_prompts: at every validation of a run, a few prompts are spoken by the model as it is.

Rank 0 generates while the others wait; under FSDP2 the weights are gathered for that time. Speech
goes to OUTPUT_DIR/samples/step-<N>/ and to TensorBoard or W&B, stop rate and length ratio to
metrics.jsonl. The draws are seeded apart, so a run with samples trains exactly as one without.
"""
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from core import dist
from core.cli import require
from core.dist import gathered
from core.watchdog import stop_requested
from speech import speak, versions
from speech.codes import FRAME_RATE, load_codec

TIME_LIMIT = 120    # seconds that speaking may take at one validation
BATCH = 8           # prompts generated together
MAX_PROMPTS = 64    # a few are meant; generate_tts.py speaks any number


def load(args, tokenizer, ids, config, codec_dir, world):
    """Speaker of --sample_prompts, on every rank; its prompts are checked and encoded before
    training starts. Raises UserError.
    """
    def prepare():
        samples = speak.read_prompts(args.sample_prompts, args.normalize_text == "on")
        require(len(samples) <= MAX_PROMPTS, f"--sample_prompts {args.sample_prompts}: "
                f"{len(samples)} prompts; each validation speaks all of them, so at most "
                f"{MAX_PROMPTS} are taken (generate_tts.py speaks any number)")
        settings = speak.sampling(config, args.sample_seconds)
        codec, bandwidth = load_codec(codec_dir, world.device, ids.num_codebooks)
        room = versions.module(config).positions(config) - settings.max_new_tokens
        return speak.prepare(samples, tokenizer, ids, codec, bandwidth, room), settings

    prompts, settings = dist.rank0(world, prepare)
    return Speaker(prompts, settings, ids, codec_dir, world.device, args.output_dir, args.seed)


@dataclass
class Speaker:
    """Speaks the prompts of a run. settings: of speak.sampling. seed: of the draws."""
    prompts: list
    settings: object
    ids: object
    codec_dir: Path
    device: torch.device
    output_dir: str
    seed: int

    def speak(self, world, model, step, log, autocast):
        """{eval/...: float} of the prompts spoken by model, a versions.packed. Collective: rank 0
        speaks and writes to log, the others wait.
        """
        model.eval()
        with gathered(model), autocast():
            values = dist.rank0(world, self.speak_all, model.base_model, step, log)
        model.train()
        return values

    def speak_all(self, native, step, log):
        """Speak and record every prompt -> {metric: float}. native: whole weights, in eval mode.

        After a request to stop or TIME_LIMIT seconds the prompts not yet spoken are left out, and
        the printed line says so, as it does when the GPU's memory does not suffice. Speech that the
        time limit cut off counts in the stop rate, but not in the length ratio.
        """
        for folder in Path(self.output_dir).glob("samples/step-*"):
            number = folder.name.removeprefix("step-")
            if number.isdigit() and int(number) > step:     # lost work, or an earlier run's
                shutil.rmtree(folder)
        start, spoken, batches = time.monotonic(), [], range(0, len(self.prompts), BATCH)
        end = start + TIME_LIMIT
        try:
            # each new length would compile the layers once more
            with torch.compiler.set_stance("force_eager"):
                for first in batches:
                    if time.monotonic() < end and not stop_requested():
                        spoken += speak.generate(
                            native, self.prompts[first:first + BATCH], self.ids, self.settings,
                            self.seed + first // BATCH, self.device, end, stop_requested)
            # building the codec draws numbers, dropout must not feel it
            with torch.random.fork_rng(devices=[]):
                codec, _ = load_codec(self.codec_dir, self.device, self.ids.num_codebooks)
            waves = [speak.decode(codec, codes) for codes, _ in spoken]
        except torch.OutOfMemoryError:
            print(f"samples step {step:>6} | left out: too little GPU memory is free; give fewer "
                  "prompts or a shorter --sample_seconds")
            return {}
        took = time.monotonic() - start
        total = sum(len(codes) for codes, _ in spoken) / FRAME_RATE
        ends, values, ratios = [ended_by for _, ended_by in spoken], {}, []
        folder = Path(self.output_dir) / "samples" / f"step-{step}"
        for number, (prompt, (codes, ended_by), wave) in enumerate(
                zip(self.prompts, spoken, waves)):
            about = speak.record(prompt, codes, ended_by, self.seed + number // BATCH,
                                 took / total if total else None)
            speak.write_sample(folder, prompt.name, wave, {**about, "step": step})
            log.write_speech(step, f"samples/{prompt.name}", wave, speak.SAMPLE_RATE)
            if about["target_seconds"] and ended_by != "time":
                ratios.append(about["seconds"] / about["target_seconds"])
        whole, why, stopping = len(ends) - ends.count("time"), "", stop_requested()
        if whole < len(self.prompts):       # values of some prompts alone do not compare
            why = " (asked to stop)" if stopping else " (time limit)"
            values["eval/spoken"] = whole / len(self.prompts)
        if total:
            values["eval/real_time_factor"] = took / total
        if ends and not stopping:
            values["eval/stop_rate"] = ends.count("eos") / len(ends)
            why += f" | stop rate {values['eval/stop_rate']:6.1%}"
        if ratios:
            values["eval/length_ratio"] = sum(ratios) / len(ratios)
            why += f" | length ratio {values['eval/length_ratio']:5.2f}"
        print(f"speech step {step:>6} | {whole} of {len(self.prompts)} prompts, {total:.1f} s in "
              f"{took:.1f} s{why}")
        return values
