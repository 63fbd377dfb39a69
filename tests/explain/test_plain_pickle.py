"""The reader of plain pickles: what it reads, what it refuses by name, and damage.

pytest tests/explain/test_plain_pickle.py
"""

import os
import pickle
import random
import struct
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.errors import InputError
from memfit.explain.plain_pickle import read_plain_pickle
from memfit.explain.snapshot import read_snapshot
from tests.explain.samples import leaking_snapshot

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda parts: st.lists(parts) | st.dictionaries(st.text() | st.integers(), parts) | st.tuples(parts, parts),
    max_leaves=20,
)


@given(PLAIN, st.integers(0, pickle.HIGHEST_PROTOCOL))
def test_plain_values_are_read_as_pickle_reads_them(value: Any, protocol: int) -> None:
    data = pickle.dumps(value, protocol)
    if protocol >= 3 or (b"_codecs" not in data and b"bytes" not in data):
        assert read_plain_pickle(data, "f") == value


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("touch /tmp/memfit-was-here",)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("value", [Evil(), OrderedDict(a=1), Path("x"), [1, {"a": Evil()}]])
def test_a_class_or_function_is_refused_by_its_name(value: Any, protocol: int) -> None:
    with pytest.raises(InputError) as caught:
        read_plain_pickle(pickle.dumps(value, protocol), "f.pickle")
    assert caught.value.why.startswith("the pickle asks for ")
    assert any(name in caught.value.why for name in ("system", "OrderedDict", "Path", "_reconstructor"))
    assert not Path("/tmp/memfit-was-here").exists()


BOMBS = {
    "a length past the end": b"\x80\x04\x8e" + struct.pack("<Q", 1 << 60),
    "a memo without a value": b"\x80\x04h\x05.",
    "nothing to take": b"\x80\x04.",
    "a mark as the value": b"(.",
    "a deep key": b"\x80\x04}" + b")" + b"\x85" * 100_000 + b"K\x01s.",
    "an extension": b"\x80\x04\x82\x01.",
    "a persistent id": b"P1\n.",
    "a long number": b"\x80\x04\x8b" + struct.pack("<i", 1 << 30),
    "a line without an end": b"I1234",
    "no pickle": b"\x80\x04hello world",
    "nothing after the protocol": b"\x80",
}


@pytest.mark.parametrize("data", BOMBS.values(), ids=BOMBS)
def test_damage_is_one_line(data: bytes) -> None:
    with pytest.raises(InputError):
        read_plain_pickle(data, "f")


def test_a_large_memo_index_takes_no_memory() -> None:
    assert read_plain_pickle(b"\x80\x04]r\xff\xff\xff\x7f.", "f") == []


def test_a_deep_value_is_read_and_freed() -> None:
    read_plain_pickle(b"\x80\x04" + b"]" * 50_000 + b"a" * 49_999 + b".", "f")


def test_a_thousand_damaged_snapshots_give_an_answer_or_one_line() -> None:
    undisturbed, source = pickle.dumps(leaking_snapshot(6), protocol=4), random.Random(0)
    refused = 0
    for _ in range(1000):
        data = bytearray(undisturbed)
        for _ in range(source.randint(1, 6)):
            at = source.randrange(len(data))
            kind = source.randrange(3)
            if kind == 0:
                data[at] = source.randrange(256)
            elif kind == 1:
                del data[at : at + source.randint(1, 50)]
            else:
                data[at:at] = source.randbytes(source.randint(1, 9))
        try:
            read_snapshot(Path("f"), bytes(data))
        except InputError:
            refused += 1
    assert refused > 300
