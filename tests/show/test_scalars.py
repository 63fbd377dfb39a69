"""pytest tests/show/test_scalars.py: the numbers of a run for TensorBoard and Weights & Biases."""

import json
import subprocess
import sys

import pytest

from memfit.show.run_follower import Lines
from memfit.show.scalars import TensorBoard, scalars

LINE = {
    "window": 3,
    "epoch": 0,
    "loss": 0.5,
    "losses": {"generator": 0.2, "discriminator": 0.3},
    "gradient_norm": {"adam": None},
    "skipped": ["turn"],
    "measured_process_bytes": 1 << 30,
}


def test_numbers_by_name_and_nothing_else():
    assert dict(scalars(LINE)) == {
        "loss": 0.5,
        "losses/generator": 0.2,
        "losses/discriminator": 0.3,
        "measured_process_bytes": float(1 << 30),
    }


def test_tensorboard_reads_what_was_written(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = TensorBoard(tmp_path)
    for window in range(3):
        board.line({**LINE, "window": window, "loss": 1.0 - window})
    board.close()
    result = EventAccumulator(str(tmp_path))
    result.Reload()
    assert [(event.step, event.value) for event in result.Scalars("loss")] == [(0, 1.0), (1, 0.0), (2, -1.0)]
    assert "losses/generator" in result.Tags()["scalars"]


def test_wandb_keeps_them_offline(tmp_path):
    pytest.importorskip("wandb")
    code = f"""
from pathlib import Path
from memfit.show.scalars import Wandb
kept = Wandb(Path({str(tmp_path)!r}), {{"job": "a"}})
kept.line({LINE!r})
kept.close()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    assert [path.suffix for path in tmp_path.glob("wandb/offline-run-*/*.wandb")] == [".wandb"]


def test_lines_come_once_and_whole(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = Lines(path)
    assert list(lines.new()) == []
    path.write_text('{"window": 0}\n{"window": 1}\n{"wind')
    assert [line["window"] for line in lines.new()] == [0, 1]
    with path.open("a") as file:
        file.write('ow": 2}\n')
    assert [line["window"] for line in lines.new()] == [2]
    assert list(lines.new()) == []


def test_lines_of_a_resumed_run_go_on_behind_those_that_were_given(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"window": i}) + "\n" for i in range(5)))
    lines = Lines(path)
    assert len(list(lines.new())) == 5
    beside = tmp_path / "new"
    beside.write_text("".join(json.dumps({"window": i}) + "\n" for i in range(7)))
    beside.replace(path)
    assert [line["window"] for line in lines.new()] == [5, 6]
