"""memfit cards: compares every card of the catalogue for one job."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

import click

from memfit.cli.options import (
    all_device_names_option,
    choose_devices,
    fresh_option,
    headroom_option,
    json_option,
    print_json,
    set_option,
    whole_number,
)
from memfit.errors import Exit, InputError

if TYPE_CHECKING:
    from memfit.planner.card_comparison import Card


@click.command("cards")
@click.argument("job")
@set_option
@click.option("--micro-batch", metavar="N", help="Units in one micro-batch. Default 1, or one longest item.")
@click.option("--shape", metavar="BxL", help="Items x length of one micro-batch, instead of --micro-batch.")
@click.option("--global-batch", metavar="N", help="Units of one optimizer step. Default: one micro-batch.")
@click.option(
    "--prices",
    metavar="F",
    type=click.Path(dir_okay=False),
    help="CSV with columns card, price_per_hour, currency, such as examples/prices.csv.",
)
@all_device_names_option
@headroom_option
@click.option(
    "--no-largest", is_flag=True, help="Do not search for the largest micro-batch, which takes most of the time."
)
@fresh_option
@json_option
def command(
    job: str, pairs: tuple[str, ...], micro_batch: str | None, shape: str | None, global_batch: str | None,
    prices: str | None, device_names: tuple[str, ...], headroom: str | None, no_largest: bool,
    fresh: bool, as_json: bool,
) -> int:  # fmt: skip
    """Compare the cards for JOB: whether it fits, memory, largest micro-batch; time, energy and cost of an epoch.

    JOB is as of memfit predict. Of -- python train.py ARGS, only memory is told: memfit max finds its largest batch.
    """
    from memfit.cli.background_traces import AheadRequest, NextQuestions
    from memfit.cli.job_options import asked_job, micro_batch_shape
    from memfit.cli.progress import progress
    from memfit.cli.script_arguments import MARK, is_script

    targets = choose_devices(device_names or ("all",), None, headroom)
    following = NextQuestions(dict(os.environ), are_wanted=not fresh)
    count, batch = whole_number("--micro-batch", micro_batch), whole_number("--global-batch", global_batch)
    begin = time.perf_counter()
    with progress(f"comparing {len(targets)} cards for {job.removeprefix(MARK)}", quiet=as_json):
        from memfit.planner.card_comparison import compare_cards, read_prices
        from memfit.planner.epoch_units import EpochUnits

        known = read_prices(prices) if prices is not None else None
        with asked_job(job, pairs, fresh=fresh, before_tracing=following.before_tracing) as answers:
            facts = answers.facts
            asked = micro_batch_shape(facts, shape, count)
            if batch is not None and is_script(job):
                why = "a script is asked as it is written"
                raise InputError(f"--global-batch {batch}", why, "leave --global-batch out")
            if batch is not None and batch < asked.units:
                why = f"less than the micro-batch of {asked.units}"
                raise InputError(f"--global-batch {batch}", why, f"write {asked.units} or more")
            with EpochUnits(answers) as epoch:
                count_epoch = (lambda: (None, "")) if is_script(job) else (lambda: epoch.answer)
                cards = compare_cards(
                    answers, asked, targets, global_batch=batch, prices=known, count_epoch=count_epoch,
                    find_largest=not (no_largest or is_script(job)),
                )  # fmt: skip
                units, unknown = count_epoch()
    if as_json:
        seconds = time.perf_counter() - begin
        print_json({
            "job": answers.name, "unit": facts.unit, "micro_batch": asked.units, "global_batch": batch or asked.units,
            "epoch_units": units, "cards": [_json(card) for card in cards], "seconds": seconds,
        })  # fmt: skip
    else:
        from memfit.show.cards_table import show_cards

        show_cards(cards, batch, unknown)
    choices, device = {"checkpointing": facts.own}, cards[0].device.key
    request = AheadRequest(job=job, pairs=pairs, precision=None, shape=asked, device=device, choices=choices)
    following.trace(answers, request)
    return Exit.DONE if any(card.prediction.footprint.fits for card in cards) else Exit.NOTHING_FITS


def _json(card: Card) -> dict[str, Any]:
    footprint = card.prediction.footprint
    return {
        "device": card.device.key,
        "fits": footprint.fits,
        "verdict": footprint.verdict,
        "process_bytes": max(phase.process_bytes for phase in footprint.phases.values()),
        "usable_bytes": card.device.usable_bytes,
        "headroom_bytes": footprint.headroom_bytes,
        "limiting_phase": footprint.limiting_phase,
        "assumed": list(footprint.assumed),
        "largest_micro_batch": card.largest,
        "may_be_larger": card.may_be_larger,
        "window_seconds": card.window_seconds,
        "epoch_seconds": card.epoch_seconds,
        "epoch_joules": card.epoch_joules,
        "epoch_cost": card.epoch_cost,
        "currency": card.currency,
    }
