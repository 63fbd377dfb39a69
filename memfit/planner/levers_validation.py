"""Levers of validation and saving, from those that cost nothing to leaving it out."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING

from memfit.job import Job
from memfit.plan import Lever
from memfit.planner import phase_room
from memfit.trace.step import Tracing

if TYPE_CHECKING:
    from memfit.planner.search import Candidate


def made(
    name: str, taken: bool, saves: Mapping[str, int], costs: str, reason: str, *,
    seconds: float | None = None, changes_learning: bool = False,
) -> Lever:  # fmt: skip
    """A lever; what it saves is the most that it saves in any phase."""
    saves = {phase: max(nbytes, 0) for phase, nbytes in saves.items()}
    return Lever(
        name=name, taken=taken, saves_bytes=max(saves.values(), default=0), costs=costs, reason=reason, saves=saves,
        seconds=seconds, changes_learning=changes_learning,
    )  # fmt: skip


def of_validation(job: Job, found: Candidate, how: Tracing, gradients: int) -> list[Lever]:
    """What makes room for validation and saving.

    Args:
        gradients: bytes of all gradients.
    """
    if not job.validates:
        return []
    live = gradients if job.zero_grad == "after_forward" else 0
    there = found.footprint.phases.get("validate")
    state = found.footprint.phases["train"].categories["optimizer"]
    taken = phase_room.words(how.validation, job.validation_levers)
    free = "gradients of the last window are of no use there" if live else "the job frees them after each step already"
    levers = [
        made(
            "free gradients", how.validation.gradients == "free", {"validate": live, "save": live}, "nothing", free,
            seconds=0.0,
        ),
        *_autocast(job, found),
    ]  # fmt: skip
    seen = found.validated
    brought = [before - after for before, after in pairwise(seen)]
    for name in job.validation_levers:
        saves = {"validate": brought.pop(0)} if brought else {}
        levers.append(made(name, name in taken, saves, "smaller kernels", _why(name in taken)))
    own = sum(there.categories[name] for name in ("temporaries", "inputs", "workspace")) if there else 0
    if phase_room.can_be_smaller(job):
        name = "smaller validation batch"
        part = own - own // max(found.geometry.micro_batch // (job.longest or 1), 1)
        part = brought.pop(0) if brought else part
        levers.append(made(name, name in taken, {"validate": part}, "smaller kernels", _why(name in taken)))
    for name, nbytes, costs in (
        ("optimizer state aside in validation", state, "two copies"),
        ("skip validation", own, "no validation in the run"),
    ):
        levers.append(made(name, name in taken, {"validate": nbytes}, costs, _why(name in taken)))
    apart = "on the same card the training's memory stays where it is; memfit validate RUN does it on another one"
    return [
        *levers,
        made("validation in a separate process", False, {"validate": own}, "a second copy of the nets", apart),
    ]


def _autocast(job: Job, found: Candidate) -> list[Lever]:
    """Casts of weights that autocast keeps while it is open, half as large as they are in single precision."""
    if job.precision == "fp32":
        return []
    casts = found.footprint.phases["train"].categories["parameters"] // 2
    why = "the job's validation opens it itself; it holds a cast of each weight meanwhile, at most so much"
    return [made("no autocast in validation", False, {"validate": casts}, "products in single precision", why)]


def _why(taken: bool) -> str:
    return "validation does not fit without" if taken else "validation fits without"
