"""``parts.json``: what a checkpoint's parts hold, as JSON; read strictly, since anybody can have written it.

{"memfit_parts": 1,
 "tensors": {"nets.net.0.weight": {"dtype": "float32", "shape": [6, 4], "chunks": [
     {"offsets": [0, 0], "sizes": [3, 4], "file": "rank-00000.safetensors", "name": "nets.net.0.weight"}, …]}},
 "values": {"optimizers.adam.param_groups.…": …}}
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from memfit.train.checkpoint.state_codec import dtype_named
from memfit.train.checkpoint.tensor_file import TornError

INDEX = "parts.json"
VERSION = 1
_FILE = re.compile(r"rank-[0-9]{5,9}\.safetensors")


@dataclass(frozen=True, kw_only=True)
class StoredChunk:
    """Where a tensor, or a chunk of one, is."""

    file: str
    """The file's name in the folder of the parts."""
    name: str
    """The tensor's name in that file."""


@dataclass(frozen=True, kw_only=True)
class StoredValue:
    """A value that is not a tensor."""

    text: str
    """JSON, as ``state_codec.encode_alone`` gives it."""


def index_json(metadata: Metadata) -> str:
    """The text of the index.

    Args:
        metadata: of the whole checkpoint, with a ``StoredChunk`` or ``StoredValue`` for each item in ``storage_data``.
    """
    stored: Mapping[MetadataIndex, StoredChunk | StoredValue] = metadata.storage_data
    tensors, values = {}, {}
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, BytesStorageMetadata):
            value = stored[MetadataIndex(name)]
            assert isinstance(value, StoredValue)
            values[name] = json.loads(value.text)
            continue
        chunks = []
        for chunk in entry.chunks:
            place = stored[MetadataIndex(name, chunk.offsets)]
            assert isinstance(place, StoredChunk)
            where = {"offsets": list(chunk.offsets), "sizes": list(chunk.sizes)}
            chunks.append({**where, "file": place.file, "name": place.name})
        dtype = str(entry.properties.dtype).removeprefix("torch.")
        tensors[name] = {"dtype": dtype, "shape": list(entry.size), "chunks": chunks}
    return json.dumps({"memfit_parts": VERSION, "tensors": tensors, "values": values}, allow_nan=False)


def read_index(folder: Path) -> Metadata:
    """Reads and checks the index of a folder of parts.

    Raises:
        TornError: it is missing, damaged, or says what no checkpoint says; its words say how.
    """
    try:
        content = json.loads((folder / INDEX).read_bytes())
        if not isinstance(content, dict) or content.get("memfit_parts") != VERSION:
            raise TornError(f"{INDEX} is not of version {VERSION}")
        entries: dict[str, Any] = {}
        stored: dict[MetadataIndex, StoredChunk | StoredValue] = {}
        for name, tensor in content["tensors"].items():
            entries[name], places = _tensor(name, tensor)
            stored |= places
        for name, value in content["values"].items():
            entries[name] = BytesStorageMetadata()
            stored[MetadataIndex(name)] = StoredValue(text=json.dumps(value))
    except OSError as error:
        raise TornError(f"{INDEX} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise TornError(f"{INDEX} is damaged: {type(error).__name__}: {error}") from error
    return Metadata(state_dict_metadata=entries, storage_data=stored)


def _tensor(name: str, entry: Mapping[str, Any]) -> tuple[TensorStorageMetadata, dict[MetadataIndex, StoredChunk]]:
    shape, dtype = _sizes(entry["shape"]), dtype_named(entry["dtype"])
    chunks, places = [], {}
    for part in entry["chunks"]:
        offsets, sizes = _sizes(part["offsets"]), _sizes(part["sizes"])
        ends = [offset + size for offset, size in zip(offsets, sizes, strict=True)]
        if len(ends) != len(shape) or any(end > most for end, most in zip(ends, shape, strict=True)):
            raise ValueError(f"a chunk of {name} is outside of its tensor")
        if not _FILE.fullmatch(part["file"]):
            raise ValueError(f"{part['file']!r} is not a file of parts")
        chunks.append(ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes)))
        places[MetadataIndex(name, offsets)] = StoredChunk(file=part["file"], name=str(part["name"]))
    if len(places) != len(chunks) or sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(shape):
        raise ValueError(f"the chunks of {name} are not the whole tensor")
    properties = TensorProperties(dtype=dtype)
    return TensorStorageMetadata(properties=properties, size=torch.Size(shape), chunks=chunks), places


def _sizes(values: Any) -> list[int]:
    if not isinstance(values, list) or any(type(value) is not int or not 0 <= value < 2**62 for value in values):
        raise ValueError(f"{values!r:.60} is not a list of sizes")
    return values
