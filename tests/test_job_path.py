"""Where a plan's job is, asked from a folder other than the one in which the plan was made.

python -m pytest tests/test_job_path.py
"""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from memfit.errors import InputError
from memfit.job_path import absolute_job
from memfit.loading import load_job
from memfit.plan import Plan, read_plan, write_plan
from memfit.train.run_folder import check_same_samples

JOB = """
import memfit


class Net(memfit.Job):
    unit = "samples"
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a job and a plan of it that was made there; the test begins in another."""
    project, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    project.mkdir()
    elsewhere.mkdir()
    (project / "net.py").write_text(JOB)
    plan = Plan(
        job="net.py:Net", settings={}, device="cpu", budget_bytes=1 << 28, unit="samples", global_batch=2,
        micro_batch=2, micro_batches=[[2]], arithmetic="2 = 1 x 2", engine="single", precision="fp32", seed=0,
    )  # fmt: skip
    monkeypatch.chdir(project)
    write_plan(plan, "plan.toml")
    monkeypatch.chdir(elsewhere)
    return project


def test_a_plan_finds_its_job_from_another_folder(project: Path) -> None:
    plan = read_plan(project / "plan.toml")
    assert plan.job == f"{project}/net.py:Net"
    assert type(load_job(plan.job, unit=plan.unit)).__name__ == "Net"


def test_a_project_that_was_moved_or_copied_has_its_own_file(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moved = project.rename(project.with_name("moved"))
    assert read_plan(moved / "plan.toml").job == "net.py:Net"
    monkeypatch.chdir(moved)
    project.mkdir()
    (project / "net.py").write_text("raise SystemExit")
    plan = read_plan("plan.toml")
    assert (plan.job, plan.job_folder) == ("net.py:Net", str(moved))


def test_a_job_that_is_nowhere_is_named_with_its_folder(project: Path) -> None:
    (project / "net.py").unlink()
    plan = read_plan(project / "plan.toml")
    with pytest.raises(InputError, match=r"go to the folder from which net\.py is its path"):
        load_job(plan.job, unit=plan.unit)


def test_a_run_goes_on_from_another_folder_and_from_its_own_again(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = read_plan(project / "plan.toml")
    write_plan(elsewhere, project / "run.toml")
    monkeypatch.chdir(project)
    here = read_plan("plan.toml")
    assert here.job == "net.py:Net"
    check_same_samples(read_plan("run.toml"), here, project)
    check_same_samples(here, elsewhere, project)
    with pytest.raises(InputError, match="its job is"):
        check_same_samples(elsewhere, replace(here, job="other.py:Net"), project)


def test_a_job_without_a_relative_path_stays_as_it_is() -> None:
    for job in ("f5_tts/base", "package.module:Net", "/projects/net.py:Net"):
        assert absolute_job(job, "/elsewhere") == job


def test_a_folder_that_no_plan_file_can_name_is_left_out(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = read_plan(project / "plan.toml")
    odd = project.parent / os.fsdecode(b"odd-\xff")
    odd.mkdir()
    (odd / "net.py").write_text(JOB)
    monkeypatch.chdir(odd)
    write_plan(replace(plan, job="net.py:Net"), "plan.toml")
    assert (read_plan("plan.toml").job, read_plan("plan.toml").job_folder) == ("net.py:Net", None)
