"""What questions need of a job beside its traces, as it is kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from memfit.planner.prediction import NetSize


@dataclass(frozen=True, kw_only=True)
class Policy:
    """A way to run a job: settings that differ from the job's, and what it recomputes."""

    name: str
    checkpointing: Mapping[str, str]
    changes: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class JobFacts:
    """What questions need of a job beside its traces."""

    unit: str
    longest: int | None
    precision: str
    """Empty where it is not known, as of a script."""
    checkpoint: str
    nets: tuple[NetSize, ...]
    own: Mapping[str, str]
    """The job's own recomputation: mode by module path."""
    every: Mapping[str, str]
    """Every module that may be recomputed."""
    whole_numbers: Mapping[str, int | None]
    """Settings that hold a whole number, and what they hold."""
    policies: tuple[Policy, ...]


def facts_to_json(facts: JobFacts) -> dict[str, Any]:
    """The facts as plain JSON."""
    return asdict(facts)


def facts_from_json(values: Mapping[str, Any]) -> JobFacts:
    """What ``facts_to_json`` wrote."""
    known = dict(values)
    known["nets"] = tuple(NetSize(**net) for net in known["nets"])
    known["policies"] = tuple(Policy(**policy) for policy in known["policies"])
    return JobFacts(**known)
