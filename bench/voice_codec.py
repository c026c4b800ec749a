"""make_voice.py's codec: HiggsAudioV2TokenizerModel, taught to code the voices VOICES on a CPU.

That class has no training of its own, so its latents are computed from a clip, not learnt: per frame a log-mel
envelope, normalised per voice and reduced by PCA, then the pitch relative to the voice's, then the voice. k-means makes
the codebooks; the decoder learns to speak from their codes.
"""
import functools
import math
import time

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from common.checkpoint import write_atomically
from common.new_folder import new_folder
from speech.data.code_cache import SAMPLE_RATE
from speech.demo import make_tiny
from speech.model import layout_2025

from transformers import (  # isort: skip      # after make_tiny, which explains a broken torchaudio
    DacConfig,
    HiggsAudioV2TokenizerConfig,
    HiggsAudioV2TokenizerModel,
    HubertConfig,
)
from transformers.audio_utils import mel_filter_bank  # isort: skip

BASE, NEW = "slt", "rms"        # flite's voices: of the base, and the one to be learnt
VOICES = BASE, NEW              # those that the codec knows
OTHERS = "kal16", "awb"         # the base hears them, too
FRAME = 960                     # samples at 24 kHz
CROP, CROPS = 20, 4             # frames of a crop, crops of a step

# Latents of a frame: envelope, two pitches, one number per voice
BANDS, ENVELOPE = 32, 32        # log-mel bands every 10 ms; PCA components of the frame's 4 x 32
PITCH = slice(ENVELOPE, ENVELOPE + 2)
VOICE = slice(ENVELOPE + 2, ENVELOPE + 2 + len(VOICES))
LATENTS = VOICE.stop
BOOKS = [(slice(0, ENVELOPE), 256), (slice(0, ENVELOPE), 256), (PITCH, 24), (VOICE, len(VOICES))]   # dims, live codes
OFFSETS = {4: (0, 1), 6: (2, 3)}        # codebooks behind BOOKS, in pairs that cancel: number, components of the envelope
FAR = 30.0                      # where codes lie that are never the nearest
SPECTRA = [(256, 20), (512, 40), (1024, 80), (2048, 80)]        # the decoder's loss: FFT size, mel bands up to 8 kHz


def say(text):
    print(f"{time.strftime('%H:%M:%S')}  {text}", flush=True)


# ---------------------------------------------------------------------------------------------------------------------
# Latents that the encoder shall give


def windows(wave, size, hop):
    """(n,) -> (n // hop, size): stretches centred on the middle of each hop."""
    before = (size - hop) // 2
    return torch.nn.functional.pad(wave, (before, size)).unfold(-1, size, hop)[:len(wave) // hop]


@functools.cache
def mel_filters(fft, bands, low, high):
    """(fft // 2 + 1, bands) float32 triangles of peak 1."""
    filters = mel_filter_bank(fft // 2 + 1, bands, low, high, SAMPLE_RATE, norm=None, mel_scale="htk")
    return torch.tensor(filters, dtype=torch.float32)


def envelope(wave):
    """(T * 960,) -> (4 T, BANDS) log-mel, every 10 ms."""
    spectrum = torch.fft.rfft(windows(wave, 720, 240) * torch.hann_window(720), 1024).abs() * (4 / 720)
    return torch.log(spectrum @ mel_filters(1024, BANDS, 60, 8000) + 1e-3)


def pitch(wave, low=70, high=300):
    """(T * 960,) -> ((2 T,) log F0 in Hz, (2 T,) bool voiced), every 20 ms, by autocorrelation over 60 ms."""
    size, hop, lags = 1440, 480, SAMPLE_RATE // low + 2
    frames = windows(wave, size, hop)
    frames = frames - frames.mean(1, keepdim=True)
    product = torch.fft.irfft(torch.fft.rfft(frames, 4096).abs().square())[:, :lags]
    energy = product[:, 0]
    ratio = (product / (energy[:, None] + 1e-9) / (1 - torch.arange(lags) / size))[:, SAMPLE_RATE // high:]
    best = ratio.max(1).values
    # the shortest lag whose peak comes near the best one: longer ones are octaves below
    peak = torch.zeros_like(ratio, dtype=torch.bool)
    inner = ratio[:, 1:-1]
    peak[:, 1:-1] = (inner > 0.9 * best[:, None]) & (inner >= ratio[:, :-2]) & (inner >= ratio[:, 2:])
    lag = torch.where(peak.any(1), peak.float().argmax(1), ratio.argmax(1)) + SAMPLE_RATE // high
    return torch.log(SAMPLE_RATE / lag), (best > 0.6) & (energy / size > 3e-4)


def melody(log_f0, voiced, median):
    """(2 T,) log F0: octave errors dropped, gaps filled in, smoothed over 100 ms."""
    log_f0 = log_f0.numpy()
    good = np.flatnonzero(voiced.numpy() & (np.abs(log_f0 - median) < 0.45))
    if not len(good):
        return np.full(len(log_f0), median, np.float32)
    line = np.pad(np.interp(np.arange(len(log_f0)), good, log_f0[good]), 2, mode="edge")
    return np.median(np.lib.stride_tricks.sliding_window_view(line, 5), axis=1).astype(np.float32)


def measure_voice(voice, clips):
    """[(n,) wave] of a voice -> mean and deviation of its envelope's bands, median of its log F0."""
    bands = torch.cat([envelope(wave) for wave in clips]).reshape(-1, BANDS)
    pitches = torch.cat([log_f0[voiced] for log_f0, voiced in map(pitch, clips)])
    say(f"{voice}: {len(clips)} clips, {sum(map(len, clips)) / SAMPLE_RATE:.0f} s, median pitch "
        f"{pitches.median().exp():.0f} Hz")
    return {"mean": bands.mean(0), "deviation": bands.std(0).clamp(min=0.05), "pitch": pitches.median()}


def measure(waves):
    """{voice: [(n,) wave]} -> what latents() needs: per voice mean, deviation and pitch; the PCA of all envelopes."""
    known = {voice: measure_voice(voice, clips) for voice, clips in waves.items()}
    content = [normalised(wave, known[voice]) for voice, clips in waves.items() for wave in clips]
    together = torch.cat(content)
    power, axes = torch.linalg.eigh(torch.cov(together.T))
    say(f"PCA: {ENVELOPE} components keep {power[-ENVELOPE:].sum() / power.sum():.3f} of the envelope's variance")
    return known | {"mean": together.mean(0), "axes": axes.flip(1)[:, :ENVELOPE] / power[-1].sqrt()}


def normalised(wave, voice):
    """(T * 960,) -> (T, 4 * BANDS): the envelope relative to the voice's."""
    return ((envelope(wave).reshape(-1, BANDS) - voice["mean"]) / voice["deviation"]).reshape(-1, 4 * BANDS)


def latents(wave, voice, known):
    """(T * 960,) -> (T, LATENTS); the envelope's first component has deviation 1. known: of measure.

    One of OTHERS gets the base's voice: the codec knows VOICES only.
    """
    median = known[voice]["pitch"]
    tune = (torch.from_numpy(melody(*pitch(wave), float(median))) - median).reshape(-1, 2) / 0.15
    content = (normalised(wave, known[voice]) - known["mean"]) @ known["axes"]
    who = torch.eye(len(VOICES))[VOICES.index(BASE if voice in OTHERS else voice)].expand(len(content), -1)
    return torch.cat([content, 0.4 * tune.clamp(-3, 3), who], 1)


# ---------------------------------------------------------------------------------------------------------------------
# The codec and its codebooks


def empty_codec(seed):
    """The native codec, random but for its linear layers, which hand the encoder's LATENTS through."""
    acoustic = DacConfig(downsampling_ratios=make_tiny.CODEC_STRIDES, upsampling_ratios=make_tiny.CODEC_STRIDES[::-1],
                         encoder_hidden_size=8, decoder_hidden_size=256, hidden_size=LATENTS)
    semantic = HubertConfig(conv_dim=(8,) * 7, mask_time_prob=0.0, num_hidden_layers=1, hidden_size=16,
                            intermediate_size=16, num_attention_heads=2, num_conv_pos_embeddings=16,
                            num_conv_pos_embedding_groups=2)
    config = HiggsAudioV2TokenizerConfig(target_bandwidths=[0.5, 1, 1.5, 2], codebook_size=1024, codebook_dim=ENVELOPE,
                                         acoustic_model_config=acoustic, semantic_model_config=semantic)
    torch.manual_seed(seed)
    codec = HiggsAudioV2TokenizerModel(config)
    for part in (codec.acoustic_encoder, codec.acoustic_decoder):
        for module in part.modules():
            if isinstance(module, (torch.nn.Conv1d, torch.nn.ConvTranspose1d)):
                module.reset_parameters()       # transformers' initial weights are too small to learn from
    hand_through(codec.fc, slice(0, LATENTS), slice(0, LATENTS))
    hand_through(codec.fc2, slice(0, LATENTS), slice(0, LATENTS))
    for number, quantizer in enumerate(codec.quantizer.quantizers):
        dims = BOOKS[number][0] if number < len(BOOKS) else slice(0, ENVELOPE)
        own = slice(0, dims.stop - dims.start)
        hand_through(quantizer.project_in, own, dims)
        hand_through(quantizer.project_out, dims, own)
    return codec


@torch.no_grad()
def hand_through(linear, outputs, inputs):
    """Make outputs equal to inputs (slices of one length), and all others 0."""
    linear.weight.zero_()
    linear.bias.zero_()
    linear.weight[outputs, inputs] = torch.eye(inputs.stop - inputs.start)


def fit(name, module, state, steps, rate, betas, seed, loss_of):
    """Adam with warm-up and cosine decay, resumed from the file `state`; loss_of(numpy Generator) of each step."""
    optimizer = torch.optim.AdamW(module.parameters(), rate, betas=betas)
    done, loss_sum, start = 0, 0.0, time.monotonic()
    if state.exists():
        saved = torch.load(state)
        module.load_state_dict(saved["module"])
        optimizer.load_state_dict(saved["optimizer"])
        done = saved["step"]
    for step in range(done, steps):
        optimizer.param_groups[0]["lr"] = rate * min(1, (step + 1) / 60) * (1 + math.cos(math.pi * step / steps)) / 2
        optimizer.zero_grad()
        loss = loss_of(np.random.default_rng([seed, step]))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 5.0)
        optimizer.step()
        loss_sum += loss.item()
        if (step + 1) % 50 == 0 or step + 1 == steps:
            saved = {"module": module.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
            write_atomically(state, lambda path, saved=saved: torch.save(saved, path))
            say(f"{name}: step {step + 1} of {steps}, loss {loss_sum / (step % 50 + 1):.4f}, "
                f"{time.monotonic() - start:.0f} s")
            loss_sum = 0.0


def crops(rng, waves, latents):
    """CROPS random stretches of CROP frames, the voices taking turns; zeros behind the end of a
    shorter clip: (CROPS, samples) heard, (CROPS, CROP, LATENTS) meant.
    """
    heard, meant = [], []
    for number in range(CROPS):
        voice = VOICES[number % len(VOICES)]
        clip = rng.integers(len(waves[voice]))
        frames = len(latents[voice][clip])
        first = rng.integers(max(1, frames - CROP + 1))
        missing = max(0, CROP - frames)
        heard.append(torch.nn.functional.pad(waves[voice][clip][first * FRAME:(first + CROP) * FRAME],
                                             (0, missing * FRAME)))
        meant.append(torch.nn.functional.pad(latents[voice][clip][first:first + CROP], (0, 0, 0, missing)))
    return torch.stack(heard), torch.stack(meant)


@torch.no_grad()
def make_books(codec, latents, seed):
    """Sets all codebooks by k-means over what the earlier ones leave of latents (n, LATENTS)."""
    rest, bits = torch.nn.functional.pad(latents, (0, codec.config.hidden_size - LATENTS)), 0.0
    for number, quantizer in enumerate(codec.quantizer.quantizers):
        if number >= len(BOOKS):
            found = offsets(number)
        else:
            dims, live = BOOKS[number]
            found = torch.eye(live) if dims == VOICE else k_means(rest[:, dims], live, seed)
        book = torch.full_like(quantizer.codebook.embed, FAR)
        book[:len(found)] = 0
        book[:len(found), :found.shape[1]] = found
        quantizer.codebook.embed.copy_(book.half())
        codes = quantizer.encode(rest.T[None])[0]
        rest = rest - quantizer.decode(codes[None])[0].T
        share = torch.bincount(codes, minlength=1024) / len(codes)
        entropy = float(-(share * share.clamp(min=1e-9).log2()).sum())
        bits += entropy
        say(f"codebook {number}: {int((share > 0).sum())} live codes, {entropy:.2f} bits a frame")
    say(f"all codebooks: {bits:.1f} bits a frame, {25 * bits:.0f} bits a second")


def offsets(number):
    """(4, ENVELOPE): 1 up or down along one of two components; the next codebook takes the same one back.

    So the pair adds nothing where both have the same code in a frame, and is loud noise where one of them is wrong or a
    step late: all codebooks are heard, although what BOOKS leave of the envelope is too little to be.
    """
    first = number - number % 2
    one, other = OFFSETS[first]
    found = torch.zeros(4, ENVELOPE)
    found[[0, 1], one] = torch.tensor([1.0, -1.0])
    found[[2, 3], other] = torch.tensor([1.0, -1.0])
    return found if number == first else -found


def k_means(points, count, seed, rounds=25):
    """(n, d) -> (count, d) centres; one that has lost all points starts again at a random one."""
    generator = torch.Generator().manual_seed(seed)

    def some(number):
        return points[torch.randint(len(points), (number,), generator=generator)]
    centres = some(count)
    for _ in range(rounds):
        nearest = torch.cdist(points, centres).argmin(1)
        sizes = torch.bincount(nearest, minlength=count)[:, None]
        sums = torch.zeros_like(centres).index_add_(0, nearest, points)
        centres = torch.where(sizes > 0, sums / sizes.clamp(min=1), some(count))
    return centres


@torch.no_grad()
def encode(codec, frames):
    """(T, LATENTS) -> (T, 8) codes."""
    padded = torch.nn.functional.pad(frames, (0, codec.config.hidden_size - LATENTS))
    return codec.quantizer.encode(padded.T[None])[:, 0].T


@torch.no_grad()
def decode(codec, codes):
    """(T, 8) codes -> (T, LATENTS)."""
    return codec.fc2(codec.quantizer.decode(codes.T[:, None]).transpose(1, 2))[0]


def train_decoder(codec, waves, latents, state, steps, seed):
    """The decoder learns to speak from latents: mean difference of log-mel spectra of four sizes, no phase."""
    def spectra(wave):
        for fft, bands in SPECTRA:
            parts = torch.stft(wave, fft, fft // 4, window=torch.hann_window(fft), return_complex=True)
            yield torch.log(parts.abs().transpose(1, 2) * (4 / fft) @ mel_filters(fft, bands, 0, 8000) + 1e-3)

    def loss_of(rng):
        heard, meant = crops(rng, waves, latents)
        given = codec.acoustic_decoder(meant.transpose(1, 2))[:, 0]
        inner = slice(FRAME // 2, -FRAME // 2)
        pairs = zip(spectra(given[:, inner]), spectra(heard[:, inner]))
        return sum((a - b).abs().mean() for a, b in pairs) / len(SPECTRA)
    fit("decoder", codec.acoustic_decoder, state, steps, 2e-3, (0.8, 0.99), seed, loss_of)


def save_codec(codec, folder):
    """The codec's folder, whole or not at all: float16 values, to be loaded as float32."""
    with new_folder(folder) as building:
        codec.save_pretrained(building)
        layout_2025.feature_extractor().save_pretrained(building)
        path = building / "model.safetensors"
        save_file({name: t.half() for name, t in load_file(path).items()}, path, {"format": "pt"})


def load_codec(folder):
    return HiggsAudioV2TokenizerModel.from_pretrained(folder, dtype=torch.float32)


def make_latents(out_dir, waves, seed):
    """OUT_DIR/latents.pt and OUT_DIR/books, unless they are there."""
    if (out_dir / "books").exists():
        return
    known = measure(waves)
    write_atomically(out_dir / "latents.pt", lambda path: torch.save(known, path))
    codec = empty_codec(seed)
    make_books(codec, torch.cat([latents(wave, voice, known) for voice in VOICES for wave in waves[voice]]), seed)
    save_codec(codec, out_dir / "books")


def make_decoder(out_dir, waves, steps, seed):
    """OUT_DIR/decoder.pt: the acoustic decoder, trained."""
    codec, known = load_codec(out_dir / "books"), torch.load(out_dir / "latents.pt")
    coded = {voice: [decode(codec, encode(codec, latents(wave, voice, known))) for wave in clips]
             for voice, clips in waves.items()}
    train_decoder(codec, waves, coded, out_dir / "decoder.pt", steps, seed)
