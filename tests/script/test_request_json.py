"""What is asked of the traced process comes back as it was."""

from memfit.script.outcome import ScriptCommand, TraceRequest
from memfit.script.request_json import request_from_json, request_to_json


def test_a_request_comes_back_with_its_tuples():
    command = ScriptCommand(
        target="träin.py", args=("--x", "a b\n"), environment={"RANK": "0"}, world=2, launcher="accelerate"
    )
    request = TraceRequest(
        command=command, device="cpu", memory_bytes=5, stubs=("apex",), assumed=(("a.py", 3, "True"),), writable=("/x",)
    )
    assert request_from_json(request_to_json(request).encode()) == request
