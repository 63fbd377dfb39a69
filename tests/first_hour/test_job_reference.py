"""docs/job.md and help(memfit.Job): complete, with the real defaults, and recipes that run.

pytest tests/first_hour/test_job_reference.py
"""

import inspect
import re
from pathlib import Path

import pytest

import memfit
from memfit.apply.train_state import build
from memfit.apply.window import run_window
from memfit.batch.dataset import dataset_of
from memfit.device.hardware.catalogue import find_device, with_memory
from memfit.geometry import shape_of
from memfit.job import _METHODS, Job, _attribute_kinds
from memfit.loading import load_job
from memfit.planner.predict import predict
from memfit.trace.step_phases import synthetic_micro_batch, validate_once
from tests.cli.asking import ROOT

TEXT = (ROOT / "docs" / "job.md").read_text()
RECIPES = "\n\n".join(re.findall(r"```python\n(.*?)```", TEXT, flags=re.S))
NAMES = re.findall(r"^class (\w+)\(", RECIPES, flags=re.M)
ROWS = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", TEXT, flags=re.M))


def test_every_attribute_is_there_with_its_default() -> None:
    assert set(ROWS) == set(_attribute_kinds())
    for name, row in ROWS.items():
        default = row.split(" | ")[1]
        assert default in (f"`{getattr(Job, name)!r}`".replace("'", '"'), "set by `validate`"), name


def test_every_method_is_there_with_its_parameters() -> None:
    documented = dict(re.findall(r"^\| `(\w+)\((.*?)\)` \|", TEXT, flags=re.M))
    inherited = {"settings", "setting_types"}
    assert set(documented) == set(_METHODS) - inherited
    for name, parameters in documented.items():
        assert parameters == ", ".join(list(inspect.signature(getattr(Job, name)).parameters)[1:]), name


def test_help_names_every_attribute() -> None:
    for name in _attribute_kinds():
        assert re.search(rf"^ +{name}: ", memfit.Job.__doc__ or "", flags=re.M), name


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_predicts_and_trains(name: str, tmp_path: Path) -> None:
    if name == "QLora":
        pytest.importorskip("bitsandbytes")
    if name == "LowBit":
        pytest.importorskip("torchao")
    (tmp_path / "recipes.py").write_text(RECIPES)
    job = load_job(f"{tmp_path}/recipes.py:{name}")
    shape = shape_of(job, 4 * (job.longest or 1))
    state = build(job, "cpu")
    result = run_window(state, [synthetic_micro_batch(job, shape, state.device)])
    assert all(loss.isfinite() for loss in result.losses.values())
    assert predict(job, name, shape, with_memory(find_device("cpu"), 1 << 30)).footprint.fits
    job.collate([dataset_of(job)[i] for i in range(3)])
    if job.validates:
        assert validate_once(state, lambda: job.batch(shape), lambda part: None)
