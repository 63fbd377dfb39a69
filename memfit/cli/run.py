"""memfit run: trains a plan inside its memory budget."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

import click

from memfit.cli.options import json_option, print_json, whole_number
from memfit.errors import Exit, InputError
from memfit.geometry import MOST

if TYPE_CHECKING:
    from memfit.engine.nodes import Nodes
    from memfit.plan import Plan
    from memfit.train.run_folder import RunFolder
    from memfit.train.run_options import RunOptions


@click.command("run")
@click.argument("plan")
@click.option("--out", required=True, metavar="RUN", type=click.Path(file_okay=False), help="The run's folder.")
@click.option("--windows", metavar="N", help="Optimizer steps. Default: the job's own number.")
@click.option(
    "--resume", is_flag=True, help="Continue a run from its newest checkpoint, or from window 0 if it has none."
)
@click.option("--keep", metavar="N", default="2", show_default=True, help="The number of newest checkpoints to keep.")
@click.option(
    "--save-every",
    metavar="SECONDS",
    default="60",
    show_default=True,
    help="Time between checkpoints; 0: after every window. One more is saved at the end and when stopped.",
)
@click.option(
    "--oversized",
    type=click.Choice(["stop", "skip"]),
    default="stop",
    show_default=True,
    help="What to do with a sample that does not fit alone: stop the run, or skip and count it.",
)
@click.option(
    "--verify-every",
    metavar="N",
    default="0",
    show_default=True,
    help="Every N windows, repeat the window on one device and compare; 0: never.",
)
@click.option(
    "--workers",
    metavar="N",
    help="Processes of each rank that read the data ahead; 0: the process that trains reads it. "
    "Default: by the cores and what reading a sample costs.",
)
@click.option(
    "--patience",
    metavar="SECONDS",
    help="Time without progress after which the run writes all stacks to RUN/stacks and ends with exit code 5. "
    "Default: 20 times the longest step that was measured, and at least 120.",
)
@click.option("--nnodes", metavar="N", default="1", show_default=True, help="Machines that share the plan's devices.")
@click.option(
    "--node-rank", metavar="K", default="0", show_default=True, help="This machine's number among them, from 0."
)
@click.option(
    "--rdzv-endpoint", metavar="HOST:PORT", help="Where machine 0 listens for the others: its address and a free port."
)
@click.option("--wandb", is_flag=True, help="Also keep the scalars for Weights & Biases, offline, under RUN/wandb.")
@json_option
def command(plan: str, *, wandb: bool, as_json: bool, **values: Any) -> int:
    """Train PLAN, a file that memfit plan wrote, in a process that cannot take more than the plan's budget.

    A plan for N devices is run by N processes: torchrun starts them on this machine, and starts them again from the
    last checkpoint if one is lost. On several machines, start memfit run on each, with --nnodes, --node-rank and
    --rdzv-endpoint. RUN may be a folder that they share; else the one of machine 0 holds the run.
    """
    from memfit.train.launch.stop_signals import ended_by_signals

    with ended_by_signals(lambda: click.echo(_stopped_early(plan, values["out"]), err=True)):
        return _run(plan, wandb, as_json, values)


def _stopped_early(plan: str, out: str) -> str:
    """What is said where a signal comes before the run's processes are there."""
    from memfit.printable import printable

    resume = " --resume" if os.path.isdir(out) and os.listdir(out) else ""
    return printable(f"memfit: stopped before the first window; go on with: memfit run {plan} --out {out}{resume}")


def _run(plan: str, wandb: bool, as_json: bool, values: dict[str, Any]) -> int:
    """Runs a plan; returns the exit code."""
    from memfit.cli.run_monitor import attended, keepers
    from memfit.device.hardware.process_limits import RANK_BYTES, check_cards, check_ranks, check_workers
    from memfit.engine.torchrun_env import is_restart, torchrun_env
    from memfit.plan import read_plan
    from memfit.planner.cpu_margin import check_budget
    from memfit.printable import printable
    from memfit.train.launch.launch import become_rank, launch
    from memfit.train.launch.outcome import say
    from memfit.train.launch.process_guard import alone_in
    from memfit.train.launch.stop_signals import end_with
    from memfit.train.launch.watchdog import clear_earlier, made_no_progress
    from memfit.train.run_folder import RunFolder

    place = torchrun_env()
    options = _options(values, restarted=place is not None and is_restart())
    read = read_plan(plan)
    check_budget(read, plan)
    if options.verify_every and read.engine_choices.get("half_gather"):
        why = "half_gather rounds weights that one device reads in float32, so no window is the same on one device"
        write = "leave it out, or plan without half_gather"
        raise InputError(f"--verify-every {options.verify_every} with half_gather in {plan}", why, write)
    nodes = _nodes(values, read.ranks, started=place is not None)
    if read.allocator == "expandable_segments":
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    folder, ranks = RunFolder(options.folder), read.ranks // nodes.count
    if place is None and ranks > 1:
        check_cards(f"plan for {ranks} devices", ranks, read.device)
        own = _peak(read) if read.device == "cpu" else read.state_on_host_bytes
        check_ranks(f"plan for {ranks} devices", ranks, RANK_BYTES + own)
    check_workers(options.workers, place.local_world if place is not None else ranks)
    if place is not None and place.rank > 0:
        become_rank(options)
    if nodes.count > 1:
        from memfit.train.launch.several_nodes import launch_node
    if nodes.rank > 0:
        launched = launch_node(read, options, nodes)
        end_with(launched.code)
        return launched.code
    folder.make(resume=options.resume)
    with alone_in(folder.path, inherited=place is not None):
        _prepare(folder, read, options)
        if place is not None:
            if not is_restart():
                clear_earlier(folder)
            become_rank(options)
        with attended(folder, read, keepers(folder, read, wandb)):
            launched = launch(read, options) if nodes.count == 1 else launch_node(read, options, nodes)
        if launched.code == Exit.DONE:
            line = printable(f"Done: a signal came before the summary. Written to {folder.path}")
            end_with(launched.code, "" if as_json else line)
        else:
            end_with(launched.code)
        if launched.line:
            say(launched.line)
        if launched.code == Exit.DONE:
            show_summary(folder, read, as_json=as_json)
            sys.stdout.flush()
            end_with(launched.code)
        if launched.code not in (Exit.BAD_INPUT, Exit.FAULT) and not launched.signalled and folder.plan.exists():
            if made_no_progress(folder):
                say(f"no report is written, since it runs the job's code too; memfit report {folder.path} writes it")
                return launched.code
            _report(folder, launched.code, as_json=as_json)
        return launched.code


def _report(folder: RunFolder, code: int, *, as_json: bool) -> None:
    """Writes the report of a run that has ended. A signal leaves it out, and changes no exit code."""
    from memfit.cli.progress import progress
    from memfit.cli.run_monitor import write_report
    from memfit.interruption import InterruptedVerb, interrupted_by
    from memfit.printable import printable
    from memfit.train.launch.outcome import say
    from memfit.train.launch.stop_signals import SIGNALS

    line = printable(f"no report is written, since a signal came; memfit report {folder.path} writes it")
    if code == Exit.DONE:
        line = f"the run is done; {line}"
    try:
        with interrupted_by(list(SIGNALS), code, line), progress("writing the report", quiet=as_json):
            write_report(folder)
    except InterruptedVerb:
        say(line)


def _peak(plan: Plan) -> int:
    """The predicted bytes of a rank's tensors in the largest phase; 0 if the plan does not have them."""
    return max((int(phase.get("allocated_bytes", 0)) for phase in plan.phases.values()), default=0)


def _options(values: dict[str, Any], *, restarted: bool) -> RunOptions:
    """Parses the options of the command line.

    Raises:
        InputError: a number is not a number, or out of its range.
    """
    from memfit.train.run_options import RunOptions

    return RunOptions(
        folder=values["out"],
        windows=whole_number("--windows", values["windows"]),
        resume=values["resume"] or restarted,
        keep=whole_number("--keep", values["keep"]),
        save_every=whole_number("--save-every", values["save_every"], least=0),
        skip_oversized=values["oversized"] == "skip",
        verify_every=whole_number("--verify-every", values["verify_every"], least=0),
        patience=_seconds("--patience", values["patience"]),
        workers=whole_number("--workers", values["workers"], least=0),
    )


def _nodes(values: dict[str, Any], devices: int, *, started: bool) -> Nodes:
    """The machines of the run.

    Args:
        started: whether torchrun has started this process, and knows them.

    Raises:
        InputError: a number is out of its range, or the endpoint is missing.
    """
    from memfit.engine.nodes import Nodes

    count = whole_number("--nnodes", values["nnodes"]) or 1
    rank = whole_number("--node-rank", values["node_rank"], least=0) or 0
    endpoint = values["rdzv_endpoint"]
    if count == 1:
        extra = f"--node-rank {rank}" if rank else f"--rdzv-endpoint {endpoint}" if endpoint else ""
        if extra:
            raise InputError(extra, "the run has one machine", "write --nnodes with the number of machines")
        return Nodes()
    if started:
        raise InputError(f"--nnodes {count}", "torchrun has started this process", "leave the machines to torchrun")
    if rank >= count:
        raise InputError(f"--node-rank {rank}", f"{count} machines are 0 to {count - 1}", f"write {count - 1} or less")
    if devices % count:
        why = f"the plan's {devices} devices are not a multiple of it"
        raise InputError(f"--nnodes {count}", why, "plan with as many --devices on each machine")
    host, _, port = (endpoint or "").rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 2**16:
        seen = f"--rdzv-endpoint {endpoint}" if endpoint else f"--nnodes {count}"
        why = "not an address and a port" if endpoint else "the machines have no place to meet"
        raise InputError(seen, why, "write --rdzv-endpoint HOST:29400 with the address of machine 0")
    return Nodes(count=count, rank=rank, host=host.strip("[]"), port=int(port))


def _seconds(option: str, text: str | None) -> float | None:
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 1 <= value <= MOST:
        raise InputError(f"{option} {text!r}", f"not a number of seconds from 1 to {MOST}", f"write {option} 300, say")
    return value


def _prepare(folder: RunFolder, plan: Plan, options: RunOptions) -> None:
    """Makes the run's folder and writes the plan into it.

    Raises:
        InputError: the folder holds another run, or cannot be written.
    """
    from memfit.plan import read_plan, write_plan
    from memfit.train.run_folder import check_same_samples

    folder.open(resume=options.resume)
    if options.resume and folder.plan.exists():
        check_same_samples(read_plan(folder.plan), plan, folder.plan)
    try:
        write_plan(plan, folder.plan)
    except InputError:
        if not options.resume:
            folder.take_back()
        raise


def show_summary(folder: RunFolder, plan: Plan, *, as_json: bool) -> None:
    """Shows a summary of a finished run from its lines: losses, memory and time."""
    from memfit.show.console import make_console
    from memfit.show.run_log import noise_words
    from memfit.train.metrics_file import read_lines
    from memfit.wording import counted

    lines = read_lines(folder.lines("metrics")).lines
    summary = summary_of(lines, windows_of(folder, lines), plan)
    if as_json:
        print_json(summary)
        return
    console = make_console(soft_wrap=True)
    losses = [
        f"{value:.4f}" if value is not None else "unknown" for value in (summary["loss_first"], summary["loss_last"])
    ]
    console.print(
        f"[bold green]Done[/]: {counted(summary['windows'], 'window')} in {summary['seconds']:.1f} s, "
        f"loss {losses[0]} to {losses[1]}."
    )
    if missing := summary["windows"] - len(lines):
        console.print(f"[yellow]metrics.jsonl has lost the lines of {counted(missing, 'window')}.[/]")
    console.print(memory_words(summary))
    asked, done = summary["global_batch_asked"], summary["global_batch_done"]
    console.print(
        f"Global batch {asked} asked, at most {done} done in a window. Written to {folder.path}", markup=False
    )
    if words := noise_words(lines, plan.unit):
        console.print(words)


def windows_of(folder: RunFolder, lines: list[dict[str, Any]]) -> int:
    """The number of windows that a run has trained: from its newest checkpoint, or without one from its last line."""
    names = [entry.name for entry in folder.checkpoints.glob("[0-9]*")] if folder.checkpoints.is_dir() else []
    numbers = [int(name) for name in names if name.isdecimal()]
    return max(numbers, default=lines[-1]["window"] + 1 if lines else 0)


def summary_of(lines: list[dict[str, Any]], windows: int, plan: Plan) -> dict[str, Any]:
    """Returns the numbers of a run from the lines of its windows; None for a number that no line has, or that is none.

    Args:
        windows: the number of windows that the run has trained, including windows without a line.
    """
    from memfit.planner.cpu_margin import planned_process_bytes
    from memfit.show.run_log import number

    def numbers(name: str) -> list[Any]:
        return [number(line.get(name)) or 0 for line in lines]

    first, last = (lines[0], lines[-1]) if lines else ({}, {})
    return {
        "windows": windows,
        "loss_first": number(first.get("loss")),
        "loss_last": number(last.get("loss")),
        "global_batch_asked": number(last.get("global_batch_asked")),
        "global_batch_done": max(numbers("global_batch_done"), default=0),
        "noise_scale": next(filter(None, reversed(numbers("noise_scale"))), None),
        "predicted_process_bytes": max((int(p.get("process_bytes", 0)) for p in plan.phases.values()), default=None),
        "planned_process_bytes": planned_process_bytes(plan),
        "measured_process_bytes": max(numbers("measured_process_bytes"), default=None),
        "budget_bytes": plan.budget_bytes,
        "seconds": float(sum(numbers("seconds"))),
    }


def memory_words(summary: dict[str, Any]) -> str:
    """Describes the measured peak beside the planned bytes of the whole process and its budget."""
    from memfit.sizes import format_size

    def size(nbytes: int | None) -> str:
        return "unknown" if nbytes is None else format_size(nbytes)

    measured, budget = summary["measured_process_bytes"], summary["budget_bytes"]
    tensors, planned = summary["predicted_process_bytes"], summary["planned_process_bytes"]
    expected = f"{size(planned)} predicted"
    if planned is not None and planned > tensors:
        others = f"{size(planned - tensors)} reserved for libraries, Python and data"
        expected = f"{size(planned)} planned ({size(tensors)} of tensors predicted, {others})"
    over = f" The run took {size(measured - budget)} more than its budget." if (measured or 0) > budget else ""
    return f"Peak {size(measured)} measured, {expected}, {size(budget)} allowed.{over}"
