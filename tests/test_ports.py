"""Processes of tests that run at one time get different ports.

python -m pytest tests/test_ports.py
"""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from testing import ports

ROOT = Path(__file__).parents[1]
SCRIPT = "import sys; from testing.ports import free_port; print(free_port(), flush=True); sys.stdin.read()"


def test_a_port_that_another_process_was_given_is_not_given_again(monkeypatch):
    others = [
        subprocess.Popen([sys.executable, "-c", SCRIPT], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for _ in range(2)
    ]
    try:
        taken = [int(other.stdout.readline()) for other in others]
        assert taken[0] != taken[1]
        monkeypatch.setattr(ports, "FIRST", min(taken))
        monkeypatch.setattr(ports, "LAST", min(taken))
        with pytest.raises(OSError, match="no port"):
            ports.free_port()
    finally:
        for other in others:
            other.communicate()
    assert ports.free_port() == min(taken)  # its process has ended


def test_a_port_on_which_somebody_listens_is_not_given(monkeypatch):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        monkeypatch.setattr(ports, "FIRST", port)
        monkeypatch.setattr(ports, "LAST", port)
        with pytest.raises(OSError, match="no port"):
            ports.free_port()
