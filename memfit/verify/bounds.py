"""How far two runs of a window may differ by rounding alone.

A gradient is a sum of n micro-batches' gradients g_1 … g_n, each the same on one rank and on many; only the order of
the sum differs. Summed in fp32 in any order, the error of an element is at most (n - 1) u sum|g_i| with u = 2^-24
(Higham, Accuracy and Stability of Numerical Algorithms, 4.2); normalising rounds twice more. Two orders then
differ by at most

    2 (n + 1) u sum|g_i|

so a difference is reported relative to sum|g_i|, and the bound is one number for every element of every tensor. An
engine that changes the graph of a micro-batch rounds inside of it too: ``rounding`` adds that to sum|g_i|. The
loss is such a sum too. A weight's bound follows from its gradient's: the optimizer steps a copy with the gradient moved
by its bound, up and down, and the weight may differ by what that moves it, twice, and by the rounding of the step
itself. Where a true gradient is zero, Adam turns rounding into up to a full step; this bound contains that. One
that mixes elements (Muon, which also rounds to bf16 inside) steps once more, with each of them moved up or down at
random, and every element of a tensor may differ by what the one that moves most does.

Gradients that are summed in a type of fewer bits than fp32, as those of bf16 weights, have that type's u in its place.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from memfit.engine.refusals import is_elementwise
from memfit.verify.step_keys import key_before

UNIT = 2.0**-24
"""Rounding unit of fp32."""
STEP_ROUNDINGS = 16
"""Operations of an optimizer's update (Adam's are eight), each of which rounds once in either run."""


def rounding_unit(dtype: torch.dtype) -> float:
    """Largest relative error of one rounding to a floating-point type."""
    return torch.finfo(dtype).eps / 2


def coarser(*dtypes: torch.dtype) -> float:
    """How many times the rounding unit of fp32 that of the coarsest type is; at least 1."""
    return max(1.0, *(rounding_unit(dtype) / UNIT for dtype in dtypes if dtype.is_floating_point))


def sum_bound(micro_batches: int) -> float:
    """Largest difference of two orders of a sum of so many terms in fp32, relative to the sum of their magnitudes."""
    return 2 * (micro_batches + 1) * UNIT


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The largest difference found, relative to ``scale``, and how much of its bound it takes (1: all)."""

    relative: float = 0.0
    of_bound: float = 0.0
    name: str = ""

    def worse(self, other: Difference) -> Difference:
        """The one that takes more of its bound."""
        if other.of_bound > self.of_bound or (other.of_bound == self.of_bound and other.relative > self.relative):
            return other
        return self


def loss_difference(name: str, ours: float, theirs: float, scale: float, bound: float) -> Difference:
    """Relative to ``scale``, the sum of what the loss was added up from; where that is 0, to the other side's loss."""
    is_finite = math.isfinite(ours) and math.isfinite(theirs)
    relative = abs(ours - theirs) / (scale or abs(theirs) or 1.0) if is_finite else math.inf
    return Difference(relative=relative, of_bound=relative / bound, name=name)


def gradient_difference(
    ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], magnitudes: Mapping[str, Tensor], bound: float
) -> Difference:
    """Over every element of every tensor; one that only one side has, or that is 0 on one side, differs wholly.

    Args:
        bound: of gradients in fp32.
    """
    worst = Difference()
    for name in {**ours, **theirs}:
        if name not in ours or name not in theirs:
            worst = worst.worse(Difference(relative=1.0, of_bound=1 / bound, name=name))
            continue
        mine, others = ours[name].double(), theirs[name].double()
        scale = torch.maximum(magnitudes.get(name, mine).double().abs(), mine.abs())
        scale = torch.where(scale == 0, others.abs(), scale)
        apart = (mine - others).abs()
        relative = _largest(torch.where(apart == 0, 0.0, apart / scale.clamp_min(torch.finfo(torch.float32).tiny)))
        own = bound * coarser(ours[name].dtype, theirs[name].dtype)
        worst = worst.worse(Difference(relative=relative, of_bound=relative / own, name=name))
    return worst


def weight_difference(
    ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], allowed: Mapping[str, Tensor]
) -> Difference:
    """Relative to each tensor's largest element, or where it is 0, to the other side's; ``allowed`` is the bound of
    every element, of which a difference takes infinitely much where it is 0."""
    worst = Difference()
    for name, mine in ours.items():
        apart = (mine.double() - theirs[name].double()).abs()
        unit = UNIT * coarser(mine.dtype)
        room = allowed[name].double() if name in allowed else mine.abs().double() * 2 * unit
        ratio = _largest(torch.where(apart == 0, 0.0, apart / room))
        largest = mine.abs().max() or theirs[name].abs().max().clamp_min(torch.finfo(torch.float32).tiny)
        worst = worst.worse(Difference(relative=_largest(apart / largest), of_bound=ratio, name=name))
    return worst


def _largest(ratios: Tensor) -> float:
    """The largest one; infinite where one is no number, as of elements that are not finite."""
    largest = float(ratios.max())
    return math.inf if math.isnan(largest) else largest


def bounds_of_steps(
    steps: Iterable[tuple[Optimizer, Sequence[Sequence[str]]]],
    gradients: Mapping[str, Tensor],
    magnitudes: Mapping[str, Tensor],
    scales: Mapping[str, float],
    bound: float,
) -> dict[str, Tensor]:
    """For every element of every step of a window, the largest difference that rounding explains. An optimizer keeps
    some of what a step before in the window was given, which moves the weight by no more than it did then.

    Args:
        steps: each optimizer as before its step, and the keys of the parameters of each of its groups.
        gradients, magnitudes, scales: by key; see ``weight_bounds``.
    """
    bounds: dict[str, Tensor] = {}
    for optimizer, keys in steps:
        for key, own in weight_bounds(optimizer, keys, gradients, magnitudes, scales, bound).items():
            before = key_before(key)
            bounds[key] = own if before is None else own + bounds[before]
    return bounds


def weight_bounds(
    optimizer: Optimizer,
    names: Sequence[Sequence[str]],
    gradients: Mapping[str, Tensor],
    magnitudes: Mapping[str, Tensor],
    scales: Mapping[str, float],
    bound: float,
) -> dict[str, Tensor]:
    """For every element that an optimizer steps, the largest difference that rounding explains.

    Args:
        optimizer: as before its step, with its parameters; it is not changed.
        names: ``net.path`` of the parameters of each of its groups.
        bound: of gradients in fp32, relative to ``magnitudes``; clipping may double it.
    """
    mixes = not is_elementwise(optimizer)
    signs: list[Callable[[Tensor], Tensor | float]] = [lambda _: 0.0, lambda _: 1.0, lambda _: -1.0]
    ends = []
    for sign in [*signs, _at_random] if mixes else signs:
        trial = copy.deepcopy(optimizer)
        for group, own in zip(trial.param_groups, names, strict=True):
            for parameter, name in zip(group["params"], own, strict=True):
                parameter.grad = None
                if name in gradients:
                    relative = bound * coarser(gradients[name].dtype)
                    room = (
                        2 * relative * torch.maximum(magnitudes.get(name, gradients[name]).abs(), gradients[name].abs())
                    )
                    parameter.grad = (gradients[name] + sign(room) * room) * scales[name]
        trial.step()
        ends.append([p.detach() for group in trial.param_groups for p in group["params"]])
    before = [p.detach() for group in optimizer.param_groups for p in group["params"]]
    bounds = {}
    for name, old, mid, *others in zip([name for own in names for name in own], before, *ends, strict=True):
        moved = torch.stack([(other - mid).abs() for other in others])
        most = moved.max().expand_as(mid) if mixes else moved.amax(0)
        unit = UNIT * coarser(mid.dtype)
        rounding = STEP_ROUNDINGS * unit * (mid - old).abs() + 4 * unit * torch.maximum(mid.abs(), old.abs())
        bounds[name] = 2 * most + rounding
    return bounds


def _at_random(like: Tensor) -> Tensor:
    generator = torch.Generator(like.device).manual_seed(like.numel())
    return torch.randint(0, 2, like.shape, generator=generator, device=like.device).to(like.dtype) * 2 - 1
