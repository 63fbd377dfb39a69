"""Small jobs for runs that are attacked, with what makes the machine under them unpleasant, as the environment asks:

ATTACK_CLOCK=1: the wall clock jumps back and forth; ATTACK_DISK=SECONDS: every sync takes so long;
ATTACK_STUCK=FILE: no sync ends while the file exists; ATTACK_ORPHANS=1: workers outlive a process that is killed.
"""

import ctypes
import multiprocessing
import os
import random
import signal
import time
from concurrent.futures import ProcessPoolExecutor

import torch
from torch import nn
from torch.nn import functional as F

import memfit

PAUSE = 0.02
"""Seconds of a loss: so that a run lasts long enough to be hit in its middle, however its data are read."""

if "ATTACK_CLOCK" in os.environ:
    _time, _jumps = time.time, random.Random(0)
    time.time = lambda: _time() + _jumps.choice((-86400.0, 0.0, 3600.0, 1e6))
if "ATTACK_DISK" in os.environ or "ATTACK_STUCK" in os.environ:
    _fsync = os.fsync

    def _slow(handle):
        time.sleep(float(os.environ.get("ATTACK_DISK", "0")))
        while os.path.exists(os.environ.get("ATTACK_STUCK", "")):
            time.sleep(0.1)
        _fsync(handle)

    os.fsync = _slow


class Plain(memfit.Job):
    windows: int = 20
    width: int = 32
    pause = PAUSE

    def nets(self):
        return {"net": nn.Sequential(nn.Linear(16, self.width), nn.Tanh(), nn.Linear(self.width, 4))}

    def optimizers(self, nets):
        return {"adam": torch.optim.AdamW(nets["net"].parameters(), lr=1e-2)}

    def batch(self, shape):
        return {"x": torch.randn(shape.items, 16), "y": torch.randn(shape.items, 4)}

    def dataset(self):
        generator = torch.Generator().manual_seed(0)
        return [(torch.randn(16, generator=generator), torch.randn(4, generator=generator)) for _ in range(52)]

    def collate(self, samples):
        return {"x": torch.stack([x for x, _ in samples]), "y": torch.stack([y for _, y in samples])}

    def loss(self, nets, batch):
        time.sleep(self.pause)
        return F.mse_loss(nets["net"](batch["x"]), batch["y"], reduction="sum"), batch["y"].numel()


class Dropout(Plain):
    """Random numbers of every kind, statistics of batches, a schedule."""

    def nets(self):
        middle = (nn.BatchNorm1d(self.width), nn.Dropout(0.3))
        return {"net": nn.Sequential(nn.Linear(16, self.width), *middle, nn.Linear(self.width, 4))}

    def schedules(self, optimizers, windows):
        return {"cosine": torch.optim.lr_scheduler.CosineAnnealingLR(optimizers["adam"], 20)}

    def collate(self, samples):
        batch = super().collate(samples)
        return {**batch, "x": batch["x"] * random.uniform(0.9, 1.1) + 0.01 * torch.randn(())}


class Workers(Dropout):
    """Samples come from processes of the job's own, as from a loader with workers."""

    def dataset(self):
        return WorkerSamples(super().dataset())


class WorkerSamples:
    def __init__(self, samples):
        self._samples = samples
        context = multiprocessing.get_context("fork")
        self._pool = ProcessPoolExecutor(2, context, initializer=_own, initargs=(samples, os.getpid()))

    def __len__(self):
        return len(self._samples)

    def __getitem__(self, index):
        x, y = self._pool.submit(_sample, index).result()
        return torch.tensor(x), torch.tensor(y)


def _own(samples, parent):
    """As torch's own loaders, its workers end when their parent is killed."""
    globals()["owned"] = samples
    if "ATTACK_ORPHANS" in os.environ:
        return
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


def _sample(index):
    return [tensor.tolist() for tensor in globals()["owned"][index]]


class Average(Dropout):
    ema: float | None = 0.9
    clip: float | None = 1.0


class Validated(Average):
    """Validates between windows, with weights at the top of the net and more than once."""

    validate_every: int = 3

    def validation_dataset(self):
        return self.dataset()[:9]

    def validate(self, nets, batch):
        time.sleep(self.pause)
        return {"error": F.mse_loss(nets["net"](batch["x"]), batch["y"])}


class NotFinite(Average):
    """One sample gives gradients that are not finite, and a finite loss."""

    fault: int = 30

    def dataset(self):
        samples = super().dataset()
        samples[self.fault][0][0] = 123.0
        return samples

    def collate(self, samples):
        return Plain.collate(self, samples)

    def loss(self, nets, batch):
        error, units = super().loss(nets, batch)
        if bool((batch["x"][:, 0] == 123.0).any()):
            error.register_hook(lambda gradient: gradient * float("nan"))
        return error, units


class Gan(Plain):
    """Two optimizers, one after the other."""

    def nets(self):
        judge = nn.Sequential(nn.Linear(4, self.width), nn.LeakyReLU(), nn.Dropout(0.1), nn.Linear(self.width, 1))
        return {**super().nets(), "judge": judge}

    def optimizers(self, nets):
        return {**super().optimizers(nets), "judge": torch.optim.SGD(nets["judge"].parameters(), lr=1e-2, momentum=0.9)}

    def turns(self, optimizers):
        judge = memfit.Turn(name="judge", loss=self.judged, optimizers=("judge",))
        return [judge, memfit.Turn(name="made", loss=self.made, optimizers=("adam",))]

    def judged(self, nets, batch, shared):
        time.sleep(self.pause)
        fake = nets["net"](batch["x"]).detach()
        return (1 - nets["judge"](batch["y"])).square().sum() + nets["judge"](fake).square().sum(), len(fake)

    def made(self, nets, batch, shared):
        fake = nets["net"](batch["x"])
        return (1 - nets["judge"](fake)).square().sum() + F.mse_loss(fake, batch["y"], reduction="sum"), len(fake)

    def units(self, batch):
        return {"judge": len(batch["x"]), "made": len(batch["x"])}


class Grows(Plain):
    """Each loss leaves two MiB behind."""

    windows: int = 400
    pause = 0.0

    def loss(self, nets, batch):
        self.__dict__.setdefault("kept", []).append(torch.ones(1 << 19))
        return super().loss(nets, batch)


class GrowsInSecondTurn(Gan):
    """The same, in losses that are computed after an optimizer of the window has stepped."""

    windows: int = 400
    pause = 0.0

    def made(self, nets, batch, shared):
        self.__dict__.setdefault("kept", []).append(torch.ones(1 << 20))
        return super().made(nets, batch, shared)


class TooLarge(Plain):
    """One sample, first met in window 2, takes more memory than there is."""

    fault: int = 48

    def dataset(self):
        samples = super().dataset()
        samples[self.fault][0][0] = 123.0
        return samples

    def loss(self, nets, batch):
        error, units = super().loss(nets, batch)
        if bool((batch["x"][:, 0] == 123.0).any()):
            torch.empty(1 << 50, dtype=torch.uint8)
        return error, units


class TooLargeToCollate(Plain):
    """The same sample, in a job that collates a whole window first; memory runs out on rank 1 alone."""

    fault: int = 48

    def dataset(self):
        return list(enumerate(super().dataset()))

    def collate(self, samples):
        if os.environ.get("RANK") == "1" and self.fault in [number for number, _ in samples]:
            torch.empty(1 << 50, dtype=torch.uint8)
        return super().collate([sample for _, sample in samples])

    def units(self, batch):
        return {"loss": batch["y"].numel()}


class NotFiniteInSecondTurn(Gan):
    """A gradient that is not finite after an optimizer of the window has stepped; first in window 2."""

    fault: int = 48

    def dataset(self):
        samples = super().dataset()
        samples[self.fault][0][0] = 123.0
        return samples

    def made(self, nets, batch, shared):
        error, units = super().made(nets, batch, shared)
        if bool((batch["x"][:, 0] == 123.0).any()):
            error.register_hook(lambda gradient: gradient * float("nan"))
        return error, units


class Raises(Validated):
    """The job's own RuntimeError with a text of its choice, on the last rank alone, in one place after its tenth loss:
    ``loss``, ``backward`` (of an autograd function), ``hook`` (of a gradient), ``collate`` or ``validate``."""

    place: str = "loss"
    text: str = ""

    def at(self, place):
        last = int(os.environ.get("RANK", "0")) == int(os.environ.get("WORLD_SIZE", "1")) - 1
        if place == self.place and last and self.__dict__.get("losses", 0) > 10:
            raise RuntimeError(self.text)

    def collate(self, samples):
        self.at("collate")
        return super().collate(samples)

    def loss(self, nets, batch):
        self.losses = self.__dict__.get("losses", 0) + 1
        self.at("loss")
        error, units = super().loss(nets, batch)
        error = RaisesInBackward.apply(error, self)
        error.register_hook(lambda gradient: self.at("hook"))
        return error, units

    def validate(self, nets, batch):
        self.at("validate")
        return super().validate(nets, batch)


class RaisesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, error, job):
        ctx.job = job
        return error.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.job.at("backward")
        return gradient, None


class Closes(Plain):
    """Closes descriptors at each loss after the tenth: ``first`` to ``last``, which is left out."""

    first: int = 3
    last: int = 1000

    def loss(self, nets, batch):
        self.losses = self.__dict__.get("losses", 0) + 1
        if self.losses > 10:
            os.closerange(self.first, self.last)
        return super().loss(nets, batch)
