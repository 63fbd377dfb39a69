"""PyTorch's own CUDA allocator against memfit's, event by event, without a card.

python bench/allocator_oracle/compare.py --site DIR [--falling] [--traces 1000] [--record tests/replay/FILE.jsonl]

DIR holds a CUDA build of torch and the headers of nvidia-cuda-runtime and nvidia-cuda-crt, unpacked:
pip download --no-deps torch===2.13.0 nvidia-cuda-runtime nvidia-cuda-crt, and unzip each into DIR, without the
libcudart.so that comes with the headers. libc10_cuda.so runs on device.cpp, a CUDA of arithmetic alone: the addresses
are that device's and the decisions are PyTorch's. Random traces over settings, streams, capacities and memory
fractions; each event's address, allocated, reserved and requested bytes and retries must be equal. --record writes
traces with their answers, which the tests replay without that build.

--falling: each address is below those before, as with a driver for Linux. A torch that takes the oldest of equal blocks
(2.13) must do so then too; memfit counts addresses upwards for it, so that only their bytes are compared, and without
expandable segments, whose further ranges torch searches by address.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import runpy
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from memfit.replay.allocator_config import AllocatorConfig, takes_youngest
from memfit.replay.caching_allocator import CachingAllocator
from memfit.replay.errors import OutOfMemory

HERE = Path(__file__).parent
MIB = 1 << 20
SETTINGS = (
    "", "", "expandable_segments:True", "expandable_segments:True",
    "max_split_size_mb:20", "max_split_size_mb:21", "max_split_size_mb:64",
    "max_split_size_mb:30,max_non_split_rounding_mb:50",
    "garbage_collection_threshold:0.3", "garbage_collection_threshold:0.6", "garbage_collection_threshold:0.9",
    "roundup_power2_divisions:1", "roundup_power2_divisions:4", "roundup_power2_divisions:16",
    "roundup_power2_divisions:[1:2,4:4,16:8,>:1]", "large_segment_size_mb:11", "large_segment_size_mb:64",
    "expandable_segments:True,max_split_size_mb:20", "expandable_segments:True,max_split_size_mb:64",
    "expandable_segments:True,roundup_power2_divisions:4,large_segment_size_mb:32",
    "expandable_segments:True,garbage_collection_threshold:0.5",
    "max_split_size_mb:25,garbage_collection_threshold:0.6,roundup_power2_divisions:8",
)  # fmt: skip
Op = tuple[str, int, int, int]
State = tuple[int, int, int, int, int]


def random_trace(dice: random.Random, events: int) -> list[Op]:
    """Allocations and frees with recurring sizes, over one to three streams, and now and then an emptied cache."""
    top = dice.choice([15, 40, 130])

    def size() -> int:
        kinds = [(1, 5000), (1, 2 * MIB), (MIB, 12 * MIB), (10 * MIB, top * MIB)]
        return dice.randrange(*dice.choice(kinds))

    recurring = [size() for _ in range(dice.randrange(3, 40))]
    streams, most, live, ops = dice.choice([[0], [0], [0, 1], [0, 7, 3]]), dice.randrange(2, 120), [], []
    for storage in range(events):
        roll = dice.random()
        if roll < 0.004:
            ops.append(("e", 0, 0, 0))
        elif live and (len(live) > most or roll < 0.4):
            ops.append(("f", live.pop(dice.randrange(len(live)) if dice.random() < 0.6 else -1), 0, 0))
        else:
            nbytes = dice.choice(recurring) if dice.random() < 0.7 else size()
            ops.append(("m", storage, -(-nbytes // MIB) * MIB if dice.random() < 0.3 else nbytes, dice.choice(streams)))
            live.append(storage)
    return ops


def memfit_states(ops: list[Op], allocator: CachingAllocator) -> tuple[list[Op], list[State]]:
    """The ops that make sense (a failed allocation is not freed), and the state after each."""
    kept, states, failed = [], [], set()
    for op in ops:
        address = 0
        if op[0] == "m":
            try:
                allocator.malloc(*op[1:])
                address = allocator.address(op[1])
            except OutOfMemory:
                failed.add(op[1])
        elif op[0] == "f":
            if op[1] in failed:
                continue
            allocator.free(op[1])
        else:
            allocator.empty_cache()
        kept.append(op)
        states.append((address, allocator.allocated, allocator.reserved, allocator.requested, allocator.retries))
    return kept, states


def torch_states(driver: Path, case: dict[str, object], ops: list[Op]) -> list[State]:
    """What PyTorch's allocator answers."""
    env = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": str(case["settings"]), "MEMFIT_TOTAL": str(case["total"])}
    env["MEMFIT_FALLING"] = str(int(bool(case["falling"])))
    if case["capacity"] is not None:
        env["MEMFIT_CAPACITY"] = str(case["capacity"])
    if case["fraction"] is not None:
        env["MEMFIT_FRACTION"] = repr(case["fraction"])
    lines = "\n".join(" ".join(map(str, op[: {"m": 4, "f": 2, "e": 1}[op[0]]])) for op in ops)
    run = subprocess.run([driver], input=lines, capture_output=True, text=True, env=env)
    if run.returncode:
        raise RuntimeError(run.stderr[-2000:])
    return [tuple(map(int, line.split())) for line in run.stdout.splitlines()]  # type: ignore[misc]


def written(op: Op) -> str:
    """``12:5120@0`` allocates storage 12, ``-12`` frees it, ``e`` empties the cache."""
    return f"{op[1]}:{op[2]}@{op[3]}" if op[0] == "m" else f"-{op[1]}" if op[0] == "f" else "e"


def config_of(case: dict[str, object]) -> AllocatorConfig:
    """memfit's settings for a case."""
    return replace(AllocatorConfig.parse(str(case["settings"])), youngest_first=takes_youngest(str(case["torch"])))


def compared(states: list[State], case: dict[str, object]) -> list[State]:
    """States as they are compared: without addresses (1: any) where torch's fall and memfit's grow."""
    if not case["falling"] or takes_youngest(str(case["torch"])):
        return states
    return [(int(address != 0), *rest) for address, *rest in states]  # type: ignore[misc]


def random_case(dice: random.Random, torch_version: str, falling: bool) -> tuple[dict[str, object], list[Op]]:
    """Settings, limits around what the trace needs without any, and the trace."""
    only_bytes = falling and not takes_youngest(torch_version)
    settings = [text for text in SETTINGS if not (only_bytes and "expandable" in text)]
    case: dict[str, object] = {"torch": torch_version, "falling": falling, "settings": dice.choice(settings)}
    config = config_of(case)
    ops = random_trace(dice, dice.choice([60, 300, 1200]))
    free = CachingAllocator(None, config)
    memfit_states(ops, free)
    case |= {"capacity": None, "fraction": None, "total": 1 << 40}
    if config.garbage_collection_threshold or dice.random() < 0.2:
        case["fraction"] = fraction = round(dice.uniform(0.05, 0.95), 3)
        case["capacity"] = case["total"] = int(free.peak_reserved * dice.uniform(0.7, 1.3) / fraction) + MIB
    elif dice.random() < 0.7:
        case["capacity"] = case["total"] = int(free.peak_allocated * dice.uniform(0.6, 1.05)) + dice.randrange(3) * MIB
    return case, ops


def build(site: Path, into: Path) -> Path:
    """Compiles the device and the driver; the driver finds both CUDA libraries beside itself."""
    lib, include, cuda = (
        site / "torch/lib",
        site / "torch/include",
        next(site.glob("nvidia/*/include/cuda_runtime_api.h")).parent,
    )
    names = into / "names"
    names.write_text("libcudart.so.13 { global: cuda*; nvml*; local: *; };")
    device, driver = into / "libcudart.so.13", into / "driver"
    subprocess.run(["g++", "-O1", "-fPIC", "-shared", "-std=c++17", f"-I{cuda}", HERE / "device.cpp", "-o", device,
                    "-Wl,-soname,libcudart.so.13", f"-Wl,--version-script={names}"], check=True)  # fmt: skip
    (into / "libnvidia-ml.so.1").symlink_to(device)
    subprocess.run(["g++", "-O1", "-std=c++20", f"-I{include}", f"-I{cuda}", HERE / "driver.cpp", "-o", driver,
                    f"-L{lib}", "-lc10", "-lc10_cuda", f"-L{into}", "-l:libcudart.so.13", "-Wl,--disable-new-dtags",
                    f"-Wl,-rpath,{lib}", f"-Wl,-rpath,{into}", "-Wl,--allow-shlib-undefined"], check=True)  # fmt: skip
    os.environ["LD_LIBRARY_PATH"] = f"{into}:{lib}"
    return driver


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--site", type=Path, required=True)
    options.add_argument("--traces", type=int, default=1000)
    options.add_argument("--first", type=int, default=0, help="seed of the first trace")
    options.add_argument("--falling", action="store_true", help="each address is below those before")
    options.add_argument("--record", type=Path)
    given = options.parse_args()
    torch_version = str(runpy.run_path(str(given.site / "torch" / "version.py"))["__version__"])
    events = failures = retries = 0
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        driver = build(given.site.resolve(), Path(folder))
        for seed in range(given.first, given.first + given.traces):
            case, ops = random_case(random.Random(seed), torch_version, given.falling)
            fraction, total, capacity = case["fraction"], case["total"], case["capacity"]
            allowed = int(fraction * total) if fraction is not None else None  # type: ignore[operator]
            kept, ours = memfit_states(ops, CachingAllocator(capacity, config_of(case), allowed=allowed))  # type: ignore[arg-type]
            ours, theirs = compared(ours, case), compared(torch_states(driver, case, kept), case)
            if ours != theirs:
                at = next(i for i, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1])
                print(f"seed {seed} {case}: event {at} {kept[at]}: torch {theirs[at]}, memfit {ours[at]}")
                return 1
            events, retries = events + len(kept), retries + ours[-1][4]
            failures += sum(op[0] == "m" and state[0] == 0 for op, state in zip(kept, ours, strict=True))
            if given.record:
                answer = hashlib.sha256(repr(theirs).encode()).hexdigest()
                lines.append({**case, "last": theirs[-1], "sha256": answer, "ops": " ".join(map(written, kept))})
    if given.record:
        given.record.write_text("".join(json.dumps(line) + "\n" for line in lines))
    print(f"{given.traces} traces, {events} events, {failures} out of memory, {retries} retries: all equal")
    return 0


if __name__ == "__main__":
    sys.exit(main())
