"""memfit plan: finds the best way to fit a global batch into the device, and says why."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from memfit.cli.export import exported_json, show_exported
from memfit.cli.mesh_option import asked_choices, engine_choice_option, mesh_option
from memfit.cli.options import (
    TOOLS,
    choose_devices,
    device_names_option,
    headroom_option,
    json_option,
    memory_option,
    print_json,
    set_option,
    whole_number,
)
from memfit.errors import Exit, InputError
from memfit.mesh import MeshShape, parse_mesh
from memfit.printable import printable

if TYPE_CHECKING:
    from memfit.device.hardware.catalogue import Device
    from memfit.job import Job
    from memfit.plan import Plan
    from memfit.planner.memory_vs_batch import Point
    from memfit.planner.search.engine_search import Answer
    from memfit.script.saved_answer import SavedAnswer
    from memfit.show.export import Exported
    from memfit.show.upstream_edits import UpstreamEdit


@click.command("plan")
@click.argument("job", required=False)
@set_option
@click.option("--global-batch", metavar="N", help="Units that one optimizer step learns from, over all devices.")
@click.option(
    "--from-trace", "trace_file", metavar="F.json",
    help="Instead of JOB: a file that memfit trace --json wrote. Give its options as edits of the script.",
)  # fmt: skip
@click.option("--micro-batch", metavar="N", help="Fix the micro-batch, in units. Default: the fastest that fits.")
@click.option(
    "--devices", metavar="N", help="Devices: data-parallel ones without --nodes. Default: 1, or those of --mesh."
)
@mesh_option
@click.option(
    "--nodes", metavar="N",
    help="Nodes that --devices are in. Search the mesh too, unless --mesh sets it.",
)  # fmt: skip
@click.option(
    "--network", metavar="NAME",
    help="What joins nodes: infiniband-ndr, or 8xinfiniband-ndr for eight adapters a node. Default: the catalogue's.",
)  # fmt: skip
@click.option(
    "--engine", metavar="E", help="The engine that distributes nets over devices. Default: the fastest that fits."
)
@engine_choice_option
@device_names_option
@memory_option
@headroom_option
@click.option(
    "--keep",
    metavar="A,B",
    help="Keep the job's own choice of: checkpointing, optimizer, precision, validation.",
)
@click.option("--allow", metavar="A,B", help="Allow options that change learning: precision. Default: none.")
@click.option("--tuned-for", metavar="N", help="The global batch that the job's learning rate was tuned for.")
@click.option(
    "--learning-rate",
    "rule",
    metavar="RULE",
    default="none",
    show_default=True,
    help="Multiply the rate by a rule: linear, sqrt, or none.",
)
@click.option("--curve", is_flag=True, help="Show memory against micro-batch for each policy, before the plan.")
@click.option(
    "--seed", metavar="N", default="0", show_default=True, help="Seed of the data's order and of every random number."
)
@click.option("--out", metavar="F", type=click.Path(dir_okay=False), help="Write the plan file that memfit run takes.")
@click.option(
    "--for",
    "tool",
    type=click.Choice(TOOLS),
    help="Also show the plan, or a script's edits, in the words of this tool: configuration or arguments.",
)
@json_option
def command(
    job: str | None, pairs: tuple[str, ...], global_batch: str | None, trace_file: str | None, micro_batch: str | None,
    devices: str | None, mesh: str | None, nodes: str | None, network: str | None, engine: str | None,
    choices: tuple[str, ...], device_names: tuple[str, ...], memory: str | None, headroom: str | None,
    keep: str | None, allow: str | None, tuned_for: str | None, rule: str, curve: bool, seed: str, out: str | None,
    tool: str | None, as_json: bool,
) -> int:  # fmt: skip
    """Plan JOB's global batch for the device: micro-batch, accumulation and recomputation, with reasons.

    JOB may be a script too: "train.py ARGS", or "torchrun --nproc-per-node 2 train.py" in quotes. It is traced on the
    virtual card, as memfit trace does, and its memory-saving options are edits.
    """
    from memfit.script.command_line import is_command_line

    if job is not None and is_command_line(job) and trace_file is None:
        if global_batch is not None:
            why = "a script sets its batch itself"
            raise InputError(f"--global-batch with {job}", why, f"leave it out, or name a job: {job.split()[0]}:Name")
        _refuse_job_options(job)
        return _edits_of_script(job, None, device_names, memory, headroom, tool, as_json=as_json)
    if trace_file is not None:
        if job is not None or global_batch is not None:
            raise InputError(
                "--from-trace with a job or --global-batch",
                "a script sets its batch itself",
                "write one of them",
            )
        _refuse_job_options("--from-trace")
        return _edits_of_script(None, trace_file, device_names, memory, headroom, tool, as_json=as_json)
    if job is None:
        raise _missing("job")
    if global_batch is None:
        raise _missing("global_batch")
    from memfit.cli.progress import progress
    from memfit.library_imports import spare_imports
    from memfit.loading import load_job, read_settings

    targets = choose_devices(device_names, memory, headroom)
    if out is not None and len(targets) > 1:
        raise InputError(f"--out with {len(targets)} devices", "a plan is for one device", "write one --device")
    if tool is not None and len(targets) > 1:
        raise InputError(f"--for with {len(targets)} devices", "a plan is for one device", "write one --device")
    if out is not None and not Path(out).name:
        raise InputError(f"--out {out!r}", "not the name of a file", "write --out plan.toml")
    if out is not None and not Path(out).absolute().parent.is_dir():
        raise InputError(f"--out {out}", f"there is no folder {Path(out).parent}", "make the folder, or write another")
    batch, micro = whole_number("--global-batch", global_batch), whole_number("--micro-batch", micro_batch)
    ranks, tuned = whole_number("--devices", devices), whole_number("--tuned-for", tuned_for)
    shape = parse_mesh(mesh) if mesh is not None else None
    if shape is not None and ranks not in (None, shape.world):
        raise InputError(f"--devices {ranks} --mesh {shape}", f"the mesh has {shape.world}", "leave --devices out")
    engine_choices = asked_choices(choices, _engine_of(engine, shape))
    if engine_choices and nodes is not None and shape is None:
        why = "--nodes searches meshes, which have different choices"
        raise InputError(f"--engine-choice {choices[0]} --nodes", why, "write --mesh too")
    if "first_modules" in engine_choices:
        why = "a plan chooses where the nets are cut"
        write = "leave it out, or write it in [engine_choices] of the plan"
        raise InputError("--engine-choice first_modules", why, write)
    first_seed = whole_number("--seed", seed, least=0)
    nodes_of = whole_number("--nodes", nodes)
    _check_nodes(nodes_of, network, ranks or (shape.world if shape is not None else None))
    with progress(f"planning {job}", quiet=as_json):
        from memfit.plan import write_plan
        from memfit.planner.mesh_search.mesh_choice import find_any_plan
        from memfit.planner.request import PlanRequest
        from memfit.planner.search.second_core import second_core_allowed
        from memfit.show.upstream_edits import upstream_changes
        from memfit.trace.untraced_copy import untraced_copy_allowed

        request = PlanRequest(
            name=job, global_batch=batch, device=targets[0], micro_batch=micro, engine=engine,
            devices=shape.data_ranks if shape is not None else ranks or 1, mesh=shape, seed=first_seed,
            keep=_words(keep), allow=_words(allow), tuned_for=tuned, learning_rate_rule=rule,
            engine_choices=engine_choices,
        )  # fmt: skip
        spare_imports()
        loaded = load_job(job, read_settings(pairs))
        with second_core_allowed(), untraced_copy_allowed():
            answers = {
                device.key: find_any_plan(loaded, replace(request, device=device), nodes_of, network)
                for device in targets
            }
        first = answers[targets[0].key]
        points = _curve(loaded, targets[0], batch, first.plan) if curve else None
        exported = _exported(loaded, first.plan, tool, out) if tool is not None and first.plan is not None else None
        changes = []
        if first.plan is not None and len(targets) == 1:
            nets = first.nets if first.plan.precision == loaded.precision else None
            changes = upstream_changes(loaded, job, first.plan, nets)
    if out is not None and first.plan is not None:
        write_plan(first.plan, out)
    if as_json:
        values = _json(answers, changes, points)
        if exported is not None and first.plan is not None and tool is not None:
            values["for"] = {"text": exported.text, **exported_json(exported, first.plan, tool)}
        print_json(values)
    else:
        _show(answers, targets, changes, points, out)
        if exported is not None:
            click.echo(f"\nFor {tool}:\n\n{printable(exported.text)}")
            show_exported(exported)
    return Exit.DONE if any(answer.plan is not None for answer in answers.values()) else Exit.NOTHING_FITS


def _engine_of(engine: str | None, mesh: MeshShape | None) -> str | None:
    """The engine that was asked for, by its name or a mesh; None: it is searched for."""
    if mesh is None:
        return engine
    from memfit.engine.capabilities import engine_of

    return engine_of(mesh, engine)


def _check_nodes(nodes: int | None, network: str | None, ranks: int | None) -> None:
    if nodes is None and network is not None:
        raise InputError(f"--network {network}", "it joins nodes", "write --nodes too")
    if nodes is not None and ranks is None:
        raise InputError(f"--nodes {nodes}", "how many devices they have is not said", "write --devices 64")


def _exported(job: Job, plan: Plan, tool: str, out: str | None) -> Exported:
    from memfit.planner.predict import plain_nets
    from memfit.show.export import FILES, export

    return export(plan, job, plain_nets(job), tool, FILES[tool], str(Path(out or "plan.toml").absolute()))


def _missing(name: str) -> click.MissingParameter:
    context = click.get_current_context()
    parameter = next(parameter for parameter in context.command.params if parameter.name == name)
    return click.MissingParameter(ctx=context, param=parameter)


def _edits_of_script(
    script: str | None, trace_file: str | None, device_names: tuple[str, ...], memory: str | None,
    headroom: str | None, tool: str | None, *, as_json: bool,
) -> int:  # fmt: skip
    """The edits of a script that is traced now, or was traced before."""
    from memfit.script.saved_answer import read_answer_file
    from memfit.script.tool_arguments import SCRIPT_TOOLS
    from memfit.show.script_options import options_json, show_options

    if tool is not None and tool not in SCRIPT_TOOLS:
        why = "it starts a script, and has no argument for an edit of one"
        with_what = f"with {script}" if script is not None else "with --from-trace"
        write = f"write one of {', '.join(SCRIPT_TOOLS)}, or name a job"
        raise InputError(f"--for {tool} {with_what}", why, write)
    if script is not None:
        devices = choose_devices(device_names, memory, headroom)
        answer = _traced_answer(script, devices[0])
    else:
        answer = read_answer_file(str(trace_file))
        devices = choose_devices(device_names or (answer.device,), memory, headroom)
    if as_json:
        print_json({"devices": {device.key: options_json(answer, device, tool) for device in devices}})
    else:
        for device in devices:
            show_options(answer, device, tool)
    fits = any(device.usable_bytes is None or answer.process_bytes <= device.usable_bytes for device in devices)
    return Exit.DONE if fits else Exit.NOTHING_FITS


_OF_SCRIPTS = frozenset(("job", "global_batch", "trace_file", "device_names", "memory", "headroom", "tool", "as_json"))
"""Parameters that a script has too."""


def _refuse_job_options(script: str) -> None:
    """Raises InputError for an option that would change nothing."""
    context = click.get_current_context()
    for parameter in context.command.params:
        name = parameter.name or ""
        if name not in _OF_SCRIPTS and context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            why = "it is an option of jobs, and a script sets it itself"
            raise InputError(f"{parameter.opts[0]} with {script}", why, "leave it out, or name a job")


def _traced_answer(script: str, device: Device) -> SavedAnswer:
    """The script's trace on a device; its own output goes to standard error."""
    from memfit.script.answer_json import answer_json
    from memfit.script.command_line import parse_command_line
    from memfit.script.launch import free_host_bytes, trace_with_need
    from memfit.script.outcome import MOVE_TO_CARD, NOTHING_ON_CARD, TRAINS_ON_CPU, TraceRequest
    from memfit.script.saved_answer import read_answer

    request = TraceRequest(command=parse_command_line(script), device=device.key, host_bytes=free_host_bytes())
    outcome = trace_with_need(request)
    write = f"see what memfit trace -- {script} says"
    if outcome.error is not None and not outcome.error.out_of_memory:
        raise InputError(script, f"the script failed: {outcome.error.summary}", outcome.error.hint or write)
    if NOTHING_ON_CARD in outcome.not_seen:
        raise InputError(script, TRAINS_ON_CPU, MOVE_TO_CARD)
    if outcome.windows < 2:
        job = f", or of a job in it, write {script}:Name --global-batch N" if len(script.split()) == 1 else ""
        raise InputError(script, f"the trace saw {outcome.windows} optimizer steps of two", f"{write}{job}")
    return read_answer(answer_json(request, outcome, None), script, write)


def _json(answers: dict[str, Answer], changes: list[UpstreamEdit], points: list[Point] | None) -> dict[str, Any]:
    """Returns the JSON of one device's answer, or of every device's by name."""
    from memfit.planner.plan_json import plan_json

    values: dict[str, Any] = {"devices": {key: plan_json(answer) for key, answer in answers.items()}}
    if len(answers) == 1:
        values = next(iter(values["devices"].values())) | {"upstream": [asdict(change) for change in changes]}
    return values if points is None else values | {"curve": [asdict(point) for point in points]}


def _show(
    answers: dict[str, Answer], targets: list[Device], changes: list[UpstreamEdit], points: list[Point] | None,
    out: str | None,
) -> None:  # fmt: skip
    from memfit.show.plan_table import show_answer, show_answers, show_curve
    from memfit.show.upstream_edits import show_upstream

    if points is not None:
        show_curve(points, targets[0])
    if len(targets) > 1:
        show_answers(answers, targets)
        return
    show_answer(answers[targets[0].key], targets[0], out)
    show_upstream(changes)


def _words(text: str | None) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip()) if text else ()


def _curve(job: Any, device: Device, most: int, plan: Plan | None) -> list[Point]:
    from memfit.planner.memory_vs_batch import memory_curve
    from memfit.trace.step import Tracing

    chosen = most if plan is None else plan.micro_batch
    return memory_curve(job, Tracing(device=device), device, most, chosen)
