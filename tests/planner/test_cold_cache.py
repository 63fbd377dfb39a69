"""Plans with nothing measured before: every operator that is timed or measured is really run here for the first time.

python -m pytest tests/planner/test_cold_cache.py
"""

import pytest
import torch
from torch import nn

from memfit.cli import main
from memfit.device.hardware.catalogue import with_memory
from memfit.device.hardware.local_devices import local_cpu
from memfit.job import Job, Shape
from memfit.planner.predict import predict
from memfit.planner.request import PlanRequest
from memfit.planner.search.search import find_plan

ENGINES = ("ddp", "fsdp2", "zero1", "zero2", "zero3")


class Clipped(Job):
    """Clipping adds gradients' norms over all ranks."""

    clip: float | None = 1.0

    def nets(self):
        return {"net": nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))}

    def optimizers(self, nets):
        return {"net": torch.optim.AdamW(nets["net"].parameters())}

    def batch(self, shape):
        return torch.zeros(shape.items, 16)

    def loss(self, nets, batch):
        return nets["net"](batch).square().sum(), len(batch)


@torch.library.custom_op("memfit_tests::ranked", mutates_args=())
def ranked(x: torch.Tensor) -> torch.Tensor:
    """Fails on numbers that are all alike, which is what measuring gives it."""
    if x.unique().numel() == 1:
        raise RuntimeError("no order in equal numbers")
    return x.sort(0).values


@ranked.register_fake
def _(x):
    return torch.empty_like(x)


class Ranked(Clipped):
    def loss(self, nets, batch):
        out = nets["net"](batch)
        return (out * ranked(out.detach())).sum(), len(batch)


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def cpu():
    return with_memory(local_cpu(), 1 << 30)


@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_is_planned_with_an_empty_cache(engine):
    request = PlanRequest(name="clipped", global_batch=8, device=cpu(), devices=2, engine=engine)
    answer = find_plan(Clipped(), request)
    assert answer.plan is not None
    assert answer.plan.engine == engine


def test_an_operator_that_cannot_be_run_by_itself_is_unknown_and_said():
    prediction = predict(Ranked(), "ranked", Shape(items=8), cpu())
    assert any("memfit_tests.ranked" in text and "unknown" in text for text in prediction.footprint.assumed)


@pytest.mark.slow
@pytest.mark.parametrize("job", ["latentsync/tiny", "musetalk/tiny", "f5_tts/tiny", "gpt_sovits/tiny"])
@pytest.mark.parametrize("engine", ["single", *ENGINES])
def test_every_tiny_job_is_planned_or_refused_with_an_empty_cache(job, engine, tmp_path, capsys):
    devices = "1" if engine == "single" else "2"
    arguments = ["plan", job, "--global-batch", "4", "--memory", "8GiB", "--devices", devices, "--engine", engine]
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--out", str(tmp_path / "plan.toml"), "--json"])
    said = capsys.readouterr().err
    assert ended.value.code in (0, 2), said
    assert "Traceback" not in said
