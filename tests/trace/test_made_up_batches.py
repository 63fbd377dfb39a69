"""A made-up batch lies on the device, whatever the job makes it of, as the batches of a run do.

python -m pytest tests/trace/test_made_up_batches.py
"""

import numpy as np
import pytest
import torch
from torch import nn

from memfit.device.hardware.catalogue import find_device
from memfit.errors import InputError
from memfit.job import Job, Loss, Shape
from memfit.planner.predict import predict
from memfit.train.loop.validation_data import _fetch

MEANS = torch.full((256,), 0.5)


class Made(Job):
    """A batch of factories alone, and a validation with a batch of its own."""

    def nets(self):
        return {"net": nn.Linear(256, 256)}

    def optimizers(self, nets):
        return {"net": torch.optim.AdamW(nets["net"].parameters())}

    def batch(self, shape):
        return {"x": torch.zeros(shape.items, 256), "more": [torch.zeros(shape.items, 256)]}

    def validation_batch(self, shape):
        return self.batch(Shape(items=2 * shape.items))

    def loss(self, nets, batch):
        return Loss((nets["net"](batch["x"]) - batch["more"][0]).square().mean(1).sum(), len(batch["x"]))

    def validate(self, nets, batch):
        return {"loss": self.loss(nets, batch)[0]}


class OfConstants(Made):
    def batch(self, shape):
        return {"x": torch.zeros(shape.items, 256), "more": [torch.stack([MEANS] * shape.items)]}


class OfArrays(Made):
    def batch(self, shape):
        x = torch.from_numpy(np.zeros((shape.items, 256), np.float32))
        return {"x": x, "more": [torch.zeros(shape.items, 256)]}


class Sample:
    """Moved by its own method alone."""

    def __init__(self, value):
        self.value = value

    def to(self, device):
        return Sample(self.value.to(device))


class OfObjects(Made):
    def batch(self, shape):
        return {"x": torch.zeros(shape.items, 256), "more": [Sample(torch.stack([MEANS] * shape.items))]}

    def loss(self, nets, batch):
        return super().loss(nets, {**batch, "more": [batch["more"][0].value]})


class OnTheHost(Made):
    """Validates on a whole video, which waits on the host."""

    def validation_on_host(self):
        return ("video",)

    def validation_batch(self, shape):
        return {**super().validation_batch(shape), "video": torch.zeros(4096, 256, device="cpu")}


@pytest.mark.parametrize("kind", [OfConstants, OfArrays, OfObjects, OnTheHost])
def test_what_a_job_makes_elsewhere_is_moved(kind):
    card = find_device("rtx4090")
    made, factories = (predict(job(), "made", Shape(items=64), card).footprint.phases for job in (kind, Made))
    for phase in ("train", "validate"):
        assert made[phase].allocated_bytes == factories[phase].allocated_bytes


def test_what_stays_on_the_host_is_a_key_of_the_batch():
    class Elsewhere(OnTheHost):
        def validation_on_host(self):
            return ("film",)

    with pytest.raises(InputError, match=r"Elsewhere\.validation_on_host\(\): 'film'"):
        predict(Elsewhere(), "made", Shape(items=64), find_device("rtx4090"))


@pytest.mark.parametrize("job", [OnTheHost(), OfArrays()])
def test_a_run_moves_what_a_trace_moves(job):
    """The meta device stands for a card."""
    card = torch.device("meta")
    sample = job.validation_batch(Shape(items=2))
    job.validation_collate = lambda samples: samples[0]
    fetch = _fetch(job, [sample], range(1), card)
    batch = fetch()
    assert {name: value.device.type for name, value in batch.items() if torch.is_tensor(value)} == {
        name: "cpu" if name in job.validation_on_host() else "meta" for name in batch if name != "more"
    }
    assert batch["more"][0].device == card
