"""memfit ui: writes a job's memory as one interactive HTML file, which answers for settings without a server."""

from __future__ import annotations

import time
from pathlib import Path

import click

from memfit.cli.options import choose_devices, device_names_option, json_option, print_json, set_option, whole_number
from memfit.device.hardware.process_limits import check_fake_ranks
from memfit.errors import InputError
from memfit.printable import printable


@click.command("ui")
@click.argument("job")
@set_option
@device_names_option
@click.option("--devices", metavar="N", default="1", show_default=True, help="Also trace DDP on so many devices.")
@click.option(
    "--out", metavar="F.html", type=click.Path(dir_okay=False), default="memfit-ui.html", show_default=True,
    help="The file to write.",
)  # fmt: skip
@json_option
def command(
    job: str, pairs: tuple[str, ...], device_names: tuple[str, ...], devices: str, out: str, as_json: bool
) -> None:
    """Write JOB's memory as one HTML file with sliders for micro-batch, length, accumulation, recomputation and card.

    The file needs no server and no network. Each figure in it is the one of memfit predict at the same setting; what
    does not follow from the traced steps is greyed out, with the reason.
    """
    from memfit.cli.progress import progress
    from memfit.garbage import keep_frozen
    from memfit.loading import load_job, read_settings

    targets = choose_devices(device_names or ("rtx4090",), None)
    ranks = whole_number("--devices", devices)
    check_fake_ranks(f"--devices {ranks}", ranks)
    if not Path(out).absolute().parent.is_dir():
        raise InputError(f"--out {out}", "its folder is not there", "write a file in a folder that is there")
    begin = time.perf_counter()
    with progress(f"tracing {job}", quiet=as_json):
        from memfit.planner.derived_steps import card_groups
        from memfit.show.settings_page import write_settings_page

        loaded = load_job(job, read_settings(pairs))
        keep_frozen()
        groups = card_groups(loaded, targets, ranks)
        write_settings_page(out, loaded, job, pairs, groups, ranks)
    nbytes, seconds = Path(out).stat().st_size, time.perf_counter() - begin
    cards = [card.key for group in groups for card in group.cards]
    if as_json:
        print_json({"page": out, "bytes": nbytes, "cards": cards, "seconds": seconds})
    else:
        click.echo(printable(f"Written to {out}: open it in a browser.\n{len(cards)} cards: {', '.join(cards)}"))
