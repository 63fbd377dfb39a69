"""Validation under other policies than a plan's: what each would come to, traced behind the same windows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from memfit.device.hardware.catalogue import Device
from memfit.errors import describe
from memfit.forked_process import ForkedCall, ForkedProcess, NoResultError
from memfit.job import Job, Shape
from memfit.plan import PhasePolicy
from memfit.planner.live_bytes import LiveBytes, live_bytes_of
from memfit.planner.options import validation_policies
from memfit.planner.search.second_core import forked_with_room
from memfit.planner.timing.roofline import operator_seconds
from memfit.trace.session_state import random_numbers
from memfit.trace.validation_traces import PolicyTraces, ValidationTrace

Asked = PhasePolicy | tuple[PhasePolicy, Shape]
"""A policy for validation, and the micro-batch that it looks at where that is another."""
TRACED = 45_000
"""Operators that may be traced for options of validation which the plan leaves: 5 to 10 s. Where that is not enough for
all of them, the job's first one comes first, then precision."""


@dataclass(frozen=True, kw_only=True)
class Validation:
    """What one policy for validation comes to."""

    policy: PhasePolicy
    peak: int | None
    """Peak bytes of tensors; None where there is no such phase."""
    seconds: float | None
    """Seconds of one validation; None where that is not known."""


def validation_of(trace: ValidationTrace, live_bytes: LiveBytes, device: Device, precision: str) -> Validation:
    """What a traced policy comes to."""
    peak = live_bytes.peaks().get("validate")
    return Validation(policy=trace.policy, peak=peak, seconds=seconds_of(trace, device, precision))


def seconds_of(trace: ValidationTrace, device: Device, precision: str) -> float | None:
    """Seconds of one validation on a card; None on a CPU, where its operators are not timed."""
    phase = next((phase for phase in trace.trace.phases if phase[0] == "validate"), None)
    if phase is None or trace.turns is None or not device.is_cuda:
        return None
    each = operator_seconds(trace.trace, device, precision)
    if each is None:
        return None
    return float(np.dot(each, trace.turns))


class OtherPolicies:
    """The policies that a plan leaves, each traced behind the same windows, which have run. Close it.

    Args:
        device: of the plan.
    """

    def __init__(self, job: Job, traces: PolicyTraces, device: Device) -> None:
        self._job, self._traces, self._device = job, traces, device
        self._copy: ForkedProcess | None = None
        self._numbers = b""
        """The state of random numbers when the copy was made."""
        self._others: Mapping[str, Asked] = {}
        """Policies of which the copy traces some."""
        self._calls: dict[str, ForkedCall] = {}

    def begin(self, others: Mapping[str, Asked]) -> None:
        """Has a copy of this process trace the greater part of them, while this one traces the policy that they add to.

        The policy takes as long as one or two of them: its trace is replayed too.
        """
        if others:
            self._have_copied(others, _by_worth(others)[(len(others) - 1) // 2 :])

    def outcomes(
        self, others: Mapping[str, Asked], operators: int, *, second_core: bool
    ) -> dict[str, Validation | str]:
        """What each comes to, or why that is not known; after one that fails, none is.

        Args:
            operators: of a validation.
            second_core: whether a copy of this process may trace half of them, where none has begun.
        """
        affordable = _by_worth(others)[: TRACED // max(operators, 1)]
        asked = [(name, others[name]) for name in others if name in affordable]
        if self._others != others:
            self.close()
            if second_core and len(asked) > 1:
                self._have_copied(others, [name for name, _ in asked[1::2]])
        traced = self._traced(asked)
        dear = f"bytes and time: no trace was made of this validation's {operators} operators once more"
        outcomes: dict[str, Validation | str] = dict.fromkeys(others, dear)
        failed = ""
        for name, _ in asked:
            outcomes[name] = outcome = failed or traced[name]
            failed = outcome if isinstance(outcome, str) else ""
        return outcomes

    def close(self) -> None:
        """Ends the copy."""
        if self._copy is not None:
            self._copy.close()
        self._copy, self._others, self._calls = None, {}, {}

    def traced_alike(self, policy: Asked) -> Validation:
        """What a policy comes to, in a copy of the process that traces the others.

        Raises:
            NoResultError: random numbers were drawn: the other process would have drawn others.
            Exception: what validation raised. It may work in the process itself: a backward does not run in a copy.
        """
        outcome = self._come_to(policy)
        if random_numbers() != self._numbers:
            raise NoResultError
        return outcome

    def _have_copied(self, others: Mapping[str, Asked], names: Sequence[str]) -> None:
        """Makes a copy, which traces these; where that fails, none is made."""
        self._numbers, self._others = random_numbers(), others
        self._copy = forked_with_room(self)
        if self._copy is not None:
            self._calls = {name: self._copy.call("traced_alike", others[name]) for name in names}

    def _traced(self, asked: Sequence[tuple[str, Asked]]) -> dict[str, Validation | str]:
        """The copy's are taken; those that it has no result for are traced here."""
        outcomes = self._until_one_fails([(name, policy) for name, policy in asked if name not in self._calls])
        has_failed = any(isinstance(outcome, str) for outcome in outcomes.values())
        lacking = []
        for name, policy in asked:
            if name in self._calls:
                try:
                    outcomes[name] = self._calls[name].result()
                except NoResultError:
                    lacking.append((name, policy))
        if lacking and has_failed:
            raise NoResultError  # nothing can be traced behind a validation that failed
        return outcomes | self._until_one_fails(lacking)

    def _until_one_fails(self, asked: Sequence[tuple[str, Asked]]) -> dict[str, Validation | str]:
        outcomes: dict[str, Validation | str] = {}
        for name, policy in asked:
            try:
                outcomes[name] = self._come_to(policy)
            except Exception as error:  # the job's own code, under settings that nobody may have tried
                outcomes[name] = f"validation so raises {describe(error)}"
                break
        return outcomes

    def _come_to(self, asked: Asked) -> Validation:
        policy, seen = asked if isinstance(asked, tuple) else (asked, None)
        trace = self._traces.trace(policy, seen)
        precision = str(policy.settings.get("precision", self._job.precision))
        return validation_of(trace, live_bytes_of(trace.trace, self._device), self._device, precision)


def _by_worth(others: Mapping[str, Asked]) -> list[str]:
    """Names: the job's first option, precision, and the rest."""
    precision = [name for name in others if name == validation_policies.PRECISION]
    names = [name for name in others if name != validation_policies.PRECISION] + precision
    return list(dict.fromkeys([*names[:1], *precision, *names]))
