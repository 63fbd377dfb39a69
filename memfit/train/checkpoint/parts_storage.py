"""Storage of torch.distributed.checkpoint that holds no code: tensors in safetensors files, the rest as JSON.

    parts/rank-00000.safetensors    what rank 0 wrote: whole tensors and chunks of sharded ones
          parts.json                each tensor's dtype, shape and chunks, and the values that are not tensors

torch's own storage (``FileSystemWriter``) pickles its metadata and every value that is not a tensor, and unpickles both
to read them, which runs whatever code a changed file names.
"""

from __future__ import annotations

import dataclasses
import io
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, StorageReader, StorageWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from memfit.atomic_file import write_atomic
from memfit.torch_compat.checkpoint_storage import narrow_tensor_by_index, set_element
from memfit.train.checkpoint.parts_index import INDEX, StoredChunk, StoredValue, index_json
from memfit.train.checkpoint.state_codec import decode_alone, encode_alone
from memfit.train.checkpoint.tensor_file import TensorFile, open_tensor_file, write_tensors


class PartsWriter(StorageWriter):
    """Writes each rank's tensors into a file of its own, and on the coordinating rank the index of all of them."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing is kept between two checkpoints."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to set up."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Makes the folder."""
        self.path.mkdir(parents=True, exist_ok=True)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Gives each rank the name of its file."""
        return [dataclasses.replace(plan, storage_data=f"rank-{i:05d}.safetensors") for i, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes this rank's tensors from where they are; values that are not tensors go into the index."""
        file, tensors, results = plan.storage_data, {}, []
        for item in plan.items:
            content = planner.resolve_data(item)
            if isinstance(content, io.BytesIO):
                results.append(_result(item, StoredValue(text=content.getvalue().decode())))
            else:
                name = _name(item.index)
                tensors[name] = content.detach()
                results.append(_result(item, StoredChunk(file=file, name=name)))
        if tensors:
            write_tensors(self.path / file, tensors)
        return _done(results)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Writes the index, which refers to what every rank has written."""
        metadata.storage_data = {result.index: result.storage_data for rank in results for result in rank}
        write_atomic(self.path / INDEX, index_json(metadata))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Every path will do."""
        return True


class PartsReader(StorageReader):
    """Reads what ``PartsWriter`` wrote, by an index that was read and checked before."""

    def __init__(self, path: str | Path, index: Metadata) -> None:
        self.path, self._index = Path(path), index
        self._files: dict[str, TensorFile] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing is kept between two reads."""

    def read_metadata(self) -> Metadata:
        """The index."""
        return self._index

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:
        """Nothing to set up."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """As the planner made it."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """As the planner made them."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copies the chunks that this rank needs into its tensors.

        Raises:
            TornError: a file is not what the index says.
        """
        stored: Mapping[MetadataIndex, StoredChunk | StoredValue] = self._index.storage_data
        for item in plan.items:
            place = stored[item.storage_index]
            if isinstance(place, StoredValue):
                planner.load_bytes(item, io.BytesIO(place.text.encode()))
                continue
            if item.type == LoadItemType.BYTE_IO:
                raise ValueError(f"{item.storage_index.fqn} is a tensor in the checkpoint, and none in the job")
            self._read_tensor(item, place, planner)
        return _done(None)

    def _read_tensor(self, item: ReadItem, place: StoredChunk, planner: LoadPlanner) -> None:
        if place.file not in self._files:
            self._files[place.file] = open_tensor_file(self.path / place.file)
        entry = self._index.state_dict_metadata[item.storage_index.fqn]
        shape = next(list(c.sizes) for c in entry.chunks if c.offsets == item.storage_index.offset)  # type: ignore[union-attr]
        held = self._files[place.file].get(place.name, entry.properties.dtype, shape)  # type: ignore[union-attr]
        target = planner.resolve_tensor(item).detach()
        target.copy_(narrow_tensor_by_index(held, item.storage_offsets, item.lengths))
        planner.commit_tensor(item, target)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Every path will do."""
        return True


class JsonSavePlanner(DefaultSavePlanner):
    """Turns values that are not tensors into JSON rather than a pickle."""

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        """The bytes of a value; tensors as they are.

        Raises:
            InputError: the value would need code to be read back.
        """
        if write_item.type != WriteItemType.BYTE_IO:
            return object
        coded = encode_alone(object, "the state to save", write_item.index.fqn)
        return io.BytesIO(json.dumps(coded, allow_nan=False).encode())


class JsonLoadPlanner(DefaultLoadPlanner):
    """Reads values that are not tensors as ``JsonSavePlanner`` wrote them."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Puts a value into the state."""
        path = self.mappings[read_item.dest_index.fqn]
        set_element(self.original_state_dict, path, decode_alone(json.loads(value.getvalue())))


def _name(index: MetadataIndex) -> str:
    """``net.0.weight``, and of a chunk ``net.0.weight@16,0``: where it begins in the tensor."""
    return index.fqn + ("@" + ",".join(map(str, index.offset)) if index.offset and any(index.offset) else "")


def _result(item: WriteItem, stored: StoredChunk | StoredValue) -> WriteResult:
    return WriteResult(index=item.index, size_in_bytes=0, storage_data=stored)


def _done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future
