"""Which versions of torch memfit works with, and what happens with one that is newer than those it was tested with."""

from __future__ import annotations

import contextlib
import importlib.metadata
import subprocess
import sys
from collections.abc import Iterator
from functools import cache

import torch

from memfit.errors import InputError
from memfit.installation import release_number
from memfit.user_cache import keep, read_kept

OLDEST = (2, 6)
"""The oldest minor version that was tested, and works; see docs/versions.md."""
NEWEST = (2, 15)
"""The newest minor version that every test was run with; see docs/versions.md."""

SELF_TEST = "memfit.trace.self_test"
"""The module that is run, in a process of its own, with a version newer than NEWEST."""
FILE = "torch-self-test.json"
"""A file in the user's cache: what the self-test said, by version."""
SECONDS = 300
"""Seconds after which a self-test that does not answer has failed."""


def written(minor: tuple[int, int]) -> str:
    """``2.13`` of (2, 13)."""
    return f"{minor[0]}.{minor[1]}"


def refuse_old() -> None:
    """Raises:
    InputError: the installed torch is older than the oldest that works.
    """
    if release_number(torch.__version__) < OLDEST:
        raise refused(f"memfit needs torch {written(OLDEST)} or newer")


def refuse_sharded_ranks(engine: str, device_type: str) -> None:
    """Raises:
    InputError: real ranks would train under FSDP2 on the CPU with torch 2.6.
    """
    if engine == "fsdp2" and device_type == "cpu" and release_number(torch.__version__) < (2, 7):
        raise InputError(
            f"torch {torch.__version__}",
            "its FSDP2 on the CPU takes a second gather of weights for a write to them, and backward fails",
            "install torch 2.7 or newer, or write --engine ddp",
        )


def refused(why: str) -> InputError:
    """An error that names the installed torch, and the versions to install instead."""
    return InputError(
        f"torch {torch.__version__}",
        why,
        f'install a tested version: pip install "torch>={written(OLDEST)},<{written((NEWEST[0], NEWEST[1] + 1))}"',
    )


def lacks(error: Exception) -> InputError:
    """A private name of torch that is not there, as an error of the installed version."""
    return refused(f"this version lacks a part of torch that memfit uses ({error})")


_under_test: list[bool] = []


@contextlib.contextmanager
def under_test() -> Iterator[None]:
    """A context in which every version that is not too old passes: for the self-test itself."""
    _under_test.append(True)
    try:
        yield
    finally:
        _under_test.pop()
        check_torch_version.cache_clear()


@cache
def check_torch_version() -> None:
    """Checks the installed torch. A version newer than the tested ones passes if memfit's self-test passes.

    The self-test takes a few seconds; its answer is kept for each version.

    Raises:
        InputError: the version is too old, or the self-test failed; says what differed.
    """
    refuse_old()
    if release_number(torch.__version__) <= NEWEST or _under_test:
        return
    differences = _kept_answer()
    if differences is None:
        _warn()
        differences = _run_self_test()
        remember(differences)
    if differences:
        raise refused(f"it is newer than {written(NEWEST)}, and the self-test failed: {'; '.join(differences[:3])}")


def remember(differences: list[str]) -> None:
    """Keeps what the self-test said of the installed version; an empty list: it passed."""
    with contextlib.suppress(OSError):
        keep(FILE, read_kept(FILE) | {_key(): differences})


def _kept_answer() -> list[str] | None:
    answer = read_kept(FILE).get(_key())
    return answer if isinstance(answer, list) else None


def _key() -> str:
    try:
        memfit = importlib.metadata.version("memfit")
    except importlib.metadata.PackageNotFoundError:
        memfit = "unknown"
    return f"torch {torch.__version__}, Python {sys.version.split()[0]}, memfit {memfit}"


def _warn() -> None:
    print(
        f"memfit: torch {torch.__version__} is newer than {written(NEWEST)}, the newest version that memfit was tested "
        "with. A self-test runs once for this version.",
        file=sys.stderr,
    )


def _run_self_test() -> list[str]:
    """Runs the self-test in a process of its own, which a fault in torch's internals may end; gives what differs."""
    try:
        run = subprocess.run([sys.executable, "-m", SELF_TEST], capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return [f"no answer after {SECONDS} seconds"]
    if run.returncode == 0:
        return []
    lines = [line for line in (run.stdout if run.returncode == 4 else run.stderr).splitlines() if line.strip()]
    return lines if run.returncode == 4 and lines else [lines[-1] if lines else f"exit code {run.returncode}"]
