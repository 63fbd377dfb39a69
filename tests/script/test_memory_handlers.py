"""Scripts that handle memory that fails, by half the batch."""

from pathlib import Path

import pytest

from memfit.script.launch import trace_with_need
from memfit.script.outcome import ScriptCommand, TraceRequest
from memfit.show.script_table import script_remarks
from tests.script.script_trace import trace_here

LOOP = (
    "import torch\n"
    "net = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(4)]).cuda()\n"
    "optimizer = torch.optim.SGD(net.parameters(), 0.1)\n"
)
HALVES = (
    "size, steps = 1 << 20, 0\n"
    "while steps < 3:\n"
    "    try:\n"
    "        net(torch.ones(size, 1024).cuda()).sum().backward()\n"
    "        optimizer.step(); optimizer.zero_grad()\n"
    "        steps += 1\n"
    "    except {error}:\n"
    "        {first}\n"
    "        optimizer.zero_grad()\n"
    "        torch.cuda.empty_cache()\n"
    "        size //= 2\n"
)
BY_CLASS = LOOP + HALVES.format(error="torch.cuda.OutOfMemoryError", first="pass")
BY_MESSAGE = LOOP + HALVES.format(
    error="RuntimeError as error", first="assert 'out of memory' in str(error)"
)  # fmt: skip
BY_ACCELERATE = LOOP + (
    "from accelerate.utils import find_executable_batch_size\n"
    "@find_executable_batch_size(starting_batch_size=1 << 20)\n"
    "def train(batch_size):\n"
    "    for step in range(3):\n"
    "        net(torch.ones(batch_size, 1024).cuda()).sum().backward()\n"
    "        optimizer.step(); optimizer.zero_grad()\n"
    "train()\n"
)
GIVES_UP = LOOP + (
    "try:\n"
    "    for step in range(3):\n"
    "        net(torch.ones(1 << 20, 1024).cuda()).sum().backward()\n"
    "        optimizer.step(); optimizer.zero_grad()\n"
    "except torch.OutOfMemoryError:\n"
    "    print('use a smaller batch')\n"
)
UNHANDLED = GIVES_UP.replace("torch.OutOfMemoryError", "KeyboardInterrupt")


def asked(folder: Path, text: str):
    (folder / "train.py").write_text(text)
    command = ScriptCommand(target=str(folder / "train.py"))
    return trace_with_need(TraceRequest(command=command, device="rtx3060", every_card=False, asked=True))


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(BY_CLASS, id="class"),
        pytest.param(BY_MESSAGE, id="message", marks=pytest.mark.slow),
        pytest.param(BY_ACCELERATE, id="accelerate", marks=pytest.mark.slow),
    ],
)
def test_a_script_that_halves_its_batch_fits_where_that_fits(tmp_path: Path, text: str) -> None:
    outcome = asked(tmp_path, text)
    assert outcome.error is None
    assert outcome.footprint.verdict != "no"
    assert outcome.failed_attempts >= 2
    remark = next(line for line in script_remarks(outcome) if "ran out of memory" in line)
    assert "attempts ran out of memory, which the code at" in remark
    assert "train.py:" in remark


@pytest.mark.slow
def test_a_script_that_gives_up_does_not_fit(tmp_path: Path) -> None:
    outcome = asked(tmp_path, GIVES_UP)
    assert outcome.footprint.verdict == "no"
    assert outcome.windows == 3
    assert not outcome.failed_attempts


def test_without_a_card_the_answer_says_that_it_was_not_seen(tmp_path: Path) -> None:
    seen = trace_here(tmp_path, BY_CLASS.replace("1 << 20", "64")).not_seen
    assert any("train.py:7 does where memory fails: memfit trace --device CARD" in line for line in seen)
    assert not any("fails" in line for line in trace_here(tmp_path, UNHANDLED).not_seen)
