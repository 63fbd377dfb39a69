"""Time of tracing one step of MuseTalk's U-Net (849.948 M parameters), beside torch's MemTracker.

python -m bench.trace_speed [--rounds 2]
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from memfit.device.hardware.catalogue import find_device
from memfit.job import Job, Loss, Nets, Shape
from memfit.trace.step import Tracing, trace_family, trace_job


class UNet(Job):
    """The U-Net alone, AdamW."""

    def nets(self) -> Nets:
        from diffusers import UNet2DConditionModel

        widths = (320, 640, 1280, 1280)
        return {
            "unet": UNet2DConditionModel(
                32, 8, 4, block_out_channels=widths, cross_attention_dim=384, attention_head_dim=8
            )
        }

    def optimizers(self, nets: Nets) -> dict[str, Any]:
        return {"adamw": torch.optim.AdamW(nets["unet"].parameters())}

    def batch(self, shape: Shape) -> Any:
        return torch.randn(shape.items, 8, 32, 32), torch.zeros(shape.items), torch.randn(shape.items, 50, 384)

    def loss(self, nets: Nets, batch: Any) -> Loss:
        return Loss(nets["unet"](*batch).sample.square().mean((1, 2, 3)).sum(), len(batch[0]))


def main() -> None:
    """Prints median seconds of each, and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2, help="interleaved rounds")
    rounds = parser.parse_args().rounds
    how = Tracing(device=find_device("a100-80gb"))
    job = UNet()
    times: dict[str, list[float]] = {
        "one step": [],
        "family of micro-batches": [],
        "another micro-batch": [],
        "MemTracker": [],
    }
    for _ in range(rounds):
        times["one step"].append(_seconds(lambda: trace_job(job, Shape(items=4), how)))
        begin = time.perf_counter()
        family = trace_family(job, how, Shape(items=4))
        times["family of micro-batches"].append(time.perf_counter() - begin)
        assert family.derives
        times["another micro-batch"].append(_seconds(lambda family=family: family.at(Shape(items=16))))
        times["MemTracker"].append(_seconds(lambda: mem_tracker(job, Shape(items=4))))
    for name, seconds in times.items():
        print(f"{name:24} {statistics.median(seconds):8.3f} s   ({', '.join(f'{s:.2f}' for s in seconds)})")
    ratio = statistics.median(times["MemTracker"]) / statistics.median(times["one step"])
    print(
        f"MemTracker takes {ratio:.1f} x as long as a trace (two windows each, "
        f"on {torch.get_num_threads()} threads, torch {torch.__version__})"
    )


def mem_tracker(job: UNet, shape: Shape) -> None:
    """The same two windows on fake tensors under torch.distributed._tools.MemTracker."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        nets = job.nets()
        optimizer = job.optimizers(nets)["adamw"]
        tracker = MemTracker()
        tracker.track_external(nets["unet"], optimizer)
        with tracker:
            for _ in range(2):
                loss = job.loss(nets, job.batch(shape))
                (loss.sum / loss.units).backward()
                optimizer.step()
                optimizer.zero_grad()
                tracker.reset_mod_stats()


def _seconds(work: Any) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
