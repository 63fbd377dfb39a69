"""pytest tests/test_installation.py: versions, optional parts, and what memfit says where one is missing.

What a wheel gives in an empty environment is tried by scripts/check_wheel.sh.
"""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from memfit import errors, installation, toml
from memfit.cli import doctor, main
from memfit.errors import EXTRAS, InputError, describe, missing_extra, mistake_in_job
from memfit.loading import load_job
from testing.small_disk import small_disk

ROOT = Path(__file__).parents[1]


def ends(arguments: list[str]) -> int:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    return ended.value.code


@pytest.fixture
def without(monkeypatch):
    """Takes modules away, as if they were not installed; the built-in jobs are imported anew."""
    kept: dict[str, object] = {}

    def take(*modules):
        find = importlib.util.find_spec
        for name in list(sys.modules):
            if name.partition(".")[0] in modules:
                monkeypatch.delitem(sys.modules, name)
            elif name.startswith("memfit.jobs."):
                parent, _, child = name.rpartition(".")
                monkeypatch.delattr(sys.modules[parent], child, raising=False)
                kept[name] = sys.modules[name]
        for name in kept:
            monkeypatch.delitem(sys.modules, name)

        class Finder:
            @staticmethod
            def find_spec(name, path=None, target=None):
                if name.partition(".")[0] in modules:
                    raise ModuleNotFoundError(f"No module named {name!r}", name=name)

        monkeypatch.setattr(sys, "meta_path", [Finder, *sys.meta_path])
        gone = lambda name, package=None: None if name in modules else find(name, package)  # noqa: E731
        monkeypatch.setattr(errors.importlib.util, "find_spec", gone)

    return take


def test_version_names_memfit_torch_its_build_and_python(capsys):
    assert ends(["--version"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"^memfit \d+\.\d+\.\d+$", said, re.M)
    assert re.search(r"^torch \d+\.\d+\.\d+\S* \((CPU|CUDA [\d.]+|ROCm [\d.]+) build\)$", said, re.M)
    assert re.search(r"^CPython 3\.\d+\.\d+$", said, re.M)
    assert "card" in said


def test_doctor_reports_what_is_here(capsys):
    code = ends(["doctor", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] == (code == 0)
    assert report["torch"]["version"] == installation.torch_build().version
    assert {part["name"] for part in report["optional"]} == set(EXTRAS)
    assert all(folder["writable"] for folder in report["folders"])
    assert "unknown" not in report["required"].values()


def test_doctor_names_a_folder_that_cannot_be_written(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(doctor, "self_test", lambda: {"ok": True, "text": "passed"})
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert ends(["doctor"]) == 4
    assert "set XDG_CACHE_HOME" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("how", "why"), [("full disk", "No space left on device"), ("read-only disk", "Read-only file system")]
)
def test_doctor_says_why_the_cache_cannot_be_written(monkeypatch, tmp_path, capsys, how, why):
    monkeypatch.setattr(doctor, "self_test", lambda: {"ok": True, "text": "passed"})
    with small_disk(tmp_path / "disk", size="256k") as disk:
        if not disk.mounted:
            pytest.skip("no file system can be mounted here")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "disk"))
        assert ends(["doctor"]) == 0
        disk.spoil(how)
        capsys.readouterr()
        assert ends(["doctor"]) == 4
        said = " ".join(capsys.readouterr().out.split())
        assert f"cannot be written: {why}; make room there" in said
        assert not (tmp_path / "disk" / "memfit").exists()


def test_doctor_fails_where_the_self_test_does(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "self_test", lambda: {"ok": False, "text": "linear: 12 bytes, not 8"})
    assert ends(["doctor"]) == 4
    assert "linear: 12 bytes, not 8" in capsys.readouterr().out


def test_every_optional_part_is_an_extra_of_the_package():
    project = toml.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(EXTRAS) <= set(project["optional-dependencies"])


def test_every_dependency_has_a_lower_bound_and_no_pin():
    project = toml.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [name for extra, names in project["optional-dependencies"].items() if extra != "dev" for name in names]
    for requirement in [*project["dependencies"], *extras]:
        assert ">=" in requirement, requirement
        assert "==" not in requirement, requirement


def test_every_data_file_of_the_package_is_in_the_wheel():
    patterns = toml.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["memfit"]
    packed = {path for pattern in patterns for path in (ROOT / "memfit").glob(pattern)}
    listed = subprocess.run(["git", "ls-files", "memfit"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    data = {ROOT / name for name in listed.split() if not name.endswith(".py")}
    assert data <= packed


def test_jobs_lists_what_it_can_without_the_optional_part(without, capsys):
    without("transformers", "diffusers", "PIL")
    assert ends(["jobs", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert {"gpt_sovits/s1", "latentsync/stage1"} <= {job["name"] for job in answer["jobs"]}
    assert ends(["jobs", "latentsync/stage1", "--set", "frames=8", "--json"]) == 2
    assert "run pip install 'memfit[jobs]'" in capsys.readouterr().err


def test_a_job_whose_module_is_missing_names_the_command(without):
    without("diffusers")
    with pytest.raises(
        InputError, match=r"^job latentsync/tiny: it needs diffusers, .*; run pip install 'memfit\[jobs\]'$"
    ):
        load_job("latentsync/tiny")


def test_zero_without_deepspeed_names_the_command(without):
    from memfit.engine import deepspeed

    without("deepspeed")
    for needs in (deepspeed.load, lambda: deepspeed.traced(torch.device("cpu")).__enter__()):
        with pytest.raises(
            InputError, match=r"--engine zero.*run pip install 'memfit\[deepspeed\]', or write --engine"
        ):
            needs()


def test_a_module_that_is_missing_inside_of_a_job_names_the_command(without):
    without("peft")
    error = ModuleNotFoundError("No module named 'peft'", name="peft")
    assert str(mistake_in_job(error)).startswith("this command: it needs peft")

    def nets():
        raise error

    with pytest.raises(ModuleNotFoundError) as raised:
        nets()
    assert re.match(
        r".*test_installation.py:\d+ in nets\(\): it needs peft, .* run pip", str(mistake_in_job(raised.value))
    )
    wrapped = RuntimeError("Failed to import a model")
    wrapped.__cause__ = error
    assert "pip install 'memfit[jobs]'" in str(missing_extra(wrapped, "this job"))
    assert missing_extra(ModuleNotFoundError("No module named 'mine'", name="mine"), "this job") is None


def test_an_import_that_fails_says_why():
    lazy = ImportError("Failed to import transformers.models.x because of the following error:\nNo module named 'foo'")
    assert describe(lazy).endswith("(No module named 'foo')")
    lazy = RuntimeError("Failed to import it because of the following error:\nNo module named 'foo'")
    assert describe(lazy).endswith(" error: (No module named 'foo')")
    lazy = RuntimeError("Failed to import it (see below)")
    lazy.__cause__ = ModuleNotFoundError("No module named 'foo'")
    assert describe(lazy).endswith("(see below) (ModuleNotFoundError: No module named 'foo')")
    assert describe(ValueError("bad value\nof x")) == "ValueError: bad value"
    outer = ImportError("cannot import the model")
    outer.__cause__ = OSError("libcudart.so.13: cannot open shared object file")
    assert (
        describe(outer)
        == "ImportError: cannot import the model (OSError: libcudart.so.13: cannot open shared object file)"
    )
    outer.__cause__ = OSError("x" * 500)
    assert len(describe(outer)) <= 240


def test_nets_may_import_modules_beside_the_job_on_first_use(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "parts_of_this_job.py").write_text("WIDTH = 3\n")
    (tmp_path / "job.py").write_text(
        "import torch, memfit\n"
        "class Late(memfit.Job):\n"
        "    def nets(self):\n"
        "        import parts_of_this_job\n"
        "        return {'net': torch.nn.Linear(parts_of_this_job.WIDTH, 1)}\n"
    )
    assert load_job(f"{tmp_path}/job.py:Late").nets()["net"].in_features == 3


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_shell_can_complete_verbs(shell):
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "COMP_WORDS": "memfit pre",
        "COMP_CWORD": "pre" if shell == "fish" else "1",
    }
    script = [sys.executable, "-c", "from memfit.cli import main; main()"]
    source = {**environment, "_MEMFIT_COMPLETE": f"{shell}_source"}
    ended = subprocess.run(script, env=source, capture_output=True, text=True)
    assert "_MEMFIT_COMPLETE" in ended.stdout
    assert (ended.returncode, ended.stderr) == (0, "")
    complete = {**environment, "_MEMFIT_COMPLETE": f"{shell}_complete"}
    assert "predict" in subprocess.run(script, env=complete, capture_output=True, text=True).stdout
