"""A step that imports a library: what the import leaves behind does not keep the step's tensors, as in a real run.

python -m pytest tests/trace/test_imports_in_a_step.py
"""

import gc
import importlib
import weakref

import numpy as np
import pytest
import torch

from memfit.device.hardware.catalogue import find_device
from memfit.job import Shape
from memfit.trace.step import Tracing, trace_job
from tests.planner.test_options import Deep

LIBRARY = """
def meet():
    try:
        raise ValueError
    except ValueError as error:
        kept = error
        assert kept is not None

meet()
NAMES = [[name] for name in range(2000)]
"""
"""The exception keeps the frames that import it, and is itself kept by one of them: trio has such a place."""


@pytest.fixture
def library(tmp_path, monkeypatch):
    """The name of a library that is not imported yet."""
    name = f"library_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(tmp_path)
    return name


class Importing(Deep):
    library: str = ""

    def loss(self, nets, batch):
        held = torch.zeros(1 << 24, device=batch.device)
        importlib.import_module(self.library)
        made = super().loss(nets, batch)
        assert held.numel()
        return made


def test_the_first_trace_is_that_of_the_next_ones(library):
    how = Tracing(device=find_device("t4"))
    first, second = (trace_job(Importing(library=library), Shape(items=4), how) for _ in range(2))
    for name in ("kind", "storage", "operator", "nbytes"):
        assert np.array_equal(getattr(first, name), getattr(second, name)), name


def test_a_real_run_does_not_keep_them_either(library):
    class Tensor:
        pass

    def step():
        held = Tensor()
        importlib.import_module(library)
        return weakref.ref(held)

    assert gc.isenabled()
    assert step()() is None
