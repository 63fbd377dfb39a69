"""Ten architectures of the installed transformers, at random: predicted, planned with recomputing, run, reported.

The seed is MEMFIT_SEED, or 0: MEMFIT_SEED=7 python -m pytest tests/first_hour -m slow
"""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

from memfit.device.hardware.catalogue import find_device, with_memory
from memfit.job import Shape
from memfit.plan import write_plan
from memfit.planner.cpu_margin import budget_for
from memfit.planner.predict import checkpoint_all, plain_nets, predict
from memfit.planner.request import PlanRequest
from memfit.planner.search.search import find_plan
from testing.truth import measured_peaks
from tests.cli.asking import ROOT
from tests.first_hour.architectures import KINDS, Architecture, HalfArchitecture, architectures, configuration

SEED = int(os.environ.get("MEMFIT_SEED", "0"))
ITEMS = 8
JOBS = "tests.first_hour.architectures"


def runs(model_type: str, class_name: str) -> bool:
    """Whether the tiny model takes a step without memfit: its configuration and batch were made by name alone."""
    try:
        with torch.device("meta"):
            net = getattr(transformers, class_name)(configuration(model_type))
        if sum(parameter.numel() for parameter in net.parameters()) > 6e6:
            return False
        job = Architecture(model_type=model_type, class_name=class_name)
        nets = job.nets()
        nets["net"].train()
        job.loss(nets, job.batch(Shape(items=2)))[0].backward()
    except Exception:
        return False
    return True


def drawn(kind: str) -> tuple[str, str]:
    """An architecture of this kind that runs."""
    known = list(architectures(kind))
    random.Random(f"{SEED} {kind}").shuffle(known)
    return next(names for names in known if runs(*names))


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_architecture_predicts_plans_runs_and_reports(kind: str, precision: str, tmp_path: Path) -> None:
    model_type, class_name = drawn(kind)
    print(f"{kind}: {class_name} in {precision}")
    made = {"fp32": Architecture, "bf16": HalfArchitecture}[precision]
    job = made(model_type=model_type, class_name=class_name)
    cpu = with_memory(find_device("cpu"), 8 << 30)

    name = f"{JOBS}:{type(job).__name__}"
    kept = predict(job, name, Shape(items=ITEMS), cpu, checkpointing={})
    modes = checkpoint_all(job, plain_nets(job))
    recomputed = predict(job, name, Shape(items=ITEMS), cpu, checkpointing=modes)
    peaks = [item.footprint.phases["train"].allocated_bytes for item in (kept, recomputed)]
    if peaks[1] > peaks[0]:  # a forward that needs much memory, as of linear attention, needs it beside gradients
        assert measured(job, modes) > measured(job, {})

    saves = modes and peaks[1] < 0.95 * peaks[0]
    budget = budget_for(sum(peaks) // 2 if saves else int(1.05 * peaks[0]), cpu)
    request = PlanRequest(name=name, global_batch=ITEMS, device=with_memory(cpu, budget), micro_batch=ITEMS)
    plan = find_plan(job, request).plan
    assert plan is not None
    assert any(mode != "keep" for mode in plan.checkpointing.values()) or not saves
    write_plan(plan, tmp_path / "plan.toml")

    memfit("run", tmp_path / "plan.toml", "--out", tmp_path / "run", "--windows", "2")
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert len([line for line in lines if "window" in json.loads(line)]) >= 2
    memfit("report", tmp_path / "run", "--out", tmp_path / "report.html")
    assert (tmp_path / "report.html").stat().st_size > 10_000


def measured(job: Architecture, modes: dict[str, str]) -> int:
    """Bytes of tensors at the peak of a real step."""
    return measured_peaks(job, Shape(items=ITEMS), 1, set(), modes)["train"].allocated_bytes


def memfit(*arguments: object) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    ask = [sys.executable, "-m", "memfit", *map(str, arguments)]
    done = subprocess.run(ask, capture_output=True, text=True, check=False, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
