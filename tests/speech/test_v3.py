"""Higgs TTS 3: sequences, packed model, loss and step machine against a padded reference written from the layout."""
import json
import math
import shutil

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from core.cli import UserError
from data import collate
from speech import v3
from speech.labels import IGNORE
from tests.helpers import higgs3

BOC, EOC = 1024, 1025


@pytest.fixture
def loaded(model3):
    return higgs3.load(model3)


def codes_of(frames, seed=0):
    return torch.randint(0, 1024, (frames, 8), generator=torch.Generator().manual_seed(seed))


def test_delay_and_labels_are_those_written_by_hand():
    b, e = BOC, EOC
    codes = torch.tensor([[10, 20, 30, 40], [11, 21, 31, 41], [12, 22, 32, 42]])
    rows = [[10, b, b, b], [11, 20, b, b], [12, 21, 30, b], [e, 22, 31, 40], [e, e, 32, 41], [e, e, e, 42]]
    assert higgs3.delay(codes).tolist() == rows and v3.undelay(torch.tensor(rows)).tolist() == codes.tolist()
    labels = [[10], [11, 20], [12, 21, 30], [e, 22, 31, 40], [e, e, 32, 41], [e, e, e, 42]]
    assert [[row[k] for k in range(4) if higgs3.label_mask(3, 4)[r, k]] for r, row in enumerate(rows)] == labels
    trained = np.array([False, False, True])
    sample = v3.Ids(1, 2, 3, 4, num_codebooks=4).assemble(np.array([1, 3, -100]), trained, [codes])
    assert sample["audio_ids"].tolist() == rows[:-1] and sample["audio_at"].tolist() == [1, 2, 3, 4, 5, 6]
    assert [[code for code in row if code != IGNORE] for row in sample["audio_targets"].tolist()] == labels


class Reference(torch.nn.Module):
    """transformers' Qwen3 on one padded sample at a time, with loops over cells for tables and labels."""

    def __init__(self, folder):
        super().__init__()
        stored, text = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
        text = {k: v for k, v in text["text_config"].items() if k != "rope_theta"}
        config = Qwen3Config(**text, rope_parameters={"rope_theta": 1e6, "rope_type": "default"})
        self.lm = Qwen3ForCausalLM(config)
        body = {name.replace("body.", "model."): value for name, value in stored.items() if name.startswith("body.")}
        body |= {name: stored["tied.embedding.text_embedding.weight"] for name in (
            "model.embed_tokens.weight", "lm_head.weight")}
        self.lm.load_state_dict(body)
        self.table = torch.nn.Parameter(stored["tied.embedding.modality_embeddings.0.embedding.weight"].clone())

    def rows(self, rows):
        return torch.stack([sum(self.table[int(code) + 1026 * k] for k, code in enumerate(row)) for row in rows])

    def forward(self, before, reference, after, target):
        """before, after: token lists around the reference's rows (or None). -> (logits (L, 8, 1026), rows (L, 8))."""
        parts = [self.lm.model.embed_tokens(torch.tensor(before, dtype=torch.int64))]
        if reference is not None:
            parts.append(self.rows(higgs3.delay(reference)))
        parts.append(self.lm.model.embed_tokens(torch.tensor(after)))
        rows = [[int(target[r - k, k]) if 0 <= r - k < len(target) else (BOC if r < k else EOC) for k in range(8)]
                for r in range(len(target) + 7)]
        prompt = torch.cat(parts)
        full = torch.cat([prompt, self.rows(rows[:-1])])
        padded = F.pad(full, (0, 0, 0, 5))[None]
        mask = (torch.arange(len(full) + 5) < len(full))[None].long()
        hidden = self.lm.model(inputs_embeds=padded, attention_mask=mask).last_hidden_state[0, :len(full)]
        return (hidden[len(prompt) - 1:] @ self.table.T).view(-1, 8, 1026), torch.tensor(rows)

    def loss(self, samples):
        total = cells = 0
        for before, reference, after, target in samples:
            logits, rows = self(before, reference, after, target)
            for r, row in enumerate(rows.tolist()):
                for k, code in enumerate(row):
                    if code != BOC:
                        total, cells = total - logits[r, k].log_softmax(-1)[code], cells + 1
        return total, cells


def samples_of(ids):
    """(before, reference codes or None, after, target codes): plain, cloned, cloned without text, and a short one."""
    return [([], None, [ids.tts, ids.text, 70, 71, 72, ids.audio], codes_of(21, 1)),
            ([ids.tts, ids.ref_text, 80, 81, ids.ref_audio], codes_of(30, 2), [ids.text, 90, ids.audio],
             codes_of(12, 3)),
            ([ids.tts, ids.ref_audio], codes_of(25, 4), [ids.text, 91, 92, ids.audio], codes_of(40, 5)),
            ([], None, [ids.tts, ids.text, 93, ids.audio], codes_of(8, 6))]


def prompt_of(ids, sample):
    before, reference, after, _ = sample
    ref_text = before[before.index(ids.ref_text) + 1:-1] if ids.ref_text in before else None
    rows = None if reference is None else higgs3.delay(reference)
    return *higgs3.prompt(ids, after[after.index(ids.text) + 1:-1], ref_text, rows), rows


def pack(ids, samples):
    """The PackedBatch of the trainer for samples like those of samples_of."""
    rows, placeholder = [], ids.audio_placeholder_id
    for number, (before, reference, after, target) in enumerate(samples):
        tokens = np.array([*before, *[placeholder] * (reference is not None), *after, placeholder])
        codes = [clip.numpy() for clip in (reference, target) if clip is not None]
        rows.append({"number": number, **ids.assemble(tokens, np.arange(len(tokens)) == len(tokens) - 1, codes)})
    return collate(rows, ids)


@pytest.mark.slow
def test_packed_loss_and_gradients_equal_the_reference(model3, loaded):
    model, ids = loaded
    samples, reference = samples_of(ids), Reference(model3)
    expected, cells = reference.loss(samples)
    expected.backward()
    audio, text, eos = v3.PackedHiggs3(model.train())(pack(ids, samples))
    audio.sum().backward()
    torch.testing.assert_close(audio.sum(), expected, rtol=1e-5, atol=0)
    assert text == 0 and cells == sum(8 * len(s[3]) + 28 for s in samples) and eos[2] == 28 * len(samples)
    grads = {f"body.{name.removeprefix('model.')}": p.grad for name, p in reference.lm.named_parameters()
             if name.startswith("model.")} | {"audio_embedding.weight": reference.table.grad}
    assert grads.keys() == dict(model.named_parameters()).keys()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, grads[name], rtol=1e-5, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")
    report = v3.loss_report([*audio.tolist(), 0.0, *eos.tolist(), cells, 0], 0.0, "eval")
    assert report["eval/loss"] == pytest.approx(expected.item() / cells, rel=1e-5)
    assert report["eval/audio_loss_codebook_7"] == pytest.approx(audio[7].item() / sum(len(s[3]) for s in samples))


def trace(first_eoc, books=8):
    """Rows of step() if codebook 0 predicts EOC from row `first_eoc` on and the others always their number."""
    rows, end = [], None
    while end is None or len(rows) <= end:
        logits = torch.full((books, 1026), -9.0)
        for k in range(books):
            logits[k, EOC if k == 0 and len(rows) >= first_eoc else k] = 9.0
        row, end = v3.step(logits, len(rows), end, v3.Sampling(temperature=0))
        rows.append(row.tolist())
    return rows


@pytest.mark.parametrize("frames", [8, 9, 30])
def test_step_machine_keeps_frames_plus_seven_rows(frames):
    rows = trace(frames)
    assert len(rows) == frames + 7
    for r, row in enumerate(rows[:8]):
        assert row[r + 1:] == [BOC] * (7 - r) and row[1:r + 1] == list(range(1, r + 1))
    assert all(row[1:] == list(range(1, 8)) for row in rows[8:])        # the stop forces nothing
    assert len(trace(3)) == 15          # row 8 is the first that can end


@pytest.mark.parametrize("settings, expected", [
    ({"temperature": 0}, [1, 0, 0, 0]), ({"top_k": 2, "top_p": 1.0}, [0.5 / 0.8, 0.3 / 0.8, 0, 0]),
    ({"top_k": 0, "top_p": 0.9}, [0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95, 0]), ({"top_k": 0, "top_p": 0.5}, [1, 0, 0, 0])])
def test_draws_follow_top_k_and_top_p(settings, expected):
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().expand(4000, 4)
    drawn = v3.draw(logits, v3.Sampling(**{"temperature": 1.0} | settings), torch.Generator().manual_seed(0))
    shares = torch.bincount(drawn, minlength=4) / 4000
    assert [share == 0 for share in shares] == [share == 0 for share in expected]
    assert shares.tolist() == pytest.approx(expected, abs=5 * math.sqrt(0.25 / 4000))


@pytest.mark.slow
def test_memorised_clips_are_spoken_and_stop(loaded):
    model, ids = loaded
    clips = [codes_of(9, 7), codes_of(11, 8)]
    batch = pack(ids, [([], None, [ids.tts, ids.text, 60 + i, ids.audio], codes) for i, codes in enumerate(clips)])
    packed = v3.PackedHiggs3(model.train())
    optimizer, loss = torch.optim.AdamW(model.parameters(), 3e-3, weight_decay=0), torch.tensor(9.0)
    for _ in range(400):
        if loss > 0.008:
            loss = packed(batch)[0].sum() / (batch.audio_targets != IGNORE).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    prompts = [(*higgs3.prompt(ids, [60 + i]), None) for i in range(len(clips))]
    spoken = v3.generate(model.eval(), prompts, v3.Sampling(0, max_new_tokens=60), 0)
    assert all(torch.equal(codes, clip) and how == "eos" for (codes, how), clip in zip(spoken, clips))


def test_a_batch_speaks_like_each_prompt_alone(loaded):
    model, ids = loaded
    prompts = [(*prompt_of(ids, sample),) for sample in samples_of(ids)]
    together = v3.generate(model, prompts, v3.Sampling(0, max_new_tokens=25), 5)
    for prompt, (codes, how) in zip(prompts, together):
        alone, = v3.generate(model, [prompt], v3.Sampling(0, max_new_tokens=25), 5)
        assert torch.equal(alone[0], codes) and alone[1] == how == "length" and len(codes) == 18
    forced = higgs3.forced_logits(model, prompts[1][:2], prompts[1][2], higgs3.delay(together[1][0]))
    assert forced[8:].argmax(-1)[:10, 0].tolist() == together[1][0][8:, 0].tolist()


def test_untied_copies_and_wrong_weights_are_refused(model3, tmp_path):
    copy = shutil.copytree(model3, tmp_path / "copy")
    stored = load_file(copy / "model.safetensors")
    head = "tied.head.modality_heads.0.weight"
    for change, message in (
            ({head: stored[head] + 1e-3}, "has untied them"),
            ({"body.norm.weight": None}, "1 missing keys, first body.norm.weight"),
            ({"body.extra": torch.ones(3)}, "1 unexpected keys, first body.extra")):
        tensors = {name: value for name, value in (stored | change).items() if value is not None}
        save_file(tensors, copy / "model.safetensors")
        with pytest.raises(UserError, match=message):
            higgs3.load(copy)
    save_file(stored, copy / "model.safetensors")       # with the tokenizer of V2
    (copy / "tokenizer.json").write_text((copy / "tokenizer.json").read_text().replace("<|text|>", "<|AUDIO|>"))
    with pytest.raises(UserError, match=r"has no token <\|text\|>: it is not that of Higgs TTS 3"):
        higgs3.load(copy)
