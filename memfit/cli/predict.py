"""memfit predict: predicts the memory of training, validation and saving, before the run and without the card."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from memfit.cli.background_traces import AheadRequest, NextQuestions
from memfit.cli.job_options import asked_job, micro_batch_shape
from memfit.cli.mesh_option import asked_choices, asked_ranks, engine_choice_option, mesh_option
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
from memfit.cli.prediction_output import (
    budget_line,
    highest_peak,
    predictions_json,
    write_snapshot_file,
    write_trace_file,
)
from memfit.cli.progress import progress
from memfit.cli.titan_target import asked_titan, config_option, is_titan, refuse_config
from memfit.errors import Exit, InputError
from memfit.plan import ENGINES
from memfit.sizes import parse_size

if TYPE_CHECKING:
    from memfit.plan import Plan
    from memfit.planner.prediction import Prediction


@click.command("predict")
@click.argument("job")
@set_option
@config_option
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
    help="The engine that distributes nets over ranks: " + ", ".join(ENGINES) + ". Default: single, or --mesh's.",
)
@click.option("--world", metavar="N", help="Ranks, each on a device of its own. Default: 1, or those of --mesh.")
@mesh_option
@engine_choice_option
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
@fresh_option
@json_option
def command(
    job: str, pairs: tuple[str, ...], config: str | None, micro_batch: str | None, shape: str | None,
    device_names: tuple[str, ...], memory: str | None, headroom: str | None, budget: str | None, ci: bool,
    precision: str | None, checkpoint: str | None, accumulate: str,
    epoch: str | None, lengths: str | None, shapes: str | None, engine: str | None, world: str | None,
    mesh: str | None, choices: tuple[str, ...], rank: str | None, snapshot: str | None, trace: str | None,
    fresh: bool, as_json: bool,
) -> int:  # fmt: skip
    """Predict whether JOB fits, in training, validation and saving.

    JOB is a built-in name (memfit jobs), package.module:Name, path/file.py:Name, torchtitan:CONFIG, or
    -- python train.py ARGS.
    """
    from memfit.planner.several_cards import predict_each

    targets = choose_devices(device_names, memory, headroom)
    limit = parse_size(budget, "--budget") if budget is not None else None
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
    titan = None
    if is_titan(job):
        titan = asked_titan(
            job, config=config, pairs=pairs, world=whole_number("--world", world), mesh=mesh,
            options={
                "--precision": precision, "--checkpoint": checkpoint, "--engine": engine, "--shape": shape,
                "--accumulate": None if accumulate == "1" else accumulate, "--epoch": epoch, "--shapes": shapes,
                "--engine-choice": choices[0] if choices else None,
            },
        )  # fmt: skip
        ranks, choices = asked_ranks(None, None, None), ()
    else:
        refuse_config(config)
        ranks = asked_ranks(engine, whole_number("--world", world), mesh)
    engine_choices = asked_choices(choices, ranks.engine if engine or mesh else None)
    how: dict[str, Any] = {
        "micro_batches": whole_number("--accumulate", accumulate), "engine": ranks.engine, "world": ranks.world,
        "mesh": ranks.mesh, "rank": whole_number("--rank", rank, least=0), "engine_choices": engine_choices or None,
    }  # fmt: skip
    count, plan = whole_number("--micro-batch", micro_batch), _plan(checkpoint)
    are_wanted = plan is None and ranks.mesh is None and not (fresh or ci)
    following = NextQuestions(dict(os.environ), are_wanted=are_wanted)
    several = len(targets) > 1 or ranks.world > 1
    with titan or asked_job(
        job, pairs, precision, checkpoint, fresh=fresh, several=several, before_tracing=following.before_tracing
    ) as asked:
        with progress(f"tracing {asked.name}", quiet=as_json):
            asked_shape = micro_batch_shape(asked.facts, shape, count or asked.micro_batch)
            modes = {"none": {}, "all": asked.facts.every, None: asked.facts.own}
            how |= {"plan": plan, "checkpointing": modes[checkpoint] if plan is None else dict(plan.checkpointing)}
            asked.prepare(asked_shape, targets, **how)
            request = AheadRequest(
                job=job, pairs=pairs, precision=precision, shape=asked_shape, device=targets[0].key, choices=how
            )
            following.asked = request if len(targets) == 1 else None
            predictions = predict_each(asked, asked_shape, targets, **how)
            sequence = None
            if epoch is not None or shapes is not None:
                sequence = _sequence(asked.job, predictions[0], how["micro_batches"], epoch, lengths, shapes)
        if snapshot is not None:
            write_snapshot_file(snapshot, predictions[0], targets[0])
        if trace is not None:
            write_trace_file(Path(trace), predictions[0])
        if as_json:
            print_json(predictions_json(predictions, sequence, limit))
        else:
            _print(predictions, sequence, limit, ci=ci)
    following.trace(asked, request)
    fits = any(prediction.footprint.fits for prediction in predictions)
    fits = fits and (sequence is None or sequence.plain.failed_window is None)
    within = all(limit is None or highest_peak(prediction) <= limit for prediction in predictions)
    return Exit.DONE if fits and within else Exit.NOTHING_FITS


def _print(predictions: list[Prediction], sequence: Any, limit: int | None, *, ci: bool) -> None:
    """Shows the predictions, and whether they are within a budget; with ``ci``, only the latter."""
    if not ci and len(predictions) > 1:
        from memfit.show.footprint_table import show_predictions

        show_predictions(predictions)
    elif not ci:
        from memfit.show.footprint_table import show_prediction

        show_prediction(predictions[0])
    if not ci and sequence is not None:
        from memfit.show.sequence_table import show_sequence

        show_sequence(sequence)
    for prediction in predictions if limit is not None else ():
        line = budget_line(prediction, limit or 0)
        click.echo(line if ci else line.removeprefix("::error::").removeprefix("::notice::"))


def _plan(checkpoint: str | None) -> Plan | None:
    """Returns the plan whose file --checkpoint names.

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

    return read_plan(checkpoint)


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
