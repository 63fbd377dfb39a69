"""A step of DTensors, or with gradients in one storage, that fails at any operator is applied once, bit for bit.

python -m pytest tests/train/test_exactly_once_parts.py
"""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from memfit.train.recovery.exactly_once import ExactlyOnce, TornStepError
from tests.train.test_exactly_once import (
    CASES,
    FailsAt,
    FunctionFailsAt,
    applied_once_or_given_up,
    as_it_is,
    gradients,
    stepped,
)


def of_one_storage(step):
    """The same gradients, as FSDP2 leaves those of a unit."""
    made = gradients(step)
    parts = torch.cat([gradient.flatten() for gradient in made]).split([gradient.numel() for gradient in made])
    return [part.view_as(gradient) for part, gradient in zip(parts, made, strict=True)]


class Scaling(torch.optim.SGD):
    """Writes to the gradients."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.mul_(0.5)
        return super().step(closure)


def scaling(learned):
    return Scaling(learned, lr=0.1, momentum=0.9)


@pytest.fixture
def as_part():
    """Makes a tensor this rank's part of a DTensor, on the one rank of a group."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    yield lambda tensor: distribute_tensor(tensor, mesh, [Shard(0)])
    dist.destroy_process_group()


@pytest.mark.parametrize("name", ["AdamW", "AdamW foreach", "Adam fused", "SGD foreach", "hooked", "past the counter"])
@pytest.mark.parametrize("fail_in", [0, 1], ids=["first step", "later step"])
def test_a_step_of_parts_that_fails_at_any_operator_is_applied_once(name, fail_in, as_part):
    applied_once_or_given_up(CASES[name], fail_in, FailsAt, as_part)


@pytest.mark.parametrize("failing", [FailsAt, FunctionFailsAt])
def test_a_step_whose_gradients_lie_in_one_storage_is_applied_once(failing):
    applied_once_or_given_up(CASES["AdamW"], 1, failing, given=of_one_storage)


def test_a_step_that_writes_to_gradients_of_one_storage_is_given_up_once_it_has():
    with pytest.raises(TornStepError):
        stepped(
            scaling,
            2,
            ExactlyOnce(lambda error: None),
            5,
            1,
            FunctionFailsAt,
            as_it_is,
            of_one_storage,
        )
