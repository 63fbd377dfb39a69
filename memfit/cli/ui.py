"""memfit ui: writes a job's memory as one interactive HTML file, which answers for settings without a server."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from memfit.cli.options import (
    choose_devices,
    device_names_option,
    fresh_option,
    headroom_option,
    json_option,
    memory_option,
    print_json,
    set_option,
    whole_number,
)
from memfit.device.hardware.process_limits import check_fake_ranks
from memfit.errors import InputError
from memfit.printable import printable

if TYPE_CHECKING:
    from memfit.device.hardware.catalogue import Device
    from memfit.planner.asked_job import AskedJob

START = "rtx4090"
"""The card that the page starts with where this machine has none."""


@click.command("ui")
@click.argument("job")
@set_option
@device_names_option
@memory_option
@headroom_option
@click.option("--devices", metavar="N", default="1", show_default=True, help="Also trace DDP on so many devices.")
@click.option(
    "--out", metavar="F.html", type=click.Path(dir_okay=False), default="memfit-ui.html", show_default=True,
    help="The file to write.",
)  # fmt: skip
@fresh_option
@json_option
def command(
    job: str, pairs: tuple[str, ...], device_names: tuple[str, ...], memory: str | None, headroom: str | None,
    devices: str, out: str, fresh: bool, as_json: bool,
) -> None:  # fmt: skip
    """Write JOB's memory as one HTML file with sliders for micro-batch, length, accumulation, recomputation and card.

    JOB is as of memfit predict. Of -- python train.py --batch-size {batch}, micro-batch and card have sliders.

    The file needs no server and no network. Each figure in it is the one of memfit predict at the same setting; what
    does not follow from the traced steps is greyed out, with the reason. Other cards of the catalogue are there with
    the step that the page starts with, and with every step where they run the same kernels. Without a --device, on a
    machine without a card, the page starts with rtx4090.
    """
    from memfit.cli.job_options import asked_job
    from memfit.cli.progress import progress
    from memfit.cli.script_arguments import MARK, is_script

    targets, note = _targets(device_names, memory, headroom)
    ranks = whole_number("--devices", devices)
    check_fake_ranks(f"--devices {ranks}", ranks)
    if not Path(out).absolute().parent.is_dir():
        raise InputError(f"--out {out}", "its folder is not there", "write a file in a folder that is there")
    begin, name = time.perf_counter(), job.removeprefix(MARK)
    with progress(f"tracing {name}", quiet=as_json), asked_job(job, pairs, fresh=fresh) as asked:
        from memfit.planner.derived_steps import card_groups, start_footprint
        from memfit.show.settings_page import write_settings_page

        if is_script(job):
            _check_script(asked, ranks)
        others = _other_cards(targets, headroom)
        groups = card_groups(asked, targets, ranks, others, trace_others=not is_script(job))
        repeat = _repeated_options(targets, others, memory, headroom)
        write_settings_page(out, asked.facts, name, pairs, groups, ranks, repeat)
        first = start_footprint(groups[0], asked.facts, targets[0])
    nbytes, seconds = Path(out).stat().st_size, time.perf_counter() - begin
    cards = list(dict.fromkeys(card.key for group in groups for card in group.cards))
    if as_json:
        verdict = first and first.verdict
        print_json({"page": out, "verdict": verdict, "bytes": nbytes, "cards": cards, "seconds": seconds})
        return
    from memfit.show.footprint_table import short_name, verdict_line

    verdict = f"No step of {name} was traced on {short_name(targets[0])}: it refuses one item."
    click.echo(printable(verdict if first is None else verdict_line(first, targets[0])))
    click.echo(printable(f"Written to {out}, with {len(cards)} cards: open it in a browser.{note}"))


def _check_script(asked: AskedJob, ranks: int) -> None:
    """Raises InputError where a script has several ranks, of which the page tells nothing."""
    if ranks > 1:
        raise InputError(
            f"--devices {ranks} with {asked.name}", "a script has the ranks of its command", "leave it out"
        )
    if asked.world > 1:
        write = f"write memfit trace --report F.html -- {asked.name}"
        raise InputError(asked.name, f"it starts {asked.world} ranks, and the page is of one", write)


def _targets(names: tuple[str, ...], memory: str | None, headroom: str | None) -> tuple[list[Device], str]:
    """Returns the cards of --device, or this machine's own, and what to say of a machine that has none."""
    from memfit.device.hardware.local_devices import local_devices

    if names or local_devices()[0].is_cuda:
        return choose_devices(names, memory, headroom), ""
    return choose_devices((START,), memory, headroom), f" This machine has no card: it starts with {START}."


def _other_cards(targets: list[Device], headroom: str | None) -> list[Device]:
    """Returns the other cards of the catalogue, without those that the headroom leaves nothing of."""
    from contextlib import suppress

    from memfit.device.hardware.catalogue import catalogue

    asked, cards = {device.key for device in targets}, []
    for key, card in catalogue().items():
        if card.is_cuda and card.usable_bytes is not None and key not in asked:
            with suppress(InputError):
                cards += choose_devices((key,), None, headroom)
    return cards


def _repeated_options(
    targets: list[Device], others: list[Device], memory: str | None, headroom: str | None
) -> dict[str, str]:
    """Returns the options with which a command has the memory of the page's card, by card."""
    shared = f" --headroom {headroom}" if headroom is not None else ""
    own = f" --memory {memory}{shared}" if memory is not None else shared
    return {card.key: shared for card in others} | {card.key: own for card in targets}
