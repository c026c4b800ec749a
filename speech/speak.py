"""Speak with Higgs-Audio: prompts as in training, generation, the best of several takes, files.

The trainer's code tokenises a prompt, which ends where speech begins, so the model gets inputs as
in training. Generation uses the native class (V2) or v3.generate.
"""
import atexit
import contextlib
import io
import itertools
import os
import re
import shutil
import tempfile
import textwrap
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, StoppingCriteriaList

from core import adapters, dist, tensor_io
from core.checkpoint import write_atomically, write_json
from core.cli import (UserError, error_names_file, plural, problem_text, require,
                      require_package, stop_requested)
from core.json_files import read_object, read_text
from speech import judges, weights
from speech.codes import SAMPLE_RATE, SAVED, decode_clips, encode_clip, load_codec
from speech.conversations import (FRAME_RATE, SETTINGS, BadSample, Clip,
                                  Reading, Sample, Turn, canonical_sample, canonical_turns,
                                  mark_trained, normalise, normalise_requests, system_parts,
                                  trim_turn)
from speech.convert import SCENE
from speech.dataset import open_source, tokenise

DRAW_FLAGS = ("temperature", "top_k", "top_p", "ras_window")
BATCH = 8               # prompts that generate_all speaks together
STRIDE = 1_000_003      # step of the seed from take to take; from batch to batch it is one
PAUSE_S = 0.12          # silence between chunks of a long text

# ---- Prompts


def saved_setting(folder, name="normalize_text", known=("on", "off")):
    """A setting of a checkpoint folder, None if it has none."""
    try:
        value = read_object(Path(folder) / SETTINGS)[name]
    except (UserError, KeyError):
        return None
    return value if value in known else None


def check_base_dtype(args):
    """Make args.base_dtype "nf4" or None. It is that of --adapter if the flag is not given."""
    saved = args.adapter and saved_setting(args.adapter, "base_dtype", ["nf4"])
    args.base_dtype = "nf4" if (args.base_dtype or saved) == "nf4" else None
    if args.base_dtype:
        require_package("bitsandbytes", "--base_dtype nf4")


def setting_to_speak(wanted, model, adapter=None):
    """(True to normalise spoken text, a line that says so and why). wanted: --normalize_text, or
    None for what the checkpoint, a model's or an adapter's folder, was trained with."""
    folder = adapter or model
    saved = saved_setting(folder)
    setting = wanted or saved or "on"       # on: as in boson-ai's inference
    why = f"was trained with {saved}" if saved else "is not a checkpoint of this trainer"
    return setting == "on", f"--normalize_text {setting}; {folder} {why}"


@dataclass
class Prompt:
    """Input of the model before it speaks."""
    text: str               # text to be spoken
    tokens: np.ndarray      # (t,) int64 up to <|audio_out_bos|>; a clip is one token
    codes: list             # (T, 8) codes of each of these clips
    voice: Clip | None      # the last of them that is a recording
    target: Clip | None     # the true recording, if the file has one

    def row(self, ids):
        """Layout.assemble's dict: each row of codes is a token, nothing is trained."""
        return ids.assemble(self.tokens, np.zeros(len(self.tokens), bool), self.codes)


def read_samples(path, problems, make=canonical_sample, **reading):
    """Yield the Samples of data of any format; unusable rows are added to the list `problems`.
    make: as in open_source. reading: fields of Reading."""
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)      # it may hold extracted audio
    read, parse = open_source(path, Reading(**reading), problems, folder, make=make)
    for sample in parse(read()):
        if isinstance(sample, Sample):
            yield sample
        else:
            problems.append(sample)


def read_prompts(path, normalize, *voice):
    """Samples of a prompt file: ChatML (the target clip is optional), or a text per line for
    text_prompts. normalize: the texts to speak. UserError lists every unusable prompt."""
    path, problems = Path(path), []
    if path.suffix.lower() in (".json", ".jsonl"):
        samples = list(read_samples(path, problems, canonical_prompt, normalize=normalize))
    else:
        require(path.suffix.lower() not in (".lst", ".list", ".csv", ".tsv", ".parquet"),
                f"{path}: is a table; give one text per line, or ChatML")
        lines = enumerate(read_text(path).splitlines(), 1)
        samples = text_prompts([(f"{path} line {number}", line) for number, line in lines
                                if line.strip()], normalize, *voice)
    require(not problems, problem_text(problems))
    require(samples, f"{path}: holds no prompts")
    return samples


def text_prompts(named_texts, normalize, reference_audio=None, reference_text=None, scene=None):
    """[(name, text)] -> Samples, plain or in the voice of a reference clip. Raises UserError."""
    reference, samples = [], []
    if reference_audio:
        clip = Clip(os.path.abspath(reference_audio))
        require(os.path.isfile(clip.path), f"--reference_audio {reference_audio}: no such file")
        reference = [Turn("user", [reference_text], None)] * bool(reference_text)
        reference += [Turn("assistant", [clip], None)]
    for name, text in named_texts:
        require(text.strip(), f"{name}: has no text to speak")
        system, heard_in = system_parts(text, scene, references=bool(reference))
        system += "\n\n" + SCENE.format(heard_in) if heard_in else ""
        samples.append(Sample(name, [
            Turn("system", [system.strip()], None), *reference,
            Turn("user", [normalise(text) if normalize else text.strip()], None),
            Turn("assistant", [Clip("")], None)]))
    return samples


def canonical_prompt(name, entry, paths, normalize=False):
    """One raw sample -> Sample to be spoken. Its last turn is the assistant's and ends with the
    clip to generate: the sample's target clip, else Clip(""). Raises BadSample."""
    turns, rewritten = canonical_turns(entry, paths)
    last_request = max((i for i, turn in enumerate(turns) if turn.role == "user"), default=0)
    spoken = [i for i, turn in enumerate(turns)
              if i > last_request and turn.role == "assistant" and turn.clips]
    if spoken:
        turns = turns[:spoken[-1] + 1]
        while not isinstance(turns[-1].parts[-1], Clip):
            turns[-1].parts.pop()
    else:
        turns.append(Turn("assistant", [Clip("")], None))
    sample = Sample(name, [trim_turn(t) for t in turns], str(entry.get("speaker") or ""))
    if not spoken_text(sample):
        raise BadSample("has no text to speak: no user text precedes the clip to generate")
    if normalize:
        if entry.get("start_index") is not None:
            with contextlib.suppress(BadSample):        # a prompt needs no trained clip
                mark_trained(turns, entry["start_index"], rewritten, len(entry["messages"]))
        turns[-1].trained = True
        normalise_requests(turns)
    return sample


def spoken_text(sample):
    """The text of a canonical_prompt that is to be spoken."""
    before, answer = sample.turns[-2:]
    request = before.text if before.role == "user" else ""
    return (answer.text or request).strip()


def prepare(samples, tokenizer, ids, codec, bandwidth, room, known=()):
    """Samples of canonical_prompt -> Prompts. room: the most tokens of a prompt. known: {path of a
    Clip: its codes}. UserError lists every prompt that is too long or has bad audio."""
    prompts, codes = [], {}
    for sample in samples:
        sample.turns[-1].trained = True         # the turn to speak, as a trained turn
    table = tokenise(samples, tokenizer, ids)
    problems, all_clips = table["refused"], iter(table["clips"])
    for omission, count in sorted(table["notices"].items()):
        print(f"notice     {count} prompts {omission}")
    require(not problems, problem_text(problems))
    streams = np.split(table["tokens"].astype(np.int64), np.cumsum(table["token_offsets"])[:-1])
    for sample, tokens, n_clips in zip(samples, streams, table["clip_offsets"]):
        *clips, target = itertools.islice(all_clips, n_clips)
        tokens = tokens[:np.flatnonzero(tokens == ids.audio_placeholder_id)[-1]]
        try:
            for clip in clips:
                if clip.path in known:
                    codes[clip] = known[clip.path]
                elif clip not in codes:
                    (result,) = decode_clips([clip])
                    if isinstance(result, str):
                        raise ValueError(result)
                    codes[clip] = encode_clip(codec, result[2], bandwidth, ids.num_codebooks)
        except (ValueError, torch.OutOfMemoryError) as error:
            problems.append(f"{sample.name}: its audio {clip.path}: {error}")
            continue
        voices = [clip for clip in clips if not clip.path.endswith(SAVED)]
        prompts.append(Prompt(
            spoken_text(sample), tokens, [codes[clip] for clip in clips],
            voices[-1] if voices else None,
            target if target.path and not target.path.endswith(SAVED) else None))
        if (size := len(prompts[-1].row(ids)["input_ids"])) > room:
            problems.append(f"{sample.name}: {size} tokens, room for {max(0, room)}: shorten it")
    require(not problems, problem_text(problems))
    return prompts


def prompt_batch(prompts, ids):
    """Arguments of native generate, int64 on the CPU: left-padded tokens, right-padded codes."""
    def pad(arrays, value, side):
        return pad_sequence(list(map(torch.as_tensor, arrays)), True, value, side)
    rows = [prompt.row(ids) for prompt in prompts]
    tokens, codes = ([row[key] for row in rows] for key in ("input_ids", "audio_ids"))
    batch = {"input_ids": pad(tokens, ids.pad, "left"),
             "attention_mask": pad(map(np.ones_like, tokens), 0, "left")}
    if any(map(len, codes)):        # without clips transformers accepts no audio arguments
        batch |= {"audio_input_ids": pad(codes, ids.stream_eos, "right"), "audio_input_ids_mask":
                  pad([np.ones(len(c), bool) for c in codes], False, "right")}
    return batch


# ---- Generation


def positions(config):
    """Most tokens of a prompt with its speech. V2's config.json may say 2,048, but its rotary
    positions are scaled for the 131,072 of the released checkpoint."""
    return max(config.max_position_embeddings, 0 if weights.is_tts3(config.model_type) else 131072)


def load_model(folder, config, adapter, dtype, device, four_bits=False):
    """Native model on the device, in eval mode. adapter: a PEFT folder or None; it stays unmerged,
    in fp32. config: config.json as a dict. four_bits: NF4. Raises UserError."""
    module = weights.module(config)
    native = net = module.empty_model(config, dtype)
    parts = module.weight_parts(folder, config)
    weights.check_weights(native, parts, folder)
    if adapter:
        net = adapters.add_saved_lora(native, adapter, whole=module.WHOLE_MODULES)
        require(not (four_bits and net.peft_config["default"].use_dora),
                f"--base_dtype nf4: {adapter} is DoRA, which needs the weights themselves")
    if four_bits:
        from core import quantized
        for name, parameter in native.named_parameters():      # converts frozen weights only
            parameter.requires_grad_("lora_" in name)
        quantized.to_nf4(module.layers(native))
    net.to_empty(device=device)
    module.reset_buffers(native, device)
    tensor_io.load_base(native, parts)
    if adapter:
        adapters.load_adapters(net, adapter)
    return native.eval()


def sampling(config, max_seconds, **draws):
    """Settings for generate(): a GenerationConfig of the native class, or a v3.Sampling. UserError.
    draws: {name of DRAW_FLAGS: value} instead of the model's defaults."""
    frames, module = max(1, round(max_seconds * FRAME_RATE)), weights.module(config)
    require(draws.keys() <= module.DRAWS.keys(), "--ras_window: not of Higgs TTS 3")
    draws = module.DRAWS | draws
    if weights.is_tts3(config.model_type):
        return module.Sampling(**draws, max_new_tokens=frames + config.num_codebooks - 1)
    if ras_window := draws.pop("ras_window"):
        draws |= {"ras_win_len": ras_window, "ras_win_max_num_repeat": 2}
    if not draws["temperature"]:
        draws = {}
    return GenerationConfig(do_sample=bool(draws), **draws, eos_token_id=config.eos_token_id,
                            max_new_tokens=frames + config.num_codebooks + 1,
                            pad_token_id=config.pad_token_id)


@torch.no_grad()
def generate(native, prompts, ids, settings, seed, device):
    """[(codes (T, 8) int64, ended_by "eos" | "length")] of a batch of Prompts. settings: from
    sampling(). The draws depend on seed and batch only, and do not change torch's random state. A
    stop request to a trainer cuts the speech off."""
    if weights.is_tts3(native.config.model_type):
        rows = [prompt.row(ids) for prompt in prompts]
        spoken = weights.module(native.config).generate(
            native, [(row["input_ids"], row["is_audio"], row["audio_ids"]) for row in rows],
            settings, seed, stop_requested)
        # a row cut off early may hold special codes; servers also decode those as code 0
        return [(np.where(codes.numpy() < ids.stream_bos, codes.numpy(), 0), ended_by)
                for codes, ended_by in spoken]
    stops = [lambda ids, scores, **_: torch.full(ids.shape[:1], bool(stop_requested()),
                                                 device=device)]
    batch = {name: tensor.to(device) for name, tensor in prompt_batch(prompts, ids).items()}
    prompt_rows = batch["audio_input_ids"].shape[1] if "audio_input_ids" in batch else 0
    # else unset values come from the model's settings
    saved_settings, native.generation_config = native.generation_config, settings
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(seed)
            # synced_gpus, on by default under FSDP2, would sync all ranks at each step
            out = native.generate(**batch, return_dict_in_generate=True, synced_gpus=False,
                                  stopping_criteria=StoppingCriteriaList(stops))
    finally:
        native.generation_config = saved_settings
    frames = settings.max_new_tokens - ids.num_codebooks - 1
    spoken = [undelay(rows, ids) for rows in out.audio_sequences[:, prompt_rows:].cpu().numpy()]
    return [(codes[:frames], ended_by) for codes, ended_by in spoken]


def generate_all(native, prompts, ids, settings, seed, device):
    """generate() for any number of prompts, BATCH at a time; None after a stop request."""
    spoken = []
    with torch.compiler.set_stance("force_eager"):      # each new length would recompile the layers
        for number, first in enumerate(range(0, len(prompts), BATCH)):
            batch = prompts[first:first + BATCH]
            spoken += generate(native, batch, ids, settings, seed + number, device)
            if stop_requested():
                return None
    return spoken


def undelay(rows, ids):
    """(R, 8) generated rows, the first all begin-of-stream -> (codes (T, 8), "eos" or "length"). As
    in transformers, codebook 0 sets the length, and special ids become the nearest code."""
    ended = np.flatnonzero((rows == ids.stream_eos).all(axis=1))
    rows = rows[:ended[0]] if len(ended) else rows
    first_end = np.flatnonzero(rows[:, 0] == ids.stream_eos)
    frames = len(rows) - ids.num_codebooks
    frames = max(0, min(frames, first_end[0] - 1) if len(first_end) else frames)
    codes = np.stack([rows[k + 1:k + 1 + frames, k] for k in range(ids.num_codebooks)], axis=1)
    return codes.clip(0, ids.stream_bos - 1), "eos" if len(ended) else "length"


@torch.no_grad()
def decode(codec, codes):
    """(T, 8) codes -> (960 T,) float32 mono waveform at 24 kHz, numpy."""
    if not len(codes):
        return np.zeros(0, np.float32)
    codes = torch.from_numpy(codes.T.astype(np.int64))[None].to(codec.device)
    return codec.decode(codes).audio_values[0, 0].float().cpu().numpy()


# ---- The best of several takes


def speak(native, codec, ids, settings, prompts, seed, takes, listeners):
    """[(codes, ended_by, wave, {fact: value})] of each Prompt: the best of N takes, ranked by
    end-of-stream, then CER, then speaker similarity. listeners: judges.Judges. Unless they measure
    speaker similarity, a take without errors ends the search."""
    best, left = {}, list(range(len(prompts)))      # best: {number: (rank, result)}
    for take in range(takes):
        if not left:
            break
        batch = [prompts[i] for i in left]
        spoken = generate(native, batch, ids, settings, seed + take * STRIDE, codec.device)
        waves = [decode(codec, codes) for codes, _ in spoken]
        likes = [clip and (clip.path, clip.offset, clip.duration)
                 for clip in (prompt.voice or prompt.target for prompt in batch)]
        texts = [prompt.text for prompt in batch]
        judged = judges.measure(listeners, waves, SAMPLE_RATE, texts, likes)
        for i, (codes, ended_by), wave, facts in zip(left, spoken, waves, judged):
            bad = ended_by != "eos" or not len(codes)
            rank = bad, facts.get("cer") or 0.0, -(facts.get("speaker_similarity") or 0.0)
            if i not in best or rank < best[i][0]:
                best[i] = rank, (codes, ended_by, wave, {**facts, "take": take})
        left = [i for i in left if listeners.embed or best[i][0][:2] != (False, 0.0)]
    return [best[i][1] for i in range(len(prompts))]


def good_rows(samples, records, max_cer, min_frames):
    """[ChatML row] of takes that ended by themselves with a CER of at most max_cer: the Sample with
    the codes of its take as the clip. records: contents of the JSON files."""
    def item(content):
        if isinstance(content, Clip):
            return {"type": "audio", "audio_url": content.path, "offset": content.offset,
                    "duration": content.duration}
        return {"type": "text", "text": content}

    rows = []
    for sample, record in zip(samples, records, strict=True):
        ended = record["ended_by"] == "eos" and record["frames"] >= min_frames
        if ended and record["cer"] is not None and record["cer"] <= max_cer:
            messages = [{"role": turn.role, "content": list(map(item, turn.parts))}
                        for turn in sample.turns]
            messages[-1]["content"][-1] = item(Clip(record["name"] + SAVED))
            rows.append({"messages": messages, "cer": record["cer"],
                         "normalize_text": record["normalize_text"]})
    return rows


# ---- Long texts, chunk by chunk

# marks that apply to the following text: speakers, and Higgs TTS 3's tags except for local ones
MARK = re.compile(r"(\[SPEAKER\d+\]|<\|(?:emotion|style|prosody):(?!pause|long_pause)\w+\|>)")
SENTENCE = re.compile(r"(?<=[.!?…])\s+|(?<=[。！？])")        # where sentences end


def split_text(text, most):
    """[(speaker or "", chunk)] of a text. A chunk has at most `most` characters, not counting
    marks; a longer word stays whole. Cuts are after sentences, or between words of a longer
    sentence, and at marks. A chunk begins with the marks that apply to it."""
    if len(text) <= most:
        return [("", text)]
    chunks, speaker, tags = [], "", {}
    for number, piece in enumerate(MARK.split(text)):
        if number % 2:      # a mark
            if piece.startswith("["):
                speaker, tags = piece, {}
            else:
                category, _, value = piece.strip("<|>").partition(":")
                kind = value.partition("_")[0] if category == "prosody" else ""
                tags[category, kind] = piece
            continue
        lines = []
        for sentence in SENTENCE.split(piece.strip()):
            for words in textwrap.wrap(sentence, most, break_long_words=False,
                                       break_on_hyphens=False):
                if not words.strip():       # a no-break space
                    continue
                if lines and len(lines[-1]) + 1 + len(words) <= most:
                    lines[-1] += ("" if lines[-1][-1] in "。！？" else " ") + words
                else:
                    lines.append(words)
        marks = f"{speaker} " * bool(speaker) + "".join(tags.values())
        chunks += [(speaker, marks + line) for line in lines]
    return chunks


def join(waves):
    """(n,) concatenated waves, faded at their ends, with pauses between them."""
    ramp = np.linspace(0, 1, SAMPLE_RATE // 100, dtype=np.float32)      # 10 ms, against clicks
    pieces = []
    for wave in waves:
        wave, n = wave.copy(), min(len(wave) // 2, len(ramp))
        wave[:n] *= ramp[:n]
        wave[len(wave) - n:] *= ramp[:n][::-1]
        pieces += [wave, np.zeros(round(PAUSE_S * SAMPLE_RATE), np.float32)]
    return np.concatenate(pieces[:-1])


def speak_chunks(samples, most, prepare, say, listeners, write=None):
    """[(codes, ended_by, wave, facts)] of text_prompts whose texts split_text cuts into chunks.

    A chunk has its text's system turn and reference; without a reference it continues its speaker's
    previous chunk. prepare(Samples, known=) -> [Prompt]. say(Prompts, round) -> result of speak().
    write(wave so far): from open_stream(), for one text."""
    texts, takes = [split_text(spoken_text(sample), most) for sample in samples], {}
    last, known = {}, {}        # last: {(sample number, speaker): turns of the last chunk}
    for turn in range(max(map(len, texts))):
        current = [(i, *chunks[turn]) for i, chunks in enumerate(texts) if turn < len(chunks)]
        parts = []
        for i, speaker, chunk in current:
            system, *reference = samples[i].turns[:-2]
            parts.append(Sample(samples[i].name, [
                system, *(reference or last.get((i, speaker), ())),
                Turn("user", [chunk.strip()], None), Turn("assistant", [Clip("")], None)]))
        for (i, speaker, chunk), result in zip(current, say(prepare(parts, known=known), turn)):
            takes.setdefault(i, []).append(result)
            if len(result[0]) >= 8:         # the shortest reference of TTS 3
                clip = Clip(f"{i}-{turn}{SAVED}")
                known[clip.path] = result[0]
                last[i, speaker] = Turn("user", [chunk], None), Turn("assistant", [clip], None)
            if write:
                write(join([wave for *_, wave, _ in takes[i]]))
    results = []
    for i, chunks in enumerate(texts):
        codes, ends, waves, facts = zip(*takes[i])
        record = dict(facts[-1])
        if listeners.hear:
            record["heard"] = " ".join(row["heard"] for row in facts)
            text = judges.audible_text(" ".join(chunk.strip() for _, chunk in chunks))
            record |= judges.word_rates([text], [record["heard"]], listeners.language)
        ended_by = next((end for end in ends if end != "eos"), "eos")
        results.append((np.concatenate(codes), ended_by, join(waves), record))
    return results


def open_stream(path):
    """write(wave so far) for --stream: to a WAV file, appended to a pipe as WAV without a length,
    or raw to stdout ("-"). UserError for a pipe without a reader."""
    raw, done = path == "-", 0
    try:        # without O_NONBLOCK, opening a pipe would wait for its reader
        number = 1 if raw else os.open(
            path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK, 0o666)
    except OSError as error:
        raise UserError(f"--stream {path}: {error.strerror}; of a pipe, start the reader first")
    os.set_blocking(number, True)
    file = open(number, "wb", closefd=False)

    def write(wave):
        nonlocal done
        with error_names_file(path):
            if not raw and file.seekable():
                file.seek(0)
                file.write(sound_bytes(wave, "WAV"))
            else:
                if not (raw or done):       # a header with the largest lengths
                    header = sound_bytes(wave[:0], "WAV")
                    file.write(header[:4] + b"\xff" * 4 + header[8:40] + b"\xff" * 4)
                file.write(sound_bytes(wave[done:], "RAW"))
                done = len(wave)
            file.flush()
    return write


# ---- Files


def save_codes(path, codes):
    """Write (T, 8) codes as a .npy file of int16."""
    with open(path, "wb") as file:
        np.save(file, codes.astype(np.int16))


def sound_bytes(wave, form):
    """A (n,) wave as 16-bit samples. form: WAV, or RAW without a header."""
    import soundfile
    sound = io.BytesIO()        # soundfile does not report a full disk
    soundfile.write(sound, wave, SAMPLE_RATE, "PCM_16", format=form)
    return sound.getvalue()


def write_sample(folder, number, prompt, codes, ended_by, wave, with_codes=False, **facts):
    """Write NUMBER.npy if with_codes, NUMBER.wav (24 kHz, 16 bit), then NUMBER.json of a spoken
    Prompt. Returns the JSON. UserError for a waveform that is not finite."""
    path, clip, voice = Path(folder, f"{number:04d}"), prompt.target, prompt.voice
    require(np.isfinite(wave).all(),
            f"{path}.wav: the codec has made samples that are not finite numbers")
    record = {"name": path.name, "text": prompt.text, "frames": len(codes),
              "seconds": len(codes) / FRAME_RATE, "ended_by": ended_by,
              "reference_audio": voice and voice.path, "reference_offset": voice and voice.offset,
              "reference_seconds": voice and voice.duration, "target_audio": clip and clip.path,
              "target_offset": clip and clip.offset, "target_seconds": clip and clip.duration,
              **facts}
    path.parent.mkdir(parents=True, exist_ok=True)
    if with_codes:
        write_atomically(f"{path}.npy", lambda path: save_codes(path, codes))
    write_atomically(f"{path}.wav", lambda path: path.write_bytes(sound_bytes(wave, "WAV")))
    write_json(f"{path}.json", record)
    return record


# ---- In training: rank 0 speaks, with separate seeds, so the training does not change


def prepare_file(path, args, tokenizer, ids, codec_dir, room, world):
    """prepare() of a prompt file on rank 0 -> the Prompts on every rank. args: the trainer's."""
    def encode_prompts():
        samples = read_prompts(path, args.normalize_text == "on")
        codec, bandwidth = load_codec(codec_dir, world.device, ids.num_codebooks)
        return prepare(samples, tokenizer, ids, codec, bandwidth, room)
    return dist.rank0(world, encode_prompts)


def use_on_rank0(world, model, autocast, function, *args):
    """Result of function(*args) on rank 0, with all weights and in eval mode. Collective."""
    model.eval()
    with dist.gather_weights(model), autocast():
        result = dist.rank0(world, function, *args)
    model.train()
    return result


def log_speech(log, step, name, wave):
    """Write a sound, (n,) float32 in -1..1, to TensorBoard. log.write() flushes it."""
    if log.board and len(wave):
        log.board.add_audio(name, wave.clip(-1, 1)[None], step, SAMPLE_RATE)


class Speaker:
    """Speaks --sample_prompts at every validation."""

    def __init__(self, args, tokenizer, ids, config, codec_dir, world):
        """On every rank. args: the trainer's flags. Encodes the prompts. Raises UserError."""
        self.args, self.ids, self.codec_dir, self.device = args, ids, codec_dir, world.device
        self.settings = sampling(config, args.sample_seconds)
        room = positions(config) - self.settings.max_new_tokens
        self.prompts = prepare_file(args.sample_prompts, args, tokenizer, ids, codec_dir, room,
                                    world)

    def speak(self, world, model, step, log, autocast):
        """{eval/...: float} of the prompts; {} after a stop request, or if memory is too small."""
        def speak_all():
            try:
                spoken = generate_all(model.base_model, self.prompts, self.ids, self.settings,
                                      self.args.seed, self.device)
                if spoken is None:
                    return {}
                # building the codec draws random numbers, which must not change dropout
                with torch.random.fork_rng(devices=[]):
                    codec, _ = load_codec(self.codec_dir, self.device, self.ids.num_codebooks)
                waves = [decode(codec, codes) for codes, _ in spoken]
            except torch.OutOfMemoryError:
                print(f"samples step {step:>6} | left out: too little GPU memory")
                return {}
            folder = f"{self.args.output_dir}/samples/step-{step}"
            for i, (prompt, (codes, ended_by), wave) in enumerate(zip(self.prompts, spoken, waves)):
                name = write_sample(folder, i, prompt, codes, ended_by, wave, step=step)["name"]
                log_speech(log, step, f"samples/{name}", wave)
            stopped = sum(ended_by == "eos" for _, ended_by in spoken) / len(spoken)
            print(f"speech step {step:>6} | {plural(len(spoken), 'prompt')}, {stopped:.1%} ended")
            return {"eval/stop_rate": stopped}
        return use_on_rank0(world, model, autocast, speak_all)
