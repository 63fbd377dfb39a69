"""The planner's estimated time against windows that are really run on this CPU, by kind of net.

python -m bench.timing [--rounds 5] [--json F] [--fit memfit/planner/timing/time_errors.toml]

Each net runs windows of two micro-batches that keep everything, and such whose blocks all recompute, at two sizes. The
medians of the process's own work are set beside what ``memfit plan`` says; --fit writes the interval of each kind.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from bench.result_file import add_json_option, target, write_result
from memfit.apply.checkpointing import recompute
from memfit.apply.train_state import build
from memfit.apply.window import run_window
from memfit.device.hardware.catalogue import find_device, with_memory
from memfit.job import Job, Loss, Nets, Shape
from memfit.planner.predict import checkpoint_all, plain_nets
from memfit.planner.request import PlanRequest
from memfit.planner.search.search import find_plan
from memfit.trace.durations import now
from memfit.trace.session import open_session
from memfit.trace.step import Tracing
from memfit.trace.step_phases import synthetic_micro_batch
from testing.large_nets import Decoder, Dit, Plain, UNet

ROOMY = with_memory(find_device("cpu"), 1 << 40)


class Images(Plain):
    """A classifier of Transformers on square images: resnet (convolutions), convnext (depthwise ones), vit."""

    kind: str = "resnet"
    side: int = 64

    def nets(self) -> Nets:
        import transformers as t

        makers: dict[str, Any] = {
            "resnet": lambda: t.ResNetForImageClassification(
                t.ResNetConfig(hidden_sizes=[64, 128, 256, 512], depths=[2, 2, 2, 2], layer_type="basic")
            ),
            "convnext": lambda: t.ConvNextForImageClassification(
                t.ConvNextConfig(hidden_sizes=[48, 96, 192, 384], depths=[2, 2, 4, 2], image_size=self.side)
            ),
            "vit": lambda: t.ViTForImageClassification(
                t.ViTConfig(
                    hidden_size=192,
                    num_hidden_layers=6,
                    num_attention_heads=3,
                    intermediate_size=768,
                    image_size=self.side,
                    patch_size=8,
                )
            ),
        }
        return {"net": makers[self.kind]()}

    def batch(self, shape: Shape) -> Any:
        return torch.randn(shape.items, 3, self.side, self.side), torch.randint(0, 2, (shape.items,))

    def loss(self, nets: Nets, batch: Any) -> Loss:
        x, y = batch
        return Loss(F.cross_entropy(nets["net"](pixel_values=x).logits, y, reduction="sum"), len(y))


class Mixer(Plain):
    """Products alone: a mixer of channels, deep enough to have blocks."""

    dim: int = 512
    depth: int = 6

    def nets(self) -> Nets:
        from torch import nn

        def block() -> nn.Module:
            return nn.Sequential(nn.Linear(self.dim, 4 * self.dim), nn.GELU(), nn.Linear(4 * self.dim, self.dim))

        return {"net": nn.Sequential(*(block() for _ in range(self.depth)))}

    def batch(self, shape: Shape) -> Any:
        return torch.randn(shape.items, 64, self.dim)

    def loss(self, nets: Nets, batch: Any) -> Loss:
        return Loss((nets["net"](batch) - batch).square().mean((1, 2)).sum(), len(batch))


CASES: dict[str, tuple[Job, tuple[int, int]]] = {
    "dit": (Dit(dim=384, depth=4, heads=6), (1, 3)),
    "dit, short": (Dit(dim=512, depth=4, heads=8, frames=32), (2, 8)),
    "decoder": (Decoder(dim=384, depth=4, vocabulary=1024), (1, 4)),
    "vit": (Images(kind="vit"), (8, 24)),
    "unet": (UNet(widths="64,128,128,128", side=16), (2, 6)),
    "unet, wide": (UNet(widths="96,192,192,192", side=16), (2, 4)),
    "resnet": (Images(), (4, 12)),
    "convnext": (Images(kind="convnext"), (4, 12)),
    "mixer": (Mixer(), (4, 12)),
}
"""Name -> job, and its micro-batches."""


def main() -> int:
    """Prints a line for each window; writes what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="windows that are timed, of each kind")
    add_json_option(parser)
    parser.add_argument("--fit", help="writes the intervals to this file")
    asked = parser.parse_args()
    rows = []
    print(f"{'net':14}{'kind':24}{'micro':>6}{'blocks':>12}{'estimated':>11}{'measured':>10}{'error':>8}")
    for name, (job, sizes) in CASES.items():
        for row in windows(name, job, sizes, asked.rounds):
            rows.append(row)
            print(
                f"{name:14}{row['net_kind']:24}{row['micro_batch']:6}{row['checkpoint']:>12}{row['estimated']:10.3f}s"
                f"{row['measured']:9.3f}s{row['measured'] / row['estimated'] - 1:+8.1%}",
                flush=True,
            )
    write_result(target(asked.json), {"rows": rows}, packages=["diffusers", "transformers"])
    if asked.fit:
        Path(asked.fit).write_text(fitted(rows))
    return 0


def windows(name: str, job: Job, sizes: tuple[int, int], rounds: int) -> Iterator[dict[str, Any]]:
    """Each size and kind of checkpointing: estimated and measured seconds."""
    with open_session(job, Tracing(device=ROOMY), Shape(items=sizes[0])) as session:
        net_kind = session.net_kind
    every = checkpoint_all(job, plain_nets(job))
    request = PlanRequest(name=name, global_batch=1, device=ROOMY, keep=("checkpointing",))
    estimated = {
        (size, mode): find_plan(
            type(job)(**{**job.settings(), "checkpoint": mode}),
            replace(request, global_batch=2 * size, micro_batch=size),
        ).floor.seconds
        for size in sizes
        for mode in ("none", "all")
    }
    torch.manual_seed(0)
    train_state = build(job, "cpu")
    times: dict[tuple[int, str], list[float]] = {key: [] for key in estimated}
    for turn in range(rounds + 1):
        for size, mode in estimated:
            micro = synthetic_micro_batch(job, Shape(items=size), torch.device("cpu"))
            with recompute(train_state.nets, every if mode == "all" else {}):
                begin = now()
                run_window(train_state, [micro, micro])
                if turn:
                    times[size, mode].append(now() - begin)
    for (size, mode), seconds in estimated.items():
        yield {
            "net": name, "net_kind": net_kind, "micro_batch": size, "checkpoint": mode, "estimated": seconds,
            "measured": statistics.median(times[size, mode]),
        }  # fmt: skip


def fitted(rows: list[dict[str, Any]]) -> str:
    """The intervals as TOML, by kind of net."""
    lines = ["# Written by bench/timing.py --fit: bounds of measured / estimated seconds of a window - 1.", ""]
    for kind in dict.fromkeys(row["net_kind"] for row in rows):
        errors = [row["measured"] / row["estimated"] - 1 for row in rows if row["net_kind"] == kind]
        lines += [f'["cpu: {kind}"]', f"low = {min(errors):.4f}", f"high = {max(errors):.4f}", f"runs = {len(errors)}"]
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
