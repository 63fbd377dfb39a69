"""Every card for one job: whether it fits, the largest micro-batch, and time, energy and cost of an epoch."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from memfit.device.hardware.catalogue import Device, catalogue
from memfit.errors import InputError, why_unreadable
from memfit.job import Shape
from memfit.planner.asked_job import AskedJob
from memfit.planner.job_facts import Policy
from memfit.planner.largest import by_items, largest_size_of
from memfit.planner.prediction import Prediction
from memfit.planner.several_cards import predict_each
from memfit.planner.timing.roofline import window_seconds

PRICE_COLUMNS = ("card", "price_per_hour", "currency")


@dataclass(frozen=True, kw_only=True)
class Price:
    """What an hour of a card costs."""

    per_hour: float
    currency: str


@dataclass(frozen=True, kw_only=True)
class Card:
    """One card's answer; None where a figure is unknown."""

    prediction: Prediction
    largest: int | None
    """Largest micro-batch in the job's unit; None where nothing fits or it was not asked for."""
    may_be_larger: bool
    """Whether the search ended before a size that does not fit: a trace of it would be too long."""
    window_seconds: float | None
    """Estimated seconds of one window of the global batch."""
    epoch_seconds: float | None
    epoch_joules: float | None
    """Energy of an epoch at the board's maximum power: an upper estimate."""
    epoch_cost: float | None
    currency: str = ""

    @property
    def device(self) -> Device:
        return self.prediction.device


def compare_cards(
    asked: AskedJob,
    shape: Shape,
    devices: Sequence[Device],
    *,
    global_batch: int | None = None,
    prices: Mapping[str, Price] | None = None,
    count_epoch: Callable[[], tuple[int | None, str]] = lambda: (None, ""),
    find_largest: bool = True,
) -> list[Card]:
    """Each device's answer for a micro-batch shape, in the devices' order.

    Args:
        global_batch: units that one optimizer step learns from; None: one micro-batch.
        count_epoch: units of an epoch, and why they are unknown.
    """
    facts, cards = asked.facts, []
    policy = Policy(name="the job's own", checkpointing=facts.own, changes={})
    batch = global_batch or shape.units
    traced = min(2, math.ceil(batch / shape.units))  # from two on, gradients lie beside the second's activations
    asked.prepare(shape, devices, checkpointing=facts.own, micro_batches=traced)
    epoch_units, _ = count_epoch()
    predictions = predict_each(asked, shape, devices, checkpointing=facts.own, micro_batches=traced)
    for device, prediction in zip(devices, predictions, strict=True):
        largest = largest_size_of(policy, device, asked, by_items(facts.longest)) if find_largest else None
        is_timed = device.is_cuda and facts.precision
        window = None
        if is_timed:
            window = window_seconds(prediction.trace, device, batch / shape.units, facts.precision, traced=traced)
        epoch = None if window is None or epoch_units is None else window * epoch_units / batch
        price = (prices or {}).get(device.key)
        cards.append(
            Card(
                prediction=prediction,
                largest=None if largest is None or largest.size is None else largest.size * (facts.longest or 1),
                may_be_larger=largest is not None and largest.may_be_larger,
                window_seconds=window,
                epoch_seconds=epoch,
                epoch_joules=None if epoch is None or device.board_watts is None else epoch * device.board_watts,
                epoch_cost=None if epoch is None or price is None else epoch / 3600 * price.per_hour,
                currency=price.currency if price is not None else "",
            )
        )
    return cards


def read_prices(path: str | Path) -> dict[str, Price]:
    """Prices from a CSV file with the columns card, price_per_hour and currency; further columns are the reader's own.

    Raises:
        InputError: no such file, a missing column or two of one name, a row with more values than columns, an unknown
            card or two rows of one, a price that is no number, or two currencies.
    """
    where = f"--prices {path}"
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:  # spreadsheets begin a file with a mark
            reader = csv.DictReader(line for line in file if not line.lstrip().startswith("#"))
            columns, rows = list(reader.fieldnames or ()), list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        why = f"cannot be read: {why_unreadable(error)}"
        raise InputError(where, why, "write the path of a CSV file, such as examples/prices.csv") from error
    if twice := [column for column in PRICE_COLUMNS if columns.count(column) > 1]:
        raise InputError(where, f"it has two columns {twice[0]}", "write one")
    prices: dict[str, Price] = {}
    for number, row in enumerate(rows, 1):
        if missing := [column for column in PRICE_COLUMNS if not (row.get(column) or "").strip()]:
            write = f"write a first line {','.join(PRICE_COLUMNS)}"
            raise InputError(f"{where}: row {number}", f"it has no {missing[0]}", write)
        if any(row.get(None) or ()):  # a price of 0,40 would be read as 0
            write = "write a point in numbers, as in 0.35, and quotes around a value with a comma"
            raise InputError(f"{where}: row {number}", "it has more values than the first line has columns", write)
        key = row["card"].strip()
        if key not in catalogue():
            raise InputError(f"{where}: card {key!r}", "not in the catalogue", "write a name that memfit devices lists")
        try:
            price = float(row["price_per_hour"].replace("_", "?"))  # Python alone reads 1_0 as 10
        except ValueError:
            price = math.nan
        if not 0 <= price < math.inf:
            seen = f"{where}: price_per_hour {row['price_per_hour']!r}"
            raise InputError(seen, "not a number of 0 or more", "write a number such as 0.35")
        if key in prices:
            raise InputError(f"{where}: card {key!r}", "it has two rows", "write one price a card")
        prices[key] = Price(per_hour=price, currency=row["currency"].strip())
    if len(currencies := {price.currency for price in prices.values()}) > 1:
        raise InputError(where, f"it mixes {' and '.join(sorted(currencies))}", "write one currency")
    if not prices:
        raise InputError(where, "it has no prices", f"write rows of {','.join(PRICE_COLUMNS)}")
    return prices
