"""Options for validation and saving, from free ones to skipping validation."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from memfit.events import FREE
from memfit.plan import MemoryOption
from memfit.planner.live_bytes import fall
from memfit.planner.options import validation_policies
from memfit.planner.options.optimizer_state import SCALAR
from memfit.planner.options.option_context import OptionContext, memory_option, more
from memfit.planner.search.validation_choice import Validation
from memfit.sizes import format_size

EACH = "a validation"
SHARED = ("optimizer", "gradients", "ema", "communication")
"""Categories that a separate validation process does not hold."""


def of_validation(context: OptionContext) -> list[MemoryOption]:
    """The memory options for validation and saving."""
    memory_options = [_free_gradients(context)]
    if not context.job.validates:
        return memory_options
    if context.job.precision != "fp32":
        memory_options.append(
            _of_trace(
                context, "no autocast in validation", validation_policies.PRECISION, "products in single precision"
            )
        )
    memory_options += [_of_trace(context, name, name) for name in context.job.validation_options]
    if validation_policies.can_be_smaller(context.job):
        memory_options.append(_of_trace(context, validation_policies.SMALLER, validation_policies.SMALLER))
    return [*memory_options, _aside(context), _skip(context), _apart(context)]


def _free_gradients(context: OptionContext) -> MemoryOption:
    """Compared with the last window's gradients kept until saving ends."""
    live_bytes, trace = context.live_bytes, context.live_bytes.trace
    freed = live_bytes.events_in(("validate", "save")) & (trace.kind == FREE)
    freed &= live_bytes.of("gradients")[np.maximum(trace.storage, 0)]
    kept = np.cumsum(np.where(freed, live_bytes.nbytes[np.maximum(trace.storage, 0)], 0))
    saves = dict(fall(live_bytes.peaks(live_bytes.alive + kept), context.peaks))
    applied = context.full_step.how.validation.gradients == "free"
    reason = "the job already frees them after each step"
    if freed.any():
        reason = "validation and saving do not use the last window's gradients"
    return memory_option(context, "free gradients", applied, saves, reason, seconds=0.0)


def _of_trace(context: OptionContext, name: str, key: str, costs: str = "") -> MemoryOption:
    """An option whose bytes a trace gives: against the policy tried before it, or added to the plan's policy."""
    applied = key in validation_policies.words(context.full_step.how.validation, context.job.validation_options)
    tried = _around(context, key)
    if (
        key == validation_policies.SMALLER
        and not applied
        and (context.full_step.other_policies and key not in context.full_step.other_policies)
    ):
        return memory_option(context, name, False, {}, "its batch is already one item", seconds=0.0, each=EACH)
    before, after = (
        tried if tried is not None else (context.full_step.tried[-1], context.full_step.other_policies.get(key))
    )
    if after is None or isinstance(after, str):
        unknown = after if isinstance(after, str) else _not_traced(context)
        gone = None if "validate" in context.phases else 0
        return memory_option(
            context, name, applied, {"validate": gone}, _why(context, applied), seconds=None, each=EACH, costs=costs,
            unknown=unknown,
        )  # fmt: skip
    saves = None if before.peak is None or after.peak is None else before.peak - after.peak
    seconds = more(after.seconds, before.seconds)
    return memory_option(
        context, name, applied, {"validate": saves}, _why(context, applied), seconds=seconds, each=EACH, costs=costs,
        unknown=_untimed(context, seconds),
    )  # fmt: skip


def _around(context: OptionContext, key: str) -> tuple[Validation, Validation] | None:
    """The policies tried just before this option and with it; None where it was not tried."""
    for before, after in pairwise(context.full_step.tried):
        names = [
            validation_policies.words(attempt.policy, context.job.validation_options) for attempt in (before, after)
        ]
        if key in names[1] and key not in names[0]:
            return before, after
    return None


def _aside(context: OptionContext) -> MemoryOption:
    """Optimizer state moves to the host when validation begins and returns when it ends."""
    name, live_bytes, link = validation_policies.ASIDE, context.live_bytes, context.device.link_bytes
    applied = context.full_step.how.validation.optimizer == "aside"
    moved = live_bytes.of("optimizer") & (live_bytes.trace.nbytes > SCALAR)
    state = int((live_bytes.alive - live_bytes.less(moved)).max(initial=0))
    saves: dict[str, int | None] = {}
    tried = _around(context, name)
    if tried is not None:
        before, after = (attempt.peak or 0 for attempt in tried)
        saves = {"validate": before - after}
    elif "validate" in context.phases:
        there = max(live_bytes.before("validate"), live_bytes.peaks(live_bytes.less(moved))["validate"])
        saves = {"validate": context.peaks["validate"] - there}
    seconds = None if link is None or not context.device.is_cuda else 2 * state / link
    unknown = "" if seconds is not None else "time: the rate of the link, or of this machine's files, is unknown"
    return memory_option(
        context, name, applied, saves, _why(context, applied), seconds=seconds, each=EACH, costs="two copies",
        unknown=unknown,
    )  # fmt: skip


def _skip(context: OptionContext) -> MemoryOption:
    applied = context.full_step.how.validation.where == "skip"
    shown = next((attempt for attempt in reversed(context.full_step.tried) if attempt.peak is not None), None)
    saves = None if shown is None or shown.peak is None else shown.peak - _resident(context)
    seconds = None if shown is None or shown.seconds is None else -shown.seconds
    return memory_option(
        context, validation_policies.SKIP, applied, {"validate": saves}, _why(context, applied), seconds=seconds,
        each=EACH, costs="no validation in the run", unknown=_untimed(context, seconds),
    )  # fmt: skip


def _apart(context: OptionContext) -> MemoryOption:
    """A process that holds the job's nets and what validation allocates, without training state."""
    name, live_bytes = "validation in a separate process", context.live_bytes
    if "validate" not in context.phases:
        reason = "use memfit validate RUN on this card after the run, or on another card"
        return memory_option(
            context, name, False, {}, reason, seconds=0.0, each=EACH, costs="a second copy of the nets"
        )
    held = np.any([live_bytes.of(category) for category in SHARED], axis=0)
    takes = format_size(live_bytes.peaks(live_bytes.less(held))["validate"])
    reason = f"on the same card training keeps its memory next to {takes}; use memfit validate RUN on another card"
    return memory_option(
        context, name, False, {"validate": context.peaks["validate"] - _resident(context)}, reason, seconds=None,
        each=EACH, costs=f"{takes} of another device", unknown="time: depends on the other device",
    )  # fmt: skip


def _resident(context: OptionContext) -> int:
    """Bytes between windows, where validation would begin, without the gradients that are freed there."""
    phase = "validate" if "validate" in context.phases else "save"
    return context.live_bytes.before(phase)


def _why(context: OptionContext, applied: bool) -> str:
    if applied:
        return "validation does not fit without it"
    if "validation" in context.keep:
        return "--keep validation"
    if context.full_step.how.validation.where == "skip":
        return "validation does not fit with it either"
    return "validation fits without it"


def _not_traced(context: OptionContext) -> str:
    if context.full_step.how.validation.where == "skip":
        return "validation is skipped"
    return "not traced while optimizer state is moved aside"


def _untimed(context: OptionContext, seconds: float | None) -> str:
    if seconds is not None:
        return ""
    return "time: the card's rates are unknown" if context.device.is_cuda else "time: validation is timed only on cards"
