"""What a plan leaves of a CPU's budget for what is no tensor: Python's objects, autograd's graph, the heap's gaps.

A plan file may be edited by hand, so its budget and its prediction may disagree; ``check_budget`` refuses such a plan.
"""

from __future__ import annotations

import math
from dataclasses import replace

from memfit.device.hardware.catalogue import Device
from memfit.errors import InputError
from memfit.plan import Plan
from memfit.sizes import format_size

HOST_MARGIN_BYTES, HOST_MARGIN = 24 << 20, 0.02
"""Of the budget: f5_tts/tiny needs 12 to 24 MiB beyond (bench/host_margin.py)."""


def without_cpu_margin(device: Device) -> Device:
    """A CPU with what is left of its budget for tensors; a card as it is."""
    if device.is_cuda or device.usable_bytes is None:
        return device
    return replace(device, usable_bytes=max(device.usable_bytes - _margin_of(device.usable_bytes), 1))


def _margin_of(budget: int) -> int:
    return HOST_MARGIN_BYTES + int(budget * HOST_MARGIN)


def cpu_margin_bytes(device: Device) -> int:
    """Bytes of a device's budget that stay reserved for what is no tensor; 0 on a card."""
    return (device.usable_bytes or 0) - (without_cpu_margin(device).usable_bytes or 0)


def budget_for(nbytes: int, device: Device) -> int:
    """The least budget of which so many bytes are left for tensors."""
    return nbytes if device.is_cuda else math.ceil((nbytes + HOST_MARGIN_BYTES) / (1 - HOST_MARGIN))


def planned_process_bytes(plan: Plan) -> int | None:
    """Bytes that a plan expects of a rank's process in the phase that needs most, which its measured peak is compared
    with: on a CPU the predicted tensors and what is reserved for all else; on a card with the pool of the batches that
    are copied ahead. None where the plan predicts nothing."""
    phases = [int(phase["process_bytes"]) for phase in plan.phases.values() if "process_bytes" in phase]
    if not phases:
        return None
    return max(phases) + (_margin_of(plan.budget_bytes) if plan.device == "cpu" else plan.copy_ahead_bytes)


def check_budget(plan: Plan, path: str) -> None:
    """Refuses a plan whose own prediction needs more than its budget, as no plan of the search does.

    Args:
        path: the plan's file.

    Raises:
        InputError: the plan predicts that it needs more than ``budget_bytes``.
    """
    needed = planned_process_bytes(plan)
    if needed is None or needed <= plan.budget_bytes:
        return
    tensors = max(int(phase["process_bytes"]) for phase in plan.phases.values() if "process_bytes" in phase)
    rest = "what is no tensor" if plan.device == "cpu" else "batches that are copied ahead"
    others = f", {format_size(needed - tensors)} of it for {rest}" if needed > tensors else ""
    raise InputError(
        f"plan file {path}: budget_bytes = {plan.budget_bytes} ({format_size(plan.budget_bytes)})",
        f"the plan needs {format_size(needed)} by its own prediction{others}",
        "make a plan for this budget with memfit plan --memory, or take back the edit",
    )
