"""python bench/saving.py [--megabytes 400] [--rounds 4] [--folder DIR]: what a checkpoint costs, beside a raw write of
the same bytes with fsync and beside torch.save, round by round in a random order, and how long it holds training up.

Bounds of the project: total at most 1.1 x the raw write, held up at most 0.3 s a GB when asynchronous.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))

import memfit
from memfit.apply.train_state import TrainState, build
from memfit.plan import Plan
from memfit.train.checkpoint.checkpoints import Checkpoints
from memfit.train.checkpoint.saver import Saver
from memfit.train.checkpoint.state import state_of
from memfit.train.checkpoint.state_codec import encode
from memfit.train.checkpoint.tensor_file import header, pieces
from memfit.train.launch import memory_limit

WIDTH = 1024
PLAN = Plan(
    job="bench", settings={}, device="cpu", budget_bytes=1 << 40, unit="samples", global_batch=1, micro_batch=1,
    micro_batches=[[1]], arithmetic="1 = 1", engine="single", precision="fp32", seed=0,
)  # fmt: skip


class Layers(memfit.Job):
    """Linear layers with norms, under AdamW: large tensors and small ones."""

    layers: int = 8

    def nets(self):  # type: ignore[no-untyped-def]
        pairs = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)) for _ in range(self.layers))
        return {"net": nn.Sequential(*pairs)}

    def optimizers(self, nets):  # type: ignore[no-untyped-def]
        return {"adam": torch.optim.AdamW(nets["net"].parameters())}


def stepped(megabytes: int) -> TrainState:
    """A rig whose state has about so many megabytes, after one step."""
    train_state = build(Layers(layers=max(megabytes * 10**6 // (12 * WIDTH * (WIDTH + 3)), 1)), "cpu")
    for parameter in train_state.nets["net"].parameters():
        parameter.grad = torch.randn_like(parameter)
    train_state.optimizers["adam"].step()
    train_state.optimizers["adam"].zero_grad()
    return train_state


def timed(work: Callable[[], object]) -> tuple[float, int, float]:
    """(seconds, bytes that the process held beyond what it held before, seconds of all its threads on a core)."""
    before = memory_limit.resident_bytes()
    memory_limit.reset_peak()
    begin, on_core = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - begin, memory_limit.peak_resident_bytes() - before, time.process_time() - on_core


def main() -> None:
    """Prints the median of each way beside that of raw writes, and the ratios within rounds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--folder", default=tempfile.gettempdir())
    asked = parser.parse_args()
    train_state = stepped(asked.megabytes)
    _, tensors = encode(state_of(train_state), "the state")
    whole = bytearray().join(pieces(tensors, header(tensors)))
    gigabytes = len(whole) / 1e9
    with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
        path = Path(folder)
        straight = Saver(checkpoints=Checkpoints(path / "straight", 1), plan=PLAN)
        beside = Saver(checkpoints=Checkpoints(path / "beside", 1), plan=PLAN, asynchronous=True)
        beside.warm(train_state)
        beside.finish()

        def raw() -> None:
            with open(path / "raw", "wb", buffering=0) as file:
                file.write(whole)
                os.fsync(file.fileno())

        def torch_save() -> None:
            with open(path / "torch", "wb") as file:
                torch.save(state_of(train_state), file)
                file.flush()
                os.fsync(file.fileno())

        held: list[float] = []
        on_core: list[float] = []
        number, chance = iter(range(1, 10_000)), random.Random(0)

        def asynchronous() -> None:
            begin = time.thread_time()
            beside.save(train_state, next(number))
            held.append(beside.held)
            on_core.append(time.thread_time() - begin)
            assert beside.finish()

        def synchronous() -> None:
            straight.save(train_state, next(number))
            assert straight.finish()

        ways = {"raw": raw, "synchronous": synchronous, "asynchronous": asynchronous, "torch.save": torch_save}
        found: dict[str, list[tuple[float, int, float]]] = {name: [] for name in ways}
        for number_of_round in range(asked.rounds + 1):
            for name in chance.sample(list(ways), len(ways)):
                result = timed(ways[name])
                for old in (path / "raw", path / "torch"):
                    old.unlink(missing_ok=True)
                if number_of_round:
                    found[name].append(result)
    print(f"{len(whole) / 1e6:.0f} MB in {len(tensors)} tensors, {asked.rounds} rounds after one to warm up")
    raw_seconds = statistics.median(seconds for seconds, _, _ in found["raw"])
    for name, results in found.items():
        taken = statistics.median(seconds for seconds, _, _ in results)
        ratios = [seconds / base for (seconds, _, _), (base, _, _) in zip(results, found["raw"], strict=True)]
        print(
            f"{name:>12}: {taken:.3f} s, {taken / raw_seconds:.2f} x raw "
            f"(by rounds {statistics.median(ratios):.2f}, {min(ratios):.2f} to {max(ratios):.2f}), "
            f"{max(extra for _, extra, _ in results) / 1e6:.1f} MB more memory at the most, "
            f"{statistics.median(core for _, _, core in results):.3f} s on a core"
        )
    kept = held[1:]
    print(
        f"asynchronous holds the training up {statistics.median(kept) / gigabytes:.3f} s a GB "
        f"(at the most {max(kept) / gigabytes:.3f}, {statistics.median(on_core[1:]) / gigabytes:.3f} of it on a core), "
        f"with {beside.buffer_bytes / 1e6:.0f} MB of buffers"
    )


if __name__ == "__main__":
    main()
