"""4-bit weights of bitsandbytes in the loops of recipes: bytes by arithmetic, and what a graph's node keeps."""

import gc
import weakref

import pytest
import torch
from torch import nn

from bench.accuracy_parts import four_bit_base
from tests.bench.loop_process import peaks

ENVIRONMENT = "litgpt-0.5-bitsandbytes"
GIVEN = {
    "net": "pythia-14m", "kind": "litgpt-lora", "precision": "bf16", "batch": 1, "length": 512,
    "zero_grad": "after_step",
}  # fmt: skip
CODE, SECOND_CODE, MEAN = 4 * 16, 4 * 256, 4
"""Bytes of the table of 4-bit values, of the table of 8-bit ones, which all layers share, and of the scales' mean."""


def quantized_bytes(values: int, *, double: bool) -> int:
    """Bytes of a weight but for tables: half a byte a value, and a float32 each 64; double: a byte each 64, and a
    float32 each 256 of these."""
    scales = -(-values // 64)
    return values // 2 + (scales + 4 * -(-scales // 256) if double else 4 * scales)


@pytest.mark.parametrize("double", [False, True])
def test_a_quantized_layer_s_bytes_are_those_of_the_arithmetic_on_the_cpu(double):
    bitsandbytes = pytest.importorskip("bitsandbytes")
    layer = bitsandbytes.nn.Linear4bit(128, 1000, bias=False, quant_type="nf4", compress_statistics=double).to("cpu")
    nbytes = layer.weight.nbytes + sum(scale.nbytes for scale in four_bit_base.scales(layer))
    assert nbytes == quantized_bytes(128 * 1000, double=double) + CODE + (SECOND_CODE + MEAN if double else 0)


def test_lightning_quantizes_every_linear_layer_and_graph_nodes_keep_their_inputs_with_the_loss():
    own = GIVEN | {"optimizer": "bitsandbytes.PagedAdamW", "iterations": 1}
    plain, single, double, again, shorter = peaks(
        ENVIRONMENT, GIVEN | {"iterations": 1}, own | {"quantize": "nf4"}, own | {"quantize": "nf4-dq"},
        own | {"quantize": "nf4", "iterations": 2}, own | {"quantize": "nf4", "iterations": 2, "later_length": 64},
    )  # fmt: skip
    width, inner, vocabulary, blocks = 128, 512, 50304, 6
    weights = [vocabulary * width] + blocks * [3 * width * width, width * width, inner * width, inner * width]
    saved = [sum(2 * count - quantized_bytes(count, double=twice) for count in weights) for twice in (False, True)]
    assert plain[1] - single[1] == pytest.approx(saved[0], rel=1e-3)
    assert plain[1] - double[1] == pytest.approx(saved[1], rel=1e-3)
    kept = 512 * 2 * (width + blocks * (3 * width + inner))
    assert again[0] - single[0] > 0.7 * kept, "the last batch's inputs are there while the next forward runs"
    assert shorter[0] == single[0], "after a long first batch, short ones never reach its peak"


class Kept(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value):
        ctx.value = value
        return value * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


def test_what_a_node_has_as_an_attribute_lives_as_long_as_the_graph_on_a_real_run():
    """The mechanism of ``MatMul4Bit`` in bitsandbytes 0.42, on torch itself."""
    parameter = nn.Parameter(torch.ones(3))
    value = parameter * 1
    held = weakref.ref(value)
    loss = Kept.apply(value).sum()
    del value
    loss.backward()
    gc.collect()
    assert held() is not None
    del loss
    gc.collect()
    assert held() is None
