"""What torch's kernels refuse, a trace refuses too.

python -m pytest tests/trace/test_operand_types.py
"""

import math
from functools import partial

import pytest
import torch
from torch import nn

from memfit.device.hardware.catalogue import find_device
from memfit.device.virtual.card_rules import CardRules
from memfit.device.virtual.virtual_device import virtual_cpu, virtual_gpu
from memfit.errors import InputError
from memfit.job import Job, Shape
from memfit.trace.step import Tracing, trace_job
from memfit.trace.tracer import Tracer


class Mixed(Job):
    inputs: str = "float32"
    classes: str = "int64"
    pixels: int = 0

    def nets(self):
        return {"net": nn.Linear(8, 4)}

    def optimizers(self, nets):
        return {"sgd": torch.optim.SGD(nets["net"].parameters())}

    def batch(self, shape):
        pixels = (self.pixels,) if self.pixels else ()
        classes = torch.zeros(shape.items, *pixels, dtype=getattr(torch, self.classes))
        return torch.ones(shape.items, *pixels, 8, dtype=getattr(torch, self.inputs)), classes

    def loss(self, nets, batch):
        out = nets["net"](batch[0])
        out = out.transpose(1, 2) if self.pixels else out
        return nn.functional.cross_entropy(out, batch[1], reduction="sum"), len(batch[0])


@pytest.mark.parametrize(
    ("settings", "real", "words"),
    [
        ({"inputs": "float64"}, "same dtype", "a matrix product at .*: float64 times float32"),
        ({"inputs": "bfloat16"}, "same dtype", "a matrix product at .*: bfloat16 times float32"),
        ({"classes": "int32"}, "Long", "a loss over classes at .*test_operand_types.py:.*: its classes are int32"),
        ({"classes": "bool"}, "Long", "its classes are bool"),
        ({"classes": "uint8", "pixels": 3}, "Long", "its classes are uint8"),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "rtx4090"])
def test_types_that_a_real_step_refuses(settings: dict[str, str], real: str, words: str, device: str) -> None:
    job = Mixed(**settings)
    with pytest.raises(RuntimeError, match=real):
        job.loss(job.nets(), job.batch(Shape(items=2)))
    with pytest.raises(InputError, match=words):
        trace_job(job, Shape(items=2), Tracing(device=find_device(device)))


@pytest.mark.parametrize(
    "settings", [{}, {"inputs": "bfloat16", "precision": "bf16"}, {"classes": "uint8"}, {"pixels": 3}]
)
def test_types_that_a_real_step_takes(settings: dict[str, str]) -> None:
    job = Mixed(**settings)
    run = partial(job.loss, job.nets(), job.batch(Shape(items=2)))
    with job.autocast("cpu"):
        assert run()[0].isfinite()
    assert trace_job(job, Shape(items=2), Tracing(device=find_device("cpu"))).phases


def other(*shape):
    return torch.ones(*shape, dtype=torch.bfloat16)


PLACES = torch.arange(3)
COMBINED = {
    "convolution": lambda: nn.functional.conv2d(torch.ones(2, 3, 8, 8), other(4, 3, 3, 3)),
    "convolution of the inputs": lambda: nn.functional.conv1d(other(2, 3, 8), torch.ones(4, 3, 3)),
    "addmm": lambda: torch.addmm(other(3), torch.ones(2, 3), torch.ones(3, 3)),
    "mv": lambda: torch.ones(3, 3) @ other(3),
    "index_put": lambda: torch.ones(5, 3).index_put((PLACES,), other(3, 3)),
    "index_put by assignment": lambda: torch.ones(5, 3).__setitem__(PLACES, other(3, 3)),
    "index_add": lambda: torch.zeros(5, 3).index_add_(0, PLACES, other(3, 3)),
    "index_copy": lambda: torch.zeros(5, 3).index_copy(0, PLACES, other(3, 3)),
    "grid_sampler_2d": lambda: nn.functional.grid_sample(
        torch.ones(1, 2, 4, 4), other(1, 3, 3, 2), align_corners=False
    ),
    "cdist_forward": lambda: torch.cdist(torch.ones(2, 4, 3), other(2, 4, 3)),
    "binary_cross_entropy": lambda: nn.functional.binary_cross_entropy(torch.ones(4), other(4)),
    "nll_loss_forward": lambda: nn.functional.cross_entropy(torch.ones(3, 4), PLACES, weight=other(4)),
    "nll_loss2d_forward": lambda: nn.functional.cross_entropy(torch.ones(1, 4, 3), PLACES[None], weight=other(4)),
    "layer_norm": lambda: nn.functional.layer_norm(torch.ones(2, 4), (4,), other(4), other(4)),
    "group_norm": lambda: nn.functional.group_norm(torch.ones(2, 4, 3), 2, other(4), other(4)),
}
TAKEN = {
    "one number": lambda: torch.ones(5, 3).index_put((torch.ones(5, 3) > 0,), other(())),
    "a sum": lambda: torch.ones(3) + other(3),
    "layer_norm in float32 of bfloat16": lambda: nn.functional.layer_norm(
        other(2, 4), (4,), torch.ones(4), torch.ones(4)
    ),
    "group_norm in float32 of bfloat16": lambda: nn.functional.group_norm(
        other(2, 4, 3), 2, torch.ones(4), torch.ones(4)
    ),
}


@pytest.mark.parametrize("enter", [virtual_cpu, lambda: virtual_gpu(CardRules())], ids=["cpu", "gpu"])
@pytest.mark.parametrize("name", COMBINED)
def test_two_types_that_an_operator_does_not_combine(name: str, enter, monkeypatch) -> None:
    with pytest.raises((RuntimeError, IndexError)):
        COMBINED[name]()
    words = (
        f"{name.split()[0]} at .*test_operand_types.py:.*: its arguments are .* and .*, which torch does not combine"
    )
    with enter() as virtual, torch.device(virtual.device), Tracer(virtual).recording():
        monkeypatch.setitem(globals(), "PLACES", PLACES.to(virtual.device))
        with pytest.raises(InputError, match=words):
            COMBINED[name]()


@pytest.mark.parametrize("name", TAKEN)
def test_two_types_that_an_operator_takes(name: str) -> None:
    real = TAKEN[name]()
    with virtual_cpu() as virtual, Tracer(virtual).recording():
        assert TAKEN[name]().dtype == real.dtype


@pytest.mark.parametrize("name", ["layer_norm", "group_norm"])
def test_norms_of_a_card_read_their_parameters_in_the_type_of_their_inputs(name: str) -> None:
    """cuda/layer_norm_kernel.cu and cuda/group_norm_kernel.cu: ``gamma.const_data_ptr<T>()`` of the inputs' type."""
    with virtual_gpu(CardRules()) as virtual, torch.device(virtual.device), Tracer(virtual).recording():
        with pytest.raises(InputError, match=f"{name} at .*: its arguments are bfloat16 and float32"):
            TAKEN[f"{name} in float32 of bfloat16"]()
        with torch.autocast("cuda", torch.bfloat16):
            assert TAKEN[f"{name} in float32 of bfloat16"]().dtype is torch.float32


WRITTEN = {
    "fill": lambda tensor, number: tensor.clone().fill_(number),
    "masked_fill": lambda tensor, number: tensor.masked_fill(tensor > 0, number),
    "masked_fill in place": lambda tensor, number: tensor.clone().masked_fill_(tensor > 0, number),
    "constant_pad_nd": lambda tensor, number: nn.functional.pad(tensor, (1, 1), value=number),
    "index_fill": lambda tensor, number: tensor.index_fill(0, tensor.new_zeros(1, dtype=torch.int64), number),
    "scatter": lambda tensor, number: tensor.scatter(0, tensor.new_zeros(1, dtype=torch.int64), number),
}


@pytest.mark.parametrize("enter", [virtual_cpu, lambda: virtual_gpu(CardRules())], ids=["cpu", "gpu"])
@pytest.mark.parametrize("name", WRITTEN)
def test_numbers_beyond_the_type_that_they_are_written_to(name: str, enter) -> None:
    """``scores.masked_fill(mask, torch.finfo(torch.float32).min)`` under autocast: a run ends there."""
    least = torch.finfo(torch.float32).min
    taken = ((torch.float16, -65504.0), (torch.float16, -math.inf), (torch.bfloat16, -1e38), (torch.float32, least))
    refused = ((torch.float16, -1e9), (torch.float16, 10**6), (torch.bfloat16, least), (torch.float32, 1e39))
    for dtype, number in refused:
        with pytest.raises(RuntimeError, match="without overflow"):
            WRITTEN[name](torch.ones(4, dtype=dtype), number)
    for dtype, number in taken:
        WRITTEN[name](torch.ones(4, dtype=dtype), number)
    with enter() as virtual, torch.device(virtual.device), Tracer(virtual).recording():
        for dtype, number in taken:
            WRITTEN[name](torch.ones(4, dtype=dtype), number)
        for dtype, number in refused:
            words = f"{name.split()[0]} at .*test_operand_types.py:.* is beyond {dtype}".replace("torch.", "")
            with pytest.raises(InputError, match=words):
                WRITTEN[name](torch.ones(4, dtype=dtype), number)


INDEXED = {
    "read": lambda host, places: host[places],
    "written": lambda host, places: host.__setitem__(places, 1.0),
    "of two dimensions": lambda host, places: host[:, places],
}


@pytest.mark.parametrize("name", INDEXED)
def test_a_tensor_of_the_host_is_not_indexed_by_one_of_the_card(name: str) -> None:
    """aten/src/ATen/native/TensorAdvancedIndexing.cpp: "indices should be either on cpu or on the same device"."""
    with virtual_gpu(CardRules()) as virtual, Tracer(virtual).recording():
        host, card = torch.ones(5, 5), torch.ones(5, 5, device=virtual.device)
        places = torch.zeros(2, dtype=torch.int64, device=virtual.device)
        with pytest.raises(InputError, match=r"an index at .*test_operand_types.py:.*by indices on the card"):
            INDEXED[name](host, places)
        INDEXED[name](card, places)
        INDEXED[name](card, places.cpu())
        INDEXED[name](host, places.cpu())
