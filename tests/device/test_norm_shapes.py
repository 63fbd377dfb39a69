"""Group and layer norms on the virtual device against real ones: outputs, statistics that are kept, and gradients."""

import pytest
import torch
from torch.nn import functional as F

from memfit.device.virtual import norm_shapes
from memfit.device.virtual.virtual_device import virtual_cpu

LAYOUTS = {
    "plain": lambda x: x,
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(2, 3),
}
NORMS = {
    "group norm": (8, lambda x, weight, bias: F.group_norm(x, 4, weight, bias)),
    "layer norm": (6, lambda x, weight, bias: F.layer_norm(x, (6,), weight, bias)),
}


def seen(tensor):
    return tuple(tensor.shape), tensor.stride(), tensor.dtype


def kept_and_gradients(norm, layout, dtype, parameters, device):
    size, call = NORMS[norm]
    x = LAYOUTS[layout](torch.ones(2, 8, 6, 6, dtype=dtype, device=device)).requires_grad_()
    weight = bias = None
    if parameters is not None:
        weight, bias = (torch.ones(size, dtype=parameters, device=device, requires_grad=True) for _ in range(2))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(seen(tensor)) or tensor, lambda x: x):
        out = call(x, weight, bias)
    torch.autograd.backward([out], [torch.ones_like(out)])
    gradients = [each.grad for each in (x, weight, bias) if each is not None]
    return seen(out), kept, [seen(each) for each in gradients]


@pytest.mark.parametrize(
    ("dtype", "parameters"),
    [
        (torch.float32, torch.float32),
        (torch.float32, None),
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float64, torch.float64),
    ],
    ids=str,
)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("norm", NORMS)
def test_norms_keep_and_give_what_real_ones_do(norm, layout, dtype, parameters):
    with virtual_cpu() as virtual:
        predicted = kept_and_gradients(norm, layout, dtype, parameters, virtual.device)
    assert predicted == kept_and_gradients(norm, layout, dtype, parameters, "cpu")


def test_a_card_keeps_statistics_of_layer_norms_in_float32_and_gradients_in_the_inputs_type(gpu):
    _, kept, gradients = kept_and_gradients("layer norm", "plain", torch.bfloat16, torch.bfloat16, "cuda")
    assert [dtype for _, _, dtype in kept].count(torch.float32) == 2
    assert {dtype for _, _, dtype in gradients} == {torch.bfloat16}


def test_a_group_norm_in_half_precision_with_float32_parameters_gives_a_gradient_in_half_precision(gpu):
    _, kept, gradients = kept_and_gradients("group norm", "plain", torch.float16, torch.float32, "cuda")
    assert [dtype for _, _, dtype in gradients] == [torch.float16, torch.float32, torch.float32]
    assert [shape for shape, _, dtype in kept if dtype is torch.float32].count((2, 4)) == 2


def test_what_the_rules_do_not_cover_is_left_to_torch():
    with virtual_cpu() as virtual:
        x, weight = (torch.ones(size, device=virtual.device) for size in ((2, 6), (5,)))
        with pytest.raises(RuntimeError, match="normalized_shape"):
            F.layer_norm(x, (5,), weight)
        assert norm_shapes.run(torch.ops.aten.mul.Tensor, (x, x), [x, x]) is norm_shapes.NOT_HANDLED
