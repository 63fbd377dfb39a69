"""The other sources: real steps on this CPU, published figures, and cards that bench/measure_gpu.py has run on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from bench.accuracy_parts.measured import Measured, read_measured
from bench.result_file import read_result

NETS = ("convolution", "dit", "decoder")
ROOT = Path(__file__).resolve().parents[2]


def cpu_truth(console: Console) -> list[dict[str, Any]]:
    """Traced against really allocated bytes of small nets, one process for each, by phase."""
    answer: list[dict[str, Any]] = []
    for name in track(NETS, "CPU truth", console=console):
        command = [sys.executable, "-m", "bench.accuracy_parts.further_sources", name]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
        if done.returncode:
            console.print(f"{name}: {(done.stderr.strip().splitlines() or ['failed'])[-1]}", style="red")
            continue
        answer += json.loads(done.stdout)
    return answer


def compare_on_cpu(name: str) -> list[dict[str, Any]]:
    """One net of testing/nets.py: bytes by phase, traced and measured, without and with what lives inside operators."""
    from memfit.job import Shape
    from testing.nets import JOBS, SHAPES
    from testing.truth import compare

    items, length = SHAPES[name]
    traced, with_scratch, measured = compare(JOBS[name], {}, Shape(items=items, length=length), 1)
    return [
        {
            "net": name,
            "phase": phase,
            "traced_bytes": traced[phase],
            "measured_bytes": peak.without_scratch_bytes,
            "with_scratch_bytes": with_scratch[phase],
            "measured_with_scratch_bytes": peak.allocated_bytes,
        }
        for phase, peak in measured.items()
    ]


def published() -> list[dict[str, Any]]:
    """Predictions beside the figures that projects publish, as bench/published.py wrote them."""
    kept = ("job", "card", "micro_batch", "published", "kind", "phase", "predicted_bytes", "error")
    return [{name: row.get(name) for name in kept} for row in read_result("published")["rows"]]


def measured(folder: Path, console: Console) -> list[dict[str, Any]]:
    """Every line of every file under bench/measured/ beside its prediction."""
    runs = [run for path in sorted(folder.glob("*.jsonl")) for run in read_measured(path)]
    if not runs:
        console.print(f"no file in {folder.name}: nothing measured on a card of ours")
    return [beside(run) for run in track(runs, "measured on cards", console=console, disable=not runs)]


def beside(run: Measured) -> dict[str, Any]:
    """One measured step and its prediction; bytes of the phase that needs most."""
    from memfit.device.hardware.catalogue import find_device, with_memory
    from memfit.geometry import shape_of
    from memfit.loading import load_job
    from memfit.planner.predict import checkpoint_all, plain_nets, predict, with_precision

    job = with_precision(load_job(run.job, run.settings), run.precision)
    device = find_device(run.card)
    if run.memory_gib is not None:
        device = with_memory(device, int(run.memory_gib * 2**30))
    if device.usable_bytes is None:
        device = with_memory(device, 1 << 50)
    modes = checkpoint_all(job, plain_nets(job)) if run.checkpoint == "all" else {}
    prediction = predict(job, run.job, shape_of(job, run.micro_batch), device, checkpointing=modes)
    footprint = prediction.footprint
    allocated = max(phase.allocated_bytes for phase in footprint.phases.values())
    reserved = max(phase.reserved_bytes for phase in footprint.phases.values())
    return {
        "job": run.job, "card": run.card, "micro_batch": run.micro_batch, "precision": run.precision,
        "net_kind": footprint.net_kind, "ok": run.ok, "fits": footprint.fits,
        "allocated_error": allocated / run.allocated_bytes - 1,
        "reserved_error": None if run.reserved_bytes is None else reserved / run.reserved_bytes - 1,
    }  # fmt: skip


if __name__ == "__main__":
    import torch

    torch.set_num_threads(1)
    print(json.dumps(compare_on_cpu(sys.argv[1])))
