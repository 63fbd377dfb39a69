"""cuBLAS's workspaces in a trace: cards on which they alone differ share the trace."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from memfit.device.hardware.catalogue import CUBLAS_WORKSPACE, CUBLAS_WORKSPACE_LARGE, Device
from memfit.events import CATEGORIES, FREE, Trace


def with_workspaces_of(trace: Trace, device: Device) -> Trace:
    """The trace of another card with this one's workspaces. Those whose bytes are no card's stay as they are, and all
    where CUBLAS_WORKSPACE_CONFIG set them.

    A workspace is never freed: what an operator takes within itself is freed at once.
    """
    nbytes = device.cublas_workspace_bytes
    if nbytes is None or trace.is_workspace_configured:
        return trace
    is_workspace = trace.category == CATEGORIES.index("workspace")
    is_workspace &= np.isin(trace.nbytes, (CUBLAS_WORKSPACE, CUBLAS_WORKSPACE_LARGE))
    is_workspace[trace.storage[trace.kind == FREE]] = False
    if (trace.nbytes[is_workspace] == nbytes).all():
        return trace
    return replace(trace, nbytes=np.where(is_workspace, nbytes, trace.nbytes))
