"""memfit report: writes a run, a plan or a trace as one HTML file that needs no network."""

from __future__ import annotations

from pathlib import Path

import click

from memfit.cli.options import json_option, print_json
from memfit.errors import InputError
from memfit.printable import printable


@click.command("report")
@click.argument("what", metavar="RUN|PLAN|TRACE", nargs=-1, required=True)
@click.option("--compare", is_flag=True, help="Show two plans or two runs side by side: memfit report --compare A B.")
@click.option(
    "--out",
    metavar="F.html",
    type=click.Path(dir_okay=False),
    help="Default: RUN/report.html, or the plan's or trace's name with .html; with --compare, compare.html.",
)
@click.option(
    "--no-trace",
    is_flag=True,
    help="Do not load the job: the report then shows only what the file holds, without memory over the step.",
)
@json_option
def command(what: tuple[str, ...], compare: bool, out: str | None, no_trace: bool, as_json: bool) -> None:
    """Write the report of a run's folder, of a plan.toml or of a trace (memfit predict --trace F.npz).

    The job that it names is loaded and traced again, which runs the job's code. For files of an author whose code you
    do not want to run, write --no-trace.
    """
    from memfit.cli.progress import progress

    sources = [Path(name) for name in what]
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

            page, target = report(sources[0], trace=not no_trace), _default_target(sources[0])
        target = Path(out) if out else target
        write_page(page, target)
    if as_json:
        print_json({"report": str(target), "verdict": page.verdict, "bytes": target.stat().st_size})
    else:
        click.echo(printable(f"{page.verdict}\nWritten to {target}"))


def _default_target(source: Path) -> Path:
    return source / "report.html" if source.is_dir() else source.with_suffix(".html")
