"""A job whose layers are cut over two ranks, and the same with one planted fault each."""

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from memfit.engine.local_parameters import LocalParameters
from memfit.job import Loss
from tests.verify import jobs


class Cut(jobs.Sound):
    """Nothing planted: a colwise and a rowwise layer, within layers that stay whole."""

    def nets(self):
        inner = (nn.Linear(24, 32), nn.GELU(), nn.Linear(32, 24))
        return {"net": nn.Sequential(nn.Linear(8, 24), nn.Tanh(), *inner, nn.LayerNorm(24), nn.Linear(24, 4))}

    def dataset(self):
        draws = torch.Generator().manual_seed(1)
        items = [(torch.randn(8, generator=draws), torch.randint(0, 4, (), generator=draws)) for _ in range(56)]
        return [{"x": x, "y": y} for x, y in items]

    def parallelize(self, nets, mesh):
        parallelize_module(nets["net"], mesh, {"2": self.colwise(), "4": self.rowwise()})

    def colwise(self):
        return ColwiseParallel()

    def rowwise(self):
        return RowwiseParallel()


class CutInBf16(Cut):
    precision: str = "bf16"


class NoAllReduceInForward(Cut):
    """Each rank goes on with its own part of the rowwise layer's sum."""

    def rowwise(self):
        return RowwiseParallel(output_layouts=Partial())


class _OwnRows(ParallelStyle):
    """A colwise layer whose input's gradient is that of this rank's rows alone."""

    def _apply(self, module, device_mesh):
        for name, parameter in list(module.named_parameters()):
            module.register_parameter(name, nn.Parameter(distribute_tensor(parameter.data, device_mesh, [Shard(0)])))
        LocalParameters().watch(module)
        return module


class NoAllReduceInBackward(Cut):
    def colwise(self):
        return _OwnRows()


class ScaledGradient(Cut):
    """What flows back through the rowwise layer is too large by a thousandth."""

    def parallelize(self, nets, mesh):
        super().parallelize(nets, mesh)
        nets["net"][4].register_forward_hook(scale_gradient)


def scale_gradient(module, args, output):
    output.register_hook(lambda gradient: gradient * 1.001)


class LostSample(Cut):
    """Ranks that hold parts leave the last sample of each micro-batch out of the sum."""

    def loss(self, nets, batch):
        if not isinstance(nets["net"][2].weight, DTensor):
            return super().loss(nets, batch)
        rest = super().loss(nets, {name: values[:-1] for name, values in batch.items()})
        return Loss(rest.sum, len(batch["y"]))
