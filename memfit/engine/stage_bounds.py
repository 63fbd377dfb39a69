"""Bounds of a pipeline's stages: contiguous shares of the modules that run one after the other.

A stage may not hold a parameter that another one holds too, and has to hold a trained one.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence, Set
from itertools import accumulate, pairwise

from torch import nn

from memfit.errors import InputError

StageCost = Callable[[int, int, int], tuple[float, ...] | None]
"""Of a stage's number, its first module and one past its last: what it costs, the most important first. None: there can
be no such stage."""
FIRST_MODULES = "first_modules"
"""The choice of an engine that names the first module of each stage."""


def best_bounds(modules: int, stages: int, cost: StageCost) -> tuple[int, ...] | None:
    """The number of each stage's first module, and one past the last, where the largest costs of a stage are least.

    Costs are compared one after the other: of shares whose largest first cost is the least, those whose largest second
    cost is. Only the first is certain to be the least of all where it differs between stages.

    Args:
        modules: at least as many as there are stages.
        stages: how many there are.

    Returns:
        None where every division has a stage that there cannot be.
    """
    best: Mapping[int, tuple[tuple[float, ...], tuple[int, ...]]] = {0: ((), (0,))}
    for stage in range(stages):
        further: dict[int, tuple[tuple[float, ...], tuple[int, ...]]] = {}
        for begin, (worst, bounds) in best.items():
            left = stages - stage - 1
            ends = range(begin + 1, modules - left + 1) if left else [modules]
            for end in ends:
                own = cost(stage, begin, end)
                if own is None:
                    continue
                made = tuple(map(max, worst, own)) if worst else own
                if end not in further or made < further[end][0]:
                    further[end] = (made, (*bounds, end))
        best = further
    return best[modules][1] if modules in best else None


def equal_shares(costs: Sequence[float], sizes: Sequence[float], stages: int) -> tuple[int, ...]:
    """Bounds of shares whose largest cost is the least, and of those whose largest size is.

    Args:
        costs, sizes: of each module; at least as many as there are stages.
    """
    bounds = best_bounds(len(costs), stages, cost_of_shares(costs, sizes))
    assert bounds is not None
    return bounds


def cost_of_shares(*costs: Sequence[float]) -> StageCost:
    """Sums over the modules of a stage of each of these costs, which are of each module."""
    sums = [list(accumulate(each, initial=0)) for each in costs]
    return lambda stage, begin, end: tuple(each[end] - each[begin] for each in sums)


def may_be_stage(modules: Sequence[nn.Module], joined: Set[int] = frozenset()) -> Callable[[int, int], bool]:
    """Whether one stage may hold the modules from the first number to before the second.

    Args:
        joined: numbers of modules that are on the stage of the one before.
    """
    trained = [any(p.requires_grad for p in module.parameters()) for module in modules]
    before = list(accumulate(trained, initial=0))
    holders: dict[int, list[int]] = {}
    for number, module in enumerate(modules):
        for parameter in module.parameters():
            holders.setdefault(id(parameter), []).append(number)
    torn = set(joined) | {bound for numbers in holders.values() for bound in range(min(numbers) + 1, max(numbers) + 1)}
    return lambda begin, end: before[end] > before[begin] and begin not in torn and end not in torn


def named_bounds(paths: Sequence[str], first_modules: Sequence[str], stages: int, where: str) -> tuple[int, ...]:
    """Bounds of stages that begin with these modules.

    Args:
        paths: all modules in their order.
        where: what was asked for, for messages.

    Raises:
        InputError: it is another number of stages, or a name is no module's, or they are not in order.
    """
    seen = f"engine_choices.{FIRST_MODULES} on {where}"
    if len(first_modules) != stages:
        why = f"it names {len(first_modules)} modules, and there are {stages} stages"
        raise InputError(seen, why, "name the first module of each stage, or take the key out")
    for name in first_modules:
        if name not in paths:
            near = difflib.get_close_matches(name, paths, n=1, cutoff=0)
            why = f"{name!r} is none of the {len(paths)} modules that run one after the other"
            raise InputError(seen, why, f"write {near[0]}")
    bounds = tuple(paths.index(name) for name in first_modules)
    if bounds[0] != 0:
        raise InputError(seen, f"the first stage begins with {first_modules[0]}", f"write {paths[0]} first")
    for before, after in pairwise(bounds):
        if after <= before:
            why = f"{paths[after]} does not run after {paths[before]}"
            raise InputError(seen, why, "name them in the order in which they run")
    return (*bounds, len(paths))
