"""--keep: the divergence from the base equals a plain loop, on any ranks; a resumed run ends the same."""
import contextlib
import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from core import checkpoint
from core.dist import World
from data import collate
from speech import keep, speak, v2, v3
from speech.labels import IGNORE
from speech.weights import add_lora
from tests.helpers import higgs3, spoken
from tests.helpers.runs import tensors
from tests.helpers.trainer import ROOT, Tiny, train_forked

VOICE = ROOT / "launch" / "voice"
CONVERSATIONS = [spoken.SINGLE, spoken.SHORT, spoken.LONG, spoken.CLONING]
KEPT = ("--use_lora", "--lora_dropout", 0, "--max_steps", 6, "--learning_rate", 3e-3, "--disable_eval", "--num_workers",
        0, "--keep_weight", 1.5, "--keep_every", 2, "--save_steps", 2)


def filled(net):
    """Adapters that change something."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in net.named_parameters():
        if ".lora_" in name:
            parameter.data = 0.2 * torch.randn(parameter.shape, generator=generator)
    return net


@pytest.fixture(scope="module")
def data(tiny, tmp_path_factory):
    return spoken.samples_of(tiny.model, CONVERSATIONS, tmp_path_factory.mktemp("kl"))


@pytest.fixture
def model(tiny):
    net = add_lora(spoken.native(tiny.model), 4, 8, 0.0, "attention+audio_mlp", "base")
    return v2.PackedHiggs(filled(net)).train()


def plain_loop(net, logits_of, samples):
    """(K,) divergences, cell by cell, with disable_adapter() of PEFT. logits_of(sample) -> (R, K, C)."""
    divergences = torch.zeros(8)
    for sample in samples:
        tuned = logits_of(sample)
        with torch.no_grad(), net.disable_adapter():
            base = logits_of(sample)
        for row, targets in enumerate(sample["audio_targets"]):
            for book in np.flatnonzero(targets != IGNORE):
                p, q = base[row, book].softmax(-1), tuned[row, book].softmax(-1)
                divergences[book] = divergences[book] + (p * (p.log() - q.log())).sum()
    return divergences


def assert_plain_divergence(model, logits_of, samples, ids):
    """The packed forward has the value and all gradients of the plain loop."""
    batch, net = collate(samples, ids), model.net
    packed = model(batch, keep=True)
    packed.sum().backward()
    gradients = {name: p.grad for name, p in net.named_parameters() if p.grad is not None}
    net.zero_grad()
    expected = plain_loop(net, logits_of, samples)
    expected.sum().backward()
    cells = batch.counts["audio_targets"]
    assert packed.min() > 1e-3 * cells / 8
    torch.testing.assert_close(packed / cells, expected.detach() / cells, rtol=1e-6, atol=1e-6)
    reached = {name for name, p in net.named_parameters() if p.grad is not None and p.grad.abs().max() > 0}
    assert reached and all(".lora_" in name for name in gradients)      # the base gets no gradient
    for name in reached:
        torch.testing.assert_close(gradients[name] / cells, dict(net.named_parameters())[name].grad / cells,
                                   rtol=1e-4, atol=1e-6)


def test_divergence_equals_a_plain_loop(model, data):
    ids, samples = data

    def logits_of(sample):
        inputs = {name: value for name, value in spoken.native_batch([sample], ids).items() if "labels" not in name}
        return model.base_model(**inputs).logits.view(-1, 8, 1026)[sample["audio_at"]]
    assert_plain_divergence(model, logits_of, samples, ids)


def test_divergence_of_tts_3_equals_a_plain_loop(model3):
    native = higgs3.load(model3)[0]
    model = v3.PackedHiggs3(filled(add_lora(native, 4, 8, 0.0, "all-linear", "base"))).train()
    ids = v3.token_ids(v3.load_tokenizer(model3), native.config)
    codes = [np.random.default_rng(i).integers(0, 1024, (frames, 8)) for i, frames in enumerate((9, 20))]
    samples = [{"number": i, **ids.assemble(np.array([ids.tts, ids.text, 40 + i, ids.audio, ids.audio_placeholder_id]),
                                            np.array([False] * 4 + [True]), [clip])} for i, clip in enumerate(codes)]

    def logits_of(sample):
        prompt = sample["input_ids"][:4], np.zeros(4, bool)
        rows = torch.cat([torch.as_tensor(sample["audio_ids"]), torch.zeros(1, 8, dtype=torch.long)])   # unused row
        return higgs3.forced_logits.__wrapped__(model.base_model, prompt, None, rows)
    assert_plain_divergence(model, logits_of, samples, ids)


def test_spoken_rows_are_the_samples_that_training_would_see(model, data, tmp_path):
    """From saved codes: the codes of the reference come first, only the speech is trained. --auto counts both."""
    ids, (reference, answer) = data[0], (spoken.codes_of(spoken.clip(name, 11)).astype(np.int16) for name in ("a", "b"))
    tokens = np.array([7, ids.audio_placeholder_id, 8, 9])
    prompt = speak.Prompt("", tokens, [reference], None, None)
    args = SimpleNamespace(output_dir=tmp_path, keep="", keep_weight=1, keep_every=1, seed=0, max_tokens_per_batch=0,
                           per_device_train_batch_size=1)
    np.savez(tmp_path / keep.FILE, fingerprint="f", codes_0=answer)
    keeper = object.__new__(keep.Keeper)
    vars(keeper).update(prompts=[prompt], ids=ids, args=args, fingerprint="f")
    keeper.speak(World(device="cpu"), model, contextlib.nullcontext)
    wanted = ids.assemble(np.array([*tokens, ids.audio_placeholder_id]), np.array([False] * 4 + [True]),
                          [reference, answer])
    assert wanted.keys() < keeper.samples[0].keys() and not np.array_equal(reference, answer)
    for name, value in wanted.items():
        assert np.array_equal(keeper.samples[0][name], value), name
    assert (keeper.samples[0]["audio_targets"] != IGNORE).any()
    keeper.settings = SimpleNamespace(max_new_tokens=100)
    assert keeper.longest() == 100 + len(prompt.row(ids)["input_ids"]) > 100 + len(reference)


@pytest.fixture(scope="module")
def voice(tmp_path_factory):
    """A Tiny of launch/voice's base, which speaks, with 8 clips to learn and 5 rows to keep, two with references."""
    root = tmp_path_factory.mktemp("voice")
    for name in ("model", "codec"):
        (root / name).symlink_to(VOICE / name)
    samples = json.loads((VOICE / "held.json").read_text())[:10]
    for sample in samples:
        clip = sample["messages"][2]["content"]
        clip["audio_url"] = str(VOICE / clip["audio_url"])
    (root / "train.json").write_text(json.dumps(samples[:8]))
    asked = [{"messages": sample["messages"][:2]} for sample in samples[:3]]
    asked += [{"messages": [*sample["messages"], {"role": "user", "content": "one two"}]} for sample in samples[8:]]
    (root / "keep.json").write_text(json.dumps(asked))
    return Tiny(root)


@pytest.fixture(scope="module")
def shared(pool, voice, tmp_path_factory):
    """shared(ranks, *flags) -> Run, trained on first use."""
    root, done = tmp_path_factory.mktemp("shared"), {}

    def get(ranks, *flags):
        if (ranks, flags) not in done:
            done[ranks, flags] = train_forked(pool, voice, root / str(len(done)), *KEPT, "--keep",
                                              voice.root / "keep.json", *flags, ranks=ranks)
        return done[ranks, flags]
    return get


ONE = (1, "--per_device_train_batch_size", 2, "--gradient_accumulation_steps", 2)


@pytest.mark.slow
def test_ranks_and_sharding_change_nothing(shared):
    """Packs have 2, 2 and 1 rows: ranks have different numbers of cells, so the global count must divide."""
    alone, sharded = shared(*ONE), shared(2, "--per_device_train_batch_size", 2, "--parallel", "fsdp")
    kl, sharded_kl = alone.metrics("train/keep_kl"), sharded.metrics("train/keep_kl")
    assert list(kl) == [1, 3, 5] and kl[1] < 1e-7 < 1e-3 < kl[3]
    assert sharded_kl == pytest.approx(kl, rel=1e-4, abs=1e-9)
    assert sharded.metrics("train/grad_norm") == pytest.approx(alone.metrics("train/grad_norm"), rel=1e-4)
    for key, tensor in tensors(alone).items():
        torch.testing.assert_close(tensors(sharded)[key], tensor, rtol=1e-3, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("damaged", [False, True])
def test_resume_is_exact(shared, pool, voice, tmp_path, damaged):
    """The base speaks again only if a bit of its saved speech has flipped; that file is renamed."""
    whole = shared(*ONE)
    out = shutil.copytree(whole.output_dir, tmp_path / "out")
    for _, folder in checkpoint.list_checkpoints(out)[1:]:
        shutil.rmtree(folder)
    file, data = out / keep.FILE, bytearray((out / keep.FILE).read_bytes())
    if damaged:
        data[data.index(b"codes_2.npy") + 150] ^= 1      # inside an array
        file.write_bytes(data)
    before = file.stat().st_mtime_ns
    again = train_forked(pool, voice, out, *KEPT, "--keep", voice.root / "keep.json", *ONE[1:])
    assert "resumed from" in again.output and (file.stat().st_mtime_ns == before) == (not damaged)
    assert len(list(out.glob("keep.npz.*"))) == damaged
    assert again.metrics("train/keep_kl") == whole.metrics("train/keep_kl")
    assert all(torch.equal(tensors(whole)[key], tensor) for key, tensor in tensors(again).items())
    if not damaged:     # other rows make another run
        (tmp_path / "other.txt").write_text("nine.\n")
        other = train_forked(pool, voice, out, *KEPT, "--keep", tmp_path / "other.txt", *ONE[1:], ok=False)
        assert other.status and "was made with another --keep" in other.output
