"""A plan's choices of its engine, in the words of the tools that carry it.

Formats: DeepSpeed 0.19 (``zero_optimization``), Accelerate 1 (``deepspeed_config``, ``fsdp_config``), Transformers
5 (``fsdp_config``) and torchtitan 0.3 (``training``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memfit.engine.capabilities import CAPABILITIES, Capabilities
from memfit.mesh import MeshShape
from memfit.plan import Plan

_ZERO = {
    "reduce_bucket_size": "reduce_bucket_size",
    "allgather_bucket_size": "allgather_bucket_size",
    "overlap_comm": "overlap_comm",
    "prefetch_bucket_size": "stage3_prefetch_bucket_size",
    "param_persistence_threshold": "stage3_param_persistence_threshold",
    "max_live_parameters": "stage3_max_live_parameters",
}
"""Keys of ``zero_optimization`` by the choice."""
_OFFLOADS = ("offload_optimizer", "offload_param")
SAYS: Mapping[str, tuple[str, ...]] = {
    "deepspeed": (*_ZERO, *_OFFLOADS),
    "accelerate": (*_OFFLOADS, "cpu_offload"),
    "transformers": (*_ZERO, *_OFFLOADS, "cpu_offload"),
    "torchtitan": ("cpu_offload", "half_gather", "sequence_parallel", "schedule"),
}
"""Choices that a tool's file has; ``torchrun`` starts memfit, which reads the plan."""


def zero_choices(plan: Plan) -> dict[str, Any]:
    """What ``zero_optimization`` says of the choices of a plan that DeepSpeed carries."""
    choices = plan.engine_choices if _is_deepspeed(plan) else {}
    own: dict[str, Any] = {_ZERO[name]: value for name, value in choices.items() if name in _ZERO}
    return own | {name: {"device": "cpu"} for name in _OFFLOADS if choices.get(name)}


_SCHEDULES = {
    "1f1b": "1F1B", "gpipe": "GPipe", "interleaved_1f1b": "Interleaved1F1B",
    "interleaved_zero_bubble": "InterleavedZeroBubble",
}  # fmt: skip
"""torch's names of schedules, by memfit's."""


def titan_choices(plan: Plan, mesh: MeshShape) -> dict[str, Any]:
    """Options of torchtitan for the choices of a plan's engine. torchtitan divides tokens over ``tp`` ranks unless it
    is told not to, and gathers in bfloat16 where the plan does."""
    choices, options = plan.engine_choices, dict[str, Any]()
    if choices.get("cpu_offload"):
        options["training.enable_cpu_offload"] = True
    if mesh.tp > 1:
        options["parallelism.enable_sequence_parallel"] = bool(choices.get("sequence_parallel"))
    schedule = str(choices.get("schedule", "1f1b"))
    if mesh.pp > 1 and schedule in _SCHEDULES:
        options["parallelism.pipeline_parallel_schedule"] = _SCHEDULES[schedule]
    return options


def steps_on_host(plan: Plan) -> bool:
    """Whether DeepSpeed steps on the host, where it takes torch's optimizers only when told so."""
    return bool(_is_deepspeed(plan) and plan.engine_choices.get("offload_optimizer"))


def _is_deepspeed(plan: Plan) -> bool:
    """False for an engine that is not known, which a plan of any file may name."""
    return CAPABILITIES.get(plan.engine, Capabilities()).is_deepspeed


def offload_device(plan: Plan, name: str) -> str:
    """``cpu`` or ``none``, as Accelerate writes it."""
    return "cpu" if plan.engine_choices.get(name) else "none"


def left_out_choices(plan: Plan, to: str) -> dict[str, str]:
    """By name, choices that a tool's file cannot say."""
    says = SAYS.get(to, ()) if to != "torchrun" else tuple(plan.engine_choices)
    left = {name: value for name, value in plan.engine_choices.items() if name not in says}
    words = ", ".join(f"{name} = {value}" for name, value in left.items())
    return {"engine choices": f"the plan has {words}"} if left else {}
