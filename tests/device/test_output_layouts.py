"""Layouts of what operators give for inputs that are not contiguous, beside a real run.

python -m pytest tests/device/test_output_layouts.py
"""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from memfit.device.hardware.catalogue import find_device
from memfit.device.virtual.fake_mode import VirtualMode
from memfit.job import Job, Shape
from memfit.nested_tensors import tensors_in
from memfit.trace.self_test import live_peaks
from memfit.trace.step import Tracing, trace_job
from testing.truth import compare

TERMS = {
    "mse_loss": lambda x: F.mse_loss(x, torch.ones(x.shape)),
    "mse_loss of one layout": lambda x: F.mse_loss(x, torch.ones_like(x)),
    "smooth_l1_loss": lambda x: F.smooth_l1_loss(x, torch.ones_like(x)),
    "huber_loss": lambda x: F.huber_loss(x, torch.ones_like(x)),
    "bce": lambda x: F.binary_cross_entropy_with_logits(x, torch.ones_like(x)),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:], torch.ones(x.shape[-1], requires_grad=True)).square().sum(),
    "layer_norm, summed": lambda x: F.layer_norm(x, x.shape[-1:]).sum(),
    "group_norm": lambda x: F.group_norm(x, 2).square().sum(),
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True).square().sum(),
    "softmax": lambda x: x.softmax(1).square().sum(),
    "log_softmax": lambda x: x.log_softmax(1).square().sum(),
    "log_softmax, summed": lambda x: x.log_softmax(1).sum(),
    "glu": lambda x: F.glu(x, 1).square().sum(),
    "gelu": lambda x: F.gelu(x).square().sum(),
}
LAYOUTS = {
    "channels last": lambda x: x.transpose(1, -1).contiguous().transpose(1, -1),
    "batch second": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "every second": lambda x: torch.cat([x, x])[::2],
}


class Recorded(TorchDispatchMode):
    """Names of operators, and the strides of what they read and give, without those of dimensions of one."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.namespace == "aten":
            self.calls.append((str(func), strides((args, kwargs or {})), strides(out)))
        return out


def strides(values):
    return [[s for s, n in zip(t.stride(), t.shape, strict=True) if n > 1] for t in tensors_in(values)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(4, 8, 6, 6), (4, 8, 6)], ids=str)
@pytest.mark.parametrize("term", TERMS)
def test_outputs_have_the_layout_that_a_real_run_gives_them(term, shape, layout):
    x = LAYOUTS[layout](torch.randn(shape)).detach().requires_grad_()
    with Recorded() as real:
        TERMS[term](x).backward()
    mode = VirtualMode()
    traced = mode.from_tensor(x.detach(), static_shapes=True).requires_grad_()
    with mode, Recorded() as fake:
        TERMS[term](traced).backward()
    assert fake.calls == real.calls


class Normalised(Job):
    """Batch norm over a sequence whose channels come last, as PatchTST has it."""

    copies: bool = False
    precision: str = "fp32"

    def nets(self):
        return {"first": nn.Linear(16, 32), "norm": nn.BatchNorm1d(32), "last": nn.Linear(32, 8)}

    def optimizers(self, nets):
        return {"sgd": torch.optim.SGD([p for net in nets.values() for p in net.parameters()], lr=0.1)}

    def batch(self, shape):
        return torch.randn(shape.items, 12, 16)

    def loss(self, nets, batch):
        hidden = nets["first"](batch).transpose(1, 2)
        hidden = nets["norm"](hidden.contiguous() if self.copies else hidden).transpose(1, 2)
        return nets["last"](hidden).square().sum(), len(batch)


def test_batch_norm_of_another_layout_takes_what_a_real_run_takes():
    traced, _, measured = compare(Normalised, {}, Shape(items=64), 1)
    assert traced["train"] == measured["train"].without_scratch_bytes


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_cudnn_keeps_the_copy_that_it_normalises(precision):
    """As the copy that the job makes itself."""
    how = Tracing(device=find_device("rtx3090"))
    with_copy, without = (
        live_peaks(trace_job(Normalised(copies=copies, precision=precision), Shape(items=4096), how))
        for copies in (True, False)
    )
    assert with_copy == without
