"""OptionContext: what options are described from; and an option with its bytes by phase, its time and its reason."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from memfit.device.hardware.catalogue import Device
from memfit.job import Job, Nets, is_trained
from memfit.plan import MemoryOption
from memfit.planner.live_bytes import LiveBytes, highest

if TYPE_CHECKING:
    from memfit.planner.options.option_traces import OptionTraces
    from memfit.planner.search.full_step import FullStep, ReplayedCandidate

MICRO, STEP = ("fetch", "forward", "zero_grad", "backward"), ("clip", "optimizer")
"""Parts of a window that depend on the choices for the micro-batch, and on those for the step."""


@dataclass(frozen=True, kw_only=True, eq=False)
class OptionContext:
    """A plan that fits, its full trace, and the traces of its variants."""

    job: Job
    device: Device
    nets: Nets
    """Nets whose tensors have no storage."""
    own: Mapping[str, str]
    """The job's own checkpointing."""
    keep: Collection[str]
    full_step: FullStep
    traces: OptionTraces

    @property
    def candidate(self) -> ReplayedCandidate:
        return self.full_step.candidate

    @property
    def live_bytes(self) -> LiveBytes:
        return self.full_step.live_bytes

    @property
    def phases(self) -> tuple[str, ...]:
        """Names of the phases that the plan has."""
        return tuple(self.peaks)

    @cached_property
    def peaks(self) -> dict[str, int]:
        """Peak of tensors' bytes by phase."""
        return self.live_bytes.peaks()

    @cached_property
    def gradients(self) -> int:
        """Bytes of all gradients."""
        trained = [net for net in self.nets.values() if is_trained(net)]
        return sum(p.numel() * p.itemsize for net in trained for p in net.parameters() if p.requires_grad)

    def train_saves(self, *, micro: str = "chosen", step: str = "chosen") -> int | None:
        """Bytes by which training's peak falls with another micro-batch or step; None where that was not traced."""
        tried, steps = self.traces.micro, self.traces.steps
        if not {"chosen", micro} <= tried.keys() or not {"chosen", step} <= steps.keys():
            return None
        now = highest(self.live_bytes.alive, self.live_bytes.parts(STEP))
        rest = highest(
            self.live_bytes.alive, self.live_bytes.events_in(("setup", "train")) & ~self.live_bytes.parts(MICRO + STEP)
        )
        stepping = now + steps[step].peak - steps["chosen"].peak
        return max(tried["chosen"].peak, now, rest) - max(tried[micro].peak, stepping, rest)

    def all_phases(self, nbytes: int) -> dict[str, int]:
        """The same number of bytes in every phase."""
        return dict.fromkeys(self.phases, nbytes)


ROUNDING = 1e-9
"""Seconds that are no difference of two times but of their sums' last digits: no kernel takes as little."""


def memory_option(
    context: OptionContext, name: str, applied: bool, saves: Mapping[str, int | None], reason: str, *,
    seconds: float | None, each: str = "a window", costs: str = "", changes_learning: bool = False, unknown: str = "",
) -> MemoryOption:  # fmt: skip
    """An option with its bytes in every phase of the plan.

    Args:
        saves: bytes by phase; 0 for a phase that is not named; None: unknown.
        seconds: added time; None: unknown.
        each: what the time is counted for.
        costs: what the option costs besides time.
        unknown: why a figure is unknown.
    """
    known = {**dict.fromkeys(context.phases, 0), **saves}
    counted = {phase: nbytes for phase, nbytes in known.items() if nbytes is not None}
    assert unknown or (seconds is not None and len(counted) == len(known)), name
    if seconds is not None and abs(seconds) < ROUNDING:
        seconds = 0.0
    words = [costs] if costs else []
    if seconds is None:
        words.append("time unknown")
    elif seconds:
        words.append(f"{format_seconds(seconds)} {each}" if seconds > 0 else f"{format_seconds(-seconds)} less {each}")
    return MemoryOption(
        name=name, applied=applied, saves_bytes=max((*counted.values(), 0)), costs=", ".join(words) or "nothing",
        reason=reason, saves=counted, seconds=seconds, changes_learning=changes_learning, unknown=unknown,
    )  # fmt: skip


def format_seconds(seconds: float) -> str:
    """``1.25 s`` or ``12.5 ms``."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def more(here: float | None, there: float | None) -> float | None:
    """Seconds that ``here`` takes more than ``there``; None where either is unknown."""
    return None if here is None or there is None else here - there
