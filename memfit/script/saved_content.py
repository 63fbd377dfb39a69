"""What is kept of the content of a checkpoint that a script saves: all of it but its tensors, of which the shapes stay.

A whole net, as in ``torch.save(copy.deepcopy(net), "best.pt")``, is copied without its tensors: what a script has saved
holds no memory once the script lets it go, and takes its own where it is read.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from memfit.device.virtual.backend import NAME
from memfit.device.virtual.patching import replaced
from memfit.torch_compat import FakeTensor, disable_current_modes, tree_flatten, tree_unflatten
from memfit.torch_compat.attributes import storage_id_of

_MAKE = "memfit makes tensors by"
"""The key of ``deepcopy``'s memo under which the function is found that makes the tensors of a copy."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SavedTensor:
    """What is kept of a tensor.

    Attributes:
        storage: a number that tensors of one storage share.
        content: of a real tensor, a copy of it.
        requires_grad: of a parameter; None of another tensor.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    on_card: bool
    storage: int
    content: Tensor | None
    requires_grad: bool | None

    def __deepcopy__(self, memo: dict[Any, Any]) -> Any:
        make = memo.get(_MAKE)
        return self if make is None else make(self)


@dataclass(frozen=True, kw_only=True)
class _Uncopied:
    """A leaf that is kept as it is."""

    leaf: Any

    def __deepcopy__(self, memo: dict[Any, Any]) -> Any:
        return self.leaf


@dataclass(frozen=True, kw_only=True)
class SavedContent:
    """The content of a checkpoint without its tensors."""

    leaves: list[Any]
    tree: Any

    @classmethod
    def of(cls, content: Any) -> SavedContent:
        """Keeps what ``torch.save`` is given."""
        leaves, tree = tree_flatten(content)
        memo: dict[Any, Any] = {}
        with disable_current_modes(), _tensors_kept_apart():
            return cls(leaves=[_kept(leaf, memo) for leaf in leaves], tree=tree)

    def read(self, make: Callable[[SavedTensor], Tensor]) -> Any:
        """Returns the content with the tensors that ``make`` gives, one for each that was saved."""
        memo: dict[Any, Any] = {_MAKE: make}
        return tree_unflatten([copy.deepcopy(leaf, memo) for leaf in self.leaves], self.tree)


def _kept(leaf: Any, memo: dict[Any, Any]) -> Any:
    """A copy of a leaf without its tensors; what cannot be copied, and arrays of the host, are kept as they are."""
    if isinstance(leaf, numpy.ndarray):
        return _Uncopied(leaf=leaf)
    try:
        return copy.deepcopy(leaf, memo)
    except Exception:  # of any class that a script or a library defines
        return _Uncopied(leaf=leaf)


@contextmanager
def _tensors_kept_apart() -> Iterator[None]:
    """A context in which ``copy.deepcopy`` copies no tensor and has a ``SavedTensor`` in its place."""
    with (
        replaced(Tensor, __deepcopy__=_apart),
        replaced(nn.Parameter, __deepcopy__=_apart),
        replaced(FakeTensor, __deepcopy__=_apart),
    ):
        yield


def _apart(tensor: Tensor, memo: dict[Any, Any]) -> Any:
    is_fake = isinstance(tensor, FakeTensor)
    if not is_fake and type(tensor) not in (Tensor, nn.Parameter):
        return _Uncopied(leaf=tensor)
    memo[id(tensor)] = saved = SavedTensor(
        shape=tuple(tensor.shape),
        dtype=tensor.dtype,
        on_card=isinstance(tensor, FakeTensor) and tensor.fake_device.type == NAME,
        storage=storage_id_of(tensor),
        content=None if is_fake else tensor.detach().clone(),
        requires_grad=tensor.requires_grad if isinstance(tensor, nn.Parameter) else None,
    )
    return saved
