"""Questions that were traced before, kept in the user's cache: the next one is answered without importing torch."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import platform
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np

from memfit.atomic_file import open_atomic, write_atomic
from memfit.device.hardware.catalogue import Device
from memfit.events import CutParameters, Trace
from memfit.job import Shape
from memfit.planner.dependencies import FileReads, dependencies, own_fingerprint, still_hold
from memfit.planner.pipeline.stage_figures import StageFigures
from memfit.planner.prediction import NetSize, TracedQuestion, device_facts, holds_for
from memfit.user_cache import cache_folder

FILES, BYTES = 2048, 1 << 30
"""Files that are kept, and their bytes; the oldest go."""
SWITCH = "MEMFIT_KEEP_TRACES"
"""The environment variable that turns this off with 0."""
SOCKET = ".socket"
"""The end of the name of a socket, see ``memfit.planner.hand_over``."""
_TORN = (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile, zlib.error)
"""What reading a file that was cut off or written by another version raises."""
_KEEPING = "keeping"
"""The file that is locked while answers are kept."""
_LOOKED_AT = 16
"""Kept questions at most among which one that is like another is looked for."""
VOLATILE = frozenset(
    ("_", "COLUMNS", "DISPLAY", "LINES", "MEMFIT_TRACE_AHEAD", "OLDPWD", "PWD", "SHLVL",
     "SSH_CLIENT", "SSH_CONNECTION", "SSH_TTY", "TERM", "TMUX", "TMUX_PANE", "WINDOWID", "XDG_SESSION_ID")
)  # fmt: skip
"""Environment variables that no job's memory follows from."""


def question_key(job: str, asked: Mapping[str, Any], environment: Mapping[str, str]) -> str:
    """What names a question: the job, what is asked of it, memfit, Python, the folder and the environment."""
    variables = sorted((name, value) for name, value in environment.items() if name not in VOLATILE)
    values = [job, dict(asked), own_fingerprint(), platform.python_version(), os.getcwd(), variables]
    return hashlib.sha256(json.dumps(values, default=str, sort_keys=True).encode()).hexdigest()[:32]


def kept_question(
    key: str, device: Device, holds: Callable[[Mapping[str, str]], bool] = still_hold
) -> TracedQuestion | None:
    """The question of this key that holds for a device; None where there is none, or a file it depends on changed.

    Args:
        holds: whether the files that a question depends on are as they were.
    """
    if not _is_on() or not device.is_cuda:
        return None
    for path in _folder().glob(f"{key}-*.npz"):
        question = _read_question(path, device, holds)
        if question is not None:
            return question
    return None


def _read_question(
    path: Path, device: Device | None, holds: Callable[[Mapping[str, str]], bool]
) -> TracedQuestion | None:
    """The question of a file; None where it is none, or does not hold for the device or any more.

    Args:
        device: None: any card.
    """
    with contextlib.suppress(*_TORN):
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            facts = json.loads(str(file["question"]))
            known = facts.pop("dependencies")
            if device is not None:
                asked = _as_json(device_facts(device, facts["facts"].keys() - {"cpu"}))
                if facts["facts"] != asked:
                    return None
            question = _question(facts, file)
        if (device is None or holds_for(question, device)) and holds(known):
            return question
    return None


class Shelf:
    """What is kept of one job: its traced questions, and answers that are plain JSON.

    Args:
        name: the job's.
        asked: what further names it, such as its settings.
        fresh: whether to read nothing of what is kept.
        environment: as the process began with it: what a job imports may set variables.
    """

    def __init__(
        self, name: str, asked: Mapping[str, Any], *, fresh: bool, environment: Mapping[str, str] | None = None
    ) -> None:
        self._key = question_key(name, asked, os.environ if environment is None else environment)
        self._fresh = fresh
        self._held: dict[str, bool] = {}
        self._missing: set[tuple[str, str]] = set()
        self._added: dict[str, list[TracedQuestion]] = {}
        self._dependencies: dict[str, str] = {}
        self._reads = FileReads()
        self.is_outdated = False
        """Whether a file was changed after it was read, so that nothing more is kept."""
        self.code = ""
        """What names the job with all that its answers depend on, as of the last ``keep``."""
        self.answers: dict[str, Any] = {}
        if not fresh and _is_on():
            self.answers, self._dependencies = self._kept_answers()
        self._before = json.dumps(self.answers, sort_keys=True)

    @property
    def is_on(self) -> bool:
        """Whether anything is kept: the environment may turn it off."""
        return _is_on()

    @property
    def socket(self) -> Path | None:
        """Where a process that has the job loaded listens; None where nothing may be read of what is kept."""
        return None if self._fresh or not _is_on() else _folder() / f"{self._key}{SOCKET}"

    @property
    def changed_at(self) -> int:
        """When any process last kept something; 0: never."""
        return _changed_at(_folder())

    def look_again(self) -> None:
        """Another process may have kept what was not there."""
        self._missing.clear()
        if not self._fresh and _is_on():
            before = json.loads(self._before)
            own = {name: value for name, value in self.answers.items() if name not in before or before[name] != value}
            self.answers = {**self.answers, **self._kept_answers()[0], **own}

    def has(self, key: str, device: Device) -> bool:
        """Whether a question that holds for a device is kept by now."""
        return not self._fresh and kept_question(f"{self._key}.{key}", device, self._holds) is not None

    def find(self, key: str, device: Device) -> TracedQuestion | None:
        """A kept question that holds for a device; None where there is none."""
        if self._fresh or (key, device.key) in self._missing:
            return None
        question = kept_question(f"{self._key}.{key}", device, self._holds)
        if question is None:
            self._missing.add((key, device.key))
        return question

    def find_like(self, key: str, best: str, device: Device) -> TracedQuestion | None:
        """A kept question of any card whose name begins with ``key``, at best with ``best``, and of these one that
        holds for a device; None where there is none."""
        paths = () if self._fresh else _folder().glob(f"{self._key}.{key}*.npz")
        ordered = sorted(paths, key=lambda path: (not path.name.startswith(f"{self._key}.{best}"), path.name))[
            :_LOOKED_AT
        ]
        for card in (device, None):
            for path in ordered:
                question = _read_question(path, card, self._holds)
                if question is not None:
                    return question
        return None

    def sizes(self, identity: str) -> set[int]:
        """Items of the kept questions ``identity.ITEMS``."""
        paths = () if self._fresh else _folder().glob(f"{self._key}.{identity}.*-*.npz")
        return {int(path.name.removeprefix(f"{self._key}.{identity}.").partition("-")[0]) for path in paths}

    def add(self, key: str, question: TracedQuestion) -> None:
        """A question to keep."""
        self._added.setdefault(key, []).append(question)

    def keep(self, *, loaded: bool) -> None:
        """Writes what was added, and the answers; nothing where a file was changed after it was read.

        Args:
            loaded: whether the job's code ran in this process; otherwise answers depend on what they did.
        """
        known = dependencies(self._reads) if loaded else self._dependencies
        if known is None:
            self.is_outdated = True
            self._added.clear()
            return
        self.code = hashlib.sha256(json.dumps([self._key, known], sort_keys=True).encode()).hexdigest()[:32]
        for key, questions in self._added.items():
            for question in questions:
                _write_question(f"{self._key}.{key}", question, known)
        self._added.clear()
        _drop_oldest()
        if not _is_on() or json.dumps(self.answers, sort_keys=True) == self._before:
            return
        with contextlib.suppress(OSError, ValueError, TypeError), _alone():
            kept = {} if self._fresh else self._kept_answers()[0]  # another process may have kept more
            text = json.dumps({"dependencies": known, "answers": {**kept, **self.answers}}, allow_nan=False)
            write_atomic(_folder() / f"{self._key}.json", text)

    def _kept_answers(self) -> tuple[dict[str, Any], dict[str, str]]:
        """The answers that hold, and what they depend on."""
        with contextlib.suppress(*_TORN):
            kept = json.loads((_folder() / f"{self._key}.json").read_text())
            answers, known = dict(kept["answers"]), dict(kept["dependencies"])
            if self._holds(known):
                return answers, known
        return {}, {}

    def _holds(self, known: Mapping[str, str]) -> bool:
        text = json.dumps(known, sort_keys=True)
        if text not in self._held:
            self._held[text] = still_hold(known)
        return self._held[text]


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Context in which no other process keeps answers: of two that read what is kept and add to it, neither is lost.

    Raises:
        OSError: the folder cannot be written.
    """
    _folder().mkdir(parents=True, exist_ok=True)
    descriptor = os.open(_folder() / _KEEPING, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _write_question(key: str, question: TracedQuestion, known: Mapping[str, str]) -> None:
    facts: dict[str, Any] = {
        field.name: getattr(question, field.name) for field in fields(TracedQuestion) if field.name != "traces"
    }
    facts |= {"shape": asdict(question.shape), "nets": [asdict(net) for net in question.nets]}
    facts["stages"] = [asdict(stage) for stage in question.stages]
    facts["facts"], facts["dependencies"] = dict(question.facts), dict(known)
    columns: dict[str, Any] = {}
    tables: dict[str, dict[str, Any]] = {}
    for rank, trace in question.traces.items():
        values = {field.name: getattr(trace, field.name) for field in fields(Trace)}
        values["tensor_parallel"] = None if trace.tensor_parallel is None else asdict(trace.tensor_parallel)
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


def _question(facts: dict[str, Any], file: Mapping[str, Any]) -> TracedQuestion:
    traces = {}
    for rank, table in facts.pop("traces").items():
        columns = {name.partition("/")[2]: file[name] for name in file if name.startswith(f"{rank}/")}
        table["phases"] = tuple((name, start, end) for name, start, end in table["phases"])
        cut = table["tensor_parallel"]
        table["tensor_parallel"] = None if cut is None else CutParameters(**cut)
        tuples = {name: tuple(value) for name, value in table.items() if isinstance(value, (list, tuple))}
        traces[int(rank)] = Trace(**{**columns, **table, **tuples})
    read = facts.pop("facts")
    if "compute_capability" in read:
        read["compute_capability"] = tuple(read["compute_capability"])
    return TracedQuestion(
        **facts | {"shape": Shape(**facts["shape"]), "nets": tuple(NetSize(**net) for net in facts["nets"]),
                   "stages": tuple(StageFigures(**stage) for stage in facts["stages"])},
        facts=read, traces=traces,
    )  # fmt: skip


def _drop_oldest() -> None:
    with contextlib.suppress(OSError):
        paths = [path for path in _folder().iterdir() if path.suffix in (".npz", ".json", SOCKET)]
        files = sorted(((path.stat(), path) for path in paths), key=lambda pair: -pair[0].st_mtime)
        total = 0
        for number, (status, path) in enumerate(files):
            total += status.st_size
            if number >= FILES or total > BYTES:
                path.unlink(missing_ok=True)


def _as_json(value: Any) -> Any:
    return json.loads(json.dumps(value, default=str))


def _changed_at(folder: Path) -> int:
    """When a file was last put into a folder, or taken away; 0: the folder is not there."""
    try:
        return folder.stat().st_mtime_ns
    except OSError:
        return 0


def _folder() -> Path:
    return cache_folder() / "traces"


def _is_on() -> bool:
    return os.environ.get(SWITCH, "1") != "0"
