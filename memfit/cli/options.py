"""Options and output that several verbs share."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar, overload

import click

from memfit.errors import InputError
from memfit.geometry import MOST
from memfit.sizes import format_size, parse_size

if TYPE_CHECKING:
    from memfit.device.hardware.catalogue import Device

TOOLS = ("deepspeed", "accelerate", "lightning", "transformers", "torchtitan", "torchrun", "slurm", "skypilot")
"""What a plan can be written for; ``memfit.show.export`` has a file for each."""

Command = TypeVar("Command", bound=Callable[..., Any])

json_option = click.option(
    "--json", "as_json", is_flag=True, help="Write one JSON object to standard output, and nothing else."
)
set_option = click.option(
    "--set", "pairs", multiple=True, metavar="NAME=VALUE", help="A setting of the job; may be repeated."
)
device_option = click.option(
    "--device",
    "device_name",
    metavar="NAME",
    help="A card of the catalogue (memfit devices), or cpu. Default: this machine's own.",
)
memory_option = click.option("--memory", metavar="SIZE", help="Replace the device's memory, as 24GiB, 24GB or 512MiB.")

headroom_option = click.option(
    "--headroom", metavar="SIZE", help="Memory to leave free on the device: 5% of what is usable, or 1GiB. Default: 0."
)


fresh_option = click.option(
    "--fresh", is_flag=True, help="Trace again, even if earlier traces of the same job are kept."
)


def _device_names(default: str) -> Callable[[Command], Command]:
    words = f"A card of the catalogue (memfit devices), or cpu; several, or all. Default: {default}."
    return click.option("--device", "device_names", metavar="NAME", multiple=True, help=words)


device_names_option = _device_names("this machine's own")
all_device_names_option = _device_names("all")


def print_json(value: Any) -> None:
    """Prints one JSON object on standard output."""
    click.echo(
        json.dumps(value, indent=None if os.environ.get("MEMFIT_JSON_COMPACT") else 2, default=str, allow_nan=False)
    )


def choose_device(name: str | None, memory: str | None, headroom: str | None = None) -> Device:
    """Returns the device of --device, --memory and --headroom: a card of the catalogue or this machine's own, with a
    budget.
    """
    from memfit.device.hardware.catalogue import find_device, with_memory
    from memfit.device.hardware.local_devices import local_cpu, local_devices

    if name is None:
        device = local_devices()[0]
    else:
        device = local_cpu() if name == "cpu" else find_device(name)
    device = with_memory(device, parse_size(memory, "--memory")) if memory is not None else device
    return device if headroom is None else _with_headroom(device, headroom)


def choose_devices(names: tuple[str, ...], memory: str | None, headroom: str | None = None) -> list[Device]:
    """Returns the devices of several --device options; ``all`` gives every card of the catalogue."""
    from memfit.device.hardware.catalogue import catalogue

    if not names:
        return [choose_device(None, memory, headroom)]
    keys: dict[str, None] = {}
    for name in names:
        keys |= dict.fromkeys([key for key in catalogue() if key != "cpu"] if name == "all" else [name])
    return [choose_device(key, memory, headroom) for key in keys]


def _with_headroom(device: Device, headroom: str) -> Device:
    """Returns the device with less usable memory, and the rest of it left free.

    Raises:
        InputError: the text is neither a percentage below 100 nor a size, it is more than there is, or the device's
            memory is unknown.
    """
    usable = device.usable_bytes
    if usable is None:
        raise InputError(f"device {device.key}", "its memory is not known", "give --memory SIZE")
    percent = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%\s*", headroom)
    left = usable - (math.ceil(usable * float(percent[1]) / 100) if percent else parse_size(headroom, "--headroom"))
    if left < 1:
        seen = f"--headroom {headroom}"
        raise InputError(seen, f"it leaves nothing of {format_size(usable)}", "write --headroom 5% or a smaller size")
    return replace(device, usable_bytes=left, free_bytes=device.free_bytes + usable - left)


@overload
def whole_number(option: str, text: str, least: int = 1) -> int: ...
@overload
def whole_number(option: str, text: None, least: int = 1) -> None: ...
def whole_number(option: str, text: str | None, least: int = 1) -> int | None:
    """Parses a count.

    Raises:
        InputError: not a whole number of at least ``least``, or more than 2^31 - 1, the largest count of PyTorch's
            kernels.
    """
    if text is None:
        return None
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise InputError(
            f"{option} {text!r}", f"not a whole number of {least} or more", f"write {option} {least} or more"
        )
    if value > MOST:
        raise InputError(f"{option} {text}", f"more than {MOST}", "write a smaller number")
    return value
