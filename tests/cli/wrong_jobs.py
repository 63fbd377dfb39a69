"""Jobs with one mistake each. ``Right`` has none."""

import abc
import sys
from typing import ClassVar, Literal

import torch
from torch import nn

import memfit


class Right(memfit.Job):
    width: int = 8
    rate: float = 0.1
    shuffle: bool = True
    kind: Literal["plain", "wide"] = "plain"

    def nets(self):
        return {"net": nn.Linear(self.width, 2)}

    def optimizers(self, nets):
        return {"sgd": torch.optim.SGD(nets["net"].parameters(), lr=self.rate)}

    def batch(self, shape):
        return torch.randn(shape.items, self.width)

    def loss(self, nets, batch):
        return nets["net"](batch).square().sum(), len(batch)

    def dataset(self):
        return [torch.randn(self.width, generator=torch.Generator().manual_seed(i)) for i in range(12)]


not_a_job = 3


class NetOfAMissingModule(Right):
    def nets(self):
        from not_there.nets import Net

        return {"net": Net()}


class NetOnACard(Right):
    def nets(self):
        nets = super().nets()
        for net in nets.values():
            net.cuda()
        return nets


class NothingValid(Right):
    def loss(self, nets, batch):
        value, _ = super().loss(nets, batch)
        return value, torch.zeros((), dtype=torch.int64)


class DefaultOutsideItsValues(Right):
    kind: Literal["plain", "wide"] = "other"


class DefaultOfAnotherType(Right):
    width = "eight"


class NoNets(memfit.Job):
    pass


class NoOptimizers(memfit.Job):
    width = 8
    nets = Right.nets


class NoBatch(NoOptimizers):
    rate = 0.1
    optimizers = Right.optimizers


class NoLoss(NoBatch):
    batch = Right.batch


class NoDataset(Right):
    dataset = memfit.Job.dataset


class NetsNotADict(Right):
    def nets(self):
        return [nn.Linear(8, 2)]


class NetsEmpty(Right):
    def nets(self):
        return {}


class NetNoModule(Right):
    def nets(self):
        return {"net": "a module"}


class NetOfALambda(Right):
    def nets(self):
        return {"net": lambda x: x}


class NothingTrained(Right):
    def nets(self):
        return {"net": nn.Linear(8, 2).requires_grad_(False)}


class NetsRaise(Right):
    def nets(self):
        return {"net": nn.Linear(8, -2)}


class OptimizersNotADict(Right):
    def optimizers(self, nets):
        return torch.optim.SGD(nets["net"].parameters())


class OptimizerOfAName(Right):
    def optimizers(self, nets):
        return {"sgd": "SGD"}


class OptimizerOverNothing(Right):
    def optimizers(self, nets):
        return {"sgd": torch.optim.SGD([])}


class OptimizerOfAnother(Right):
    def optimizers(self, nets):
        return {"sgd": torch.optim.SGD(nn.Linear(3, 3).parameters())}


class OptimizersShare(Right):
    def optimizers(self, nets):
        return {name: torch.optim.SGD(nets["net"].parameters()) for name in ("one", "two")}


class BatchRaises(Right):
    def batch(self, shape):
        return {"x": torch.randn(shape.items)}["y"]


class BatchOfAnotherWidth(Right):
    def batch(self, shape):
        return torch.randn(shape.items, 5)


class LossOfShapesThatDoNotMatch(Right):
    def loss(self, nets, batch):
        return (nets["net"](batch) > torch.zeros(7)).sum() * nets["net"](batch).sum(), len(batch)


class LossOfEach(Right):
    def loss(self, nets, batch):
        return nets["net"](batch).square().sum(1), len(batch)


class LossAlone(Right):
    def loss(self, nets, batch):
        return nets["net"](batch).square().sum()


class LossNone(Right):
    def loss(self, nets, batch):
        nets["net"](batch).square().sum()


class LossANumber(Right):
    def loss(self, nets, batch):
        return 0.5, len(batch)


class BatchWithoutShape(Right):
    def batch(self):
        return torch.randn(4, 8)


class LossComplex(Right):
    def loss(self, nets, batch):
        value, units = super().loss(nets, batch)
        return value.to(torch.complex64), units


class LossDetached(Right):
    def loss(self, nets, batch):
        return nets["net"](batch).detach().square().sum(), len(batch)


class LossInWholeNumbers(Right):
    def loss(self, nets, batch):
        return nets["net"](batch).argmax(), len(batch)


class LossesNone(Right):
    def loss(self, nets, batch):
        return {}


class UnitsZero(Right):
    def loss(self, nets, batch):
        return nets["net"](batch).square().sum(), 0


class UnitsNegative(Right):
    def loss(self, nets, batch):
        return nets["net"](batch).square().sum(), -3


class UnitsNaN(Right):
    def loss(self, nets, batch):
        return nets["net"](batch).square().sum(), float("nan")


class UnitsAWord(Right):
    def loss(self, nets, batch):
        return nets["net"](batch).square().sum(), "many"


class UnitsOfEach(Right):
    def loss(self, nets, batch):
        return nets["net"](batch).square().sum(), torch.ones(len(batch))


class LossRaises(Right):
    def loss(self, nets, batch):
        raise ValueError("no such\nthing")


class LossCountsValues(Right):
    def loss(self, nets, batch):
        out = nets["net"](batch)
        return out.square().sum() * torch.bincount(out.square().long().flatten()).sum(), len(batch)


class LossInPlace(Right):
    def loss(self, nets, batch):
        out = nets["net"](batch).exp()
        return out.add_(1).sum(), len(batch)


class TurnOfNoOptimizer(Right):
    def turns(self, optimizers):
        return [memfit.Turn(name="only", loss=lambda nets, batch, shared: self.loss(nets, batch), optimizers=("adam",))]


class TurnOfAnotherLoss(Right):
    def turns(self, optimizers):
        return [memfit.Turn(name="only", loss=self.loss, optimizers=tuple(optimizers))]


class ScheduleThatEnds(Right):
    def schedules(self, optimizers, windows):
        return {"cycle": torch.optim.lr_scheduler.OneCycleLR(optimizers["sgd"], 1.0, total_steps=1)}


class UnitsHuge(Right):
    def loss(self, nets, batch):
        return nets["net"](batch).square().sum(), 10**400


class Abstract(Right, abc.ABC):
    @abc.abstractmethod
    def depth(self): ...


class MakesAnother(Right):
    def __new__(cls, **settings):
        return 3


class RangeOfNoSetting(Right):
    ranges: ClassVar = {"depth": (1, 2)}


class RangeInWords(Right):
    ranges: ClassVar = {"width": "4 to 16"}


class RangeReversed(Right):
    ranges: ClassVar = {"width": (16, 4)}


class NoRate(Right):
    """An optimizer that finds its own step size, as Adafactor with relative steps does."""

    def optimizers(self, nets):
        class Relative(torch.optim.SGD):
            def __init__(self, parameters):
                super().__init__(parameters)
                self.param_groups[0]["lr"] = None

            def step(self, closure=None):
                for parameter in self.param_groups[0]["params"]:
                    parameter.data.add_(parameter.grad, alpha=-0.1)

        return {"relative": Relative(nets["net"].parameters())}


class ClosesItsStreams(Right):
    def nets(self):
        sys.stderr.close()
        sys.stdout.close()
        return super().nets()


class TurnsNone(Right):
    def turns(self, optimizers):
        return []


class CheckpointsNothing(Right):
    def checkpointable(self, nets):
        return ["net.blocks.0"]


class TwoLosses(Right):
    def loss(self, nets, batch):
        out = nets["net"](batch)
        return {"one": (out[:, 0].square().sum(), len(batch)), "two": (out[:, 1].square().sum(), 2 * len(batch))}


class ValidateRaises(Right):
    def validate(self, nets, batch):
        return {"score": nets["other"](batch)}


class Speaks(Right):
    def nets(self):
        print("building")
        return super().nets()


class DatasetEmpty(Right):
    def dataset(self):
        return []


class DatasetRaises(Right):
    def dataset(self):
        return open("no/such/file").read()


class DatasetANumber(Right):
    def dataset(self):
        return 12


class LengthsOfFewer(Right):
    longest: int | None = 3

    def lengths(self):
        return [4] * 5


class LengthsOfNone(Right):
    longest: int | None = 8

    def batch(self, shape):
        return torch.randn(shape.items * shape.length, self.width)


class SampleTooLong(Right):
    longest: int | None = 8

    def batch(self, shape):
        return torch.randn(shape.items * shape.length, self.width)

    def lengths(self):
        return [4] * 11 + [9]


class SamplesDoNotCollate(Right):
    def dataset(self):
        return [torch.randn(8), torch.randn(9)] * 6


class LossTurnsNaN(Right):
    def loss(self, nets, batch):
        return nets["net"](batch * float("inf")).square().sum(), len(batch)
