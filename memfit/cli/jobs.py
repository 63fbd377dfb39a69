"""memfit jobs: lists the built-in jobs and the parameter counts of their nets."""

from __future__ import annotations

import json
from dataclasses import asdict
from importlib.resources import files
from typing import Any

import click

from memfit.cli.options import json_option, print_json, set_option
from memfit.errors import InputError, missing_extra
from memfit.printable import printable

COUNTS = "counts.json"
"""The counts of the built-in jobs, kept in a file so that listing them builds nothing. Written by
scripts/count_jobs.py; tests/cli/test_jobs.py counts them again.
"""


@click.command("jobs")
@click.argument("names", nargs=-1)
@set_option
@json_option
def command(names: tuple[str, ...], pairs: tuple[str, ...], as_json: bool) -> None:
    """List the built-in jobs, or NAMES (any JOB), with the parameters of their nets."""
    from memfit.cli.progress import progress
    from memfit.loading import built_in_jobs, load_job, read_settings

    settings = read_settings(pairs)
    listed: list[dict[str, Any]] = []
    not_listed: list[dict[str, str]] = []
    counts = {} if settings else json.loads(files("memfit.jobs").joinpath(COUNTS).read_text())
    with progress("counting", quiet=as_json):
        for name in names or sorted(built_in_jobs()):
            if name in counts:
                listed.append({"name": name, **counts[name]})
                continue
            try:
                from memfit.planner.predict import net_sizes, plain_nets

                job = load_job(name, settings)
                sizes = net_sizes(plain_nets(job))
            except Exception as error:
                missing = error if isinstance(error, InputError) else missing_extra(error, f"job {name}")
                if missing is None or names or "not installed" not in missing.why:
                    raise
                not_listed.append({"name": name, "why": missing.why, "write": missing.write})
                continue
            listed.append({"name": name, "unit": job.unit, "nets": [asdict(size) for size in sizes]})
    if as_json:
        print_json({"jobs": listed, "not_listed": not_listed})
        return
    if listed:
        _show(listed)
    reasons = {(entry["why"], entry["write"]): None for entry in not_listed}
    for why, write in reasons:
        same = [entry["name"] for entry in not_listed if (entry["why"], entry["write"]) == (why, write)]
        click.echo(printable(f"Not listed: {', '.join(same)}: {why}; {write}"))


def _show(listed: list[dict[str, Any]]) -> None:
    from rich.measure import Measurement
    from rich.table import Table

    from memfit.show.console import make_console

    table = Table(box=None, pad_edge=False)
    for name, side in (
        ("job", "left"),
        ("unit", "left"),
        ("net", "left"),
        ("parameters", "right"),
        ("trained", "right"),
        ("tensors", "right"),
    ):
        table.add_column(name, justify=side)  # type: ignore[arg-type]
    for entry in listed:
        for index, net in enumerate(entry["nets"]):
            head = (entry["name"], entry["unit"]) if index == 0 else ("", "")
            millions = [f"{net[key] / 1e6:.3f} M" if net[key] else "-" for key in ("parameters", "trainable")]
            table.add_row(*head, net["name"], *millions, str(net["tensors"]))
    console = make_console()
    needed = Measurement.get(console, console.options.update(max_width=500), table).maximum
    console.width = max(console.width, needed)
    console.print(table)
