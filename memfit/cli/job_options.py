"""The job and the micro-batch that options name, for the verbs that predict one step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memfit.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from memfit.job import Job, Shape
    from memfit.planner.asked_job import AskedJob, BeforeTracing
    from memfit.planner.job_facts import JobFacts


def load_with(job: str, pairs: tuple[str, ...], precision: str | None, checkpoint: str | None = None) -> Job:
    """Loads the job with its settings, in a precision.

    Args:
        checkpoint: what --checkpoint says.

    Raises:
        InputError: a setting contradicts an option.
    """
    from memfit.library_imports import spare_imports
    from memfit.loading import load_job, read_settings
    from memfit.planner.predict import with_precision

    check_contradictions(pairs, precision, checkpoint)
    spare_imports()
    return with_precision(load_job(job, read_settings(pairs)), precision)


def check_contradictions(pairs: tuple[str, ...], precision: str | None, checkpoint: str | None) -> None:
    """Raises InputError where a setting contradicts an option."""
    from memfit.loading import read_settings

    settings = read_settings(pairs)
    for name, value in {"precision": precision, "checkpoint": checkpoint}.items():
        if value is not None and settings.get(name, value) != value:
            seen = f"--set {name}={settings[name]} and --{name} {value}"
            raise InputError(seen, "they contradict each other", "write one of them")


def asked_job(
    job: str, pairs: tuple[str, ...], precision: str | None = None, checkpoint: str | None = None, *,
    fresh: bool = False, environment: Mapping[str, str] | None = None, several: bool = True,
    before_tracing: BeforeTracing | None = None,
) -> AskedJob:  # fmt: skip
    """Returns the job or script for several questions; traces of a job are kept in the user's cache.

    Args:
        checkpoint: what --checkpoint says.
        fresh: whether to trace again what is kept.
        environment, several, before_tracing: as of ``AskedJob``; of no meaning for a script.

    Raises:
        InputError: a setting contradicts an option, or a script is given options of jobs.
    """
    from memfit.cli.script_arguments import asked_script, is_script

    if is_script(job):
        return asked_script(job, {"--set": pairs, "--precision": precision, "--checkpoint": checkpoint})
    check_contradictions(pairs, precision, checkpoint)
    from memfit.planner.asked_job import AskedJob

    settings = {"pairs": sorted(pairs), "precision": precision}
    return AskedJob(
        job, lambda: load_with(job, pairs, precision), settings, fresh=fresh, environment=environment,
        several=several, before_tracing=before_tracing,
    )  # fmt: skip


def micro_batch_shape(job: Job | JobFacts, shape: str | None, count: int | None) -> Shape:
    """Returns the shape of --shape or --micro-batch; by default one item of the longest length.

    Raises:
        InputError: both are given, or the shape does not suit the job.
    """
    from memfit.geometry import parse_shape, shape_of

    if shape is not None and count is not None:
        raise InputError("--shape and --micro-batch", "both say the same", "write one of them")
    return parse_shape(shape, job) if shape is not None else shape_of(job, count or job.longest or 1)
