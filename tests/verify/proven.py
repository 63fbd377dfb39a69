"""Jobs with a data set, for tests/verify/test_proof.py."""

import torch

from tests.verify import jobs


class Proven(jobs.Sound):
    windows: int = 4

    def dataset(self):
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(60, 8, generator=generator)
        return [{"x": item, "y": (item[0] > 0).long()} for item in x]


class OfTheRank(jobs.NoiseOfTheRank, Proven):
    """Its draws differ by the rank."""


class WithoutState(Proven):
    """Its optimizer keeps no state."""

    def optimizers(self, nets):
        return {name: torch.optim.SGD(net.parameters(), lr=0.01) for name, net in nets.items()}
