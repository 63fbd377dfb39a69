"""Small jobs whose data sets draw random numbers, iterate, keep states, hold files open, and fail when told to:

LOADED_FAULT=KIND:SAMPLE, with KIND one of raise, exit, os_exit, kill, hang, lambda, memory, in a worker or not.
"""

import os
import random
import signal
import sys
import tempfile
import time

import numpy as np
import torch
from torch import nn
from torch.utils.data import IterableDataset

import memfit

SIZE = 50


class IndexedSamples(memfit.Job):
    windows: int = 12
    seconds: float = 0.0
    """Of reading a sample."""

    def nets(self):
        return {"net": nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 1))}

    def optimizers(self, nets):
        return {"adam": torch.optim.AdamW(nets["net"].parameters(), lr=1e-2)}

    def batch(self, shape):
        return [torch.randn(shape.items, 16), torch.randn(shape.items)]

    def dataset(self):
        return Samples(self.seconds)

    def loss(self, nets, batch):
        if os.environ.get("LOADED_FULL") and batch[0].shape[0] > 2:
            torch.empty(1 << 50, dtype=torch.uint8)
        error = (nets["net"](batch[0]).squeeze(-1) - batch[1]).square()
        return error.sum(), len(error)


class Samples:
    def __init__(self, seconds):
        self._seconds = seconds

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        time.sleep(self._seconds)
        sample = fault(index)
        x = torch.randn(16, generator=torch.Generator().manual_seed(index)) + 0.1 * torch.randn(16)
        x += 0.01 * random.random() + 0.01 * float(np.random.rand())
        return (x, x.sum()) if sample is None else sample


def fault(index):
    """What goes wrong at a sample; its value where that is what is wrong."""
    kind, _, at = os.environ.get("LOADED_FAULT", ":-1").partition(":")
    if index != int(at):
        return None
    if kind == "raise":
        raise ValueError(f"sample {index} is damaged\nin a second line")
    if kind == "exit":
        sys.exit(3)
    if kind == "os_exit":
        os._exit(3)
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "hang":
        time.sleep(600)
    if kind == "memory":
        torch.empty(1 << 50, dtype=torch.uint8)
    return (lambda: None, torch.zeros(())) if kind == "lambda" else None


class Listed(IndexedSamples):
    """Its batch holds what cannot be pickled where the fault asks for it."""

    def collate(self, samples):
        if any(callable(x) for x, _ in samples):
            return [lambda: None, torch.zeros(len(samples))]
        return super().collate(samples)


class Turns(IndexedSamples):
    """Two turns, each of which reads every micro-batch, and units that are counted before."""

    def turns(self, optimizers):
        return [
            memfit.Turn(name="first", loss=lambda nets, batch, shared: self.loss(nets, batch), optimizers=("adam",)),
            memfit.Turn(name="second", loss=lambda nets, batch, shared: self.loss(nets, batch), optimizers=("adam",)),
        ]

    def units(self, batch):
        return {"first": len(batch[0]), "second": len(batch[0])}


class InPlaceTurns(Turns):
    """Its loss writes into the batch that it is given."""

    def loss(self, nets, batch):
        batch[0].mul_(0.5)
        return super().loss(nets, batch)


class FileSamples(IndexedSamples):
    """Samples lie in one file that the data set holds open, and seeks in."""

    def dataset(self):
        return FileDataset()


class FileDataset:
    def __init__(self):
        self._file = tempfile.TemporaryFile()  # noqa: SIM115
        values = np.random.default_rng(0).standard_normal((SIZE, 16), dtype=np.float32)
        self._file.write(values.tobytes())
        self._file.flush()

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        self._file.seek(index * 64)
        time.sleep(0.001)
        x = torch.from_numpy(np.frombuffer(self._file.read(64), dtype=np.float32).copy())
        return x, x.sum()


class Iterated(IndexedSamples):
    def dataset(self):
        return Stream(self.seconds)


class Stream(IterableDataset):
    """Draws at each sample; 23 samples an epoch, so that windows span epochs."""

    def __init__(self, seconds):
        self.samples = Samples(seconds)

    def __iter__(self):
        for index in range(23):
            yield self.samples[index]


class StatefulSamples(IndexedSamples):
    def dataset(self):
        return StatefulStream(self.seconds)


class StatefulStream(Stream):
    """Goes on from its state, and writes down in READ_LOG each sample that it reads."""

    at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]

    def __iter__(self):
        while self.at < 23:
            index, self.at = self.at, self.at + 1
            if "READ_LOG" in os.environ:
                with open(os.environ["READ_LOG"], "a") as file:
                    file.write(f"{index}\n")
            yield self.samples[index]
        self.at = 0


class Buffered(IndexedSamples):
    def dataset(self):
        return ShuffledStream(self.seconds)


class ShuffledStream(StatefulStream):
    """Its state leaves out a shuffle's buffer, as that of Hugging Face's data sets does."""

    def __iter__(self):
        order, buffer = random.Random(self.at), []
        for sample in super().__iter__():
            buffer.append(sample)
            if len(buffer) > 5:
                yield buffer.pop(order.randrange(len(buffer)))
        yield from buffer
