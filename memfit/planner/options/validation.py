"""Levers of validation and saving, from those that cost nothing to leaving it out."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from memfit.events import FREE
from memfit.plan import MemoryOption
from memfit.planner.live_bytes import fall
from memfit.planner.options import validation_policies
from memfit.planner.options.optimizer_state import SCALAR
from memfit.planner.options.option_context import OptionContext, memory_option, more
from memfit.planner.search.full_step import Validation
from memfit.sizes import format_size

EACH = "a validation"
SHARED = ("optimizer", "gradients", "ema", "communication")
"""What a process that validates alone does not hold."""


def of_validation(context: OptionContext) -> list[MemoryOption]:
    """What makes room for validation and saving."""
    levers = [_free_gradients(context)]
    if not context.job.validates:
        return levers
    if context.job.precision != "fp32":
        levers.append(
            _of_trace(
                context, "no autocast in validation", validation_policies.PRECISION, "products in single precision"
            )
        )
    levers += [_of_trace(context, name, name) for name in context.job.validation_levers]
    if validation_policies.can_be_smaller(context.job):
        levers.append(_of_trace(context, validation_policies.SMALLER, validation_policies.SMALLER))
    return [*levers, _aside(context), _skip(context), _apart(context)]


def _free_gradients(context: OptionContext) -> MemoryOption:
    """Those that the last window left behind: kept instead, to the end of saving."""
    live_bytes, trace = context.live_bytes, context.live_bytes.trace
    freed = live_bytes.events_in(("validate", "save")) & (trace.kind == FREE)
    freed &= live_bytes.of("gradients")[np.maximum(trace.storage, 0)]
    kept = np.cumsum(np.where(freed, live_bytes.nbytes[np.maximum(trace.storage, 0)], 0))
    saves = dict(fall(live_bytes.peaks(live_bytes.alive + kept), context.peaks))
    taken = context.whole.how.validation.gradients == "free"
    reason = "the job frees them after each step already"
    if freed.any():
        reason = "gradients of the last window are of no use there"
    return memory_option(context, "free gradients", taken, saves, reason, seconds=0.0)


def _of_trace(context: OptionContext, name: str, key: str, costs: str = "") -> MemoryOption:
    """What was traced: where it was tried, against the policy before it; else the plan's policy with it too."""
    taken = key in validation_policies.words(context.whole.how.validation, context.job.validation_levers)
    tried = _around(context, key)
    if key == validation_policies.SMALLER and not taken and (context.whole.beyond and key not in context.whole.beyond):
        return memory_option(context, name, False, {}, "its batch is one item already", seconds=0.0, each=EACH)
    before, after = tried if tried is not None else (context.whole.tried[-1], context.whole.beyond.get(key))
    if after is None or isinstance(after, str):
        unknown = after if isinstance(after, str) else _not_traced(context)
        gone = None if "validate" in context.phases else 0
        return memory_option(
            context, name, taken, {"validate": gone}, _why(context, taken), seconds=None, each=EACH, costs=costs,
            unknown=unknown,
        )  # fmt: skip
    saves = None if before.peak is None or after.peak is None else before.peak - after.peak
    seconds = more(after.seconds, before.seconds)
    return memory_option(
        context, name, taken, {"validate": saves}, _why(context, taken), seconds=seconds, each=EACH, costs=costs,
        unknown=_untimed(context, seconds),
    )  # fmt: skip


def _around(context: OptionContext, key: str) -> tuple[Validation, Validation] | None:
    """The policies that were tried just before this lever, and with it; None: it was not."""
    for before, after in pairwise(context.whole.tried):
        names = [validation_policies.words(one.policy, context.job.validation_levers) for one in (before, after)]
        if key in names[1] and key not in names[0]:
            return before, after
    return None


def _aside(context: OptionContext) -> MemoryOption:
    """Optimizers' state is moved when validation begins and is back when it ends."""
    name, live_bytes, link = validation_policies.ASIDE, context.live_bytes, context.device.link_bytes
    taken = context.whole.how.validation.optimizer == "aside"
    moved = live_bytes.of("optimizer") & (live_bytes.trace.nbytes > SCALAR)
    state = int((live_bytes.alive - live_bytes.less(moved)).max(initial=0))
    saves: dict[str, int | None] = {}
    tried = _around(context, name)
    if tried is not None:
        before, after = (one.peak or 0 for one in tried)
        saves = {"validate": before - after}
    elif "validate" in context.phases:
        there = max(live_bytes.before("validate"), live_bytes.peaks(live_bytes.less(moved))["validate"])
        saves = {"validate": context.peaks["validate"] - there}
    seconds = None if link is None or not context.device.is_cuda else 2 * state / link
    unknown = "" if seconds is not None else "time: the rate of the link, or of this machine's files, is not known"
    return memory_option(
        context, name, taken, saves, _why(context, taken), seconds=seconds, each=EACH, costs="two copies",
        unknown=unknown,
    )  # fmt: skip


def _skip(context: OptionContext) -> MemoryOption:
    taken = context.whole.how.validation.where == "skip"
    shown = next((one for one in reversed(context.whole.tried) if one.peak is not None), None)
    saves = None if shown is None or shown.peak is None else shown.peak - _resident(context)
    seconds = None if shown is None or shown.seconds is None else -shown.seconds
    found = memory_option(
        context, validation_policies.SKIP, taken, {"validate": saves}, _why(context, taken), seconds=seconds, each=EACH,
        costs="no validation in the run", unknown=_untimed(context, seconds),
    )  # fmt: skip
    return found


def _apart(context: OptionContext) -> MemoryOption:
    """The job's nets and what validation makes, without the training's state."""
    name, live_bytes = "validation in a separate process", context.live_bytes
    if "validate" not in context.phases:
        reason = "memfit validate RUN does it, on this card when the run has ended, or on another one"
        return memory_option(
            context, name, False, {}, reason, seconds=0.0, each=EACH, costs="a second copy of the nets"
        )
    held = np.any([live_bytes.of(category) for category in SHARED], axis=0)
    takes = format_size(live_bytes.peaks(live_bytes.less(held))["validate"])
    reason = f"on the same card the training stays where it is, beside {takes}; memfit validate RUN does it on another"
    return memory_option(
        context, name, False, {"validate": context.peaks["validate"] - _resident(context)}, reason, seconds=None,
        each=EACH, costs=f"{takes} of another device", unknown="time: that of the other device",
    )  # fmt: skip


def _resident(context: OptionContext) -> int:
    """Bytes between windows, where validation would begin; gradients that are freed there excepted."""
    phase = "validate" if "validate" in context.phases else "save"
    return context.live_bytes.before(phase)


def _why(context: OptionContext, taken: bool) -> str:
    if taken:
        return "validation does not fit without"
    if "validation" in context.keep:
        return "--keep validation"
    if context.whole.how.validation.where == "skip":
        return "validation does not fit with it either"
    return "validation fits without"


def _not_traced(context: OptionContext) -> str:
    if context.whole.how.validation.where == "skip":
        return "validation is skipped"
    return "it was not traced behind state that was moved aside"


def _untimed(context: OptionContext, seconds: float | None) -> str:
    if seconds is not None:
        return ""
    return (
        "time: the card's rates are not known" if context.device.is_cuda else "time: validation is timed on cards alone"
    )
