"""A self-test of memfit on the installed torch: small nets whose bytes are known, in a few seconds.

On the virtual card, and on two ranks of it, the peaks must be those that every tested version gives. On the CPU they
must be those of the same step really run, by the allocator's own events. ``python -m memfit.trace.self_test`` exits
with 4 where something differs, and prints a line for each difference.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from memfit.apply.checkpointing import recompute
from memfit.apply.train_state import build
from memfit.apply.window import run_window
from memfit.device.hardware.benchmarks import AllocatorEvents
from memfit.device.hardware.catalogue import find_device
from memfit.device.virtual import backend
from memfit.errors import Exit
from memfit.events import Trace
from memfit.job import Job, Loss, Nets, Shape
from memfit.torch_compat.operators import FLASH_STATE_BYTES, flash_state_bytes
from memfit.torch_compat.versions import remember, under_test
from memfit.trace.step import Tracing, trace_job
from memfit.trace.step_phases import synthetic_micro_batch

CARD = "rtx4090"
ENGINES = (("single", 1), ("ddp", 2), ("fsdp2", 2))
SHAPE = Shape(items=4, length=None)
KNOWN: dict[str, dict[str, int]] = {
    "transformer, single x 1": {"setup": 449_924, "train": 19_416_628, "save": 18_389_132},
    "transformer, ddp x 2": {"setup": 449_924, "train": 19_416_628, "save": 18_389_132},
    "transformer, fsdp2 x 2": {"setup": 549_892, "train": 19_092_988, "save": 17_715_020},
    "convolution, single x 1": {"setup": 22_192, "train": 18_734_516, "save": 17_105_664},
    "convolution, ddp x 2": {"setup": 22_192, "train": 18_734_516, "save": 17_105_664},
    "convolution, fsdp2 x 2": {"setup": 33_220, "train": 18_723_488, "save": 17_072_580},
}
"""Peak live bytes of each phase on the card, by net, engine and ranks: the same in every tested version of torch from
2.7 on."""


@dataclass(frozen=True, kw_only=True)
class SelfTest:
    """What a self-test found."""

    torch: str
    passed: bool
    differences: tuple[str, ...]
    """A line for each; empty where it passed."""
    seconds: float


class SelfTestBlock(nn.Module):
    """A transformer's block: attention and a feed-forward, each on a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last_norm = nn.LayerNorm(64), nn.LayerNorm(64)
        self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 64)
        self.feed_forward = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 64))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).view(*x.shape[:2], 3, 4, 16).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.feed_forward(self.last_norm(x))


class Transformer(Job):
    """Two blocks in mixed precision."""

    validates = False
    precision: Literal["fp32", "bf16", "fp16"] = "bf16"

    def nets(self) -> Nets:
        return {"net": nn.Sequential(nn.Embedding(97, 64), SelfTestBlock(), SelfTestBlock(), nn.Linear(64, 97))}

    def optimizers(self, nets: Nets) -> dict[str, Any]:
        return {name: torch.optim.AdamW(net.parameters(), lr=1e-3) for name, net in nets.items()}

    def batch(self, shape: Shape) -> Tensor:
        return torch.randint(0, 97, (shape.items, 48))

    def loss(self, nets: Nets, batch: Any) -> Loss:
        logits = nets["net"](batch).flatten(0, 1).float()
        return Loss(functional.cross_entropy(logits, batch.flatten(), reduction="sum"), batch.numel())


class Convolution(Transformer):
    """Convolutions with a batch norm and a group norm, in float32."""

    precision: Literal["fp32", "bf16", "fp16"] = "fp32"

    def nets(self) -> Nets:
        layers = (
            nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.SiLU(), nn.Conv2d(16, 32, 3, stride=2),
            nn.GroupNorm(4, 32), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
        )  # fmt: skip
        return {"net": nn.Sequential(*layers)}

    def batch(self, shape: Shape) -> Tensor:
        return torch.randn(shape.items, 3, 32, 32)

    def loss(self, nets: Nets, batch: Any) -> Loss:
        return Loss(nets["net"](batch).square().mean(-1).sum(), len(batch))


JOBS = {"transformer": (Transformer, {"net.1": "full"}), "convolution": (Convolution, {})}
"""Each job of the self-test, and the modules that it recomputes."""


def run() -> SelfTest:
    """Runs the self-test in this process and keeps its answer for the installed version of torch."""
    begin = time.perf_counter()
    with under_test():
        backend.register_virtual_device()
        differences = tuple(_differences())
    remember(list(differences))
    return SelfTest(
        torch=torch.__version__,
        passed=not differences,
        differences=differences,
        seconds=time.perf_counter() - begin,
    )


def card_peaks() -> dict[str, dict[str, int]]:
    """Peak live bytes of each phase on the virtual card, under the keys of KNOWN."""
    peaks = {}
    for name, (job, modes) in JOBS.items():
        for engine, world in ENGINES:
            how = Tracing(device=find_device(CARD), checkpointing=modes, engine=engine, world=world)
            peaks[f"{name}, {engine} x {world}"] = live_peaks(trace_job(job(), SHAPE, how))
    return peaks


def live_peaks(trace: Trace) -> dict[str, int]:
    """Peak live bytes of each phase."""
    live = np.cumsum(trace.kind.astype(np.int64) * trace.nbytes[trace.storage])
    peaks: dict[str, int] = {}
    for name, start, end in trace.phases:
        before = int(live[start - 1]) if start else 0
        peaks[name] = max(peaks.get(name, 0), before, int(live[start:end].max(initial=0)))
    return peaks


def _differences() -> Iterator[str]:
    for name, peaks in card_peaks().items():
        yield from _compared(f"{name} on {CARD}", peaks, known_peaks(name, torch.__version__))
    for name, (job, modes) in JOBS.items():
        how = Tracing(device=find_device("cpu"), checkpointing=modes, scratch=False)
        trace = trace_job(job(), SHAPE, how)
        yield from _compared(f"{name} on the CPU", live_peaks(trace), _measured(job(), modes, trace))


def known_peaks(name: str, version: str) -> dict[str, int]:
    """KNOWN of a version of torch: the state of the transformer's one flash attention is alive at its peak."""
    peaks = dict(KNOWN[name])
    if name.startswith("transformer"):
        peaks["train"] += flash_state_bytes(version) - FLASH_STATE_BYTES
    return peaks


def _compared(what: str, peaks: dict[str, int], known: dict[str, int]) -> Iterator[str]:
    for phase, nbytes in known.items():
        if peaks.get(phase) != nbytes:
            yield f"{what}, {phase}: {peaks.get(phase)} bytes instead of {nbytes}"


def _measured(job: Job, modes: dict[str, str], trace: Trace) -> dict[str, int]:
    """Peaks of the same two windows really run here, without what operators allocate inside of themselves."""
    called = {"::".join(name.split(".")[:2]) for name in trace.names if "." in name}
    gc.collect()
    gc.disable()
    try:
        with AllocatorEvents() as events:
            with events.phase("setup"):
                train_state = build(job, torch.device("cpu"))
            micro = synthetic_micro_batch(job, SHAPE, torch.device("cpu"))
            with recompute(train_state.nets, modes):
                for _ in range(2):
                    with events.phase("train"):
                        run_window(train_state, [micro])
            with events.phase("save"):
                job.saved(train_state.nets, train_state.optimizers)
    finally:
        gc.enable()
    return {phase: peak.without_scratch_bytes for phase, peak in events.peaks(called).items()}


def main() -> int:
    """Exit code 0 where the test passed, 4 where it did not."""
    result = run()
    print("\n".join(result.differences) or f"torch {result.torch}: the self-test passed in {result.seconds:.1f} s")
    return Exit.DONE if result.passed else Exit.CHECK_FAILED


if __name__ == "__main__":
    sys.exit(main())
