"""Requests that may fail although the step goes on: workspaces of cuDNN's convolutions.

Where a plan's workspace does not fit, PyTorch takes the next plan (``try_configs`` and ``try_plans`` in
ATen/native/cudnn/Conv_v8.cpp, ``try_all`` in Conv_v7.cpp): cuDNN has some that need less or none. The allocator's cache
has been released by then. What the next plan takes is not known, and counts as nothing.

Which plan cuDNN measures as the fastest cannot be known without the card. Some plain convolution nets read as if each
of these workspaces were twice as large (``bench/convolution_workspaces.py``), others with such convolutions do not: the
interval of a prediction holds both.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from memfit.events import CATEGORIES, Trace

OPERATOR = "aten.convolution_backward.default"
"""The operator that a workspace is modelled for, see ``memfit.device.virtual.workspace``."""


def optional_storages(trace: Trace) -> frozenset[int]:
    """The storages of a trace that are such workspaces."""
    if OPERATOR not in trace.names:
        return frozenset()
    workspaces = np.flatnonzero(trace.category == CATEGORIES.index("workspace"))
    made_by = trace.operator_name[trace.made_by[workspaces]]
    return frozenset(workspaces[made_by == trace.names.index(OPERATOR)].tolist())


def with_double_workspaces(trace: Trace) -> Trace:
    """The trace with each of these workspaces twice as large; the trace itself where it has none."""
    workspaces = sorted(optional_storages(trace))
    if not workspaces:
        return trace
    nbytes = trace.nbytes.copy()
    nbytes[workspaces] *= 2
    return replace(trace, nbytes=nbytes)
