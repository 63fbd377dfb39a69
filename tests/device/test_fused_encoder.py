"""Encoder layers and attention in evaluation, whose fused kernels allocate inside of themselves: against real runs."""

import pytest
import torch
from torch import nn

from memfit.device.hardware.catalogue import find_device
from memfit.job import Shape
from memfit.trace.self_test import live_peaks
from memfit.trace.step import Tracing, trace_job
from testing.nets import Small
from testing.truth import compare

WIDTH, LENGTH = 64, 120


class Encoder(Small):
    """Evaluates far more than it trains on, so that what the fused kernels allocate is the peak of validation."""

    norm_first: bool = True
    masked: bool = False
    weights: bool = False

    def nets(self):
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 256, batch_first=True, norm_first=self.norm_first, dropout=0.0)
        return {"net": nn.MultiheadAttention(WIDTH, 4, batch_first=True) if self.weights else layer}

    def batch(self, shape):
        return torch.randn(shape.items, LENGTH, WIDTH)

    def loss(self, nets, batch):
        return self._out(nets["net"], batch).square().sum(), len(batch)

    def validate(self, nets, batch):
        net = nets["net"].eval()
        rows = torch.randn(WIDTH, 8 * len(batch), LENGTH, device=batch.device).permute(1, 2, 0)
        mask = torch.zeros(len(rows), LENGTH, dtype=torch.bool, device=batch.device) if self.masked else None
        return {"loss": self._out(net, rows, mask).sum()}

    def _out(self, net, x, mask=None):
        return net(x, x, x, key_padding_mask=mask)[0] if self.weights else net(x, src_key_padding_mask=mask)


CASES = {
    "norm first": {}, "norm last": {"norm_first": False}, "a mask of keys": {"masked": True},
    "attention with its weights": {"weights": True}, "and a mask": {"weights": True, "masked": True},
}  # fmt: skip


@pytest.mark.parametrize("settings", CASES.values(), ids=CASES)
def test_the_steps_of_the_fused_kernels_have_the_bytes_of_a_real_run(settings):
    traced, _, measured = compare(Encoder, settings, Shape(items=2), 1)
    assert traced == {phase: peak.without_scratch_bytes for phase, peak in measured.items()}
    assert traced["validate"] > traced["train"]


def test_a_card_makes_scores_where_keys_are_masked_and_none_where_its_attention_is_fused():
    items = 2
    how = Tracing(device=find_device("a100-40gb"))
    fused, masked = (
        live_peaks(trace_job(Encoder(masked=mask), Shape(items=items), how))["validate"] for mask in (False, True)
    )
    scores = 8 * items * 4 * LENGTH * LENGTH * 4
    assert scores < masked - fused < 3 * scores
