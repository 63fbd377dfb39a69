"""memfit max: finds the largest micro-batch, sequence or setting that fits, for each card."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from memfit.cli.options import (
    choose_devices,
    device_names_option,
    headroom_option,
    json_option,
    memory_option,
    print_json,
    set_option,
    whole_number,
)
from memfit.errors import Exit, InputError

if TYPE_CHECKING:
    from memfit.job import Job
    from memfit.planner.largest import Largest


@click.command("max")
@click.argument("job")
@set_option
@device_names_option
@memory_option
@headroom_option
@click.option("--length", "by_length", is_flag=True, help="The longest sequence, for --items items of that length.")
@click.option("--vary", metavar="NAME", help="The largest value of a whole-number setting of the job.")
@click.option(
    "--items", metavar="N", default="1", show_default=True, help="Items of the micro-batch under --length and --vary."
)
@json_option
def command(
    job: str, pairs: tuple[str, ...], device_names: tuple[str, ...], memory: str | None, headroom: str | None,
    by_length: bool, vary: str | None, items: str, as_json: bool,
) -> int:  # fmt: skip
    """Find the largest micro-batch of JOB that fits each device: keeping everything, recomputing, with LoRA or 8-bit
    state.

    Every answer is predicted as memfit predict does: it fits, and the next size does not.
    """
    from memfit.cli.progress import progress
    from memfit.garbage import keep_frozen
    from memfit.loading import load_job, read_settings

    if by_length and vary is not None:
        raise InputError("--length and --vary", "each asks for another largest value", "write one of them")
    targets = choose_devices(device_names, memory, headroom)
    count = whole_number("--items", items)
    begin = time.perf_counter()
    with progress(f"searching the largest that fits of {job}", quiet=as_json):
        from memfit.planner import largest
        from memfit.planner.traced_questions import TracedQuestions

        loaded = load_job(job, read_settings(pairs))
        keep_frozen()
        sizes, what = _sizes(loaded, by_length, vary, count)
        questions = TracedQuestions()
        answers = [
            largest.largest_of(policy, job, device, questions, sizes)
            for policy in largest.batch_policies(loaded)
            for device in targets
        ]
    if as_json:
        seconds = time.perf_counter() - begin
        results = [_json(answer, loaded, what) for answer in answers]
        print_json({"job": job, "unit": loaded.unit, "of": what, "results": results, "seconds": seconds})
    else:
        from memfit.show.largest_table import show_largest

        show_largest(answers, what, loaded.unit)
    return Exit.DONE if any(answer.size is not None for answer in answers) else Exit.NOTHING_FITS


def _sizes(job: Job, by_length: bool, vary: str | None, items: int) -> tuple[Any, str]:
    """Returns the function from a size to a micro-batch, and the name of what is sized."""
    from memfit.job import Shape
    from memfit.planner import largest

    if vary is not None:
        return largest.by_setting(job, vary, Shape(items=items, length=job.longest)), vary
    if not by_length:
        return largest.by_items(job.longest), "micro_batch"
    if job.longest is None:
        write = "write --vary with the setting that holds the length"
        raise InputError("--length", f"this job's batches are counted in {job.unit}, without a length", write)
    return largest.by_length(items), "length"


def _json(answer: Largest, job: Job, what: str) -> dict[str, Any]:
    prediction, device = answer.prediction, answer.device
    footprint = prediction.footprint if prediction is not None else None
    size = answer.size
    if size is not None and prediction is not None and what == "micro_batch":
        size = prediction.micro_batch
    return {
        "device": device.key,
        "usable_bytes": device.usable_bytes,
        "policy": answer.policy.name,
        "settings": dict(answer.policy.changes),
        "checkpoint": "all" if answer.policy.checkpointing else "none",
        "largest": size,
        "shape": asdict(prediction.shape) if prediction is not None else None,
        "exact": answer.exact,
        "verdict": footprint.verdict if footprint is not None else "no",
        "process_bytes": footprint and footprint.phases[footprint.limiting_phase].process_bytes,
        "limiting_phase": footprint and footprint.limiting_phase,
        "headroom_bytes": footprint and footprint.headroom_bytes,
    }
