"""memfit verify: compares one device with many, step by step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from memfit.cli.mesh_option import asked_choices, engine_choice_option, mesh_option
from memfit.cli.options import json_option, print_json, set_option, whole_number
from memfit.errors import Exit, InputError
from memfit.mesh import parse_mesh

if TYPE_CHECKING:
    from memfit.mesh import MeshShape
    from memfit.plan import Plan


@click.command("verify")
@click.argument("target", metavar="JOB|PLAN")
@set_option
@click.option("--world-sizes", metavar="N,N", help="Ranks, each a real process. Default: 1,2, or 1 and the mesh's.")
@click.option("--engine", metavar="E", help="The engine of several ranks. Default: the mesh's, the plan's, or ddp.")
@mesh_option
@engine_choice_option
@click.option("--windows", metavar="N", default="2", show_default=True, help="Optimizer steps that are compared.")
@click.option("--global-batch", metavar="N", help="Units of a window. Default: the plan's, or 2 micro-batches a rank.")
@click.option("--micro-batch", metavar="N", help="Units of a micro-batch. Default: the plan's, or three samples.")
@json_option
def command(
    target: str, pairs: tuple[str, ...], world_sizes: str | None, engine: str | None, mesh: str | None,
    choices: tuple[str, ...], windows: str, global_batch: str | None, micro_batch: str | None, as_json: bool,
) -> int:  # fmt: skip
    """Run the same windows of a job on one rank and on many, and compare losses, gradients and weights after each
    step.

    Every window begins from the same weights, in fp32 whatever the job's precision. Differences that cannot be avoided
    are named. Of a plan, its engine and its mesh are verified, unless others are asked for.
    """
    from dataclasses import replace

    from memfit.cli.progress import progress
    from memfit.device.hardware.process_limits import check_ranks
    from memfit.engine.capabilities import CAPABILITIES, engine_of
    from memfit.loading import load_job, read_settings
    from memfit.plan import ENGINES, read_plan

    planned = read_plan(target) if target.endswith(".toml") else None
    shape = parse_mesh(mesh) if mesh is not None else None
    where = f"--mesh {shape}"
    if planned is not None and (mesh, world_sizes, engine) == (None, None, None):
        shape, where = planned.mesh_shape, f"plan file {target}: mesh {planned.mesh_shape}"
    if shape is not None and world_sizes is not None:
        raise InputError(f"{where} --world-sizes {world_sizes}", "both say the ranks", "leave one of them out")
    worlds = _worlds(world_sizes or "1,2") if shape is None else [1, shape.world]
    shares = worlds if shape is None else [shape.data_ranks]
    engine = engine or _engine_of(planned, shape)
    steps = whole_number("--windows", windows)
    asked, micro = whole_number("--global-batch", global_batch), whole_number("--micro-batch", micro_batch)
    if engine not in ENGINES or (max(worlds) > 1 and not CAPABILITIES[engine].several_ranks):
        several = ", ".join(engine_name for engine_name in ENGINES if CAPABILITIES[engine_name].several_ranks)
        raise InputError(f"--engine {engine}", "no engine of several ranks", f"write one of {several}")
    if shape is not None:
        engine_of(shape, engine)
    engine_choices = asked_choices(choices, engine)
    check_ranks(f"--world-sizes {max(worlds)}" if shape is None else where, max(worlds))
    with progress(f"verifying {target}", quiet=as_json):
        from memfit.verify.verify import as_json as to_json
        from memfit.verify.verify import verify
        from memfit.verify.verify_plan import plan_for

        if planned is not None:
            plan = replace(
                planned, global_batch=asked or planned.global_batch, micro_batch=micro or planned.micro_batch
            )
        else:
            plan = plan_for(load_job(target, read_settings(pairs)), target, shares, asked, micro)
        verified = verify(plan, worlds, engine, steps, mesh=shape, choices=engine_choices)
    if as_json:
        print_json(to_json(verified))
    else:
        from memfit.show.verify_table import show_verified

        show_verified(to_json(verified), plan)
    return Exit.DONE if verified.ok else Exit.CHECK_FAILED


def _engine_of(plan: Plan | None, shape: MeshShape | None) -> str:
    """The mesh's engine; without a mesh the plan's, where it is one of several ranks, or ddp."""
    from memfit.engine.capabilities import CAPABILITIES, engine_of

    if shape is not None:
        return engine_of(shape)
    if plan is not None and not plan.mesh and CAPABILITIES[plan.engine].several_ranks:
        return plan.engine
    return "ddp"


def _worlds(text: str) -> list[int]:
    try:
        worlds = [int(part) for part in text.split(",")]
    except ValueError:
        worlds = []
    if not worlds or min(worlds) < 1:
        raise InputError(f"--world-sizes {text}", "not numbers of ranks", "write --world-sizes 1,2,3")
    return worlds
