"""pytest tests/apply/test_cast_weights.py: what autocast keeps of weights that ranks hold in parts."""

import numpy as np
import pytest
import torch
from torch import nn

from memfit.device.hardware.catalogue import find_device
from memfit.events import CATEGORIES
from memfit.job import Job, Loss, Shape
from memfit.trace.step import Tracing, trace_job

CARD, WIDTH = find_device("h100"), 512
SEEN: list[bool] = []


class Deep(Job):
    """Linear layers in a list, in bf16."""

    precision = "bf16"
    depth: int = 2

    def nets(self):
        return {"net": nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(self.depth)))}

    def optimizers(self, nets):
        return {"net": torch.optim.SGD(nets["net"].parameters(), lr=0.1)}

    def batch(self, shape):
        return torch.zeros(shape.items, WIDTH)

    def loss(self, nets, batch):
        SEEN.append(torch.is_autocast_cache_enabled())
        return Loss(nets["net"](batch).float().sum(), len(batch))


def temporaries(depth, engine, world):
    """The most bytes of temporaries that casts make in the last forward, with every block recomputed."""
    how = Tracing(device=CARD, engine=engine, world=world, checkpointing={f"net.{i}": "full" for i in range(depth)})
    trace = trace_job(Deep(depth=depth), Shape(items=2), how)
    casts = trace.operator_name[trace.made_by] == trace.names.index("aten._to_copy.default")
    counted = casts & (trace.category == CATEGORIES.index("temporaries"))
    size = np.where(counted, trace.nbytes, 0)[trace.storage]
    live = np.cumsum(size * trace.kind)
    start, end = [(start, end) for name, start, end in trace.phases if name == "train"][-1]
    parts = np.array(trace.parts)[trace.operator_part[trace.operator[start:end]]]
    return int(live[start:end][parts == "forward"].max())


@pytest.mark.parametrize(("engine", "world", "grows"), [("single", 1, True), ("ddp", 2, True), ("fsdp2", 2, False)])
def test_copies_of_weights_in_half_precision_are_kept_only_where_the_weights_are_whole(engine, world, grows):
    SEEN.clear()
    few, many = (temporaries(depth, engine, world) for depth in (4, 16))
    assert set(SEEN) == {grows}
    assert torch.is_autocast_cache_enabled()
    half = 2 * WIDTH * WIDTH
    assert (many - few >= 10 * half) == grows
    assert grows or many - few < half
