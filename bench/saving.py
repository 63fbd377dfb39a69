"""What a checkpoint costs, compared with a raw write of the same bytes with fsync, with torch.save and with DCP.

python -m bench.saving [--megabytes 400] [--rounds 16] [--folder DIR] [--json F]

Every round runs each way once, in a random order. How long an asynchronous checkpoint holds training up is measured
too.

Bounds of the project: total at most 1.1 x the raw write, held up at most 0.3 s a GB when asynchronous.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as distributed_checkpoint
from torch import nn
from torch.distributed.checkpoint import FileSystemWriter

sys.path.insert(0, str(Path(__file__).parents[1]))

import memfit
from bench.result_file import add_json_option, target, write_result
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
    """A train state of about so many megabytes, after one step."""
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
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--folder", default=tempfile.gettempdir())
    add_json_option(parser)
    asked = parser.parse_args()
    train_state = stepped(asked.megabytes)
    _, tensors = encode(state_of(train_state), "the state")
    content = bytearray().join(pieces(tensors, header(tensors)))
    gigabytes = len(content) / 1e9
    with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
        path = Path(folder)
        synchronous_saver = Saver(checkpoints=Checkpoints(path / "straight", 1), plan=PLAN)
        asynchronous_saver = Saver(checkpoints=Checkpoints(path / "beside", 1), plan=PLAN, asynchronous=True)
        asynchronous_saver.warm(train_state)
        asynchronous_saver.finish()

        def raw() -> None:
            with open(path / "raw", "wb", buffering=0) as file:
                file.write(content)
                os.fsync(file.fileno())

        def torch_save() -> None:
            with open(path / "torch", "wb") as file:
                torch.save(state_of(train_state), file)
                file.flush()
                os.fsync(file.fileno())

        def dcp_save() -> None:
            state = {"net": train_state.nets["net"].state_dict(), "adam": train_state.optimizers["adam"].state_dict()}
            writer = FileSystemWriter(path / "dcp", sync_files=True)
            distributed_checkpoint.save(state, storage_writer=writer, no_dist=True)

        held: list[float] = []
        on_core: list[float] = []
        number, chance = iter(range(1, 10_000)), random.Random(0)

        def asynchronous() -> None:
            begin = time.thread_time()
            asynchronous_saver.save(train_state, next(number))
            held.append(asynchronous_saver.held)
            on_core.append(time.thread_time() - begin)
            assert asynchronous_saver.finish()

        def synchronous() -> None:
            synchronous_saver.save(train_state, next(number))
            assert synchronous_saver.finish()

        ways = {
            "raw": raw, "synchronous": synchronous, "asynchronous": asynchronous, "torch.save": torch_save,
            "DCP": dcp_save,
        }  # fmt: skip
        rounds_by_way: dict[str, list[tuple[float, int, float]]] = {name: [] for name in ways}
        for number_of_round in range(asked.rounds + 1):
            for name in chance.sample(list(ways), len(ways)):
                result = timed(ways[name])
                for old in (path / "raw", path / "torch"):
                    old.unlink(missing_ok=True)
                shutil.rmtree(path / "dcp", ignore_errors=True)
                if number_of_round:
                    rounds_by_way[name].append(result)
    print(f"{len(content) / 1e6:.0f} MB in {len(tensors)} tensors, {asked.rounds} rounds after one to warm up")
    rows = summary(rounds_by_way)
    for name, row in rows.items():
        print(
            f"{name:>12}: {row['seconds']:.3f} s, {row['over_raw']:.2f} x raw "
            f"(by rounds {row['over_raw_by_rounds']:.2f}, {row['over_raw_least']:.2f} to {row['over_raw_most']:.2f}), "
            f"{row['added_bytes'] / 1e6:.1f} MB more memory at the most, {row['core_seconds']:.3f} s on a core"
        )
    held_up = {
        "seconds_per_gigabyte": statistics.median(held[1:]) / gigabytes,
        "most_seconds_per_gigabyte": max(held[1:]) / gigabytes,
        "core_seconds_per_gigabyte": statistics.median(on_core[1:]) / gigabytes,
        "buffer_bytes": asynchronous_saver.buffer_bytes,
    }
    print(
        f"asynchronous holds the training up {held_up['seconds_per_gigabyte']:.3f} s a GB "
        f"(at the most {held_up['most_seconds_per_gigabyte']:.3f}), "
        f"with {held_up['buffer_bytes'] / 1e6:.0f} MB of buffers"
    )
    figures = {"bytes": len(content), "tensors": len(tensors), "rounds": asked.rounds, "ways": rows}
    write_result(target(asked.json), {**figures, "asynchronous_holds_up": held_up}, packages=["safetensors"])


def summary(rounds_by_way: dict[str, list[tuple[float, int, float]]]) -> dict[str, dict[str, float]]:
    """Medians of each way over its rounds, and its ratio to the raw write of the same round."""
    raw = [seconds for seconds, _, _ in rounds_by_way["raw"]]
    rows = {}
    for name, rounds in rounds_by_way.items():
        ratios = [seconds / base for (seconds, _, _), base in zip(rounds, raw, strict=True)]
        median = statistics.median(seconds for seconds, _, _ in rounds)
        rows[name] = {
            "seconds": median,
            "over_raw": median / statistics.median(raw),
            "over_raw_by_rounds": statistics.median(ratios),
            "over_raw_least": min(ratios),
            "over_raw_most": max(ratios),
            "added_bytes": max(extra for _, extra, _ in rounds),
            "core_seconds": statistics.median(core for _, _, core in rounds),
        }
    return rows


if __name__ == "__main__":
    main()
