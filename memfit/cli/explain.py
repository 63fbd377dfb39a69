"""memfit explain: finds the cause of an out-of-memory error in what the failure left behind."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from memfit.cli.options import json_option, print_json, set_option, whole_number
from memfit.errors import Exit, InputError
from memfit.printable import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from memfit.explain.diagnosis import Explanation
    from memfit.explain.evidence import Evidence
    from memfit.explain.prediction import StepPrediction

SHOWN = 8
"""The number of memory holders that are shown."""


@click.command("explain")
@click.argument("file", metavar="FILE|-")
@click.option("--job", metavar="JOB", help="Predict the same step of this job, and compare.")
@set_option
@click.option("--micro-batch", metavar="N", help="The step's units, for --job. Default: that of memfit predict.")
@click.option("--script", metavar="COMMAND", help="Trace this script or command on the virtual card, and compare.")
@click.option(
    "--device",
    "device_name",
    metavar="NAME",
    help="The card, for --job and --script. Default: the card whose size the failure shows.",
)
@json_option
def command(
    file: str, job: str | None, pairs: tuple[str, ...], micro_batch: str | None, script: str | None,
    device_name: str | None, as_json: bool,
) -> int:  # fmt: skip
    """Explain why a run ran out of memory, and what to change.

    FILE is the text of an out-of-memory error or a log with one, the output of torch.cuda.memory_summary() or
    nvidia-smi, a memory snapshot (torch.cuda.memory._dump_snapshot), or a metrics.jsonl; - reads standard input. A
    snapshot is read without running any code in it. A plan file is FILE too: its peaks and the stages of its pipeline.
    """
    from memfit.cli.explain_plan import explain_plan, is_plan_file

    if is_plan_file(file):
        if job is not None or script is not None or device_name is not None:
            why = "a plan names its job and its device itself"
            raise InputError(f"--job, --script or --device with {file}", why, f"write memfit explain {file}")
        explain_plan(file, as_json=as_json)
        return Exit.DONE
    if job is not None and script is not None:
        raise InputError("--job and --script", "one step is compared", "write one of them")
    if job is None and (pairs or micro_batch):
        raise InputError("--set and --micro-batch", "they are a job's", "write --job JOB too")
    if job is None and script is None and device_name is not None:
        why = "nothing is predicted that a card would change"
        raise InputError(f"--device {device_name}", why, "write --job JOB or --script COMMAND too, or leave it out")
    from memfit.explain.diagnosis import explain
    from memfit.explain.evidence_reader import read_evidence

    evidence = read_evidence(file)
    prediction = _prediction(evidence, job, pairs, micro_batch, script, device_name)
    explanation = explain(evidence)
    if prediction is not None:
        from dataclasses import replace

        from memfit.explain.prediction import with_prediction

        short = evidence.failures[0].short if evidence.failures else None
        explanation = replace(explanation, changes=with_prediction(explanation.changes, prediction, short))
    if as_json:
        print_json(_json(explanation, prediction))
    else:
        from memfit.show.console import make_console

        _show(explanation, prediction, make_console(emoji=False))
    return Exit.DONE


def _prediction(
    evidence: Evidence, job: str | None, pairs: tuple[str, ...], micro_batch: str | None, script: str | None,
    device_name: str | None,
) -> StepPrediction | None:  # fmt: skip
    if job is None and script is None:
        return None
    from memfit.explain.prediction import device_for, predict_job, predict_script

    device = device_for(device_name, evidence.failures[0] if evidence.failures else None)
    if script is not None:
        predicted = predict_script(script, device)
        if predicted is None:
            write = f"see what memfit trace -- {script} says"
            raise InputError(f"--script {script}", "it ended before its first optimizer step", write)
        return predicted
    assert job is not None
    from memfit.cli.job_options import load_with, micro_batch_shape
    from memfit.cli.progress import progress

    with progress(f"predicting {job}", quiet=True):
        loaded = load_with(job, pairs, None)
        shape = micro_batch_shape(loaded, None, whole_number("--micro-batch", micro_batch))
        return predict_job(loaded, job, shape, device)


def _json(explanation: Explanation, prediction: StepPrediction | None) -> dict[str, Any]:
    evidence = explanation.evidence
    failures = [
        {
            **asdict(failure),
            "frames": [asdict(frame) for frame in failure.frames],
            "line": str(failure.own_frame) if failure.own_frame else None,
            "short_bytes": failure.short,
        }
        for failure in evidence.failures
    ]
    growth = evidence.growth
    answer = {
        "kind": evidence.kind,
        "verdict": explanation.verdict,
        "cause": explanation.cause,
        "failures": failures,
        "allocator": None if evidence.state is None else asdict(evidence.state),
        "categories": dict(evidence.categories),
        "alive": [asdict(holder) for holder in evidence.alive],
        "growth": None if growth is None else asdict(growth) | {"bytes_per_step": growth.per_step},
        "spike": evidence.spike,
        "readings": evidence.readings,
        "devices": [asdict(device) for device in evidence.devices],
        "changes": [asdict(change) for change in explanation.changes],
        "unknown": list(explanation.unknown),
        "prediction": None,
    }
    if prediction is not None:
        from memfit.explain.prediction import conclusion, measured_and_predicted

        answer["prediction"] = {
            "of": prediction.of,
            "device": prediction.device.key,
            "conclusion": conclusion(evidence, prediction),
            "footprint": asdict(prediction.footprint),
            "largest_window": None if prediction.epoch is None else asdict(prediction.epoch),
            "compared": [
                {"name": name, "measured_bytes": measured, "predicted_bytes": predicted}
                for name, measured, predicted in measured_and_predicted(evidence, prediction)
            ],
        }
    return answer


def _show(explanation: Explanation, prediction: StepPrediction | None, console: Console) -> None:
    from memfit.sizes import format_size

    evidence = explanation.evidence
    console.print(_text(explanation.verdict, style="bold"))
    if explanation.facts:
        console.print()
        _rows(console, [(name, value) for name, value in explanation.facts])
    if evidence.categories:
        console.print("\nAlive, by category")
        _rows(console, [(name, format_size(nbytes)) for name, nbytes in evidence.categories])
    if evidence.alive:
        console.print("\nAlive, by line")
        for holder in evidence.alive[:SHOWN]:
            blocks = f"{holder.blocks} block{'s' if holder.blocks > 1 else ''}"
            line = f"  {format_size(holder.bytes):>9}  {holder.where} ({holder.category}, {blocks})"
            console.print(_text(line), soft_wrap=True)
    if prediction is not None:
        _show_prediction(explanation, prediction, console)
    if explanation.changes:
        console.print("\nWhat would have helped")
    for change in explanation.changes:
        size = (
            "" if not change.saves_bytes else f", {'up to ' * (change.helps != 'yes')}{format_size(change.saves_bytes)}"
        )
        console.print(_text(f"  {change.helps}: {change.name}{size}"), soft_wrap=True)
        console.print(_text(f"      {change.write}"), soft_wrap=True)
        if change.why:
            console.print(_text(f"      {change.why}", style="dim"), soft_wrap=True)
    if explanation.unknown:
        console.print("\nNot known from this file")
    for text in explanation.unknown:
        console.print(_text(f"  {text}"), soft_wrap=True)


def _show_prediction(explanation: Explanation, prediction: StepPrediction, console: Console) -> None:
    from memfit.explain.prediction import conclusion, measured_and_predicted
    from memfit.sizes import format_size

    console.print()
    console.print(_text(conclusion(explanation.evidence, prediction)), soft_wrap=True)
    rows = [
        (name, f"{format_size(measured) if measured is not None else 'unknown':>10} measured, "
         f"{format_size(predicted):>10} predicted")
        for name, measured, predicted in measured_and_predicted(explanation.evidence, prediction)
    ]  # fmt: skip
    _rows(console, rows)
    if prediction.epoch is not None:
        console.print(_text(f"  Over an epoch: {prediction.epoch}."), soft_wrap=True)
    for line, nbytes in prediction.lines:
        console.print(_text(f"  {format_size(nbytes):>9}  {line}"), soft_wrap=True)


def _text(text: str, style: str = "") -> Text:
    """Text of a file as a terminal may show it."""
    from rich.text import Text

    return Text(printable(text), style=style)


def _rows(console: Console, rows: list[tuple[str, str]]) -> None:
    width = max(len(name) for name, _ in rows) + 2
    for name, value in rows:
        console.print(_text(f"  {name:<{width}}{value}"), soft_wrap=True)
