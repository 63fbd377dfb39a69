"""Files under bench/results: JSON that one command writes whole, with what it was measured on.

Every file has ``command`` (as a person types it at the root of the repository), ``commit``, ``date``, ``machine`` and
``versions`` before its figures. A script writes the file once, at its end: a part of the cases (``--only``) is printed
and not kept, unless ``--json`` names another file.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
HEADER = ("command", "commit", "date", "machine", "versions")
"""Keys that stand before the figures in every file."""
PACKAGES = ("torch", "numpy", "scipy")


def read_result(name: str) -> Any:
    """A benchmark's figures, as its command wrote them."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def add_json_option(parser: argparse.ArgumentParser) -> None:
    """Adds ``--json FILE``, by default the script's own file under bench/results."""
    parser.add_argument("--json", type=Path, help=f"where to write the figures; default: bench/results/{_name()}.json")


def target(path: Path | None, *, complete: bool = True) -> Path | None:
    """The file to write: the one that was asked for, else the script's own where every case ran, else none."""
    return path or (RESULTS / f"{_name()}.json" if complete else None)


def write_result(path: Path | None, figures: Mapping[str, Any], *, packages: Sequence[str] = ()) -> None:
    """Writes the header and the figures to ``path`` and says so on standard error; None writes nothing.

    Args:
        packages: distributions, beside torch, numpy and scipy, whose versions the figures depend on.
    """
    if path is None:
        print("only a part of the cases ran: no file was written (--json FILE writes one)", file=sys.stderr)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**header(packages), **figures}, indent=1) + "\n")
    print(f"written to {path}", file=sys.stderr)


def header(packages: Sequence[str] = ()) -> dict[str, Any]:
    """What a result was made with: command, commit, date, machine and versions."""
    return {
        "command": command(),
        "commit": commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "machine": machine(),
        "versions": {
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in (*PACKAGES, *packages)},
        },
    }


def timed_environment() -> dict[str, str]:
    """The environment of a memfit command whose time counts: one thread, and no trace that an earlier command kept."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "MEMFIT_KEEP_TRACES": "0"}


def command() -> str:
    """This process's command, without the option that names the file; paths are relative to the repository's root, and
    of those outside of the folder around it only the last part is kept."""
    arguments = iter(sys.argv[1:])
    kept = []
    for argument in arguments:
        if argument == "--json":
            next(arguments, None)
        elif not argument.startswith("--json="):
            option, equals, value = argument.rpartition("=")
            kept.append(option + equals + _path(value))
    return shlex.join(["python", "-m", f"bench.{_name()}", *kept])


def _path(argument: str) -> str:
    """An argument as it stands in a result: no folder of this machine."""
    if not argument.startswith(("/", "..")):
        return argument
    path = os.path.relpath(argument, ROOT)
    return os.path.basename(path) if path.startswith("../..") else path


def commit() -> str | None:
    """The commit of the working tree, with ``-dirty`` where a file was changed that is no result, as that of a
    benchmark that ran before; None without git."""
    try:
        number = _git("rev-parse", "--short=7", "HEAD")
        changed = _git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!bench/results")
    except (OSError, subprocess.CalledProcessError):
        return None
    return number + "-dirty" if changed else number


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], capture_output=True, text=True, cwd=ROOT, check=True)
    return done.stdout.strip()


def machine() -> dict[str, Any]:
    """The processor, the cores that this process may use, and the mean load of the last minute."""
    from memfit.device.hardware.calibration import processor

    return {
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": int(os.environ.get("OMP_NUM_THREADS", 0)) or len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 1),
    }


def _name() -> str:
    return Path(sys.argv[0]).stem
