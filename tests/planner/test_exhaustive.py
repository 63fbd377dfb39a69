"""The choice is never worse than an exhaustive search: random chains of blocks and parts, in every mode a plan has.

python -m pytest tests/planner/test_exhaustive.py
"""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memfit.planner.search.checkpoint_options import Observed, checkpoint_options_of
from memfit.planner.search.layout import Layout, RecomputableBlock
from memfit.planner.search.observation import Observation
from memfit.planner.search.selection import problem_of, solve

MIB = 1 << 20
BLOCK_MODES, PART_MODES = ("full", "selective", "offload"), ("full", "selective")


@st.composite
def chains(draw):
    """Blocks of up to two parts; by mode, what each keeps (MiB), its own peaks in both passes, and its seconds."""

    def numbers(*shape, most=64):
        size = int(np.prod(shape))
        return np.array(draw(st.lists(st.integers(0, most), min_size=size, max_size=size)), float).reshape(shape)

    names = [[f"net.{b}.{p}" for p in range(draw(st.integers(0, 2)))] for b in range(draw(st.integers(1, 3)))]
    layout = Layout(blocks=tuple(RecomputableBlock(path=f"net.{b}", parts=tuple(some)) for b, some in enumerate(names)))
    units, blocks = len(layout.units), len(layout.blocks)
    order = np.tri(units, k=-1)
    block_order = np.array([[float(layout.block_of[u] < b) for u in range(units)] for b in range(blocks)])
    inside = (layout.block_of[:, None] == layout.block_of[None]) * order
    resident = float(draw(st.integers(0, 32)) * MIB)

    def seen(kept):
        return Observation(
            kept=kept[None] * MIB,
            unit_peak=numbers(1, 2, units, most=96) * MIB + resident + MIB,
            block_peak=numbers(1, 2, blocks, most=96) * MIB + resident + MIB,
            seconds=numbers(units, most=100) / 8,
            total_seconds=0.0,
            peak=0.0,
            resident=resident,
            unit_alive=np.broadcast_to(inside, (1, 2, units, units)),
            block_alive=np.broadcast_to(block_order, (1, 2, blocks, units)),
            gaps=[],
        )

    keep = seen(numbers(units) + 1)
    last = np.array([path == layout.blocks[b].path for b, path in layout.units])
    parts = {mode: seen(np.where(last, keep.kept[0] / MIB, numbers(units))) for mode in PART_MODES}
    observed = Observed(
        layout=layout,
        keep=keep,
        blocks={mode: seen(numbers(units)) for mode in BLOCK_MODES},
        parts=parts if units > blocks else {},
        overhead={mode: np.zeros(units) for mode in BLOCK_MODES},
        block_overhead={mode: np.zeros(blocks) for mode in BLOCK_MODES},
    )
    return observed, draw(st.integers(0, 500)) * MIB


def choices(observed, block):
    """Every way to run one block: (what it keeps, own peaks in both passes, seconds more than keeping everything)."""
    layout, keep = observed.layout, observed.keep
    mine = [u for u, (b, _) in enumerate(layout.units) if b == block]
    plain = sum(keep.seconds[u] for u in mine)
    for mode in ("keep", *observed.blocks):
        first = observed.blocks.get(mode, keep)
        slower = max(sum(first.seconds[u] for u in mine) - plain, 0) if mode != "keep" else 0.0
        yield sum(first.kept[0, u] for u in mine), [first.block_peak[0, p, block] for p in (0, 1)], slower
    for modes in itertools.product(("keep", *observed.parts), repeat=len(mine) - 1):
        if set(modes) <= {"keep"}:
            continue
        seen = [*(observed.parts.get(mode, keep) for mode in modes), keep]
        kept = [first.kept[0, u] for first, u in zip(seen, mine, strict=True)]
        peaks = [
            max(first.unit_peak[0, p, u] + sum(kept[:i]) for i, (first, u) in enumerate(zip(seen, mine, strict=True)))
            for p in (0, 1)
        ]
        changed = [(first, u) for first, u, mode in zip(seen, mine, modes, strict=False) if mode != "keep"]
        yield sum(kept), peaks, max(sum(first.seconds[u] - keep.seconds[u] for first, u in changed), 0)


def highest(chosen):
    """A chain's peak: while a block runs, in the forward or the backward, what the blocks before it keep is there."""
    before = np.cumsum([0.0, *(kept for kept, _, _ in chosen)])
    return max(held + peak for held, (_, peaks, _) in zip(before, chosen, strict=False) for peak in peaks)


@settings(max_examples=80, deadline=None)
@given(chains())
def test_never_worse_than_every_combination_of_modes(case):
    observed, budget = case
    layout = observed.layout
    every = list(itertools.product(*(list(choices(observed, b)) for b in range(len(layout.blocks)))))
    fitting = [sum(item[2] for item in chosen) for chosen in every if highest(chosen) <= budget]
    problem = problem_of(layout, observed.keep, checkpoint_options_of(observed))
    result = solve(problem, budget)
    if not fitting:
        assert result is None
        return
    assert result is not None
    assert problem.peak(result) <= budget * (1 + 1e-9) + 1
    assert problem.seconds(result) == pytest.approx(min(fitting), rel=1e-5, abs=1e-4)


@settings(max_examples=40, deadline=None)
@given(chains())
def test_what_a_choice_is_said_to_take_is_what_its_chain_takes(case):
    """The rows of the integer program, beside the chain itself, where every block keeps everything."""
    observed, _ = case
    problem = problem_of(observed.layout, observed.keep, checkpoint_options_of(observed))
    kept = [next(choices(observed, b)) for b in range(len(observed.layout.blocks))]
    fastest = [next(i for i, way in enumerate(ways) if not way.modes) for ways in problem.ways]
    assert problem.peak(fastest) == pytest.approx(highest(kept))
