"""Whether a job's loss is a sum over its samples: only then may a window be split, over time or over ranks.

With random draws pinned, of a batch of samples A and B, s its sum and n its units:

    s(A and B) = s(A) + s(B)      n(A and B) = n(A) + n(B)      s(A and A) = 2 s(A)      n(A and A) = 2 n(A)

What breaks them tells the cause. Batch normalisation: they hold once it uses its running statistics. Units that do not
follow the batch: the loss is a mean, and a window a mean of means; or a fixed number, by which a short window is
divided as a full one. The sum of A and A is that of A: a mean again. Otherwise samples of a batch look at each other,
as in-batch negatives do. B is padded as it is in the batch of both; that padding alone changes a loss is a note.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from memfit.apply.batches import is_opaque
from memfit.apply.buffer_snapshot import BufferSnapshot, CannotRepeatError
from memfit.apply.losses import losses_of
from memfit.apply.train_state import TrainState, build
from memfit.job import Job, Turn
from memfit.nested_tensors import tensors_in
from memfit.train.loop.rng import COLLATE, LOSS, seed_stream
from memfit.verify.bounds import rounding_unit
from memfit.verify.findings import VerifyFinding
from memfit.verify.fixed_rng import FixedDraws, noting_host_draws
from memfit.verify.verify_plan import batch_items, samples_of

TOLERANCE = 1e-3
"""Relative. fp32 rounding is a hundred times below it; a fault is above it wherever samples differ by a percent."""
ROUNDINGS = 4
"""A batch's loss and those of its parts in a half type: each is rounded to it, and so is what it is the sum of."""

Sums = dict[str, tuple[float, float]]


@dataclass(frozen=True, kw_only=True)
class Batches:
    """A batch of five samples, cut and doubled."""

    both: Any
    first: Any
    """Three samples."""
    second: Any
    """Two samples, padded as in ``both``."""
    doubled: Any
    """The three samples, twice."""
    alone: Any
    """The two samples of ``second`` as they are collated by themselves."""


def split_findings(job: Job, seed: int = 0) -> list[VerifyFinding]:
    """What of a job's losses depends on how a window is split."""
    train_state = build(job, "cpu")
    batches = batches_of(job, seed)
    _move_weights(train_state)
    seen: list[FixedDraws] = []
    findings: list[VerifyFinding] = []
    host: dict[str, None] = {}
    for turn in job.turns(list(train_state.optimizers)):
        try:
            _sums(train_state, turn, batches.first, seen)
        except CannotRepeatError as error:
            text = f"turn {turn.name!r}: {error}: each rank changes it by its own samples; change buffers, or step it"
            return [*findings, VerifyFinding(code="changed_in_forward", kind="fault", text=text)]
        host = {name: None for draws in seen for name in draws.host}
        findings += _turn_findings(train_state, turn, batches, seen, sums_hold=not host)
    findings += (
        _padding(train_state, job, batches, seen) if job.longest is not None or job.lengths() is not None else []
    )
    return _unique([*findings, *_batch_norm(job, seen), *_draws(seen, list(host))])


def batches_of(job: Job, seed: int) -> Batches:
    """Five samples of the job's data set, the longest first."""
    samples, lengths = samples_of(job)
    count = min(len(samples), 48)
    order = sorted(range(count), key=lambda i: (-(lengths[i] if lengths is not None else 1), i))
    ids = [order[min(place, count - 1)] for place in (0, 1, 2, count // 2, count // 2 + 1)]

    def collate(chosen: Sequence[int]) -> Any:
        seed_stream(seed, 0, 0, COLLATE)
        return job.collate([samples[i] for i in chosen])

    both = collate(ids)
    sliceable = not is_opaque(both) and all(t.dim() == 0 or t.shape[0] == 5 for t in tensors_in(both))

    def part(chosen: Sequence[int]) -> Any:
        return batch_items(both, chosen, 5) if sliceable else collate([ids[i] for i in chosen])

    return Batches(
        both=both, first=part([0, 1, 2]), second=part([3, 4]), doubled=part([0, 1, 2] * 2), alone=collate(ids[3:])
    )


def _move_weights(train_state: TrainState) -> None:
    """Weights that start at zero hide what lies behind them: every one is moved a little."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in train_state.parameters_of(tuple(train_state.optimizers)):
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(noise.to(parameter), alpha=0.05 * (float(parameter.abs().mean()) or 0.2))


def _sums(
    train_state: TrainState, turn: Turn, batch: Any, seen: list[FixedDraws], *, batch_statistics: bool = True
) -> Sums:
    """Sum and units of each loss, with draws pinned; nothing of the nets changes."""
    moving = BufferSnapshot(train_state.nets)
    moving.keep()
    draws = FixedDraws(train_state.nets, batch_statistics=batch_statistics)
    seed_stream(0, 0, 0, LOSS)
    with draws.watching(), noting_host_draws(draws.host):
        given = losses_of(train_state, turn, batch, {})
        sums = {name: (float(value.detach()), float(count)) for name, (value, count) in given.items()}
    moving.restore()
    seen.append(draws)
    return sums


def _turn_findings(
    train_state: TrainState, turn: Turn, batches: Batches, seen: list[FixedDraws], *, sums_hold: bool
) -> list[VerifyFinding]:
    findings, within = [], _tolerance(train_state)
    for running in (False, True):
        both, first, second, doubled = (
            _sums(train_state, turn, batch, seen, batch_statistics=not running)
            for batch in (batches.both, batches.first, batches.second, batches.doubled)
        )
        if not running and not any(draws.normalising for draws in seen):
            break
    for name, (value, count) in both.items() if sums_hold else ():
        parts, units = first[name][0] + second[name][0], first[name][1] + second[name][1]
        grows, twice = doubled[name][1], doubled[name][0]
        if grows == first[name][1] == second[name][1]:
            findings.append(_fixed_units(name, count))
        elif _apart(count, units):
            text = f"{name} counts {units:g} units in two parts of a batch and {count:g} in the whole"
            findings.append(
                VerifyFinding(code="units", kind="fault", text=f"{text}: count the valid units of each sample")
            )
        if not _apart(twice, first[name][0], within) and _apart(twice, 2 * first[name][0], within):
            if grows != first[name][1]:
                text = (
                    f"{name} is as large for a batch given twice as for the batch: it is a mean, divided by its "
                    "units again; return the sum over the valid units"
                )
                findings.append(VerifyFinding(code="mean_of_means", kind="fault", text=text))
        elif _apart(value, parts, within) or _apart(twice, 2 * first[name][0], within):
            findings.append(_not_a_sum(name, value, parts, _apart(twice, 2 * first[name][0], within)))
    return findings


def _fixed_units(name: str, count: float) -> VerifyFinding:
    if count == 1:
        text = (
            f"{name} counts 1 unit whatever its batch holds: a window is then a mean of means, in which samples of a "
            "small micro-batch weigh more; return the sum over the valid units, and their number"
        )
        return VerifyFinding(code="mean_of_means", kind="fault", text=text)
    text = (
        f"{name} counts {count:g} units whatever its batch holds: a short last window is divided as a full one; "
        "return the number of valid units that are in the sum"
    )
    return VerifyFinding(code="short_window", kind="fault", text=text)


def _not_a_sum(name: str, value: float, parts: float, changes_when_doubled: bool) -> VerifyFinding:
    numbers = f"{name} of a batch is {value:.6g}, and {parts:.6g} over its two parts"
    if changes_when_doubled:
        text = f"{numbers}: samples of a batch enter each other's loss (in-batch negatives, say); a split changes it"
        return VerifyFinding(code="in_batch", kind="fault", text=text)
    text = f"{numbers}, though it doubles with its batch: it holds a mean over the batch; return the plain sum"
    return VerifyFinding(code="mean_of_means", kind="fault", text=text)


def _padding(train_state: TrainState, job: Job, batches: Batches, seen: list[FixedDraws]) -> list[VerifyFinding]:
    for turn in job.turns(list(train_state.optimizers)):
        padded = _sums(train_state, turn, batches.second, seen, batch_statistics=False)
        plain = _sums(train_state, turn, batches.alone, seen, batch_statistics=False)
        for name in padded:
            if _apart(padded[name][0] * plain[name][1], plain[name][0] * padded[name][1], _tolerance(train_state)):
                text = (
                    f"{name} changes with how far samples are padded "
                    f"({plain[name][0] / plain[name][1]:.6g} alone, "
                    f"{padded[name][0] / padded[name][1]:.6g} in a batch): splits that pad otherwise differ by that"
                )
                return [VerifyFinding(code="padding", kind="note", text=text)]
    return []


def _batch_norm(job: Job, seen: Sequence[FixedDraws]) -> list[VerifyFinding]:
    paths = list({path: None for draws in seen for path in draws.normalising})
    if not paths:
        return []
    text = (
        f"batch normalisation by local batches in {_some(paths)}: a split changes what is learned; "
        "freeze its statistics (eval()), use GroupNorm, or keep the micro-batch the same"
    )
    alone = all(path.split(".")[0] in job.unsynchronised for path in paths)
    return [VerifyFinding(code="batch_norm", kind="note" if alone else "fault", text=text)]


def _draws(seen: Sequence[FixedDraws], host: list[str]) -> list[VerifyFinding]:
    findings = []
    dropping = list({path: None for draws in seen for path in draws.dropout})
    if dropping:
        text = (
            f"dropout in {_some(dropping)}: its stream belongs to the micro-batch, so the same split drops the same "
            "on any number of ranks, and another split drops otherwise"
        )
        findings.append(VerifyFinding(code="dropout", kind="note", text=text))
    drawing = [*{path: None for draws in seen for path in draws.drawing}, *host]
    if drawing:
        text = (
            f"random draws: {_some(drawing)}; memfit run seeds them by the micro-batch, so the same split "
            "draws the same on any number of ranks; under another launcher each rank draws its own"
        )
        findings.append(VerifyFinding(code="random_draws", kind="note", text=text))
    return findings


def _tolerance(train_state: TrainState) -> float:
    """Relative, of losses that differ by rounding alone."""
    kinds = {parameter.dtype for net in train_state.nets.values() for parameter in net.parameters()}
    halves = [ROUNDINGS * rounding_unit(kind) for kind in kinds & {torch.bfloat16, torch.float16}]
    return max([TOLERANCE, *halves])


def _apart(a: float, b: float, within: float = TOLERANCE) -> bool:
    return not abs(a - b) <= within * max(abs(a), abs(b), 1e-12)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")


def _unique(findings: Sequence[VerifyFinding]) -> list[VerifyFinding]:
    return list({(finding.code, finding.text): finding for finding in findings}.values())
