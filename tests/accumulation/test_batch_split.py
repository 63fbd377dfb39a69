"""halves: batches of every nesting are cut along their samples, and samples that are not stacked stay whole.

pytest tests/accumulation/test_batch_split.py
"""

from collections import UserDict, namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import zeros

from memfit.accumulation.batch_split import halves, sample_count

Pair = namedtuple("Pair", ("x", "names"))


@dataclass
class Record:
    x: torch.Tensor
    names: list[str]


def form(value: Any) -> Any:
    """The shapes of tensors and arrays, and everything else as it is."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return tuple(value.shape)
    if isinstance(value, dict | UserDict):
        return {key: form(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [form(each) for each in value]
    return [form(value.x), value.names] if isinstance(value, Record) else value


COLUMNS = {
    "a tensor": (zeros(5), (3,), (2,)),
    "texts and a constant": (
        {"ids": zeros(4, 9), "names": ["a", "b", "c", "d"], "k": 3},
        {"ids": (2, 9), "names": ["a", "b"], "k": 3},
        {"ids": (2, 9), "names": ["c", "d"], "k": 3},
    ),
    "a number for all": ([zeros(4, 2), zeros(4), zeros(())], [(2, 2), (2,), ()], [(2, 2), (2,), ()]),
    "as many dicts as samples": (({"x": zeros(2, 5)}, {"y": zeros(2)}), *2 * ([{"x": (1, 5)}, {"y": (1,)}],)),
    "as many columns as samples": ([[zeros(2, 5), zeros(2, 7)], [zeros(2)]], *2 * ([[(1, 5), (1, 7)], [(1,)]],)),
    "an array beside a tensor": ((zeros(4, 3), np.zeros(4)), *2 * ([(2, 3), (2,)],)),
    "arrays": ({"x": np.zeros((4, 3)), "y": np.zeros(4)}, *2 * ({"x": (2, 3), "y": (2,)},)),
    "a table for all": ([zeros(8, 3), zeros(8, 2), zeros(10, 4)], *2 * ([(4, 3), (4, 2), (10, 4)],)),
    "a named tuple": (Pair(zeros(2, 2), ["a", "b"]), [(1, 2), ["a"]], [(1, 2), ["b"]]),
    "a record": (Record(zeros(2, 2), ["a", "b"]), [(1, 2), ["a"]], [(1, 2), ["b"]]),
    "a mapping": (
        UserDict(x=zeros(2, 2), names=["a", "b"]), {"x": (1, 2), "names": ["a"]}, {"x": (1, 2), "names": ["b"]}
    ),
    "a range": ({"x": zeros(2, 2), "at": range(2)}, {"x": (1, 2), "at": range(1)}, {"x": (1, 2), "at": range(1, 2)}),
}  # fmt: skip
SAMPLES = {
    "images of several sizes with boxes": (
        ([zeros(3, 8, 8), zeros(3, 9, 9)], [{"boxes": zeros(4, 4)}, {"boxes": zeros(1, 4)}]),
        [[(3, 8, 8)], [{"boxes": (4, 4)}]],
        [[(3, 9, 9)], [{"boxes": (1, 4)}]],
    ),
    "dicts of samples": (
        [{"image": zeros(3, 8, 8), "boxes": zeros(4, 4)}, {"image": zeros(3, 9, 9), "boxes": zeros(1, 4)}],
        [{"image": (3, 8, 8), "boxes": (4, 4)}],
        [{"image": (3, 9, 9), "boxes": (1, 4)}],
    ),
    "boxes beside stacked images": (
        (zeros(2, 3, 8, 8), [{"boxes": zeros(4, 4)}, {"boxes": zeros(1, 4)}]),
        [(1, 3, 8, 8), [{"boxes": (4, 4)}]],
        [(1, 3, 8, 8), [{"boxes": (1, 4)}]],
    ),
    "images of one size with labels": (
        ([zeros(3, 8, 8), zeros(3, 8, 8)], [1, 0]), [[(3, 8, 8)], [1]], [[(3, 8, 8)], [0]]
    ),
    "waves of several lengths": ([zeros(5), zeros(3), zeros(5)], [(5,), (3,)], [(5,)]),
}  # fmt: skip


@pytest.mark.parametrize("name", {**COLUMNS, **SAMPLES})
def test_both_halves_of(name: str) -> None:
    batch, first, second = {**COLUMNS, **SAMPLES}[name]
    parts = halves(batch)
    assert parts is not None
    assert [form(part) for part in parts] == [first, second]
    assert [type(part) for part in parts] == 2 * [type(batch)] or name in SAMPLES
    assert sample_count(parts[0]) + sample_count(parts[1]) == sample_count(batch)


def leaves(batch: Any) -> list[Any]:
    """Halves of halves, until nothing is cut."""
    parts = halves(batch)
    return [form(batch)] if parts is None else [leaf for part in parts for leaf in leaves(part)]


def test_a_sample_that_is_not_stacked_is_never_cut() -> None:
    assert leaves([zeros(5), zeros(3), zeros(2), zeros(9)]) == [[(5,)], [(3,)], [(2,)], [(9,)]]
    images, boxes = [zeros(3, 8, 8), zeros(3, 9, 9), zeros(3, 8, 9)], [zeros(4, 4), zeros(1, 4), zeros(2, 4)]
    assert leaves((images, boxes)) == [[[(3, 8, 8)], [(4, 4)]], [[(3, 9, 9)], [(1, 4)]], [[(3, 8, 9)], [(2, 4)]]]


@pytest.mark.parametrize(
    "batch",
    [zeros(1, 3), {}, 3, torch.eye(4).to_sparse(), torch.nn.utils.rnn.pack_sequence([zeros(3), zeros(2)]),
     torch.nested.nested_tensor([zeros(4, 2), zeros(3, 2)], layout=torch.jagged)],
)  # fmt: skip
def test_what_cannot_be_cut_has_no_halves(batch: Any) -> None:
    assert halves(batch) is None
