"""Values of every kind go through JSON and a safetensors file and come back the same, types and bytes.

python -m pytest tests/train/test_state_codec.py
"""

import collections
import json
import math

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from memfit.errors import InputError
from memfit.train.checkpoint.state_codec import decode, encode
from memfit.train.checkpoint.tensor_file import (
    BLOCK,
    TornError,
    header,
    in_file_order,
    open_tensors,
    pieces,
    write_tensors,
)


def through(value, tmp_path):
    """The value after JSON and a file; a tensor with the strides it had."""
    coded, tensors = encode(value, "test")
    path = tmp_path / "t.safetensors"
    sums = write_tensors(path, tensors)
    file = open_tensors(path, path.stat().st_size, sums)

    def tensor(spec):
        dtype = getattr(torch, spec["dtype"]) if "dtype" in spec else None
        result = file.get(spec["$tensor"], dtype, spec.get("shape"))
        if "stride" in spec:
            return torch.empty_strided(result.shape, spec["stride"], dtype=result.dtype).copy_(result)
        return result.clone()

    return decode(json.loads(json.dumps(coded, allow_nan=False)), tensor)


def same(a, b):
    assert type(a) is type(b), (a, b)
    if isinstance(a, torch.Tensor):
        assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
        if a.numel():
            assert torch.equal(
                a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8)
            )
    elif isinstance(a, np.ndarray | np.generic):
        assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
    elif isinstance(a, dict):
        assert list(a) == list(b)
        for key in a:
            same(a[key], b[key])
    elif isinstance(a, list | tuple | collections.deque):
        assert len(a) == len(b)
        for item, other in zip(a, b, strict=True):
            same(item, other)
    elif isinstance(a, float):
        assert math.isnan(a) == math.isnan(b)
        assert math.isnan(a) or (a, math.copysign(1, a)) == (b, math.copysign(1, b))
    else:
        assert a == b


DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.complex64, torch.complex128, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16,
    torch.uint32, torch.uint64, torch.bool, torch.complex32, torch.float8_e4m3fnuz,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_every_dtype(tmp_path, dtype):
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (24, 16), dtype=torch.uint8)
    value = raw.view(dtype)
    same(
        {"a": value, "odd": value[:5, :1].clone(), "scalar": value[0, 0].clone(), "none": value[:0]},
        through({"a": value, "odd": value[:5, :1].clone(), "scalar": value[0, 0].clone(), "none": value[:0]}, tmp_path),
    )


VALUES = {
    "numbers": [0, 1, True, False, None, 2**80, -1, 0.1, 1.0, -0.0, math.inf, -math.inf, math.nan, 1e-320, 1 + 2j],
    "text": ["", "$tensor", "ä\n", b"\x00\xff"],
    "nested": {"a": (1, (2.0, [3])), "b": [(), {}, []]},
    "keys": {1: "one", (2, "x"): "two", 0.5: "half", None: "none"},
    "a dict like a code": {"$tensor": "x", "a": 1},
    "dicts": [collections.OrderedDict(b=1, a=2), collections.Counter({30: 1, 80: 2})],
    "lists": [{1, 2}, frozenset({3}), collections.deque([1, 2]), torch.Size([2, 3])],
    "torch": [torch.float16, torch.device("cpu")],
    "numpy": [np.float64(0.1), np.int32(3), np.bool_(True), np.arange(6, dtype=np.uint32).reshape(2, 3), np.zeros(())],
    "tensors": [
        torch.tensor(3.0),
        torch.tensor(7),
        torch.ones(2, 3).t(),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    ],
    "random states": [np.random.default_rng(0).bit_generator.state, np.random.get_state(), torch.get_rng_state()],
}


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_values_of_every_kind(tmp_path, value):
    same(value, through(value, tmp_path))


def test_tensors_that_share_memory_are_kept_once_and_parameters_as_tensors(tmp_path):
    a = torch.randn(8)
    _, tensors = encode({"x": a, "y": [a, nn.Parameter(a)], "part": a[2:], "expanded": a[:1].expand(5)}, "test")
    assert list(tensors) == ["x", "part", "expanded"]
    result = through(
        {"expanded": a[:1].expand(5), "every other": a[::2], "conjugate": torch.randn(3, dtype=torch.complex64).conj()},
        tmp_path,
    )
    assert torch.equal(result["expanded"], a[:1].expand(5))
    assert torch.equal(result["every other"], a[::2])


REFUSED = {
    "a function": {"a": [print]},
    "an object": {"a": [object()]},
    "a named tuple": {"a": [collections.namedtuple("Point", "x")(1)]},
    "objects in an array": {"a": [np.array([object()])]},
    "a sparse tensor": {"a": [torch.ones(2, 2).to_sparse()]},
    "a meta tensor": {"a": [torch.ones(2, device="meta")]},
}


@pytest.mark.parametrize("value", REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_kept_is_refused_by_name(value):
    with pytest.raises(InputError, match=r"the state to save: a\.0: .*; (keep|give) "):
        encode(value, "the state to save")


def test_others_read_the_file(tmp_path):
    tensors = {"small": torch.arange(3, dtype=torch.int8), "w": torch.randn(300, 1000), "b": torch.randn(7).bfloat16()}
    write_tensors(tmp_path / "t", tensors, {"format": "pt"})
    result = load_file(tmp_path / "t")
    assert set(result) == set(tensors)
    assert all(torch.equal(result[name], tensors[name]) for name in tensors)


def test_large_tensors_are_written_from_where_they_lie_and_strided_ones_in_small_pieces():
    large, strided = torch.randn(3 << 20), torch.randn(1500, 1500).t()
    tensors = {"large": large, "strided": strided}
    begin, end = large.data_ptr(), large.data_ptr() + large.nbytes
    at = [np.frombuffer(piece, np.uint8).__array_interface__["data"][0] for piece in pieces(tensors, header(tensors))]
    inside = sum(len(p) for p, a in zip(pieces(tensors, header(tensors)), at, strict=True) if begin <= a < end)
    assert inside == large.nbytes
    assert (
        max(len(p) for p, a in zip(pieces(tensors, header(tensors)), at, strict=True) if not begin <= a < end) < 3 << 20
    )
    content = b"".join(pieces(tensors, b""))
    assert content == b"".join(t.contiguous().numpy().tobytes() for _, t in in_file_order(tensors))


@pytest.mark.parametrize("at", [3, 40, 1000, BLOCK + 5, -1])
def test_a_flipped_bit_anywhere_and_a_file_cut_or_grown_are_found(tmp_path, at):
    path = tmp_path / "t"
    sums = write_tensors(path, {"a": torch.randn(1_200_000)})
    content = bytearray(path.read_bytes())
    nbytes = len(content)
    assert len(sums) == 2
    content[at] ^= 1
    path.write_bytes(content)
    begin, end = (0, BLOCK) if 0 <= at < BLOCK else (BLOCK, nbytes)
    with pytest.raises(TornError, match=f"was changed: the checksum of its bytes {begin} to {end} is another"):
        open_tensors(path, nbytes, sums)
    content[at] ^= 1
    path.write_bytes(content)
    open_tensors(path, nbytes, sums)
    for other in (content[:at], content + b"\0"):
        path.write_bytes(other)
        with pytest.raises(TornError, match=f"has {len(other)} bytes, and {nbytes} were written"):
            open_tensors(path, nbytes, sums)
