"""Several scripts that are traced at once: as by one after the other, and no more than the machine holds.

python -m pytest tests/script/test_side_by_side.py
"""

import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest

from memfit.device.hardware.catalogue import find_device
from memfit.errors import InputError
from memfit.job import Shape
from memfit.script import side_by_side
from memfit.script.asked_script import AskedScript
from memfit.script.outcome import ScriptCommand, TraceRequest
from tests.cli.asking import ROOT

SCRIPT = """
import sys, torch
print("width", sys.argv[1])
torch.cuda.get_device_name()
net = torch.nn.Linear(int(sys.argv[1]), 64).cuda()
optimizer = torch.optim.SGD(net.parameters())
for _ in range(4):
    net(torch.randn(8, int(sys.argv[1])).cuda()).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def request(path, word, **options) -> TraceRequest:
    command = ScriptCommand(target=str(path), args=(str(word),))
    return TraceRequest(command=command, device="rtx4090", every_card=False, **options)


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture
def running(monkeypatch):
    """How many traces ran at once, each time that one began."""
    counts, trace, open_traces, lock = [], side_by_side.trace_script, [], threading.Lock()

    def counted(*arguments, **named):
        with lock:
            open_traces.append(None)
            counts.append(len(open_traces))
        try:
            return trace(*arguments, **named)
        finally:
            with lock:
                open_traces.pop()

    monkeypatch.setattr(side_by_side, "trace_script", counted)
    return counts


@pytest.mark.parametrize(
    ("cores", "available", "peak", "most"),
    [
        (3, 1 << 60, 1 << 30, 3),
        (3, 4 << 30, 1 << 30, 2),
        (1, 1 << 60, 1 << 30, 1),
        (3, 1 << 30, 1 << 30, 1),
        (3, 1, 0, 1),
    ],
)
def test_as_many_run_at_once_as_there_are_cores_and_memory_for(monkeypatch, cores, available, peak, most):
    monkeypatch.setattr(side_by_side, "available_cores", lambda: cores)
    monkeypatch.setattr(side_by_side, "available_bytes", lambda: available)
    monkeypatch.setattr(side_by_side, "_peak_bytes", lambda: peak)
    assert side_by_side.at_once() == most


def test_outcomes_and_output_come_in_the_order_of_the_requests(monkeypatch, script, running, capfd):
    monkeypatch.setattr(side_by_side, "available_cores", lambda: 2)
    widths = (512, 64, 128)
    outcomes = side_by_side.trace_scripts([request(script, width) for width in widths])
    assert [outcome.footprint.phases["train"].categories["parameters"] for outcome in outcomes] == [
        64 * 4 * width + 256 for width in widths
    ]
    assert [line for line in capfd.readouterr().err.split("\n") if line.startswith("width")] == [
        f"width {width}" for width in widths
    ]
    assert 2 in running


def test_the_first_error_in_the_order_of_the_requests_is_raised(monkeypatch):
    def trace(width, output=None):
        time.sleep(0.1 * width)
        raise InputError(f"width {width}", "wrong", "right")

    monkeypatch.setattr(side_by_side, "at_once", lambda: 2)
    monkeypatch.setattr(side_by_side, "trace_script", trace)
    monkeypatch.setattr(side_by_side, "_peak_bytes", lambda: 1)
    with pytest.raises(InputError, match="width 2"):
        side_by_side.trace_scripts([2, 1])


@pytest.mark.slow
def test_cards_that_answer_differently_are_traced_side_by_side(monkeypatch, script, running):
    monkeypatch.setattr(side_by_side, "available_cores", lambda: 2)
    devices = [find_device(key) for key in ("rtx4090", "l40s", "h100", "t4")]
    together = AskedScript(["python", str(script), "64"])
    together.prepare(Shape(items=1), devices)
    begun, count = len(running), together.traced
    assert max(running) == 2
    answers = [together.predict(Shape(items=1), device).footprint for device in devices]
    assert (len(running), together.traced) == (begun, count)  # nothing was left to trace
    for device, footprint in list(zip(devices, answers, strict=True))[2:]:
        alone = AskedScript(["python", str(script), "64"]).predict(Shape(items=1), device)
        assert footprint == alone.footprint


WAITING = """
import sys, time, torch
open(sys.argv[1], "w").close()
time.sleep(60)
"""
ASK = """
import sys
from memfit.interruption import interrupted_by
from memfit.script import side_by_side
from tests.script.test_side_by_side import request
side_by_side.at_once, side_by_side._peak_bytes = (lambda: 2), (lambda: 1)
with interrupted_by([2]):
    side_by_side.trace_scripts([request(sys.argv[1], name, unsafe_writes=True) for name in sys.argv[2:]])
"""


def test_an_interrupt_ends_all_of_them(tmp_path):
    script, begun = tmp_path / "train.py", [tmp_path / "a", tmp_path / "b"]
    script.write_text(WAITING)
    command = [sys.executable, "-c", ASK, str(script), *map(str, begun)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, cwd=ROOT) as process:
        while not all(path.exists() for path in begun):
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.05)
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        process.wait(timeout=20)
    assert len(children) >= 2
    assert psutil.wait_procs(children, timeout=20)[1] == []
