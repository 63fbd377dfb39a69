"""Jobs that count their valid units on the device: the step they take is in the trace."""

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from memfit.device.hardware.catalogue import find_device
from memfit.errors import InputError
from memfit.job import Job, Shape
from memfit.trace import doubtful_sizes, step
from memfit.trace.step import Tracing, trace_job
from testing.truth import compare


class PaddedTokens(Job):
    """Labels of padded places are ignored, as Hugging Face's collators make them."""

    unit, longest = "tokens", 24

    def nets(self):
        return {"net": nn.Sequential(nn.Embedding(512, 64), nn.Linear(64, 512))}

    def optimizers(self, nets):
        return {"net": torch.optim.AdamW(nets["net"].parameters(), foreach=False)}

    def batch(self, shape):
        ids = pad_sequence([torch.randint(3, 500, (shape.length,)) for _ in range(shape.items)], batch_first=True)
        return {"ids": ids, "labels": ids.masked_fill(ids == 0, -100)}

    def loss(self, nets, batch):
        scores = nets["net"](batch["ids"]).flatten(0, 1)
        valid = (batch["labels"] != -100).sum()
        return nn.functional.cross_entropy(scores, batch["labels"].flatten(), reduction="sum"), valid


class NothingValid(PaddedTokens):
    def batch(self, shape):
        ids = torch.zeros(shape.items, shape.length, dtype=torch.long)
        return {"ids": ids, "labels": torch.full_like(ids, -100)}


SHAPE = Shape(items=4, length=24)


def test_a_step_over_padded_tokens_has_the_bytes_of_a_real_one():
    traced, _, measured = compare(PaddedTokens, {}, SHAPE, 1)
    assert traced == pytest.approx({phase: peak.without_scratch_bytes for phase, peak in measured.items()}, rel=1e-5)
    state = 2 * sum(parameter.numel() * 4 for parameter in PaddedTokens().nets()["net"].parameters())
    assert traced["save"] > state


@pytest.mark.parametrize("device", ["cpu", "t4"])
def test_made_up_samples_without_a_valid_unit_are_refused(device):
    with pytest.raises(InputError, match="0 valid units in the made-up micro-batch"):
        trace_job(NothingValid(), SHAPE, Tracing(device=find_device(device)))


def test_a_step_that_counts_its_units_is_traced_once(monkeypatch):
    """It asks whether the count is 0, and not for the count, which would have to be assumed."""
    traces, record = [], step._record
    monkeypatch.setattr(step, "_record", lambda *arguments: traces.append(arguments) or record(*arguments))
    monkeypatch.setattr(doubtful_sizes, "_decides", {})
    trace_job(PaddedTokens(), SHAPE, Tracing(device=find_device("t4")))
    assert len(traces) == 1
