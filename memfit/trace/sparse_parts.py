"""The parts of a sparse tensor (COO) of a trace, and how many entries stay where those of one index are summed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from memfit.device.virtual.assumptions import source_line
from memfit.device.virtual.virtual_device import Virtual
from memfit.errors import InputError
from memfit.torch_compat import DisableTorchDispatch, FakeTensor, disable_current_modes
from memfit.torch_compat.attributes import SPARSE_PARTS, sparse_parts
from memfit.trace.constant_values import know, value_of
from memfit.wording import COALESCE

_aten = torch.ops.aten
_SORTED = 2 * 8
"""Bytes for each entry that thrust's merge sort takes beside its keys and values."""

"""The name of what is assumed where it is not known how many entries differ."""

COUNTS_KNOWN = True
"""Whether known indices say how many entries differ. Without, all do: the bytes follow from the size of a batch."""

seen_sparse: list[bool] = []
"""Not empty where there was a sparse tensor: before, no call is looked at."""


@dataclass(frozen=True, eq=False, slots=True)
class Parts:
    """What a sparse tensor holds: indices (sparse dimensions, entries), values (entries, dense dimensions)."""

    indices: Tensor
    values: Tensor
    is_coalesced: bool = False


def note_sparse() -> None:
    """Says that there is a sparse tensor: from now on, calls are looked at."""
    seen_sparse[:] = [True]


def parts_of(tensor: Tensor) -> Parts:
    """The parts of a sparse tensor."""
    own: Parts | None = tensor.__dict__.get(SPARSE_PARTS)
    if own is None and isinstance(tensor, FakeTensor):
        raise without_rule("an operator that gives a sparse tensor")
    return own or Parts(*sparse_parts(tensor), tensor.is_coalesced())


def _different(indices: Tensor, size: Any) -> Tensor | None:
    """The indices that differ (sparse dimensions, entries), in order; None where they are not known."""
    known = value_of(indices) if COUNTS_KNOWN else None
    if known is None:
        return None
    with disable_current_modes():
        if known.shape[0] == 1:
            return torch.unique(known)[None]
        return torch.unique(known, dim=1)


class SparseKernels:
    """What rules for operators share: new sparse tensors, and sums of entries."""

    def __init__(self, virtual: Virtual) -> None:
        self._virtual = virtual

    def make(self, parts: Parts, size: Any) -> Tensor:
        """A sparse tensor of these parts."""
        note_sparse()
        dims = parts.indices.shape[0]
        with DisableTorchDispatch():
            elem = _aten._sparse_coo_tensor_with_dims.default(
                dims, len(size) - dims, list(size), dtype=parts.values.dtype, layout=torch.sparse_coo,
                device=torch.device("meta"),
            )  # fmt: skip
            made = self._virtual.mode.new(elem, parts.values.device)
        setattr(made, SPARSE_PARTS, parts)
        return made

    def different(self, indices: Tensor, size: Any) -> int:
        """How many entries differ in their indices."""
        known = _different(indices, size)
        if known is not None:
            return known.shape[1]
        entries = indices.shape[1]
        most = min(entries, math.prod(size[: indices.shape[0]]))
        self._virtual.assumptions.note(COALESCE, f"{most} different of {entries}", most=most)
        return most

    def note_growth(self) -> None:
        """A momentum that a sparse gradient is added to keeps the entries of every step."""
        self._virtual.assumptions.note("a sum of sparse tensors", "more entries in each step", doubtful=True)

    def coalesced(self, tensor: Tensor) -> Parts:
        """The parts of a tensor after ``coalesce``."""
        parts = parts_of(tensor)
        if parts.is_coalesced or parts.indices.shape[1] < 2:
            return parts
        return self.coalesce(parts, tensor.shape)

    def coalesce(self, parts: Parts, size: Any) -> Parts:
        """Entries of the same indices summed. On the CPU, both parts keep the memory of all entries; on a card, the
        indices alone."""
        indices, values = parts.indices, parts.values
        dims, entries = indices.shape
        different = self.different(indices, size)
        if values.device.type == "cpu":
            kept, summed = torch.empty_like(indices), values.new_empty(values.shape)
            ranks = indices.new_empty((2, entries))  # flattened indices in order, and where they were
            del ranks
            values = summed[:different]
        else:
            values = values.contiguous()
            kept = indices.new_empty((1, entries))  # flattened
            places = indices.new_empty((2, entries))  # where entries were, and where a new one begins
            sorting = indices.new_empty((_SORTED * entries,), dtype=torch.uint8)
            del sorting
            values = values.new_empty((different, *values.shape[1:]))
            if dims > 1:
                kept = indices.new_empty((dims, different))
            del places
        made = kept[:, :different]
        known = _different(indices, size)
        if known is not None:
            know(made, known)
        return Parts(made, values, True)


def without_rule(seen: str) -> InputError:
    """The error of an operator on tensors that are not dense, of which no rule says what it allocates."""
    where, users = source_line()
    return InputError(
        f"{seen}{f' at {where}' if users else ''}",
        "no rule says what it allocates",
        "write it dense: sparse=False in nn.Embedding and nn.EmbeddingBag, index_add for a sparse product",
    )
