"""memfit predict: predicts the memory of training, validation and saving, before the run and without the card."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
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
from memfit.plan import ENGINES
from memfit.printable import one_line
from memfit.sizes import format_size, parse_size

if TYPE_CHECKING:
    from memfit.device.hardware.catalogue import Device
    from memfit.job import Job, Shape
    from memfit.planner.prediction import Prediction, TracedQuestion


@click.command("predict")
@click.argument("job")
@set_option
@click.option(
    "--micro-batch",
    metavar="N",
    help="Units in one micro-batch: samples, or the job's unit (frames). Default 1, or one longest item.",
)
@click.option("--shape", metavar="BxL", help="Items x length of one micro-batch, instead of --micro-batch.")
@device_names_option
@memory_option
@headroom_option
@click.option("--budget", metavar="SIZE", help="Exit with code 3 if the process needs more than this, such as 8GiB.")
@click.option("--ci", is_flag=True, help="Print only a line for --budget, as an annotation of a GitHub workflow.")
@click.option("--precision", type=click.Choice(["fp32", "bf16", "fp16"]), help="Default: the job's own.")
@click.option(
    "--checkpoint",
    metavar="none|all|PLAN",
    help="What is recomputed: nothing, all that can be, or as a plan file says. Default: the job's own.",
)
@click.option(
    "--accumulate",
    metavar="N",
    default="1",
    show_default=True,
    help="Micro-batches in a window; 1 means no accumulation.",
)
@click.option(
    "--epoch",
    metavar="N",
    help="Also replay N windows of varied lengths one after the other, as memfit run draws them (0: one epoch).",
)
@click.option(
    "--lengths", metavar="F:COLUMN", help="Lengths for --epoch, from a .csv, .tsv or .jsonl. Default: the job's."
)
@click.option(
    "--shapes",
    metavar="F",
    type=click.Path(dir_okay=False),
    help="Also replay the windows of F: 8x400 6x512 in a line.",
)
@click.option(
    "--engine",
    metavar="E",
    type=click.Choice(list(ENGINES)),
    default="single",
    show_default=True,
    help="The engine that distributes nets over ranks: " + ", ".join(ENGINES) + ".",
)
@click.option("--world", metavar="N", default="1", show_default=True, help="Ranks, each on a device of its own.")
@click.option("--rank", metavar="R", help="The rank to predict, from 0. Default: the rank that needs most.")
@click.option(
    "--snapshot",
    metavar="F",
    type=click.Path(dir_okay=False),
    help="Write the predicted timeline for PyTorch's memory_viz.",
)
@click.option(
    "--trace",
    metavar="F",
    type=click.Path(dir_okay=False),
    help="Write the events: F.json for ui.perfetto.dev, F.npz for memfit report.",
)
@click.option("--fresh", is_flag=True, help="Trace again, even if an earlier trace of the same question is kept.")
@json_option
def command(
    job: str, pairs: tuple[str, ...], micro_batch: str | None, shape: str | None, device_names: tuple[str, ...],
    memory: str | None, headroom: str | None, budget: str | None, ci: bool, precision: str | None,
    checkpoint: str | None, accumulate: str,
    epoch: str | None, lengths: str | None, shapes: str | None, engine: str, world: str, rank: str | None,
    snapshot: str | None, trace: str | None, fresh: bool, as_json: bool,
) -> int:  # fmt: skip
    """Predict whether JOB fits, in training, validation and saving.

    JOB is a built-in name (memfit jobs), package.module:Name or path/file.py:Name.
    """
    from memfit.cli.progress import progress, settle

    targets = choose_devices(device_names, memory, headroom)
    device = targets[0]
    limit = parse_size(budget) if budget is not None else None
    if ci and limit is None:
        raise InputError("--ci without --budget", "there is nothing to check against", "write --budget 8GiB too")
    single = {"--snapshot": snapshot, "--trace": trace, "--epoch": epoch, "--shapes": shapes}
    if len(targets) > 1 and (name := next((name for name, value in single.items() if value is not None), None)):
        raise InputError(f"{name} with {len(targets)} devices", "it is of one device", "write one --device")
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
    asked = {
        "pairs": sorted(pairs), "micro_batch": count, "shape": shape, "precision": precision,
        "checkpoint": checkpoint, "plan": _plan_text(checkpoint), "micro_batches": accumulated, "engine": engine,
        "world": ranks, "rank": which,
    }  # fmt: skip
    with progress(f"tracing {job}", quiet=as_json):
        from memfit.planner.kept_questions import question_key
        from memfit.planner.prediction import answer

        begin, key, sequence = time.perf_counter(), question_key(job, asked), None
        replays = epoch is not None or shapes is not None
        known = None if fresh or replays else _kept(key, targets)
        if known is not None:
            predictions = [answer(question, job, target) for question, target in zip(known, targets, strict=True)]
            seconds = time.perf_counter() - begin
            predictions = [replace(prediction, seconds=seconds) for prediction in predictions]
        else:
            from memfit.planner.dependencies import dependencies, recorded_reads
            from memfit.planner.kept_questions import keep_question

            with recorded_reads() as reads:
                loaded = load_with(job, pairs, precision)
                settle()
                questions, predictions = _traced(loaded, job, asked, targets)
            depends = dependencies(reads)
            for question in questions:
                keep_question(key, question, depends)
            if replays:
                sequence = _sequence(loaded, predictions[0], accumulated, epoch, lengths, shapes)
    prediction = predictions[0]
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
    within = [limit is None or _peak(prediction) <= limit for prediction in predictions]
    if as_json:
        print_json(_json(predictions, sequence, limit))
    elif ci:
        for prediction in predictions:
            click.echo(budget_line(prediction, limit or 0))
    elif len(predictions) > 1:
        from memfit.show.footprint_table import show_predictions

        show_predictions(predictions)
    else:
        from memfit.show.footprint_table import show_prediction

        show_prediction(prediction)
        if sequence is not None:
            from memfit.show.sequence_table import show_sequence

            show_sequence(sequence)
    if limit is not None and not as_json and not ci:
        for prediction in predictions:
            click.echo(budget_line(prediction, limit).removeprefix("::error::").removeprefix("::notice::"))
    fits = any(prediction.footprint.fits for prediction in predictions)
    fits = fits and (sequence is None or sequence.plain.failed_window is None)
    return Exit.DONE if fits and all(within) else Exit.NOTHING_FITS


def load_with(job: str, pairs: tuple[str, ...], precision: str | None) -> Job:
    """Loads the job with its settings, in a precision."""
    from memfit.loading import load_job, read_settings
    from memfit.planner.predict import with_precision

    return with_precision(load_job(job, read_settings(pairs)), precision)


def _kept(key: str, targets: list[Device]) -> list[TracedQuestion] | None:
    """Returns every device's kept prediction; None if one of them is not kept."""
    from memfit.planner.kept_questions import kept_question

    questions = []
    for device in targets:
        question = kept_question(key, device)
        if question is None:
            return None
        questions.append(question)
    return questions


def _traced(
    job: Job, name: str, asked: dict[str, Any], targets: list[Device]
) -> tuple[list[TracedQuestion], list[Prediction]]:
    """Returns a new trace, and every device's prediction from it."""
    from memfit.planner.predict import checkpoint_all, plain_nets
    from memfit.planner.traced_questions import TracedQuestions

    wanted = micro_batch_shape(job, asked["shape"], asked["micro_batch"])
    modes, plan = None, None
    if asked["checkpoint"] == "none":
        modes = {}
    elif asked["checkpoint"] == "all":
        modes = checkpoint_all(job, plain_nets(job))
    elif asked["checkpoint"] is not None:
        from memfit.plan import read_plan

        plan = read_plan(asked["checkpoint"])
        modes = dict(plan.checkpointing)
    questions = TracedQuestions()
    predictions = [
        questions.predict(
            job, name, wanted, target, micro_batches=asked["micro_batches"], checkpointing=modes, plan=plan,
            engine=asked["engine"], world=asked["world"], rank=asked["rank"],
        )
        for target in targets
    ]  # fmt: skip
    return questions.all(), predictions


def _plan_text(checkpoint: str | None) -> str | None:
    """Returns the text of the plan file that --checkpoint names.

    Raises:
        InputError: the value is neither none, all nor a file.
    """
    if checkpoint in (None, "none", "all"):
        return None
    if not Path(checkpoint).exists():
        raise InputError(
            f"--checkpoint {checkpoint}",
            "neither none, all nor a plan file",
            "write none, all, or a file that memfit plan --out wrote",
        )
    from memfit.plan import read_plan

    return repr(read_plan(checkpoint))


def budget_line(prediction: Prediction, limit: int) -> str:
    """Says whether a prediction is within a budget, as an annotation of a GitHub workflow."""
    peak = _peak(prediction)
    kind, words = ("error", "exceeds") if peak > limit else ("notice", "is within")
    what = f"{prediction.job} with {prediction.micro_batch} {prediction.unit} on {prediction.device.key}"
    return one_line(f"::{kind}::{what} needs {format_size(peak)}, which {words} the budget of {format_size(limit)}.")


def _peak(prediction: Prediction) -> int:
    return max(phase.process_bytes for phase in prediction.footprint.phases.values())


def _json(predictions: list[Prediction], sequence: Any, limit: int | None) -> dict[str, Any]:
    """Returns the JSON of one prediction, or of every device's by name."""
    answers = []
    for prediction in predictions:
        budget = {} if limit is None else {"budget_bytes": limit, "within_budget": _peak(prediction) <= limit}
        answers.append(prediction_json(prediction) | budget)
    if len(answers) > 1:
        return {"devices": {answer["device"]["name"]: answer for answer in answers}}
    if sequence is None:
        return answers[0]
    from memfit.planner.plan_json import sequence_json

    return answers[0] | {"sequence": sequence_json(sequence)}


def micro_batch_shape(job: Job, shape: str | None, count: int | None) -> Shape:
    """Returns the shape of --shape or --micro-batch; by default one item of the longest length.

    Raises:
        InputError: both are given, or the shape does not suit the job.
    """
    from memfit.geometry import parse_shape, shape_of

    if shape is not None and count is not None:
        raise InputError("--shape and --micro-batch", "both say the same", "write one of them")
    return parse_shape(shape, job) if shape is not None else shape_of(job, count or job.longest or 1)


def _sequence(
    job: Any, prediction: Any, accumulated: int, epoch: str | None, lengths: str | None, shapes: str | None
) -> Any:
    from memfit.planner.variable_length.sequence import drawn_windows, predict_sequence, read_lengths, read_shapes

    if shapes is not None:
        if epoch is not None or lengths is not None:
            raise InputError("--shapes with --epoch or --lengths", "both say the same", "write one of them")
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

    footprint = asdict(prediction.footprint)
    device = prediction.device
    return {
        "job": prediction.job,
        "settings": prediction.settings,
        "micro_batch": prediction.micro_batch,
        "unit": prediction.unit,
        "shape": asdict(prediction.shape),
        "device": {"name": device.key, "memory_bytes": device.memory_bytes, "usable_bytes": device.usable_bytes},
        "nets": [asdict(net) for net in prediction.nets],
        **footprint,
        "checkpointing": dict(prediction.checkpointing),
        "engine": prediction.engine,
        "world": prediction.world,
        "rank": prediction.rank,
        "seconds": prediction.seconds,
    }
