"""State as JSON and tensors, and back, with every type kept: what a checkpoint holds instead of a pickle.

JSON has no tensors, tuples, infinities, nor keys that are numbers. Each becomes an object of one key that begins with
``$``; a tensor becomes the name under which its bytes are kept. What is none of the kinds below is refused: to read it
back, code would have to run.
"""

from __future__ import annotations

import base64
import collections
import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from memfit.errors import InputError
from memfit.loading import module_in_words
from memfit.torch_compat import is_traceable_wrapper_subclass
from memfit.torch_compat.attributes import storage_id_of

KEPT = "numbers, text, bytes, None, lists, tuples, dicts, sets, tensors and numpy arrays"
_DICTS: dict[str, Any] = {"dict": dict, "ordered": collections.OrderedDict, "counter": collections.Counter}
_LISTS: dict[str, Any] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "deque": collections.deque,
    "size": torch.Size,
}


def encode(value: Any, where: str, path: str = "") -> tuple[Any, dict[str, Tensor]]:
    """(JSON, tensors by name). Tensors are not copied, and one that comes twice is kept once.

    Args:
        where: what the value is, for messages; a tensor's name is the path to it, as ``nets.unet.0.weight``.
        path: where the value itself is, where it is a part of something.

    Raises:
        InputError: something in it cannot be kept; says where.
    """
    encoder = _Encoder(where)
    try:
        return encoder.encode(value, path), encoder.tensors
    except RecursionError:
        why = f"{path or 'a part of it'} holds itself, or is nested too deeply"
        raise InputError(where, why, "leave that part out of the state") from None


def decode(coded: Any, tensor: Callable[[Mapping[str, Any]], Tensor]) -> Any:
    """The value again.

    Args:
        tensor: gives a new tensor for a ``{"$tensor": name, …}``; the optional keys ``dtype`` and ``shape`` (kept as
            plain bytes), ``stride`` (not row-major) and ``device`` (not the CPU) say how it was.
    """
    if isinstance(coded, list):
        return [decode(item, tensor) for item in coded]
    if not isinstance(coded, dict):
        return coded
    kind = next(iter(coded), "")
    if not kind.startswith("$"):
        return {key: decode(item, tensor) for key, item in coded.items()}
    content = coded[kind]
    match kind.removeprefix("$"):
        case "tensor":
            return tensor(coded)
        case "float":
            return float(content)
        case "complex":
            return complex(*(decode(part, tensor) for part in content))
        case "bytes":
            return base64.b64decode(content)
        case "dtype":
            return dtype_named(content)
        case "device":
            return torch.device(content)
        case "array":
            return tensor({"$tensor": content}).numpy().view(_plain_dtype(coded["numpy"])).reshape(coded["shape"])
        case "scalar":
            return np.frombuffer(base64.b64decode(content), _plain_dtype(coded["numpy"]))[0]
        case name if name in _DICTS:
            pairs = ((decode(key, tensor), decode(item, tensor)) for key, item in content)
            return _DICTS[name](dict(pairs))
        case name if name in _LISTS:
            return _LISTS[name](decode(item, tensor) for item in content)
    raise ValueError(f"unknown kind {kind}")


def encode_alone(value: Any, where: str, path: str = "") -> dict[str, Any]:
    """A value as one JSON object, with the bytes of its tensors in it: for values that are small.

    Raises:
        InputError: something in it cannot be kept; says where.
    """
    coded, tensors = encode(value, where, path)
    if not tensors:
        return {"value": coded}
    return {"value": coded, "tensors": {name: _tensor_json(tensor) for name, tensor in tensors.items()}}


def decode_alone(coded: Mapping[str, Any]) -> Any:
    """The value of ``encode_alone`` again.

    Raises:
        ValueError, KeyError, TypeError: it is not what ``encode_alone`` gives.
    """
    tensors = coded.get("tensors", {})
    return decode(coded["value"], lambda spec: _tensor_of(tensors[spec["$tensor"]], spec))


def dtype_named(name: str) -> torch.dtype:
    """``torch.float32`` of "float32".

    Raises:
        ValueError: torch has no dtype of this name.
    """
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r:.40} is not a dtype")
    return dtype


def _tensor_json(tensor: Tensor) -> dict[str, Any]:
    plain = tensor.detach().cpu().contiguous()
    content = plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
    dtype = str(plain.dtype).removeprefix("torch.")
    return {"dtype": dtype, "shape": list(plain.shape), "bytes": base64.b64encode(content).decode()}


def _tensor_of(kept: Mapping[str, Any], spec: Mapping[str, Any]) -> Tensor:
    dtype, shape = dtype_named(kept["dtype"]), kept["shape"]
    content = bytearray(base64.b64decode(kept["bytes"]))
    plain = torch.frombuffer(content, dtype=dtype).reshape(shape) if content else torch.empty(shape, dtype=dtype)
    if "stride" not in spec:
        return plain
    return torch.empty_strided(plain.shape, spec["stride"], dtype=dtype).copy_(plain)


def _plain_dtype(name: Any) -> np.dtype[Any]:
    """A dtype of numbers: none of objects, which would be addresses, nor of records."""
    dtype = np.dtype(name)
    if dtype.kind not in "biufc":
        raise ValueError(f"{name!r:.40} is not a dtype of numbers")
    return dtype


class _Encoder:
    def __init__(self, what: str) -> None:
        self._what = what
        self.tensors: dict[str, Tensor] = {}
        self._names: dict[Any, str] = {}

    def encode(self, value: Any, path: str) -> Any:
        kind = type(value)
        if value is None or kind in (bool, int, str):
            return value
        if kind is float:
            return value if math.isfinite(value) else {"$float": repr(value)}
        if isinstance(value, Tensor):
            return self._tensor(value, path)
        if kind is dict and all(type(key) is str and not key.startswith("$") for key in value):
            return {key: self.encode(item, _join(path, key)) for key, item in value.items()}
        if kind is list:
            return [self.encode(item, _join(path, index)) for index, item in enumerate(value)]
        for name, such in _DICTS.items():
            if kind is such:
                pairs = [
                    [self.encode(key, _join(path, "key")), self.encode(item, _join(path, key))]
                    for key, item in value.items()
                ]
                return {f"${name}": pairs}
        for name, such in _LISTS.items():
            if kind is such:
                return {f"${name}": [self.encode(item, _join(path, index)) for index, item in enumerate(value)]}
        return self._rest(value, path)

    def _rest(self, value: Any, path: str) -> Any:
        kind = type(value)
        if kind is complex:
            return {"$complex": [self.encode(part, path) for part in (value.real, value.imag)]}
        if kind is bytes:
            return {"$bytes": base64.b64encode(value).decode()}
        if kind is torch.dtype:
            return {"$dtype": str(value).removeprefix("torch.")}
        if kind is torch.device:
            return {"$device": str(value)}
        if isinstance(value, np.generic) and value.dtype.kind in "biufc":
            return {"$scalar": base64.b64encode(value.tobytes()).decode(), "numpy": value.dtype.str}
        if kind is np.ndarray and value.dtype.kind in "biufc":
            flat = torch.from_numpy(np.ascontiguousarray(value).reshape(-1).view(np.uint8).copy())
            return {"$array": self._name(flat, path), "numpy": value.dtype.str, "shape": list(value.shape)}
        write = f"keep {KEPT}, or leave it out of the state and make it anew"
        raise InputError(f"{self._what}: {path}", f"a {module_in_words(kind.__module__)}.{kind.__qualname__}", write)

    def _tensor(self, value: Tensor, path: str) -> dict[str, Any]:
        plain = type(value) in (Tensor, torch.nn.Parameter)
        strided = value.layout is torch.strided and not value.is_quantized and not value.is_meta
        if not strided or (not plain and is_traceable_wrapper_subclass(value)):
            kind = "quantized" if value.is_quantized else "meta" if value.is_meta else str(value.layout)
            what = f"a {type(value).__name__} ({kind.removeprefix('torch.')}), not a plain tensor with its own bytes"
            write = "give its plain tensors (indices and values, say) by name instead"
            raise InputError(f"{self._what}: {path}", what, write)
        if value.requires_grad or type(value) is not Tensor:
            value = value.detach().as_subclass(Tensor)
        if value.is_conj() or value.is_neg():
            value = value.resolve_conj().resolve_neg()
        coded: dict[str, Any] = {"$tensor": self._name(value, path)}
        if value.dtype not in DTYPES:
            coded |= {"dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}
        if not value.is_contiguous() and is_dense(value):
            coded["stride"] = list(value.stride())
        if value.device.type != "cpu":
            coded["device"] = value.device.type
        return coded

    def _name(self, value: Tensor, path: str) -> str:
        same = (storage_id_of(value), value.storage_offset(), value.shape, value.stride(), value.dtype)
        if same not in self._names:
            tries = (path if not i else f"{path}#{i}" for i in itertools.count())
            self._names[same] = next(name for name in tries if name not in self.tensors)
            self.tensors[self._names[same]] = value
        return self._names[same]


def _join(path: str, key: Any) -> str:
    return f"{path}.{key}" if path else str(key)


DTYPES = {
    torch.float64: "F64", torch.int64: "I64", torch.uint64: "U64", torch.complex64: "C64",
    torch.float32: "F32", torch.int32: "I32", torch.uint32: "U32",
    torch.float16: "F16", torch.bfloat16: "BF16", torch.int16: "I16", torch.uint16: "U16",
    torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
"""What safetensors calls them. Others are kept as their bytes."""


def is_dense(value: Tensor) -> bool:
    """Whether the elements fill one range of memory, in any order of dimensions (``channels_last`` does)."""
    expected = 1
    for stride, size in sorted((st, si) for st, si in zip(value.stride(), value.shape, strict=True) if si > 1):
        if stride != expected:
            return False
        expected *= size
    return True
