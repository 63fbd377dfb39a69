"""What would save memory in a script: each option as an edit, with the bytes that it saves at the training peak."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from memfit.events import ALLOCATE, CATEGORIES, FREE, Trace
from memfit.script.outcome import ScriptOption
from memfit.script.source_lines import Line
from memfit.script.variables import HeldVariable

_LEAST_SHARE = 0.005
"""Of the peak, below which an option is not named."""
_EIGHT_BIT = 0.75
"""Of an Adam's float32 state, what two bytes instead of eight a parameter save; scales take under 2 % of it."""
_NUMBERED = re.compile(r"^(.*?)\.(\d+)(?:\.|$)")


def script_options(
    trace: Trace, held: Sequence[HeldVariable], optimizer_line: Line, forward_line: Line, alive: np.ndarray
) -> tuple[ScriptOption, ...]:
    """The options that apply, the largest saving first.

    Args:
        held: variables that alone keep a storage alive when a backward begins.
        alive: bytes asked for and alive after each event.
    """
    spans = [(start, end) for name, start, end in trace.phases if name == "train" and end > start]
    if not spans:
        return ()
    inside = np.zeros(len(alive), bool)
    for start, end in spans:
        inside[start:end] = True
    event = int(np.where(inside, alive, -1).argmax())
    peak = int(alive[event])
    there = _alive_at(trace, event)
    found = [
        *_variables(trace, held, event),
        *_optimizer(trace, there, inside, alive, peak, optimizer_line),
        *_checkpointing(trace, there, forward_line),
    ]
    least = peak * _LEAST_SHARE
    chosen = [option for option in found if option.saves_bytes is None or option.saves_bytes > least]
    return tuple(sorted(chosen, key=lambda option: -(option.saves_bytes or 0)))


def _alive_at(trace: Trace, event: int) -> np.ndarray:
    kind, storage = trace.kind[: event + 1], trace.storage[: event + 1]
    there = np.zeros(len(trace.nbytes), bool)
    there[storage[kind == ALLOCATE]] = True
    there[storage[kind == FREE]] = False
    return there


def _variables(trace: Trace, held: Sequence[HeldVariable], event: int) -> list[ScriptOption]:
    """Variables that are there at the peak, or were at the same place of another window."""
    there = _alive_at(trace, event)
    saved: dict[tuple[str, str, int], int] = {}
    for variable in held:
        if there[variable.storage]:
            key = (variable.name, variable.file, variable.line)
            saved[key] = max(saved.get(key, 0), int(trace.nbytes[variable.storage]))
    return [
        ScriptOption(
            name=f"free {name}", saves_bytes=nbytes, where=f"{file}:{line}",
            write=f"del {name.partition('[')[0]}  (before this line)",
            reason="the backward does not need it, and the variable keeps it",
        )
        for (name, file, line), nbytes in saved.items()
    ]  # fmt: skip


def _optimizer(
    trace: Trace, there: np.ndarray, inside: np.ndarray, alive: np.ndarray, peak: int, line: Line
) -> list[ScriptOption]:
    where = f"{line.file}:{line.line}"
    state = int(trace.nbytes[there & (trace.category == CATEGORIES.index("optimizer"))].sum())
    options = []
    if state:
        options.append(
            ScriptOption(
                name="8-bit optimizer state", saves_bytes=int(state * _EIGHT_BIT), where=where,
                write="bitsandbytes.optim.AdamW8bit(...) instead", reason="changes the arithmetic of the step",
            )
        )  # fmt: skip
    steps = np.array([part == "optimizer" for part in trace.parts])[trace.operator_part[trace.operator]]
    elsewhere = int(np.where(inside & ~steps, alive, 0).max(initial=0))
    if elsewhere and elsewhere < peak:
        options.append(
            ScriptOption(
                name="fused step", saves_bytes=peak - elsewhere, where=where, write="fused=True",
                reason="the peak is the optimizer's own temporaries",
            )
        )  # fmt: skip
    return options


def _checkpointing(trace: Trace, there: np.ndarray, line: Line) -> list[ScriptOption]:
    """Modules that are repeated (``blocks.0``, ``blocks.1`` …) and whose activations are alive at the peak: all but
    the largest one's can be made again in the backward, but for the tensor that goes into each."""
    groups: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    activations = there & (trace.category == CATEGORIES.index("activations"))
    for storage in np.flatnonzero(activations).tolist():
        module = trace.modules[trace.operator_module[trace.made_by[storage]]]
        match = _NUMBERED.match(module)
        if match:
            groups[match[1]][match[2]].append(int(trace.nbytes[storage]))
    options = []
    for name, blocks in groups.items():
        totals = [sum(sizes) for sizes in blocks.values()]
        inputs = sum(min(max(sizes), int(np.median(sizes))) for sizes in blocks.values())
        saves = sum(totals) - max(totals) - inputs
        if len(blocks) > 2 and saves > 0:
            path = name.partition(".")[2] or name
            options.append(
                ScriptOption(
                    name=f"checkpoint {path}", saves_bytes=saves, where=f"{line.file}:{line.line}",
                    write=f"torch.utils.checkpoint.checkpoint(block, ..., use_reentrant=False) for each of {path}",
                    reason="estimated from what each block keeps; costs one more forward of them",
                )
            )  # fmt: skip
    return options
