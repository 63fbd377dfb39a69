"""Levers of validation and saving, from those that cost nothing to leaving it out."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from memfit.events import FREE
from memfit.plan import Lever
from memfit.planner import phase_room
from memfit.planner.case import Case, lever, more
from memfit.planner.course import fall
from memfit.planner.levers_state import SCALAR
from memfit.planner.whole import Validation
from memfit.sizes import format_size

EACH = "a validation"
SHARED = ("optimizer", "gradients", "ema", "communication")
"""What a process that validates alone does not hold."""


def of_validation(case: Case) -> list[Lever]:
    """What makes room for validation and saving."""
    levers = [_free_gradients(case)]
    if not case.job.validates:
        return levers
    if case.job.precision != "fp32":
        levers.append(
            _of_trace(case, "no autocast in validation", phase_room.PRECISION, "products in single precision")
        )
    levers += [_of_trace(case, name, name) for name in case.job.validation_levers]
    if phase_room.can_be_smaller(case.job):
        levers.append(_of_trace(case, phase_room.SMALLER, phase_room.SMALLER))
    return [*levers, _aside(case), _skip(case), _apart(case)]


def _free_gradients(case: Case) -> Lever:
    """Those that the last window left behind: kept instead, to the end of saving."""
    course, trace = case.course, case.course.trace
    freed = course.events_in(("validate", "save")) & (trace.kind == FREE)
    freed &= course.of("gradients")[np.maximum(trace.storage, 0)]
    kept = np.cumsum(np.where(freed, course.nbytes[np.maximum(trace.storage, 0)], 0))
    saves = dict(fall(course.peaks(course.alive + kept), case.peaks))
    taken = case.whole.how.validation.gradients == "free"
    reason = "the job frees them after each step already"
    if freed.any():
        reason = "gradients of the last window are of no use there"
    return lever(case, "free gradients", taken, saves, reason, seconds=0.0)


def _of_trace(case: Case, name: str, key: str, costs: str = "") -> Lever:
    """What was traced: where it was tried, against the policy before it; else the plan's policy with it too."""
    taken = key in phase_room.words(case.whole.how.validation, case.job.validation_levers)
    tried = _around(case, key)
    if key == phase_room.SMALLER and not taken and (case.whole.beyond and key not in case.whole.beyond):
        return lever(case, name, False, {}, "its batch is one item already", seconds=0.0, each=EACH)
    before, after = tried if tried is not None else (case.whole.tried[-1], case.whole.beyond.get(key))
    if after is None or isinstance(after, str):
        unknown = after if isinstance(after, str) else _not_traced(case)
        gone = None if "validate" in case.phases else 0
        return lever(
            case, name, taken, {"validate": gone}, _why(case, taken), seconds=None, each=EACH, costs=costs,
            unknown=unknown,
        )  # fmt: skip
    saves = None if before.peak is None or after.peak is None else before.peak - after.peak
    seconds = more(after.seconds, before.seconds)
    return lever(
        case, name, taken, {"validate": saves}, _why(case, taken), seconds=seconds, each=EACH, costs=costs,
        unknown=_untimed(case, seconds),
    )  # fmt: skip


def _around(case: Case, key: str) -> tuple[Validation, Validation] | None:
    """The policies that were tried just before this lever, and with it; None: it was not."""
    for before, after in pairwise(case.whole.tried):
        names = [phase_room.words(one.policy, case.job.validation_levers) for one in (before, after)]
        if key in names[1] and key not in names[0]:
            return before, after
    return None


def _aside(case: Case) -> Lever:
    """Optimizers' state is moved when validation begins and is back when it ends."""
    name, course, link = phase_room.ASIDE, case.course, case.device.link_bytes
    taken = case.whole.how.validation.optimizer == "aside"
    moved = course.of("optimizer") & (course.trace.nbytes > SCALAR)
    state = int((course.alive - course.less(moved)).max(initial=0))
    saves: dict[str, int | None] = {}
    tried = _around(case, name)
    if tried is not None:
        before, after = (one.peak or 0 for one in tried)
        saves = {"validate": before - after}
    elif "validate" in case.phases:
        there = max(course.before("validate"), course.peaks(course.less(moved))["validate"])
        saves = {"validate": case.peaks["validate"] - there}
    seconds = None if link is None or not case.device.is_cuda else 2 * state / link
    unknown = "" if seconds is not None else "time: the rate of the link, or of this machine's files, is not known"
    return lever(
        case, name, taken, saves, _why(case, taken), seconds=seconds, each=EACH, costs="two copies", unknown=unknown
    )  # fmt: skip


def _skip(case: Case) -> Lever:
    taken = case.whole.how.validation.where == "skip"
    shown = next((one for one in reversed(case.whole.tried) if one.peak is not None), None)
    saves = None if shown is None or shown.peak is None else shown.peak - _resident(case)
    seconds = None if shown is None or shown.seconds is None else -shown.seconds
    found = lever(
        case, phase_room.SKIP, taken, {"validate": saves}, _why(case, taken), seconds=seconds, each=EACH,
        costs="no validation in the run", unknown=_untimed(case, seconds),
    )  # fmt: skip
    return found


def _apart(case: Case) -> Lever:
    """The job's nets and what validation makes, without the training's state."""
    name, course = "validation in a separate process", case.course
    if "validate" not in case.phases:
        reason = "memfit validate RUN does it, on this card when the run has ended, or on another one"
        return lever(case, name, False, {}, reason, seconds=0.0, each=EACH, costs="a second copy of the nets")
    held = np.any([course.of(category) for category in SHARED], axis=0)
    takes = format_size(course.peaks(course.less(held))["validate"])
    reason = f"on the same card the training stays where it is, beside {takes}; memfit validate RUN does it on another"
    return lever(
        case, name, False, {"validate": case.peaks["validate"] - _resident(case)}, reason, seconds=None, each=EACH,
        costs=f"{takes} of another device", unknown="time: that of the other device",
    )  # fmt: skip


def _resident(case: Case) -> int:
    """Bytes between windows, where validation would begin; gradients that are freed there excepted."""
    phase = "validate" if "validate" in case.phases else "save"
    return case.course.before(phase)


def _why(case: Case, taken: bool) -> str:
    if taken:
        return "validation does not fit without"
    if "validation" in case.keep:
        return "--keep validation"
    if case.whole.how.validation.where == "skip":
        return "validation does not fit with it either"
    return "validation fits without"


def _not_traced(case: Case) -> str:
    if case.whole.how.validation.where == "skip":
        return "validation is skipped"
    return "it was not traced behind state that was moved aside"


def _untimed(case: Case, seconds: float | None) -> str:
    if seconds is not None:
        return ""
    return "time: the card's rates are not known" if case.device.is_cuda else "time: validation is timed on cards alone"
