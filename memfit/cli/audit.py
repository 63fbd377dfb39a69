"""``memfit audit``: counts what a sampler, loader or loop really gives to each rank."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from memfit.errors import Exit, InputError

if TYPE_CHECKING:
    from rich.console import Console

    from memfit.batch.audit import Audit


@click.command()
@click.argument("target")
@click.option("--world-sizes", default="1,2,3,8", show_default=True, help="Numbers of ranks to count, with commas.")
@click.option("--global-batch", type=int, help="What one optimizer step is meant to take, over all ranks, in --unit.")
@click.option("--unit", default="samples", show_default=True, help="What --global-batch counts: samples, frames, tokens …")
@click.option("--real", is_flag=True, help="Run every world in processes of a gloo group, and count those.")
@click.option("--json", "as_json", is_flag=True, help="Write one JSON object to standard output.")
def command(
    target: str, world_sizes: str, global_batch: int | None, unit: str, real: bool, as_json: bool
) -> int:
    """Counts what TARGET gives to each rank in two epochs, and names the faults.

    TARGET is path/file.py:function, called as function(rank, world), which returns a loader, sampler or batch sampler;
    or a function loop(rank, world, observe), which calls observe.batch(ids) and observe.step(). Exit code 4: a fault.
    """
    from memfit.batch.audit import Meant, audit

    meant = Meant(global_batch=global_batch, unit=unit) if global_batch is not None else None
    found = audit(target, _world_sizes(world_sizes), meant=meant, real=real)
    if as_json:
        click.echo(json.dumps(found.to_json()))
    else:
        from rich.console import Console

        _show(found, Console(width=min(80, Console().width), highlight=False))
    return Exit.DONE if found.ok else Exit.CHECK_FAILED


def _world_sizes(text: str) -> list[int]:
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        sizes = [0]
    if min(sizes) < 1:
        raise InputError(f"--world-sizes {text}", "not numbers of ranks", "write 1,2,3,8, say")
    return sizes


def _show(found: Audit, console: Console) -> None:
    from rich.table import Table
    from rich.text import Text

    from memfit.show.strips import COLUMNS, strips

    faults = sorted({finding.code for finding in found.findings})
    if faults:
        console.print(Text(f"Faults: {', '.join(faults)}", style="bold red"))
    else:
        console.print(Text("No fault: every sample is given once, every rank gets its share.", style="bold green"))
    for finding in found.findings:
        console.print(Text(f"\n{finding.code}, {finding.world} rank{'s' if finding.world > 1 else ''}", style="bold"))
        console.print(finding.text, markup=False)
    table = Table(title=f"\n{found.dataset_size:,} samples; one epoch", title_justify="left", box=None, pad_edge=False)
    for name in ("ranks", "batches", "distinct", "repeats", "missing", "steps", "padding", "imbalance", "new order"):
        table.add_column(name, justify="right")
    for row in found.to_json()["worlds"]:
        batches = sorted(set(row["batches_per_rank"]))
        table.add_row(
            str(row["world"]),
            "–".join(f"{number}" for number in dict.fromkeys((batches[0], batches[-1]))),
            f"{row['distinct']:,}",
            f"{row['duplicates']:,}",
            f"{row['missing']:,}",
            _known(row["optimizer_steps"], "{}"),
            _known(row["padding_fraction"], "{:.1%}"),
            _known(row["imbalance"], "{:.1%}"),
            {True: "yes", False: "no", None: "unknown"}[row["order_changes_each_epoch"]],
        )
    console.print(table)
    for world in found.counts:
        console.print()
        for line in strips(found.picture(world, COLUMNS)):
            console.print(line, no_wrap=True, overflow="crop")


def _known(value: float | None, form: str) -> str:
    return "unknown" if value is None else form.format(value)
