"""python bench/versions.py --measure PART.json    in the environment of one version: tests, self-test and bytes
        --tests none|subset|folders|again            which tests run beside the self-test, bytes and checks
python bench/versions.py --collect FOLDER          bench/results/versions.json, and the table in docs/versions.md
python bench/versions.py --wheel MEMFIT            an installed wheel's predictions beside this environment's

``scripts/versions.sh`` makes the environments and calls both. The tests are those of SUBSET: what memfit asks of
torch's internals, the allocator's settings against the installed torch, and the parametric CPU truth of the jobs that
need torch alone; ``--tests folders`` runs the folders of FOLDERS whole, and ``--tests again`` those that failed when
the committed results of this version were made. CHECKS are commands whose jobs need
transformers, diffusers, accelerate, lightning or DeepSpeed. Bytes are peaks on the virtual RTX 4090, compared with
those of the pinned version.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS, PAGE = ROOT / "bench" / "results" / "versions.json", ROOT / "docs" / "versions.md"
BEGIN, END = "<!-- versions -->", "<!-- end of the table -->"
PINNED = "2.13.0+cpu"

SUBSET = (
    "tests/torch_compat", "tests/device", "tests/trace/test_self_test.py", "tests/trace/test_gradient_accumulation.py",
    "tests/trace/test_constant_values.py", "tests/replay/test_allocator_config.py", "tests/apply",
    "tests/planner/test_options.py", "tests/planner/test_kept_questions.py",
)  # fmt: skip
FOLDERS = tuple(f"tests/{folder}" for folder in ("torch_compat", "device", "trace", "replay", "apply", "planner"))
"""What ``--folders`` runs in place of the subset: these folders whole, 10 to 25 minutes on two cores."""
LIBRARIES = ("transformers", "diffusers", "accelerate", "lightning", "deepspeed", "peft")
CHECKS = {
    "Llama with LoRA (transformers, peft)": "predict examples/llama_lora.py:Llama8B --set layers=2 --device rtx4090",
    "U-Net (diffusers)": "predict examples/unet.py:Discs --device rtx4090",
    "U-Net, ZeRO stage 2 (diffusers, deepspeed)":
        "predict examples/unet.py:Discs --device rtx4090 --engine zero2 --world 2",
    "script (accelerate)": "trace --device rtx4090 --steps 2 -- python bench/library_scripts/accelerate_loop.py",
    "script (lightning)": "trace --device rtx4090 --steps 2 -- python bench/library_scripts/lightning_module.py",
}  # fmt: skip
"""Commands whose libraries are the newest that the version allows, by what they need."""
TRUTH = "tests/trace/test_cpu_truth.py"
TRUTH_JOBS = "(convolution or dit or recurrent or gan or checkpointed) and -2]"
"""The parametric CPU truth of two micro-batches, of the jobs that need no other library."""
BYTES = ("convolution", "dit", "recurrent", "gan", "checkpointed")
WHEEL_JOBS = {"gan.py:Waves": "64", "f5_tts/base": "3200"}
"""Jobs that an installed wheel predicts on the virtual RTX 4090, and the units of their micro-batches."""
SECONDS = 3600


def measure(*, tests: str) -> dict[str, Any]:
    """What passes, and what is predicted, with the installed torch.

    Args:
        tests: none, subset, folders or again.
    """
    import torch

    begin = time.perf_counter()
    counts: dict[str, Any] = {"passed": None, "skipped": None, "failed": None}
    kept = next((part for part in _committed()["versions"] if _key(part) == _installed()), None)
    if tests == "subset":
        counts = _add(_run_tests(list(SUBSET)), _run_tests([TRUTH, "-k", TRUTH_JOBS]))
    elif tests == "folders":
        counts = _run_tests(list(FOLDERS))
    elif tests == "again" and kept is not None and kept.get("tests", "none") != "none":
        nodes = [_node(name) for name in kept["failed"]]
        counts = _add(kept | {"failed": []}, _run_tests(nodes)) if nodes else {name: kept[name] for name in counts}
        tests = kept["tests"]
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
        "tests": tests,
        "libraries": {name: version for name in LIBRARIES if (version := _version(name))},
        "checks": {name: _check(command) for name, command in CHECKS.items()},
        "seconds": round(time.perf_counter() - begin),
    }


def _committed() -> dict[str, Any]:
    results: dict[str, Any] = json.loads(RESULTS.read_text())
    return results


def _installed() -> tuple[str, str]:
    """The key of the installed torch among the results."""
    import torch

    return torch.__version__, platform.python_version()


def _node(name: str) -> str:
    """``tests/device/test_traps.py::test_x`` of ``tests.device.test_traps::test_x``, as pytest takes it."""
    module, _, test = name.partition("::")
    return f"{module.replace('.', '/')}.py::{test}"


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _check(command: str) -> str:
    """The answer's first line, or the error's last."""
    words = [sys.executable, "-m", "memfit", *command.split()]
    ended = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS, check=False)
    said = ended.stdout.strip().splitlines() if ended.returncode in (0, 3) else ended.stderr.strip().splitlines()[::-1]
    return f"{'' if ended.returncode in (0, 3) else 'failed: '}{said[0] if said else 'nothing said'}"


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
    return {name: first[name] + second[name] for name in second}


def predicted_bytes() -> dict[str, int]:
    """Peak of live bytes in training on the virtual card, by job and precision."""
    from memfit.device.hardware.catalogue import find_device
    from memfit.device.virtual import backend
    from memfit.job import Shape
    from memfit.trace.self_test import live_peaks
    from memfit.trace.step import Tracing, trace_job

    sys.path.insert(0, str(ROOT))
    from testing.nets import JOBS, SHAPES

    backend.register_virtual_device()
    peaks = {}
    for name in BYTES:
        items, length = SHAPES[name]
        for precision in ("fp32", "bf16"):
            job, shape = JOBS[name](precision=precision), Shape(items=items, length=length)
            peaks[f"{name}, {precision}"] = live_peaks(trace_job(job, shape, Tracing(device=find_device("rtx4090"))))[
                "train"
            ]
    return peaks


def collect(folder: Path, committed: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every part of a folder, and the committed ones for versions that have none there; oldest first."""
    parts = {_key(part): part for part in committed}
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
        "| torch | CUDA driver | Python | tests | passed | failed | skipped | self-test | libraries "
        "| bytes against 2.13.0 |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for part in parts:
        different = [name for name, nbytes in part["bytes"].items() if pinned.get(name) != nbytes]
        rows.append(
            f"| {part['torch']} | {'yes' if part['driver'] else 'no'} | {part['python']} | {_counts(part)} | "
            f"{'passed' if part['self_test_passed'] else 'failed'} | {_checked(part)} | "
            f"{'differ: ' + '; '.join(different) if different else 'equal'} |"
        )
    return "\n".join(rows)


def _checked(part: dict[str, Any]) -> str:
    checks = part.get("checks")
    if not checks:
        return "not run"
    failed = [name for name, said in checks.items() if said.startswith("failed: ")]
    return f"{len(checks) - len(failed)} of {len(checks)}" + (f"; failed: {', '.join(failed)}" if failed else "")


def wheel(memfit: Path) -> dict[str, Any]:
    """Predictions of an installed wheel, which runs outside of this checkout, beside those of this environment.

    Args:
        memfit: the command in the wheel's environment.
    """
    here, there = [sys.executable, "-m", "memfit"], [str(memfit.absolute())]
    outside = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(ROOT / "examples" / "gan.py", folder)
        doctor = json.loads(_answer([*there, "doctor", "--json"], Path(folder), outside))
        pinned, predicted = {}, {}
        for job in WHEEL_JOBS:
            pinned[job] = _phases(job, here, Path(folder), os.environ | {"PYTHONPATH": str(ROOT)})
            predicted[job] = _phases(job, there, Path(folder), outside)
    return {
        "commands": [
            "python -m build && python -m venv V && V/bin/pip install dist/*.whl",
            "python bench/versions.py --wheel V/bin/memfit",
        ],
        "environment": {
            "python": doctor["python"],
            "torch": doctor["torch"]["version"],
            "driver": doctor["driver"],
            "self_test": doctor["self_test"]["text"],
        },
        "reference": metadata.version("torch"),
        "predictions": {job: {"reference": pinned[job], "wheel": predicted[job]} for job in WHEEL_JOBS},
        "equal": pinned == predicted,
    }


def _phases(job: str, memfit: list[str], folder: Path, environment: Mapping[str, str]) -> dict[str, dict[str, int]]:
    """Every byte that a prediction says of a job's phases."""
    words = ["predict", job, "--device", "rtx4090", "--micro-batch", WHEEL_JOBS[job], "--json"]
    phases = json.loads(_answer([*memfit, *words], folder, environment))["phases"]
    return {
        phase: {name: value for name, value in peaks.items() if "_bytes" in name} for phase, peaks in phases.items()
    }


def _answer(words: list[str], folder: Path, environment: Mapping[str, str]) -> str:
    return subprocess.run(
        words, cwd=folder, env=environment, check=True, stdout=subprocess.PIPE, text=True, timeout=SECONDS
    ).stdout


def _counts(part: dict[str, Any]) -> str:
    if part["passed"] is None:
        return "none | | |"
    return f"{part.get('tests', 'subset')} | {part['passed']} | {len(part['failed'])} | {part['skipped']}"


def write(parts: list[dict[str, Any]], wheel: dict[str, Any] | None) -> None:
    """The JSON file, and the table of the page.

    Args:
        parts: what ``measure`` gave for each version.
        wheel: what ``wheel`` gave.
    """
    command = "bash scripts/versions.sh"
    results = {
        "command": command,
        "subset": [*SUBSET, TRUTH],
        "folders": list(FOLDERS),
        "checks": CHECKS,
        "versions": parts,
        "wheel": wheel,
    }
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    text = PAGE.read_text()
    before, rest = text.split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n\n{table(parts)}\n\n{END}{rest.split(END)[1]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measure", type=Path, help="the part to write")
    parser.add_argument(
        "--tests", choices=("none", "subset", "folders", "again"), default="subset", help="which tests run"
    )
    parser.add_argument("--collect", type=Path, help="the folder of parts")
    parser.add_argument("--wheel", type=Path, help="the memfit of an environment that a wheel is installed in")
    options = parser.parse_args()
    if options.measure:
        os.environ["PYTHONPATH"] = str(ROOT)
        options.measure.write_text(json.dumps(measure(tests=options.tests), indent=1) + "\n")
    committed = _committed()
    if options.collect:
        write(collect(options.collect, committed["versions"]), committed["wheel"])
    if options.wheel:
        write(committed["versions"], wheel(options.wheel))


if __name__ == "__main__":
    main()
