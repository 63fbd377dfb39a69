"""What only shows a run may fail: the training goes on, and it is said once.

python -m pytest tests/cli/test_run_monitor.py
"""

import json
import os
from dataclasses import replace

import pytest

from memfit.cli import run_monitor
from memfit.cli.run import memory_words, summary_of
from memfit.cli.run_monitor import _Attendant, keepers
from memfit.show.console import make_console
from memfit.show.scalars import TensorBoard
from memfit.train.run_folder import RunFolder
from tests.train.test_reduced_limits import PLAN


class Breaks:
    """A watcher whose disk is full from its second line on."""

    def __init__(self):
        self.lines = 0

    def line(self, line):
        self.lines += 1
        if self.lines > 1:
            raise OSError(28, "No space left on device")

    def close(self):
        raise OSError(28, "No space left on device")


class Keeps:
    def __init__(self):
        self.windows = []

    def line(self, line):
        self.windows.append(line["window"])

    def close(self):
        pass


def with_lines(folder, count):
    for number in range(count):
        folder.append("metrics", {"window": number, "loss": None, "units_per_second": 1.0})


def test_a_watcher_that_fails_is_left_out_and_the_others_get_every_line(tmp_path, capsys):
    folder, broken, kept = RunFolder(tmp_path), Breaks(), Keeps()
    attendant = _Attendant(folder, PLAN, [broken, kept], None)
    with_lines(folder, 5)
    attendant.end()
    said = capsys.readouterr().err
    assert kept.windows == [0, 1, 2, 3, 4]
    assert broken.lines == 2
    assert said.count("Breaks is switched off: OSError: [Errno 28] No space left on device") == 1
    assert "Traceback" not in said


def test_what_processes_say_is_taken_though_the_terminal_is_gone(tmp_path):
    """The pipe holds 64 KiB: a training process that says more would wait for ever."""

    class Gone:
        def write(self, text):
            raise OSError(5, "Input/output error")

        def flush(self):
            pass

    folder = RunFolder(tmp_path)
    folder.write_window_range(0, 3)
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    attendant = _Attendant(folder, PLAN, [], (make_console(file=Gone(), force_terminal=True), reader))
    for _ in range(40):
        os.write(writer, b"x" * 8000 + b"\n")
    with_lines(folder, 3)
    attendant.end()
    os.close(writer)
    assert os.read(reader, 1) == b""
    os.close(reader)


def test_a_folder_that_cannot_be_written_leaves_tensorboard_out(tmp_path, monkeypatch, capsys):
    def fails(folder):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(run_monitor, "TensorBoard", fails)
    monkeypatch.setattr(run_monitor, "has_tensorboard", lambda: True)
    assert keepers(RunFolder(tmp_path), PLAN, wandb=False) == []
    assert "TensorBoard is switched off: PermissionError" in capsys.readouterr().err


def test_tensorboard_reads_what_is_written(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    board = TensorBoard(tmp_path)
    for number in range(3):
        board.line({"window": number, "loss": 0.5 * number})
    board.close()
    (file,) = tmp_path.iterdir()
    steps = [event.step for event in EventFileLoader(str(file)).Load() if event.HasField("summary")]
    assert steps == [0, 1, 2]


def test_what_is_no_tensor_is_in_the_planned_and_in_the_measured_bytes():
    plan = replace(PLAN, device="cpu", budget_bytes=256 << 20, phases={"train": {"process_bytes": 95 << 20}})
    line = {"window": 0, "measured_process_bytes": 115 << 20}
    assert memory_words(summary_of([line], 1, plan)) == (
        "Peak 115 MiB measured, 124 MiB planned (95.0 MiB of tensors predicted, "
        "29.1 MiB reserved for libraries, Python and data), 256 MiB allowed."
    )
    words = memory_words(summary_of([line], 1, replace(plan, device="rtx4090")))
    assert words == "Peak 115 MiB measured, 95.0 MiB predicted, 256 MiB allowed."
    assert memory_words(summary_of([], 0, replace(plan, phases={}))) == (
        "Peak unknown measured, unknown predicted, 256 MiB allowed."
    )


def test_a_run_over_its_budget_says_so():
    plan = replace(PLAN, device="rtx4090", budget_bytes=1 << 30, phases={})
    words = memory_words(summary_of([{"window": 0, "measured_process_bytes": 3 << 29}], 1, plan))
    assert words.endswith("1.00 GiB allowed. The run took 512 MiB more than its budget.")


def test_numbers_that_are_not_finite_are_null_in_the_lines(tmp_path):
    folder = RunFolder(tmp_path)
    folder.append("metrics", {"window": 0, "loss": float("nan"), "losses": {"a": float("inf")}})
    folder.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"window": 0, "loss": None, "losses": {"a": None}}
