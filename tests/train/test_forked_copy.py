"""A process that a job forks and that returns into the training is ended there, and touches nothing.

python -m pytest tests/train/test_forked_copy.py
"""

import os

import pytest

from memfit.train.launch.forked_copy import ForkedCopyGuard


def leaves(how):
    """Exit code of a process that is forked inside and comes out so."""
    with ForkedCopyGuard():
        forked = os.fork()
        if forked == 0 and how == "exit":
            raise SystemExit(3)
        if forked == 0 and how == "raise":
            raise ValueError("planted")
    if forked == 0:
        os._exit(77)
    return os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1])


@pytest.mark.parametrize(
    ("how", "code", "words"),
    [("exit", 3, ""), ("raise", 1, "raised ValueError: planted"), ("return", 1, "returned into the training")],
)
def test_a_copy_does_not_come_out(how, code, words, capfd):
    assert leaves(how) == code
    assert words in capfd.readouterr().err


def test_what_the_process_itself_raises_passes():
    with pytest.raises(ValueError, match="mine"), ForkedCopyGuard():
        raise ValueError("mine")
