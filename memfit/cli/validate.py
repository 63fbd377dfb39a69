"""memfit validate: validates a checkpoint of a run."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import click

from memfit.cli.options import json_option, print_json
from memfit.errors import Exit

CRASHES = (-signal.SIGSEGV, -signal.SIGABRT)


@click.command("validate")
@click.argument("target", metavar="RUN|CHECKPOINT")
@click.option("--memory", metavar="SIZE", help="The budget, as 24GiB, 24GB or 512MiB. Default: the plan's.")
@json_option
def command(target: str, memory: str | None, as_json: bool) -> int:
    """Validate the newest complete checkpoint of RUN, or the folder RUN/checkpoints/NUMBER.

    It uses the samples of the job's validation_dataset(), in batches as large as training's micro-batches, or smaller
    if that does not fit, in a process that cannot take more than the budget. The same checkpoint always gives the same
    values.
    """
    from memfit.child_process import for_child
    from memfit.sizes import format_size, parse_size
    from memfit.train.launch.memory_limit import ENVIRONMENT
    from memfit.train.launch.outcome import say
    from memfit.train.launch.stop_signals import ended_by_signals
    from memfit.train.launch.supervisor import Supervisor, run_child

    budget = 0 if memory is None else parse_size(memory, "--memory")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "values.json"
        arguments = [sys.executable, "-m", "memfit.train.launch.validation_entry", target, str(file), str(budget)]
        supervisor = Supervisor()
        with ended_by_signals(lambda: click.echo("memfit: stopped", err=True)), supervisor.guarding():
            code = run_child(arguments, {**os.environ, **ENVIRONMENT, **for_child()})
        if supervisor.signalled is not None:
            click.echo("memfit: stopped", err=True)
            return Exit.STOPPED
        if code in CRASHES and budget:
            why = f"a library ended the process (signal {-code}) where it got no memory"
            say(f"{target}: out of memory: {why}; the budget is {format_size(budget)}")
            return Exit.NOTHING_FITS
        if code < 0:
            click.echo(f"memfit: the validating process was killed by signal {-code}", err=True)
            return Exit.STOPPED
        if code == Exit.DONE and not file.exists():
            click.echo(
                "memfit: the validation ended by itself, without a result: code of the job ends the process", err=True
            )
            return Exit.STOPPED
        if code == Exit.DONE:
            values = json.loads(file.read_text())
            print_json(values) if as_json else _show(values)
    return code


def _show(result: dict[str, Any]) -> None:
    from memfit.show.console import make_console
    from memfit.sizes import format_size
    from memfit.wording import counted

    console = make_console()
    after, items = counted(result["window"], "window"), counted(result["items"], "item")
    console.print(f"{result['checkpoint']}, after {after}, on {items}:")
    for name, value in result["values"].items():
        shown = "not a finite number" if value is None else f"{value:.6g}" if isinstance(value, int | float) else value
        console.print(f"  {name}: {shown}")
    measured, budget = format_size(result["measured_process_bytes"]), format_size(result["budget_bytes"])
    console.print(f"{result['seconds']:.1f} s; peak {measured} of {budget}.")
