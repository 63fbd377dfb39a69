"""memfit lint: finds mistakes of memory and batches without running a script."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from memfit.cli.options import json_option, print_json
from memfit.errors import Exit


@click.command("lint")
@click.argument("scripts", metavar="SCRIPT...", nargs=-1, required=True)
@json_option
def command(scripts: tuple[str, ...], as_json: bool) -> int:
    """Find mistakes of memory and batches in a training script, without running it.

    SCRIPT is a Python file or a folder of them. Each finding has its line, the reason and what to write. A line that
    ends in "# memfit: ignore" is skipped. Exit code 4: a mistake was found.
    """
    from memfit.lint.lint import lint, python_files
    from memfit.printable import printable

    findings = [finding for script in scripts for finding in lint(Path(script))]
    files = sum(1 for script in scripts for _ in python_files(Path(script)))
    if as_json:
        print_json({"files": files, "findings": [asdict(finding) for finding in findings], "ok": not findings})
    else:
        count = f"{len(findings)} mistake{'' if len(findings) == 1 else 's'}"
        click.echo(f"{count if findings else 'No mistake'} found in {files} file{'' if files == 1 else 's'}.")
        for finding in findings:
            click.echo()
            click.echo(printable(f"{finding.file}:{finding.line}: {finding.what} [{finding.code}]"))
            click.echo(printable(f"  why: {finding.why}"))
            click.echo(printable(f"  write: {finding.cure}"))
    return Exit.CHECK_FAILED if findings else Exit.DONE
