"""Validation and saving inside a run: room is made as the plan says, and everything is put back afterwards.

A validation that memory fails in is tried again with all the room there is, then with fewer and fewer items, then left
out with a warning. What worked is what the next validation begins with. It never ends a run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from memfit.apply.attribute_snapshot import AttributeSnapshot
from memfit.apply.phase_memory import idle_nets_aside, idle_nets_back, phase_memory, with_settings
from memfit.apply.random_state import random_state, set_random_state
from memfit.apply.train_state import TrainState
from memfit.device.virtual.patching import replaced
from memfit.engine.collectives import gather
from memfit.engine.lost_rank import is_lost_rank
from memfit.errors import InputError, describe
from memfit.geometry import shape_of
from memfit.job import Shape
from memfit.plan import PhasePolicy, Plan
from memfit.trace.step_phases import validate_once
from memfit.train.launch import memory_limit
from memfit.train.launch.forked_copy import ForkedCopyGuard
from memfit.train.launch.stop_signals import AbandonedError
from memfit.train.loop.rng import seed_stream
from memfit.train.loop.validation_data import ValidationData, mean_of, metrics_of
from memfit.train.recovery.failure import clear_frames, describe_memory_failure, give_back
from memfit.train.recovery.reduced_limits import NO_REDUCTION, ReducedLimits, StartAgainError

VALIDATION = 2
"""The purpose of validation's random stream: every validation draws the same."""


@dataclass(frozen=True, kw_only=True)
class ValidationResult:
    """What one validation gave. ``metrics`` is None where it was left out."""

    metrics: Mapping[str, float] | None
    tries: int
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class _Tried:
    """What one try gave on one rank."""

    metrics: Mapping[str, float] | None = None
    abandoned: bool = False
    reason: str | None = None
    memory: bool = False


class Phases:
    """The phases of a run beside training.

    Args:
        files: a folder for what waits in files.
        say: told of what was left out, and why.
        limits: what is smaller from the start.
        data: what is validated on.
    """

    def __init__(
        self,
        train_state: TrainState,
        plan: Plan,
        files: Path,
        say: Callable[[str], None],
        limits: ReducedLimits = NO_REDUCTION,
        data: ValidationData | None = None,
    ) -> None:
        self._data = data or ValidationData(samples=None)
        self._state, self._plan, self._files, self._say = train_state, plan, files, say
        self._policies = {"validate": plan.validation, "save": plan.saving}
        self._items: int | None = plan.validation.items
        self._trains = False
        self.failed: list[int] = []
        """Windows whose validation raised an error that is not of memory."""
        self._limits = limits
        fits = limits.validates and all(self._smaller(self._shape()) for _ in range(limits.validations))
        if not fits:
            self._policies["validate"] = replace(plan.validation, where="skip")

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """``validate`` or ``save``: inside, the plan's policy holds; then random numbers and modes are as before."""
        policy, train_state = self._policies[name], self._state
        random = random_state(train_state.device)
        modes = [(module, module.training) for net in train_state.nets.values() for module in net.modules()]
        try:
            with phase_memory(train_state, policy, self._files), self._idle_aside(name):
                yield
        finally:
            for module, mode in modes:
                module.training = mode
            set_random_state(random, train_state.device)

    @contextmanager
    def training(self) -> Iterator[None]:
        """Around the windows: nets that training does not use wait aside, where the plan says so."""
        with self._idle_aside("train"):
            self._trains = True
            try:
                yield
            finally:
                self._trains = False

    @contextmanager
    def _idle_aside(self, phase: str) -> Iterator[None]:
        if self._plan.idle_nets != "aside" or phase == "save":
            yield
            return
        back = idle_nets_back(self._state, phase) if self._trains else nullcontext()
        with idle_nets_aside(self._state, phase, self._files), back:
            yield

    def validate(
        self,
        window: int,
        *,
        briefly: bool = False,
        strict: bool = False,
        abandons: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> ValidationResult:
        """Validates, with less and less where memory fails; says what came of it. All ranks try and give up together.

        Args:
            briefly: loops whose turns do the same with memory run their first two turns and their last.
            strict: an error that is not of memory is raised, instead of said.
            abandons: around what may be cut short by ``AbandonedError``.
        """
        if self._policies["validate"].where == "skip":
            left = "the plan leaves it out" if self._plan.validation.where == "skip" else "it failed before"
            return ValidationResult(metrics=None, tries=0, note=left)
        modules = [module for net in self._state.nets.values() for module in net.modules()]
        attributes, tries = AttributeSnapshot(modules, self._state.job), 0
        while True:
            shape = self._shape()
            tries += 1
            mine = self._try(attributes, shape, briefly, strict, abandons)
            ranks = gather(self._state.engine, mine)
            if any(result.abandoned or result.reason is not None for result in ranks):
                with memory_limit.lifted():
                    attributes.restore()
            if any(result.abandoned for result in ranks):
                return ValidationResult(metrics=None, tries=tries, note="the run was asked to stop")
            failures = {rank: result for rank, result in enumerate(ranks) if result.reason is not None}
            if not failures:
                return ValidationResult(metrics=mine.metrics, tries=tries)
            give_back(self._state.device)
            reason = "; ".join(
                f"rank {rank}: {result.reason}" if len(ranks) > 1 else str(result.reason)
                for rank, result in failures.items()
            )
            if all(result.memory for result in failures.values()) and self._smaller(shape):
                self._say(f"window {window}: validation did not fit ({reason}); tried again with less")
            else:
                self._say(f"window {window}: validation was left out: {reason}")
                if not all(result.memory for result in failures.values()):
                    self.failed.append(window)
                return ValidationResult(metrics=None, tries=tries, note=reason)

    def _try(
        self,
        attributes: AttributeSnapshot,
        shape: Shape,
        briefly: bool,
        strict: bool,
        abandons: Callable[[], AbstractContextManager[None]],
    ) -> _Tried:
        try:
            attributes.keep()
            with ForkedCopyGuard(), self.phase("validate"), abandons():
                return _Tried(metrics=self._once(shape, briefly))
        except AbandonedError as error:
            clear_frames(error)
            return _Tried(abandoned=True)
        except Exception as error:
            together = self._state.engine.syncs_in_backward and self._state.engine.world > 1
            with memory_limit.lifted():
                memory = memory_limit.is_memory_failure(error)
                if (together and is_lost_rank(error)) or (strict and not memory):
                    raise
                described = f"out of memory: {describe_memory_failure(error)}" if memory else describe(error)
                reason = str(error) if isinstance(error, InputError) else described
                failed = _Tried(reason=reason, memory=memory)
                clear_frames(error)
            if together:
                limits = ReducedLimits(validations=self._limits.validations + failed.memory, validates=failed.memory)
                raise StartAgainError(f"validation: {failed.reason}", limits) from None
            return failed

    def _shape(self) -> Shape:
        """Of the next validation batch."""
        planned = shape_of(self._state.job, self._plan.micro_batch)
        return self._data.largest(replace(planned, items=min(self._items or planned.items, planned.items)))

    def _smaller(self, shape: Shape) -> bool:
        """Makes the next try need less; whether there was anything left to do."""
        policy = self._policies["validate"]
        settings = {**policy.settings, **self._state.job.validation_smaller}
        everything = PhasePolicy(gradients="free", optimizer="aside", items=policy.items, settings=settings)
        if policy != everything:
            self._policies["validate"] = everything
            return True
        if shape.items > 1:
            self._items = shape.items // 2
            return True
        return False

    def _once(self, shape: Shape, briefly: bool) -> dict[str, float]:
        train_state = replace(self._state, job=with_settings(self._state.job, self._policies["validate"].settings))
        seed_stream(self._plan.seed, 0, 0, VALIDATION)
        short = {"repeats": lambda count: range(count) if count < 4 else (0, 1, count - 1)} if briefly else {}
        with replaced(train_state.job, **short):
            parts = []
            for fetch, items in self._data.batches(train_state, shape, briefly=briefly):
                values = validate_once(train_state, fetch, _ignore)
                parts.append((metrics_of(train_state.job, values), items))
        metrics: dict[str, float] = mean_of(parts)
        return metrics


def _ignore(part: str) -> None:
    pass
