"""LatentSync's validation in a budget in which it dies as upstream has it, and a whole run under memfit's plan.

python -m bench.latentsync_story [--windows 6] [--out FOLDER] [--json F]

latentsync/tiny: the code of stage 2 with narrow nets. The budget is not chosen by hand: it is 90 % of what upstream's
validation is predicted to ask for, and must hold its training. Then, under that budget:

1. upstream's step, really run as it is (memfit probe): it must run out of memory in validation;
2. a run with upstream's way to validate (gradients kept, everything resident, whole decode) under memfit's runner,
   which must find before its first window that memory really runs out in it, and go on with less;
3. memfit's plan, run to its end: it must validate at every interval at the first try;
4. the run's report: it must say that upstream runs out of memory in validation.
"""

from __future__ import annotations

import argparse
import html
import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.result_file import add_json_option, target, write_result
from memfit.plan import PhasePolicy, read_plan, write_plan
from memfit.sizes import format_size

JOB = ("latentsync/tiny", "--set", "validate_every=2")
PART = 0.9


def main() -> None:
    """Prints what each step found; an AssertionError where one is not as it should be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--windows", type=int, default=6)
    parser.add_argument("--out", type=Path)
    add_json_option(parser)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = run_story(asked.out or Path(folder), asked.windows)
    write_result(target(asked.json), figures, packages=["diffusers", "transformers"])


def run_story(folder: Path, windows: int) -> dict[str, Any]:
    """Runs the four steps in this folder; returns what each found."""
    folder.mkdir(parents=True, exist_ok=True)
    _, answer = memfit("predict", *JOB, "--micro-batch", 1, "--memory", "1GiB", "--json")
    peaks = {name: phase["allocated_bytes"] for name, phase in json.loads(answer)["phases"].items()}
    budget = int(PART * peaks["validate"]) >> 20
    print(f"upstream, predicted: {', '.join(f'{name} {format_size(size)}' for name, size in peaks.items())}")
    print(f"budget: {budget} MiB, {PART:.0%} of upstream's validation")
    assert peaks["train"] < budget << 20

    code, answer = memfit("probe", *JOB, "--micro-batch", 1, "--memory", f"{budget}MiB", "--json")
    (trial,) = json.loads(answer)["trials"]
    print(f"upstream's step, really run: out of memory in {trial['failed_in']}: {trial['error']}")
    assert (trial["ok"], trial["failed_in"]) == (False, "validate"), (code, trial)

    path = folder / "plan.toml"
    arguments = ("--global-batch", 4, "--micro-batch", 1, "--keep", "checkpointing", "--memory", f"{budget}MiB")
    code, answer = memfit("plan", *JOB, "--set", f"windows={windows}", *arguments, "--out", path)
    assert code == 0, answer
    plan = read_plan(path)
    print(f"memfit's plan: {plan.arithmetic}; validation: {plan.validation}")

    upstream = folder / "upstream.toml"
    write_plan(replace(plan, validation=PhasePolicy(gradients="keep"), saving=PhasePolicy(gradients="keep")), upstream)
    code, said = memfit("run", upstream, "--out", folder / "upstream", "--windows", 2)
    first = next(line for line in said.splitlines() if "validation" in line)
    (line,) = validations(folder / "upstream")
    print(f"upstream's validation under memfit's runner: {first}")
    print(f"  with less it gave {line['validation']}; exit code {code}")
    assert code == 0, said
    assert "validation did not fit" in first
    assert "can't allocate memory" in first

    code, said = memfit("run", path, "--out", folder / "run")
    assert code == 0, said
    found_lines = validations(folder / "run")
    print(f"memfit's plan, run: exit code {code}, validated after windows {[seen['window'] for seen in found_lines]}")
    for seen in found_lines:
        print(f"  window {seen['window']}: {seen['validation']}, {seen['validation_tries']} try")
    assert [seen["window"] for seen in found_lines] == list(range(1, windows, 2))
    assert all(seen["validation"] is not None and seen["validation_tries"] == 1 for seen in found_lines), said
    peak = max(line["measured_process_bytes"] for line in lines(folder / "run"))
    predicted = max(phase["process_bytes"] for phase in plan.phases.values())
    print(f"  peak {format_size(peak)} measured, {format_size(predicted)} predicted, {budget} MiB allowed")

    page = html.unescape((folder / "run" / "report.html").read_text())
    begin = page.index("With the job's own choices")
    verdict = page[begin : page.index(".<", begin) + 1]
    print(f"its report says: {verdict}")
    assert "validation runs out of memory" in verdict
    return {
        "upstream_predicted_bytes": peaks,
        "budget_bytes": budget << 20,
        "upstream_failed_in": trial["failed_in"],
        "plan": plan.arithmetic,
        "upstream_under_runner": {"tried_again": first, "validation": line["validation"]},
        "windows": windows,
        "validated_after_windows": [seen["window"] for seen in found_lines],
        "validation_tries": [seen["validation_tries"] for seen in found_lines],
        "measured_process_bytes": peak,
        "predicted_process_bytes": predicted,
        "report_says": verdict,
    }


def memfit(*arguments: Any) -> tuple[int, str]:
    """(exit code, what it printed: standard output, or where there is none standard error)."""
    done = subprocess.run(
        [sys.executable, "-m", "memfit", *map(str, arguments)], capture_output=True, text=True
    )  # fmt: skip
    return done.returncode, done.stdout if "--json" in arguments else done.stdout + done.stderr


def lines(run: Path) -> list[dict[str, Any]]:
    """The run's lines of metrics."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def validations(run: Path) -> list[dict[str, Any]]:
    """Those of windows after which it validated."""
    return [line for line in lines(run) if "validation" in line]


if __name__ == "__main__":
    main()
