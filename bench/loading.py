"""Samples a second of memfit's loop beside a hand-written loop over torch's DataLoader, with the same workers.

python -m bench.loading [--rounds 5] [--json F]

Two data sets: samples that take 10 ms to read, as from a disk or a network (the reading sleeps, so that two cores serve
four workers), and images of 588 KiB that take 4 ms. The net is small: reading decides. A loop's rate is that of windows
after its first ones, which fill what is read ahead; loops take turns, and the rates are medians over rounds.
"""

import argparse
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.result_file import add_json_option, target, write_result
from memfit.apply.train_state import build
from memfit.batch.windows import Windows
from memfit.engine.single import Single
from memfit.job import Job, Loss
from memfit.plan import Plan
from memfit.train.data.loader import BatchLoader
from memfit.train.data.reader import BatchReader
from memfit.train.loop.loop import train
from memfit.train.loop.run_context import RunContext
from memfit.train.run_folder import RunFolder

BATCH = 8
FILLS = 10
"""Windows that are left out: what is read ahead is filled in them."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A data set, and how often it is trained on."""

    name: str
    seconds: float
    """Of reading a sample."""
    shape: tuple[int, ...]
    workers: tuple[int, ...]
    windows: int


CASES = (
    Case(name="10 ms a sample", seconds=0.010, shape=(64,), workers=(0, 4), windows=70),
    Case(name="588 KiB and 4 ms a sample", seconds=0.004, shape=(3, 224, 224), workers=(2,), windows=70),
)


class Samples:
    """Made-up samples that take their time."""

    def __init__(self, case: Case, count: int) -> None:
        self._case, self._count = case, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        time.sleep(self._case.seconds)
        return torch.full(self._case.shape, index / self._count), torch.tensor(float(index))


class Net(Job):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self._case = case
        self.stamps: list[float] = []
        """When each loss began."""

    def nets(self):
        torch.manual_seed(0)
        return {"net": nn.Sequential(nn.Flatten(), nn.Linear(self._case.shape[-1], 8), nn.GELU(), nn.Linear(8, 1))}

    def optimizers(self, nets):
        return {"adam": torch.optim.AdamW(nets["net"].parameters(), lr=1e-4)}

    def batch(self, shape):
        return [torch.randn(shape.items, *self._case.shape), torch.randn(shape.items)]

    def dataset(self):
        return Samples(self._case, BATCH * self._case.windows)

    def loss(self, nets, batch):
        self.stamps.append(time.perf_counter())
        x = batch[0].flatten(1)[:, : self._case.shape[-1]]
        error = (nets["net"](x).squeeze(-1) - batch[1]).square()
        return Loss(error.sum(), len(error))


def ours(job: Net, case: Case, workers: int) -> None:
    plan = Plan(
        job="", settings={}, device="cpu", budget_bytes=1 << 30, unit="samples", global_batch=BATCH,
        micro_batch=BATCH, micro_batches=[[BATCH]], arithmetic="", engine="single", precision="fp32", seed=0,
    )  # fmt: skip
    samples = job.dataset()
    reader = BatchReader(samples=samples, collate=job.collate, seed=0)
    loader = BatchLoader(reader, workers, ahead=2, kept=2, slot_bytes=8 << 20) if workers else None
    with tempfile.TemporaryDirectory() as folder:
        run = RunFolder(Path(folder) / "run")
        run.open(resume=False)
        context = RunContext(
            plan=plan, folder=run, samples=samples, lengths=None, first=0, last=case.windows,
            windows=Windows(size=len(samples), lengths=None, global_batch=BATCH, micro_batch=BATCH), saver=None,
            loader=loader,
        )  # fmt: skip
        try:
            train(build(job, "cpu", Single()), context)
        finally:
            if loader is not None:
                loader.close()


def by_hand(job: Net, case: Case, workers: int) -> None:
    net = job.nets()["net"]
    (optimizer,) = job.optimizers({"net": net}).values()
    for batch in DataLoader(job.dataset(), BATCH, shuffle=True, num_workers=workers):
        total, units = job.loss({"net": net}, batch)
        (total / units).backward()
        optimizer.step()
        optimizer.zero_grad()


def rate(loop: Callable[[Net, Case, int], None], case: Case, workers: int) -> float:
    """Samples a second."""
    job = Net(case)
    loop(job, case, workers)
    stamps = job.stamps[FILLS:]
    return BATCH * (len(stamps) - 1) / (stamps[-1] - stamps[0])


def main() -> None:
    """Prints and writes the rates of both loops."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    add_json_option(parser)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    rows = []
    for case in CASES:
        for workers in case.workers:
            pairs = [(rate(by_hand, case, workers), rate(ours, case, workers)) for _ in range(asked.rounds)]
            hand, memfit = (statistics.median(values) for values in zip(*pairs, strict=True))
            ratio = statistics.median(own / other for other, own in pairs)
            rows.append(
                {"data": case.name, "workers": workers, "by_hand": hand, "memfit": memfit, "memfit_over_by_hand": ratio}
            )
            print(
                f"{case.name}, {workers} workers: by hand {hand:.1f}, "
                f"memfit {memfit:.1f} samples a second ({ratio:.3f})"
            )
    write_result(target(asked.json), {"rounds": asked.rounds, "rows": rows})


if __name__ == "__main__":
    main()
