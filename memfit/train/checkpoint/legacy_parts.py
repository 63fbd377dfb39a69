"""Parts that torch's own storage wrote (memfit before 0.2), read without running what a pickle names.

The metadata is unpickled with a stand-in for every class that it names: a stand-in keeps what it is called with and
does nothing. What comes out is checked, and turned into the classes of torch.distributed.checkpoint. Values and tensors
go through torch's restricted unpickler (``torch.load(weights_only=True)``).
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem

from memfit.torch_compat.checkpoint_storage import StorageInfo, set_element
from memfit.train.checkpoint.state_codec import dtype_named
from memfit.train.checkpoint.tensor_file import TornError

METADATA = ".metadata"
_MOST_BYTES = 1 << 30


class LegacyReader(FileSystemReader):
    """torch's reader, with metadata that was read and checked before."""

    def __init__(self, path: str | Path, metadata: Metadata) -> None:
        super().__init__(path)
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The metadata."""
        return self._metadata


class LegacyLoadPlanner(DefaultLoadPlanner):
    """torch's planner, whose values may hold no code."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Puts a value into the state.

        Raises:
            pickle.UnpicklingError: it is more than plain values and tensors.
        """
        path = self.mappings[read_item.dest_index.fqn]
        set_element(self.original_state_dict, path, torch.load(value, weights_only=True))


def read_legacy_metadata(folder: Path) -> Metadata:
    """Reads and checks ``.metadata`` of a folder of parts.

    Raises:
        TornError: it is missing, damaged, or names what no such file names.
    """
    try:
        path = folder / METADATA
        if path.stat().st_size > _MOST_BYTES:
            raise TornError(f"{METADATA} is larger than any that torch writes")
        with open(path, "rb") as file:
            return _metadata(_Unpickler(file).load())
    except OSError as error:
        raise TornError(f"{METADATA} cannot be read: {error.strerror}") from error
    except TornError:
        raise
    except Exception as error:
        raise TornError(f"{METADATA} is damaged: {type(error).__name__}: {error}") from error


class _StandIn:
    """Keeps the arguments and the state of an object of a class that is not there."""

    kind: str = ""

    arguments: tuple[Any, ...]
    state: Any

    def __new__(cls, *arguments: Any) -> _StandIn:
        made = super().__new__(cls)
        made.arguments, made.state = arguments, None
        return made

    def __setstate__(self, state: Any) -> None:
        self.state = state


_ALLOWED = {
    *(f"torch.distributed.checkpoint.metadata.{kind.__name__}" for kind in (
        Metadata, MetadataIndex, TensorStorageMetadata, BytesStorageMetadata, ChunkStorageMetadata, TensorProperties)),
    "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING",
    "torch.distributed.checkpoint.metadata.StorageMeta",
    "torch.distributed.checkpoint.filesystem._StorageInfo",
    "torch.Size",
    "torch.serialization._get_layout",
    "pathlib.PosixPath", "pathlib._local.PosixPath", "pathlib.Path",
    "collections.OrderedDict",
}  # fmt: skip


class _Unpickler(pickle.Unpickler):
    """Gives a stand-in for each name that torch's metadata has, and refuses every other."""

    def find_class(self, module: str, name: str) -> Any:
        kind = f"{module}.{name}"
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if kind not in _ALLOWED:
            raise TornError(f"{METADATA} names {kind}, which no checkpoint does; none of its code was run")
        return type(name, (_StandIn,), {"kind": name})

    def persistent_load(self, pid: Any) -> Any:
        raise TornError(f"{METADATA} refers to something outside of it")


def _metadata(read: Any) -> Metadata:
    state = _state(read, "Metadata")
    entries = {str(name): _entry(entry) for name, entry in state["state_dict_metadata"].items()}
    stored = {_index(index): _info(info) for index, info in state["storage_data"].items()}
    return Metadata(state_dict_metadata=entries, storage_data=stored)


def _entry(read: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    if isinstance(read, _StandIn) and read.kind == "BytesStorageMetadata":
        return BytesStorageMetadata()
    state = _state(read, "TensorStorageMetadata")
    properties = state["properties"]
    if not isinstance(properties, _StandIn) or properties.kind != "TensorProperties":
        raise ValueError("a tensor has no properties")
    dtype = properties.state[0]
    if not isinstance(dtype, torch.dtype):
        dtype = dtype_named(str(dtype))
    chunks = []
    for chunk in state["chunks"]:
        part = _state(chunk, "ChunkStorageMetadata")
        chunks.append(ChunkStorageMetadata(offsets=_size(part["offsets"]), sizes=_size(part["sizes"])))
    return TensorStorageMetadata(properties=TensorProperties(dtype=dtype), size=_size(state["size"]), chunks=chunks)


def _index(read: Any) -> MetadataIndex:
    state = _state(read, "MetadataIndex")
    offset = state.get("offset")
    return MetadataIndex(str(state["fqn"]), None if offset is None else _size(offset))


def _info(read: Any) -> StorageInfo:
    state = _state(read, "_StorageInfo")
    name, offset, length = str(state["relative_path"]), int(state["offset"]), int(state["length"])
    if Path(name).name != name or offset < 0 or length < 0:
        raise ValueError(f"{name!r} is not a file of parts")
    return StorageInfo(name, offset, length)


def _state(read: Any, kind: str) -> dict[str, Any]:
    if not isinstance(read, _StandIn) or read.kind != kind or not isinstance(read.state, dict):
        raise ValueError(f"no {kind}")
    return read.state


def _size(read: Any) -> torch.Size:
    values = read.arguments[0] if isinstance(read, _StandIn) and read.kind == "Size" else read
    if not isinstance(values, list | tuple) or any(type(value) is not int or value < 0 for value in values):
        raise ValueError("no size of a tensor")
    return torch.Size(values)
