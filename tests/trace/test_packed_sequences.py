"""Recurrent nets over packed sequences in a job, beside a real run.

python -m pytest tests/trace/test_packed_sequences.py
"""

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from memfit.device.hardware.catalogue import find_device
from memfit.job import Job, Loss, Shape
from memfit.trace.step import Tracing, trace_job
from testing.truth import compare

ITEMS, LENGTH = 4, 9
HOST_BYTES = 8 * (ITEMS + LENGTH)
"""Lengths and sizes of steps, which are on the host and not in a trace."""


class Packed(Job):
    kind: str = "LSTM"
    batch_first: bool = True
    enforce_sorted: bool = False
    total_length: int | None = None

    def nets(self):
        kind = getattr(nn, self.kind)
        return {"net": kind(8, 16, 2, batch_first=self.batch_first, bidirectional=True), "head": nn.Linear(32, 3)}

    def optimizers(self, nets):
        return {"sgd": torch.optim.SGD([p for net in nets.values() for p in net.parameters()], lr=0.1)}

    def batch(self, shape):
        x = torch.randn(shape.items, shape.length, 8)
        return {"x": x if self.batch_first else x.transpose(0, 1), "lengths": torch.full((shape.items,), shape.length)}

    def loss(self, nets, batch):
        packed = pack_padded_sequence(batch["x"], batch["lengths"].cpu(), self.batch_first, self.enforce_sorted)
        out, lengths = pad_packed_sequence(nets["net"](packed)[0], self.batch_first, 0.0, self.total_length)
        assert out.shape[:2] == (batch["x"].shape[:2] if self.total_length is None else (ITEMS, self.total_length))
        assert lengths.shape == (ITEMS,)
        return Loss(nets["head"](out).square().sum(), ITEMS)


@pytest.mark.parametrize(
    "settings",
    [{}, {"kind": "GRU", "batch_first": False}, {"enforce_sorted": True}, {"kind": "RNN", "total_length": 12}],
    ids=str,
)
def test_packed_sequences_take_what_a_real_run_takes_where_all_are_the_longest(settings):
    traced, _, measured = compare(Packed, settings, Shape(items=ITEMS, length=LENGTH), 1)
    assert traced["save"] == measured["save"].without_scratch_bytes
    assert 0 <= measured["train"].without_scratch_bytes - traced["train"] <= HOST_BYTES


def test_a_trace_says_that_all_sequences_were_taken_to_be_the_longest():
    trace = trace_job(Packed(), Shape(items=ITEMS, length=LENGTH), Tracing(device=find_device("rtx3090")))
    said = [line for line in trace.assumed if "pack_padded_sequence" in line]
    assert len(said) == 1
    assert f"taken to find all {ITEMS * LENGTH}" in said[0]
