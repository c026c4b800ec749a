"""Adapters: their layers and precision; plain PEFT and transformers read the saved files."""
import pytest
import torch
from peft import PeftModel
from peft.tuners.lora import Linear
from safetensors.torch import load_file, save_file
from transformers import HiggsAudioV2ForConditionalGeneration

from core import adapters, tensor_io
from core.cli import UserError
from core.dist import World
from speech import v2
from speech.weights import add_lora
from tests.helpers import spoken

ATTENTION = {f"self_attn.{p}_proj" for p in "qkvo"}
AUDIO = {f"audio_mlp.{p}_proj" for p in ("gate", "up", "down")}
TEXT = {f"mlp.{p}_proj" for p in ("gate", "up", "down")}


def base(tiny, dtype=torch.float32):
    return HiggsAudioV2ForConditionalGeneration.from_pretrained(tiny.model, use_text_head=True, dtype=dtype).eval()


def adapted(tiny, rank=4, alpha=8, targets="attention+audio_mlp", seed=0):
    """A base with adapters that change its output; new adapters have B = 0."""
    torch.manual_seed(seed)
    net = add_lora(base(tiny), rank, alpha, 0.0, targets, "owner/base").eval()
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.05)
    return net


def with_adapter(net):
    """Names of the modules with an adapter."""
    return {name for name, module in net.get_base_model().named_modules() if hasattr(module, "lora_A")}


@pytest.mark.parametrize("targets, expected", [
    ("attention+audio_mlp", ATTENTION | AUDIO), ("all-linear", ATTENTION | AUDIO | TEXT),
    ("mlp.up_proj", {"mlp.up_proj"})])
def test_targets_are_exactly_these_layers(tiny, targets, expected):
    net = add_lora(base(tiny), 4, 8, 0.0, targets, "base")
    assert with_adapter(net) == {f"model.layers.{i}.{name}" for i in range(2) for name in expected}
    trainable = [n for n, p in net.named_parameters() if p.requires_grad]
    assert len(trainable) == 2 * 2 * len(expected) and all("lora_" in n for n in trainable)
    layer = net.get_base_model().get_submodule(sorted(with_adapter(net))[0])
    assert layer.r["default"] == 4 and layer.scaling["default"] == 2.0


@pytest.mark.parametrize("targets, named", [("q_proj,audio_attn.q_proj", "'audio_attn.q_proj'"), ("", "''")])
def test_target_that_matches_nothing_is_named(tiny, targets, named):
    with pytest.raises(UserError, match=f"{named} matches no linear layer; use all-linear or out of: "):
        add_lora(base(tiny), 4, 8, 0.0, targets, "base")


@pytest.mark.parametrize("dropout", [0.0, 0.25])
@pytest.mark.parametrize("shape", [(7, 48), (2, 3, 48), (0, 48)])
@pytest.mark.parametrize("bf16", [False, True])
def test_the_adding_layer_equals_pefts_own_forward(shape, bf16, dropout):
    """Outputs and gradients; the layer has another rank and scale than its neighbour."""
    torch.manual_seed(0)
    holder = torch.nn.ModuleDict({name: torch.nn.Linear(48, 32, bias=name == "k") for name in "qk"})
    net = adapters.add_lora(holder, [holder], 4, 12, dropout, "q,k", "base", task_type=None,
                            rank_pattern={"k": 2}, alpha_pattern={"k": 5})
    x, grad = torch.randn(shape), torch.randn(*shape[:-1], 32)
    for name in "qk":
        layer = net.base_model.model[name].train()
        weights = [half["default"].weight for half in (layer.lora_A, layer.lora_B)]
        torch.nn.init.normal_(weights[1])
        layer.base_layer.to(torch.bfloat16 if bf16 else torch.float32)

        def run(layer=layer, weights=weights):
            torch.manual_seed(1)
            inputs = x.clone().requires_grad_()
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                out = layer(inputs)
            return [out, *torch.autograd.grad(out, [inputs, *weights], grad.to(out.dtype))]
        assert type(layer) is adapters.AddingLinear
        actual = run()
        with net.disable_adapter(), torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            assert torch.equal(layer(x), layer.base_layer(x))
        layer.__class__ = Linear
        for tensor, wanted in zip(actual, run(), strict=True):
            largest = max([1.0, *wanted.abs().flatten().tolist()])
            torch.testing.assert_close(tensor, wanted, rtol=0, atol=(0.02 if bf16 else 1e-6) * largest)


def save(net, folder):
    """Write the adapter files like the trainer."""
    folder.mkdir(exist_ok=True)
    weights = adapters.adapter_weights(net)
    alone = World(device=torch.device("cpu"))
    for name, write in tensor_io.stage(alone, "adapter_model", weights).items():
        write(folder / name)
    net.peft_config["default"].save_pretrained(folder)


@pytest.fixture(scope="module")
def saved(tiny, tmp_path_factory):
    """(adapter folder, the model that was saved)."""
    folder, net = tmp_path_factory.mktemp("adapter"), adapted(tiny)
    v2.PackedHiggs(net)      # the trainer saves a wrapped model
    save(net, folder)
    return folder, net


def test_saved_adapter_loads_in_plain_peft(tiny, saved, tmp_path):
    data = spoken.inputs_of(tiny.model, [spoken.CLONING, spoken.MULTI_TURN], tmp_path / "table")
    folder, net = saved
    plain = PeftModel.from_pretrained(base(tiny), folder).eval()
    torch.testing.assert_close(spoken.logits(plain, data), spoken.logits(net, data), rtol=1e-5, atol=1e-5)
    differs = (spoken.logits(base(tiny), data) - spoken.logits(net, data)).abs().max()
    assert differs > 0.05       # else this test could pass without an adapter


@pytest.mark.parametrize("other", [{}, {"weight": torch.ones(4, 64)}], ids=["missing", "shape"])
def test_adapter_file_that_does_not_fit_is_refused(tiny, saved, tmp_path, other):
    save(saved[1], tmp_path)
    file, name = tmp_path / "adapter_model.safetensors", "base_model.model.model.layers.1.self_attn.k_proj.lora_A"
    state = load_file(file)
    del state[f"{name}.weight"]
    save_file(state | {f"{name}.{key}": value for key, value in other.items()}, file)
    with pytest.raises(UserError, match=f"{tmp_path}.*{name}"):
        adapters.load_adapters(adapted(tiny), tmp_path)
