"""Predictions side by side: jobs, variants of a job, plans and traces, against the first of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from memfit.device.hardware.catalogue import Device, find_device
from memfit.geometry import parse_shape, shape_of
from memfit.plan import Plan
from memfit.planner.asked_job import AskedJob
from memfit.planner.checkpoint_writing import with_copy
from memfit.planner.prediction import Prediction
from memfit.planner.timing.roofline import window_seconds


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A change to a job: settings, precision, checkpointing or engine; None: as the job has it."""

    name: str
    settings: tuple[str, ...] = ()
    precision: str | None = None
    checkpoint: str | None = None
    engine: str = "single"
    world: int = 1


@dataclass(frozen=True, kw_only=True)
class Subject:
    """One column of a comparison."""

    name: str
    prediction: Prediction
    window_seconds: float | None
    """Estimated; None where the device's rates are unknown."""

    @property
    def process_bytes(self) -> int:
        """The highest peak of any phase."""
        return max(phase.process_bytes for phase in self.prediction.footprint.phases.values())


def variants_of(
    settings: Sequence[str], precisions: Sequence[str], checkpoints: Sequence[str], engines: Sequence[str], world: int
) -> list[Variant]:
    """The job as it is, and one variant for each option of the command line."""
    return [
        Variant(name=""),
        *(Variant(name=text, settings=_pairs(text)) for text in settings),
        *(Variant(name=precision, precision=precision) for precision in precisions),
        *(Variant(name=f"checkpoint {mode}", checkpoint=mode) for mode in checkpoints),
        *(Variant(name=f"{engine} x {world}", engine=engine, world=world) for engine in engines),
    ]


def job_subjects(
    target: str, variants: Iterable[Variant], device: Device, ask: Callable[[str, Variant], AskedJob], *,
    micro_batch: int | None, shape: str | None,
) -> list[Subject]:  # fmt: skip
    """A job's column for each variant.

    Args:
        ask: the job with a variant's settings and precision, as a context that is open.

    Raises:
        InputError: the job cannot be loaded, or a variant is none of it.
    """
    return [_of_variant(ask(target, variant), variant, device, micro_batch, shape) for variant in variants]


def plan_subject(name: str, plan: Plan, device: Device | None) -> Subject:
    """A plan's column, with the copy that its run keeps of what it saves; ``device`` None: on the plan's own."""
    from memfit.loading import load_job
    from memfit.planner.predict import predict
    from memfit.trace.step import Tracing

    job = load_job(plan.job, dict(plan.settings), unit=plan.unit)
    target = device or replace(find_device(plan.device), usable_bytes=plan.budget_bytes)
    how = Tracing(device=target, mesh=plan.mesh_shape, engine_choices=plan.engine_choices)
    prediction = predict(
        job, plan.job, how.shape_of(job, plan.micro_batch), target, micro_batches=len(plan.micro_batches[0]),
        checkpointing=plan.checkpointing, engine=plan.engine, world=plan.ranks, mesh=plan.mesh_shape, plan=plan,
        engine_choices=plan.engine_choices,
    )  # fmt: skip
    if plan.checkpoint_writing == "asynchronous" and not target.is_cuda:
        prediction = replace(prediction, footprint=with_copy(prediction.footprint))
    seconds = plan.step_seconds if target.key == plan.device else None
    return Subject(name=name, prediction=prediction, window_seconds=seconds)


def differing_choices(subjects: Sequence[Subject]) -> dict[str, list[Any]]:
    """Settings and choices in which subjects differ, a value for each subject."""
    facts = [_facts(subject.prediction) for subject in subjects]
    names = dict.fromkeys(name for known in facts for name in known)
    rows = {name: [known.get(name) for known in facts] for name in names}
    return {name: values for name, values in rows.items() if any(value != values[0] for value in values)}


def _facts(prediction: Prediction) -> Mapping[str, Any]:
    trained = sum(net.trainable for net in prediction.nets)
    parameters = sum(net.parameters for net in prediction.nets)
    return {
        "job": prediction.job, "device": prediction.device.key, "micro_batch": prediction.micro_batch,
        **prediction.settings, "engine": prediction.engine, "world": prediction.world, **prediction.mesh,
        "parameters": parameters, "trained parameters": trained, "recomputed modules": len(prediction.checkpointing),
    }  # fmt: skip


def _of_variant(
    asked: AskedJob, variant: Variant, device: Device, micro_batch: int | None, shape: str | None
) -> Subject:
    facts = asked.facts
    batch = parse_shape(shape, facts) if shape is not None else shape_of(facts, micro_batch or facts.longest or 1)
    modes = {"none": {}, "all": facts.every, None: facts.own}[variant.checkpoint]
    prediction = asked.predict(
        batch, device, checkpointing=modes, engine=variant.engine, world=variant.world
    )  # fmt: skip
    is_timed = device.is_cuda and facts.precision
    seconds = window_seconds(prediction.trace, device, 1, facts.precision) if is_timed else None
    return Subject(name=f"{asked.name} {variant.name}".strip(), prediction=prediction, window_seconds=seconds)


def _pairs(text: str) -> tuple[str, ...]:
    """``lora=16,precision=bf16`` as pairs; a comma within a value stays."""
    pairs: list[str] = []
    for part in text.split(","):
        if "=" in part or not pairs:
            pairs.append(part)
        else:
            pairs[-1] += f",{part}"
    return tuple(pairs)
