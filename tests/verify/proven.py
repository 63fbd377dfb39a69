"""Jobs with a data set, for tests/verify/test_proof.py."""

import torch

from tests.verify import jobs


class Proven(jobs.Sound):
    windows: int = 4

    def dataset(self):
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(60, 8, generator=generator)
        return [{"x": one, "y": (one[0] > 0).long()} for one in x]


class OfTheRank(Proven):
    loss = jobs.NoiseOfTheRank.loss
