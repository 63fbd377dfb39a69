"""What is verified: a plan, or a job with a small geometry of its own, ragged on purpose."""

from __future__ import annotations

import copy
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import torch

from memfit.batch.dataset import dataset_of, lengths_of
from memfit.device.hardware.local_devices import local_cpu
from memfit.engine.pipeline_cut import SCHEDULE
from memfit.engine.stage_bounds import FIRST_MODULES
from memfit.errors import InputError
from memfit.geometry import shape_of, split
from memfit.job import Job
from memfit.loading import load_job
from memfit.mesh import MeshShape
from memfit.nested_tensors import map_tensors
from memfit.plan import MOST_BUDGET, Plan

MADE = 64
"""Samples that are made up for a job without a data set."""


def plan_for(job: Job, name: str, worlds: Sequence[int], global_batch: int | None, micro_batch: int | None) -> Plan:
    """A plan to verify a job with: where nothing is asked, two micro-batches a rank, the last ones short."""
    _, lengths = samples_of(job)
    each = 1 if lengths is None else int(max(lengths))
    micro = micro_batch or 3 * each
    asked = global_batch or (2 * max(worlds) * micro - each)
    geometry = split(asked, micro, job.unit)
    return Plan(
        job=name,
        settings=job.settings(),
        device="cpu",
        budget_bytes=local_cpu().memory_bytes or MOST_BUDGET,
        unit=job.unit,
        global_batch=asked,
        micro_batch=geometry.micro_batch,
        micro_batches=[list(rank) for rank in geometry.micro_batches],
        arithmetic=geometry.arithmetic(),
        engine="single",
        precision=job.precision,
        seed=0,
    )


def job_of(plan: Plan) -> Job:
    """The plan's job, in fp32: the bounds are those of its rounding."""
    return load_job(plan.job, {**plan.settings, "precision": "fp32"})


def on_ranks(
    plan: Plan, engine: str, ranks: int, mesh: MeshShape | None = None, choices: Mapping[str, Any] | None = None
) -> Plan:
    """The plan on another engine and number of ranks, or on a mesh of so many.

    Args:
        choices: of the engine, beside those of the plan.
    """
    micro, shares = plan.micro_batch, ranks if mesh is None else mesh.data_ranks
    geometry = split(max(plan.global_batch, shares), micro, plan.unit, shares, ranks // shares)
    sizes = mesh.sizes() if mesh is not None else {}
    own = dict(plan.engine_choices) if engine == plan.engine else {}
    if sizes.get("pp") != plan.mesh.get("pp"):
        own.pop(FIRST_MODULES, None)
    if "pp" not in sizes:
        own.pop(SCHEDULE, None)
    return replace(
        plan,
        engine=engine,
        mesh=sizes,
        engine_choices={**own, **(choices or {})},
        micro_batches=[list(rank) for rank in geometry.micro_batches],
        arithmetic=geometry.arithmetic(),
        settings={**plan.settings, "precision": "fp32"},
        precision="fp32",
    )


def samples_of(job: Job) -> tuple[Any, Sequence[int] | None]:
    """The job's data set and lengths; without one, made-up samples, of which ``collate`` then takes its batches."""
    if type(job).dataset is not Job.dataset:
        return dataset_of(job), lengths_of(job)
    shape = shape_of(job, MADE * (min(job.longest, 64) if job.longest else 1))
    torch.manual_seed(0)
    batch = job.batch(shape)
    sliced = [batch_items(batch, [i], shape.items) for i in range(shape.items)]
    job.collate = lambda samples: joined(samples)  # type: ignore[method-assign]
    lengths = None if shape.length is None else [shape.length] * shape.items
    return sliced, lengths


def batch_items(batch: Any, ids: Sequence[int], items: int) -> Any:
    """Some items of a batch, by the first dimension of every tensor that has it.

    Raises:
        InputError: no tensor has a first dimension of so many items.
    """
    was_cut = False

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal was_cut
        if tensor.dim() and tensor.shape[0] == items:
            was_cut = True
            return tensor[torch.as_tensor(ids, device=tensor.device)]
        return tensor

    made = map_tensors(_cut_lists(batch, ids, items), cut)
    if not was_cut:
        raise InputError(
            "the job's batch",
            f"no tensor in it has a first dimension of {items} items, so it cannot be split",
            "write dataset(self) and collate(self, samples), from which any split can be made",
        )
    return made


def joined(samples: Sequence[Any]) -> Any:
    """Items put together again along the first dimension."""
    first = samples[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(list(samples)) if first.dim() else first
    if isinstance(first, MutableMapping):
        made = copy.copy(first)
        made.update({key: joined([each[key] for each in samples]) for key in list(first)})
        return made
    if is_dataclass(first) and not isinstance(first, type):
        return replace(
            first, **{each.name: joined([getattr(sample, each.name) for sample in samples]) for each in fields(first)}
        )
    if isinstance(first, tuple) and hasattr(first, "_fields"):
        return type(first)(*(joined(parts) for parts in zip(*samples, strict=True)))
    if isinstance(first, list) and first and not isinstance(first[0], torch.Tensor | Mapping | list | tuple):
        return [value for each in samples for value in each]
    if isinstance(first, list | tuple):
        return type(first)(joined(parts) for parts in zip(*samples, strict=True))
    return first


def _cut_lists(batch: Any, ids: Sequence[int], items: int) -> Any:
    """Lists of texts or numbers, one an item, cut as the tensors are."""
    if isinstance(batch, MutableMapping):
        made = copy.copy(batch)
        made.update({key: _cut_lists(value, ids, items) for key, value in batch.items()})
        return made
    if isinstance(batch, list) and len(batch) == items and not any(isinstance(x, torch.Tensor) for x in batch):
        return [batch[i] for i in np.asarray(ids).tolist()]
    return batch
