"""memfit export: writes a plan in the form that other tools read."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from memfit.cli.options import json_option, print_json
from memfit.errors import Exit, InputError


@click.command("export")
@click.argument("plan", metavar="PLAN")
@click.option("--to", required=True, type=click.Choice(["deepspeed", "accelerate", "torchrun"]), help="The tool.")
@click.option(
    "--out",
    metavar="F",
    type=click.Path(dir_okay=False),
    help="The file. Default: deepspeed.json, accelerate.yaml or torchrun.sh, here.",
)
@json_option
def command(plan: str, to: str, out: str | None, as_json: bool) -> int:
    """Write PLAN as a configuration of DeepSpeed or Accelerate, or as a script that starts torchrun.

    Choices that the tool's form cannot express are listed, with what to write in your own loop.
    """
    from memfit.cli.progress import progress
    from memfit.plan import read_plan

    read = read_plan(plan)
    with progress(f"exporting {plan}", quiet=as_json):
        from memfit.atomic_file import write_atomic
        from memfit.loading import load_job
        from memfit.planner.predict import plain_nets
        from memfit.show.export import FILES, export

        job = load_job(read.job, dict(read.settings))
        file = Path(out or FILES[to])
        exported = export(read, job, plain_nets(job), to, str(file), str(Path(plan).absolute()))
    try:
        write_atomic(file, exported.text)
    except OSError as error:
        write = "write --out as a file in a folder that can be written"
        raise InputError(f"--out {file}", f"cannot be written: {error.strerror}", write) from error
    if as_json:
        geometry = {**asdict(exported.geometry), "global_batch": exported.geometry.global_batch}
        left_out = [{"name": name, "text": text} for name, text in exported.left_out.items()]
        print_json(
            {
                "to": to,
                "file": str(file),
                "command": exported.command,
                "engine": read.engine,
                "planned_global_batch": read.global_batch,
                **geometry,
                "left_out": left_out,
            }
        )
        return Exit.DONE
    from rich.markup import escape

    from memfit.show.console import make_console

    console = make_console(emoji=False)
    console.print(f"Written to {file}. Start it with\n\n  {escape(exported.command)}\n", soft_wrap=True)
    console.print("Your own loop must do what this file cannot express:")
    for name, text in exported.left_out.items():
        console.print(f"  [bold]{name}[/]: {escape(text)}", soft_wrap=True)
    return Exit.DONE
