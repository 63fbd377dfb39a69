"""``memfit audit``: counts what a sampler, loader or loop really gives to each rank."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from memfit.errors import Exit, InputError

if TYPE_CHECKING:
    from rich.console import Console

    from memfit.audit import Audit


@click.command()
@click.argument("target")
@click.option(
    "--world-sizes", default="1,2,3,8", show_default=True, help="Numbers of ranks to count, separated by commas."
)
@click.option("--global-batch", type=int, help="The intended size of one optimizer step over all ranks, in --unit.")
@click.option("--unit", default="samples", show_default=True, help="The unit of --global-batch: samples, frames …")
@click.option("--real", is_flag=True, help="Run every world in real processes of a gloo group.")
@click.option("--report", metavar="F.html", type=click.Path(dir_okay=False), help="Also write one HTML file.")
@click.option("--json", "as_json", is_flag=True, help="Write one JSON object to standard output.")
def command(
    target: str, world_sizes: str, global_batch: int | None, unit: str, real: bool, report: str | None, as_json: bool
) -> int:
    """Count the samples that TARGET gives to each rank in two epochs, and name the faults.

    TARGET is path/file.py:function. It is called as function(rank, world) and returns a loader, sampler or batch
    sampler; or it is a loop(rank, world, observe) that calls observe.batch(ids) and observe.step(). Exit code 4: a
    fault was found.
    """
    from memfit.audit import Meant, audit

    meant = Meant(global_batch=global_batch, unit=unit) if global_batch is not None else None
    audited = audit(target, _world_sizes(world_sizes), meant=meant, real=real)
    if report is not None:
        from memfit.show.page import write_page
        from memfit.show.report_audit import audit_report

        write_page(audit_report(audited, target), report)
    if as_json:
        click.echo(json.dumps(audited.to_json()))
    else:
        from memfit.show.console import make_console

        console = make_console()
        _show(audited, make_console(width=min(80, console.width)) if console.is_terminal else console)
    return Exit.DONE if audited.ok else Exit.CHECK_FAILED


def _world_sizes(text: str) -> list[int]:
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        sizes = [0]
    if min(sizes) < 1:
        raise InputError(f"--world-sizes {text}", "not numbers of ranks", "write 1,2,3,8, say")
    return sizes


def _show(audited: Audit, console: Console) -> None:
    from rich.table import Table
    from rich.text import Text

    from memfit.show.sample_strips import COLUMNS, strips

    faults = sorted({finding.code for finding in audited.findings})
    if faults:
        console.print(Text(f"Faults: {', '.join(faults)}", style="bold red"))
    else:
        console.print(Text("No fault found. What is repeated or missing is counted below.", style="bold green"))
    for finding in audited.findings:
        console.print(Text(f"\n{finding.code}, {finding.world} rank{'s' if finding.world > 1 else ''}", style="bold"))
        console.print(finding.text, markup=False)
    rows = audited.to_json()["worlds"]
    columns = [*_COLUMNS, *(name for name in _KNOWN if rows[0][_KNOWN[name]] is not None)]
    table = Table(
        title=f"\n{audited.dataset_size:,} samples; one epoch", title_justify="left", box=None, pad_edge=False
    )
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*(_cell(name, row) for name in columns))
    console.print(table)
    unknown = [name for name in _KNOWN if name not in columns]
    if unknown:
        console.print(Text(f"unknown: {', '.join(unknown)}", style="dim"))
    for world in audited.counts:
        console.print()
        for line in strips(audited.picture(world, COLUMNS)):
            console.print(line, no_wrap=True, overflow="crop")


_COLUMNS = ("ranks", "batches", "distinct", "repeats", "missing", "new order")
_KNOWN = {"steps": "optimizer_steps", "padding": "padding_fraction", "imbalance": "imbalance"}


def _cell(name: str, row: dict[str, Any]) -> str:
    batches = sorted(set(row["batches_per_rank"]))
    changes = {True: "yes", False: "no", None: "unknown"}[row["order_changes_each_epoch"]]
    plain = {
        "ranks": row["world"], "batches": "–".join(map(str, dict.fromkeys((batches[0], batches[-1])))),
        "distinct": f"{row['distinct']:,}", "repeats": f"{row['duplicates']:,}", "missing": f"{row['missing']:,}",
        "new order": changes,
    }  # fmt: skip
    if name in plain:
        return str(plain[name])
    value = row[_KNOWN[name]]
    return "unknown" if value is None else str(value) if name == "steps" else f"{value:.1%}"
