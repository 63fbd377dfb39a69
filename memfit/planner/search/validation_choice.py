"""Validation under other policies than a plan's: what each would come to, traced behind the same windows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from typing import Any, NoReturn

import numpy as np
import psutil

from memfit.apply.phase_memory import with_settings
from memfit.device.hardware.catalogue import Device
from memfit.device.hardware.process_limits import available_cores
from memfit.errors import describe
from memfit.forked_process import ForkedBranch, NoResultError, has_core_for_copy
from memfit.job import Job, Shape
from memfit.plan import PhasePolicy
from memfit.planner.live_bytes import LiveBytes, live_bytes_of
from memfit.planner.options import validation_policies
from memfit.planner.search.first_reads import watched_first_reads
from memfit.planner.timing.roofline import operator_seconds
from memfit.trace.session_state import random_numbers
from memfit.trace.validation_traces import PolicyTraces, ValidationTrace

Asked = PhasePolicy | tuple[PhasePolicy, Shape]
"""A policy for validation, and the micro-batch that it looks at where that is another."""
TRACED = 45_000
"""Operators that may be traced for options of validation which the plan leaves: 4 s of a core. Where that is not enough
for all of them, the job's first one comes first, then precision."""


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

    Where there is a second core, copies of this process trace them, at most as many at once as there are cores. An
    option that changes settings goes on from where the first policy's validation first reads one of them.

    Args:
        device: of the plan.
        second_core: whether copies may be made.
    """

    def __init__(self, job: Job, traces: PolicyTraces, device: Device, *, second_core: bool) -> None:
        self._job, self._traces, self._device, self._second_core = job, traces, device, second_core
        self._others: Mapping[str, Asked] = {}
        """Policies that copies trace."""
        self._branches: dict[str, ForkedBranch] = {}
        self._copy: tuple[str, ForkedBranch] | None = None
        """Of a copy: its policy, and what takes the result."""
        self._numbers = b""
        """The state of random numbers before the first policy."""
        self._files: frozenset[tuple[int, str]] = frozenset()
        """Those that were open then."""

    def trace(self, policy: PhasePolicy, others: Mapping[str, Asked]) -> ValidationTrace:
        """Traces a policy; the others go on from it in copies.

        Args:
            others: those that add to the policy.
        """
        if not self._second_core:
            return self._traces.trace(policy)
        self._numbers, self._others = random_numbers(), others
        self._files = _open_files()
        settings: dict[str, Job] = {}
        for name, other in others.items():
            changed = self._changed_alone(policy, other)
            if changed is not None:
                settings[name] = changed
            elif self._branch(name):
                self._give(self._come_to, other)
        trace = self._traced(policy, settings)
        self._keep(_affordable(others, trace.operators))
        self._begin(available_cores() - 1)
        return trace

    def outcomes(self, others: Mapping[str, Asked], operators: int) -> dict[str, Validation | str]:
        """What each comes to, or why that is not known; after one that fails, none is.

        Args:
            operators: of a validation.
        """
        affordable = _affordable(others, operators)
        asked = [(name, others[name]) for name in others if name in affordable]
        if self._others != others:
            self.close()
            self._numbers, self._others = random_numbers(), others
            for name, policy in asked if len(asked) > 1 else ():
                if self._branch(name):
                    self._give(self._come_to, policy)
        traced = self._all(asked)
        dear = f"bytes and time: no trace was made of this validation's {operators} operators once more"
        outcomes: dict[str, Validation | str] = dict.fromkeys(others, dear)
        failed = ""
        for name, _ in asked:
            outcomes[name] = outcome = failed or traced[name]
            failed = outcome if isinstance(outcome, str) else ""
        return outcomes

    def close(self) -> None:
        """Ends the copies."""
        for branch in self._branches.values():
            branch.close()
        self._others, self._branches = {}, {}

    def _traced(self, policy: PhasePolicy, settings: Mapping[str, Job]) -> ValidationTrace:
        """A policy's trace; a copy that goes on from it gives its own, and ends.

        Args:
            settings: the job as other policies have it.
        """
        if not settings:
            return self._traces.trace(policy)
        try:
            with watched_first_reads(self._job, settings, self._is_copy_of_now):
                trace = self._traces.trace(policy)
        except BaseException:
            if self._copy is not None:
                self._copy[1].end()
            raise
        if self._copy is not None:
            self._give(self._comes_to, trace)
        return trace

    def _changed_alone(self, policy: PhasePolicy, other: Asked) -> Job | None:
        """The job with another policy's settings, where that is all that it changes of this one, which changes none."""
        if not isinstance(other, PhasePolicy) or policy.settings or replace(other, settings={}) != policy:
            return None
        try:
            return with_settings(self._job, other.settings)
        except Exception:  # a setting that the job refuses: its own trace says so
            return None

    def _is_copy_of_now(self, name: str) -> bool:
        """Makes the copy for a policy, where no file is open that both would read on."""
        return _open_files() == self._files and self._branch(name)

    def _branch(self, name: str) -> bool:
        """Makes the copy for a policy; True in the copy, once it may go on."""
        if not self._second_core or not has_core_for_copy():
            return False
        try:
            branch = ForkedBranch()
        except OSError:
            return False
        if branch.is_copy:
            self._copy, self._branches = (name, branch), {}
            return True
        self._branches[name] = branch
        self._begin(available_cores() - 1)
        return False

    def _keep(self, names: Collection[str]) -> None:
        """Ends the other copies."""
        for name in self._branches.keys() - set(names):
            self._branches.pop(name).close()

    def _begin(self, most: int) -> None:
        """Lets copies go on, until so many do."""
        for branch in self._branches.values():
            if branch.has_begun and not branch.is_done and branch.connection.poll():
                branch.read()
        waiting = [branch for branch in self._branches.values() if not branch.has_begun]
        working = sum(branch.has_begun and not branch.is_done for branch in self._branches.values())
        for branch in waiting[: max(most - working, 0)]:
            branch.begin()

    def _give(self, outcome: Callable[[Any], Validation], argument: object) -> NoReturn:
        """Of a copy: gives what its policy comes to, unless random numbers were drawn, of which the other process would
        have drawn others; ends."""
        assert self._copy is not None
        _, branch = self._copy
        try:
            validation = outcome(argument)
            if random_numbers() == self._numbers:
                branch.give(validation)
        finally:
            branch.end()

    def _all(self, asked: Sequence[tuple[str, Asked]]) -> dict[str, Validation | str]:
        """The copies' are taken; those that they have no result for are traced here."""
        own = [(name, policy) for name, policy in asked if name not in self._branches]
        self._begin(available_cores() - bool(own))
        outcomes = self._until_one_fails(own)
        has_failed = any(isinstance(outcome, str) for outcome in outcomes.values())
        while working := [branch.connection for branch in self._branches.values() if not branch.is_done]:
            self._begin(available_cores())
            wait(working)
        lacking = []
        for name, policy in asked:
            if name in self._branches:
                try:
                    outcomes[name] = self._branches[name].result()
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
        return self._validation(self._traces.trace(policy, seen))

    def _comes_to(self, trace: ValidationTrace) -> Validation:
        """What the policy of this copy comes to, whose trace goes on from another one."""
        assert self._copy is not None
        other = self._others[self._copy[0]]
        assert isinstance(other, PhasePolicy)
        return self._validation(replace(trace, policy=other))

    def _validation(self, trace: ValidationTrace) -> Validation:
        precision = str(trace.policy.settings.get("precision", self._job.precision))
        return validation_of(trace, live_bytes_of(trace.trace, self._device), self._device, precision)


def _open_files() -> frozenset[tuple[int, str]]:
    """The files that this process has open."""
    return frozenset((file.fd, file.path) for file in psutil.Process().open_files())


def _affordable(others: Mapping[str, Asked], operators: int) -> list[str]:
    """Names of those that may be traced, by a validation's operators."""
    return _by_worth(others)[: TRACED // max(operators, 1)]


def _by_worth(others: Mapping[str, Asked]) -> list[str]:
    """Names: the job's first option, precision, and the rest."""
    precision = [name for name in others if name == validation_policies.PRECISION]
    names = [name for name in others if name != validation_policies.PRECISION] + precision
    return list(dict.fromkeys([*names[:1], *precision, *names]))
