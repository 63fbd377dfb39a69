"""What ``memfit plan --from-trace`` prints: each option of a script as an edit, and whether it is enough."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.table import Table
from rich.text import Text

from memfit.device.hardware.catalogue import Device
from memfit.script.outcome import ScriptOption
from memfit.script.saved_answer import SavedAnswer
from memfit.show.console import make_console
from memfit.sizes import format_size


def is_enough(answer: SavedAnswer, option: ScriptOption, device: Device) -> bool | None:
    """Whether training fits on the device with this option alone; None where that is unknown."""
    if option.saves_bytes is None or device.usable_bytes is None:
        return None
    return answer.training_bytes - option.saves_bytes <= device.usable_bytes


def options_json(answer: SavedAnswer, device: Device, tool: str | None = None) -> dict[str, Any]:
    """The answer of ``--json``; the options with their words for a trainer under ``for`` (null where it has none)."""
    return {
        "script": answer.script,
        "device": device.key,
        "process_bytes": answer.process_bytes,
        "training_bytes": answer.training_bytes,
        "fits": None if device.usable_bytes is None else answer.process_bytes <= device.usable_bytes,
        "largest_batch": answer.largest_batch,
        "options": [
            asdict(option)
            | {"fits": is_enough(answer, option, device)}
            | ({} if tool is None else {"for": option.for_tools.get(tool)})
            for option in answer.options
        ],
    }


def show_options(answer: SavedAnswer, device: Device, tool: str | None = None) -> None:
    """Prints the verdict and the table of edits, in the words of a trainer where it has an argument for one."""
    console = make_console()
    usable = device.usable_bytes
    need = format_size(answer.process_bytes)
    if usable is None:
        verdict = f"{answer.script} needs {need}."
    elif answer.process_bytes <= usable:
        verdict = f"{answer.script} fits on {device.name} as it is: it needs {need} of {format_size(usable)}."
    else:
        verdict = f"{answer.script} does not fit on {device.name}: it needs {need} of {format_size(usable)}."
    console.print(verdict, soft_wrap=True)
    if not answer.options:
        console.print("No option of this script saves more than 0.5 % of its peak.")
        return
    table = Table(box=None, pad_edge=False, title="\nEdits", title_justify="left", title_style="default")
    table.add_column("saves", justify="right")
    table.add_column("fits with it", justify="right")
    for column in ("option", "at", "write", "because"):
        table.add_column(column, overflow="fold")
    words = {True: "yes", False: "no", None: "unknown"}
    for option in answer.options:
        saves = "unknown" if option.saves_bytes is None else format_size(option.saves_bytes)
        fits = words[is_enough(answer, option, device)]
        words_of_tool = option.for_tools.get(tool or "")
        where, write = (option.where, option.write) if words_of_tool is None else (tool, words_of_tool)
        table.add_row(saves, fits, option.name, where, Text(write), Text(option.reason))
    console.print(table)
    console.print(Text("The savings of several edits do not add up: trace the script again with them.", style="dim"))
