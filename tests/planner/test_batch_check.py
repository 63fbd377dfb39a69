"""pytest tests/planner/test_batch_check.py: batches that do not grow with the items asked for."""

import pytest
import torch
from torch import nn

import memfit
from memfit.device.hardware.catalogue import find_device, with_memory
from memfit.errors import InputError
from memfit.job import Shape
from memfit.planner.batch_check import check_batch
from memfit.planner.predict import predict
from memfit.planner.request import PlanRequest
from memfit.planner.search.search import find_plan


class AlwaysFour(memfit.Job):
    def nets(self):
        return {"net": nn.Linear(8, 2)}

    def optimizers(self, nets):
        return {"sgd": torch.optim.SGD(nets["net"].parameters())}

    def batch(self, shape):
        return {"x": torch.randn(4, 8), "scale": torch.tensor(2.0)}

    def loss(self, nets, batch):
        return nets["net"](batch["x"]).square().sum(), len(batch["x"])


class Graph:
    """A batch that moves as a whole, as PyG's Data."""

    def to(self, device):
        return self


def grows_in_eights(shape):
    return torch.randn(-(-shape.items // 8) * 8, 8)


def beside_a_graph(shape):
    return {"graph": Graph(), "scale": torch.tensor(2.0)}


def by_a_number(shape):
    return {"x": torch.randn(4, 8), "copies": shape.items}


def cannot(shape):
    raise ValueError("no batch of one item")


def test_a_batch_that_ignores_the_items_is_refused_by_predict_and_plan():
    words = r"AlwaysFour.batch\(\): its tensors have the same sizes for 64 items as for 1: 4x8, a scalar; write batch"
    device = with_memory(find_device("cpu"), 1 << 30)
    with pytest.raises(InputError, match=words):
        predict(AlwaysFour(), "always four", Shape(items=8), device)
    with pytest.raises(InputError, match=words):
        find_plan(AlwaysFour(), PlanRequest(name="always four", global_batch=64, device=device))
    assert predict(AlwaysFour(), "always four", Shape(items=1), device).footprint.fits


@pytest.mark.parametrize("batch", [grows_in_eights, beside_a_graph, by_a_number, cannot])
def test_other_batches_are_not(batch):
    job = AlwaysFour()
    job.batch = batch
    check_batch(job, Shape(items=8))
