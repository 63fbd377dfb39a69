"""One window on one rank against the same window on many: differences, bounds, and what a difference points at."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from memfit.job import Job
from memfit.verify.bounds import (
    Difference,
    bounds_of_steps,
    coarser,
    gradient_difference,
    loss_difference,
    sum_bound,
    weight_difference,
)
from memfit.verify.findings import VerifyFinding
from memfit.verify.recording_engine import RecordedWindow

SAME_LOSS = 1e-5
"""Two computations of the same micro-batch's loss, relative: well above fp32 rounding, well below another draw."""

Micro = dict[str, list[dict[str, tuple[float, float]]]]


def compare(
    job: Job,
    alone: dict[str, Any],
    together: tuple[RecordedWindow, dict[str, float]],
    everyone: list[tuple[Micro, dict[str, list[float]]]],
    shares: list[int],
    *,
    cut: bool = False,
) -> dict[str, Any]:
    """Differences of one window.

    Args:
        alone: what one rank recorded.
        together: what rank 0 of many recorded: its engine's record, and the window's losses.
        everyone: of every rank the losses of its micro-batches, and sums of its nets' weights.
        shares: micro-batches of each rank.
        cut: whether ranks hold parts of layers.
    """
    before: RecordedWindow = alone["seen"]
    seen, losses = together
    bound = sum_bound(sum(shares))
    apart = set(job.unsynchronised)
    mine = {name: value for name, value in before.gradients.items() if name.split(".")[0] not in apart}
    theirs = {name: value for name, value in seen.gradients.items() if name.split(".")[0] not in apart}
    gradients = gradient_difference(mine, theirs, before.magnitudes, bound)
    allowed = bounds_of_steps(before.steps, before.gradients, before.magnitudes, before.scales, bound)
    shared = {name: value for name, value in before.weights.items() if name.split(".")[0] not in apart}
    parameters = weight_difference(shared, seen.weights, allowed)
    shared = {name: value for name, value in before.averages.items() if name.split(".")[0] not in apart}
    averages = weight_difference(shared, seen.averages, {})
    loss = Difference()
    for name, value in alone["losses"].items():
        scale = _magnitude(before.micro_losses, name, value) + before.loss_magnitudes.get(name, 0.0)
        loss = loss.worse(loss_difference(name, value, losses.get(name, math.inf), scale, bound))
    rounded = {name: bound * value for name, value in before.loss_magnitudes.items()}
    findings = [*_other_draws(before.micro_losses, [gathered for gathered, _ in everyone], shares, rounded, cut=cut)]
    findings += _other_weights(job, [gathered for _, gathered in everyone])
    findings += _moving_buffers(list(before.moved))
    findings += _coarse_sums(mine, before.magnitudes, bound)
    return {
        "differences": {
            "loss": asdict(loss),
            "gradients": asdict(gradients),
            "parameters": asdict(parameters),
            "averages": asdict(averages),
        },
        "bound": bound,
        "findings": [asdict(finding) for finding in findings],
    }


def _magnitude(micro: Micro, name: str, value_of_window: float) -> float:
    """The loss's terms by size, over the window's units."""
    pairs = [losses[name] for turn in micro.values() for losses in turn if name in losses]
    units = _units(micro, name)
    return max(sum(abs(value) for value, _ in pairs) / units if units else 0.0, abs(value_of_window))


def _units(micro: Micro, name: str) -> float:
    """Valid units of a loss in a window."""
    return sum(losses[name][1] for turn in micro.values() for losses in turn if name in losses)


def sum_of_parts(parts: list[Micro]) -> Micro:
    """Losses of micro-batches whose sequences are divided over ranks: of each loss the sum of all parts, and the units
    of them together. Of one rank they are its own."""
    if len(parts) == 1:
        return parts[0]
    return {
        turn: [
            {
                name: (
                    sum(part[turn][index][name][0] for part in parts),
                    sum(part[turn][index][name][1] for part in parts),
                )
                for name in losses
            }
            for index, losses in enumerate(of_turn)
        ]
        for turn, of_turn in parts[0].items()
    }


def _other_draws(
    alone: Micro, ranks: list[Micro], shares: list[int], rounded: Mapping[str, float], *, cut: bool
) -> list[VerifyFinding]:
    """Finds losses that depend on the rank: equal samples, weights and random streams, and another loss.

    Args:
        rounded: by loss, what the window's may differ by where layers are cut; that of a single micro-batch may make up
            all of it.
    """
    room = {name: more * _units(alone, name) for name, more in rounded.items()}
    starts = [sum(shares[:rank]) for rank in range(len(shares))]
    for rank, mine in enumerate(ranks):
        for turn, losses in mine.items():
            for index, micro_losses in enumerate(losses[: shares[rank]]):
                for name, (value, units) in micro_losses.items():
                    other, count = alone[turn][starts[rank] + index].get(name, (float("nan"), 0.0))
                    most = SAME_LOSS * max(abs(value), abs(other)) + room.get(name, 0.0)
                    if units != count or not abs(value - other) <= most:
                        why = (
                            "dropout in layers that are cut draws other numbers, or the job does; verify with dropout 0"
                            if cut
                            else "the job draws from a generator of its own, keeps a state, or asks for its rank; "
                            "draw from torch's default one"
                        )
                        text = (
                            f"rank {rank} computes {name} = {value:.7g} over {units:g} for samples for which one rank "
                            f"computes {other:.7g} over {count:g}, with the same weights and seeds: {why}"
                        )
                        return [VerifyFinding(code="rank_draws", kind="fault", text=text)]
    return []


def _moving_buffers(names: list[str]) -> list[VerifyFinding]:
    """State that a forward moves, as spectral normalisation's vectors: it follows the number of forwards of a rank."""
    if not names:
        return []
    some = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    text = (
        f"forwards move buffers ({some}): a rank that runs fewer micro-batches moves them less, so they and what is "
        "computed with them differ by the number of ranks; compared with the window's first ones"
    )
    return [VerifyFinding(code="moving_buffers", kind="note", text=text)]


def _coarse_sums(
    gradients: Mapping[str, Tensor], magnitudes: Mapping[str, Tensor], bound: float
) -> list[VerifyFinding]:
    """Gradients in a type of fewer bits than fp32: how large a part of them may be rounding."""
    halves = {name: gradient for name, gradient in gradients.items() if coarser(gradient.dtype) > 1}
    whole = sum(float(gradient.double().square().sum()) for gradient in halves.values()) ** 0.5
    if not whole:
        return []
    rooms = [
        bound * coarser(gradient.dtype) * torch.maximum(magnitudes.get(name, gradient).abs(), gradient.abs()).double()
        for name, gradient in halves.items()
    ]
    share = sum(float(room.square().sum()) for room in rooms) ** 0.5 / whole
    kinds = ", ".join(sorted({str(gradient.dtype).removeprefix("torch.") for gradient in halves.values()}))
    text = (
        f"gradients of {len(halves)} parameters are {kinds}: differences of up to {100 * share:.2g} % of them may be "
        "rounding, and smaller faults are not seen; verify the job with float32 nets too, where it can build them"
    )
    return [VerifyFinding(code="coarse_gradients", kind="note", text=text)]


def _other_weights(job: Job, ranks: list[dict[str, list[float]]]) -> list[VerifyFinding]:
    """Nets that hold NaN, or are not the same on all ranks, after a step. Infinities may be a mask's."""
    findings = []
    for name in ranks[0]:
        if any(math.isnan(value) for sums in ranks for value in sums[name]):
            text = f"net {name} holds NaN after a step on {len(ranks)} ranks"
            findings.append(VerifyFinding(code="nan_weights", kind="fault", text=text))
        elif any(sums[name] != ranks[0][name] for sums in ranks[1:]):
            declared = name in job.unsynchronised
            text = f"net {name} has other weights on each rank after a step" + (
                ": the job trains it by each rank alone (unsynchronised); left out of the comparison"
                if declared
                else ", and the job does not say so"
            )
            findings.append(VerifyFinding(code="unsynchronised", kind="note" if declared else "fault", text=text))
    return findings
