"""Number of kernels that one eager layer launches, forward and backward; each costs the host about 60 us.

A CPU counts the operators on fake tensors, with the GPU kernels as one each. The difference of four and two layers
leaves out the rest of the model. A count may only fall.
"""
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from core import memory
from distill import plan as chat_plan
from speech import plan as speech_plan
from tests.distill.test_plan import built
from tests.helpers.small_speech import small_model

# operators that launch nothing: they make views or unwritten memory
FREE = {"view", "_unsafe_view", "t", "transpose", "expand", "slice", "split", "split_with_sizes", "select", "unsqueeze",
        "squeeze", "alias", "detach", "empty", "empty_like", "new_empty", "as_strided", "permute", "unbind", "reshape",
        "empty_strided", "new_empty_strided", "lift_fresh", "device"}
LAUNCHES = {"V2": 222, "V2, all linear": 312, "chats": 235}        # of a layer


class Launches(TorchDispatchMode):
    """count: operators that launch a kernel."""
    count = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.count += op.overloadpacket.__name__ not in FREE
        return op(*args, **(kwargs or {}))


def launches(step, pack):
    """Launches of a layer, forward and backward."""
    counts = []
    for count in (2, 4):
        live = Launches()
        with FakeTensorMode(allow_non_fake_inputs=True):
            model = memory.fake_copy(step.model)
            for layers in model.modules():
                if isinstance(layers, torch.nn.ModuleList):
                    del layers[count:]
            with live, memory.gpu_kernels(live, step.kernels):
                with torch.autocast("cpu", torch.bfloat16):
                    loss = step.loss(model, *pack)
                loss.backward()
        counts.append(live.count)
    return (counts[1] - counts[0]) / 2


@pytest.mark.parametrize("name", LAUNCHES)
def test_a_layer_launches_no_more_kernels_than_it_did(name):
    if name == "chats":
        step, pack = chat_plan.step_of(built("qwen", True, True, False, None)[0]), (600, 480)
    else:
        targets = "all-linear" if "all" in name else "attention"
        step = speech_plan.step_of(small_model(targets, torch.bfloat16, None)[1])
        pack = 160, 360, 120, 100
    assert launches(step, pack) <= LAUNCHES[name]
