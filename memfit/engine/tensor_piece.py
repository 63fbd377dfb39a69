"""A tensor of which a rank holds a run of elements, as torch.distributed.checkpoint writes and reads it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from memfit.engine.zero_partition import boxes
from memfit.torch_compat.attributes import make_wrapper_subclass


class Piece(Tensor):
    """A whole tensor of which a run of elements is here, as torch.distributed.checkpoint asks for it.

    It has the shape of the whole and no other use: operators on it raise (torch's own interface, ``_Checkpointable``,
    takes tensors alone).
    """

    held: Tensor
    """The run; written to when it is read."""
    start: int

    @staticmethod
    def __new__(cls, values: Tensor, start: int, shape: tuple[int, ...]) -> Piece:
        piece = make_wrapper_subclass(cls, shape, dtype=values.dtype, device=values.device)
        piece.held, piece.start = values, start
        return piece

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any) -> Any:  # type: ignore[override]
        raise TypeError(f"{func} on a tensor of which a part is here")

    def _chunks(self) -> Iterator[tuple[ChunkStorageMetadata, Tensor]]:
        at = 0
        for offsets, sizes in boxes(tuple(self.shape), self.start, self.start + self.held.numel()):
            box = torch.Size(sizes)
            yield (
                ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=box),
                self.held[at : at + box.numel()].view(box),
            )
            at += box.numel()

    def __create_write_items__(self, fqn: str, piece: object) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk,
                    properties=TensorProperties.create_from_tensor(self.held),
                    size=self.shape,
                ),
            )
            for chunk, _ in self._chunks()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [chunk for chunk, _ in self._chunks()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return next(box for chunk, box in self._chunks() if chunk.offsets == index.offset)
