"""RUN/reduced_limits.json: what sharded ranks do with less, after memory ran out on one of them and all started again.

A rank of an engine in lockstep that fails inside of forward or backward leaves the others in a collective that it never
joins; it cannot ask them to repeat the window. It writes down what is to be smaller and ends; the others end when their
connection breaks, and torchrun starts all of them again, from the newest whole checkpoint. Where nothing can be made
smaller, they start again to train up to the window that failed, write a checkpoint of it, and stop.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from memfit.atomic_file import write_atomic
from memfit.engine.torchrun_env import is_restart
from memfit.errors import Exit
from memfit.plan import Plan
from memfit.train.run_folder import RunFolder, writing


@dataclass(frozen=True, kw_only=True)
class ReducedLimits:
    """What is smaller than planned."""

    most: int | None = None
    """Padded units of a micro-batch; None: as planned."""
    alone: tuple[int, ...] = ()
    """Samples with which memory ran out though they were alone: where it does once more, they do not fit."""
    left_out: tuple[int, ...] = ()
    """Samples that do not fit alone."""
    validations: int = 0
    """Times that a validation ran out of memory: each next one needs less."""
    validates: bool = True
    """False once a validation of this launch has raised an error that is not of memory."""
    stops_before: int | None = None
    """Window before which the ranks that start again write a checkpoint and stop."""
    reason: str = ""
    code: int = Exit.STOPPED
    """What is said then, and the exit code."""

    def and_also(self, other: ReducedLimits) -> ReducedLimits:
        """The smaller of both, in everything."""
        sizes = [limits.most for limits in (self, other) if limits.most is not None]
        return ReducedLimits(
            most=min(sizes, default=None),
            alone=tuple(sorted({*self.alone, *other.alone})),
            left_out=tuple(sorted({*self.left_out, *other.left_out})),
            validations=max(self.validations, other.validations),
            validates=self.validates and other.validates,
            stops_before=self.stops_before if other.stops_before is None else other.stops_before,
            reason=self.reason if other.stops_before is None else other.reason,
            code=self.code if other.stops_before is None else other.code,
        )


NO_REDUCTION = ReducedLimits()


class StartAgainError(RuntimeError):
    """This rank cannot go on, and all have to start again with less. The message says what failed, and where."""

    def __init__(self, message: str, limits: ReducedLimits) -> None:
        self.limits = limits
        super().__init__(message)


def read_reduced_limits(folder: RunFolder, plan: Plan) -> ReducedLimits:
    """What was written; nothing is smaller where there is no such file, or the plan is another."""
    try:
        saved = json.loads((folder.path / "reduced_limits.json").read_text())
        if saved.pop("planned") == _planned(plan):
            if not is_restart():
                # an earlier launch stopped so, or its job could not validate
                saved |= {"stops_before": None, "reason": "", "code": Exit.STOPPED, "validates": True}
            return ReducedLimits(**{**saved, "alone": tuple(saved["alone"]), "left_out": tuple(saved["left_out"])})
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return NO_REDUCTION


def write_reduced_limits(folder: RunFolder, plan: Plan, limits: ReducedLimits) -> None:
    """Adds to what was written.

    Raises:
        CannotWriteError: it cannot be written.
    """
    _write(folder, plan, read_reduced_limits(folder, plan).and_also(limits))


def set_reduced_limits(folder: RunFolder, plan: Plan, limits: ReducedLimits) -> None:
    """Writes these limits, whatever was written before.

    Raises:
        CannotWriteError: they cannot be written.
    """
    _write(folder, plan, limits)


def forget_earlier_stop(folder: RunFolder, plan: Plan) -> None:
    """Where a launch begins, removes from the file what only counted in an earlier one: ranks that are started again
    in this launch would take it for their own.

    Raises:
        CannotWriteError: it cannot be written.
    """
    if not is_restart() and (folder.path / "reduced_limits.json").exists():
        _write(folder, plan, read_reduced_limits(folder, plan))


def _write(folder: RunFolder, plan: Plan, limits: ReducedLimits) -> None:
    content = {"planned": _planned(plan), **asdict(limits)}
    with writing(folder.path / "reduced_limits.json"):
        write_atomic(folder.path / "reduced_limits.json", json.dumps(content) + "\n")


def _planned(plan: Plan) -> list[int | str]:
    return [plan.engine, plan.micro_batch, plan.budget_bytes]
