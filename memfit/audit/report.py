"""The whole audit: worlds simulated or run, counted and judged."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from memfit.audit.counts import Counts, count, dataset_size
from memfit.audit.findings import AuditFinding, findings_of, why_missing
from memfit.audit.process_world import run_world
from memfit.audit.simulated_world import simulate
from memfit.audit.steps import regular_window, short_windows
from memfit.audit.streams import AuditWorld, streams_of
from memfit.audit.strips_data import Picture, picture_of
from memfit.audit.units import Meant
from memfit.audit.wrong_samples import sample_faults
from memfit.device.hardware.process_limits import AUDIT_RANK_BYTES, check_fake_ranks, check_ranks
from memfit.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Audit:
    """What was counted in every world, and the faults found."""

    dataset_size: int
    worlds: Mapping[int, AuditWorld]
    counts: Mapping[int, Counts]
    alone: Counts
    """The counts of a single rank, where nothing is shared out."""
    findings: tuple[AuditFinding, ...]

    @property
    def ok(self) -> bool:
        return not self.findings

    def picture(self, world: int, columns: int) -> Picture:
        """What each rank of a world is given, over ids and over time, in so many columns."""
        return picture_of(self.worlds[world], self.counts[world], columns)

    def to_json(self) -> dict[str, Any]:
        """The object that ``memfit audit --json`` writes."""
        return {
            "dataset_size": self.dataset_size,
            "worlds": [_world_json(self.worlds[world], counts, self.alone) for world, counts in self.counts.items()],
            "findings": [{"code": f.code, "world": f.world, "text": f.text, "cure": f.cure} for f in self.findings],
            "ok": self.ok,
            "pictures": [self.picture(world, 64).to_json() for world in self.counts],
        }


def audit(
    target: str | Callable[..., Any],
    world_sizes: Sequence[int] = (1, 2, 3, 8),
    *,
    meant: Meant | None = None,
    real: bool = False,
) -> Audit:
    """Counts what a target gives to each rank of each world, in two epochs.

    Args:
        target: ``path/file.py:function`` or the function: function(rank, world) returns a loader, sampler or batch
            sampler; loop(rank, world, observe) calls ``observe.batch(ids)`` and ``observe.step()``.
        meant: the global batch that was meant.
        real: also run every world in processes of a gloo group, and count those; needs a target in a file.

    Raises:
        InputError: world sizes below 1, a target that cannot be loaded or fails, or batches that name no sample.
    """
    wanted = sorted(set(world_sizes))
    if not wanted or wanted[0] < 1:
        raise InputError(f"world sizes {list(world_sizes)}", "a world has one rank or more", "write 1,2,3, say")
    if real and not isinstance(target, str):
        raise InputError("real=True", "processes cannot be given a function", "give path/file.py:function")
    if real:
        check_ranks(f"--world-sizes {wanted[-1]} with --real", wanted[-1], AUDIT_RANK_BYTES)
    else:
        check_fake_ranks(f"--world-sizes {wanted[-1]}", wanted[-1])
    drawn = {1: simulate(target, 1)}
    size = len({index for batch in drawn[1][0].batches for index in batch.ids})
    if drawn[1][0].batches and not size:
        raise InputError(
            f"the {len(drawn[1][0].batches)} batches of one rank",
            "none of them holds a sample, by its id or its rows",
            'give each batch the ids of its samples, such as {"id": [3, 7], ...}',
        )
    for world in wanted:
        if real:
            drawn[world] = run_world(str(target), world)
        elif world > 1:
            drawn[world] = simulate(target, world, size)
    worlds = streams_of(drawn)
    size = dataset_size(worlds)
    counts = {world: count(streams, size) for world, streams in worlds.items()}
    faults = sample_faults(target)
    findings = [f for world in wanted for f in findings_of(worlds[world], counts[world], counts[1], faults, meant)]
    return Audit(
        dataset_size=size,
        worlds=worlds,
        counts={world: counts[world] for world in wanted},
        alone=counts[1],
        findings=tuple(findings),
    )


def _world_json(world: AuditWorld, counts: Counts, alone: Counts) -> dict[str, Any]:
    regular = regular_window(world)
    shared_out = counts.missing - alone.missing < counts.slack
    dropped = counts.missing if shared_out else alone.missing
    return {
        "world": counts.world,
        "batches_per_rank": counts.batches_per_rank,
        "samples_per_rank": counts.samples_per_rank,
        "distinct": counts.distinct,
        "duplicates": counts.duplicates,
        "missing": counts.missing,
        "dropped": dropped,
        "dropped_why": why_missing(world, counts) if dropped else "",
        "missing_ids": counts.missing_ids[:20].tolist(),
        "order_changes_each_epoch": counts.order_changes,
        "optimizer_steps": None if counts.steps_per_rank is None else counts.steps_per_rank[0][0],
        "optimizer_steps_per_rank": counts.steps_per_rank,
        "micro_batches_per_step": None if counts.steps_per_rank is None else regular,
        "step_counts_micro_batches": None if counts.steps_per_rank is None else set(counts.windows) == {1},
        "short_windows": None if counts.steps_per_rank is None else short_windows(world.epochs[0][0], regular),
        "global_batch_samples": float(counts.step_samples.max()) if len(counts.step_samples) else 0.0,
        "global_batch_units": None if counts.step_units is None else float(counts.step_units.max(initial=0)),
        "padding_fraction": counts.padding,
        "imbalance": counts.imbalance,
    }
