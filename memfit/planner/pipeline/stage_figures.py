"""StageFigures: what one stage of a pipeline has and takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class StageFigures:
    """One stage of a cut."""

    first_module: str
    last_module: str
    modules: int
    forward_seconds: float
    """Of a micro-batch; its backward has what is computed again."""
    backward_seconds: float
    process_bytes: int | None = None
    """Peak of its rank in training; None: not traced."""

    @property
    def seconds(self) -> float:
        """Of a micro-batch, forward and backward."""
        return self.forward_seconds + self.backward_seconds


def with_bytes(stages: Sequence[StageFigures], ranks: int, peaks: Mapping[int, int]) -> tuple[StageFigures, ...]:
    """The stages with the process bytes of the ranks that hold them.

    Args:
        ranks: of the pipeline: stage s is on rank s modulo so many.
        peaks: by place in the pipeline, as far as they were traced.
    """
    return tuple(replace(stage, process_bytes=peaks.get(number % ranks)) for number, stage in enumerate(stages))
