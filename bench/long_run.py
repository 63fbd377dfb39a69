"""A long run of a small job: memory, lines on disk, its report, and a resume after it.

python -m bench.long_run [--windows 100000] [--json F]

``memfit run`` trains a small net. The bytes of the training process are read all along; growth is what they are at the
end beyond what they were after a tenth of the windows. Then the report is written and drawn by Chromium, and the run is
resumed for one window more, as after a stop.

Bounds of the project: the report under 6 MB and drawn in under 3 s.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.result_file import ROOT, add_json_option, target, write_result
from memfit.job import Job, Loss
from memfit.plan import Plan, write_plan
from memfit.train.line_parts import parts_of
from memfit.train.metrics_file import last_window
from testing.browser import browser, load, missing

BATCH = 8
READS_EVERY = 1.0
"""Seconds."""


class Small(Job):
    """A net of two layers, validated now and then."""

    windows: int = 100
    validate_every: int = 1000

    def nets(self) -> dict[str, nn.Module]:
        torch.manual_seed(0)
        return {"net": nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 1))}

    def optimizers(self, nets: dict[str, nn.Module]) -> dict[str, torch.optim.Optimizer]:
        return {"adam": torch.optim.AdamW(nets["net"].parameters(), lr=1e-3)}

    def batch(self, shape: Any) -> list[torch.Tensor]:
        return [torch.randn(shape.items, 16), torch.randn(shape.items)]

    def dataset(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        x = torch.randn(1000, 16, generator=torch.Generator().manual_seed(0))
        return list(zip(x, x.sum(1), strict=True))

    def validation_dataset(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return self.dataset()[:32]

    def validate(self, nets: dict[str, nn.Module], batch: list[torch.Tensor]) -> dict[str, float]:
        return {"loss": float((nets["net"](batch[0]).squeeze(-1) - batch[1]).square().mean())}

    def loss(self, nets: dict[str, nn.Module], batch: list[torch.Tensor]) -> Loss:
        error = (nets["net"](batch[0]).squeeze(-1) - batch[1]).square()
        return Loss(error.sum(), len(error))


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What the training process held when a window had ended."""

    window: int
    nbytes: int
    """Private writable memory in memory."""


def run(plan: Path, out: Path, *options: str) -> list[Reading]:
    """``memfit run`` to its end."""
    command = [sys.executable, "-m", "memfit", "run", str(plan), "--out", str(out), *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)
    readings = []
    while process.poll() is None:
        time.sleep(READS_EVERY)
        with suppress(psutil.Error):
            held = max((memory for memory in _training(psutil.Process(process.pid))), default=0)
            readings.append(Reading(window=last_window(out / "metrics.jsonl"), nbytes=held))
    if process.returncode:
        sys.exit(f"memfit run ended with exit code {process.returncode}")
    return readings


def _training(process: psutil.Process) -> Iterator[int]:
    """Bytes of the training process, which ``memfit run`` starts."""
    for child in process.children(recursive=True):
        with suppress(psutil.Error):
            if any("rank_entry" in word for word in child.cmdline()):
                yield child.memory_full_info().uss


def main() -> None:
    """Prints and writes what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=100_000)
    add_json_option(parser)
    asked = parser.parse_args()
    if lacking := missing():
        sys.exit(lacking)
    plan = Plan(
        job=f"{ROOT / 'bench' / 'long_run.py'}:Small", settings={}, device="cpu", budget_bytes=256 << 20,
        unit="samples", global_batch=BATCH, micro_batch=BATCH, micro_batches=[[BATCH]], arithmetic="8 = 8 x 1",
        engine="single", precision="fp32", seed=0,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        out = folder / "run"
        write_plan(plan, folder / "plan.toml")
        begin = time.perf_counter()
        readings = run(folder / "plan.toml", out, "--windows", str(asked.windows))
        seconds = time.perf_counter() - begin
        sizes = {
            lines: {
                "bytes": (out / f"{lines}.jsonl").stat().st_size,
                "bytes_of_parts": sum(part.path.stat().st_size for part in parts_of(out / f"{lines}.jsonl")),
            }
            for lines in ("metrics", "samples")
        }
        report = folder / "report.html"
        begin = time.perf_counter()
        command = [sys.executable, "-m", "memfit", "report", str(out), "--out", str(report)]
        subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True)
        written = time.perf_counter() - begin
        drawn = []
        with browser() as driver:
            for _ in range(3):
                driver.get("about:blank")
                begin = time.perf_counter()
                load(driver, report)
                drawn.append(time.perf_counter() - begin)
        begin = time.perf_counter()
        resumed = run(folder / "plan.toml", out, "--windows", str(asked.windows + 1), "--resume")
        resume_seconds = time.perf_counter() - begin
        report_bytes = report.stat().st_size
    early = next(reading for reading in readings if reading.window >= asked.windows // 10)
    last = [reading for reading in readings if reading.nbytes][-1]
    figures = {
        "windows": asked.windows,
        "seconds": seconds,
        "memory": {
            "window": early.window, "bytes": early.nbytes, "last_window": last.window, "last_bytes": last.nbytes,
            "growth_bytes": last.nbytes - early.nbytes, "resume_bytes": max(reading.nbytes for reading in resumed),
        },
        "lines": sizes,
        "report": {"bytes": report_bytes, "seconds": written, "drawn_seconds": drawn},
        "resume_seconds": resume_seconds,
    }  # fmt: skip
    print(figures)
    write_result(target(asked.json), figures)


if __name__ == "__main__":
    main()
