"""python -m pytest tests/trace/test_columns.py"""

import numpy as np
import torch

from memfit.device.virtual.virtual_device import virtual_cpu
from memfit.trace import columns
from memfit.trace.tracer import Tracer


def test_what_is_freed_while_a_trace_is_made_is_in_none_of_its_columns(monkeypatch):
    make = np.array
    with virtual_cpu() as virtual:
        tracer = Tracer(virtual)
        with tracer.recording(), virtual.device:
            held = [torch.empty(4), torch.empty(8)]
            before = len(tracer.kind)

            def array(values, kind):
                made = make(values, kind)
                if kind is np.int8:
                    held.clear()  # as a collection of garbage does at any time
                return made

            monkeypatch.setattr(columns.np, "array", array)
            trace = columns.as_trace(tracer)
            monkeypatch.undo()
            assert len(tracer.kind) == before + 2
    assert len(trace.kind) == len(trace.storage) == len(trace.operator) == before
