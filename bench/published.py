"""Predictions beside the figures that others published: python -m bench.published [--only f5_tts] [--json F]

Reads bench/published.toml, prints a table and writes bench/results/published.json. No number here was fitted to them.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from bench.creep import packed_shapes, reserved_after  # noqa: E402
from bench.result_file import add_json_option, target, write_result  # noqa: E402
from bench.zero2 import zero2  # noqa: E402
from memfit import toml  # noqa: E402
from memfit.device.hardware.catalogue import Device, find_device  # noqa: E402
from memfit.errors import InputError  # noqa: E402
from memfit.events import Trace  # noqa: E402
from memfit.footprint import Footprint  # noqa: E402
from memfit.geometry import shape_of  # noqa: E402
from memfit.job import Job  # noqa: E402
from memfit.loading import load_job  # noqa: E402
from memfit.planner.predict import default_checkpointing, footprint_on, plain_nets  # noqa: E402
from memfit.replay.caching_allocator import CachingAllocator  # noqa: E402
from memfit.trace.step import Tracing, trace_job  # noqa: E402

FIGURES = HERE / "published.toml"
BATCHES = 150
STATE = ("parameters", "gradients", "communication", "optimizer")
POLICY = {"zero_grad": "after_step", "validation_decode": 4, "validation_keeps": "host"}
"""LatentSync's settings under which its validation holds nothing that grows with the video."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One figure and its prediction, in bytes; errors are fractions of what was published."""

    job: str
    card: str
    micro_batch: int
    unit: str
    engine: str
    world: int
    published: str
    kind: str
    phase: str
    predicted_bytes: int
    allocated_bytes: int
    error: float
    """A GB read as GiB."""
    error_decimal: float | None
    """A GB read as 10^9 bytes; None where the unit is not in doubt."""
    sequence_bytes: int | None
    """Process bytes after 150 batches of varying lengths; None where lengths do not vary."""
    source: str
    unknown: str
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Validation:
    """LatentSync's stage 1 on 24 GB by the length of its validation video."""

    fails_from: int | None
    """Frames of the shortest video that fails, to 16 frames; None: none up to the longest tried."""
    longest_that_fits: int
    asks_for_bytes: int | None
    module: str | None
    largest_request_bytes: int
    largest_request_module: str
    with_policy: dict[str, int]
    """Process bytes of the validation under the policy, by frames."""


def readings(published: str) -> tuple[float, float | None]:
    """Bytes of ``23 GB``, ``19552 MiB`` or the middle of ``60 to 80 GB``: as GiB and, where that may be meant, 10^9."""
    match = re.fullmatch(r"([\d.]+)(?: to ([\d.]+))? (GB|GiB|MiB)", published)
    if match is None:
        raise InputError(f"published = {published!r}", "not a size", "write 23 GB, 22.7 GiB or 60 to 80 GB")
    value = (float(match[1]) + float(match[2] or match[1])) / 2
    unit = 2**20 if match[3] == "MiB" else 2**30
    return value * unit, value * 1e9 if match[3] == "GB" else None


@cache
def _trace(name: str, card: str, micro_batch: int, settings: str) -> Trace:
    job = load_job(name, json.loads(settings))
    modes = default_checkpointing(job, plain_nets(job))
    return trace_job(job, shape_of(job, micro_batch), Tracing(device=find_device(card), checkpointing=modes))


def traced(name: str, card: str, micro_batch: int, settings: dict[str, Any] | None = None) -> Trace:
    """The step of a job; a second question for the same one costs nothing."""
    return _trace(name, card, micro_batch, json.dumps(settings or {}, sort_keys=True))


def rows(figure: dict[str, Any]) -> Iterator[Row]:
    """A figure's prediction; where the ranks are not known, one for each number of them."""
    name, card = figure["job"], find_device(figure["card"])
    job = load_job(name, figure.get("settings", {}))
    settings = figure.get("settings", {})
    if figure.get("at_failure"):
        settings = settings | {"validation_frames": validation(card.key).fails_from or 250}
    trace = traced(name, card.key, figure["micro_batch"], settings)
    for world in figure.get("zero2", [figure.get("world", 1)]):
        trained = sum(p.numel() for net in plain_nets(job).values() for p in net.parameters() if p.requires_grad)
        own = zero2(trace, world, trained) if "zero2" in figure else trace
        footprint = footprint_on(own, card)
        peak = footprint.phases[figure["phase"]]
        if figure.get("at_failure"):
            predicted = in_use_at_failure(own, card) or peak.process_bytes
        elif figure["kind"] == "state":
            predicted = sum(peak.categories[part] for part in STATE)
        else:
            predicted = peak.process_bytes
        binary, decimal = readings(figure["published"])
        yield Row(
            job=name, card=card.key, micro_batch=figure["micro_batch"], unit=job.unit,
            engine="zero2" if "zero2" in figure else _engine(job), world=world,
            published=figure["published"], kind=figure["kind"], phase=figure["phase"],
            predicted_bytes=predicted, allocated_bytes=peak.allocated_bytes,
            error=predicted / binary - 1, error_decimal=predicted / decimal - 1 if decimal else None,
            sequence_bytes=_sequence(figure), source=figure["source"], unknown=figure["unknown"], settings=settings,
        )  # fmt: skip


def _engine(job: Job) -> str:
    return "single" if job.wrapper == "none" else "ddp"


def _sequence(figure: dict[str, Any]) -> int | None:
    if "clips_seconds" not in figure:
        return None
    shapes = packed_shapes(figure["micro_batch"], tuple(figure["clips_seconds"]), BATCHES)
    return reserved_after(load_job(figure["job"], figure.get("settings", {})), figure["card"], shapes)[-1]


def in_use_at_failure(trace: Trace, card: Device) -> int | None:
    """Process bytes when the replay under the card's memory fails; None where it does not."""
    from memfit.replay.errors import OutOfMemory

    context = card.context_bytes or 0
    allocator = CachingAllocator((card.usable_bytes or 0) - context)
    for kind, storage in zip(trace.kind.tolist(), trace.storage.tolist(), strict=True):
        try:
            if kind > 0:
                allocator.malloc(storage, int(trace.nbytes[storage]))
            elif kind < 0:
                allocator.free(storage)
            else:
                allocator.empty_cache()
        except OutOfMemory:
            return allocator.reserved + context
    return None


@cache
def validation(card: str) -> Validation:
    """From which length on LatentSync's validation fails on this card, found by halving."""
    device = find_device(card)

    def at(frames: int) -> Footprint:
        return footprint_on(traced("latentsync/stage1", card, 1, {"validation_frames": frames}), device)

    low, high = 64, 2048
    footprints = {frames: at(frames) for frames in (low, high)}
    while high - low > 16 and not footprints[high].fits:
        middle = (low + high) // 32 * 16
        footprints[middle] = at(middle)
        low, high = (middle, high) if footprints[middle].fits else (low, middle)
    failed = footprints[high].failed_request
    largest = footprints[low].phases["validate"].largest_request
    policy = {}
    for frames in (250, 2500, 25000):
        settings = {**POLICY, "validation_frames": frames}
        policy[str(frames)] = footprint_on(
            traced("latentsync/stage1", card, 1, settings), device
        ).phases["validate"].process_bytes  # fmt: skip
    return Validation(
        fails_from=high if failed else None,
        longest_that_fits=low if failed else high,
        asks_for_bytes=failed.bytes if failed else None,
        module=failed.module if failed else None,
        largest_request_bytes=largest.bytes,
        largest_request_module=largest.module,
        with_policy=policy,
    )


def main() -> None:
    """Prints the table and writes it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="jobs whose name holds this text; default: all, and results written")
    add_json_option(parser)
    asked = parser.parse_args()
    only = asked.only
    figures = [figure for figure in toml.loads(FIGURES.read_text())["figure"] if only in figure["job"]]
    compared = []
    for figure in figures:
        for row in rows(figure):
            compared.append(row)
            decimal = "" if row.error_decimal is None else f"{row.error_decimal:+8.1%}"
            print(
                f"{row.job:22} {row.micro_batch:6} {row.engine:6} x{row.world:<2} {row.kind:8} {row.published:>12} "
                f"{row.predicted_bytes / 2**30:7.2f} GiB {row.error:+7.1%} {decimal:8} "
                + (f"{row.sequence_bytes / 2**30:.2f} GiB after {BATCHES} batches" if row.sequence_bytes else ""),
                flush=True,
            )
    if only and only not in "latentsync":
        return
    lengths = validation("rtx4090")
    print(json.dumps(asdict(lengths), indent=1))
    result = {"rows": [asdict(row) for row in compared], "validation": asdict(lengths)}
    write_result(target(asked.json, complete=not only), result, packages=["diffusers", "transformers", "deepspeed"])


if __name__ == "__main__":
    main()
