"""Optimizer steps of a loop: whether they come, and how many micro-batches each takes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from memfit.audit.streams import AuditWorld, RankStream


def step_findings(world: AuditWorld) -> Iterator[tuple[str, str]]:
    """(code, what was counted) of steps that never come, and of windows that differ."""
    streams = [epoch[0] for epoch in world.epochs]
    if any(stream.windows is None for stream in streams):
        return
    for number, stream in enumerate(streams):
        if len(stream.sizes) and not stream.windows:
            yield (
                "step-never-comes",
                f"Epoch {number} has {len(stream.sizes)} micro-batches and no optimizer step: nothing is learned.",
            )
            return
    windows = [size for stream in streams for size in stream.windows or ()]
    regular = regular_window(world)
    odd = [size for stream in streams for size in irregular(stream, regular)]
    if odd:
        yield (
            "uneven-windows",
            f"{_counted(windows, regular)}: steps learn from unequal batches{_leak(streams)}.",
        )


def _counted(windows: list[int], regular: int) -> str:
    """How many windows have how many micro-batches, those that most have first."""
    times = Counter(windows)
    others = [f"{times[size]} take{'s' * (times[size] == 1)} {size}" for size in sorted(times) if size != regular]
    more = f" and {len(others) - 4} other numbers" if len(others) > 4 else ""
    return f"Of {len(windows)} steps {times[regular]} take {regular} micro-batches, {', '.join(others[:4])}{more}"


def regular_window(world: AuditWorld) -> int:
    """Micro-batches of most windows; of as many, the larger number."""
    windows = Counter(size for epoch in world.epochs for size in epoch[0].windows or ())
    return max(windows, key=lambda size: (windows[size], size), default=0)


def irregular(stream: RankStream, regular: int) -> list[int]:
    """Windows of other sizes, but for a shorter one that ends the epoch."""
    windows = list(stream.windows or ())
    if windows and not stream.left_over and windows[-1] < regular:
        windows.pop()
    return [size for size in windows if size != regular]


def short_windows(stream: RankStream, regular: int) -> int:
    """Windows with fewer micro-batches than most."""
    return sum(size < regular for size in stream.windows or ())


def _leak(streams: list[RankStream]) -> str:
    if len(streams) > 1 and streams[0].left_over:
        return f", and the last {streams[0].left_over} micro-batches of epoch 0 leak into a step of epoch 1"
    return ""
