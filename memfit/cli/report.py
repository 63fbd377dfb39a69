"""memfit report: a run, a plan or a trace as one HTML file that needs no network."""

from __future__ import annotations

from pathlib import Path

import click

from memfit.cli.options import json_option, print_json


@click.command("report")
@click.argument("what", metavar="RUN|PLAN|TRACE")
@click.option(
    "--out",
    metavar="F.html",
    type=click.Path(dir_okay=False),
    help="Default: RUN/report.html, or the plan's or trace's name with .html.",
)
@json_option
def command(what: str, out: str | None, as_json: bool) -> None:
    """Writes the report of a run's folder, of a plan.toml or of a trace (memfit predict --trace F.npz)."""
    from memfit.cli.quiet import progress

    source = Path(what)
    target = Path(out) if out else source / "report.html" if source.is_dir() else source.with_suffix(".html")
    with progress(f"reporting {what}", quiet=as_json):
        from memfit.show.page import write_page
        from memfit.show.report import report

        page = report(source)
        write_page(page, target)
    if as_json:
        print_json({"report": str(target), "verdict": page.verdict, "bytes": target.stat().st_size})
    else:
        click.echo(f"{page.verdict}\nWritten to {target}")
