"""Attention that is flash's on some cards and cuDNN's on others, in a trace that both share.

It is traced as flash's. The kernels differ in what they keep for backward: flash the state of a generator, a number and
an empty mask, cuDNN two numbers. ``memfit.device.virtual.attention`` calls it so where nothing else differs, and where
nothing but attention's own backward sees what is kept. Scratch follows from the calls' descriptions
(``memfit.device.virtual.card_scratch``).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from memfit.device.hardware.catalogue import Device
from memfit.device.virtual.card_rules import card_rules, plain
from memfit.device.virtual.card_scratch import EITHER_BACKWARD, EITHER_FORWARD, NUMBER, STATE_OF_FLASH
from memfit.events import ALLOCATE, Trace
from memfit.trace.trace_columns import without_storages

_MADE = 5
"""Storages that flash's forward makes: output, logsumexp, the generator's state, a number, the mask."""
_STATE, _MASK = 2, 4
"""Where the state and the mask are among them."""


def may_be_cudnn(trace: Trace) -> bool:
    """Whether a trace has calls that are cuDNN's on cards that prefer it."""
    return any(call.startswith((EITHER_FORWARD, EITHER_BACKWARD)) for call in trace.card_calls)


def with_attention_of(trace: Trace, device: Device) -> Trace:
    """The trace with the card's kernels, where it prefers cuDNN's; its scratch is the card's already."""
    if not may_be_cudnn(trace) or not plain(card_rules(device)).prefers_cudnn_attention:
        return trace
    assert trace.operator_card_call is not None
    forward, backward = (
        np.array([call.startswith(word) for call in trace.card_calls])[trace.operator_card_call]
        for word in (EITHER_FORWARD, EITHER_BACKWARD)
    )
    made = trace.storage[(trace.kind == ALLOCATE) & forward[trace.operator]].reshape(-1, _MADE)
    nbytes = trace.nbytes.copy()
    nbytes[made[:, _STATE]] = NUMBER
    numbers = {name: number for number, name in enumerate(trace.names)}
    names, column = list(trace.names), trace.operator_name.copy()
    for rows in (forward, backward):
        for number in np.unique(column[rows]).tolist():
            name = trace.names[number].replace("flash_attention", "cudnn_attention")
            if name not in numbers:
                numbers[name] = len(names)
                names.append(name)
            column[rows & (column == number)] = numbers[name]
    either = forward | backward
    calls = (*trace.card_calls, "") if "" not in trace.card_calls else trace.card_calls
    changed = replace(
        trace,
        nbytes=nbytes,
        names=tuple(names),
        operator_name=column,
        operator_bytes=np.where(either, trace.operator_bytes - (STATE_OF_FLASH - NUMBER), trace.operator_bytes),
        operator_card_call=np.where(either, calls.index(""), trace.operator_card_call).astype(np.int32),
        card_calls=calls,
    )
    return without_storages(changed, made[:, _MASK])
