"""--sample_prompts: at every validation of a training run, hear a few prompts spoken by the model as it is.

Rank 0 generates while the others wait; under FSDP2 the weights are gathered for that time. Speech goes to
OUTPUT_DIR/samples/step-<N>/ and to TensorBoard or W&B, the stop rate, the length ratio and what judges find (scores.py)
to metrics.jsonl. The draws are seeded apart, so a run with samples trains exactly as one without.
"""
import hashlib
import json
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from common import distributed, run
from common.distributed import UserError
from common.flags import need_package
from common.gathered import gathered
from core.watchdog import stop_requested
from speech.data import text_normalization
from speech.data.code_cache import FRAME_RATE
from speech.data.encode import load_codec
from speech.model import versions
from speech.voice import generate, scores, speech_metrics

JUDGING = ("asr_model", "asr_command", "speaker_model", "mos", "language", "asr_time_limit")    # flags
BATCH = 8           # prompts generated together
MAX_PROMPTS = 64    # a few are meant; generate_tts.py speaks any number


def load(args, tokenizer, ids, config, codec_dir, world):
    """Speaker of --sample_prompts, on every rank; its prompts are checked and encoded before
    training starts, and its judges loaded, so that a missing one is found now. Raises UserError.
    """
    judging = {name: getattr(args, name) for name in JUDGING}

    def prepare():
        samples = generate.read_prompts(args.sample_prompts, args.normalize_text == "on")
        if len(samples) > MAX_PROMPTS:
            raise UserError(f"--sample_prompts {args.sample_prompts}: {len(samples)} prompts; each "
                            f"validation generates all of them, so at most {MAX_PROMPTS} are taken "
                            "(generate_tts.py speaks any number)")
        need_package("matplotlib", "--sample_prompts draws spectrograms")
        scores.load_judges(**judging)
        settings = generate.sampling(config, args.sample_seconds)
        codec, bandwidth = load_codec(codec_dir, world.device, ids.num_codebooks)
        room = versions.module(config).positions(config) - settings.max_new_tokens
        return generate.prepare(samples, tokenizer, ids, codec, bandwidth, room), settings

    prompts, settings = distributed.rank0_first(world, prepare)
    return Speaker(prompts, settings, ids, codec_dir, world.device, args.output_dir, judging,
                   args.seed, args.sample_time_limit)


def forget_later(output_dir, step):
    """Delete samples of steps after `step`: work that was lost, or an earlier run's."""
    for folder in Path(output_dir).glob("samples/step-*"):
        if folder.name.removeprefix("step-").isdigit() and int(folder.name.removeprefix("step-")) > step:
            shutil.rmtree(folder)


@dataclass
class Speaker:
    """What speaks the prompts of a run. settings: of generate.sampling. judging: of
    scores.load_judges, by name.

    seed: of the draws. time_limit: seconds that all prompts may take at one validation.
    """
    prompts: list
    settings: object
    ids: object
    codec_dir: Path
    device: torch.device
    output_dir: str
    judging: dict
    seed: int
    time_limit: float

    def fingerprint(self):
        """What makes two validations' word errors or likenesses comparable, as text."""
        rows = [(prompt.tokens.tolist(), prompt.audio_ids.tolist()) for prompt in self.prompts]
        known = json.dumps([rows, self.judging, self.settings.max_new_tokens], default=str)
        return hashlib.sha256(known.encode()).hexdigest()[:16]

    def speak(self, world, model, state, args):
        """{eval/...: float} of the prompts spoken by model, a versions.packed. Rank 0 speaks, the
        others wait.
        """
        model.eval()
        autocast = run.autocast(args, world.device)
        with gathered(model), autocast:
            values = distributed.rank0_first(world, lambda: self.speak_all(
                model.base_model, state.step, state.log, stop_requested))
        model.train()
        return values

    def speak_all(self, native, step, log, asked):
        """Speak, judge and record every prompt -> {metric: float}. On one rank, with whole weights and in eval mode.

        native: the native model, adapters inside. asked: a request to stop; then, or after time_limit
        seconds, the prompts not yet spoken are left out, and the printed line tells so, as it does when
        the GPU's memory does not suffice. Speech that the time limit cut off did not stop by itself: it
        counts in the stop rate, but not in the length ratio, nor is it judged.
        """
        end, start, spoken = time.monotonic() + self.time_limit, time.monotonic(), []
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
            tqdm.write(f"samples step {step:>6} | left out: too little GPU memory is free; give fewer prompts or a "
                       "shorter --sample_seconds")
            return {}
        return self.record(step, log, asked, spoken, waves, time.monotonic() - start)

    def record(self, step, log, asked, spoken, waves, took):
        """Judge, write and log what was spoken -> {metric: float}. spoken: of generate.generate; took: seconds."""
        prompts, total = self.prompts, sum(len(codes) for codes, _ in spoken) / FRAME_RATE
        whole = [number for number, (_, ended_by) in enumerate(spoken) if ended_by != "time"]
        judges = scores.load_judges(**self.judging)
        found, values = judge([prompts[i] for i in whole], [waves[i] for i in whole], judges, self.device)
        facts, ratios = dict(zip(whole, found)), []
        for number, (prompt, (codes, ended_by), wave) in enumerate(zip(prompts, spoken, waves)):
            about = generate.record(prompt, codes, ended_by, self.seed + number // BATCH, took / total if total else None)
            picture = generate.mel_picture(wave, f"step {step}: {prompt.text}")
            generate.write_sample(Path(self.output_dir) / "samples" / f"step-{step}", prompt.name, wave, picture,
                               {**about, **facts.get(number, {}), "step": step})
            log.write_speech(step, f"samples/{prompt.name}", wave, generate.SAMPLE_RATE, picture)
            if about["target_seconds"] and ended_by != "time":
                ratios.append(about["seconds"] / about["target_seconds"])
        ends = [ended_by for _, ended_by in spoken]
        why = ""
        if len(whole) < len(prompts):
            why = " (asked to stop)" if asked() else " (--sample_time_limit)"
        if total:
            values["eval/real_time_factor"] = took / total
        if ends and not asked():
            values["eval/stop_rate"] = ends.count("eos") / len(ends)
        if ratios:
            values["eval/length_ratio"] = sum(ratios) / len(ratios)
        tqdm.write(f"speech step {step:>6} | {len(whole)} of {len(prompts)} prompts, {total:.1f} s in {took:.1f} s{why}" +
                   (f" | stop rate {values['eval/stop_rate'] * 100:5.1f}%" if "eval/stop_rate" in values else "") +
                   (f" | length ratio {values['eval/length_ratio']:5.2f}" if ratios else "") +
                   (f" | word errors {values['eval/wer'] * 100:.1f}%" if "eval/wer" in values else "") +
                   (f" | likeness {values['eval/speaker_similarity']:.2f}" if "eval/speaker_similarity" in values else ""))
        if why:     # what is measured of some prompts alone does not compare
            values["eval/spoken"] = len(whole) / len(prompts)
        return values


def judge(prompts, waves, judges, device):
    """([facts of each prompt], {metric: float}) of what scores.Judges find in waves at generate.SAMPLE_RATE.

    Likeness is to the voice to be cloned, else to the true recording.
    """
    facts, values, likes = [{} for _ in prompts], {}, []
    if not prompts:
        return facts, values
    with judges.on(device):
        if judges.hear:
            names, texts = [prompt.name for prompt in prompts], [text_normalization.heard(prompt.text) for prompt in prompts]
            heard = judges.hear(waves, generate.SAMPLE_RATE, names, [])
            rates, totals = scores.word_rates(texts, heard, judges.language)
            facts = [{"heard": text, **row} for text, row in zip(heard, rates)]
            values |= {f"eval/{key}": value for key, value in totals.items() if value is not None}
        if judges.embed:
            clips = [prompt.references[-1] if prompt.references else prompt.target
                     for prompt in prompts]
            known = {clip: speech_metrics.read_audio(clip.path, clip.offset, clip.duration)
                     for clip in clips if clip}
            references = [known.get(clip, np.zeros(0, np.float32)) for clip in clips]
            likes = scores.likeness(waves, references, generate.SAMPLE_RATE, judges.embed)
    found = {"speaker_similarity": likes, "dnsmos": scores.dnsmos(waves, generate.SAMPLE_RATE) if judges.mos else []}
    for key, numbers in found.items():
        for about, number in zip(facts, numbers):
            about[key] = number
        if known := [number for number in numbers if number is not None]:
            values[f"eval/{key}"] = sum(known) / len(known)
    return facts, values
