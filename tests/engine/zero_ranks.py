"""What ranks do in test_zero.py: torchrun --nproc-per-node N -m tests.engine.zero_ranks FOLDER."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from memfit.apply.train_state import build
from memfit.apply.window import run_window
from memfit.engine.factory import make_engine
from memfit.engine.process_group import join
from memfit.errors import InputError
from memfit.job import Loss
from memfit.train.checkpoint.sharded_checkpoint import load_sharded, save_sharded
from tests.engine.rank_steps import SHARES, Blocks, OwnStep, idle
from tests.engine.ranks import CPU, SIZES, Alone, Counted, Gan, Sentences, micro_batch, sentences, vectors


class Late(Sentences):
    """Units that come with the losses, a parameter that nothing uses and nothing moves, and a single number."""

    def nets(self):
        nets = super().nets()
        nets["net"].register_parameter("scale", nn.Parameter(torch.tensor(1.5)))
        return nets

    def optimizers(self, nets):
        return {"net": torch.optim.AdamW(nets["net"].parameters(), lr=0.1, weight_decay=0.0)}

    def loss(self, nets, batch):
        x, valid = batch
        return Loss(((nets["net"](x).squeeze(-1) * nets["net"].scale).square() * valid).sum(), valid.sum())


class LateUnits(Late):
    """The same without the single number."""

    def nets(self):
        nets = super().nets()
        nets["net"].scale = nn.Parameter(torch.tensor([1.5]))
        return nets


class Used(Counted):
    """Units are known before the forward; every parameter is used, and decays."""

    def nets(self):
        nets = super().nets()
        del nets["net"].unused
        return nets


class Nets(Blocks):
    """Tied and frozen parameters, two nets with a group each, one called twice, a schedule, an average."""

    def nets(self):
        nets = super().nets() | {"judge": nn.Sequential(nn.Linear(7, 8), nn.Tanh(), nn.Linear(8, 1))}
        nets["judge"][0].bias.requires_grad_(False)
        return nets

    def optimizers(self, nets):
        slow = {"params": [p for p in nets["judge"].parameters() if p.requires_grad], "lr": 0.001, "weight_decay": 0.3}
        return {"net": torch.optim.AdamW([{"params": nets["net"].parameters()}, slow], lr=0.01)}

    def schedules(self, optimizers, windows):
        return {"net": torch.optim.lr_scheduler.ExponentialLR(optimizers["net"], 0.5)}

    def loss(self, nets, batch):
        made = nets["net"](batch)
        return Loss(
            made.square().sum() + nets["judge"](made).sum() + nets["judge"](made * 2).square().sum(), len(batch)
        )


class Momentum(Nets):
    clip: float | None = None

    def optimizers(self, nets):
        return {"net": torch.optim.SGD(super().optimizers(nets)["net"].param_groups, lr=0.1, momentum=0.9)}


class Reaching(Alone):
    """The judge's turn reaches the generator, which ranks share."""

    def judge(self, nets, batch, shared):
        return Loss(nets["judge"](nets["generator"](batch)).square().sum(), len(batch))


JOBS = {
    "own judge": (Alone, vectors),
    "late units": (LateUnits, sentences),
    "late": (Late, sentences),
    "used": (Used, sentences),
    "nets": (Nets, vectors),
    "sgd": (Momentum, vectors),
}
ALL_CUT = {"param_persistence_threshold": 0}
CASES = [
    ("late", "zero1", {}),
    ("used", "zero1", {"overlap_comm": True, "reduce_bucket_size": 64}),
    ("nets", "zero1", {"offload_optimizer": True}),
    ("late", "zero2", {"offload_optimizer": True}),
    ("used", "zero2", {}),
    ("nets", "zero2", {"overlap_comm": True, "reduce_bucket_size": 64, "allgather_bucket_size": 32}),
    ("sgd", "zero2", {}),
    ("used", "zero3", {}),
    ("late units", "zero3", ALL_CUT),
    ("nets", "zero3", {**ALL_CUT, "offload_optimizer": True, "prefetch_bucket_size": 0}),
    ("nets", "zero3", {**ALL_CUT, "offload_param": True, "reduce_bucket_size": 32}),
    ("sgd", "zero3", {"param_persistence_threshold": 40, "max_live_parameters": 10}),
]
READERS = {"zero1": ["zero1", "zero3"], "zero2": ["zero2", "fsdp2"], "zero3": ["zero3", "zero2"], "fsdp2": ["zero3"]}
"""What goes on with what an engine wrote, on as many ranks; one device does too."""


def window(train_state, data=vectors):
    """One window of the same samples, whatever the ranks."""
    engine, parts = train_state.engine, data(SIZES)
    result = run_window(
        train_state,
        [
            micro_batch(train_state.job, parts[i]) if i is not None else idle(train_state.job, parts[0])
            for i in numbers(engine)
        ],
    )
    norms = {name: float(norm) for name, norm in result.norms.items() if norm is not None}
    return [{name: float(value) for name, value in result.losses.items()}, norms]


def numbers(engine):
    """This rank's micro-batches; where ranks need not run as many, none is idle."""
    if engine.data_world == 1:
        return range(len(SIZES))
    return [i for i in SHARES[engine.data_world][engine.data_rank] if i is not None or engine.syncs_in_backward]


def weights(train_state):
    """Of nets and averages; an average that rank 0 keeps is there alone."""
    nets = {**train_state.nets, **{f"average of {name}": net for name, net in train_state.ema.items()}}
    by_name = {f"{n}.{key}": value for n, net in nets.items() for key, value in train_state.engine.weights(net).items()}
    return {name: value.detach().clone() for name, value in by_name.items()}


def train(case, engine=None):
    """Losses, norms and weights of three windows."""
    kind, data = JOBS[case]
    train_state = build(kind(), CPU, engine)
    collected = [number for _ in range(3) for number in window(train_state, data)]
    return {"weights": weights(train_state), "numbers": collected}


def saved(engine, folder):
    """Trains a window, saves, trains another; the weights then."""
    train_state = build(Nets(), CPU, engine)
    window(train_state)
    save_sharded(train_state, folder)
    window(train_state)
    return weights(train_state)


def loaded(engine, folder):
    """Loads into a new rig, whose weights are others, and trains the other window."""
    train_state = build(Other(), CPU, engine)
    load_sharded(train_state, folder)
    assert train_state.optimizers["net"].param_groups[0]["lr"] == 0.005
    window(train_state)
    return weights(train_state)


class Other(Nets):
    def nets(self):
        nets = super().nets()
        with torch.no_grad():
            for net in nets.values():
                for parameter in net.parameters():
                    parameter.mul_(1.5)
        return nets


class Halves(Used):
    def nets(self):
        return {"net": super().nets()["net"].half()}


class Scaled(Used):
    precision: str = "fp16"


class Decayed(Sentences):
    """``unused`` is used by no loss, and decays."""


def refusals(engine):
    """What the engine says of jobs that it cannot carry."""
    said = {}
    for kind in (Late, Gan, Reaching, OwnStep, Halves, Scaled, Decayed):
        try:
            train_state = build(kind(), CPU, engine())
            window(train_state, sentences if issubclass(kind, Sentences) else vectors)
        except InputError as error:
            said[kind.__name__] = str(error)
    return said


def restored(engine, folder):
    """Trains a job whose ranks have judges of their own, saves it; the weights then, and as a new train state reads
    them."""
    train_state = build(Alone(), CPU, engine())
    window(train_state)
    save_sharded(train_state, folder)
    other = build(Alone(), CPU, engine())
    load_sharded(other, folder)
    return weights(train_state), weights(other)


def main():
    join()
    rank, folder = dist.get_rank(), Path(sys.argv[1])
    by_name = {(case, name, *how): train(case, make_engine(name, CPU, **how)) for case, name, how in CASES}
    by_name["refusals"] = {
        name: refusals(lambda name=name: make_engine(name, CPU)) for name in ("zero1", "zero2", "zero3")
    }
    for name in ("ddp", "zero1", "zero2", "zero3"):
        by_name["own judge", name] = train("own judge", make_engine(name, CPU))
    by_name["restored"] = restored(lambda: make_engine("zero2", CPU), folder / "own judge")
    for writer, readers in READERS.items():
        by_name["saved", writer] = saved(make_engine(writer, CPU), folder / writer)
        for name in readers:
            by_name["loaded", writer, name] = loaded(make_engine(name, CPU), folder / writer)
    torch.save(by_name, folder / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
