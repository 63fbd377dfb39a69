"""torchao's optimizers and quantized weights: traced, and held against real runs on the CPU, to the byte."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from memfit import Job
from memfit.device.hardware.catalogue import find_device
from memfit.events import CATEGORIES
from memfit.job import Shape
from memfit.trace.self_test import live_peaks
from memfit.trace.step import Tracing, trace_job
from testing.truth import compare

pytest.importorskip("torchao")


@dataclass(kw_only=True)
class Quantized(Job):
    """A small net under an optimizer of torchao, or with a frozen quantized layer under LoRA."""

    optimizer: str = "AdamW8bit"
    base: str = ""
    bf16_weights: bool = False

    def nets(self):
        kind = torch.bfloat16 if self.bf16_weights else torch.float32
        net = nn.Sequential(nn.Linear(256, 512, dtype=kind), nn.GELU(), nn.Linear(512, 256, dtype=kind))
        return {"net": net if not self.base else with_frozen_base(net, self.base)}

    def optimizers(self, nets):
        import torchao.optim

        trained = [p for p in nets["net"].parameters() if p.requires_grad]
        kind = getattr(torchao.optim, self.optimizer, None) or getattr(torch.optim, self.optimizer)
        return {"adamw": kind(trained, lr=1e-3)}

    def batch(self, shape):
        return torch.zeros(shape.items, 256, dtype=torch.bfloat16 if self.bf16_weights else torch.float32)

    def loss(self, nets, batch):
        return nets["net"](batch).float().square().sum(), len(batch)


class Adapted(nn.Module):
    """A frozen linear layer with LoRA."""

    def __init__(self, frozen):
        super().__init__()
        self.frozen = frozen
        kind = torch.bfloat16 if frozen.weight.dtype is torch.bfloat16 else torch.float32
        self.down = nn.Linear(frozen.in_features, 8, bias=False, dtype=kind)
        self.up = nn.Linear(8, frozen.out_features, bias=False, dtype=kind)

    def forward(self, x):
        return self.frozen(x) + self.up(self.down(x))


class FrozenNF4(nn.Module):
    """A linear layer whose weight is NF4, as torchtune's QLoRA has it."""

    def __init__(self, layer):
        super().__init__()
        from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.weight = nn.Parameter(to_nf4(layer.weight.detach()), requires_grad=False)

    def forward(self, x):
        from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import linear_nf4

        return linear_nf4(x, self.weight)


def with_frozen_base(net, base):
    from torchao import quantization

    net.requires_grad_(False)
    if base == "nf4":
        return nn.Sequential(Adapted(FrozenNF4(net[0])), net[1], Adapted(FrozenNF4(net[2])))
    quantization.quantize_(net, getattr(quantization, base)())
    return nn.Sequential(Adapted(net[0]), net[1], Adapted(net[2]))


WRAPPING = frozenset({"aten::copy_", "aten::lerp", "aten::_to_copy", "aten::mm", "aten::t", "aten::linear"})
"""What torchao's classes carry out by other operators."""


@pytest.fixture
def eager():
    """torchao's steps as they are written: without a card, torch has no compiler for them."""
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit", "AdamWFp8", "Adam8bit"])
@pytest.mark.parametrize("bf16_weights", [False, True])
def test_an_optimizer_of_torchao_to_the_byte_on_the_cpu(eager, name, bf16_weights):
    settings = {"optimizer": name, "bf16_weights": bf16_weights}
    traced, with_scratch, measured = compare(Quantized, settings, Shape(items=8, length=None), 2, WRAPPING)
    assert traced == {phase: peak.without_scratch_bytes for phase, peak in measured.items()}
    assert with_scratch["train"] == pytest.approx(measured["train"].allocated_bytes, rel=0.02)


@pytest.mark.parametrize("base", ["Int8WeightOnlyConfig", "nf4"])
def test_a_frozen_base_of_torchao_under_lora_to_the_byte_on_the_cpu(eager, base):
    settings = {"optimizer": "AdamW", "base": base, "bf16_weights": base == "nf4"}
    traced, _, measured = compare(Quantized, settings, Shape(items=8, length=None), 2, WRAPPING)
    assert traced == {phase: peak.without_scratch_bytes for phase, peak in measured.items()}


@pytest.mark.parametrize(("name", "bits"), [("AdamW8bit", 8), ("AdamW4bit", 4), ("AdamWFp8", 8)])
def test_the_state_on_a_card_has_its_codes_scales_and_tables(name, bits):
    trace = trace_job(Quantized(optimizer=name), Shape(items=8, length=None), Tracing(device=find_device("rtx4090")))
    state = trace.nbytes[trace.category == CATEGORIES.index("optimizer")]
    weights, block = 2 * 256 * 512, 128 if bits == 4 else 256
    assert int(state.sum()) >= 2 * (weights * bits // 8 + weights // block * 4)


@pytest.mark.parametrize(("name", "element_bytes"), [("AdamW8bit", 8), ("AdamW4bit", 24)])
def test_a_compiled_step_on_a_card_takes_the_buffers_between_its_kernels(name, element_bytes):
    """Scales are maxima over blocks, which a second kernel divides by: a float32 for each element and moment stays
    between the two, and in 4 bits the unpacked code, in int64. Eager code takes 29 bytes an element and more."""
    trace = trace_job(Quantized(optimizer=name), Shape(items=8, length=None), Tracing(device=find_device("rtx4090")))
    held = {
        kind: int(trace.nbytes[trace.category == CATEGORIES.index(kind)].sum()) for kind in ("parameters", "optimizer")
    }
    workspaces = 2 * find_device("rtx4090").cublas_workspace_bytes
    beside = live_peaks(trace)["train"] - 2 * held["parameters"] - held["optimizer"] - workspaces
    assert element_bytes < beside / (256 * 512) < element_bytes + 1
    assert "not validated" in trace.assumed[0]
    assert trace.net_kind.startswith("compiled ")
