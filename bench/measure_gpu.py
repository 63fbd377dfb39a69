"""Runs training steps on this machine's card and keeps what they took: bench/measured/CARD.jsonl.

python -m bench.measure_gpu [--list] [--minutes 9] [--only WORD] [--out F.jsonl]

First, what a process holds outside the allocator is written to CARD.overheads.json, stage by stage: context, libraries
in fp32, fp16 and bf16, a communicator of NCCL (NVML's bytes). Then each configuration runs in a fresh process.
Micro-batches grow by a factor of four until one runs out of memory, whole and with 24, 40 and 80 GiB
(set_per_process_memory_fraction). What is in the file already is not run again, so that the work can be done in several
calls, each under ten minutes. Nothing else may use the card meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from rich.console import Console  # noqa: E402

from bench.accuracy_parts.measured import Measured, append_measured, read_measured  # noqa: E402
from memfit.errors import InputError  # noqa: E402

console = Console(highlight=False)
JOBS = "bench.accuracy_parts.gpu_jobs"
BUILT_IN = ("musetalk/stage1", "latentsync/stage1", "f5_tts/small", "gpt_sovits/s1", "gpt_sovits/s2")
TIMM = ("resnet50", "vit_base_patch16_224", "convnext_tiny", "efficientnet_b0", "swin_tiny_patch4_window7_224")
SIZES = (1, 4, 16, 64, 256, 1024)


def configurations(card: str, driver: str | None) -> list[Measured]:
    """What is measured, each with micro-batch 1 and the whole card."""
    import torch

    def step(job: str, precision: str, checkpoint: str = "none", **settings: Any) -> Measured:
        return Measured(
            card=card, driver=driver, torch=torch.__version__, job=job, settings=settings, micro_batch=1,
            precision=precision, checkpoint=checkpoint, memory_gib=None, ok=False, allocated_bytes=0,
            reserved_bytes=None, process_bytes=None, step_seconds=None,
        )  # fmt: skip

    steps = [step(job, precision) for job in BUILT_IN for precision in ("fp32", "bf16", "fp16")]
    steps += [step(job, "fp16", "all") for job in BUILT_IN]
    for name, settings in (("UNet", {}), ("Language", {"net": "gpt2"}), ("Language", {"net": "llama"})):
        for precision in ("fp32", "bf16", "fp16"):
            steps.append(step(f"{JOBS}:{name}", precision, **settings))
        steps.append(step(f"{JOBS}:{name}", "bf16", "all", **settings))
        steps.append(step(f"{JOBS}:{name}", "bf16", implementation="fused", **settings))
    for model in TIMM:
        steps += [step(f"{JOBS}:Picture", precision, model=model) for precision in ("fp32", "bf16")]
        steps.append(step(f"{JOBS}:Picture", "fp32", model=model, benchmark=True))
    return steps


def main() -> int:
    """2 where there is no card."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="only say what would be run")
    parser.add_argument("--minutes", type=float, default=9, help="starts nothing new after so long")
    parser.add_argument("--only", default="", help="only jobs or settings with this word in them")
    parser.add_argument("--out", type=Path, help="default: bench/measured/CARD.jsonl")
    given = parser.parse_args()
    try:
        card, driver, memory = ("cpu", None, 0) if given.list else card_here()
        wanted = [step for step in configurations(card, driver) if given.only in json.dumps(asdict(step))]
        if given.list:
            for step in wanted:
                console.print(f"{step.job} {step.settings} {step.precision} checkpoint {step.checkpoint}")
            console.print(f"{len(wanted)} configurations, each at up to {len(SIZES)} micro-batches")
            return 0
        path = given.out or ROOT / "bench" / "measured" / f"{card}.jsonl"
        measure_overheads(path.with_suffix(".overheads.json"), card, driver)
        measure_all(wanted, path, memory, time.monotonic() + 60 * given.minutes)
    except InputError as error:
        console.print(error, style="red")
        return 2
    return 0


def measure_overheads(path: Path, card: str, driver: str | None) -> None:
    """Writes what a process holds outside the allocator, unless the file is there."""
    if path.exists():
        return
    command = [sys.executable, "-m", "bench.accuracy_parts.gpu_overheads"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        console.print(f"overheads: {(done.stderr.strip().splitlines() or ['no word'])[-1]}", style="red")
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"card": card, "driver": driver, **json.loads(lines[-1])}, indent=1) + "\n")
    console.print(f"written to {path}")


def measure_all(wanted: list[Measured], path: Path, memory: int, until: float) -> None:
    """Runs what is not in the file yet and adds its lines."""
    done = {_key(step): step for step in read_measured(path)} if path.exists() else {}
    budgets = [None, *(gib for gib in (24.0, 40.0, 80.0) if gib * 2**30 < memory)]
    for step in (replace(step, memory_gib=gib) for gib in budgets for step in wanted):
        for sized in growing(step):
            measured = done.get(_key(sized))
            if measured is None:
                if time.monotonic() > until:
                    console.print("time is up; start it again to go on")
                    return
                measured = in_a_process(sized)
                if measured is None:
                    break
                append_measured(path, measured)
                _say(measured)
            if not measured.ok:
                break


def growing(step: Measured) -> Iterator[Measured]:
    """The configuration at one micro-batch after another."""
    for size in SIZES:
        yield replace(step, micro_batch=size * (512 if step.job.startswith(("f5_tts", "e2_tts")) else 1))


def in_a_process(step: Measured) -> Measured | None:
    """Runs it in a fresh process; None, with its last words, where that fails of another thing than memory."""
    environment = {**os.environ, "MEMFIT_USED_BEFORE": str(used_bytes())}
    command = [sys.executable, "-m", "bench.accuracy_parts.gpu_step", json.dumps(asdict(step))]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        console.print(f"{step.job}: {(done.stderr.strip().splitlines() or ['no word'])[-1]}", style="red")
        return None
    return Measured(**json.loads(lines[-1]))


def card_here() -> tuple[str, str, int]:
    """(catalogue's name, driver, bytes) of the first card.

    Raises:
        InputError: there is none, or it is not in the catalogue.
    """
    from memfit.device.hardware.catalogue import catalogue
    from memfit.device.hardware.local_devices import local_devices

    cards = [device for device in local_devices() if device.is_cuda]
    if not cards:
        raise InputError("this machine", "it has no CUDA card", "run it on one; --list says what it would measure")
    name = next((key for key, known in catalogue().items() if known.name == cards[0].name), None)
    if name is None:
        raise InputError(
            f"card {cards[0].name}", "it is not in the catalogue", "add it to memfit/device/hardware/catalogue.toml"
        )
    import pynvml

    pynvml.nvmlInit()
    return name, pynvml.nvmlSystemGetDriverVersion(), cards[0].memory_bytes or 0


def used_bytes() -> int:
    """Bytes in use on the first card; 0 where there is none."""
    import pynvml

    try:
        pynvml.nvmlInit()
        return int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).used)
    except pynvml.NVMLError:
        return 0


def _key(step: Measured) -> str:
    """What makes two configurations the same."""
    kept = ("card", "job", "settings", "micro_batch", "precision", "checkpoint", "memory_gib")
    return json.dumps({name: getattr(step, name) for name in kept}, sort_keys=True)


def _say(step: Measured) -> None:
    gib = step.allocated_bytes / 2**30
    console.print(
        f"{step.job} {step.settings} {step.precision} {step.checkpoint} x {step.micro_batch}: "
        + (f"{gib:.2f} GiB allocated" if step.ok else f"out of memory at {gib:.2f} GiB allocated")
    )


if __name__ == "__main__":
    sys.exit(main())
