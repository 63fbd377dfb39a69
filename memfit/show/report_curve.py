"""The section of a report that shows memory against micro-batch, with the limits of common cards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from memfit.device.hardware.catalogue import Device, catalogue
from memfit.show.page import Section, Table
from memfit.sizes import format_size

if TYPE_CHECKING:
    from memfit.planner.memory_vs_batch import Point

COMMON = ("t4", "rtx4090", "rtx5090", "a100-40gb", "l40s", "a100-80gb", "h200")
LOOKS = (
    ("activations", "", "circle"),
    ("parameters", "dash", "square"),
    ("optimizer", "dot", "diamond"),
    ("ema", "dashdot", "triangle-up"),
)


def curve_section(points: Sequence[Point], unit: str, device: Device, chosen: int) -> Section:
    """Lines by policy; the limit of the device and, of a card, of other cards that the lines come near to.

    Args:
        points: of each policy the same micro-batches, ascending.
        chosen: the micro-batch that is read out at first, in ``unit``.
    """
    by_policy: dict[str, list[int]] = {}
    for point in points:
        by_policy.setdefault(point.policy, []).append(point.process_bytes)
    sizes = list(dict.fromkeys(point.micro_batch for point in points))
    limits = _limits(device, max(point.process_bytes for point in points))
    figure = {
        "kind": "curve",
        "id": "curve",
        "unit": unit,
        "x": sizes,
        "start": min(range(len(sizes)), key=lambda i: abs(sizes[i] - chosen)),
        "limits": [{"name": name, "bytes": bytes_} for name, bytes_ in limits],
        "lines": [
            {"name": policy, "y": bytes_, "colour": colour, "dash": dash, "symbol": symbol}
            for (policy, bytes_), (colour, dash, symbol) in zip(by_policy.items(), LOOKS, strict=False)
        ],
    }
    rows = [(f"{size:,}", *(format_size(bytes_[i]) for bytes_ in by_policy.values())) for i, size in enumerate(sizes)]
    columns = (f"micro-batch, {unit}", *by_policy)
    fits = [(name, *(_largest(sizes, bytes_, limit) for bytes_ in by_policy.values())) for name, limit in limits]
    return Section(
        title="Memory against micro-batch",
        text="What the process takes in training, with gradients accumulated",
        figure=figure,
        tables=[
            Table(
                caption=f"The largest micro-batch of these that fits, {unit}",
                columns=("card", *columns[1:]),
                rows=fits,
                numeric=columns[1:],
            )
        ],
        folded=[Table(caption="The same in figures", columns=columns, rows=rows, numeric=columns)],
    )


def _limits(device: Device, highest: int) -> list[tuple[str, int]]:
    """(name, usable bytes), ascending: the device's own, and cards up to the first that holds everything."""
    own = [(device.key, device.usable_bytes or 0)]
    if not device.is_cuda:
        return own
    cards = [
        (card.key, card.usable_bytes or 0)
        for card in catalogue().values()
        if card.key in COMMON and card.key != device.key
    ]
    ascending = sorted(cards, key=lambda card: card[1])
    near = [card for card in ascending if card[1] < highest] + [card for card in ascending if card[1] >= highest][:1]
    return sorted(own + near, key=lambda card: card[1])


def _largest(sizes: Sequence[int], process_bytes: Sequence[int], limit: int) -> str:
    fitting = [size for size, bytes_ in zip(sizes, process_bytes, strict=True) if bytes_ <= limit]
    return f"{max(fitting):,}" if fitting else "none"
