"""What functions keep of a forward on tensors without bytes.

python -m pytest tests/engine/test_function_caches.py
"""

from functools import cache, lru_cache, wraps

import pytest
import torch

from memfit.engine.function_caches import without_fake_results
from memfit.torch_compat import FakeTensor, FakeTensorMode

CALLS = []


@lru_cache(maxsize=4)
def positions(length):
    CALLS.append(length)
    return {"index": torch.arange(length)}


@cache
def size(length):
    CALLS.append(-length)
    return length


class Table:
    @staticmethod
    @wraps(positions)
    def positions(length):
        return _kept(length)


def decorated(function):
    kept = lru_cache(maxsize=None)(function)
    return lambda length: kept(length)


_kept = decorated(lambda length: [torch.arange(length)])


@pytest.mark.parametrize("tensor", [lambda: positions(3)["index"], lambda: _kept(3)[0], lambda: Table.positions(4)[0]])
def test_tensors_without_bytes_that_a_function_keeps_are_forgotten(tensor):
    with without_fake_results(), FakeTensorMode():
        assert isinstance(tensor(), FakeTensor)
    assert not isinstance(tensor(), FakeTensor)


def test_what_else_functions_keep_stays():
    CALLS.clear()
    with without_fake_results(), FakeTensorMode():
        size(3)
    assert size(3) == 3
    assert CALLS == [-3]
