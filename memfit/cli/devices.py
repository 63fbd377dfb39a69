"""``memfit devices``: the catalogue of cards, and what is in this machine."""

from __future__ import annotations

import json
import textwrap

import click

from memfit.device.hardware.catalogue import Device, catalogue, figures, find_device
from memfit.device.hardware.local_devices import local_devices
from memfit.sizes import format_size

UNKNOWN = "unknown"
COLUMNS = ("device", "memory GiB", "usable", "bf16", "fp16", "fp32", "GB/s", "link")
WIDTHS = (14, 11, 8, 9, 7, 7, 7, 12)
RATES = ("bf16_flops", "fp16_flops", "tf32_flops", "fp32_flops")


@click.command("devices", help="The catalogue of cards, and what is in this machine; with NAME, one card's figures.")
@click.argument("name", required=False)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on standard output.")
def command(name: str | None, as_json: bool) -> int:
    cards = [find_device(name)] if name else list(catalogue().values())
    here = [] if name else local_devices()
    if as_json:
        print(json.dumps({"devices": [figures(card) for card in cards], "here": [figures(device) for device in here]}))
    elif name:
        print("\n".join(_card(cards[0])))
    else:
        print(_row(COLUMNS))
        print("\n".join(_row(_cells(card)) for card in cards if card.is_cuda))
        print("\nRates: dense TFLOP/s of matrix products. Sources: memfit devices NAME\n\nThis machine")
        for device in here:
            print(f"  {device.name}: {_size(device.memory_bytes)}, {_size(device.usable_bytes)} of it free")
    return 0


def _cells(card: Device) -> tuple[str, ...]:
    memory = (_gib(nbytes) for nbytes in (card.memory_bytes, card.usable_bytes))
    rates = (_number(rate, 1e12) for rate in (card.bf16_flops, card.fp16_flops, card.fp32_flops))
    return card.key, *memory, *rates, _number(card.bandwidth, 1e9), card.link or UNKNOWN


def _row(cells: tuple[str, ...]) -> str:
    first, *middle, last = cells
    columns = [f"{cell:>{width}}" for cell, width in zip(middle, WIDTHS[1:-1], strict=True)]
    return f"{first:<{WIDTHS[0]}}{''.join(columns)}  {last}"


def _card(card: Device) -> list[str]:
    lines = [f"{card.key}: {card.name}"]
    for field, value in figures(card).items():
        if field in ("name", "card", "sources"):
            continue
        if value is None:
            text = UNKNOWN
        elif field in RATES:
            text = f"{_number(value, 1e12)} TFLOP/s"
        elif field in ("bandwidth", "link_bytes"):
            text = f"{_number(value, 1e9)} GB/s"
        elif field == "compute_capability":
            text = ".".join(map(str, value))
        else:
            text = f"{_size(value)} ({value:,} B)" if isinstance(value, int) and value > 1 << 20 else str(value)
        lines.append(f"  {field.replace('_', ' '):<24}{text}")
        if source := card.sources.get(field):
            lines += textwrap.wrap(source, 78, initial_indent=" " * 26, subsequent_indent=" " * 26)
    return lines


def _gib(nbytes: int | None) -> str:
    return UNKNOWN if nbytes is None else f"{nbytes / 2**30:.2f}"


def _size(nbytes: int | None) -> str:
    return UNKNOWN if nbytes is None else format_size(nbytes)


def _number(value: float | None, unit: float) -> str:
    return UNKNOWN if value is None else f"{value / unit:.4g}"
