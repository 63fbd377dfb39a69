"""The next question finds the process that has the job loaded as soon as the first one is answered.

python -m pytest tests/cli/test_question_socket.py
"""

import json
import os
import subprocess
import sys

import pytest

from memfit.cli.question_socket import QuestionSocket, show_socket
from memfit.planner.hand_over import connected
from tests.cli.test_loaded_copy import FIRST, SECOND, asked, folder, imports, needs_core

__all__ = ["folder"]
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="copies are made on Linux alone")

SET_UP_LATE = """
    def optimizers(self, nets):
        if os.getpid() != LOADED_BY:
            while not os.path.exists("answered") or time.time() < os.stat("answered").st_mtime + 2:
                pass
"""
"""A copy has set the job up two seconds after the first question is answered."""


@needs_core
def test_the_next_question_finds_a_copy_that_still_sets_the_job_up(folder):
    text = (folder / "job.py").read_text().replace("\n    def optimizers(self, nets):\n", SET_UP_LATE)
    (folder / "job.py").write_text(f"{text}LOADED_BY = os.getpid()\n")
    first = asked(folder, *FIRST)
    (folder / "answered").touch()
    second = asked(folder, *SECOND)
    assert (first.returncode, second.returncode, imports(folder)) == (0, 0, 1)
    (folder / "slow").unlink()
    fresh = asked(folder, *SECOND, "--fresh")
    both = [json.loads(output.stdout) | {"seconds": 0} for output in (second, fresh)]
    assert both[0] == both[1]


def test_a_socket_is_found_where_it_is_shown_and_only_by_its_user(tmp_path):
    path = tmp_path / "new" / "job.socket"
    questions = QuestionSocket(path)
    assert not questions.is_shown
    show_socket(path, os.getpid())
    assert questions.is_shown
    assert path.stat().st_mode & 0o077 == 0
    connected(path).close()
    questions.close()
    assert list(path.parent.iterdir()) == []


def test_a_socket_that_nobody_was_shown_is_taken_away(tmp_path):
    QuestionSocket(tmp_path / "job.socket").close()
    assert list(tmp_path.iterdir()) == []


LISTENS = """
import sys
from pathlib import Path
from memfit.cli.question_socket import QuestionSocket
questions = QuestionSocket(Path(sys.argv[1]))
print("listens", flush=True)
sys.stdin.read()
"""


def test_the_socket_of_a_process_that_listens_is_not_replaced(tmp_path):
    path = tmp_path / "job.socket"
    with subprocess.Popen(
        [sys.executable, "-c", LISTENS, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout.readline() == "listens\n"
        own = QuestionSocket(path)
        show_socket(path, other.pid)
        show_socket(path, os.getpid())
        assert not own.is_shown
        other.communicate()
    show_socket(path, os.getpid())  # nobody listens at what it has left
    assert own.is_shown
    own.close()
    assert not path.exists()


def test_a_process_without_a_socket_shows_none(tmp_path):
    show_socket(tmp_path / "job.socket", os.getpid())
    assert list(tmp_path.iterdir()) == []
