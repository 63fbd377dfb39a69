"""memfit export: writes a plan in the form that other tools read."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from memfit.cli.options import TOOLS, json_option, print_json, whole_number
from memfit.errors import Exit, InputError, unwritable

if TYPE_CHECKING:
    from memfit.plan import Plan
    from memfit.show.export import Exported


STARTS_MEMFIT = ("slurm", "skypilot")
"""Tools whose files start ``memfit run``, which carries every mesh."""


@click.command("export")
@click.argument("plan", metavar="PLAN")
@click.option("--to", required=True, type=click.Choice(TOOLS), help="The tool.")
@click.option(
    "--nnodes",
    metavar="N",
    default="1",
    show_default=True,
    help="Machines that share the plan's devices (slurm, skypilot).",
)
@click.option(
    "--out",
    metavar="F",
    type=click.Path(dir_okay=False),
    help="The file. Default: the tool's name, here: deepspeed.json, accelerate.yaml, torchrun.sh, ...",
)
@json_option
def command(plan: str, to: str, nnodes: str, out: str | None, as_json: bool) -> int:
    """Write PLAN as a configuration or the arguments of another tool.

    Choices that the tool's form cannot express are listed, with what to write in your own loop.
    """
    from memfit.cli.progress import progress
    from memfit.plan import read_plan

    read, nodes = read_plan(plan), whole_number("--nnodes", nnodes) or 1
    if to not in STARTS_MEMFIT and nodes > 1:
        write = "take it out, or write --to slurm or --to skypilot"
        raise InputError(f"--nnodes {nodes}", f"a file for {to} says nothing of machines", write)
    with progress(f"exporting {plan}", quiet=as_json):
        from memfit.atomic_file import write_atomic
        from memfit.loading import load_job
        from memfit.planner.predict import plain_nets
        from memfit.show.export import FILES, export

        job = load_job(read.job, dict(read.settings))
        file = Path(out or FILES[to])
        if to not in STARTS_MEMFIT:
            _check_mesh(read, plan, to)
        exported = export(read, job, plain_nets(job), to, str(file), str(Path(plan).absolute()), nodes)
    try:
        write_atomic(file, exported.text)
    except OSError as error:
        raise unwritable(f"--out {file}", error) from error
    if as_json:
        print_json({"file": str(file), **exported_json(exported, read, to)})
        return Exit.DONE
    from memfit.show.console import make_console

    make_console(emoji=False).print(f"Written to {file}.", soft_wrap=True, highlight=False)
    show_exported(exported)
    return Exit.DONE


def _check_mesh(plan: Plan, file: str, to: str) -> None:
    """Raises InputError where another tool's file cannot express the plan's mesh."""
    why, write = "", "run it with memfit run, or write --to torchtitan"
    if to != "torchtitan" and plan.ranks > len(plan.micro_batches):
        why = "ranks that hold parts of a layer, or stages, share their samples, which these files cannot express"
    elif to != "torchtitan" and plan.mesh.get("dp_shard_in_ep", 1) > 1:
        why = "ranks that send each other the tokens of experts cannot be expressed in these files"
    elif plan.mesh.get("ep", 1) > 1:
        why, write = (
            "ranks that divide experts share their samples, which those of torchtitan do not",
            "run it with memfit run",
        )
    elif plan.mesh.get("dp_shard_in_ep", 1) > 1 and plan.mesh.get("tp", 1) > 1:
        why, write = (
            "ranks of tp hold parts of each expert, and those of torchtitan whole ones",
            "run it with memfit run",
        )
    if why:
        raise InputError(f"plan file {file}: mesh", why, write)


def exported_json(exported: Exported, plan: Plan, to: str) -> dict[str, Any]:
    """What an export says beside its file."""
    return {
        "to": to,
        "command": exported.command,
        "engine": plan.engine,
        "planned_global_batch": plan.global_batch,
        "predicted_bytes": exported.predicted_bytes,
        **asdict(exported.geometry),
        "global_batch": exported.geometry.global_batch,
        "left_out": [{"name": name, "text": text} for name, text in exported.left_out.items()],
    }


def show_exported(exported: Exported) -> None:
    """How to start the tool, and what its form cannot express."""
    from rich.markup import escape

    from memfit.show.console import make_console
    from memfit.sizes import format_size

    console = make_console(emoji=False)
    console.print(f"Start it with\n\n  {escape(exported.command)}\n", soft_wrap=True)
    if exported.predicted_bytes is not None:
        console.print(
            f"Predicted for its training: {format_size(exported.predicted_bytes)} of tensors on each device.\n"
        )
    if exported.left_out:
        console.print("Your own script must do what this cannot express:")
    for name, text in exported.left_out.items():
        console.print(f"  [bold]{name}[/]: {escape(text)}", soft_wrap=True)
