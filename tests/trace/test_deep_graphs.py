"""Nets whose operators run one after the other in great number.

python -m pytest tests/trace/test_deep_graphs.py
"""

import resource
import subprocess
import sys

import torch
from torch import nn

from memfit.device.hardware.catalogue import find_device
from memfit.job import Job, Shape
from memfit.trace.deep_graphs import room_for_deep_graphs
from memfit.trace.step import Tracing, trace_job


class Recurrent(Job):
    """One layer after the other, in Python."""

    steps: int = 3000

    def nets(self):
        return {"net": nn.Linear(2, 2)}

    def optimizers(self, nets):
        return {"sgd": torch.optim.SGD(nets["net"].parameters(), lr=0.1)}

    def batch(self, shape):
        return torch.randn(shape.items, 2)

    def loss(self, nets, batch):
        for _ in range(self.steps):
            batch = torch.tanh(nets["net"](batch))
        return batch.sum(), len(batch)


def test_a_graph_that_is_deeper_than_the_stack_is_traced():
    """In a process whose stack has an eighth of the usual size, of which the recursion would take more."""
    program = (
        "import resource; resource.setrlimit(resource.RLIMIT_STACK, (256 << 10, resource.RLIM_INFINITY))\n"
        "from tests.trace.test_deep_graphs import trace; trace()"
    )
    hard = resource.getrlimit(resource.RLIMIT_STACK)[1]
    program = program.replace("resource.RLIM_INFINITY", str(hard))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, (done.returncode, done.stderr)


def trace():
    trace_job(Recurrent(), Shape(items=1), Tracing(device=find_device("cpu")))


def test_the_limit_of_the_stack_is_the_old_one_after_a_trace():
    before = resource.getrlimit(resource.RLIMIT_STACK)
    with room_for_deep_graphs():
        assert resource.getrlimit(resource.RLIMIT_STACK)[1] == before[1]
    assert resource.getrlimit(resource.RLIMIT_STACK) == before
