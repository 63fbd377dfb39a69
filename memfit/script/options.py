"""Memory-saving options for a script: each is an edit, with the bytes that it saves at the training peak."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from memfit.events import ALLOCATE, CATEGORIES, FREE, Trace
from memfit.script import tool_arguments
from memfit.script.outcome import NOWHERE, Line, ScriptOption
from memfit.script.phase_spans import KnownOptimizer
from memfit.script.variables import HeldVariable

_LEAST_SHARE = 0.005
"""Options that save a smaller share of the peak are not listed."""
_EIGHT_BIT = 0.75
"""Share of float32 state that 8-bit state saves; its scales take less than 2 %."""
_EIGHT_BIT_OPTIMIZERS = {
    "Adam": "Adam8bit", "AdamW": "AdamW8bit", "SGD": "SGD8bit", "RMSprop": "RMSprop8bit", "Adagrad": "Adagrad8bit",
}  # fmt: skip
"""torch's optimizers, and the optimizers of bitsandbytes with the same arithmetic and 8-bit state."""
_FUSED_OPTIMIZERS = frozenset({"Adam", "AdamW", "SGD", "Adagrad"})
"""torch's optimizers that take ``fused=True``."""
_IN_BF16 = re.compile(
    r"aten\.(mm|addmm|bmm|baddbmm|linear|convolution|_scaled_dot_product\w*|relu|leaky_relu|hardtanh|gelu|silu)\.\w+"
)
"""Operators whose results are bf16 under autocast: its own list of products, and activation functions, which mostly
follow one. Others take the widest type of their inputs, which a trace does not have; they are counted as float32."""
_NUMBERED = re.compile(r"^(.*?)\.(\d+)(?:\.|$)")


def script_options(
    trace: Trace,
    held: Sequence[HeldVariable],
    steps: Sequence[tuple[int, KnownOptimizer]],
    forward_lines: Mapping[str, Line],
    alive: np.ndarray,
) -> tuple[ScriptOption, ...]:
    """Returns the options that apply, the largest saving first.

    Args:
        steps: (event after it, optimizer) of each optimizer step.
        forward_lines: where each trained net is called, by its class, the largest net first.
        held: variables that are the only references to a storage when a backward begins.
        alive: requested bytes that are alive after each event.
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
    candidates = [
        *_variables(trace, held, event),
        *_eight_bit_states(trace, there, steps),
        *_smaller_step(trace, inside, alive, event, steps),
        *_checkpointing(trace, there, forward_lines),
        *_smaller_activations(trace, there, _constant(trace, spans), next(iter(forward_lines.values()), NOWHERE)),
        *_gradients_freed(trace, spans, _largest(steps)),
    ]
    least = peak * _LEAST_SHARE
    chosen = [option for option in candidates if option.saves_bytes is None or option.saves_bytes > least]
    return tuple(sorted(chosen, key=lambda option: -(option.saves_bytes or 0)))


def _alive_at(trace: Trace, event: int) -> np.ndarray:
    kind, storage = trace.kind[: event + 1], trace.storage[: event + 1]
    there = np.zeros(len(trace.nbytes), bool)
    there[storage[kind == ALLOCATE]] = True
    there[storage[kind == FREE]] = False
    return there


def _first_forwards(trace: Trace, spans: Sequence[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """(start, first event of a forward, end) of each window with a forward."""
    in_forward = np.array([part == "forward" for part in trace.parts])[trace.operator_part[trace.operator]]
    return [(s, s + int(in_forward[s:end].argmax()), end) for s, end in spans if in_forward[s:end].any()]


def _constant(trace: Trace, spans: Sequence[tuple[int, int]]) -> np.ndarray:
    """The storages that are alive before and after a whole window: no part of its batches."""
    constant = np.zeros(len(trace.nbytes), bool)
    for start, _, end in _first_forwards(trace, spans):
        constant |= _alive_at(trace, start - 1) & _alive_at(trace, end - 1)
    return constant


def _variables(trace: Trace, held: Sequence[HeldVariable], event: int) -> list[ScriptOption]:
    """Variables that are alive at the peak, and could have been freed before a backward that began by then:
    what an earlier forward's graph still needs is held later, and saves nothing.
    """
    there = _alive_at(trace, event)
    saved: dict[tuple[str, str, int], int] = {}
    for variable in held:
        if there[variable.storage] and variable.event <= event:
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


def _eight_bit_states(
    trace: Trace, there: np.ndarray, steps: Sequence[tuple[int, KnownOptimizer]]
) -> list[ScriptOption]:  # fmt: skip
    """8-bit state for the optimizers that have state at the peak, those of one line together."""
    states: dict[tuple[str, str], set[int]] = defaultdict(set)
    for known in {id(known): known for _, known in steps}.values():
        if not known.has_sparse and known.kind in _EIGHT_BIT_OPTIMIZERS:
            states[known.kind, _place(known.line)] |= known.state_storages
    options = []
    for (kind, where), storages in states.items():
        numbers = np.array(sorted(storages), dtype=np.int64)
        numbers = numbers[there[numbers] & (trace.category[numbers] == CATEGORIES.index("optimizer"))]
        if state := int(trace.nbytes[numbers].sum()):
            options.append(
                ScriptOption(
                    name="8-bit optimizer state", saves_bytes=int(state * _EIGHT_BIT), where=where,
                    write=f"bitsandbytes.optim.{_EIGHT_BIT_OPTIMIZERS[kind]}(...) instead",
                    reason="changes the arithmetic of the step", for_tools=tool_arguments.eight_bit_state(kind),
                )
            )  # fmt: skip
    return options


def _smaller_step(
    trace: Trace, inside: np.ndarray, alive: np.ndarray, event: int, steps: Sequence[tuple[int, KnownOptimizer]]
) -> list[ScriptOption]:
    """Fewer temporaries of the optimizer that steps at the peak."""
    in_step = np.array([part == "optimizer" for part in trace.parts])[trace.operator_part[trace.operator]]
    elsewhere = int(np.where(inside & ~in_step, alive, 0).max(initial=0))
    known = next((known for end, known in steps if end > event), None)
    if known is None or not 0 < elsewhere < alive[event]:
        return []
    can_fuse = known.kind in _FUSED_OPTIMIZERS and not known.has_sparse
    return [
        ScriptOption(
            name="fused step" if can_fuse else "step without foreach", saves_bytes=int(alive[event]) - elsewhere,
            where=_place(known.line), write="fused=True" if can_fuse else "foreach=False",
            reason="the peak is the optimizer's own temporaries",
            for_tools=tool_arguments.fused_step(known.kind) if can_fuse else {},
        )
    ]  # fmt: skip


def _largest(steps: Sequence[tuple[int, KnownOptimizer]]) -> Line:
    """Where the optimizer of the most parameters was made."""
    return max((known for _, known in steps), key=lambda known: len(known.weights)).line if steps else NOWHERE


def _place(line: Line) -> str:
    return f"{line.file}:{line.line}"


def _checkpointing(trace: Trace, there: np.ndarray, lines: Mapping[str, Line]) -> list[ScriptOption]:
    """Repeated modules (``blocks.0``, ``blocks.1`` …) whose activations are alive at the peak. Recomputation frees the
    activations of all but the largest, except the tensor that enters each.
    """
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
            net, _, path = name.partition(".")
            path, line = path or name, lines.get(net, NOWHERE)
            options.append(
                ScriptOption(
                    name=f"checkpoint {path}", saves_bytes=saves, where=f"{line.file}:{line.line}",
                    write=f"torch.utils.checkpoint.checkpoint(block, ..., use_reentrant=False) for each of {path}",
                    reason="estimated from what each block keeps; costs one more forward of them",
                    for_tools=tool_arguments.CHECKPOINT_BLOCKS,
                )
            )  # fmt: skip
    return options


def _held(trace: Trace, there: np.ndarray, *categories: str) -> int:
    """Live bytes of these categories."""
    numbers = [CATEGORIES.index(category) for category in categories]
    return int(trace.nbytes[there & np.isin(trace.category, numbers)].sum())


def _smaller_activations(
    trace: Trace, there: np.ndarray, constant: np.ndarray, line: Line
) -> list[ScriptOption]:  # fmt: skip
    """Half of the batch, and half of each activation's bytes: estimates from what is alive at the peak.

    Args:
        constant: storages that are no part of a batch.
    """
    where = f"{line.file}:{line.line}"
    activations = _held(trace, there & ~constant, "activations")
    others = _held(trace, there & ~constant, "temporaries", "inputs")
    options = [
        ScriptOption(
            name="half the micro-batch", saves_bytes=(activations + others) // 2,
            where=where, write="half the batch size, and one optimizer step for every second batch",
            reason="estimated: what a batch holds at the peak, halved; BatchNorm then sees smaller batches",
            for_tools=tool_arguments.HALF_BATCH,
        )
    ]  # fmt: skip
    if trace.net_kind.endswith("float32"):
        copies = _held(trace, there, "parameters") // 2
        in_bf16 = np.array([bool(_IN_BF16.fullmatch(name)) for name in trace.names])
        made_so = in_bf16[trace.operator_name[trace.made_by]]
        halved = _held(trace, there & ~constant & made_so, "activations") // 2
        options.append(
            ScriptOption(
                name="bf16 autocast", saves_bytes=max(halved - copies, 0), where=where,
                write='with torch.autocast("cuda", torch.bfloat16):  (around the forward and the loss)',
                reason="estimated: results of products halved, less the copies of the weights; changes the arithmetic",
                for_tools=tool_arguments.BF16_AUTOCAST,
            )
        )  # fmt: skip
    return options


def _gradients_freed(trace: Trace, spans: Sequence[tuple[int, int]], line: Line) -> list[ScriptOption]:
    """Gradients that stay allocated from one window to the next."""
    windows = _first_forwards(trace, spans[1:])
    if not windows:
        return []
    start, forward, _ = windows[-1]
    kept = (_held(trace, _alive_at(trace, event), "gradients") for event in (start - 1, forward))
    if not all(kept):
        return []
    return [
        ScriptOption(
            name="free gradients", saves_bytes=None, where=f"{line.file}:{line.line}",
            write="optimizer.zero_grad(set_to_none=True) before the forward",
            reason="gradients stay allocated during the forward; what that saves depends on where the peak is then",
        )
    ]  # fmt: skip
