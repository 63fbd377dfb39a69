"""Jobs with one planted fault each, for memfit verify: python -m memfit verify tests/verify/jobs.py:Name."""

import copy
import math
import os
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from memfit.job import Job, Loss, Turn


class Sound(Job):
    """Nothing planted: what the others change."""

    clip: float | None = 1.0

    def nets(self):
        return {"net": nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 4))}

    def optimizers(self, nets):
        return {"adam": torch.optim.AdamW(nets["net"].parameters(), lr=1e-2)}

    def batch(self, shape):
        return {"x": torch.randn(shape.items, 8), "y": torch.randint(0, 4, (shape.items,))}

    def loss(self, nets, batch):
        return Loss(F.cross_entropy(nets["net"](batch["x"]), batch["y"], reduction="sum"), len(batch["y"]))


class Half(Sound):
    """Weights, gradients and losses in bf16."""

    def nets(self):
        return {"net": super().nets()["net"].bfloat16()}

    def loss(self, nets, batch):
        return super().loss(nets, {**batch, "x": batch["x"].bfloat16()})


class HalfOfTheRank(Half):
    """One rank scales its gradients."""

    def loss(self, nets, batch):
        loss = super().loss(nets, batch)
        if dist.is_initialized() and dist.get_world_size() > 1 and dist.get_rank() == 1:
            loss.sum.register_hook(lambda gradient: gradient * 1.25)
        return loss


class LocalBatchNorm(Sound):
    def nets(self):
        return {"net": nn.Sequential(nn.Linear(8, 24), nn.BatchNorm1d(24), nn.Tanh(), nn.Linear(24, 4))}


class InBatchNegatives(Sound):
    def loss(self, nets, batch):
        a = F.normalize(nets["net"](batch["x"]), dim=1)
        b = F.normalize(nets["net"](batch["x"].flip(1)), dim=1)
        return Loss(F.cross_entropy(a @ b.T / 0.1, torch.arange(len(a)), reduction="sum"), len(a))


class Dropout(Sound):
    """Its samples are drawn as the data set is made: the same in every process. It is compared in fp32."""

    precision: str = "bf16"

    def dataset(self):
        return [{"x": torch.randn(8), "y": torch.randint(0, 4, ())} for _ in range(48)]

    def nets(self):
        return {"net": nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Dropout(0.3), nn.Linear(24, 4))}


class NoiseInTheLoss(Sound):
    def loss(self, nets, batch):
        return super().loss(nets, {**batch, "x": batch["x"] + torch.randn_like(batch["x"])})


class NoiseOfTheRank(Sound):
    def loss(self, nets, batch):
        generator = torch.Generator().manual_seed(int(os.environ.get("RANK", "0")))
        return super().loss(nets, {**batch, "x": batch["x"] + torch.randn(batch["x"].shape, generator=generator)})


class OwnGenerator(Sound):
    def loss(self, nets, batch):
        if not hasattr(self, "generator"):
            self.generator = torch.Generator().manual_seed(0)
        return super().loss(nets, {**batch, "x": batch["x"] + torch.randn(batch["x"].shape, generator=self.generator)})


class MeanOfMeans(Sound):
    def loss(self, nets, batch):
        return Loss(F.cross_entropy(nets["net"](batch["x"]), batch["y"]), 1)


class MeanTwice(Sound):
    def loss(self, nets, batch):
        return Loss(F.cross_entropy(nets["net"](batch["x"]), batch["y"]), len(batch["y"]))


class MeanOfValid(Sound):
    """The mean over what is valid, times the number of samples."""

    def loss(self, nets, batch):
        each = F.cross_entropy(nets["net"](batch["x"]), batch["y"], reduction="none")
        valid = (batch["x"][:, 0] > 0).float() + 0.1
        return Loss((each * valid).sum() / valid.sum() * len(each), len(each))


class FixedUnits(Sound):
    def loss(self, nets, batch):
        return Loss(F.cross_entropy(nets["net"](batch["x"]), batch["y"], reduction="sum"), 4)


class Unsynchronised(Sound):
    unsynchronised: ClassVar[tuple[str, ...]] = ("judge",)

    def nets(self):
        return {**super().nets(), "judge": nn.Linear(8, 1)}

    def optimizers(self, nets):
        return {**super().optimizers(nets), "judge": torch.optim.SGD(nets["judge"].parameters(), lr=0.1)}

    def turns(self, optimizers):
        return [
            Turn(name="net", loss=lambda nets, batch, shared: self.loss(nets, batch), optimizers=("adam",)),
            Turn(name="judge", loss=self.judge, optimizers=("judge",)),
        ]

    def judge(self, nets, batch, shared):
        return Loss(nets["judge"](batch["x"]).square().sum(), len(batch["x"]))


class Hidden(Unsynchronised):
    """The net's weights are changed in a way that no engine sees."""

    unsynchronised: ClassVar[tuple[str, ...]] = ()

    def judge(self, nets, batch, shared):
        with torch.no_grad():
            nets["judge"].weight += batch["x"].mean()
        return super().judge(nets, batch, shared)


class RateOfTheRank(Sound):
    """Rank 1 steps twice as far."""

    def optimizers(self, nets):
        made = super().optimizers(nets)
        for optimizer in made.values():
            optimizer.param_groups[0]["lr"] *= 1 + (dist.is_initialized() and dist.get_rank())
        return made


class AverageOfTheRank(Sound):
    """An average in a frozen net, which a hook moves on rank 0 alone."""

    def nets(self):
        made = super().nets()
        return {**made, "average": copy.deepcopy(made["net"]).requires_grad_(False)}

    def optimizers(self, nets):
        made = super().optimizers(nets)

        def move(*_):
            if not dist.is_initialized() or dist.get_rank() == 0:
                for old, new in zip(nets["average"].parameters(), nets["net"].parameters(), strict=True):
                    old.lerp_(new.detach(), 0.1)

        next(iter(made.values())).register_step_post_hook(move)
        return made


class CollectiveInTheLoss(Sound):
    """Shares a figure among the ranks in every loss, as code that logs a mean does."""

    def loss(self, nets, batch):
        result = super().loss(nets, batch)
        dist.all_reduce(result.sum.detach().clone())
        return result


def on_several_ranks():
    return dist.is_initialized() and dist.get_world_size() > 1


class ZeroAlone(Sound):
    """Has a second loss, which is 0 on one device and a count of samples on several; nothing learns from it."""

    def units(self, batch):
        return dict.fromkeys(("net", "extra"), len(batch["y"]))

    def loss(self, nets, batch):
        made = super().loss(nets, batch)
        return {"net": made, "extra": made._replace(sum=made.sum * 0 + on_several_ranks() * made.units)}


class NanOnSeveral(Sound):
    """A frozen net, which a hook fills with NaN on all of several ranks."""

    def nets(self):
        made = super().nets()
        return {**made, "average": copy.deepcopy(made["net"]).requires_grad_(False)}

    def optimizers(self, nets):
        made = super().optimizers(nets)

        def fill(*_):
            if on_several_ranks():
                for old in nets["average"].parameters():
                    old.fill_(math.nan)

        next(iter(made.values())).register_step_post_hook(fill)
        return made
