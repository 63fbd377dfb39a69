"""What three ranks do in tests/engine/test_ddp.py: torchrun --nproc-per-node 3 -m tests.engine.ranks FOLDER."""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from memfit.apply.train_state import build
from memfit.apply.window import MicroBatch, run_window
from memfit.engine.collectives import RanksOutOfMemoryError
from memfit.engine.factory import make_engine
from memfit.engine.process_group import join
from memfit.job import Job, Loss, Turn
from memfit.train.recovery.recovery import Recovery

CPU = torch.device("cpu")


class Sentences(Job):
    """Items of varied length; padding does not count. One parameter is never used."""

    unit = "frames"
    longest: int | None = 20
    clip: float | None = 0.05

    def nets(self):
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 1))
        net.register_parameter("unused", nn.Parameter(torch.ones(3)))
        return {"net": net}

    def optimizers(self, nets):
        return {"net": torch.optim.AdamW(nets["net"].parameters(), lr=0.1, weight_decay=0.5)}

    def loss(self, nets, batch):
        x, valid = batch
        error = nets["net"](x).squeeze(-1).square() * valid
        return Loss(error.sum(), valid.sum())


class Steady(Sentences):
    """Plain SGD, whose step is the gradient."""

    clip: float | None = None

    def optimizers(self, nets):
        return {"net": torch.optim.SGD(nets["net"].parameters(), lr=1.0)}


class Counted(Sentences):
    """Units are known before the forward."""

    def units(self, batch):
        return int(batch[1].sum())


class Gan(Job):
    """Two nets with an optimizer each; the generator's backward reaches the judge's parameters too."""

    def nets(self):
        torch.manual_seed(2)
        return {"generator": nn.Linear(4, 4), "judge": nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))}

    def optimizers(self, nets):
        return {name: torch.optim.SGD(net.parameters(), lr=0.1) for name, net in nets.items()}

    def turns(self, optimizers):
        return [
            Turn(name="judge", loss=self.judge, optimizers=("judge",)),
            Turn(name="generator", loss=self.generator, optimizers=("generator",)),
        ]

    def judge(self, nets, batch, shared):
        made = nets["generator"](batch).detach()
        return Loss((nets["judge"](batch) - 1).square().sum() + nets["judge"](made).square().sum(), len(batch))

    def generator(self, nets, batch, shared):
        return Loss((nets["judge"](nets["generator"](batch)) - 1).square().sum(), len(batch))


class Alone(Gan):
    """Each rank trains its own judge."""

    unsynchronised = ("judge",)


def sentences(sizes):
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 21, (sum(sizes),), generator=generator)
    x = torch.randn(sum(sizes), 20, 6, generator=generator)
    return list(zip(x.split(sizes), (torch.arange(20) < lengths[:, None]).float().split(sizes), strict=True))


def vectors(sizes):
    return list(torch.randn(sum(sizes), 4, generator=torch.Generator().manual_seed(3)).split(sizes))


CASES = {
    "late units": (Sentences, sentences),
    "units before": (Counted, sentences),
    "two nets": (Gan, vectors),
    "own judge": (Alone, vectors),
}
SIZES = [5, 3, 4, 1, 2]
IDS = [[(0, 1, 2), (3,)], [(4, 5)], [(6, 7, 8), (9, 10), (11, 12, 13, 14)]]
"""Samples of each rank's micro-batches, where memory fails."""
SHARES = {"ragged": [[0, 1], [2], [3, 4]], "one rank has none": [[0, 1, 2], [], [3, 4]]}
"""Micro-batches of each rank."""


def micro_batch(job, part):
    return MicroBatch(fetch=lambda: part, padded_units=count(part) * (job.longest or 1), units=job.units(part))


def count(part):
    """Samples of a micro-batch."""
    if isinstance(part, dict):
        return len(next(iter(part.values())))
    return len(part[0] if isinstance(part, tuple) else part)


def train(case, share, engine, rank):
    """Weights and losses after two windows."""
    kind, data = CASES[case]
    train_state = build(kind(), CPU, engine)
    parts = data(SIZES)
    numbers = SHARES[share][rank] if engine else range(len(SIZES))
    losses = []
    for _ in range(2):
        result = run_window(train_state, [micro_batch(train_state.job, parts[i]) for i in numbers])
        losses.append({name: float(value) for name, value in result.losses.items()})
    weights = {
        f"{name}.{key}": value for name, net in train_state.nets.items() for key, value in net.state_dict().items()
    }
    return {"weights": weights, "losses": losses}


def failing(engine, at, part):
    """What rank 2 meets where its memory runs out in one micro-batch: every rank, and how the weights are then."""
    train_state = build(Sentences(), CPU, engine)
    parts = sentences(SIZES)
    micro = [micro_batch(train_state.job, part) for part in parts]

    def mark(name):
        seen.append(name)
        if engine.rank == 2 and name == part and seen.count(name) == at:
            torch.empty(1 << 60)

    seen: list[str] = []
    before = {key: value.clone() for key, value in train_state.nets["net"].state_dict().items()}
    try:
        run_window(train_state, micro[:3], mark)
        failed = ()
    except RanksOutOfMemoryError as error:
        failed = error.ranks
    same = all(torch.equal(value, before[key]) for key, value in train_state.nets["net"].state_dict().items())
    return {"failed": failed, "weights kept": same}


def repeated(engine, at, part, times):
    """A window in which rank 2 runs out of memory so many times in one micro-batch, recovered on all ranks."""
    train_state = build(Steady(), CPU, engine)
    x, valid = (torch.cat(parts) for parts in zip(*sentences(SIZES), strict=True))

    def remake(ids):
        return MicroBatch(fetch=lambda: (x[list(ids)], valid[list(ids)]), padded_units=20 * len(ids), ids=ids)

    recovery = Recovery(train_state, remake=remake, cost=lambda ids: 20 * len(ids), largest=100)
    parts = [remake(ids) for ids in IDS[engine.rank]]
    left, place = [times], [0]

    def mark(name):
        recovery.mark(name)
        place[0] += name == "fetch"
        if engine.rank == 2 and name == part and place[0] == at + 1 and left[0]:
            left[0] -= 1
            place[0] = 0
            torch.empty(1 << 60)

    begin = time.monotonic()
    recovery.begin()
    result = run_window(train_state, parts, mark, guard=recovery.guard)
    return {
        "weights": train_state.nets["net"].state_dict(),
        "ids": [micro.ids for micro in result.micro_batches],
        "units": float(result.units["loss"]),
        "retries": recovery.retries,
        "seconds": time.monotonic() - begin,
    }


def main():
    join()
    rank, folder = dist.get_rank(), Path(sys.argv[1])
    engine = make_engine("ddp", CPU)
    by_name = {(case, share): train(case, share, engine, rank) for case in CASES for share in SHARES}
    by_name["recovered"] = {
        (at, part, times): repeated(engine, at, part, times)
        for at in (0, 1, 2)
        for part in ("forward", "backward")
        for times in (0, 1, 2)
    }
    by_name["failures"] = {
        (at, part): failing(engine, at, part) for at in (1, 2, 3) for part in ("forward", "backward")
    }
    torch.save(by_name, folder / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
