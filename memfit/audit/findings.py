"""Faults that counting shows, each with a code that stays, what was counted, and the usual cure."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from memfit.audit.counts import Counts, declared
from memfit.audit.finding_codes import CURES
from memfit.audit.steps import step_findings
from memfit.audit.streams import AuditWorld, distinct_ids
from memfit.audit.units import Meant, unit_findings
from memfit.audit.wrong_samples import SampleFaults


@dataclass(frozen=True, kw_only=True)
class AuditFinding:
    """A fault in one world."""

    code: str
    world: int
    text: str
    """What was counted, what it means, and the cure."""

    @property
    def cure(self) -> str:
        return CURES[self.code]


def findings_of(
    world: AuditWorld, counts: Counts, alone: Counts, faults: SampleFaults, meant: Meant | None
) -> list[AuditFinding]:
    """Faults of one world; ``alone`` are the counts on a single rank, where nothing is sharded."""
    said = [
        *_sharing(world, counts, alone, faults.replaced),
        *(("silent-drops", faults.left_out),) * bool(faults.left_out),
        *_same_order(world, counts),
        *_unequal(counts),
        *step_findings(world),
        *(unit_findings(world, counts, alone, meant) if meant else ()),
    ]
    return [AuditFinding(code=code, world=counts.world, text=f"{text} {CURES[code]}") for code, text in said]


def _sharing(world: AuditWorld, counts: Counts, alone: Counts, replaced: str | None) -> Iterator[tuple[str, str]]:
    """Who gets what: at most one of the ways to share wrongly, else what is dropped and what is repeated."""
    if replaced:
        yield "replaced-samples", replaced
    elif not declared(world).with_replacement and _replaces(alone):
        yield (
            "replaced-samples",
            f"One rank alone draws {alone.draws} samples, of which {alone.duplicates} are repeats while "
            f"{alone.missing} never come: samples take the place of others.",
        )
        return
    if declared(world).with_replacement:
        yield from _same_draws(world, counts, alone)
        return
    wrong = _wrong_sharing(world, counts, alone)
    if wrong:
        yield wrong
        return
    yield from _drops(world, counts)
    if _over_samples(world, counts):
        yield (
            "over-sampling",
            f"{counts.draws} samples are given of which {counts.duplicates} are repeats inside an epoch: "
            f"{_by_workers(world, counts) or 'some samples count more than others'}.",
        )


def _same_draws(world: AuditWorld, counts: Counts, alone: Counts) -> Iterator[tuple[str, str]]:
    """Draws with replacement that are the same ones on all ranks: equal ids alone say nothing there."""
    first = world.epochs[0][0]
    if counts.world == 1 or len(first.ids) < 2 or any(not np.array_equal(s.ids, first.ids) for s in world.epochs[0]):
        return
    text = (
        f"All {counts.world} ranks draw the same {len(first.ids)} samples in the same order, so that all do the same "
        "work: seed what draws them with the rank too, or let each rank take its part of one draw."
    )
    yield "no-sharding" if counts.draws > 1.5 * alone.draws else "same-shard", text


def _replaces(alone: Counts) -> bool:
    """Whether ranks draw as many samples as there are, but some again in place of others."""
    enough = min(alone.duplicates - alone.late_repeats, alone.missing) > 0.02 * alone.size
    return enough and abs(alone.draws - alone.size) < alone.slack


def _wrong_sharing(world: AuditWorld, counts: Counts, alone: Counts) -> tuple[str, str] | None:
    ranks, total, seen = counts.world, alone.distinct, counts.distinct
    least = min(counts.distinct_per_rank)
    if ranks == 1 or total < 2 * ranks or not seen:
        return None
    whose = {tuple(distinct_ids(stream.ids).tolist()) for stream in world.epochs[0]}
    if least >= 0.75 * seen and seen >= 0.75 * total:
        return (
            "no-sharding",
            f"Every one of {ranks} ranks is given {least} of {total} samples: all do the same work, and an epoch is "
            f"{ranks} times as long as it should be.",
        )
    if len(whose) == 1 and least <= 0.75 * total:
        return (
            "same-shard",
            f"All {ranks} ranks are given the same {least} of {total} samples; the others are never seen.",
        )
    power = math.log(total / seen) / math.log(ranks)
    shards = round(power)
    tail = declared(world).drops_last and total - seen < counts.slack
    if shards >= 1 and abs(power - shards) < 0.25 and counts.draws <= 1.3 * seen + ranks and not tail:
        share = "batches" if alone.batches_per_rank[0] < alone.draws else "samples"
        return (
            "double-sharding",
            f"{ranks} ranks together see {seen} of {total} samples, 1/{ranks**shards} of the data, in "
            f"{counts.batches_per_rank[0]} {share} a rank against {alone.batches_per_rank[0]} on one: the data is "
            f"divided by the number of ranks {shards + 1} times.",
        )
    overlap = counts.duplicates - counts.late_repeats
    if overlap > 0.1 * counts.draws and total - seen > 0.05 * total and 0.7 < counts.draws / total < 1.3:
        return (
            "ranks-disagree",
            f"{ranks} ranks draw {counts.draws} samples, but {counts.duplicates} of them overlap and {total - seen} of "
            f"{total} are never seen: each rank shuffles its own way.",
        )
    return None


def _drops(world: AuditWorld, counts: Counts) -> Iterator[tuple[str, str]]:
    why = why_missing(world, counts)
    later = [sum(len(stream.sizes) for stream in epoch) for epoch in world.epochs]
    if min(later) == 0:
        number = later.index(0)
        why = why or _unfilled(world, counts)
        yield "silent-drops", f"Epoch {number} gives no batch at all{f': {why}' if why else ''}."
    elif counts.missing and not is_declared(world, counts):
        yield (
            "silent-drops",
            f"{counts.missing} of {counts.size} samples are given to no rank and nothing says so"
            f"{_named(counts.missing_ids)}{f': {why}' if why else ''}.",
        )


def _unfilled(world: AuditWorld, counts: Counts) -> str:
    """Where the samples of a rank do not fill one batch, and ``drop_last`` drops them; empty where they do."""
    said = declared(world)
    share = -(-counts.size // counts.world)
    if not said.drops_last or said.batch_size is None or not 0 < share < said.batch_size:
        return ""
    return f"{share} samples of a rank do not fill a batch of {said.batch_size}, and drop_last drops them"


def is_declared(world: AuditWorld, counts: Counts) -> bool:
    """Whether what is missing was asked for: ``drop_last``, a number of samples, samples that are named as dropped."""
    said, drawn = declared(world), world.drawn[0]
    named = set(said.dropped)
    rest = [index for index in counts.missing_ids.tolist() if index not in named] if named else None
    if said.some_only or drawn.endless or rest == []:
        return True
    if counts.missing > 1 and "length" in why_missing(world, counts):
        return False
    return said.drops_last and (counts.missing if rest is None else len(rest)) < counts.slack


def why_missing(world: AuditWorld, counts: Counts) -> str:
    """Why samples are missing, as far as it can be told; empty where it cannot."""
    said = declared(world)
    if not counts.missing:
        return ""
    if said.dropped:
        return f"{len(said.dropped)} samples are named as dropped"
    if said.some_only:
        return "the sampler draws a number of samples, or a subset, that it was told"
    missing = counts.missing_ids
    if said.lengths is not None and len(missing) and len(said.lengths) >= counts.size:
        kept = np.delete(said.lengths[: counts.size], missing)
        gone = said.lengths[missing]
        if len(kept) and gone.min() > kept.max():
            return f"all are of greater length than {kept.max():g}, the longest that is given"
        if len(kept) and gone.max() < kept.min():
            return f"all are of smaller length than {kept.min():g}, the shortest that is given"
        if len(kept) and np.all((gone > kept.max()) | (gone < kept.min())):
            below, above = gone[gone < kept.min()].max(), gone[gone > kept.max()].min()
            return (
                f"by their lengths: those that are left out are {below:g} or shorter, or {above:g} or longer, and "
                f"those that are given are {kept.min():g} to {kept.max():g} long"
            )
    if said.drops_last and counts.missing < counts.slack:
        return "drop_last leaves out what does not fill the last step"
    rests = {counts.size % counts.slack, counts.size % counts.world}
    return "what does not fill the last step" if counts.missing in rests else ""


def _over_samples(world: AuditWorld, counts: Counts) -> bool:
    """Repeats beyond what pads the last step of an epoch, or makes the ranks' samples even."""
    if world.drawn[0].endless:
        return counts.duplicates > 2 * counts.slack
    early = counts.duplicates - counts.late_repeats
    uneven = counts.duplicates >= counts.world and early > 0.05 * counts.draws
    return uneven or counts.duplicates >= counts.slack


def _by_workers(world: AuditWorld, counts: Counts) -> str:
    """Where each worker of a loader gives all samples of an iterable data set; empty where they do not."""
    workers = declared(world).workers
    repeated = all(
        samples == workers * distinct
        for samples, distinct in zip(counts.samples_per_rank, counts.distinct_per_rank, strict=True)
    )
    if not declared(world).streamed or workers < 2 or not repeated:
        return ""
    return f"each of the loader's {workers} workers gives every sample; divide them by torch's get_worker_info()"


def _same_order(world: AuditWorld, counts: Counts) -> Iterator[tuple[str, str]]:
    if counts.order_changes is not False or counts.draws < 4 * counts.world or counts.in_order:
        return
    if declared(world).unshuffled:
        return
    yield (
        "same-order",
        f"Epoch 1 gives the same {counts.draws} samples in the same order as epoch 0: the epoch does not reach what "
        "shuffles.",
    )


def _unequal(counts: Counts) -> Iterator[tuple[str, str]]:
    for what, numbers in (
        ("batches", counts.batches_per_rank),
        ("optimizer steps", [sum(steps) for steps in counts.steps_per_rank or []]),
    ):
        if numbers and min(numbers) != max(numbers):
            yield (
                "unequal-counts",
                f"Ranks get {min(numbers)} to {max(numbers)} {what} an epoch ({_short(numbers)}): the ones with more "
                "wait for ever in the next collective, a hang.",
            )
            return


def _short(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:8])) + (" …" if len(numbers) > 8 else "")


def _named(ids: np.ndarray) -> str:
    return f" (ids {_short(ids.tolist())})" if len(ids) else ""
