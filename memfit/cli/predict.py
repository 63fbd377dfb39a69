"""memfit predict: the memory of training, validation and saving, before the run and without the card."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from memfit.cli.options import (
    choose_device,
    device_option,
    json_option,
    memory_option,
    print_json,
    set_option,
    whole_number,
)
from memfit.errors import Exit, InputError


@click.command("predict")
@click.argument("job")
@set_option
@click.option(
    "--micro-batch",
    metavar="N",
    help="Units in one micro-batch: samples, or the job's unit (frames). Default 1, or one longest item.",
)
@click.option("--shape", metavar="BxL", help="Items x length of one micro-batch, instead of --micro-batch.")
@device_option
@memory_option
@click.option("--precision", type=click.Choice(["fp32", "bf16", "fp16"]), help="Default: the job's own.")
@click.option(
    "--checkpoint",
    metavar="none|all|PLAN",
    help="What is recomputed: nothing, all that can be, or as a plan file says. Default: the job's own.",
)
@click.option(
    "--accumulate", metavar="N", default="1", show_default=True, help="Micro-batches in a window; 1: no accumulation."
)
@click.option(
    "--snapshot",
    metavar="F",
    type=click.Path(dir_okay=False),
    help="Writes the predicted timeline for PyTorch's memory_viz.",
)
@click.option(
    "--trace",
    metavar="F",
    type=click.Path(dir_okay=False),
    help="Writes the events: F.json for ui.perfetto.dev, F.npz for memfit report.",
)
@json_option
def command(
    job: str, pairs: tuple[str, ...], micro_batch: str | None, shape: str | None, device_name: str | None,
    memory: str | None, precision: str | None, checkpoint: str | None, accumulate: str, snapshot: str | None,
    trace: str | None, as_json: bool,
) -> int:  # fmt: skip
    """Does JOB fit, in training, validation and saving?

    JOB is a built-in name (memfit jobs), package.module:Name or path/file.py:Name.
    """
    from memfit.cli.quiet import progress
    from memfit.geometry import parse_shape, shape_of
    from memfit.loading import load_job, read_settings

    device = choose_device(device_name, memory)
    if trace is not None and Path(trace).suffix not in (".json", ".npz"):
        write = "write F.json for ui.perfetto.dev, or F.npz for memfit report"
        raise InputError(f"--trace {trace}", "neither .json nor .npz", write)
    accumulated = whole_number("--accumulate", accumulate)
    count = whole_number("--micro-batch", micro_batch)
    with progress(f"tracing {job}", quiet=as_json):
        from memfit.planner.predict import checkpoint_all, plain_nets, predict, with_precision

        loaded = with_precision(load_job(job, read_settings(pairs)), precision)
        if shape is not None and count is not None:
            raise InputError("--shape and --micro-batch", "they say the same thing twice", "write one of them")
        wanted = parse_shape(shape, loaded) if shape is not None else shape_of(loaded, count or loaded.longest or 1)
        modes, plan = None, None
        if checkpoint == "none":
            modes = {}
        elif checkpoint == "all":
            modes = checkpoint_all(loaded, plain_nets(loaded))
        elif checkpoint is not None:
            from memfit.plan import read_plan

            if not Path(checkpoint).exists():
                raise InputError(
                    f"--checkpoint {checkpoint}",
                    "neither none, all nor a plan file",
                    "write none, all, or a file that memfit plan --out wrote",
                )
            plan = read_plan(checkpoint)
            modes = dict(plan.checkpointing)
        prediction = predict(loaded, job, wanted, device, micro_batches=accumulated, checkpointing=modes, plan=plan)
    if snapshot is not None:
        from memfit.show.snapshot import write_snapshot
        from memfit.show.timeline import allocator_limit

        try:
            write_snapshot(Path(snapshot), prediction.trace, allocator_limit(device))
        except OSError as error:
            raise InputError(
                f"--snapshot {snapshot}",
                f"cannot be written: {error.strerror}",
                "write a file in a folder that can be written",
            ) from error
    if trace is not None:
        _write_trace(Path(trace), prediction)
    if as_json:
        print_json(prediction_json(prediction))
    else:
        from memfit.show.terminal import show_prediction

        show_prediction(prediction)
    return Exit.DONE if prediction.footprint.fits else Exit.NOTHING_FITS


def _write_trace(path: Path, prediction: Any) -> None:
    from memfit.show.perfetto import write_perfetto
    from memfit.show.trace_file import write_trace

    if path.suffix == ".npz":
        write_trace(path, prediction)
    else:
        write_perfetto(path, prediction.trace, f"{prediction.job} on {prediction.device.name}")


def prediction_json(prediction: Any) -> dict[str, Any]:
    """The JSON of DESIGN.md."""
    from dataclasses import asdict

    found = asdict(prediction.footprint)
    device = prediction.device
    return {
        "job": prediction.job,
        "settings": prediction.settings,
        "micro_batch": prediction.micro_batch,
        "unit": prediction.unit,
        "shape": asdict(prediction.shape),
        "device": {"name": device.key, "memory_bytes": device.memory_bytes, "usable_bytes": device.usable_bytes},
        "nets": [asdict(net) for net in prediction.nets],
        **found,
        "checkpointing": dict(prediction.checkpointing),
        "seconds": prediction.seconds,
    }
