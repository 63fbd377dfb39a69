"""``--device A B``, as a person writes it who asks for several cards."""

from __future__ import annotations

from collections.abc import Sequence

import click

from memfit.errors import InputError

OPTION = "--device"


def with_each_device(command: click.Command, arguments: Sequence[str]) -> list[str]:
    """The arguments of a verb with ``--device`` before each device; as they are where the verb takes one device.

    What follows a device and is the name of another one is one more; a job has no such name.
    """
    written = list(arguments)
    if not any(OPTION in option.opts and getattr(option, "multiple", False) for option in command.params):
        return written
    end = written.index("--") if "--" in written else len(written)
    result: list[str] = []
    after_device = False
    for number, argument in enumerate(written[:end]):
        if number and written[number - 1] == OPTION:
            after_device = True
        elif argument.startswith("-"):
            after_device = argument.startswith(f"{OPTION}=")
        elif after_device and _is_device(argument):
            result.append(OPTION)
        else:
            after_device = False
        result.append(argument)
    return result + written[end:]


def _is_device(name: str) -> bool:
    from memfit.device.hardware.catalogue import find_device

    try:
        find_device(name)
    except InputError:
        return name == "all"
    return True
