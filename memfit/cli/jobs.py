"""memfit jobs: the built-in jobs, and their parameter counts net by net."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from memfit.cli.options import json_option, print_json, set_option


@click.command("jobs")
@click.argument("names", nargs=-1)
@set_option
@json_option
def command(names: tuple[str, ...], pairs: tuple[str, ...], as_json: bool) -> None:
    """Built-in jobs, or those of NAMES (any JOB), with the parameters of their nets."""
    from memfit.cli.progress import progress
    from memfit.loading import built_in_jobs, load_job, read_settings

    settings = read_settings(pairs)
    found: list[dict[str, Any]] = []
    with progress("counting", quiet=as_json):
        from memfit.planner.predict import net_sizes, plain_nets

        for name in names or sorted(built_in_jobs()):
            job = load_job(name, settings)
            found.append(
                {"name": name, "unit": job.unit, "nets": [asdict(size) for size in net_sizes(plain_nets(job))]}
            )
    if as_json:
        print_json({"jobs": found})
        return
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
    for entry in found:
        for index, net in enumerate(entry["nets"]):
            head = (entry["name"], entry["unit"]) if index == 0 else ("", "")
            millions = [f"{net[key] / 1e6:.3f} M" if net[key] else "-" for key in ("parameters", "trainable")]
            table.add_row(*head, net["name"], *millions, str(net["tensors"]))
    make_console().print(table)
