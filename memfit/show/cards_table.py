"""Every card for a job in the terminal: which are enough, the fastest and the cheapest first, then a row for each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from memfit.show.console import make_console
from memfit.show.footprint_table import any_needs_more, micro_batch_words, short_name
from memfit.show.largest_table import largest_in_words
from memfit.sizes import format_size
from memfit.wording import units_in_words

if TYPE_CHECKING:
    from memfit.planner.card_comparison import Card


def show_cards(
    cards: Sequence[Card], global_batch: int | None = None, unknown: str = "", console: Console | None = None
) -> None:
    """Prints the verdict and a row for each card.

    Args:
        global_batch: None: one micro-batch.
        unknown: why an epoch's length is unknown.
    """
    console = console or make_console()
    console.print(cards_line(cards))
    first = cards[0].prediction
    accumulates = global_batch is not None and global_batch > first.micro_batch
    window = f", {units_in_words(global_batch, first.unit)} a window" if global_batch and accumulates else ""
    console.print(f"{first.job}, {micro_batch_words(first)}{window}\n", style="dim")
    columns = {
        "card": [card.device.key for card in cards],
        "fits": [card.prediction.footprint.verdict for card in cards],
        "process": [format_size(_need(card)) for card in cards],
        "free": [_signed(card.prediction.footprint.headroom_bytes) for card in cards],
        "largest": [_largest(card) for card in cards],
        "a window": [_seconds(card.window_seconds) for card in cards],
        "an epoch": [_seconds(card.epoch_seconds) for card in cards],
        "energy": [_energy(card.epoch_joules) for card in cards],
        "cost": [_cost(card) for card in cards],
    }
    shown = {name: cells for name, cells in columns.items() if set(cells) not in ({""}, {"unknown"})}
    table = Table(box=None, pad_edge=False)
    for name in shown:
        table.add_column(name, justify="left" if name in ("card", "fits") else "right", no_wrap=True)
    for row in zip(*shown.values(), strict=True):
        table.add_row(*row)
    console.print(table)
    console.print("\nTimes are estimates by the roofline model; energy is at the board's maximum power.", style="dim")
    if accumulates and "largest" in shown:
        console.print("Largest micro-batches are without accumulation, as of memfit max.", style="dim")
    if unknown:
        console.print(f"An epoch's length is unknown: {unknown}.", style="dim")


def _largest(card: Card) -> str:
    return "" if card.largest is None else largest_in_words(card.largest, may_be_larger=card.may_be_larger)


def cards_line(cards: Sequence[Card]) -> str:
    """``Fits on 9 of 11 cards; fastest: H200 (0.21 s a window), cheapest: RTX 4090 (0.41 USD an epoch).``, and what
    makes a longer run need more."""
    fitting = [card for card in cards if card.prediction.footprint.verdict == "yes"]
    close = sum(card.prediction.footprint.verdict == "close" for card in cards)
    words = f"Fits on {len(fitting)} of {len(cards)} cards"
    words += f", close to the limit on {close} more" if close else ""
    timed = [card for card in fitting if card.window_seconds is not None]
    priced = [card for card in fitting if card.epoch_cost is not None]
    named = []
    if timed:
        fastest = min(timed, key=lambda card: card.window_seconds or 0.0)
        named.append(f"fastest: {short_name(fastest.device)} ({_seconds(fastest.window_seconds)} a window)")
    if priced:
        cheapest = min(priced, key=lambda card: card.epoch_cost or 0.0)
        named.append(f"cheapest: {short_name(cheapest.device)} ({_cost(cheapest)} an epoch)")
    more = any_needs_more(card.prediction.footprint for card in cards)
    return f"{words}; {', '.join(named)}.{more}" if named else f"{words}.{more}"


def _need(card: Card) -> int:
    return max(phase.process_bytes for phase in card.prediction.footprint.phases.values())


def _signed(nbytes: int) -> str:
    return f"{'-' if nbytes < 0 else ''}{format_size(abs(nbytes))}"


def _seconds(seconds: float | None) -> str:
    if seconds is None:
        return "unknown"
    for least, size, unit in ((5400, 3600, "h"), (90, 60, "min"), (1, 1, "s")):
        if seconds >= least:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1000:.3g} ms"


def _energy(joules: float | None) -> str:
    if joules is None:
        return "unknown"
    return f"{joules / 3.6e6:.3g} kWh" if joules >= 3.6e5 else f"{joules / 3600:.3g} Wh"


def _cost(card: Card) -> str:
    return "unknown" if card.epoch_cost is None else f"{card.epoch_cost:.3g} {card.currency}"
