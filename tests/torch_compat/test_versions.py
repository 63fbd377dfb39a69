"""Which versions of torch are taken, and what happens with one that is newer than those that were tested."""

import subprocess
import sys
from contextlib import nullcontext

import pytest
import torch

from memfit.device.virtual.card_rules import CardRules
from memfit.device.virtual.virtual_device import virtual_gpu
from memfit.errors import InputError
from memfit.torch_compat import versions


@pytest.fixture
def installed(monkeypatch, tmp_path):
    """A function that sets the installed version, and what a self-test of it answers; it counts self-tests."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    runs = []

    def install(version, code=0, output=""):
        def answer(command, **options):
            runs.append(command[-1])
            return subprocess.CompletedProcess(
                command, code, stdout=output, stderr="Traceback\nRuntimeError: no such key"
            )

        monkeypatch.setattr(torch, "__version__", version)
        monkeypatch.setattr(versions.subprocess, "run", answer)
        versions.check_torch_version.cache_clear()
        return runs

    yield install
    versions.check_torch_version.cache_clear()


@pytest.mark.parametrize("version", ["2.6.0+cu124", "2.13.1+cu130", "2.14.9", "2.15.0"])
def test_a_tested_version_passes_without_a_self_test(installed, version, capsys):
    runs = installed(version)
    versions.check_torch_version()
    assert not runs
    assert not capsys.readouterr().err


def test_an_old_version_is_refused_in_one_line(installed):
    installed("2.5.1")
    with pytest.raises(InputError, match=r'torch 2\.5\.1: memfit needs torch 2\.6 or newer; .*"torch>=2\.6,<2\.16"'):
        versions.check_torch_version()
    with pytest.raises(InputError):
        versions.refuse_old()


def test_a_newer_version_is_tested_and_warned_of_once(installed, capsys):
    runs = installed("2.99.0")
    versions.check_torch_version()
    assert runs == ["memfit.trace.self_test"]
    error = capsys.readouterr().err
    assert "torch 2.99.0 is newer than 2.15" in error

    versions.check_torch_version.cache_clear()
    with virtual_gpu(CardRules()):
        pass
    assert len(runs) == 1
    assert not capsys.readouterr().err


def test_a_newer_version_whose_bytes_differ_is_refused_with_what_differed(installed):
    runs = installed("2.99.0", code=4, output="transformer, ddp x 2 on rtx4090, train: 7 bytes instead of 8\n")
    for _ in range(2):
        versions.check_torch_version.cache_clear()
        with pytest.raises(InputError, match=r"torch 2\.99\.0: .*train: 7 bytes instead of 8; install a tested"):
            versions.check_torch_version()
    assert len(runs) == 1


def test_a_newer_version_in_which_the_self_test_fails_is_refused(installed):
    installed("2.99.0", code=1)
    with pytest.raises(InputError, match="RuntimeError: no such key"):
        versions.check_torch_version()


def test_a_self_test_that_never_ends_is_a_failure(installed, monkeypatch):
    def hang(command, timeout, **options):
        raise subprocess.TimeoutExpired(command, timeout)

    installed("2.99.0")
    monkeypatch.setattr(versions.subprocess, "run", hang)
    with pytest.raises(InputError, match="no answer after 300 seconds"):
        versions.check_torch_version()


def test_the_self_test_itself_is_never_refused(installed):
    runs = installed("2.99.0", code=4, output="nothing agrees\n")
    with versions.under_test():
        versions.check_torch_version()
    assert not runs


def test_private_names_are_chosen_by_what_torch_has():
    """torch 2.10 has one of them under its old name, and no shapes of collectives."""
    code = "import torch; torch.__version__ = '2.9.1'; import memfit.torch_compat"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize(("version", "engine", "refused"), [
    ("2.6.0", "fsdp2", True), ("2.6.0+cu124", "fsdp2", True), ("2.6.0", "ddp", False), ("2.7.1", "fsdp2", False),
])  # fmt: skip
def test_sharded_ranks_on_the_cpu_are_refused_where_torchs_own_backward_fails(monkeypatch, version, engine, refused):
    monkeypatch.setattr(torch, "__version__", version)
    with pytest.raises(InputError, match=r"install torch 2\.7 or newer") if refused else nullcontext():
        versions.refuse_sharded_ranks(engine, "cpu")
    versions.refuse_sharded_ranks(engine, "cuda")
