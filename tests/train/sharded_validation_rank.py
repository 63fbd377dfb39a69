"""One rank under FSDP2 that validates between backwards; it ends with 0 where no weight was changed by that.

In a process of its own, which ends without the destructor of its group (see ``tests/train/lonely_rank.py``).
"""

import os

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from memfit.apply.buffer_snapshot import BufferSnapshot
from memfit.apply.train_state import build
from memfit.engine.factory import make_engine
from memfit.trace.step_phases import validate_once
from testing.faulty_jobs import Plain


def main():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    train_state = build(Plain(), "cpu", make_engine("fsdp2", torch.device("cpu")))
    net, samples = train_state.nets["net"], Plain().dataset()
    batch = [torch.stack(part) for part in zip(*samples, strict=True)]
    snapshot = BufferSnapshot(train_state.nets)
    for _ in range(3):
        validate_once(train_state, lambda: batch, lambda part: None)
        assert all(isinstance(parameter, DTensor) for parameter in net.parameters())
        snapshot.keep()
        (net(batch[0]).squeeze(-1) - batch[1]).square().sum().backward()
        assert snapshot.changed() == []
        snapshot.restore()
        snapshot.learn()
    os._exit(0)


if __name__ == "__main__":
    main()
