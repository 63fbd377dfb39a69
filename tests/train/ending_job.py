"""A job that ends, hangs or fails in a chosen place, once a file says so: see tests/train/test_endings.py."""

import contextlib
import ctypes
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn

import memfit


class LeftError(BaseException):
    """No ``Exception``, as ``asyncio.CancelledError``; it cannot even say what it is."""

    def __str__(self):
        raise RuntimeError("planted")


class Ending(memfit.Job):
    """``how`` happens in ``place`` at the tenth call there, while the file ``mark`` exists."""

    windows: int = 6
    real_validation_batch = True
    validate_every: int = 2
    place: str = "loss"
    how: str = "exit"
    mark: str = "/none"
    kept_elements: int = 1 << 18
    """Of each tensor that is kept, 1 MiB together."""

    def at(self, place):
        calls = self.__dict__.setdefault("calls", {})
        calls[place] = calls.get(place, 0) + 1
        if place != self.place or calls[place] < (3 if place == "validate" else 10) or not Path(self.mark).exists():
            return
        if self.how == "exit":
            sys.exit()
        if self.how == "_exit":
            os._exit(0)
        if self.how == "interrupt":
            raise KeyboardInterrupt
        if self.how == "leave":
            raise LeftError("by itself")
        if self.how == "hang":
            Path(self.mark).with_name("reached").touch()
            time.sleep(3600)
        if self.how == "crash":
            ctypes.string_at(0)
        if self.how == "raise":
            raise ZeroDivisionError("planted")

    def nets(self):
        return {"net": nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Dropout(0.1), nn.Linear(32, 1))}

    def optimizers(self, nets):
        return {"adam": torch.optim.AdamW(nets["net"].parameters(), lr=1e-2)}

    def batch(self, shape):
        return [torch.randn(shape.items, 16), torch.randn(shape.items)]

    def dataset(self):
        return Samples(self)

    def collate(self, samples):
        self.at("collate")
        return super().collate(samples)

    def loss(self, nets, batch):
        self.at("loss")
        error = (nets["net"](batch[0]).squeeze(-1) - batch[1]).square().sum()
        if self.how == "nan" and self.__dict__.setdefault("calls", {}).get("loss", 0) > 9 and Path(self.mark).exists():
            error.register_hook(lambda gradient: gradient * float("nan"))
        if self.how == "keep" and Path(self.mark).exists():
            kept = self.__dict__.setdefault("kept", [])
            kept += [torch.ones(self.kept_elements) for _ in range((1 << 18) // self.kept_elements)]
        if self.how == "jump" and self.__dict__["calls"]["loss"] > 9 and Path(self.mark).exists():
            kept = self.__dict__.setdefault("kept", [])
            with contextlib.suppress(RuntimeError):
                while len(kept) < 1000:  # once, then there is room for no other
                    kept.append(torch.ones(1 << 18))
            torch.ones(1 << 18)
        return error, len(batch[0])

    def validate(self, nets, batch):
        self.at("validate")
        return {"size": nets["net"](batch[0]).square().mean()}


class Samples:
    def __init__(self, job):
        self.job = job

    def __len__(self):
        return 40

    def __getitem__(self, index):
        self.job.at("dataset")
        x = torch.randn(16, generator=torch.Generator().manual_seed(index))
        return x, x.sum()
