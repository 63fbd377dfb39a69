"""What ranks do in tests/train/test_spread.py: torchrun … -m tests.train.rank_spread ENGINE save|load STATE FOLDER."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from memfit.apply.rig import build
from memfit.apply.window import run_window
from memfit.engine.mesh import join
from memfit.engine.start import start
from memfit.train.spread import load_spread, save_spread
from tests.engine.rank_steps import SHARES, Blocks, idle, whole
from tests.engine.ranks import CPU, SIZES, micro_batch, vectors


class Scheduled(Blocks):
    def schedules(self, optimizers, windows):
        return {"net": torch.optim.lr_scheduler.ExponentialLR(optimizers["net"], 0.5)}


def window(rig):
    """One window of the same samples, whatever the ranks."""
    parts = vectors(SIZES)
    numbers = SHARES[rig.engine.world][rig.engine.rank]
    run_window(rig, [micro_batch(rig.job, parts[i]) if i is not None else idle(rig.job, parts[0]) for i in numbers])


def weights(rig):
    nets = {**rig.nets, **{f"average of {name}": net for name, net in rig.ema.items()}}
    return {f"{name}.{key}": whole(value) for name, net in nets.items() for key, value in net.state_dict().items()}


def saved(engine, folder):
    """Trains a window, saves, trains another; the weights then."""
    rig = build(Scheduled(), CPU, engine)
    window(rig)
    save_spread(rig, folder)
    window(rig)
    return weights(rig)


def loaded(engine, folder):
    """Loads into a new rig and trains the other window."""
    torch.manual_seed(99)
    rig = build(Scheduled(), CPU, engine)
    with torch.no_grad():
        for parameter in rig.nets["net"].parameters():
            parameter.zero_()
    load_spread(rig, folder)
    assert rig.optimizers["net"].param_groups[0]["lr"] == 0.005
    window(rig)
    return weights(rig)


def main():
    join()
    kind, what, state, folder = sys.argv[1:]
    found = {"save": saved, "load": loaded}[what](start(kind, CPU), Path(state))
    torch.save(found, Path(folder) / f"{kind}-{what}-{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
