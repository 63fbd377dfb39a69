"""memfit compare: shows jobs, settings, plans, traces and runs side by side."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from memfit.cli.options import (
    choose_device,
    device_option,
    fresh_option,
    headroom_option,
    json_option,
    memory_option,
    print_json,
    whole_number,
)
from memfit.cli.script_arguments import MARK, is_script
from memfit.errors import Exit, InputError
from memfit.plan import ENGINES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from memfit.device.hardware.catalogue import Device
    from memfit.planner.asked_job import AskedJob
    from memfit.planner.comparison import Subject, Variant


@click.command("compare")
@click.argument("targets", nargs=-1, required=True, metavar="A [B...]")
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="NAME=VALUE,...",
    help="Add each job with these settings; may be repeated.",
)
@click.option(
    "--precision", "precisions", multiple=True, type=click.Choice(["fp32", "bf16", "fp16"]),
    help="Add each job in this precision; may be repeated.",
)  # fmt: skip
@click.option(
    "--checkpoint", "checkpoints", multiple=True, type=click.Choice(["none", "all"]),
    help="Add each job with nothing or everything recomputed; may be repeated.",
)  # fmt: skip
@click.option(
    "--engine", "engines", multiple=True, type=click.Choice([name for name in ENGINES if name != "single"]),
    help="Add each job under this engine on --world ranks; may be repeated.",
)  # fmt: skip
@click.option("--world", metavar="N", default="2", show_default=True, help="Ranks for --engine.")
@click.option("--micro-batch", metavar="N", help="Units in a job's micro-batch. Default 1, or one longest item.")
@click.option("--shape", metavar="BxL", help="Items x length of a job's micro-batch, instead of --micro-batch.")
@device_option
@memory_option
@headroom_option
@fresh_option
@json_option
def command(
    targets: tuple[str, ...], settings: tuple[str, ...], precisions: tuple[str, ...], checkpoints: tuple[str, ...],
    engines: tuple[str, ...], world: str, micro_batch: str | None, shape: str | None, device_name: str | None,
    memory: str | None, headroom: str | None, fresh: bool, as_json: bool,
) -> int:  # fmt: skip
    """Compare memory and time of A, B, ... and of variants of them with the first.

    A is a job, a plan file, a trace file (F.npz), a run's folder, or a script's command: -- python a.py -- python b.py.
    Example, what LoRA saves: memfit compare JOB --set lora=16.
    """
    from memfit.cli.job_options import asked_job
    from memfit.cli.progress import progress
    from memfit.device.hardware.process_limits import check_fake_ranks

    if shape is not None and micro_batch is not None:
        raise InputError("--shape and --micro-batch", "both say the same", "write one of them")
    _check_taken(
        targets, {"--micro-batch": micro_batch, "--shape": shape},
        {"--device": device_name, "--memory": memory, "--headroom": headroom},
    )  # fmt: skip
    if not engines and click.get_current_context().get_parameter_source("world") is ParameterSource.COMMANDLINE:
        raise InputError(f"--world {world} without --engine", "they are that engine's ranks", "write --engine ddp too")
    named = device_name is not None or memory is not None
    device = choose_device(device_name, memory, headroom)
    count, ranks = whole_number("--micro-batch", micro_batch), whole_number("--world", world, least=2)
    check_fake_ranks(f"--world {ranks}", ranks)
    begin, environment = time.perf_counter(), dict(os.environ)
    with (
        progress(f"comparing {', '.join(target.removeprefix(MARK) for target in targets)}", quiet=as_json),
        ExitStack() as asked_jobs,
    ):
        from memfit.planner.comparison import differing_choices, job_subjects, variants_of

        def ask(target: str, variant: Variant) -> AskedJob:
            asked = asked_job(
                target, variant.settings, variant.precision, variant.checkpoint, fresh=fresh, environment=environment
            )
            return asked_jobs.enter_context(asked)

        variants = variants_of(settings, precisions, checkpoints, engines, ranks)
        _check_scripts(targets, variants)
        subjects: list[Subject] = []
        for target in targets:
            subject = _of_file(target, variants, device if named else None)
            subjects += [subject] if subject is not None else job_subjects(
                target, variants, device, ask, micro_batch=count, shape=shape
            )  # fmt: skip
    if len(subjects) < 2:
        write = "write a second one, or a change such as --set lora=16 or --checkpoint all"
        raise InputError(f"memfit compare {targets[0]}", "there is nothing to compare it with", write)
    if as_json:
        print_json({
            "subjects": [_json(subject, subjects[0]) for subject in subjects],
            "differences": differing_choices(subjects), "seconds": time.perf_counter() - begin,
        })  # fmt: skip
    else:
        from memfit.show.comparison_table import show_comparison

        show_comparison(subjects, differing_choices(subjects))
    return Exit.DONE


def _check_scripts(targets: tuple[str, ...], variants: list[Variant]) -> None:
    """Raises InputError where a variant of a script is asked for."""
    script = next((target.removeprefix(MARK) for target in targets if is_script(target)), None)
    if script is not None and len(variants) > 1:
        write = f"write the other command behind another --: memfit compare -- {script} -- {script} ARGS"
        raise InputError(f"a variant of {script}", "a script is compared as it is written", write)


def _check_taken(targets: tuple[str, ...], sizes: Mapping[str, str | None], devices: Mapping[str, str | None]) -> None:
    """Raises InputError where an option is given that no target takes, since all of them are files.

    Args:
        sizes, devices: what is given, by option.
    """
    suffixes = {file.suffix if file is not None else "" for file in map(_file_of, targets)}
    size, device = (
        next((name for name, value in some.items() if value is not None), None) for some in (sizes, devices)
    )
    if size is not None and "" not in suffixes:
        why = "plans, traces and runs have a micro-batch of their own"
        raise InputError(f"{size} {sizes[size]} for files alone", why, f"leave out {size}, or name a job")
    if device is not None and suffixes == {".npz"}:
        why = "a trace file holds what its step takes on its own device"
        raise InputError(f"{device} {devices[device]} for trace files", why, f"leave out {device}, or name a job")
    if device == "--headroom" and "" not in suffixes:
        why = "a plan has a budget of its own, unless another device is named"
        raise InputError(f"--headroom {devices[device]} for files alone", why, "write --device too")


def _file_of(target: str) -> Path | None:
    """The file of a plan, trace or run; None for a job or a script."""
    path = Path(target)
    file = path / "plan.toml" if path.is_dir() else path
    return file if file.suffix in (".toml", ".npz") else None


def _of_file(target: str, variants: list[Variant], device: Device | None) -> Subject | None:
    """Returns the column of a plan, trace or run; None if the argument is a job."""
    file = _file_of(target)
    if file is None:
        return None
    if len(variants) > 1:
        seen = f"a variant of {target}"
        raise InputError(seen, "plans, traces and runs are compared as they are", "write the job's name instead")
    if file.suffix == ".toml":
        from memfit.plan import read_plan
        from memfit.planner.comparison import plan_subject

        return plan_subject(Path(target).name, read_plan(file), device)
    from memfit.planner.comparison import Subject
    from memfit.show.trace_file import read_trace

    return Subject(name=Path(target).name, prediction=read_trace(file), window_seconds=None)


def _json(subject: Subject, first: Subject) -> dict[str, Any]:
    prediction = subject.prediction
    footprint = prediction.footprint
    return {
        "name": subject.name,
        "job": prediction.job,
        "settings": prediction.settings,
        "micro_batch": prediction.micro_batch,
        "device": prediction.device.key,
        "checkpointing": dict(prediction.checkpointing),
        "engine": prediction.engine,
        "world": prediction.world,
        "nets": [asdict(net) for net in prediction.nets],
        "phases": {name: asdict(phase) for name, phase in footprint.phases.items()},
        "fits": footprint.fits,
        "verdict": footprint.verdict,
        "limiting_phase": footprint.limiting_phase,
        "assumed": list(footprint.assumed),
        "process_bytes": subject.process_bytes,
        "saves_bytes": first.process_bytes - subject.process_bytes,
        "window_seconds": subject.window_seconds,
    }
