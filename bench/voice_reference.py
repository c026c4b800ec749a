"""Does the voice follow a reference clip? launch/voice's base learns to speak behind a clip of one of two voices.

    apt-get install flite
    python bench/voice_reference.py work        # one CPU thread, no GPU; the same command goes on where it was

train_v2_ddp.py trains an adapter as launch/demo.sh does, on 600 clips each of the two voices that the codec knows,
`slt` and `rms`, every one behind another clip of its voice (ChatML's form of cloning). Then the 40 held-out sentences
are spoken behind clips of each of flite's four voices; codec and adapter have heard nothing of `kal16` and `awb`. A
reference says another held-out sentence. pocketsphinx listens, and a clip counts as nearest to the voice whose
recording of the sentence is most like it, by pitch and spectrum. Writes bench/results/voice_reference-cpu.json, which
docs/log.md shows.

    python bench/voice_reference.py work --forget nothing mixed keep     # afterwards

merges that adapter into the base and fine-tunes what it made on launch/voice's 600 clips of `rms` without references,
as launch/demo.sh does: is `slt` lost behind a clip of `slt`? With nothing done against it; with a quarter of the old
recordings mixed in; with --keep, which has no old recordings, but 300 other texts behind clips of both voices. Prints
what it found.
"""
import argparse
import json
import random
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

VOICE = ROOT / "launch" / "voice"
CLIPS = 600         # of either voice
ARMS = {"nothing": (), "mixed": ("old.json:0.25",), "keep": ("--keep", "keep.json")}
TARGETS = "q_proj,k_proj,v_proj,o_proj,audio_mlp.gate_proj,audio_mlp.up_proj,audio_mlp.down_proj,audio_lm_head"


def parse(argv=None):
    p = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    p.add_argument("out_dir", type=Path, metavar="OUT_DIR", help="folder for clips, codes and the run")
    p.add_argument("--steps", type=int, default=600, help="optimizer steps, 16 clips each")
    p.add_argument("--forget", nargs="+", choices=tuple(ARMS), default=(), help="then fine-tune on one voice, so")
    p.add_argument("--forget_steps", type=int, default=300, help="optimizer steps of that, 16 clips each")
    p.add_argument("--seed", type=int, default=42, help="of that fine-tuning")
    p.add_argument("--flite", default="flite", help="the program; not needed for clips that are there already")
    p.add_argument("--results_dir", type=Path, default=ROOT / "bench" / "results", help="folder of the report")
    return p.parse_args(argv)


def cloned(clips, voice, text, reference):
    """ChatML sample: speak digits `text` in the voice that says digits `reference` before it."""
    from bench import make_voice
    before, after = (make_voice.sample(said, audio_url=str(clips / voice / f"{said}.wav"))["messages"]
                     for said in (reference, text))
    return {"messages": [*before, *after[1:]]}


def make_samples(clips, flite):
    """Speaks the clips; [sample] to train on, in random order."""
    from bench import make_voice, voice_codec
    texts = json.loads((VOICE / "texts.json").read_text())
    draw, samples = random.Random(0), []
    for voice in voice_codec.VOICES:
        of = draw.sample([text for text in texts[voice] if len(text) > 1], CLIPS)
        make_voice.make_clips(flite, clips, voice, of)
        short = [text for text in of if len(text) < 5]
        samples += [cloned(clips, voice, text, next(other for other in draw.sample(short, 2) if other != text))
                    for text in of]
    for voice in (*voice_codec.VOICES, *voice_codec.OTHERS):
        make_voice.make_clips(flite, clips, voice, texts["held_out"])
    draw.shuffle(samples)
    return samples


def train(out_dir, model, data, run, steps, *more):
    """train_v2_ddp.py in one process; it goes on from the newest checkpoint in the folder `run`."""
    command = [sys.executable, "train_v2_ddp.py", "--model_path", model, "--audio_tokenizer_path", VOICE / "codec",
               "--train_data_file", *data, "--code_cache", out_dir / "codes", "--output_dir", run,
               "--report_to", "none", "--max_steps", steps,
               "--use_lora", "--lora_rank", 32, "--lora_alpha", 64, "--lora_dropout", 0.1, "--lora_target_modules",
               TARGETS, "--learning_rate", 3e-3, "--warmup_steps", 20, "--weight_decay", 0, "--adam_beta2", 0.99,
               "--text_loss_weight", 0, "--per_device_train_batch_size", 16, "--num_workers", 0,
               "--preprocess_num_proc", 0, "--logging_steps", 25, "--validation_split", 0.05,
               "--per_device_eval_batch_size", 8, "--eval_steps", 150, "--save_steps", 150, "--save_total_limit", 1,
               *more]
    done = subprocess.run([str(word) for word in command], cwd=ROOT)
    if done.returncode:
        sys.exit(f"train_v2_ddp.py ended with status {done.returncode}")


def keep_rows(clips):
    """ChatML prompts of 300 texts that are in no training text, behind short clips of both voices in turn."""
    from bench import make_voice, voice_codec
    from speech.choices import DEFAULT_SYSTEM
    texts = json.loads((VOICE / "texts.json").read_text())
    made = {voice: [path.stem for path in sorted((clips / voice).glob("*.wav")) if 1 < len(path.stem) < 5
                    and path.stem not in texts["held_out"]] for voice in voice_codec.VOICES}
    known, draw, rows = {*texts["held_out"], *sum(made.values(), [])}, random.Random(1), []
    for text in draw.sample([text for text in texts["slt"] if len(text) > 2 and text not in known], 300):
        voice = voice_codec.VOICES[len(rows) % 2]
        before = make_voice.sample((said := draw.choice(made[voice])), audio_url=str(clips / voice / f"{said}.wav"))
        rows.append({"messages": [{"role": "system", "content": DEFAULT_SYSTEM}, *before["messages"][1:],
                                  {"role": "user", "content": make_voice.spoken(text)}]})
    return rows


def forget(out_dir, args):
    """{arm: judge()} of fine-tunings of the merged model on one voice."""
    from bench import voice_codec
    from common.checkpoint import write_atomically
    merged, found = out_dir / "merged", {}
    if not merged.exists():
        subprocess.run([sys.executable, "lora.py", "merge", "--model_path", VOICE / "model", "--adapter",
                        out_dir / "run" / f"checkpoint-{args.steps}", "--output_dir", merged], cwd=ROOT, check=True)
    for name, rows in (("keep", keep_rows(out_dir / "clips")), ("old", json.loads((out_dir / "train.json").read_text()))):
        write_atomically(out_dir / f"{name}.json", lambda path, rows=rows: path.write_text(json.dumps(rows)))
    found["before"] = judge(out_dir, voice_codec.VOICES, merged)
    for arm in args.forget:
        words = [out_dir / word if ".json" in word else word for word in ARMS[arm]]
        old, more = (words, []) if arm == "mixed" else ([], words)
        run = out_dir / f"{arm}-{args.seed}"
        train(out_dir, merged, [VOICE / "train.json", *old], run, args.forget_steps, "--seed", args.seed, *more)
        found[arm] = judge(out_dir, voice_codec.VOICES, merged, run / f"checkpoint-{args.forget_steps}")
    return found


def mean_cepstra(wave):
    """(13,) mean over 10 ms frames of the cosine series of 40 log mel energies up to 8 kHz."""
    import numpy as np

    from speech.voice.speech_metrics import RATE, frames
    size, mels = 1024, 40
    edges = 700 * (10 ** (np.linspace(0, np.log10(1 + 8000 / 700), mels + 2)) - 1)
    hertz = np.fft.rfftfreq(size, 1 / RATE)
    rising = (hertz - edges[:-2, None]) / (edges[1:-1] - edges[:-2])[:, None]
    falling = (edges[2:, None] - hertz) / (edges[2:] - edges[1:-1])[:, None]
    power = np.abs(np.fft.rfft(frames(wave, size) * np.hanning(size), axis=1)) ** 2
    mel = power @ np.clip(np.minimum(rising, falling), 0, None).T
    mel = np.maximum(mel, max(1e-8 * mel.max(), 1e-30))         # 80 dB below the loudest is silence
    basis = np.cos(np.pi * np.outer(np.arange(1, 14), np.arange(mels) + 0.5) / mels) / mels
    return (np.log(mel) @ basis.T).mean(0)


def likeness(wave, reference):
    """Minus the distance of two voices: octaves between median pitches, plus mean spectra's distance in 10 dB."""
    import numpy as np

    from speech.demo.judge_demo import median_pitch
    if not len(wave):
        return -np.inf
    octaves = abs(np.log2(median_pitch(wave) / median_pitch(reference)))
    apart = mean_cepstra(wave) - mean_cepstra(reference)
    # Kubichek, "Mel-cepstral distance measure for objective speech quality assessment", 1993
    return -octaves - float(np.sqrt(2 * (apart ** 2).sum())) / np.log(10)


def judge(out_dir, behind_voices, model, adapter=None):
    """{reference voice: {"wer", "shuffled_wer", "stop_rate", "nearest": {voice: share of clips}}}."""
    from bench import make_voice, voice_codec
    from bench.voice_curve import say
    from speech.demo import judge_demo
    held = json.loads((VOICE / "texts.json").read_text())["held_out"]
    texts, clips = [make_voice.spoken(text) for text in held], out_dir / "clips"
    voices = (*voice_codec.VOICES, *voice_codec.OTHERS)
    recordings = {voice: [wave.numpy() for wave in make_voice.read_clips(clips, voice, held)] for voice in voices}
    found = {}
    for voice in behind_voices:
        behind = [(str(clips / voice / f"{text}.wav"), make_voice.spoken(text)) for text in held[1:] + held[:1]]
        waves, ends = say(model, VOICE / "codec", texts, adapter, behind)
        nearest = [max(voices, key=lambda other, wave=wave, i=i: likeness(wave, recordings[other][i]))
                   for i, wave in enumerate(waves)]
        own = judge_demo.measure_voice(texts, waves)
        heard = judge_demo.judge(texts, waves, ends, own, own)
        found[voice] = {**{name: heard[name] for name in ("wer", "shuffled_wer", "stop_rate")},
                        "nearest": {other: nearest.count(other) / len(nearest) for other in voices}}
        print(f"judged     behind {voice}: {heard['wer']:.1%} of the words mistaken; nearest to {found[voice]['nearest']}",
              flush=True)
    return found


def main(argv=None):
    args = parse(argv)
    import torch

    from bench import measure, voice_codec
    from common.checkpoint import write_atomically
    torch.set_num_threads(1)
    out_dir = args.out_dir.resolve()
    out_dir.mkdir(parents=True, exist_ok=True)
    if not (out_dir / "train.json").exists():
        samples = make_samples(out_dir / "clips", args.flite)
        write_atomically(out_dir / "train.json", lambda path: path.write_text(json.dumps(samples)))
    train(out_dir, VOICE / "model", [out_dir / "train.json"], out_dir / "run", args.steps)
    if args.forget:
        for arm, found in forget(out_dir, args).items():
            print(f"{arm:<10}" + "; ".join(
                f"behind {voice}: {of['nearest'][voice]:.1%} nearest to it, {of['wer']:.1%} of the words mistaken"
                for voice, of in found.items()))
        return
    judged = judge(out_dir, (*voice_codec.VOICES, *voice_codec.OTHERS), VOICE / "model",
                   out_dir / "run" / f"checkpoint-{args.steps}")
    made = measure.new_report("does the voice follow a reference clip?", torch.device("cpu"),
                              measure.command("voice_reference", ["OUT_DIR", *sys.argv[2:]]))
    made["machine"], made["judged"] = "shared with other work", judged
    made["tables"]["references"] = {
        "columns": ["reference", "word errors (%)", "against other texts (%)", "ended (%)",
                    *(f"nearest to {voice} (%)" for voice in judged)],
        "rows": [[voice, *(round(100 * found[share], 1) for share in ("wer", "shuffled_wer", "stop_rate")),
                  *(round(100 * share, 1) for share in found["nearest"].values())] for voice, found in judged.items()]}
    measure.write_report("voice_reference", made, args.results_dir)


if __name__ == "__main__":
    main()
