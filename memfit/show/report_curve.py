"""The section of a report that shows memory against micro-batch, with the limits of common cards."""

from __future__ import annotations

from collections.abc import Sequence

from memfit.device.catalogue import Device, catalogue
from memfit.planner.curve import Curve
from memfit.show.page import Section, Table
from memfit.sizes import format_size

COMMON = ("t4", "rtx4090", "rtx5090", "a100-40gb", "l40s", "a100-80gb", "h200")
LOOKS = (("activations", "", "circle"), ("parameters", "dash", "square"), ("optimizer", "dot", "diamond"))


def curve_section(curves: Sequence[Curve], unit: str, device: Device, chosen: int) -> Section:
    """Lines by policy; the limit of the device and, of a card, of other cards that the lines come near to.

    Args:
        chosen: the micro-batch that is read out at first, in ``unit``.
    """
    highest = max(bytes_ for curve in curves for bytes_ in curve.process_bytes)
    limits, sizes = _limits(device, highest), curves[0].micro_batches
    looks = [LOOKS[i % len(LOOKS)] for i in range(len(curves))]
    figure = {
        "kind": "curve",
        "id": "curve",
        "unit": unit,
        "x": sizes,
        "start": min(range(len(sizes)), key=lambda i: abs(sizes[i] - chosen)),
        "limits": [{"name": name, "bytes": bytes_} for name, bytes_ in limits],
        "lines": [
            {"name": curve.policy, "y": curve.process_bytes, "colour": colour, "dash": dash, "symbol": symbol}
            for curve, (colour, dash, symbol) in zip(curves, looks, strict=True)
        ],
    }
    rows = [(f"{size:,}", *(format_size(curve.process_bytes[i]) for curve in curves)) for i, size in enumerate(sizes)]
    columns = (f"micro-batch, {unit}", *(curve.policy for curve in curves))
    fits = [(name, *(_largest(curve, bytes_) for curve in curves)) for name, bytes_ in limits]
    return Section(
        title="Memory against micro-batch",
        text="What the process takes at its highest, in whatever phase that is, without operators' own scratch",
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


def _largest(curve: Curve, limit: int) -> str:
    fitting = [size for size, bytes_ in zip(curve.micro_batches, curve.process_bytes, strict=True) if bytes_ <= limit]
    return f"{max(fitting):,}" if fitting else "none"
