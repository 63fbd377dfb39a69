"""memfit fits a PyTorch training run into the memory there is.

The names that a job needs (``memfit.Job``, ``memfit.Loss``, …) and the ways to ask from Python. Nothing is imported
before it is used, so that ``import memfit`` costs nothing.
"""

TYPE_CHECKING = False  # not typing's, whose import is most of the time before a signal to memfit is one line
if TYPE_CHECKING:
    from typing import Any

    from memfit.accumulation.guard import guard
    from memfit.device.hardware.catalogue import Device, find_device
    from memfit.engine.fused_projection import FusedColwiseParallel
    from memfit.errors import InputError
    from memfit.events import Trace
    from memfit.footprint import Footprint
    from memfit.geometry import Geometry, split
    from memfit.job import Job, Loss, Losses, Nets, Shape, Turn
    from memfit.loading import load_job
    from memfit.monitoring.epoch_lengths import epoch_lengths
    from memfit.monitoring.step_monitor import watch
    from memfit.plan import Plan, read_plan, write_plan
    from memfit.planner.predict import Prediction, predict
    from memfit.planner.sampler_cost import traced_cost
    from memfit.planner.search.search import Answer, find_plan
    from memfit.trace.step import Tracing, trace_job

_WHERE = {
    "memfit.accumulation.guard": ("guard",),
    "memfit.device.hardware.catalogue": ("Device", "find_device"),
    "memfit.engine.fused_projection": ("FusedColwiseParallel",),
    "memfit.errors": ("InputError",),
    "memfit.events": ("Trace",),
    "memfit.footprint": ("Footprint",),
    "memfit.geometry": ("Geometry", "split"),
    "memfit.job": ("Job", "Loss", "Losses", "Nets", "Shape", "Turn"),
    "memfit.loading": ("load_job",),
    "memfit.monitoring.epoch_lengths": ("epoch_lengths",),
    "memfit.monitoring.step_monitor": ("watch",),
    "memfit.plan": ("Plan", "read_plan", "write_plan"),
    "memfit.planner.sampler_cost": ("traced_cost",),
    "memfit.planner.predict": ("Prediction", "predict"),
    "memfit.planner.search.search": ("Answer", "find_plan"),
    "memfit.trace.step": ("Tracing", "trace_job"),
}
_MODULE_OF = {name: module for module, names in _WHERE.items() for name in names}

__all__ = [
    "Answer", "Device", "Footprint", "FusedColwiseParallel", "Geometry", "InputError", "Job", "Loss", "Losses",
    "Nets", "Plan", "Prediction", "Shape", "Trace", "Tracing", "Turn", "epoch_lengths", "find_device", "find_plan",
    "guard", "load_job", "predict", "read_plan", "split", "trace_job", "traced_cost", "watch", "write_plan",
]  # fmt: skip


_INTEGRATIONS = {
    "accelerate": "accelerate", "deepspeed": "deepspeed", "lightning": "lightning", "transformers": "jobs",
}  # fmt: skip
"""Modules of ``memfit.integrations`` by the name that follows ``memfit.``, and the extra that each needs."""


def __getattr__(name: str) -> "Any":
    from importlib import import_module

    if name in _INTEGRATIONS:
        return _integration(name)
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'memfit' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_MODULE_OF[name]), name)
    return value


def _integration(name: str) -> "Any":
    from importlib import import_module

    try:
        return import_module(f"memfit.integrations.{name}")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != name:
            raise
        from memfit.errors import InputError, install_extra

        write = f"run {install_extra(_INTEGRATIONS[name])}"
        raise InputError(f"memfit.{name}", f"{name} is not installed", write) from error


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
