"""Ways: for each block of a layout, the choices of what to keep, with bytes, peaks and seconds.

A block's modes, and its parts' modes where all parts have the same, were traced (``observe``). A mixture, such as the
feed-forward recomputed and attention kept, is put together from them: what its parts keep is added, and its own peak
is the largest over its units of

    the unit's own peak in its mode + what is alive then of the block's other units in theirs
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from memfit.planner.search.layout import Layout
from memfit.planner.search.observation import Observation

RECOMPUTED = ("full", "selective")
"""Modes of a block, and of its parts. A block may also be moved to the host: ``offload``."""
LEAST = 0.002
"""Of what a block keeps: a slower way that saves less than this is no way."""


@dataclass(frozen=True, kw_only=True, eq=False)
class CheckpointOption:
    """One choice for a block."""

    modes: Mapping[str, str]
    """Mode by module path; empty: everything is kept."""
    kept: np.ndarray
    """float (turns, the block's units): bytes."""
    peak: np.ndarray
    """float (turns, 2): the block's own peak in the forward and the backward."""
    seconds: float
    """More than keeping everything takes."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Observed:
    """One micro-batch's shape, traced under every uniform choice. ``blocks`` and ``parts`` are by mode."""

    layout: Layout
    keep: Observation
    blocks: Mapping[str, Observation]
    parts: Mapping[str, Observation]
    overhead: Mapping[str, np.ndarray]
    """Seconds that recomputing a part takes beyond its operators, by mode and unit."""
    block_overhead: Mapping[str, np.ndarray]
    """Seconds that recomputing a block takes beyond its operators, by mode and block."""
    barred: frozenset[str] = frozenset()
    """Blocks and parts that cannot be recomputed selectively, since they write to what would be kept."""


def checkpoint_options_of(observed: Observed) -> list[list[CheckpointOption]]:
    """The ways of every block, from the fastest, which keeps everything; none that a faster one is as good as."""
    return [_undominated(list(_ways(observed, index))) for index in range(len(observed.layout.blocks))]


def _ways(observed: Observed, index: int) -> Iterator[CheckpointOption]:
    layout, keep = observed.layout, observed.keep
    block, units = layout.blocks[index], np.flatnonzero(layout.block_of == index)
    seconds = keep.seconds[units]
    yield CheckpointOption(modes={}, kept=keep.kept[:, units], peak=keep.block_peak[:, :, index], seconds=0.0)
    for mode, seen in observed.blocks.items():
        if mode == "selective" and block.path in observed.barred:
            continue
        more = float(seen.seconds[units].sum() - seconds.sum()) + float(observed.block_overhead[mode][index])
        yield CheckpointOption(
            modes={block.path: mode}, kept=seen.kept[:, units], peak=seen.block_peak[:, :, index], seconds=max(more, 0)
        )
    modes = [
        [mode for mode in ("keep", *observed.parts) if mode != "selective" or part not in observed.barred]
        for part in block.parts
    ]
    for chosen in itertools.product(*modes):
        if any(mode != "keep" for mode in chosen):
            yield _mixed(observed, block.parts, units, chosen)


def _mixed(observed: Observed, parts: tuple[str, ...], units: np.ndarray, chosen: tuple[str, ...]) -> CheckpointOption:
    """Parts in these modes; the rest of the block, its last unit, is kept."""
    keep = observed.keep
    seen = [observed.parts.get(mode, keep) for mode in chosen]
    rest = [observation.kept[:, units[-1]] for observation in (keep, *seen)]
    kept = np.stack(
        [observation.kept[:, unit] for observation, unit in zip(seen, units, strict=False)] + [np.max(rest, 0)], axis=1
    )
    own = np.stack(
        [observation.unit_peak[:, :, unit] for observation, unit in zip([*seen, keep], units, strict=True)], axis=2
    )
    alive = keep.unit_alive[:, :, units][:, :, :, units].copy()
    alive[:, :, range(len(units)), range(len(units))] = 0
    peak = np.where(own > 0, own + np.einsum("tpuv,tv->tpu", alive, kept), 0).max(axis=2)
    more = sum(
        observation.seconds[unit] - keep.seconds[unit] + observed.overhead[mode][unit]
        for observation, unit, mode in zip(seen, units, chosen, strict=False)
        if mode != "keep"
    )
    modes = {path: mode for path, mode in zip(parts, chosen, strict=True) if mode != "keep"}
    return CheckpointOption(modes=modes, kept=kept, peak=peak, seconds=max(float(more), 0))


def _undominated(ways: list[CheckpointOption]) -> list[CheckpointOption]:
    """Ways, from the fastest, that save more than any faster one: bytes that count, kept or at a peak."""
    least = LEAST * ways[0].kept.sum()
    left: list[CheckpointOption] = []
    for way in sorted(ways, key=lambda way: way.seconds):
        if not any((_bytes(other) <= _bytes(way) + least).all() for other in left):
            left.append(way)
    return left


def _bytes(way: CheckpointOption) -> np.ndarray:
    return np.concatenate([way.kept.sum(1), way.peak.ravel()])
