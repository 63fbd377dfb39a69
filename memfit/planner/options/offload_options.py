"""State on the host: what could wait there, and why it stays on the device."""

from __future__ import annotations

from collections.abc import Iterator

from memfit.apply.state_streaming import left_on_the_device, streams
from memfit.device.hardware.catalogue import Device
from memfit.engine.capabilities import CAPABILITIES, WHOLE_STATE
from memfit.job import Job, Nets
from memfit.planner.predict import plain_nets
from memfit.planner.request import PlanRequest

CPU_OFFLOAD = "cpu_offload"
"""The engine choice with which a rank's parts are on the host."""


def offload_choices(job: Job, request: PlanRequest, engine: str) -> Iterator[dict[str, str]]:
    """Places other than the device where state could wait, the least costly first; nothing where there are none.

    Returns:
        Keywords of ``EngineSearch``.
    """
    if not request.device.is_cuda or "optimizer" in request.keep:
        return
    if CAPABILITIES[engine].takes_cpu_offload:
        mesh = request.mesh
        carried = mesh is None or (mesh.shards > 1 and mesh.dp_shard_in_ep == 1)
        if CPU_OFFLOAD not in request.engine_choices and carried:
            yield {"parts": "host"}
        return
    if engine not in WHOLE_STATE:
        return
    if any(streams(optimizer) for optimizer in job.optimizers(plain_nets(job)).values()):
        yield {"optimizer_state": "host"}
        if job.ema is not None:
            yield {"optimizer_state": "host", "average": "host"}


def why_not(job: Job, nets: Nets, device: Device, engine: str) -> str:
    """Why the state stays on the device."""
    if not device.is_cuda:
        return "the host is the device"
    if engine not in WHOLE_STATE:
        return f"under {engine} each rank already holds only a part"
    left = left_on_the_device(job.optimizers(nets))
    if left:
        return f"the step of {', '.join(left)} may not treat each parameter separately"
    return "the plan fits without it"
