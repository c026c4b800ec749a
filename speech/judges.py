"""Evaluate speech with external models: word errors, speaker similarity, naturalness.

Waves are (n,) float32 mono in -1..1. Each model is imported at first use; training needs none.
"""
import functools
import itertools
import re
import shlex
import subprocess
import tempfile
from collections import namedtuple

import numpy as np

from core.cli import UserError, first_line, require, require_package
from speech.conversations import normalise

RATE = 16000                # Hz, of all models here
SHORTEST_VOICE_S = 0.5      # a shorter clip says nothing about a voice
# 《》 are <> by then
NOT_HEARD = re.compile(r"<(SE(?:_[se])?)>\[\w+\]</\1>|\[SPEAKER\d+\]|[<>]")
# written without spaces: errors are counted by character
UNSPACED = ("zh", "yue", "ja", "th", "lo", "my")
# The result of load_judges; a judge that is off is None. hear(waves, rate) -> [text]; embed: from
# load_x_vectors; language: for normaliser.
Judges = namedtuple("Judges", "hear embed language")


def judge_flags(p):
    p.flag("--asr_model", None, "recogniser: pocketsphinx, or folder or hub name for transformers")
    p.flag("--asr_command", None, "recogniser as a command: it gets paths of wav files as last "
           "arguments and prints a line of text for each")
    p.flag("--language", None, "language code, for Whisper and for comparing texts; en unifies "
           "numbers and contractions (default: Whisper detects it, plain rules)")
    p.flag("--speaker_model", None, "x-vector model for speaker similarity: folder or hub name")


def check_judges(args):
    require(not (args.asr_model and args.asr_command), "give one of --asr_model and --asr_command")
    require(not args.language or args.asr_model or args.asr_command,
            "--language: only --asr_model and --asr_command make use of it")


def audible_text(text):
    """The audible part of a text: normalised, without sound tags and [SPEAKER0]."""
    return NOT_HEARD.sub(" ", normalise(text))


def read_audio(path, offset=None, seconds=None):
    """(n,) float32 mono at 24 kHz: the file, or `seconds` of it from offset on. UserError."""
    import soundfile
    try:
        wave, file_rate = soundfile.read(path, dtype="float32", always_2d=True)
    except (OSError, RuntimeError) as error:     # soundfile's are RuntimeErrors
        raise UserError(f"{path}: cannot be read as audio ({error})")
    require(np.isfinite(wave).all(), f"{path}: holds samples that are not numbers")
    if offset is not None:
        end = None if seconds is None else round((offset + seconds) * file_rate)
        wave = wave[round(offset * file_rate):end]
    return resample(wave.mean(axis=1), file_rate, 24000)


def resample(wave, rate, target=RATE):
    """(n,) at `rate` Hz -> (about n * target / rate,) float32 at `target` Hz."""
    import soxr
    wave = np.asarray(wave, np.float32)
    return wave if rate == target else soxr.resample(wave, rate, target, quality="HQ")


@functools.cache
def normaliser(language):
    """Function that normalises a text by whisper's rules (Radford et al. 2022, appendix C). "en"
    also writes numbers as digits and expands contractions. UNSPACED: each character is a word."""
    from transformers.models.whisper import english_normalizer
    if language == "en":
        return english_normalizer.EnglishTextNormalizer({})
    return english_normalizer.BasicTextNormalizer(split_letters=language in UNSPACED)


def word_errors(references, hypotheses, language=None, split=str.split):
    """(errors, words of the references) over all texts; errors / words is the WER. language: see
    normaliser. split: function from a text to its words or characters."""
    from torchaudio.functional import edit_distance
    clean, errors, length = normaliser(language), 0, 0
    for reference, heard in zip(references, hypotheses, strict=True):
        reference, heard = split(clean(reference).strip()), split(clean(heard).strip())
        errors, length = errors + edit_distance(reference, heard), length + len(reference)
    return errors, length


def word_rates(references, hypotheses, language=None):
    """{"wer", "cer"}: all errors over all words or characters, None if there are none."""
    rates = {}
    for name, split in ("wer", str.split), ("cer", lambda text: text.replace(" ", "")):
        errors, length = word_errors(references, hypotheses, language, split)
        rates[name] = errors / length if length else None
    return rates


def recognise_pocketsphinx(waves, rate, grammar=None):
    """[text] from CMU Sphinx's US English model, which the package contains. grammar: JSGF text, or
    None for the large vocabulary, which needs clear sentences."""
    import pocketsphinx
    decoder = pocketsphinx.Decoder(samprate=RATE, loglevel="FATAL")
    if grammar:
        decoder.add_jsgf_string("grammar", grammar)
        decoder.activate_search("grammar")
    noise, heard = np.random.default_rng(0), []
    quiet = np.zeros(3 * RATE // 10, np.float32)        # else it misses the first and last words
    for wave in waves:
        wave = resample(wave, rate)
        level = 0.6 / max(1e-6, np.abs(wave).max(initial=0))
        wave = np.concatenate([quiet, wave * level, quiet])
        wave = wave + noise.normal(0, 1e-3, len(wave))      # it fails on digital silence
        decoder.start_utt()
        decoder.process_raw((wave * 32767).astype(np.int16).tobytes(), full_utt=True)
        decoder.end_utt()
        hypothesis = decoder.hyp()
        # "read(2)" is the second pronunciation of "read"
        heard.append(re.sub(r"\(\d+\)", "", hypothesis.hypstr) if hypothesis else "")
    return heard


def recognise_command(waves, rate, command, time_limit=3600):
    """[text] from a command that gets paths of wav files and prints a line for each. UserError."""
    import soundfile
    paths, where = [], f"--asr_command {command}:"
    with tempfile.TemporaryDirectory() as folder:
        for wave in waves:
            paths.append(f"{folder}/{len(paths):05d}.wav")
            soundfile.write(paths[-1], wave, rate, subtype="PCM_16")
        try:
            done = subprocess.run([*shlex.split(command), *paths], encoding="utf-8",
                                  errors="replace", capture_output=True, timeout=time_limit)
        except (OSError, ValueError, subprocess.TimeoutExpired) as error:
            raise UserError(f"{where} {error}")
    lines = done.stdout.splitlines()
    require(not done.returncode and len(lines) == len(paths),
            f"{where} status {done.returncode}, {len(lines)} lines for {len(paths)} files; last "
            f"message: {done.stderr.strip().rpartition(chr(10))[2]}")
    return [line.strip() for line in lines]


def load_model(flag, path, device, class_name=None, unused=()):
    """(transformers model, feature extractor, tokenizer or None) of class_name, or of any speech
    recogniser. unused: prefixes of weights that may be missing. Raises UserError."""
    import transformers
    tokenizer, safe = None, {"trust_remote_code": False}
    transformers.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()      # missing weights are reported below
    try:
        if class_name is None:      # a recogniser has a tokenizer
            tokenizer = transformers.AutoTokenizer.from_pretrained(path, **safe)
            config = transformers.AutoConfig.from_pretrained(path, **safe)
            ctc = (config.architectures or [""])[0].endswith("ForCTC")
            class_name = "AutoModelForCTC" if ctc else "AutoModelForSpeechSeq2Seq"
        model, info = getattr(transformers, class_name).from_pretrained(
            path, output_loading_info=True, **safe)
        extractor = transformers.AutoFeatureExtractor.from_pretrained(path, **safe)
    except Exception as error:
        raise UserError(f"{flag} {path}: is not such a model ({first_line(error)})")
    # transformers would continue with random weights
    require(all(name.startswith(unused) for name in info["missing_keys"]),
            f"{flag} {path}: is not such a model, as weights are missing")
    return model.to(device).eval().requires_grad_(False), extractor, tokenizer


def recognise_transformers(waves, rate, recogniser, language=None, batch_size=8):
    """[text] by greedy decoding. recogniser: from load_model. Whisper gets batches; padding would
    change the group norms of other models. UserError for a wrong language."""
    model, extractor, tokenizer = recogniser
    whisper, target = model.config.model_type == "whisper", extractor.sampling_rate
    options = {"language": language, "task": "transcribe"} if language and whisper else {}
    heard, waves = [], (resample(wave, rate, target) for wave in waves)
    while batch := list(itertools.islice(waves, batch_size if whisper else 1)):
        if whisper:
            for wave in batch:
                if len(wave) > extractor.n_samples:
                    print(f"notice     --asr_model hears the first {extractor.chunk_length} s of a "
                          f"clip that lasts {len(wave) / target:.1f} s")
            # an empty clip counts as silence
            batch = [wave[:extractor.n_samples] if len(wave) else np.zeros(1) for wave in batch]
            inputs = extractor(batch, sampling_rate=target, return_tensors="pt",
                               return_attention_mask=True)
        else:       # its first filters are half a second long
            wave = np.pad(batch[0], (0, max(0, target // 2 - len(batch[0]))))
            inputs = extractor(wave, sampling_rate=target, return_tensors="pt")
        inputs = inputs.to(model.device)
        if model.can_generate():
            try:
                ids = model.generate(**inputs, do_sample=False, num_beams=1, **options)
            except ValueError as error:     # for one, an unknown language
                raise UserError(f"--asr_model: {first_line(error)}")
            heard += tokenizer.batch_decode(ids, skip_special_tokens=True)
        else:
            heard += tokenizer.batch_decode(model(**inputs).logits.argmax(-1))
    return heard


def load_x_vectors(path, device):
    """embed(wave at RATE) -> unit (D,) float64 by an x-vector model of transformers, unpadded."""
    model, extractor, _ = load_model("--speaker_model", path, device, "AutoModelForAudioXVector",
                                     ("classifier.", "objective."))

    def embed(wave):
        inputs = extractor(wave, sampling_rate=extractor.sampling_rate, return_tensors="pt")
        embedding = model(inputs.input_values.to(model.device)).embeddings[0].double().cpu()
        return (embedding / embedding.norm()).numpy()
    return embed


def similarity(wave, rate, clip, embed, voices):
    """Cosine of the voices of a wave and of a clip, the arguments of read_audio; None if one is
    shorter than SHORTEST_VOICE_S. voices: {clip: its embedding}, filled here."""
    def embedding(wave, rate):
        return None if len(wave) < SHORTEST_VOICE_S * rate else embed(resample(wave, rate))
    if clip not in voices:
        voices[clip] = embedding(read_audio(*clip), 24000)
    spoken, wanted = embedding(wave, rate), voices[clip]
    return None if spoken is None or wanted is None else float(spoken @ wanted)


def dnsmos(wave, rate):
    """Overall quality from 1 to 5 by DNSMOS P.835 (Reddy et al. 2022), None for an empty wave."""
    from speechmos import dnsmos as model
    wave = np.clip(resample(wave, rate), -1, 1)
    return float(model.run(wave, sr=RATE)["ovrl_mos"]) if len(wave) else None


def measure(by, waves, rate, texts, likes):
    """[{"heard", "wer", "cer", "speaker_similarity"}] of waves, as far as Judges are on. texts: to
    be spoken. likes: the voice to be cloned or the true recording, as of read_audio, or None."""
    rows, voices = [{} for _ in waves], {}      # voices: one may serve all
    for row, text, heard in zip(rows, texts, by.hear(waves, rate)) if by.hear else ():
        row |= {"heard": heard, **word_rates([audible_text(text)], [heard], by.language)}
    for row, wave, like in zip(rows, waves, likes) if by.embed else ():
        if like:
            row["speaker_similarity"] = similarity(wave, rate, like, by.embed, voices)
    return rows


def load_judges(asr_model=None, asr_command=None, speaker_model=None, language=None, batch_size=8,
                device="cpu"):
    """Judges for the flags of these names. UserError."""
    hear = embed = None
    if asr_command:
        hear = functools.partial(recognise_command, command=asr_command)
        hear([np.zeros(RATE, np.float32)], RATE)        # detects a wrong path now
    elif asr_model == "pocketsphinx":
        require_package("pocketsphinx", "--asr_model")
        hear = recognise_pocketsphinx
    elif asr_model:
        hear = functools.partial(
            recognise_transformers, recogniser=load_model("--asr_model", asr_model, device),
            language=language, batch_size=batch_size)
    if speaker_model:
        embed = load_x_vectors(speaker_model, device)
    return Judges(hear, embed, language)
