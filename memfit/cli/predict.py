"""memfit predict: the memory of training, validation and saving, before the run and without the card."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from memfit.cli.options import (
    choose_device,
    device_option,
    headroom_option,
    json_option,
    memory_option,
    print_json,
    set_option,
    whole_number,
)
from memfit.errors import Exit, InputError
from memfit.plan import ENGINES


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
@headroom_option
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
    "--epoch",
    metavar="N",
    help="Also replays N windows of varied lengths one after the other, as memfit run draws them (0: one epoch).",
)
@click.option(
    "--lengths", metavar="F:COLUMN", help="Lengths for --epoch, from a .csv, .tsv or .jsonl. Default: the job's."
)
@click.option(
    "--shapes",
    metavar="F",
    type=click.Path(dir_okay=False),
    help="Also replays the windows of F: 8x400 6x512 in a line.",
)
@click.option(
    "--engine",
    metavar="E",
    type=click.Choice(list(ENGINES)),
    default="single",
    show_default=True,
    help="How the nets are put onto ranks: " + ", ".join(ENGINES) + ".",
)
@click.option("--world", metavar="N", default="1", show_default=True, help="Ranks, each on a device of its own.")
@click.option("--rank", metavar="R", help="Which of them, from 0. Default: the one that needs most.")
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
    memory: str | None, headroom: str | None, precision: str | None, checkpoint: str | None, accumulate: str,
    epoch: str | None, lengths: str | None, shapes: str | None, engine: str, world: str, rank: str | None,
    snapshot: str | None, trace: str | None, as_json: bool,
) -> int:  # fmt: skip
    """Does JOB fit, in training, validation and saving?

    JOB is a built-in name (memfit jobs), package.module:Name or path/file.py:Name.
    """
    from memfit.cli.progress import progress, settle
    from memfit.geometry import parse_shape, shape_of
    from memfit.loading import load_job, read_settings

    device = choose_device(device_name, memory, headroom)
    if trace is not None and Path(trace).suffix not in (".json", ".npz"):
        write = "write F.json for ui.perfetto.dev, or F.npz for memfit report"
        raise InputError(f"--trace {trace}", "neither .json nor .npz", write)
    if lengths is not None and epoch is None and shapes is None:
        raise InputError(
            f"--lengths {lengths}", "nothing uses them without --epoch", "write --epoch N too (0: one epoch)"
        )
    accumulated = whole_number("--accumulate", accumulate)
    count = whole_number("--micro-batch", micro_batch)
    ranks, which = whole_number("--world", world), whole_number("--rank", rank, least=0)
    with progress(f"tracing {job}", quiet=as_json):
        from memfit.planner.predict import checkpoint_all, plain_nets, predict, with_precision

        loaded = with_precision(load_job(job, read_settings(pairs)), precision)
        settle()
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
        prediction = predict(
            loaded, job, wanted, device, micro_batches=accumulated or 1, checkpointing=modes, plan=plan,
            engine=engine, world=ranks or 1, rank=which,
        )  # fmt: skip
        sequence = None
        if epoch is not None or shapes is not None:
            sequence = _sequence(loaded, prediction, accumulated, epoch, lengths, shapes)
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
        from memfit.planner.plan_json import sequence_json

        found = {} if sequence is None else {"sequence": sequence_json(sequence)}
        print_json(prediction_json(prediction) | found)
    else:
        from memfit.show.footprint_table import show_prediction

        show_prediction(prediction)
        if sequence is not None:
            from memfit.show.sequence_table import show_sequence

            show_sequence(sequence)
    fits = prediction.footprint.fits and (sequence is None or sequence.plain.failed_window is None)
    return Exit.DONE if fits else Exit.NOTHING_FITS


def _sequence(
    job: Any, prediction: Any, accumulated: int, epoch: str | None, lengths: str | None, shapes: str | None
) -> Any:
    from memfit.planner.variable_length.sequence import drawn_windows, predict_sequence, read_lengths, read_shapes

    if shapes is not None:
        if epoch is not None or lengths is not None:
            raise InputError("--shapes with --epoch or --lengths", "they say the same thing twice", "write one of them")
        windows = read_shapes(shapes)
    else:
        windows = drawn_windows(
            job,
            None if lengths is None else read_lengths(lengths),
            global_batch=prediction.micro_batch * accumulated,
            micro_batch=prediction.micro_batch,
            count=whole_number("--epoch", epoch, least=0) or 0,
        )
    return predict_sequence(job, prediction.device, windows, prediction.checkpointing)


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
        "engine": prediction.engine,
        "world": prediction.world,
        "rank": prediction.rank,
        "seconds": prediction.seconds,
    }
