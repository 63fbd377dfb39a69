"""What people estimate a run's memory with, for the same rows as the predictions.

torch's MemTracker runs two iterations on tensors without data; the others take the weights alone. DeepSpeed's
estimate_zero2_model_states_mem_needs with one GPU and no offload is 4 x P of weights and gradients in half precision
and 16 x P of fp32 copies and Adam's state over the GPUs, with P all parameters; Accelerate's estimate-memory gives 4 x
the weights' bytes for training with Adam. "Parameters x 16" is what people reckon with for Adam: 16 bytes for each
trained parameter, beside the bytes of frozen ones. None of the three counts activations, nor says that it does.
"""

from __future__ import annotations

from bench.accuracy_parts.loop import Loop, mem_tracker_peak
from memfit.events import ALLOCATE, CATEGORIES, Trace

ESTIMATORS = ("mem_tracker", "accelerate", "deepspeed_zero2", "parameters_x_16")
"""Their names."""


def _bytes_of(trace: Trace, category: str) -> int:
    made = trace.storage[trace.kind == ALLOCATE]
    return int(trace.nbytes[made][trace.category[made] == CATEGORIES.index(category)].sum())


def by_parameters(trace: Trace, loop: Loop) -> dict[str, int]:
    """Estimate in bytes by estimator."""
    size = 2 if loop.precision in ("bf16", "fp16") else 4
    trained, frozen = _bytes_of(trace, "parameters"), _bytes_of(trace, "frozen")
    return {
        "parameters_x_16": 16 * (trained // size) + frozen,
        "accelerate": 4 * (trained + frozen),
        "deepspeed_zero2": 20 * ((trained + frozen) // size),
    }


def by_mem_tracker(loop: Loop) -> dict[str, int]:
    """The same of MemTracker; empty where it gives none for the net, and where kernels or an engine are a stand-in."""
    if loop.compiled or loop.deepspeed or loop.fsdp1 or loop.uses_bitsandbytes:
        return {}
    try:
        return {"mem_tracker": mem_tracker_peak(loop)}
    except Exception:  # its hooks, and a net's own code, may raise anything
        return {}
