"""Processes that memfit starts write where the caller's errors go, also where that is no file."""

import contextlib
import io

import pytest

from memfit.child_process import error_descriptor
from memfit.script.command import parse_command
from memfit.script.launch import trace_script
from memfit.script.outcome import TraceRequest

TRAINS = """
import torch
net = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for _ in range(2):
    net(torch.ones(2, 4)).sum().backward()
    optimizer.step()
"""


@pytest.mark.parametrize("stream", [io.StringIO(), None, io.TextIOWrapper(io.BytesIO())], ids=["text", "none", "bytes"])
def test_a_stream_without_a_descriptor_is_the_processs_own(stream):
    with contextlib.redirect_stderr(stream):
        assert error_descriptor() == 2


def test_a_stream_with_a_descriptor_is_taken(tmp_path):
    with open(tmp_path / "said", "w") as said, contextlib.redirect_stderr(said):
        assert error_descriptor() == said.fileno()


def test_a_script_is_traced_where_standard_error_is_captured(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(TRAINS)
    command = parse_command(["python", str(script)])
    with contextlib.redirect_stderr(io.StringIO()):
        outcome = trace_script(TraceRequest(command=command, device="cpu", memory_bytes=1 << 30))
    assert outcome.error is None
