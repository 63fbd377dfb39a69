"""The lines of a long run: compressed parts beside a file that begins anew, each window read once.

python -m pytest tests/train/test_line_parts.py
"""

import gzip
import math
import os
import shutil
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from memfit.show.run_follower import Lines
from memfit.train import line_parts
from memfit.train.launch.memory_limit import ENVIRONMENT
from memfit.train.line_parts import parts_of
from memfit.train.metrics_file import (
    count_windows,
    format_line,
    kept_before,
    last_window,
    line_of_window,
    parse_line,
    read_lines,
)
from memfit.train.run_folder import RunFolder

ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(line_parts, "PART_BYTES", 2000)
    run = RunFolder(tmp_path / "run")
    run.open(resume=False)
    yield run
    run.close()


def add(folder, first, last):
    for window in range(first, last):
        for rank in range(2):
            folder.append("samples", {"window": window, "rank": rank, "ids": [window, rank]})
        folder.append("metrics", {"window": window, "loss": 1 / (window + 1)})


def windows_of(folder, name):
    read = read_lines(folder.lines(name))
    assert read.damaged == 0
    return [(line["window"], line.get("rank", 0)) for line in read.lines]


def expected(name, windows):
    return [(window, rank) for window in range(windows) for rank in range(2 if name == "samples" else 1)]


def test_lines_go_into_parts_and_are_read_back_in_order(folder):
    add(folder, 0, 300)
    for name in ("metrics", "samples"):
        assert len(parts_of(folder.lines(name))) > 3
        assert folder.lines(name).stat().st_size < 2200
        assert windows_of(folder, name) == expected(name, 300)
        assert last_window(folder.lines(name)) == 299
    assert folder.metrics_of(7) == {"window": 7, "loss": 1 / 8}


@pytest.mark.parametrize("window", [0, 1, 100, 299, 300])
def test_a_resumed_run_goes_on_from_any_window_inside_of_a_part_or_not(folder, window):
    add(folder, 0, 300)
    folder.close()
    assert folder.keep_lines_before(window) == []
    for name in ("metrics", "samples"):
        assert windows_of(folder, name) == expected(name, window)
    add(folder, window, 320)
    for name in ("metrics", "samples"):
        assert windows_of(folder, name) == expected(name, 320)


def test_a_run_that_was_killed_while_it_made_a_part_has_each_line_once(folder):
    add(folder, 0, 40)
    folder.close()
    path = folder.lines("metrics")
    before = len(parts_of(path))
    content = path.read_bytes()
    line_parts.compress(path, *_ends(content))
    path.write_bytes(content)  # it was killed before the file was made empty
    assert len(parts_of(path)) == before + 1
    assert [line["window"] for line in read_lines(path).lines] == list(range(40))
    assert folder.keep_lines_before(40) == []
    assert windows_of(folder, "metrics") == expected("metrics", 40)


def _ends(content):
    windows = [int(line.split(b":")[1].split(b",")[0]) for line in content.splitlines()]
    return windows[0], windows[-1]


def test_a_validation_that_is_done_again_is_written_into_a_part_too(folder):
    add(folder, 0, 100)
    folder.replace_metrics({"window": 20, "loss": 5.0})
    lines = read_lines(folder.lines("metrics")).lines
    assert [line["window"] for line in lines] == list(range(100))
    assert [line["loss"] for line in lines if line["loss"] == 5.0] == [5.0]
    assert folder.metrics_of(20) == {"window": 20, "loss": 5.0}


ONE_LINE = {
    "line of a window": lambda path: line_of_window(path, 5999),
    "number of windows": count_windows,
    "lines before a window": lambda path: sum(1 for _ in kept_before(path, 6000)),
}


@pytest.mark.parametrize("reads", ONE_LINE.values(), ids=ONE_LINE)
@pytest.mark.parametrize("repeated", [False, True])
def test_a_long_run_is_gone_on_with_in_the_memory_of_a_few_lines(tmp_path, reads, repeated):
    """A run of 100,000 windows ended in a MemoryError when it was resumed: all its lines were held at once. A run that
    was killed while it made a part has the same lines twice."""
    path = tmp_path / "metrics.jsonl"
    lines = "".join(f'{{"window": {window}, "text": "{"x" * 1000}"}}\n' for window in range(6000))
    path.write_text(lines)
    if repeated:
        line_parts.compress(path, 0, 5999)
        path.write_text(lines)
    tracemalloc.start()
    try:
        assert reads(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_who_follows_a_run_gets_each_window_though_the_file_begins_anew(folder):
    follower, given = Lines(folder.lines("metrics")), []
    for first in range(0, 300, 70):
        add(folder, first, min(first + 70, 300))
        given += [line["window"] for line in follower.new()]
    assert given == list(range(300))


def test_the_file_grows_on_where_a_part_cannot_be_written(folder, monkeypatch):
    monkeypatch.setattr(line_parts, "PART_BYTES", 1)
    (folder.path / "metrics-000000000-000000000.jsonl.gz").mkdir()
    add(folder, 0, 2)
    assert folder.lines("metrics").read_bytes().count(b"\n") == 2
    monkeypatch.setattr(line_parts, "PART_BYTES", 1 << 20)
    add(folder, 2, 30)
    assert windows_of(folder, "metrics") == expected("metrics", 30)


def test_a_damaged_part_costs_its_lines_and_is_said(folder):
    add(folder, 0, 100)
    folder.close()
    first = parts_of(folder.lines("metrics"))[0]
    content = gzip.decompress(first.path.read_bytes())
    first.path.write_bytes(gzip.compress(content)[:-20])
    (lost,) = [line for line in folder.keep_lines_before(100) if line.startswith("metrics")]
    assert "has lost the lines of" in lost
    shutil.rmtree(folder.path)


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (float("nan"), None),
        ([1.0, -math.inf], [1.0, None]),
        (np.float64(0.5), 0.5),
        (np.int64(7), 7),
        (1 << 70, 1 << 70),
        ({1: 2.5}, {"1": 2.5}),
        ("\ud800", "\ud800"),
        ((3, 4), [3, 4]),
    ],
)
def test_a_line_is_json_whatever_the_numbers_of_a_job_are(value, written):
    content = format_line({"window": 0, "value": value})
    assert content.endswith(b"}\n")
    assert content.count(b"\n") == 1
    assert parse_line(content) == {"window": 0, "value": written}


FILLED = """
from memfit.train.launch import memory_limit
from memfit.train.metrics_file import format_line
from tests.train.full_memory import fill

line, failed = {"window": 0, "values": [1.5] * 1000}, 0

def make():
    global failed
    try:
        format_line(line)
    except MemoryError:
        failed += 1

kept = fill((16384, 4096, 2048, 1024, 512, 256), make)
kept.clear()
memory_limit.lift()
print(failed, len(format_line(line)))
"""
"""Fills the memory of a process with smaller and smaller blocks, and makes a line after each size."""


def test_a_line_for_which_there_is_no_memory_raises_an_error():
    done = subprocess.run(
        [sys.executable, "-c", FILLED], capture_output=True, text=True, timeout=60, cwd=ROOT,
        env={**os.environ, **ENVIRONMENT},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    failed, length = map(int, done.stdout.split())
    assert failed
    assert length > 4000
