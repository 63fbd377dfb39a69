"""Offload: the tensors that a forward saves for its backward wait on the host.

torch's own ``save_on_cpu`` copies every saved tensor by itself, including the weights. Here weights stay on the device,
and a storage that several operators save is copied once in each direction. From a card, the copies go through pinned
memory on the stream that computes, so they take time on that stream and need no synchronisation. Not done: copies on a
stream of their own, prefetched during computation.
"""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from memfit.torch_compat.attributes import local_storage_id, local_tensor, storage_id, version_of

LEAST = 1 << 16
"""Storages of fewer bytes stay on the device: copying them takes longer than it is worth."""


class _Copy:
    """A storage's elements on the host, and on the device while tensors of it are in use again."""

    def __init__(self, tensor: Tensor) -> None:
        contiguous = _whole(tensor)
        self._device = tensor.device
        pinned = tensor.device.type == "cuda"
        self._host = torch.empty(contiguous.shape, dtype=contiguous.dtype, device="cpu", pin_memory=pinned)
        self._host.copy_(contiguous, non_blocking=True)
        self._there: Tensor | None = None
        self.tensors = self._left = 0

    def back(self) -> Tensor:
        """Returns the elements on the device; they are freed with the last tensor that uses them."""
        if self._there is None:
            self._there, self._left = self._host.to(self._device, non_blocking=True), self.tensors
        there = self._there
        self._left -= 1
        if self._left <= 0:
            self._there = None
        return there


class _OffloadedTensor:
    """Stands for a tensor whose bytes are on the host; of a DTensor, those of this rank's part."""

    def __init__(self, copy: _Copy, tensor: Tensor) -> None:
        copy.tensors += 1
        local = local_tensor(tensor)
        self._copy, self._shape, self._stride = copy, local.shape, local.stride()
        self._offset = local.storage_offset()
        self._of = (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None
        self._whole = (tensor.shape, tensor.stride())

    def back(self) -> Tensor:
        local = self._copy.back().as_strided(self._shape, self._stride, self._offset)
        if self._of is None:
            return local
        (mesh, placements), (shape, stride) = self._of, self._whole
        with torch.no_grad():
            return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


def saved_tensors_on_host(module: nn.Module) -> AbstractContextManager[None]:
    """Context in which the tensors that operators save for the backward move to the host; weights and buffers of the
    module stay.
    """
    stays = {local_storage_id(t) for t in (*module.parameters(), *module.buffers())}
    known: dict[tuple[int, int, int, torch.dtype], tuple[weakref.ref[torch.UntypedStorage], _Copy]] = {}

    def pack(tensor: Tensor) -> Tensor | _OffloadedTensor:
        local = local_tensor(tensor)
        if local.layout is not torch.strided or local.untyped_storage().nbytes() < LEAST:
            return tensor
        storage = local.untyped_storage()
        if storage_id(storage) in stays:
            return tensor
        key = (storage_id(storage), version_of(tensor), version_of(local), local.dtype)
        ref, copy = known.get(key, (None, None))
        if copy is None or ref is None or ref() is not storage:  # another storage may have a freed one's id
            copy = _Copy(local)
            known[key] = (weakref.ref(storage), copy)
        return _OffloadedTensor(copy, tensor)

    def unpack(packed: Tensor | _OffloadedTensor) -> Tensor:
        return packed.back() if isinstance(packed, _OffloadedTensor) else packed

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def _whole(tensor: Tensor) -> Tensor:
    """Returns all elements of a tensor's storage as one tensor."""
    return tensor.detach().as_strided((tensor.untyped_storage().nbytes() // tensor.itemsize,), (1,), 0)
