"""Checkpoint selection against exhaustive search, and against the allocator's own events.

python -m pytest tests/planner/test_selection.py
"""

import itertools
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.planner import extremes, measured, select
from memfit.apply.checkpointing import recompute
from memfit.job import Shape
from memfit.planner.search.checkpoint_options import CheckpointOption
from memfit.planner.search.selection import Problem, floor, least_seconds, solve
from testing.large_nets import Decoder, Dit, UNet


@st.composite
def chains(draw):
    """A chain of blocks: while one's backward runs, the blocks before it are kept, and its own peak comes on top."""
    blocks = draw(st.integers(1, 5))
    ways = []
    for _ in range(blocks):
        some = []
        for _ in range(draw(st.integers(1, 4))):
            kept, own = draw(st.integers(0, 64)), draw(st.integers(0, 96))
            some.append(
                CheckpointOption(
                    modes={},
                    kept=np.array([[float(kept << 20)]]),
                    peak=np.array([[0.0, float(own << 20)]]),
                    seconds=draw(st.integers(0, 100)) / 8,
                )
            )
        ways.append(some)
    base = float(draw(st.integers(0, 32)) << 20)
    rows = []
    for own in range(blocks):
        rows.append(
            [
                np.array([w.peak[0, 1] if b == own else w.kept.sum() if b < own else 0.0 for w in ways[b]])
                for b in range(blocks)
            ]
        )
    problem = Problem(
        ways=ways, base=np.full(blocks, base), bytes=[np.stack([r[b] for r in rows]) for b in range(blocks)]
    )
    return problem, draw(st.integers(0, 400)) << 20


@settings(max_examples=150, deadline=None)
@given(chains())
def test_never_worse_than_an_exhaustive_search(case):
    problem, budget = case
    every = list(itertools.product(*(range(len(ways)) for ways in problem.ways)))
    fitting = [choice for choice in every if problem.peak(choice) <= budget]
    result, bound = solve(problem, budget), least_seconds(problem, budget)
    if not fitting:
        assert result is None
        assert problem.peak(floor(problem)) == pytest.approx(min(map(problem.peak, every)), rel=1e-6)
        return
    assert result is not None
    assert bound <= min(map(problem.seconds, fitting))
    assert problem.peak(result) <= budget * (1 + 1e-9) + 1
    assert problem.seconds(result) == pytest.approx(min(map(problem.seconds, fitting)), rel=1e-5, abs=1e-4)


def test_a_plan_that_chooses_nothing_does_not_import_scipys_optimizers():
    code = "import sys, memfit.planner.search.search; print('scipy.optimize' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_seconds_that_no_choice_is_below_are_near_those_of_the_best():
    """Halves of blocks are what the bound may have and a choice may not: it is below by less than one block's."""
    ways = [
        CheckpointOption(modes={}, kept=np.zeros((1, 1)), peak=np.zeros((1, 2)), seconds=seconds)
        for seconds in (0.0, 1.0)
    ]
    problem = Problem(ways=[ways] * 20, base=np.zeros(1), bytes=[np.array([[10.0 * (1 << 20), float(1 << 20)]])] * 20)
    budgets = [least * (1 << 20) for least in (19, 20, 25, 110, 200)]
    assert [least_seconds(problem, budget) for budget in budgets] == pytest.approx(
        [np.inf, 20.0, 175 / 9, 10.0, 0.0], abs=1e-4
    )
    assert [problem.seconds(solve(problem, budget)) for budget in budgets[1:]] == [20.0, 20.0, 10.0, 0.0]


CASES = {
    "dit": (Dit(dim=64, depth=6, heads=4, frames=64), Shape(items=2)),
    "unet": (UNet(widths="32,64,64,64", side=16), Shape(items=2)),
    "decoder": (Decoder(dim=64, depth=5, heads=4, length=64, vocabulary=128), Shape(items=2)),
}


@pytest.mark.parametrize("name", ["dit", "decoder", pytest.param("unet", marks=pytest.mark.slow)])
def test_the_measured_peak_is_within_the_budget_and_its_prediction(name):
    job, shape = CASES[name]
    torch.manual_seed(0)
    nets = job.nets()
    unlimited = measured(job, nets, shape, {})
    every, (kept, recomputed) = extremes(job, shape)
    assert (kept, recomputed) == pytest.approx((unlimited, measured(job, nets, shape, every)), rel=0.02)
    budgets = {percent: recomputed + (kept - recomputed) * percent // 100 for percent in (75, 50, 25)}
    chosen = select(job, shape, budgets)
    assert chosen.keys() == budgets.keys()
    for percent, (modes, peak) in chosen.items():
        assert peak <= budgets[percent]
        assert measured(job, nets, shape, modes) <= budgets[percent] * 1.005
    assert len({len(modes) for modes, _ in chosen.values()}) > 1


@pytest.mark.parametrize("name", ["dit", "decoder", pytest.param("unet", marks=pytest.mark.slow)])
def test_a_selection_learns_the_same_bit_for_bit_and_is_undone(name):
    job, shape = CASES[name]
    torch.manual_seed(0)
    nets = job.nets()
    kept, recomputed = extremes(job, shape)[1]
    modes, _ = select(job, shape, {40: recomputed + (kept - recomputed) * 2 // 5})[40]
    assert set(modes.values()) - {"keep"}
    plain, chosen = gradients(job, nets, shape, {}), gradients(job, nets, shape, modes)
    assert plain.keys() == chosen.keys()
    assert all(torch.equal(plain[key], chosen[key]) for key in plain)
    assert not any("forward" in vars(module) for net in nets.values() for module in net.modules())


def gradients(job, nets, shape, modes):
    torch.manual_seed(1)
    for net in nets.values():
        net.zero_grad(set_to_none=True)
    batch = job.batch(shape)
    with recompute(nets, modes):
        total, units = job.loss(nets, batch)
        (total / units).backward()
    by_name = {
        name: p.grad.clone() for net in nets.values() for name, p in net.named_parameters() if p.grad is not None
    }
    return by_name | {"loss": total.detach()}
