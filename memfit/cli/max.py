"""memfit max: finds the largest micro-batch, sequence or setting that fits, for each card."""

from __future__ import annotations

import os
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from memfit.cli.options import (
    choose_devices,
    device_names_option,
    fresh_option,
    headroom_option,
    json_option,
    memory_option,
    print_json,
    set_option,
    whole_number,
)
from memfit.errors import Exit, InputError

if TYPE_CHECKING:
    from memfit.device.hardware.catalogue import Device
    from memfit.planner.asked_job import AskedJob
    from memfit.planner.largest import Largest, Vary


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
@fresh_option
@json_option
def command(
    job: str, pairs: tuple[str, ...], device_names: tuple[str, ...], memory: str | None, headroom: str | None,
    by_length: bool, vary: str | None, items: str, fresh: bool, as_json: bool,
) -> int:  # fmt: skip
    """Find the largest micro-batch of JOB that fits each device: keeping everything, recomputing, with LoRA or 8-bit
    state.

    Every answer is predicted as memfit predict does: it fits, and the next size does not. Of a script's command, memfit
    max -- python train.py --batch-size {batch} finds the largest number in place of {batch}.
    """
    from memfit.cli.background_traces import AheadRequest, NextQuestions
    from memfit.cli.job_options import asked_job, micro_batch_shape
    from memfit.cli.progress import progress
    from memfit.cli.script_arguments import is_script

    if by_length and vary is not None:
        raise InputError("--length and --vary", "each asks for another largest value", "write one of them")
    count = whole_number("--items", items)
    if count > 1 and not by_length and vary is None:
        raise InputError(
            f"--items {count}", "the largest micro-batch is asked for", "write --length or --vary NAME too"
        )
    targets = choose_devices(device_names, memory, headroom)
    following = NextQuestions(dict(os.environ), are_wanted=not fresh)
    begin = time.perf_counter()
    if is_script(job):
        options = {"--set": pairs, "--length": by_length, "--vary": vary, "--items": count > 1}
        return _largest_of_script(job, targets, options, as_json=as_json)
    with progress(f"searching the largest that fits of {job}", quiet=as_json):
        from memfit.planner import largest

        with asked_job(job, pairs, fresh=fresh, before_tracing=following.before_tracing) as asked:
            facts = asked.facts
            sizes, what = _sizes(asked, by_length, vary, count)
            answers = largest.largest_of_each(facts.policies, targets, asked, sizes)
    if as_json:
        seconds = time.perf_counter() - begin
        results = [_json(answer, what) for answer in answers]
        print_json({"job": job, "unit": facts.unit, "of": what, "results": results, "seconds": seconds})
    else:
        from memfit.show.largest_table import show_largest

        show_largest(answers, what, facts.unit)
    shape, choices = micro_batch_shape(facts, None, None), {"checkpointing": facts.own}
    request = AheadRequest(job=job, pairs=pairs, precision=None, shape=shape, device=targets[0].key, choices=choices)
    following.trace(asked, request)
    return Exit.DONE if any(answer.size is not None for answer in answers) else Exit.NOTHING_FITS


def _largest_of_script(job: str, targets: list[Device], options: dict[str, Any], *, as_json: bool) -> int:
    """Answers with the largest batch of a script on each device.

    Args:
        options: those of jobs, of which a script takes none.

    Raises:
        InputError: the command has no place for the batch, or the script fails.
    """
    from memfit.cli.progress import progress
    from memfit.cli.script_arguments import asked_script
    from memfit.script.asked_script import AS_WRITTEN
    from memfit.script.batch_scan import PLACEHOLDER, SIZES, scan_batches
    from memfit.show.footprint_table import run_needs_more
    from memfit.show.script_table import largest_batch

    begin, script = time.perf_counter(), asked_script(job, options)
    if not script.has_sizes:
        write = f"write {PLACEHOLDER} there, as in --batch-size {PLACEHOLDER}"
        raise InputError(f"memfit max -- {script.name}", "the command has no place for the batch", write)
    with progress(f"searching the largest batch of {script.name}", quiet=as_json):
        scans = [scan_batches(script.request(device), SIZES) for device in targets]
    if not as_json:
        for scan in scans:
            click.echo(largest_batch(scan) + run_needs_more(scan.outcome.footprint))
    else:
        results: list[dict[str, Any]] = [
            {
                "device": device.key, "usable_bytes": device.usable_bytes, "policy": AS_WRITTEN, "settings": {},
                "checkpoint": "none", "largest": scan.largest.batch, "exact": scan.largest.verified,
                "process_bytes": scan.largest.process_bytes, "reason": scan.largest.reason,
                "assumes": scan.largest.assumes,
                "assumed": [] if scan.outcome.footprint is None else list(scan.outcome.footprint.assumed),
            }
            for device, scan in zip(targets, scans, strict=True)
        ]  # fmt: skip
        seconds = time.perf_counter() - begin
        print_json({"job": script.name, "unit": "samples", "of": "micro_batch", "results": results, "seconds": seconds})
    return Exit.DONE if any(scan.largest.batch for scan in scans) else Exit.NOTHING_FITS


def _sizes(asked: AskedJob, by_length: bool, vary: str | None, items: int) -> tuple[Vary, str]:
    """Returns what a size is of, and its name."""
    from memfit.planner import largest

    facts = asked.facts
    if vary is not None:
        return largest.by_setting(asked, vary, items), vary
    if not by_length:
        return largest.by_items(facts.longest), "micro_batch"
    if facts.longest is None:
        write = "write --vary with the setting that holds the length"
        raise InputError("--length", f"this job's batches are counted in {facts.unit}, without a length", write)
    return largest.by_length(items, facts.longest), "length"


def _json(answer: Largest, what: str) -> dict[str, Any]:
    from memfit.cli.prediction_output import highest_peak

    prediction, device = answer.prediction, answer.device
    footprint = prediction.footprint if prediction is not None else None
    size, certain = answer.size, answer.certain
    if size is not None and prediction is not None and what == "micro_batch":
        size = prediction.micro_batch
        certain = certain and certain * (prediction.micro_batch // (answer.size or 1))
    return {
        "device": device.key,
        "usable_bytes": device.usable_bytes,
        "policy": answer.policy.name,
        "settings": dict(answer.policy.changes),
        "checkpoint": "all" if answer.policy.checkpointing else "none",
        "largest": size,
        "shape": asdict(prediction.shape) if prediction is not None else None,
        "exact": answer.exact,
        "step": answer.search.step,
        "refused": [asdict(each) for each in answer.search.refusals],
        "stopped": answer.search.stopped,
        "largest_certain": certain,
        "verdict": footprint.verdict if footprint is not None else "no",
        "process_bytes": prediction and highest_peak(prediction),
        "limiting_phase": footprint and footprint.limiting_phase,
        "headroom_bytes": footprint and footprint.headroom_bytes,
        "assumed": list(footprint.assumed) if footprint is not None else [],
    }
