"""Functions of a library below ``torch.overrides.handle_torch_function``, where torch's function modes are off.

python -m pytest tests/script/test_library_functions.py
"""

from pathlib import Path

from memfit.trace.self_test import live_peaks
from tests.script.script_trace import trace_here

SCRIPT = """
import torch
from torch.overrides import handle_torch_function

inside = False

class Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty(len(x), 64, dtype=x.dtype, device=x.device) for _ in range(4)]
        return torch.cat(parts).sum(0, keepdim=True) + x

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 1

def exchange(x):
    global inside
    if HANDLES and not inside:
        inside = True
        given = handle_torch_function(exchange, (x,), x)
        inside = False
        return given
    return Exchange.apply(x)

net = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for step in range(3):
    exchange(net(torch.randn(1000, 64).cuda())).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_tensors_that_a_library_makes_on_the_card_are_on_the_virtual_one(tmp_path: Path) -> None:
    outcomes = [trace_here(tmp_path, SCRIPT.replace("HANDLES", handles)) for handles in ("True", "False")]
    peaks = []
    for outcome in outcomes:
        assert outcome.error is None, outcome.error.text
        assert outcome.bare is not None
        peaks.append(live_peaks(outcome.bare)["train"])
    assert peaks[0] == peaks[1] > 4 * 1000 * 64 * 4
