"""``memfit jobs`` lists counts that are data; here they are counted anew.

pytest tests/cli/test_jobs.py
"""

import json
from importlib.resources import files

import pytest

from memfit.loading import built_in_jobs, load_job
from memfit.planner.predict import net_sizes, plain_nets
from tests.cli.asking import Run, really

COUNTS = json.loads(files("memfit.jobs").joinpath("counts.json").read_text())
TINY = [name for name in built_in_jobs() if name.endswith("/tiny")]


def counted(name: str) -> None:
    job = load_job(name)
    keys = ("name", "parameters", "trainable", "tensors", "trainable_tensors")
    nets = [{key: getattr(size, key) for key in keys} for size in net_sizes(plain_nets(job))]
    assert COUNTS[name] == {"unit": job.unit, "nets": nets}


def test_every_built_in_job_is_there() -> None:
    assert sorted(COUNTS) == sorted(built_in_jobs())


@pytest.mark.parametrize("name", TINY[:1])
def test_the_counts_of_a_small_job(name: str) -> None:
    counted(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(COUNTS))
def test_the_counts_of_each_job(name: str) -> None:
    counted(name)


def test_no_name_is_cut_in_a_narrow_terminal(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    code, out, _ = run("jobs")
    assert code == 0
    assert "…" not in out
    for name in COUNTS:
        assert name in out


def test_listing_them_imports_no_torch() -> None:
    code, out, _ = really("jobs", "--json")
    assert code == 0
    assert {job["name"] for job in json.loads(out)["jobs"]} == set(COUNTS)


def test_a_warning_is_written_once(run: Run, tmp_path) -> None:
    (tmp_path / "job.py").write_text(
        "import sys\nfrom tests.cli.wrong_jobs import Right\n"
        "class Warns(Right):\n    def nets(self):\n        print('careful', file=sys.stderr)\n"
        "        return super().nets()\n"
    )
    code, _, err = run("plan", f"{tmp_path}/job.py:Warns", "--memory", "256MiB", "--global-batch", "4")
    assert (code, err) == (0, "careful\n")


DEVICES = {
    "a100": "write a100-40gb or a100-80gb",
    "h100-80gb": "write h100",
    "24G": "write rtx3090 or rtx4090 or quadro-rtx6000 or rtx3090ti or a10 or a10g or a30 or l4",
    "gaudi3": "write --device NAME of the most similar one with --memory SIZE",
    "rtx409": "write rtx4090",
}


@pytest.mark.parametrize(("name", "words"), DEVICES.items())
def test_devices_that_are_not_there_are_answered_with_those_that_are(run: Run, name: str, words: str) -> None:
    code, _, err = run("devices", name)
    assert (code, err.strip().rpartition("; ")[2]) == (2, words)


@pytest.mark.parametrize("name", ["RTX4090", "rtx-4090", "RTX 4090"])
def test_devices_are_understood_as_people_write_them(run: Run, name: str) -> None:
    code, out, _ = run("devices", name, "--json")
    assert code == 0
    assert '"rtx4090"' in out


def test_a_bare_command_shows_its_help(run: Run) -> None:
    code, out, err = run()
    assert (code, err) == (0, "")
    assert "Verbs:" in out
    assert out.count("\n") > 10
