"""A small speech model and packs for it; machines without soundfile can import this."""
import numpy as np
from transformers import HiggsAudioV2Config, HiggsAudioV2ForConditionalGeneration

from data import collate
from speech import v2
from speech.labels import IGNORE, TokenIds
from speech.weights import add_lora


def small_model(targets, dtype, recompute, dropout=0.1):
    """(config, PackedHiggs) on the CPU; rows take more memory than weights."""
    config = HiggsAudioV2Config(
        vocab_size=600, hidden_size=96, intermediate_size=256, num_hidden_layers=6, num_attention_heads=6,
        num_key_value_heads=2, head_dim=16, codebook_size=1026, num_codebooks=8, audio_token_id=516,
        audio_bos_token_id=513, audio_delay_token_id=514, pad_token_id=501, eos_token_id=509, bos_token_id=1)
    native = HiggsAudioV2ForConditionalGeneration(config, use_text_head=True).to(dtype)
    net = add_lora(native, 8, 16, dropout, targets, "base") if targets else native
    return config, v2.PackedHiggs(net, recompute).train()


def labels_of():
    """TokenIds of small_model."""
    return TokenIds(audio=516, delay=514, pad=501, num_codebooks=8, stream_bos=1024, stream_eos=1025)


def pack_of(samples, text, audio, targets):
    """PackedBatch of samples with `text` text and `audio` audio rows; the first `targets` of each are trained."""
    rng, ids = np.random.default_rng(0), labels_of()
    is_audio = np.arange(text + audio) >= text
    label = np.full(text + audio, IGNORE)
    label[1:1 + targets] = 7
    return collate([{"number": i, "input_ids": np.where(is_audio, ids.audio, rng.integers(0, 500, text + audio)),
                     "is_audio": is_audio, "text_labels": label, "audio_ids": rng.integers(0, 1024, (audio, 8)),
                     "audio_at": text + np.arange(targets), "audio_targets": np.full((targets, 8), 5)}
                    for i in range(samples)], ids)
