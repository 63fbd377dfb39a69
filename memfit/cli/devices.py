"""``memfit devices``: lists the catalogue of cards and the devices of this machine."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import click

from memfit.atomic_file import write_atomic
from memfit.device.hardware.catalogue import (
    Device,
    added_cards_file,
    catalogue,
    figures,
    find_device,
    mig_slices,
    read_cards,
)
from memfit.device.hardware.local_devices import local_devices
from memfit.errors import InputError
from memfit.sizes import format_size

UNKNOWN = "unknown"
COLUMNS = ("device", "mem GiB", "usable", "bf16", "fp16", "fp32", "GB/s", "link")
WIDTHS = (16, 10, 8, 8, 7, 7, 7, 12)
RATES = ("bf16_flops", "fp16_flops", "tf32_flops", "fp32_flops")


@click.command(
    "devices", help="List the cards of the catalogue and of this machine; with NAME, show the figures of one card."
)
@click.argument("name", required=False)
@click.option(
    "--add",
    "file",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Add the cards of a TOML file to this user's catalogue: a table for each, with a name, compute_capability "
    "and memory_bytes at least.",
)
@click.option("--json", "as_json", is_flag=True, help="Write one JSON object to standard output.")
def command(name: str | None, file: Path | None, as_json: bool) -> int:
    if file is not None:
        if name:
            raise InputError(f"{name} with --add", "--add takes the cards of the file", "write one of the two")
        return _add(file)
    cards = [find_device(name)] if name else list(catalogue().values())
    here = [] if name else local_devices()
    if as_json:
        print(json.dumps({"devices": [figures(card) for card in cards], "here": [figures(device) for device in here]}))
    elif name:
        print("\n".join(_card(cards[0])))
    else:
        print(_row(COLUMNS))
        print("\n".join(_row(_cells(card)) for card in cards if card.is_cuda))
        print("\nRates: dense TFLOP/s of matrix products. Sources: memfit devices NAME")
        print(
            "Not validated (not compared with a measured run): "
            + ", ".join(card.key for card in cards if not card.validated)
        )
        sliced = [card.key for card in cards if mig_slices(card)]
        print(textwrap.fill(f"Slices (MIG) of {', '.join(sliced)}: a100-40gb:3g.20gb", 80, break_on_hyphens=False))
        print("\nThis machine")
        for device in here:
            print(f"  {device.name}: {_size(device.memory_bytes)}, {_size(device.usable_bytes)} of it free")
    return 0


def _add(file: Path) -> int:
    cards = read_cards(file)
    path = added_cards_file()
    before = path.read_text("utf-8") if path.exists() else ""
    if before:
        for key in cards.keys() & read_cards(path).keys():
            raise InputError(f"[{key}] of {file.name}", f"{path} has that card", f"change it in {path}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, f"{before.rstrip()}\n\n{file.read_text('utf-8')}".lstrip())
    except OSError as error:
        write = "set XDG_CONFIG_HOME to the full path of a folder that can be written"
        raise InputError(str(path), str(error), write) from error
    for card in cards.values():
        print(f"added {card.key}: {card.name}, {_size(card.memory_bytes)}")
    print(f"They are in {path}.")
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
        if field in ("name", "card", "sources", "context_by_torch"):
            continue
        if value is None:
            text = UNKNOWN
        elif field in RATES:
            text = f"{_number(value, 1e12)} TFLOP/s"
        elif field in ("bandwidth", "link_bytes", "network_bytes"):
            text = f"{_number(value, 1e9)} GB/s"
        elif field == "compute_capability":
            text = ".".join(map(str, value))
        else:
            text = f"{_size(value)} ({value:,} B)" if isinstance(value, int) and value > 1 << 20 else str(value)
        lines.append(f"  {field.replace('_', ' '):<24}{text}")
        if source := card.sources.get(field):
            lines += _wrapped(source)
    for each in card.context_by_torch:
        lines += [f"  {f'context, torch {each.since} on':<24}{_size(each.usual)}", *_wrapped(each.source)]
    slices = mig_slices(card)
    if slices:
        lines.append("  slices (MIG)")
        lines += [f"    {each.key:<22}{_size(each.memory_bytes)}" for each in slices.values()]
    return lines


def _wrapped(source: str) -> list[str]:
    return textwrap.wrap(source, 78, initial_indent=" " * 26, subsequent_indent=" " * 26)


def _gib(nbytes: int | None) -> str:
    return UNKNOWN if nbytes is None else f"{nbytes / 2**30:.2f}"


def _size(nbytes: int | None) -> str:
    return UNKNOWN if nbytes is None else format_size(nbytes)


def _number(value: float | None, unit: float) -> str:
    return UNKNOWN if value is None else f"{value / unit:.4g}"
