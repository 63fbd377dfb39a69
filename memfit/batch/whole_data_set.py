"""Data sets that give a rank the length of its share, as those of mosaicml-streaming and litdata, as a whole.

Such a data set is an IterableDataset of torch, which divides what it iterates among the ranks that torchrun started;
its samples by index are those of the whole. memfit divides samples itself, so with the length of a share no rank
would train on the rest.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from memfit.errors import InputError


class WholeDataSet(Sequence[Any]):
    """The samples of a data set, as many as there are."""

    def __init__(self, samples: Any, size: int) -> None:
        self._samples, self._size = samples, size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: Any) -> Any:
        return self._samples[index]


def whole_data_set(samples: Any, method: str) -> Any:
    """The data set with the length of all of its samples: itself where it has that.

    Args:
        method: that gave it, for messages.

    Raises:
        InputError: its length is that of a share, and it does not say how many samples there are (``size``).
    """
    from torch.utils.data import IterableDataset

    ranks = _ranks()
    if ranks == 1 or not isinstance(samples, IterableDataset):
        return samples
    share = len(samples)  # type: ignore[arg-type]
    if not _has(samples, share) or _has(samples, (share + 1) * ranks):
        return samples
    size = getattr(samples, "size", None)
    if type(size) is int and size > share and not _has(samples, size):
        return WholeDataSet(samples, size)
    seen = f"{method}() of type {type(samples).__name__}"
    why = f"its length is {share}, the share of one of {ranks} ranks, and it has more samples by index"
    write = "give memfit all samples, and it divides them: wrap it in a class whose __len__ is the number of them all"
    raise InputError(seen, why, write)


def _ranks() -> int:
    """The processes that torchrun started."""
    try:
        return int(os.environ.get("WORLD_SIZE", "1"))
    except ValueError:
        return 1


def _has(samples: Any, index: int) -> bool:
    """Whether a data set gives a sample at an index."""
    try:
        samples[index]
    except Exception:
        return False
    return True
