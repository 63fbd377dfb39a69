"""Copies of a worker's batches to a card: on a stream of their own, at most two batches, pinned memory held until then.

python -m pytest tests/train/test_device_copies.py
"""

import contextlib
import weakref

import pytest
import torch

from memfit.train.data.device_copies import DeviceCopies


class MadeUpCuda:
    """Streams and events that write down what is asked of them, in order."""

    def __init__(self):
        self.calls = []
        self.now = "compute"

    def current_stream(self, device):
        return MadeUpStream(self, "compute")

    def Stream(self, device):  # noqa: N802
        return MadeUpStream(self, "copies")

    @contextlib.contextmanager
    def stream(self, stream):
        self.now, before = stream.name, self.now
        yield
        self.now = before


class MadeUpStream:
    def __init__(self, cuda, name):
        self.cuda, self.name = cuda, name

    def wait_stream(self, other):
        self.cuda.calls.append(f"{self.name} waits for {other.name}")

    def record_event(self):
        number = sum(call.startswith("event") for call in self.cuda.calls)
        self.cuda.calls.append(f"event {number} on {self.name}")
        return MadeUpEvent(self.cuda, number)


class MadeUpEvent:
    def __init__(self, cuda, number):
        self.cuda, self.number = cuda, number

    def synchronize(self):
        self.cuda.calls.append(f"host waits for event {self.number}")


class Batch:
    """Moves as a whole, and says on which stream."""

    def __init__(self, cuda, name):
        self.cuda, self.name = cuda, name

    def to(self, device):
        self.cuda.calls.append(f"{self.name} copied on {self.cuda.now}")
        return torch.zeros(1)


@pytest.mark.parametrize("beside", [True, False])
def test_with_made_up_streams_the_host_is_one_batch_ahead_and_holds_what_is_copied(beside):
    cuda = MadeUpCuda()
    copies = DeviceCopies(torch.device("cuda"), beside=beside, cuda=cuda)
    held, numbers = [], range(4)
    for number in numbers:
        batch = Batch(cuda, f"batch {number}")
        held.append(weakref.ref(batch))
        copies.copy(batch)
        cuda.calls.append(f"batch {number} computed")
        del batch
        assert [alive() is not None for alive in held] == [i > number - 2 for i in range(number + 1)]
    where = "copies" if beside else "compute"
    waits = ["compute waits for copies"] if beside else []
    wanted = []
    for number in numbers:
        wanted += [f"event {number - 1} on compute"] if number else []
        wanted += [f"host waits for event {number - 2}"] if number > 1 else []
        wanted += [f"batch {number} copied on {where}", *waits, f"batch {number} computed"]
    assert cuda.calls == wanted


def test_with_made_up_streams_the_allocator_is_told_who_uses_a_copy(monkeypatch):
    cuda, recorded = MadeUpCuda(), []
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda tensor, stream: recorded.append((len(tensor), stream.name))
    )
    copied = DeviceCopies(torch.device("cpu"), beside=True, cuda=cuda).copy({"a": torch.ones(3), "b": [torch.ones(5)]})
    assert recorded == [(3, "compute"), (5, "compute")]
    assert copied["a"].tolist() == [1, 1, 1]
