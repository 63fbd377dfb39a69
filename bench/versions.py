"""python bench/versions.py --measure PART.json    in the environment of one version: tests, self-test and bytes
        --no-tests                                   the self-test and bytes alone, in a minute
python bench/versions.py --collect FOLDER          bench/results/versions.json, and the table in docs/versions.md

``scripts/versions.sh`` makes the environments and calls both. The tests are those of SUBSET: what memfit asks of
torch's internals, the allocator's settings against the installed torch, and the parametric CPU truth of the jobs that
need torch alone. Bytes are peaks on the virtual RTX 4090, compared with those of the pinned version.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS, PAGE = ROOT / "bench" / "results" / "versions.json", ROOT / "docs" / "versions.md"
BEGIN, END = "<!-- versions -->", "<!-- end of the table -->"
PINNED = "2.13.0+cpu"

SUBSET = (
    "tests/torch_compat", "tests/device", "tests/trace/test_self_test.py", "tests/trace/test_gradient_accumulation.py",
    "tests/trace/test_constant_values.py", "tests/replay/test_allocator_config.py", "tests/apply/test_checkpointing.py",
    "tests/apply/test_selective_checkpoint.py", "tests/apply/test_offload.py",
    "tests/planner/test_options.py",
)  # fmt: skip
TRUTH = "tests/trace/test_cpu_truth.py"
TRUTH_JOBS = "convolution or dit or recurrent or gan or checkpointed"
"""Jobs of the parametric CPU truth that need no other library."""
BYTES = ("convolution", "dit", "recurrent", "gan", "checkpointed")
SECONDS = 1500


def measure(*, tests: bool) -> dict[str, Any]:
    """What passes, and what is predicted, with the installed torch; without ``tests``, those are not run."""
    import torch

    begin = time.perf_counter()
    counts: dict[str, Any] = {"passed": None, "skipped": None, "failed": None}
    if tests:
        counts = _add(_run_tests(list(SUBSET)), _run_tests([TRUTH, "-k", TRUTH_JOBS]))
    test = subprocess.run([sys.executable, "-m", "memfit.trace.self_test"], capture_output=True, text=True, cwd=ROOT)
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "driver": torch.cuda.is_available(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        **counts,
        "self_test": (test.stdout or test.stderr).strip().splitlines()[-1],
        "self_test_passed": test.returncode == 0,
        "bytes": predicted_bytes(),
        "seconds": round(time.perf_counter() - begin),
    }


def _run_tests(arguments: list[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-m", "not slow", f"--junitxml={report}", *arguments]
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=SECONDS, check=False)
        if not report.exists():  # a crash of the interpreter, say
            return {"passed": 0, "skipped": 0, "failed": [f"pytest ended with code {ended.returncode}, and no report"]}
        cases = list(ElementTree.parse(report).iter("testcase"))
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = [case for case in cases if case.find("skipped") is not None]
    names = sorted(f"{case.get('classname')}::{case.get('name')}" for case in failed)
    return {"passed": len(cases) - len(failed) - len(skipped), "skipped": len(skipped), "failed": names}


def _add(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    return {name: first[name] + second[name] for name in first}


def predicted_bytes() -> dict[str, int]:
    """Peak of live bytes in training on the virtual card, by job and precision."""
    from memfit.device.hardware.catalogue import find_device
    from memfit.device.virtual import backend
    from memfit.job import Shape
    from memfit.trace.self_test import live_peaks
    from memfit.trace.step import Tracing, trace_job

    sys.path.insert(0, str(ROOT))
    from testing.nets import JOBS, SHAPES

    backend.register()
    peaks = {}
    for name in BYTES:
        items, length = SHAPES[name]
        for precision in ("fp32", "bf16"):
            job, shape = JOBS[name](precision=precision), Shape(items=items, length=length)
            peaks[f"{name}, {precision}"] = live_peaks(trace_job(job, shape, Tracing(device=find_device("rtx4090"))))[
                "train"
            ]
    return peaks


def collect(folder: Path) -> list[dict[str, Any]]:
    """Every part of a folder, and those of the committed results for versions that have none there; oldest first."""
    parts = {_key(part): part for part in (json.loads(RESULTS.read_text())["versions"] if RESULTS.exists() else [])}
    parts |= {_key(part): part for part in (json.loads(path.read_text()) for path in sorted(folder.glob("*.json")))}
    return sorted(parts.values(), key=lambda part: (_release(part["torch"]), part["torch"]))


def _key(part: dict[str, Any]) -> tuple[str, str]:
    return part["torch"], part["python"]


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version.partition("+")[0]))


def table(parts: list[dict[str, Any]]) -> str:
    """The results as Markdown."""
    pinned = next((part["bytes"] for part in parts if part["torch"] == PINNED), {})
    rows = [
        "| torch | CUDA driver | Python | tests passed | failed | skipped | self-test | bytes against 2.13.0 |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for part in parts:
        different = [name for name, nbytes in part["bytes"].items() if pinned.get(name) != nbytes]
        rows.append(
            f"| {part['torch']} | {'yes' if part['driver'] else 'no'} | {part['python']} | {_counts(part)} | "
            f"{'passed' if part['self_test_passed'] else 'failed'} | "
            f"{'differ: ' + '; '.join(different) if different else 'equal'} |"
        )
    return "\n".join(rows)


def _counts(part: dict[str, Any]) -> str:
    if part["passed"] is None:
        return "not run | not run | not run"
    return f"{part['passed']} | {len(part['failed'])} | {part['skipped']}"


def write(parts: list[dict[str, Any]]) -> None:
    """The JSON file, and the table of the page."""
    command = "bash scripts/versions.sh"
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    results = {"command": command, "subset": [*SUBSET, TRUTH], "versions": parts, "wheel": kept.get("wheel")}
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    text = PAGE.read_text()
    before, rest = text.split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n\n{table(parts)}\n\n{END}{rest.split(END)[1]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measure", type=Path, help="the part to write")
    parser.add_argument("--no-tests", action="store_true", help="the self-test and bytes alone")
    parser.add_argument("--collect", type=Path, help="the folder of parts")
    options = parser.parse_args()
    if options.measure:
        os.environ["PYTHONPATH"] = str(ROOT)
        options.measure.write_text(json.dumps(measure(tests=not options.no_tests), indent=1) + "\n")
    if options.collect:
        write(collect(options.collect))


if __name__ == "__main__":
    main()
