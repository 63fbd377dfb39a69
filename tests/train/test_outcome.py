"""How a launch ended is known where its folder cannot be written.

python -m pytest tests/train/test_outcome.py
"""

import os
import signal
from pathlib import Path

import pytest

from memfit.errors import Exit
from memfit.train.launch.outcome import SPARE, Outcome, read_outcome, say, spare_folder, write_outcome
from memfit.train.launch.torchrun import _code_of, torchrun
from memfit.train.launch.watchdog import remove_temporary_stacks
from memfit.train.run_folder import RunFolder


def test_an_outcome_is_written_into_a_spare_folder_where_the_run_cannot_be_written(tmp_path, capsys):
    gone = tmp_path / "gone"
    with spare_folder():
        spare = Path(os.environ[SPARE])
        assert not spare.exists()  # a launch that is killed now leaves nothing
        write_outcome(gone, Outcome(code=Exit.STOPPED), "stopped")
        write_outcome(gone, Outcome(code=Exit.BAD_INPUT), "another rank ended")
        assert read_outcome(gone).code == Exit.STOPPED
    assert capsys.readouterr().err == "memfit: stopped\n"
    assert not spare.exists()
    assert SPARE not in os.environ
    assert read_outcome(gone) is None


def test_an_outcome_that_is_written_in_part_is_passed_over(tmp_path, monkeypatch):
    with spare_folder():
        Path(os.environ[SPARE]).mkdir()
        (Path(os.environ[SPARE]) / ".ended-once").write_text('{"code": 5}')
        (tmp_path / ".ended-once").touch()
        assert read_outcome(tmp_path).code == Exit.STOPPED


def test_what_killed_processes_leave_beside_stacks_is_removed(tmp_path):
    folder = RunFolder(tmp_path)
    folder.stacks.mkdir()
    for name in ("held-0.txt", "crash-0.txt", ".waits-0.txt"):
        (folder.stacks / name).touch()
    (folder.stacks / "rank-0.txt").write_text("stacks")
    remove_temporary_stacks(folder)
    assert [path.name for path in folder.stacks.iterdir()] == ["rank-0.txt"]
    (folder.stacks / "rank-0.txt").unlink()
    remove_temporary_stacks(folder)
    assert not folder.stacks.exists()


def test_a_folder_whose_name_has_control_characters_is_said_in_one_plain_line(capsys):
    say("go on with: memfit run a\x1b[2J\nb/plan.toml")
    assert capsys.readouterr().err == "memfit: go on with: memfit run a\\x1b[2J\\nb/plan.toml\n"


@pytest.mark.parametrize(
    ("exits", "resumable", "words"),
    [
        ([2, Exit.STOPPED], True, "memfit: ranks ended too often, out of memory or unable to write the run's folder; "),
        ([2, Exit.STOPPED], False, ""),
        ([-9], True, "memfit: ranks were killed by signal 9 too often; go on with --resume"),
        ([-9], False, "memfit: ranks were killed by signal 9\n"),
    ],
)
def test_ranks_of_what_cannot_be_resumed_speak_of_no_resuming(tmp_path, capsys, exits, resumable, words):
    assert _code_of(tmp_path, exits, resumable) == Exit.STOPPED
    heard = capsys.readouterr().err
    assert heard.startswith(words)
    assert ("resume" in heard) is resumable


def test_the_crash_of_a_rank_is_named(tmp_path, capsys):
    folder = RunFolder(tmp_path)
    folder.stacks.mkdir()
    (folder.stacks / "crash-0.txt").touch()
    crash = folder.stacks / "crash-1.start-2.txt"
    job = tmp_path / "job.py"
    job.touch()
    library = Path(os.__file__).parent / "ctypes" / "__init__.py"
    crash.write_text(
        "Fatal Python error: Segmentation fault\n\n"
        'Thread 0x1 (most recent call first):\n  File "/other/job.py", line 9 in wait\n\n'
        f'Current thread 0x2 (most recent call first):\n  File "{library}", line 519 in string_at\n'
        f'  File "{job}", line 4 in loss\n\nExtension modules: numpy (total: 1)\n'
    )
    assert _code_of(tmp_path, [1, -11], True) == Exit.STOPPED
    called = f"a crash in native code that {job}:4 in loss() called"
    assert capsys.readouterr().err == (
        f"memfit: ranks were killed by signal 11, {called} (stacks: {crash}) too often; go on with --resume\n"
    )


def test_a_signal_after_a_launch_is_handled_as_before_it(tmp_path, monkeypatch):
    """torchrun's own handlers raise an error that memfit would print as a fault of its own."""

    def run(_) -> None:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, lambda *_: None)

    monkeypatch.setattr("torch.distributed.run.run", run)
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    before = [signal.getsignal(number) for number in numbers]
    assert torchrun(2, "module", [], tmp_path) == Exit.DONE
    assert [signal.getsignal(number) for number in numbers] == before
