"""A micro-batch under a recomputation, estimated from its trace at another size.

python -m pytest tests/planner/test_resized_trace.py
"""

import numpy as np
import pytest
import torch

import memfit
from memfit.device.hardware.catalogue import find_device
from memfit.job import Shape
from memfit.planner.predict import plain_nets
from memfit.planner.search.resized_trace import resized
from memfit.planner.search.traced_job import open_traced_job
from memfit.trace.session import open_session
from memfit.trace.step import Tracing
from testing.nets import JOBS, SHAPES

HOW = Tracing(device=find_device("rtx4090"))
DIT = JOBS["dit"]()
BLOCKS = [path for path, module in plain_nets(DIT)["dit"].named_modules() if "Block" in type(module).__name__]


class Pads(memfit.Job):
    """Runs another operator from four samples on."""

    def nets(self):
        return {"net": torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))}

    def optimizers(self, nets):
        return {"net": torch.optim.SGD(nets["net"].parameters())}

    def batch(self, shape):
        return torch.zeros(shape.items, 8)

    def loss(self, nets, batch):
        x = torch.cat([batch, batch]) if len(batch) > 3 else batch
        return nets["net"](x).sum(), len(batch)


def traces(job, sizes, modes, length):
    """By size: the micro-batch with everything kept, and under the modes."""
    with open_session(job, HOW, Shape(items=sizes[0], length=length)) as session:
        return {
            items: [
                session.micro_batch(Shape(items=items, length=length), some, accumulated=True).trace
                for some in ({}, modes)
            ]
            for items in sizes
        }


@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.parametrize("sizes", [(2, 6), (6, 2)])
def test_it_is_what_a_trace_at_that_size_gives(mode, sizes):
    assert BLOCKS
    first, other = sizes
    at = traces(DIT, sizes, {f"dit.{path}": mode for path in BLOCKS}, SHAPES["dit"][1])
    (kept, recomputed), (kept_there, recomputed_there) = at[first], at[other]
    estimated = resized(recomputed, kept, kept_there, other / first)
    assert estimated is not None
    assert not np.array_equal(recomputed.nbytes, recomputed_there.nbytes)
    for name in ("nbytes", "operator_flops", "operator_bytes"):
        assert np.array_equal(getattr(estimated, name), getattr(recomputed_there, name)), name


def test_a_size_at_which_other_operators_run_does_not_follow():
    at = traces(Pads(), (2, 4), {"net.0": "full"}, None)
    assert resized(at[2][1], at[2][0], at[4][0], 2.0) is None


def test_a_second_size_is_observed_with_one_trace():
    """Beside that which keeps everything, none is made of what recomputes; what is observed is what traces give."""
    shapes = [Shape(items=items, length=SHAPES["dit"][1]) for items in (2, 6)]
    with open_traced_job(DIT, HOW, shapes[0]) as alone:
        expected = alone.observed(shapes[1], accumulated=True)
    with open_traced_job(DIT, HOW, shapes[0]) as traced_job:
        traced_job.observed(shapes[0], accumulated=True)
        calls = []
        trace = traced_job.session.micro_batch
        traced_job.session.micro_batch = lambda *some, **named: calls.append(some) or trace(*some, **named)
        observed = traced_job.observed(shapes[1], accumulated=True)
    assert [modes for _, modes in calls if "offload" not in modes.values()] == [{}]
    for mine, traced in ((observed.blocks, expected.blocks), (observed.parts, expected.parts)):
        for mode in traced:
            assert np.array_equal(mine[mode].kept, traced[mode].kept)
            assert np.array_equal(mine[mode].unit_peak, traced[mode].unit_peak)
            assert np.allclose(mine[mode].seconds, traced[mode].seconds)
