"""memfit report: a run, a plan or a trace as one HTML file that needs no network."""

from __future__ import annotations

from pathlib import Path

import click

from memfit.cli.options import json_option, print_json
from memfit.errors import InputError


@click.command("report")
@click.argument("what", metavar="RUN|PLAN|TRACE", nargs=-1, required=True)
@click.option("--compare", is_flag=True, help="Two plans or two runs side by side: memfit report --compare A B.")
@click.option(
    "--out",
    metavar="F.html",
    type=click.Path(dir_okay=False),
    help="Default: RUN/report.html, or the plan's or trace's name with .html; with --compare, compare.html.",
)
@json_option
def command(what: tuple[str, ...], compare: bool, out: str | None, as_json: bool) -> None:
    """Writes the report of a run's folder, of a plan.toml or of a trace (memfit predict --trace F.npz)."""
    from memfit.cli.progress import progress

    sources = [Path(one) for one in what]
    if len(sources) != (2 if compare else 1):
        wanted = "--compare takes two" if compare else "a report is of one"
        raise InputError(
            f"memfit report {' '.join(what)}", wanted, "write memfit report RUN, or memfit report --compare A B"
        )
    with progress(f"reporting {' and '.join(what)}", quiet=as_json):
        from memfit.show.page import write_page

        if compare:
            from memfit.show.report_compare import compare_report

            page, target = compare_report(*sources), Path("compare.html")
        else:
            from memfit.show.report import report

            page, target = report(sources[0]), _beside(sources[0])
        target = Path(out) if out else target
        write_page(page, target)
    if as_json:
        print_json({"report": str(target), "verdict": page.verdict, "bytes": target.stat().st_size})
    else:
        click.echo(f"{page.verdict}\nWritten to {target}")


def _beside(source: Path) -> Path:
    return source / "report.html" if source.is_dir() else source.with_suffix(".html")
