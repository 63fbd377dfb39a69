"""Levers of what stays from window to window: the average of the weights, and optimizers' state."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from memfit.apply.rig import WHOLE_STATE, is_trained
from memfit.apply.streaming import cut, left_on_the_device
from memfit.geometry import shape_of
from memfit.plan import Lever
from memfit.planner import host_state
from memfit.planner.case import STEP, Case, lever
from memfit.planner.course import course_of, fall, highest
from memfit.planner.fitting import open_fitting
from memfit.trace.step import Tracing

EIGHT_BIT = frozenset({"Adam", "AdamW", "SGD", "RMSprop", "Adagrad"})
"""Of torch.optim, those that bitsandbytes has with 8-bit state (bitsandbytes/optim)."""
BLOCK, SMALL = 256, 4096
"""Of 8-bit state: elements that share an fp32 scale, and elements below which a tensor's state stays in fp32
(bitsandbytes/optim/optimizer.py, ``blocksize`` and ``min_8bit_size``)."""
SCALAR = 4
"""Bytes: state no larger is a single number, which is not moved."""


def average_on_host(case: Case) -> Lever:
    """Between its updates; an update brings it to the card part by part."""
    name, course, link = "average of the weights on the host", case.course, case.device.link_bytes
    if case.job.ema is None:
        return lever(case, name, False, {}, "the job keeps no average", seconds=0.0)
    if not case.device.is_cuda:
        return lever(case, name, False, {}, "the host is the device", seconds=0.0)
    if case.found.engine not in WHOLE_STATE:
        return lever(case, name, False, {}, f"under {case.found.engine} a rank holds a part of it", seconds=0.0)
    taken, tensors = case.whole.how.average == "host", _averaged(case)
    whole = sum(nbytes for _, nbytes in tensors)
    if taken:
        saves = fall(course.peaks(course.less(_made_in(case, "ema")) + whole), case.peaks)
    else:
        sizes = [sum(part) for part in cut([size for kind, size in tensors if kind], [s for k, s in tensors if k])]
        visiting = max((sum(sizes[i : i + 2]) for i in range(len(sizes))), default=0)
        held = course.less(course.of("ema"))
        after = held[np.flatnonzero(course.events_in(("train",)))[-1]]
        peaks = course.peaks(held)
        saves = fall(case.peaks, peaks | {"train": max(peaks["train"], int(after) + visiting)})
    seconds = None if link is None else 2 * whole / link
    return lever(
        case, name, taken, dict(saves), "nothing fits without" if taken else "it fits without", seconds=seconds,
        costs="copies", unknown=_no_link(seconds),
    )  # fmt: skip


def _averaged(case: Case) -> list[tuple[bool, int]]:
    """(whether it is a parameter, bytes) of every tensor of the averages."""
    trained = [net for net in case.nets.values() if is_trained(net)]
    return [(True, p.nbytes) for net in trained for p in net.parameters()] + [
        (False, b.nbytes) for net in trained for b in net.buffers()
    ]


def _made_in(case: Case, part: str) -> np.ndarray:
    """bool (S,): storages that operators of this part made."""
    trace = case.course.trace
    inside = np.array([name == part for name in trace.parts])[trace.operator_part[np.maximum(trace.made_by, 0)]]
    found: np.ndarray = inside & (trace.made_by >= 0)
    return found


def state_on_host(case: Case) -> Lever:
    """Optimizers' state between steps; a step brings it to the card part by part."""
    name, course, beside = "optimizer state on the host", case.course, case.beside
    how, link, state = case.whole.how, case.device.link_bytes, case.beside.streamed_bytes
    taken = how.optimizer_state == "host"
    saves: dict[str, int | None]
    if taken:
        left = left_on_the_device(case.job.optimizers(case.nets))
        reason = "nothing fits without" + (f"; the state of {', '.join(left)} stays" if left else "")
        saves = dict(_without_host(case, how, state))
    elif "by parts" not in beside.steps:
        reason = host_state.why_not(case.job, case.nets, case.device, case.found.engine)
        return lever(case, name, False, {}, reason, seconds=0.0)
    else:
        reason = host_state.why_not(case.job, case.nets, case.device, case.found.engine)
        held = course.alive - np.minimum(course.alive - course.less(course.of("optimizer")), state)
        stepping, now = course.parts(STEP), highest(course.alive, course.parts(STEP))
        step = now + beside.steps["by parts"].peak - beside.steps["chosen"].peak
        train = max(step, highest(held, course.events_in(("setup", "train")) & ~stepping))
        saves = dict(fall(case.peaks, course.peaks(held) | {"train": train}))
    seconds = None if link is None else 2 * state / link
    return lever(
        case, name, taken, saves, reason, seconds=seconds, costs="copies", unknown=_no_link(seconds)
    )  # fmt: skip


def _without_host(case: Case, how: Tracing, state: int) -> dict[str, int]:
    """What the state on the host saves, against the same plan with it on the card, whose step is traced for this."""
    there = replace(how, optimizer_state="device", micro_batches=1, checkpointing={})
    with open_fitting(case.job, there, shape_of(case.job, case.found.geometry.micro_batch)) as fitting:
        traced = fitting.optimizer_step()
    assert traced is not None
    course = case.course
    stepping = course.parts(STEP)
    held = course.alive + state * (np.cumsum(stepping) > 0)
    step = course_of(traced.trace, case.device).peaks()["train"]
    train = max(step, highest(held, course.events_in(("setup", "train")) & ~stepping))
    return fall(course.peaks(held) | {"train": train}, case.peaks)


def eight_bit(case: Case) -> Lever:
    """State of a byte an element and a scale a block, in one kernel a tensor; changes what is learned."""
    name, course = "8-bit optimizer", case.course
    optimizers = case.job.optimizers(case.nets)
    kinds = [type(one).__name__ for one in optimizers.values() if type(one).__module__.startswith("torch.optim")]
    lacking = [type(one).__name__ for one in optimizers.values() if type(one).__name__ not in EIGHT_BIT & set(kinds)]
    if lacking and len(lacking) == len(optimizers):
        reason = f"no 8-bit {' or '.join(dict.fromkeys(lacking))} is known"
        return lever(case, name, False, {}, reason, seconds=0.0, changes_learning=True)
    reason = "a job that has it as a setting takes it with --set"
    timeless = "time: its kernels are another library's, and were not timed"
    if lacking:
        unknown = f"bytes: no 8-bit {' or '.join(dict.fromkeys(lacking))} is known, and the other state is not apart"
        saves: dict[str, int | None] = dict.fromkeys(case.phases)
        return lever(case, name, False, saves, reason, seconds=None, changes_learning=True, unknown=unknown)
    width = max(
        (p.itemsize for one in optimizers.values() for group in one.param_groups for p in group["params"]), default=4
    )
    elements = course.trace.nbytes // width
    small = course.trace.nbytes < SMALL * width
    bytes_then = np.where(small, course.nbytes, elements + 4 * -(-elements // BLOCK))
    state = course.of("optimizer")
    passing = course.of("temporaries") & _made_in(case, "optimizer")
    less = np.where(state, course.nbytes - bytes_then, np.where(passing, course.nbytes, 0))
    saves = dict(fall(case.peaks, course.peaks(course.less(state | passing, less))))
    return lever(case, name, False, saves, reason, seconds=None, changes_learning=True, unknown=timeless)


def _no_link(seconds: float | None) -> str:
    return "" if seconds is not None else "time: the rate of the link to the host is not known"
