"""Full training from random weights to understood speech: train_v2_ddp.py alone, its curve by step.

    apt-get install flite
    python bench/voice_curve.py work        # one CPU thread, no GPU; the same command goes on where it was

bench/make_voice.py makes 7000 clips of flite's `slt` saying digits, a codec and a language model of random weights, in
OUT_DIR. train_v2_ddp.py trains all weights of it in one process, 16 clips a step. Each of its checkpoints, the random
weights among them, speaks 40 sentences that are in no training text, and is judged as in launch/demo.sh: pocketsphinx
with a grammar that knows digits alone listens; "this voice" is the share of clips nearer to its pitch than to another's.
Writes bench/results/voice_curve-cpu.json after each checkpoint; docs/log.md shows it. Exit status 0 only if the last
checkpoint is understood: at most --max_wer of the words are mistaken.
"""
import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


def parse(argv=None):
    p = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    p.add_argument("out_dir", type=Path, metavar="OUT_DIR", help="folder for clips, codec, model and checkpoints")
    p.add_argument("--steps", type=int, default=4000, help="optimizer steps, 16 clips each")
    p.add_argument("--every", type=int, default=1000, help="steps between checkpoints that are judged")
    p.add_argument("--max_wer", type=float, default=0.15, help="share of words mistaken after the last step")
    p.add_argument("--results_dir", type=Path, default=ROOT / "bench" / "results", help="folder of the report")
    args = p.parse_args(argv)
    if args.steps % args.every:
        p.error(f"--steps is {args.steps}, no multiple of --every {args.every}: its end would not be judged")
    return args


def make(out_dir, stage):
    """A stage of make_voice.py, unless it is there."""
    subprocess.run([sys.executable, "bench/make_voice.py", out_dir, stage], cwd=ROOT, check=True)


def spoken_codec(out_dir):
    """OUT_DIR/spoken: the codec with its trained decoder; its encoder is not needed, codes come from latents."""
    import torch

    from bench import voice_codec
    folder = out_dir / "spoken"
    if not folder.exists():
        make(out_dir, "decoder")
        codec = voice_codec.load_codec(out_dir / "books")
        codec.acoustic_decoder.load_state_dict(torch.load(out_dir / "decoder.pt")["module"])
        voice_codec.save_codec(codec, folder)
    return folder


def start_training(out_dir, steps, every):
    """train_v2_ddp.py in one process; it goes on from the newest checkpoint in OUT_DIR/curve."""
    command = [sys.executable, "train_v2_ddp.py", "--model_path", out_dir / "base" / "model",
               "--audio_tokenizer_path", out_dir / "books", "--train_data_file", out_dir / "base" / "train.json",
               "--code_cache", out_dir / "codes", "--output_dir", out_dir / "curve", "--report_to", "none",
               "--max_steps", steps, "--per_device_train_batch_size", 16, "--learning_rate", 2e-3, "--warmup_steps", 50,
               "--weight_decay", 0.1, "--adam_beta2", 0.99, "--text_loss_weight", 0, "--num_workers", 0,
               "--preprocess_num_proc", 0, "--validation_split", 0.01, "--per_device_eval_batch_size", 16,
               "--logging_steps", 50, "--eval_steps", every, "--save_steps", every, "--save_total_limit", 0]
    return subprocess.Popen([str(word) for word in command], cwd=ROOT)


def say(model, codec, texts, adapter=None, references=None):
    """([wave], [ended by]) of texts spoken by a model on the CPU. references: of each text (path, what it says)."""
    import torch

    from speech import generate_tts
    from speech.data.encode import load_codec
    from speech.model import weights
    from speech.model.labels import token_ids
    from speech.voice import generate
    cpu = torch.device("cpu")
    folder, config_dict = weights.find_model(model)
    config, tokenizer = weights.native_config(config_dict), weights.load_tokenizer(folder)
    ids = token_ids(tokenizer, config)
    codec, bandwidth = load_codec(codec, cpu, ids.num_codebooks)
    samples = [generate.text_prompts([(text, text)], True, *reference)[0]
               for text, reference in zip(texts, references or [()] * len(texts))]
    prompts = generate.prepare(samples, tokenizer, ids, codec, bandwidth, 1000)
    native = generate_tts.load_to_speak(folder, config_dict, adapter, torch.float32, cpu)
    settings = generate.sampling(config, 5.0, temperature=0.3, ras_window=0)
    spoken = generate.generate(native, prompts, ids, settings, 0, cpu)
    return [generate.decode(codec, codes) for codes, _ in spoken], [end for _, end in spoken]


def losses(folder, name):
    """{step: value} of a metric in FOLDER/metrics.jsonl, if that is there yet."""
    path = folder / "metrics.jsonl"
    rows = map(json.loads, path.read_text().splitlines() if path.exists() else ())
    return {row["step"]: row[name] for row in rows if name in row}


def through_codec(out_dir, codec, waves):
    """[wave] -> what the codec makes of the codes of their latents: the best that the model can learn."""
    import torch

    from bench import voice_codec
    from speech.voice import generate
    known, codec = torch.load(out_dir / "latents.pt"), voice_codec.load_codec(codec)
    with torch.no_grad():
        return [generate.decode(codec, voice_codec.encode(codec, voice_codec.latents(
            torch.from_numpy(wave), voice_codec.BASE, known)).numpy()) for wave in waves]


def report(out_dir, judged):
    """Of the checkpoints judged so far: {step, or a word for what is no checkpoint: judgement}."""
    import torch

    from bench import measure
    made = measure.new_report("does train_v2_ddp.py alone teach a model of random weights to speak?",
                              torch.device("cpu"), measure.command("voice_curve", ["OUT_DIR", *sys.argv[2:]]))
    made["machine"] = "shared with other work"
    train, held_out = (losses(out_dir / "curve", f"{part}/audio_loss") for part in ("train", "eval"))
    made["judged"], made["train_audio_loss"], made["eval_audio_loss"] = judged, train, held_out
    columns = ["step", "clips heard", "training loss", "held-out loss", "word errors (%)",
               "against other texts (%)", "this voice (%)", "ended (%)"]
    made["tables"]["curve"] = {"columns": columns, "rows": [
        [name, *((16 * int(name), train.get(int(name)), held_out.get(int(name))) if name.isdigit() else [None] * 3),
         *(round(100 * found[share], 1) for share in ("wer", "shuffled_wer", "nearer_pitch", "stop_rate"))]
        for name, found in sorted(judged.items(), key=lambda item: not item[0].isdigit())]}
    return made


def main(argv=None):
    args = parse(argv)
    out_dir = args.out_dir.resolve()
    make(out_dir, "codes")
    codec = spoken_codec(out_dir)
    training = start_training(out_dir, args.steps, args.every)
    import torch

    from bench import make_voice, measure, voice_codec
    from common.checkpoint import write_atomically
    from speech.demo import judge_demo
    torch.set_num_threads(1)
    texts = json.loads((out_dir / "texts.json").read_text())["held_out"]
    said = [make_voice.spoken(text) for text in texts]
    recordings = [[wave.numpy() for wave in make_voice.read_clips(out_dir / "clips", voice, texts)]
                  for voice in voice_codec.VOICES]
    own, other = (judge_demo.measure_voice(said, waves) for waves in recordings)
    kept = out_dir / "judged.json"
    judged = json.loads(kept.read_text()) if kept.exists() else {}
    if not judged:
        for name, waves in (("recordings", recordings[0]),
                            ("recordings, coded", through_codec(out_dir, codec, recordings[0]))):
            judged[name] = judge_demo.judge(said, waves, ["eos"] * len(waves), own, other)
    try:
        for step in range(0, args.steps + 1, args.every):
            model = out_dir / "curve" / f"checkpoint-{step}" if step else out_dir / "base" / "model"
            while not (done := not step or (model / "manifest.json").exists()) and training.poll() is None:
                time.sleep(2)
            if not done:
                sys.exit(f"train_v2_ddp.py ended with status {training.returncode} before step {step}")
            if str(step) in judged:
                continue
            judged[str(step)] = found = judge_demo.judge(said, *say(model, codec, said), own, other)
            write_atomically(kept, lambda path: path.write_text(json.dumps(judged)))
            measure.write_report("voice_curve", report(out_dir, judged), args.results_dir)
            print(f"judged     step {step}: {found['wer']:.1%} of the words mistaken, {found['nearer_pitch']:.0%} this "
                  f"voice, {found['stop_rate']:.0%} ended", flush=True)
    finally:
        training.terminate()        # it saves first
        training.wait()
    wer = judged[str(args.steps)]["wer"]
    print(f"verdict    {'understood' if wer <= args.max_wer else 'FAILED'}: {wer:.1%} of the words mistaken, "
          f"at most {args.max_wer:.0%}")
    sys.exit(wer > args.max_wer)


if __name__ == "__main__":
    main()
