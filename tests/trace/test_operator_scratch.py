"""Scratch that is measured: calls that this machine's memory does not hold are not run, and the trace says so.

python -m pytest tests/trace/test_operator_scratch.py
"""

import json
import subprocess
import sys

import pytest
import torch
from torch import nn

from memfit.device.hardware.catalogue import find_device
from memfit.errors import InputError
from memfit.job import Shape
from memfit.trace import operator_scratch
from memfit.trace.step import Tracing, trace_job
from testing.linear_layer import LinearLayer

CPU = find_device("cpu")
MANY = 2**33
"""Items whose tensors of this job take 256 GiB each."""


class Recurrent(LinearLayer):
    def nets(self):
        return {"net": nn.LSTM(8, 8, batch_first=True)}

    def batch(self, shape):
        return {"x": torch.zeros(shape.items, 4, 8)}

    def loss(self, nets, batch):
        return nets["net"](batch["x"])[0].square().sum(), len(batch["x"])


def test_a_step_larger_than_this_machine_is_traced_and_its_scratch_called_unknown():
    trace = trace_job(LinearLayer(), Shape(items=MANY), Tracing(device=CPU))
    assert trace.nbytes.max() == MANY * 8 * 4
    assert "too large to run on this machine" in "".join(trace.assumed)
    small = trace_job(LinearLayer(), Shape(items=2), Tracing(device=CPU))
    assert not small.assumed


def test_a_recurrent_layer_larger_than_this_machine_is_refused_in_one_line():
    with pytest.raises(InputError, match="free memory does not hold the call"):
        trace_job(Recurrent(), Shape(items=MANY), Tracing(device=CPU))


def test_results_count_where_arguments_are_small():
    table, rows = [[1, 1 << 20], [1 << 20, 1], "float32"], [[1 << 30], [1], "int64"]
    key = json.dumps(["aten.embedding.default", [{"tensor": table}, {"tensor": rows}], {}])
    assert not operator_scratch.fits_here(key)
    few = json.dumps(["aten.embedding.default", [{"tensor": table}, {"tensor": [[4], [1], "int64"]}], {}])
    assert operator_scratch.fits_here(few)


def test_memory_that_a_limit_leaves_is_what_is_available():
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_DATA, (1 << 30, -1)); "
        "from memfit.device.hardware.process_limits import available_bytes; print(available_bytes())"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert 0 < int(out) < 1 << 30
