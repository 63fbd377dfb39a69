"""What people estimate a run's memory with, for the same rows as the predictions.

torch's MemTracker runs two iterations on tensors without data; the others take the parameters alone. DeepSpeed's
estimate_zero2_model_states_mem_needs with one GPU and no offload is 4 x P of weights and gradients in half precision
and 16 x P of fp32 copies and Adam's state over the GPUs; Accelerate's estimate-memory gives 4 x the weights' bytes for
training with Adam. Neither counts activations, and neither says that it does.
"""

from __future__ import annotations

from bench.accuracy_parts.loop import Loop, mem_tracker_peak
from memfit.events import ALLOCATE, CATEGORIES, Trace


def parameter_bytes(trace: Trace) -> int:
    """Bytes of the trained parameters, as fp32."""
    made = trace.storage[trace.kind == ALLOCATE]
    return int(trace.nbytes[made][trace.category[made] == CATEGORIES.index("parameters")].sum())


def by_parameters(trace: Trace) -> dict[str, int]:
    """Estimate in bytes by estimator."""
    nbytes = parameter_bytes(trace)
    parameters = nbytes // 4
    return {"parameters_x_16": 16 * parameters, "accelerate": 4 * nbytes, "deepspeed_zero2": 20 * parameters}


def by_mem_tracker(loop: Loop) -> dict[str, int]:
    """The same of MemTracker; empty where it gives none for the net."""
    try:
        return {"mem_tracker": mem_tracker_peak(loop)}
    except Exception:  # its hooks, and a net's own code, may raise anything
        return {}
