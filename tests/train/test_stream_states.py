"""Streams whose state holds what JSON does not: tuples, keys that are numbers, arrays, tensors, a shuffle's buffer.

python -m pytest tests/train/test_stream_states.py
"""

import collections
import json
import random
from contextlib import suppress

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset

from memfit.errors import InputError
from memfit.train.data import stream_file
from memfit.train.data.loader import BatchLoader
from memfit.train.data.reader import BatchReader
from memfit.train.data.stream import StreamSamples, checksum
from memfit.train.data.stream_file import read_stream_state, write_stream_state
from memfit.train.run_folder import RunFolder

COUNT, WINDOW = 23, 8


class PythonStream(IterableDataset):
    """Shuffles each epoch with a generator of its own, and counts by number: tuples, and keys that are numbers."""

    def __init__(self):
        self.chance, self.order, self.counts, self.read = random.Random(7), [], {0: 0, 1: 0}, 0

    def state_dict(self):
        return {"chance": self.chance.getstate(), "order": self.order, "counts": self.counts}

    def load_state_dict(self, state):
        self.chance.setstate(state["chance"])
        self.order, self.counts = list(state["order"]), {key: state["counts"][key] for key in (0, 1)}

    def __iter__(self):
        self.order = self.order or self.chance.sample(range(COUNT), COUNT)
        while self.order:
            number, self.read = self.order.pop(0), self.read + 1
            self.counts[number % 2] += 1
            yield torch.tensor([number, self.counts[number % 2]])


class NumpyStream(PythonStream):
    """The order is an array, which cannot be compared as a whole."""

    def __init__(self):
        self.chance, self.order, self.at, self.read = np.random.default_rng(3), np.arange(COUNT), np.int64(0), 0

    def state_dict(self):
        return {"chance": self.chance.bit_generator.state, "order": self.order, "at": self.at}

    def load_state_dict(self, state):
        self.chance.bit_generator.state = state["chance"]
        self.order, self.at = state["order"], state["at"]

    def __iter__(self):
        while self.at < COUNT:
            number, self.at, self.read = int(self.order[self.at]), self.at + 1, self.read + 1
            yield torch.tensor(number)
        self.order, self.at = self.chance.permutation(COUNT), np.int64(0)


class BufferStream(PythonStream):
    """The state of a shuffle is whole: its buffer of tensors, and the generator's bytes."""

    def __init__(self):
        self.chance, self.buffer, self.at, self.read = torch.Generator().manual_seed(5), collections.deque(), 0, 0

    def state_dict(self):
        return {"chance": self.chance.get_state(), "buffer": self.buffer, "at": self.at}

    def load_state_dict(self, state):
        self.chance.set_state(state["chance"])
        self.buffer, self.at = state["buffer"], state["at"]

    def __iter__(self):
        while self.at < COUNT:
            self.buffer.append(torch.tensor(self.at))
            self.at, self.read = self.at + 1, self.read + 1
            if len(self.buffer) > 5:
                self.buffer.rotate(int(torch.randint(len(self.buffer), (), generator=self.chance)))
                yield self.buffer.popleft()
        while self.buffer:
            yield self.buffer.popleft()
        self.at = 0


class CodeStream(PythonStream):
    """A function is in its state, which can be copied and not kept."""

    def state_dict(self):
        return {**super().state_dict(), "key": len}


class LockedStream(PythonStream):
    """Its state cannot even be copied."""

    def state_dict(self):
        return {**super().state_dict(), "iterator": (number for number in range(3))}


def samples_of(kind):
    stream = kind()
    return stream, StreamSamples(stream, seed=0, window=WINDOW, keep=2 * WINDOW)


@pytest.mark.parametrize("kind", [PythonStream, NumpyStream, BufferStream])
@pytest.mark.parametrize("position", [WINDOW, 5 * WINDOW])
def test_a_state_comes_back_from_its_file_as_it_was(kind, position, tmp_path):
    _, before = samples_of(kind)
    expected = [checksum(before[at]) for at in range(position + 1)]
    write_stream_state(RunFolder(tmp_path), before.newest_state())
    expected += [checksum(before[at]) for at in range(position + 1, position + 40)]
    state = read_stream_state(RunFolder(tmp_path), position)
    assert state is not None
    assert state.position == position
    stream, resumed = samples_of(kind)
    resumed.load(state)
    assert [checksum(resumed[at]) for at in range(position, position + 40)] == expected[position:]
    assert stream.read <= 40


@pytest.mark.parametrize("kind", [PythonStream, NumpyStream, BufferStream, CodeStream])
def test_a_worker_sends_states_of_every_kind(kind):
    _, here = samples_of(kind)
    expected = [int(here[at].flatten()[0]) for at in range(6 * WINDOW)]
    _, samples = samples_of(kind)
    reader = BatchReader(samples=samples, collate=torch.stack, seed=0)
    loader = BatchLoader(reader, 1, ahead=2, kept=2, slot_bytes=4096)
    try:
        loader.follow(0, 6, lambda window: [tuple(range(window * WINDOW, (window + 1) * WINDOW))])
        read = [loader.read(number, tuple(range(number * WINDOW, (number + 1) * WINDOW))) for number in range(6)]
        assert [int(sample.flatten()[0]) for batch in read for sample in batch] == expected
        state = loader.state_before(5 * WINDOW)
    finally:
        loader.close()
    assert state == here.newest_state() or kind is CodeStream


def test_a_state_that_no_file_can_hold_is_said_once_and_the_stream_read_from_its_start(tmp_path, capfd):
    _, before = samples_of(CodeStream)
    expected = [checksum(before[at]) for at in range(4 * WINDOW)]
    write_stream_state(RunFolder(tmp_path), before.newest_state())
    said = capfd.readouterr().err
    assert said.splitlines() == [
        "memfit: the data set's state_dict: key is a builtins.builtin_function_or_method, which no file can hold: "
        "a resumed run reads the stream from its start"
    ]
    state = read_stream_state(RunFolder(tmp_path), 3 * WINDOW)
    assert state is not None
    assert state.state is None
    _, resumed = samples_of(CodeStream)
    resumed.load(state)
    assert [checksum(resumed[at]) for at in range(3 * WINDOW, 4 * WINDOW)] == expected[3 * WINDOW :]


def test_a_first_state_that_cannot_be_copied_is_refused():
    with pytest.raises(InputError, match="state_dict") as refused:
        samples_of(LockedStream)
    assert "it cannot be copied: TypeError" in str(refused.value)


def test_large_states_leave_room_for_the_newest(tmp_path, monkeypatch):
    _, samples = samples_of(BufferStream)
    folder = RunFolder(tmp_path)
    for number in range(5):
        assert samples[number * WINDOW] is not None
        if number:
            write_stream_state(folder, samples.newest_state())
    path = tmp_path / stream_file.NAME
    assert [state["position"] for state in json.loads(path.read_text())] == [8, 16, 24, 32]
    monkeypatch.setattr(stream_file, "KEPT_BYTES", path.stat().st_size // 2)
    assert samples[5 * WINDOW] is not None
    write_stream_state(folder, samples.newest_state())
    assert [state["position"] for state in json.loads(path.read_text())] == [32, 40]
    monkeypatch.setattr(stream_file, "KEPT_BYTES", 1)
    write_stream_state(folder, samples.newest_state())
    assert [state["position"] for state in json.loads(path.read_text())] == [40]


class UnguardedStream(IterableDataset):
    """Lets the StopIteration of what it reads pass, which Python turns into another error."""

    def __iter__(self):
        numbers = iter(range(3))
        while True:
            yield torch.tensor(next(numbers))


def test_a_stream_that_ends_by_an_error_is_said_to_be_a_stream():
    samples = StreamSamples(UnguardedStream(), seed=0, window=WINDOW, keep=2 * WINDOW)
    reader = BatchReader(samples=samples, collate=torch.stack, seed=0)
    with pytest.raises(InputError) as refused:
        reader.read(0, (2, 3))
    words = (refused.value.seen, refused.value.why, refused.value.write)
    assert words == (
        "sample 3 of the stream",
        "RuntimeError: generator raised StopIteration",
        "write __iter__ to yield samples until it returns",
    )


class FailingStream(IterableDataset):
    """A generator in which memory runs out once, at a chosen sample or where an epoch begins."""

    def __init__(self, fails):
        self.fails, self.epochs = fails, 0

    def __iter__(self):
        self.epochs += 1
        if self.fails == f"epoch {self.epochs}":
            self.fails = None
            torch.empty(1 << 60, dtype=torch.uint8)
        return self.samples()

    def samples(self):
        for number in range(6):
            if self.fails == number:
                self.fails = None
                torch.empty(1 << 60, dtype=torch.uint8)
            yield number


@pytest.mark.parametrize("fails", [0, 3, "epoch 2"])
def test_a_stream_in_which_memory_ran_out_begins_anew_and_gives_the_same_samples(fails):
    samples = StreamSamples(FailingStream(fails), seed=0, window=WINDOW, keep=2 * WINDOW)
    given: list[int] = []
    while len(given) < 15:
        with suppress(RuntimeError):
            given.append(samples[len(given)])
    assert given == [position % 6 for position in range(15)]
    assert samples._stream.fails is None
