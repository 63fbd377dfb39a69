"""memfit probe: really runs the step on this machine, each trial in a fresh process, and compares the prediction."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from memfit.cli.options import choose_device, json_option, memory_option, print_json, set_option, whole_number
from memfit.errors import Exit, InputError

if TYPE_CHECKING:
    from memfit.device.hardware.catalogue import Device
    from memfit.train.probe.probe import Probe


@click.command("probe")
@click.argument("target", metavar="JOB|plan.toml")
@set_option
@click.option(
    "--micro-batch",
    metavar="N",
    help="The micro-batch to run, in units. Default: the largest that runs within --memory or on the card.",
)
@memory_option
@click.option("--prove", is_flag=True, help="Also run the next larger micro-batch, which must fail.")
@click.option("--precision", type=click.Choice(["fp32", "bf16", "fp16"]), help="Default: the job's own.")
@click.option(
    "--accumulate",
    metavar="N",
    default="1",
    show_default=True,
    help="Micro-batches in a window; 1 means no accumulation.",
)
@json_option
def command(
    target: str, pairs: tuple[str, ...], micro_batch: str | None, memory: str | None, prove: bool,
    precision: str | None, accumulate: str, as_json: bool,
) -> int:  # fmt: skip
    """Really runs the step of a job or a plan on this machine, beside its prediction.

    Each trial is a fresh process, which cannot take more than --memory (on a CPU: beyond what it held before the job).
    On a CPU without --memory and --micro-batch, one longest item (or one sample) is run. A plan's own micro-batch is
    run in its own budget. Exit code 3: nothing ran; 4: the prediction is off by more than its bound.
    """
    from memfit.cli.progress import progress

    fixed, count = whole_number("--micro-batch", micro_batch), whole_number("--accumulate", accumulate)
    if prove and (fixed is not None or target.endswith(".toml")):
        write = "leave --micro-batch out, and name a job"
        raise InputError("--prove", "it searches for the largest micro-batch, and this micro-batch is fixed", write)
    with progress(f"probing {target}", quiet=as_json):
        if target.endswith(".toml"):
            if pairs or memory or fixed or precision or count != 1:
                write = "leave the options out, or probe the job"
                raise InputError(f"options beside {target}", "the plan has these choices", write)
            result, device = _plan(target)
        else:
            result, device = _job(target, pairs, fixed, memory, prove, precision, count)
    if as_json:
        print_json(probe_json(target, result, device))
    else:
        _show(target, result)
    if result.largest is None:
        return Exit.NOTHING_FITS
    return Exit.DONE if result.within_bound else Exit.CHECK_FAILED


def _job(
    target: str, pairs: tuple[str, ...], fixed: int | None, memory: str | None, prove: bool, precision: str | None,
    count: int,
) -> tuple[Probe, Device]:  # fmt: skip
    from memfit.cli.job_options import load_with
    from memfit.planner.predict import default_checkpointing, plain_nets
    from memfit.trace.step import Tracing
    from memfit.train.probe.probe import Prober, probe, probe_one

    device = choose_device(None, memory)
    budget = device.usable_bytes or 0
    job = load_with(target, pairs, precision)
    modes = default_checkpointing(job, plain_nets(job))
    prober = Prober(job, target, device, budget, Tracing(device=device, micro_batches=count, checkpointing=modes))
    longest = job.longest or 1
    if fixed is None and (memory is not None or device.is_cuda):
        return probe(prober, budget, longest, prove=prove), device
    if prove:
        raise InputError("--prove without --memory", "there is no limit to reach", "write --memory SIZE")
    return probe_one(prober, fixed or longest), device


def _plan(path: str) -> tuple[Probe, Device]:
    from memfit.device.hardware.catalogue import with_memory
    from memfit.device.hardware.local_devices import local_devices
    from memfit.loading import load_job
    from memfit.plan import read_plan
    from memfit.trace.step import Tracing
    from memfit.train.probe.probe import Prober, probe_one

    plan = read_plan(path)
    here = next((device for device in local_devices() if device.key == plan.device), None)
    if here is None:
        write = "plan again with --memory SIZE, for this machine's own"
        raise InputError(f"a plan for {plan.device}", "this machine has no such device", write)
    device = with_memory(here, plan.budget_bytes)
    job = load_job(plan.job, dict(plan.settings), unit=plan.unit)
    how = Tracing(device=device, micro_batches=len(plan.micro_batches[0]), checkpointing=plan.checkpointing)
    return probe_one(Prober(job, plan.job, device, plan.budget_bytes, how), plan.micro_batch), device


def probe_json(target: str, result: Probe, device: Device) -> dict[str, Any]:
    """The JSON of DESIGN.md."""
    from dataclasses import asdict

    return {
        "job": target,
        "device": {"name": device.key, "memory_bytes": device.memory_bytes, "usable_bytes": device.usable_bytes},
        "trials": [asdict(trial) for trial in result.trials],
        "found": result.largest,
        "step": result.step,
        "proved": result.proved,
        "predicted": asdict(result.predicted),
        "relative_error": dict(result.relative_error),
        "within_bound": result.within_bound,
        "seconds": result.seconds,
    }


def _show(target: str, result: Probe) -> None:
    from rich.markup import escape
    from rich.table import Table

    from memfit.show.console import make_console
    from memfit.show.footprint_table import assumptions
    from memfit.sizes import format_size
    from memfit.wording import counted

    console = make_console()
    if result.largest is None:
        last = result.trials[-1]
        where = f" in {last.failed_in}" if last.failed_in else ""
        console.print(f"[bold red]Nothing ran[/]: out of memory{where}: {escape(last.error)}")
    else:
        proof = f", and {result.largest + result.step} really fails" if result.proved else ""
        console.print(f"[bold green]Runs[/]: a micro-batch of {result.largest}{proof}.")
    console.print(f"{target}: {counted(len(result.trials), 'trial')} in {result.seconds:.1f} s", style="dim")
    table = Table(box=None, pad_edge=False)
    for title in ("micro-batch", "", "allocated", "process", "seconds"):
        table.add_column(title, justify="left" if not title else "right")
    for trial in result.trials:
        if trial.ok:
            cells = ("ran", format_size(trial.allocated_bytes or 0), format_size(trial.process_bytes or 0))
            table.add_row(str(trial.micro_batch), *cells, f"{trial.seconds:.2f}")
        else:
            where = f" in {trial.failed_in}" if trial.failed_in else ""
            table.add_row(str(trial.micro_batch), f"out of memory{where}", "", "", "")
    console.print(table)
    for name, error in result.relative_error.items():
        predicted = result.predicted.phases[name].allocated_bytes
        console.print(f"{name}: {format_size(predicted)} predicted, {error:+.2%} of what was measured")
    for line in assumptions(result.predicted):
        console.print(line, style="dim")
    if not result.within_bound:
        console.print("[bold yellow]The prediction is outside its bound.[/]")
