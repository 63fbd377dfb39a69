"""memfit plan: the best way to fit a global batch into a device, and why."""

from __future__ import annotations

from dataclasses import asdict

import click

from memfit.cli.options import (
    choose_device,
    device_option,
    json_option,
    memory_option,
    print_json,
    set_option,
    whole_number,
)
from memfit.errors import Exit, InputError


@click.command("plan")
@click.argument("job")
@set_option
@click.option(
    "--global-batch", metavar="N", required=True, help="Units that one optimizer step learns from, over all devices."
)
@click.option("--micro-batch", metavar="N", help="Fixes the micro-batch, in units. Default: the largest that fits.")
@click.option("--devices", metavar="N", default="1", show_default=True, help="Data-parallel devices.")
@device_option
@memory_option
@click.option(
    "--seed", metavar="N", default="0", show_default=True, help="Of the data's order and of every random number."
)
@click.option("--out", metavar="F", type=click.Path(dir_okay=False), help="Writes the plan file that memfit run takes.")
@json_option
def command(
    job: str, pairs: tuple[str, ...], global_batch: str, micro_batch: str | None, devices: str, device_name: str | None,
    memory: str | None, seed: str, out: str | None, as_json: bool,
) -> int:  # fmt: skip
    """How JOB's global batch fits into the device: micro-batch, accumulation, recompute, with reasons."""
    from memfit.cli.quiet import progress
    from memfit.loading import load_job, read_settings

    if device_name is None and memory is None:
        raise InputError(
            "memfit plan without --device or --memory",
            "there is nothing to fit into",
            "write --device NAME or --memory SIZE",
        )
    device = choose_device(device_name, memory)
    asked = whole_number("--global-batch", global_batch)
    fixed, ranks = whole_number("--micro-batch", micro_batch), whole_number("--devices", devices)
    start = whole_number("--seed", seed, least=0)
    with progress(f"planning {job}", quiet=as_json):
        from memfit.plan import write_plan
        from memfit.planner.search import find_plan, plan_json
        from memfit.show.upstream import show_upstream, upstream_changes

        loaded = load_job(job, read_settings(pairs))
        answer = find_plan(loaded, job, asked, device, micro_batch=fixed, devices=ranks, seed=start)
        changes = upstream_changes(loaded, job, answer.plan) if answer.plan is not None else []
    if out is not None and answer.plan is not None:
        write_plan(answer.plan, out)
    if as_json:
        print_json(plan_json(answer) | {"upstream": [asdict(change) for change in changes]})
    else:
        from memfit.show.plan import show_answer

        show_answer(answer, device, out)
        show_upstream(changes)
    return Exit.DONE if answer.plan is not None else Exit.NOTHING_FITS
