"""The loop's own cost over a hand-written loop, beside Accelerate's, in the same process: A B C A B C …

python bench/loop.py [--rounds N] [--windows N]

A step of about 2 ms on one core: an MLP, AdamW. Every loop collates the same samples and clips. memfit is the whole of
``memfit.train.loop.train``: recovery, monitors, lines of metrics and samples for each window; no validation, no saving.
Printed: the median over rounds of CPU time a step, and what it adds to the hand-written loop of its own round.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))

from memfit.apply.rig import build
from memfit.batch.windows import Windows
from memfit.engine.single import Single
from memfit.job import Job, Loss
from memfit.plan import Plan
from memfit.train.folder import RunFolder
from memfit.train.loop import Course, train

BATCH, WIDTH = 32, 256


class Net(Job):
    clip: float | None = 1.0

    def nets(self):
        torch.manual_seed(0)
        return {"net": nn.Sequential(nn.Linear(64, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.GELU(),
                                     nn.Linear(WIDTH, 1))}  # fmt: skip

    def optimizers(self, nets):
        return {"adam": torch.optim.AdamW(nets["net"].parameters(), lr=1e-4)}

    def batch(self, shape):
        return [torch.randn(shape.items, 64), torch.randn(shape.items)]

    def dataset(self):
        x = torch.randn(BATCH * 64, 64, generator=torch.Generator().manual_seed(0))
        return list(zip(x, x.sum(1), strict=True))

    def loss(self, nets, batch):
        error = (nets["net"](batch[0]).squeeze(-1) - batch[1]).square()
        return Loss(error.sum(), len(error))


def ours(windows, folder):
    job = Net()
    plan = Plan(
        job="", settings={}, device="cpu", budget_bytes=1 << 30, unit="samples", global_batch=BATCH,
        micro_batch=BATCH, micro_batches=[[BATCH]], arithmetic="", engine="single", precision="fp32", seed=0,
    )  # fmt: skip
    run = RunFolder(folder)
    run.open(resume=False)
    rig, samples = build(job, "cpu", Single()), job.dataset()
    course = Course(
        plan=plan, folder=run, samples=samples, lengths=None, first=0, last=windows, resident_before=0,
        windows=Windows(size=len(samples), lengths=None, global_batch=BATCH, micro_batch=BATCH), saver=_NoSaver(),
    )  # fmt: skip
    begin = time.process_time()
    train(rig, course)
    return (time.process_time() - begin) / windows


class _NoSaver:
    written = None

    def due(self):
        return False

    def nothing(self, *arguments):
        return True

    warm = save = finish = nothing


def batches(job, windows):
    samples = job.dataset()
    for number in range(windows):
        start = number * BATCH % len(samples)
        yield job.collate(samples[start : start + BATCH])


def by_hand(windows, folder):
    job = Net()
    net = job.nets()["net"]
    (optimizer,) = job.optimizers({"net": net}).values()
    begin = time.process_time()
    for batch in batches(job, windows):
        total, units = job.loss({"net": net}, batch)
        (total / units).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return (time.process_time() - begin) / windows


def accelerate(windows, folder):
    from accelerate import Accelerator

    job = Net()
    net = job.nets()["net"]
    (optimizer,) = job.optimizers({"net": net}).values()
    accelerator = Accelerator(cpu=True)
    net, optimizer = accelerator.prepare(net, optimizer)
    begin = time.process_time()
    for batch in batches(job, windows):
        with accelerator.accumulate(net):
            total, units = job.loss({"net": net}, batch)
            accelerator.backward(total / units)
            accelerator.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return (time.process_time() - begin) / windows


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--windows", type=int, default=200)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    loops = {"by hand": by_hand, "memfit": ours, "accelerate": accelerate}
    seconds = {name: [] for name in loops}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(asked.rounds + 1):
            for name, loop in loops.items():
                found = loop(asked.windows, Path(folder) / f"{name}{number}")
                if number:
                    seconds[name].append(found)
    for name, found in seconds.items():
        added = statistics.median(a - b for a, b in zip(found, seconds["by hand"], strict=True))
        print(f"{name:11} {1e3 * statistics.median(found):6.3f} ms a step   {1e3 * added:+6.3f} ms")


if __name__ == "__main__":
    main()
