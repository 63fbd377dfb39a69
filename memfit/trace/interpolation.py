"""A trace between or beyond two others of the same events: each storage's bytes on the line through its two sizes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from memfit.events import Trace


def interpolated(low: Trace, high: Trace, part: float) -> Trace | None:
    """The trace at ``low + part * (high - low)``: an estimate, exact where every storage grows in proportion.

    Args:
        part: 0 at ``low``, 1 at ``high``; any number above 0.

    Returns:
        None where the two traces' events differ, or a storage would have fewer than 0 bytes.
    """
    if not (np.array_equal(low.kind, high.kind) and np.array_equal(low.storage, high.storage)):
        return None
    nbytes = np.rint(low.nbytes + part * (high.nbytes - low.nbytes).astype(np.float64))
    if nbytes.min(initial=0) < 0 or nbytes.max(initial=0) >= 2**62:
        return None
    return replace(low, nbytes=nbytes.astype(np.int64), operator_card_call=None, card_calls=())
