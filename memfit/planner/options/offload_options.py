"""Optimizer state on the host: where it could wait, and why it stays on the device."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from memfit.apply.state_streaming import left_on_the_device, streams
from memfit.device.hardware.catalogue import Device
from memfit.engine.capabilities import WHOLE_STATE
from memfit.job import Job, Nets
from memfit.planner.predict import plain_nets


def offload_choices(job: Job, device: Device, engine: str, keep: Collection[str]) -> Iterator[dict[str, str]]:
    """Places other than the device where state could wait, the least costly first; nothing where there are none."""
    if not device.is_cuda or "optimizer" in keep or engine not in WHOLE_STATE:
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
