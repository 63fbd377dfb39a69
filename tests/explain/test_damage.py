"""Damaged snapshots and logs: an answer, or one line; never a traceback.

pytest tests/explain/test_damage.py
"""

import io
import json
import pickle
import random
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from memfit.cli.explain import _json, _show
from memfit.errors import InputError
from memfit.explain.diagnosis import explain
from memfit.explain.evidence_reader import read_evidence
from memfit.explain.snapshot import read_snapshot
from tests.explain import samples

ODD: list[Any] = [
    None, -1, 0, 1 << 62, 10**400, float("inf"), float("nan"), "x", "", [], {}, [1], {"a": 1}, b"x", True, 1.5, (),
    "\ud800", "\n\x1b[31m", "/a/b.py",
]  # fmt: skip
PIECES = [b"9" * 25, b"9" * 5000, b"1e400", b"-5", b"", b"nan", b"\x00", b"\n", b'"', b"GiB", b"\x1b[2J", b"|" * 50]


def shown(evidence: Any) -> str:
    """What the command writes, on a stream that takes UTF-8 alone."""
    stream = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    explanation = explain(evidence)
    json.dumps(_json(explanation, None))
    _show(explanation, None, Console(file=stream, width=80))
    stream.flush()
    stream.seek(0)
    return stream.read()


def check(read: Callable[[], Any]) -> None:
    """What is read can be shown, or is refused in one line; neither moves the terminal's cursor."""
    evidence, line = None, ""
    try:
        evidence = read()
    except InputError as error:
        line = str(error)
    assert "\n" not in line
    assert "\x1b" not in (shown(evidence) if evidence is not None else line)


def paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in items:
        yield from paths(each, (*path, key))


def put(value: Any, path: tuple[Any, ...], new: Any) -> None:
    for key in path[:-1]:
        value = value[key]
    value[path[-1]] = new


@pytest.mark.parametrize("odd", ODD, ids=repr)
def test_a_snapshot_with_an_odd_value_in_any_field(odd: Any) -> None:
    """One of each kind of field, at its first and at its last place."""
    whole = samples.leaking_snapshot(20)
    places: dict[tuple[Any, ...], list[tuple[Any, ...]]] = {}
    for path in paths(whole):
        places.setdefault(tuple(key for key in path if isinstance(key, str)), []).append(path)
    for path in [each for of_kind in places.values() for each in (of_kind[0], of_kind[-1])]:
        snapshot = pickle.loads(pickle.dumps(whole))
        put(snapshot, path, odd)
        check(partial(read_snapshot, Path("s.pickle"), pickle.dumps(snapshot)))


def test_two_hundred_damaged_texts(tmp_path: Path) -> None:
    rng = random.Random(5)
    whole = "\n".join(f"step {n} | loss 2.1 | memory: {1000 + n} MiB" for n in range(20))
    summary = "|  PyTorch CUDA memory summary, device ID 0  |\n| Allocated memory  | 4 MiB | 8 MiB |\n"
    texts = [
        f"{whole}\n{samples.TRACEBACK}{samples.TORCH_2_14}\n{samples.KERNEL}", samples.NVIDIA_SMI, samples.NVIDIA_SMI_Q,
        samples.NVIDIA_SMI_MIG, f"{summary}| GPU reserved memory | 6 MiB | 8 MiB |\n{samples.TORCH_2_0}",
        "index, memory.used [MiB], memory.total [MiB]\n0, 22000 MiB, 24564 MiB\n",
    ]  # fmt: skip
    for _ in range(200):
        text = bytearray(rng.choice(texts).encode())
        for _ in range(rng.choice([1, 3, 10])):
            numbers = [*re.finditer(rb"\d+", text)]
            if numbers and rng.random() < 0.7:
                chosen = rng.choice(numbers)
                begin, end = chosen.span()
            else:
                begin = rng.randrange(len(text) + 1)
                end = min(len(text), begin + rng.choice([0, 1, 20]))
            text[begin:end] = rng.choice(PIECES)
        (tmp_path / "log").write_bytes(text)
        check(partial(read_evidence, str(tmp_path / "log")))


def test_a_line_of_two_hundred_thousand_characters(tmp_path: Path) -> None:
    (tmp_path / "log").write_text(f"image: {'aZ9/-.' * 40_000}\n{samples.TORCH_2_14}\n")
    assert read_evidence(str(tmp_path / "log")).failures
