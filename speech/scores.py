"""What a listener would say of speech: words understood, likeness of voices, naturalness. By models from outside.

    heard = scores.recognise_pocketsphinx(waves, 24000, "#JSGF V1.0; grammar g; public <s> = (one | two)+;")
    errors, words = scores.word_errors(["one two", "two"], heard)
    cosines = scores.likeness(waves, reference_waves, 24000, scores.load_voices())

Waves are (n,) float32 mono in -1..1. A model may be any of those named here; none is a requirement of training, and
each is imported, or said to be missing, where it is used.
"""
import contextlib
import functools
import importlib.util
import itertools
import re
import shlex
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from core.cli import UserError, require_package
from core import lifetime
from speech.speech_metrics import resample

RATE = 16000                # Hz, of all models here
SHORTEST_VOICE_S = 0.5      # a shorter clip says nothing about a voice, and may be too short for the model
LETTERS_APART = ("zh", "yue", "ja", "th", "lo", "my")       # written without spaces: errors are counted by character



# ---------------------------------------------------------------------------------------------------------------------
# Text


@functools.cache
def normaliser(language):
    """text -> text as it is compared, by whisper's own rules (Radford et al. 2022, appendix C), as papers do.

    All lose case, signs and what stands in brackets. "en": numbers become digits (and a row of spoken digits one
    number), contractions are written out, "uh" and "um" go; whisper's list of British spellings is not applied.
    LETTERS_APART: every character is a word. None: of another, or an unknown, language.
    """
    from transformers.models.whisper.english_normalizer import (
        BasicTextNormalizer,
        EnglishTextNormalizer,
    )
    if language == "en":
        return EnglishTextNormalizer({})
    return BasicTextNormalizer(split_letters=language in LETTERS_APART)


def edit_distance(a, b):
    """Least number of insertions, deletions and replacements that turn sequence a into b (Levenshtein 1966)."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        before, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (x != y))
    return row[-1]


def pairs(references, hypotheses, language):
    """[(what was to be heard, what was heard)], normalised; as many of one as of the other, or ValueError."""
    clean = normaliser(language)
    return [(clean(said).strip(), clean(heard).strip()) for said, heard in zip(references, hypotheses, strict=True)]


def word_errors(references, hypotheses, language=None):
    """(errors, words of the references) over all texts; errors / words is the word error rate.

    language: of normaliser.
    """
    both = [(said.split(), heard.split()) for said, heard in pairs(references, hypotheses, language)]
    return sum(edit_distance(*texts) for texts in both), sum(len(said) for said, _ in both)


def character_errors(references, hypotheses, language=None):
    """(errors, characters of the references) over all texts; spaces do not count."""
    both = [(said.replace(" ", ""), heard.replace(" ", "")) for said, heard in pairs(references, hypotheses, language)]
    return sum(edit_distance(*texts) for texts in both), sum(len(said) for said, _ in both)


def word_rates(references, hypotheses, language=None):
    """([{"wer", "cer"} of each text], {"wer", "cer"} of all: errors of all over words of all), None without words."""
    rows, totals = [], {"wer": np.zeros(2, int), "cer": np.zeros(2, int)}
    for said, heard in zip(references, hypotheses, strict=True):
        found = {"wer": word_errors([said], [heard], language), "cer": character_errors([said], [heard], language)}
        rows.append({key: errors / length if length else None for key, (errors, length) in found.items()})
        for key, counts in found.items():
            totals[key] += counts
    return rows, {key: float(errors / length) if length else None for key, (errors, length) in totals.items()}


# ---------------------------------------------------------------------------------------------------------------------
# Words


def recognise_pocketsphinx(waves, rate, grammar=None):
    """[text] by CMU Sphinx's US English model, which its package contains. Raises UserError.

    grammar: JSGF text; None: its large vocabulary, which is weak on anything but clear sentences.
    """
    require_package("pocketsphinx", "--asr_model")
    import pocketsphinx
    with tempfile.NamedTemporaryFile("w", suffix=".gram") as file:
        file.write(grammar or "")
        file.flush()
        try:
            decoder = pocketsphinx.Decoder(samprate=RATE, loglevel="FATAL", **({"jsgf": file.name} if grammar else {}))
        except RuntimeError as error:
            raise UserError(f"pocketsphinx cannot be started: a word of the grammar may not be in its dictionary "
                            f"({error})")
    noise, heard = np.random.default_rng(0), []
    for wave in waves:
        wave = resample(np.asarray(wave, np.float32), rate, RATE)
        quiet = np.zeros(3 * RATE // 10, np.float32)        # it misses words at the very ends
        wave = np.concatenate([quiet, wave / max(1e-6, np.abs(wave).max(initial=0)) * 0.6, quiet])
        wave = wave + noise.normal(0, 1e-3, len(wave))      # and stumbles over digital silence
        decoder.start_utt()
        decoder.process_raw((wave * 32767).astype(np.int16).tobytes(), full_utt=True)
        decoder.end_utt()
        found = decoder.hyp()
        heard.append(re.sub(r"\(\d+\)", "", found.hypstr) if found else "")     # read(2): a second way to say it
    return heard


def recognise_command(waves, rate, command, time_limit=None):
    """[text] by a command that gets the paths of wav files as further arguments and prints a line for each.

    time_limit: seconds, after which all its processes are killed. Raises UserError then, and with the last line that it
    printed when it fails.
    """
    import soundfile
    with tempfile.TemporaryDirectory() as folder:
        paths = []
        for wave in waves:
            paths.append(f"{folder}/{len(paths):05d}.wav")
            soundfile.write(paths[-1], wave, rate, subtype="PCM_16")
        try:
            process = lifetime.start([*shlex.split(command), *paths], encoding="utf-8", errors="replace",
                                     stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        except (OSError, ValueError) as error:
            raise UserError(f"--asr_command {command}: cannot be started ({error})")
        try:
            said, messages = process.communicate(timeout=time_limit)
        except subprocess.TimeoutExpired:
            raise UserError(f"--asr_command {command}: has not heard {len(paths)} files in {time_limit:g} s "
                            "(--asr_time_limit)")
        finally:        # what it started may outlive it
            lifetime.end(process)
    lines = said.splitlines()
    if process.returncode or len(lines) != len(paths):
        last = (messages.strip().splitlines() or ["nothing on stderr"])[-1]
        raise UserError(f"--asr_command {command}: status {process.returncode}, {len(lines)} lines for {len(paths)} "
                        f"files; last message: {last}")
    return [line.strip() for line in lines]


def load_model(flag, path, class_name, unused=()):
    """(transformers model, its feature extractor). unused: beginnings of weights that need not be there. UserError."""
    try:
        import transformers
        transformers.logging.disable_progress_bar()
        transformers.logging.set_verbosity_error()      # missing weights are told below, in one line
        if class_name is None:      # of a recogniser: it says itself how it writes
            names = transformers.AutoConfig.from_pretrained(path, trust_remote_code=False).architectures or [""]
            class_name = "AutoModelForCTC" if names[0].endswith("ForCTC") else "AutoModelForSpeechSeq2Seq"
        model, info = getattr(transformers, class_name).from_pretrained(path, output_loading_info=True,
                                                                trust_remote_code=False)
        extractor = transformers.AutoFeatureExtractor.from_pretrained(path, trust_remote_code=False)
    except Exception as error:
        raise UserError(f"{flag} {path}: cannot be loaded as {class_name or 'a speech recogniser'} "
                        f"({type(error).__name__}: {(str(error).splitlines() or [''])[0]})")
    missing = sorted(name for name in info["missing_keys"] if not name.startswith(tuple(unused)))
    if missing:     # transformers would go on with random ones
        raise UserError(f"{flag} {path}: is not such a model: {len(missing)} weights are missing, first {missing[0]}")
    return model.eval(), extractor


def load_recogniser(path):
    """(model, feature extractor, tokenizer) of any speech recogniser of transformers. Raises UserError."""
    model, extractor = load_model("--asr_model", path, None)
    from transformers import AutoTokenizer
    try:
        return model, extractor, AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except Exception as error:
        raise UserError(f"--asr_model {path}: its tokenizer cannot be loaded ({(str(error).splitlines() or [''])[0]})")


@torch.inference_mode()
def recognise_transformers(waves, rate, recogniser, language=None, batch_size=8, names=None, notes=None):
    """[text] by load_recogniser's, greedy. Raises UserError for a language that Whisper does not know.

    language: for Whisper, None: it finds out. What lies beyond Whisper's window, 30 s, is not heard: notes gets a line
    with the clip's name. Others hear one clip at a time: padding would change what group norms see.
    """
    model, extractor, tokenizer = recogniser
    whisper = model.config.model_type == "whisper"
    options = {"language": language, "task": "transcribe"} if language and whisper else {}
    heard, waves = [], iter(waves)
    while batch := list(itertools.islice(waves, batch_size if whisper else 1)):
        batch = [resample(np.asarray(wave, np.float32), rate, extractor.sampling_rate) for wave in batch]
        for number, wave in enumerate(batch, len(heard)):
            if whisper and len(wave) > extractor.n_samples and notes is not None:
                notes.append(f"{names[number]}: only the first {extractor.chunk_length} s of "
                             f"{len(wave) / extractor.sampling_rate:.1f} s were heard")
        least = 1 if whisper else int(SHORTEST_VOICE_S * extractor.sampling_rate)      # its first filters are as long
        batch = [np.pad(wave, (0, max(0, least - len(wave)))) for wave in batch]
        if whisper:
            inputs = extractor([wave[:extractor.n_samples] for wave in batch], sampling_rate=extractor.sampling_rate,
                               return_tensors="pt", return_attention_mask=True)
        else:
            inputs = extractor(batch[0], sampling_rate=extractor.sampling_rate, return_tensors="pt")
        inputs = inputs.to(model.device)
        if not model.can_generate():
            heard += tokenizer.batch_decode(model(**inputs).logits.argmax(-1))
            continue
        try:
            ids = model.generate(**inputs, do_sample=False, num_beams=1, **options)
        except ValueError as error:
            if not language:
                raise
            raise UserError(f"--language {language}: {str(error).splitlines()[0]}")
        heard += tokenizer.batch_decode(ids, skip_special_tokens=True)
    return heard


# ---------------------------------------------------------------------------------------------------------------------
# Voices


def load_x_vectors(path):
    """(embed(wave at RATE) -> unit (D,) float64, its model) of a transformers x-vector model. Raises UserError.

    One clip at a time: padding would change what group norms see.
    """
    model, extractor = load_model("--speaker_model", path, "AutoModelForAudioXVector", ("classifier.", "objective."))

    @torch.inference_mode()
    def embed(wave):
        inputs = extractor(wave, sampling_rate=extractor.sampling_rate, return_tensors="pt")
        found = model(inputs.input_values.to(model.device)).embeddings[0].double().cpu()
        return (found / found.norm()).numpy()
    return embed, model


def load_voices():
    """embed(wave at RATE) -> unit (256,) float32: the encoder that the Resemblyzer package contains. Raises UserError.

    The d-vectors of Wan et al., "Generalized end-to-end loss for speaker verification", 2018. Only the package's
    weights are read: its own code needs packages that no longer install. It trims silence first; this does not.
    """
    require_package("resemblyzer", "--speaker_model", "--no-deps Resemblyzer")
    from transformers.audio_utils import mel_filter_bank, spectrogram, window_function
    folder = Path(importlib.util.find_spec("resemblyzer").submodule_search_locations[0])
    state = torch.load(folder / "pretrained.pt", map_location="cpu", weights_only=True)["model_state"]
    lstm, linear = torch.nn.LSTM(40, 256, 3, batch_first=True), torch.nn.Linear(256, 256)
    for part, module in (("lstm.", lstm), ("linear.", linear)):
        module.load_state_dict({key.removeprefix(part): value for key, value in state.items() if key.startswith(part)})
        module.eval()
    filters = mel_filter_bank(201, 40, 0.0, RATE / 2, RATE, "slaney", "slaney")
    window, size, step = window_function(400, "hann"), 160, 77      # frames of 10 ms: of a stretch, between two

    @torch.inference_mode()
    def embed(wave):
        level = 10 * np.log10(max(1e-12, np.mean(np.square(wave))))
        wave = wave * 10 ** (max(0, -30 - level) / 20)              # dBFS; louder ones stay
        frames = -(-(len(wave) + 1) // 160)
        starts = list(range(0, max(1, frames - size + step + 1), step))
        if len(starts) > 1 and (len(wave) - 160 * starts[-1]) / (160 * size) < 0.75:
            starts.pop()
        wave = np.pad(wave, (0, max(0, 160 * (starts[-1] + size) - len(wave))))
        mel = spectrogram(wave, window, 400, 160, power=2.0, mel_filters=filters, pad_mode="constant").T
        parts = torch.from_numpy(np.stack([mel[i:i + size] for i in starts]).astype(np.float32))
        found = torch.relu(linear(lstm(parts)[1][0][-1]))
        mean = torch.nn.functional.normalize(found, dim=1).mean(0)
        return (mean / mean.norm()).numpy()
    return embed


def likeness(waves, reference_waves, rate, embed):
    """[cosine or None] of each wave's voice and its reference's; None where one is shorter than SHORTEST_VOICE_S.

    embed: of load_voices or load_x_vectors. By the former one voice gives about 0.87 to 0.92, two give 0.46 to 0.69
    (measured on synthetic voices: take your own recordings' as the yardstick).
    """
    found, known = [], {}

    def voice(wave):
        if len(wave) < SHORTEST_VOICE_S * rate:
            return None
        if id(wave) not in known:       # one reference may serve all
            known[id(wave)] = wave, embed(resample(np.asarray(wave, np.float32), rate, RATE))
        return known[id(wave)][1]
    for wave, reference in zip(waves, reference_waves, strict=True):
        ours, theirs = voice(wave), voice(reference)
        found.append(None if ours is None or theirs is None else float(ours @ theirs))
    return found


# ---------------------------------------------------------------------------------------------------------------------
# Naturalness


def dnsmos(waves, rate):
    """[overall quality, 1 to 5], estimated by DNSMOS P.835 (Reddy et al. 2022) of the speechmos package. UserError.

    None for an empty wave. It judges noise and distortion, not words; short clips are repeated up to 9 s.
    """
    require_package("speechmos", "--mos", "speechmos onnxruntime")
    try:
        from speechmos import dnsmos as model
    except ImportError as error:
        raise UserError(f"--mos: pip install speechmos onnxruntime ({error})")
    found = []
    for wave in waves:
        wave = resample(np.asarray(wave, np.float32), rate, RATE)
        found.append(float(model.run(np.clip(wave, -1, 1), sr=RATE)["ovrl_mos"]) if len(wave) else None)
    return found


# ---------------------------------------------------------------------------------------------------------------------
# All of them


@dataclass
class Judges:
    """What judges speech; None, or False, where nothing does."""
    hear: Callable | None       # hear(waves, rate, names, notes) -> [text]
    embed: Callable | None      # of load_voices or load_x_vectors
    mos: bool                   # DNSMOS
    language: str | None        # of normaliser
    models: list                # of transformers, on the host until they are needed

    @contextlib.contextmanager
    def on(self, device):
        """Within this context the models are on a device."""
        try:
            for model in self.models:
                model.to(device)
            yield
        finally:
            for model in self.models:
                model.to("cpu")


@functools.cache
def load_judges(asr_model=None, asr_command=None, speaker_model=None, mos=False, language=None, batch_size=8,
                asr_time_limit=None):
    """Judges of the flags of choices.judges, loaded on the host, once in a process. Raises UserError."""
    hear, embed, models = None, None, []
    if asr_command:
        def hear(waves, rate, names, notes):
            return recognise_command(waves, rate, asr_command, asr_time_limit)
        hear([np.zeros(RATE, np.float32)], RATE, ["silence"], [])       # a wrong path is found now
    elif asr_model == "pocketsphinx":
        require_package("pocketsphinx", "--asr_model")

        def hear(waves, rate, names, notes):
            return recognise_pocketsphinx(waves, rate)
    elif asr_model:
        recogniser = load_recogniser(asr_model)
        models.append(recogniser[0])

        def hear(waves, rate, names, notes):
            return recognise_transformers(waves, rate, recogniser, language, batch_size, names, notes)
    if speaker_model == "resemblyzer":
        embed = load_voices()
    elif speaker_model:
        if speaker_model.endswith(".pth"):
            from speech.verification import load
        else:
            load = load_x_vectors
        embed, model = load(speaker_model)
        models.append(model)
    if mos:
        dnsmos([], RATE)        # is it there?
    return Judges(hear, embed, mos, language, models)
