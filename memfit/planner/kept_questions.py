"""Questions that were traced before, kept in the user's cache: the next one is answered without importing torch."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np

from memfit.atomic_file import open_atomic
from memfit.device.hardware.catalogue import Device
from memfit.events import Trace
from memfit.job import Shape
from memfit.planner.dependencies import own_fingerprint, still_hold
from memfit.planner.prediction import NetSize, TracedQuestion, holds_for
from memfit.user_cache import cache_folder

FILES = 64
"""Questions that are kept; the oldest go."""
SWITCH = "MEMFIT_KEEP_TRACES"
"""The environment variable that turns this off with 0."""
VOLATILE = frozenset(
    ("_", "COLUMNS", "DISPLAY", "LINES", "OLDPWD", "PWD", "SHLVL", "SSH_CLIENT", "SSH_CONNECTION", "SSH_TTY", "TERM",
     "TMUX", "TMUX_PANE", "WINDOWID", "XDG_SESSION_ID")
)  # fmt: skip
"""Environment variables that no job's memory follows from."""


def question_key(job: str, asked: Mapping[str, Any]) -> str:
    """What names a question: the job, what is asked of it, memfit, Python, the folder and the environment."""
    environment = {name: value for name, value in os.environ.items() if name not in VOLATILE}
    values = [job, dict(asked), own_fingerprint(), platform.python_version(), os.getcwd(), sorted(environment.items())]
    return hashlib.sha256(json.dumps(values, default=str, sort_keys=True).encode()).hexdigest()[:32]


def kept_question(key: str, device: Device) -> TracedQuestion | None:
    """The question of this key that holds for a device; None where there is none, or a file it depends on changed."""
    if not _is_on() or not device.is_cuda:
        return None
    for path in _folder().glob(f"{key}-*.npz"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile, zlib.error):
            with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
                facts = json.loads(str(file["question"]))
                known = facts.pop("dependencies")
                question = _question(facts, file)
            if holds_for(question, device) and still_hold(known):
                return question
    return None


def keep_question(key: str, question: TracedQuestion, known: Mapping[str, str]) -> None:
    """Keeps a question; one whose settings are no plain values is left out, as is every one where the disk is full."""
    facts: dict[str, Any] = {
        field.name: getattr(question, field.name) for field in fields(TracedQuestion) if field.name != "traces"
    }
    facts |= {"shape": asdict(question.shape), "nets": [asdict(net) for net in question.nets]}
    facts["facts"], facts["dependencies"] = dict(question.facts), dict(known)
    columns: dict[str, Any] = {}
    tables: dict[str, dict[str, Any]] = {}
    for rank, trace in question.traces.items():
        values = {field.name: getattr(trace, field.name) for field in fields(Trace)}
        columns |= {f"{rank}/{name}": value for name, value in values.items() if isinstance(value, np.ndarray)}
        tables[str(rank)] = {name: value for name, value in values.items() if not isinstance(value, np.ndarray)}
    with contextlib.suppress(OSError, ValueError, TypeError):
        text = json.dumps(facts | {"traces": tables}, allow_nan=False)
        if not _is_on() or "cpu" in question.facts or json.loads(text)["settings"] != question.settings:
            return
        name = hashlib.sha256(json.dumps(facts["facts"], default=str, sort_keys=True).encode()).hexdigest()[:8]
        _folder().mkdir(parents=True, exist_ok=True)
        with open_atomic(_folder() / f"{key}-{name}.npz") as file:
            np.savez(file, question=np.array(text), **columns)
        _drop_oldest()


def _question(facts: dict[str, Any], file: Mapping[str, Any]) -> TracedQuestion:
    traces = {}
    for rank, table in facts.pop("traces").items():
        columns = {name.partition("/")[2]: file[name] for name in file if name.startswith(f"{rank}/")}
        table["phases"] = tuple((name, start, end) for name, start, end in table["phases"])
        tuples = {name: tuple(value) for name, value in table.items() if isinstance(value, (list, tuple))}
        traces[int(rank)] = Trace(**{**columns, **table, **tuples})
    read = facts.pop("facts")
    if "compute_capability" in read:
        read["compute_capability"] = tuple(read["compute_capability"])
    return TracedQuestion(
        **facts | {"shape": Shape(**facts["shape"]), "nets": tuple(NetSize(**net) for net in facts["nets"])},
        facts=read, traces=traces,
    )  # fmt: skip


def _drop_oldest() -> None:
    files = sorted(_folder().glob("*.npz"), key=lambda path: path.stat().st_mtime)
    for path in files[:-FILES]:
        path.unlink(missing_ok=True)


def _folder() -> Path:
    return cache_folder() / "traces"


def _is_on() -> bool:
    return os.environ.get(SWITCH, "1") != "0"
