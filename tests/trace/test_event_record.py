"""The record of events, by hand: no trace is needed to see how storages live.

python -m pytest tests/trace/test_event_record.py
"""

import torch

from memfit.events import ALLOCATE, FREE
from memfit.trace.event_record import EventRecord


def record_in_forward():
    record = EventRecord("cpu")
    record.op_rows.append(("aten.mm.default", 0, "forward", 0, 0))
    return record


def test_what_the_forward_left_alive_becomes_activations_unless_it_has_a_category():
    record = record_in_forward()
    named, left = torch.empty(3), torch.empty(5)
    assert record.see(named, 0)
    assert record.see(left, 0)
    record.categorise(named, "inputs")
    record.mark("backward")
    assert record.category == ["inputs", "activations"]


def test_a_storage_lives_from_its_first_tensor_to_its_last():
    record = record_in_forward()
    tensor = torch.empty(6)
    assert record.see(tensor, 0)
    view = tensor[2:]
    assert not record.see(view, 0)
    del tensor
    assert record.kind == [ALLOCATE]
    del view
    assert record.kind == [ALLOCATE, FREE]
    assert record.storage == [0, 0]


def test_a_storage_of_another_size_is_another_storage_of_the_same_category():
    record = record_in_forward()
    tensor = torch.empty(4)
    record.see(tensor, 0)
    record.categorise(tensor, "parameters")
    record.resized(tensor.untyped_storage(), 16)
    assert record.kind == [ALLOCATE]
    record.resized(tensor.untyped_storage(), 64)
    assert (record.kind, record.storage) == ([ALLOCATE, FREE, ALLOCATE], [0, 0, 1])
    assert (record.nbytes, record.category) == ([16, 64], ["parameters", "parameters"])
    del tensor
    assert (record.kind[-1], record.storage[-1]) == (FREE, 1)
