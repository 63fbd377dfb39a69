"""KeptBatches: the batches of the window at hand, for a forward that is done again or a turn that reads them again."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from memfit.torch_compat.attributes import version_of

Ids = tuple[int, ...]
_FIXED = (str, bytes, int, float, complex, bool, type(None))
"""Types of which no value can be changed in place."""


@dataclass(frozen=True, kw_only=True)
class KeptBatch:
    """A batch as it was read."""

    batch: Any
    versions: tuple[int, ...]
    """Of its tensors, which count what was written to each."""


class KeptBatches:
    """The newest batches of one window. A batch that a job has changed since, or could without notice, is not given
    again: it is read again.

    Args:
        most: batches that are kept.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._window = -1
        self._batches: OrderedDict[Ids, KeptBatch] = OrderedDict()

    def keep(self, window: int, ids: Ids, batch: Any) -> None:
        """Keeps a batch; those of another window are let go."""
        if window != self._window:
            self._window = window
            self._batches.clear()
        tensors = _tensors(batch)
        if tensors is None:
            return
        self._batches[ids] = KeptBatch(batch=batch, versions=tuple(version_of(tensor) for tensor in tensors))
        while len(self._batches) > self._most:
            self._batches.popitem(last=False)

    def get(self, window: int, ids: Ids) -> KeptBatch | None:
        """The batch of these samples as it was read; None where it is not there any more."""
        kept = self._batches.get(ids) if window == self._window else None
        if kept is None:
            return None
        now = tuple(version_of(tensor) for tensor in _tensors(kept.batch) or ())
        return kept if now == kept.versions else None


def _tensors(batch: Any) -> list[Tensor] | None:
    """The tensors of a batch; None where it holds anything else that can be changed."""
    if isinstance(batch, Tensor):
        return [batch]
    if isinstance(batch, _FIXED):
        return []
    if type(batch) is dict:
        parts = list(batch.values())
    elif type(batch) in (list, tuple) or hasattr(batch, "_fields"):
        parts = list(batch)
    else:
        return None
    tensors: list[Tensor] = []
    for part in parts:
        inner = _tensors(part)
        if inner is None:
            return None
        tensors += inner
    return tensors
