"""Optimizers' state on the host: when a plan without it is worth another search with it."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

from memfit.apply.rig import WHOLE_STATE
from memfit.apply.streaming import left_on_the_device, streams
from memfit.device.catalogue import Device
from memfit.job import Job, Nets
from memfit.planner.predict import plain_nets

if TYPE_CHECKING:
    from memfit.planner.search import Answer


def host_places(job: Job, device: Device, engine: str, keep: Collection[str]) -> Iterator[dict[str, str]]:
    """Where state could wait beside the device, the least costly first; nothing where it cannot."""
    if not device.is_cuda or "optimizer" in keep or engine not in WHOLE_STATE:
        return
    if any(streams(optimizer) for optimizer in job.optimizers(plain_nets(job)).values()):
        yield {"optimizer_state": "host"}
        if job.ema is not None:
            yield {"optimizer_state": "host", "average": "host"}


def pays(answer: Answer, device: Device) -> bool:
    """Whether nothing fits so far, or the room would save more time than the copies of a window take."""
    if answer.plan is None:
        return True
    more, seconds = answer.next_step, answer.floor.seconds
    state = answer.floor.footprint.phases["train"].categories["optimizer"]
    if more is None or not seconds or not device.link_bytes or answer.plan.optimizer_state == "host":
        return False
    return state >= more.more_bytes and more.saves * seconds > 2 * state / device.link_bytes


def why_not(job: Job, nets: Nets, device: Device, engine: str) -> str:
    """Why the state stays on the device."""
    if not device.is_cuda:
        return "the host is the device"
    if engine not in WHOLE_STATE:
        return f"under {engine} a rank holds a part of it already"
    left = left_on_the_device(job.optimizers(nets))
    if left:
        return f"the step of {', '.join(left)} is not known to treat each parameter alone"
    return "what fits without it is faster"
