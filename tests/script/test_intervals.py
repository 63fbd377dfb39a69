"""Conditions that hold every so many steps, and loops without gradients whose turns repeat."""

from itertools import count
from pathlib import Path

import pytest

from memfit.script.intervals import Intervals
from tests.script.script_trace import trace_here

NET = (
    "import torch\n"
    "net = torch.nn.Linear(64, 64).cuda()\n"
    "optimizer = torch.optim.AdamW(net.parameters())\n"
    "calls = 0\n"
    "def evaluate(turns, keep=False):\n"
    "    global calls\n"
    "    calls, outputs = 0, []\n"
    "    net.eval()\n"
    "    with torch.no_grad():\n"
    "        for turn in range(turns):\n"
    "            calls += 1\n"
    "            output = net(torch.ones(512, 64).cuda())\n"
    "            if keep:\n"
    "                outputs.append(output)\n"
    "    net.train()\n"
)
STEP = "    net(torch.ones(8, 64).cuda()).sum().backward(); optimizer.step(); optimizer.zero_grad()\n"


def asked(values: list[tuple[int, int]], divisor: int = 1000, wanted: int = 0) -> list[int]:
    """The values whose condition holds, of (window, value)."""
    now = 0
    intervals = Intervals(windows=lambda: now)
    met = []
    for window, value in values:
        now = window
        if intervals.remainder(value, divisor, wanted, "train.py:1", "step % 1000 == 0", True) == wanted:
            met.append(value)
    return met


def test_a_counter_meets_its_condition_once() -> None:
    assert asked([(step, step) for step in range(1, 9)]) == [2]
    assert asked([(step, step) for step in range(9)], divisor=4) == [0, 2, 4, 8]
    assert asked([(step // 4, step) for step in range(1, 20)]) == [8]  # four micro-batches a window
    assert asked([(step, 64 * step) for step in range(1, 9)], divisor=6400) == [192]  # samples seen
    assert asked([(step, step) for step in range(1, 9)], wanted=999) == [2]
    assert asked([(step // 2, step + 1) for step in range(7)], divisor=2) == [2, 4, 6]  # accumulation: never early


@pytest.mark.parametrize(
    "values",
    [
        [(window, layer) for window in range(6) for layer in range(1, 4)],  # a loop over layers
        [(window, 768) for window in range(6)],  # a width
        [(window, value) for window, value in enumerate([310, 477, 350, 612, 351, 352])],  # lengths
        [(window, 1000 * window) for window in range(2, 9)],  # holds by itself
    ],
)
def test_what_counts_no_steps_is_as_it_is(values: list[tuple[int, int]]) -> None:
    assert asked(values) == [value for _, value in values if value % 1000 == 0]


def test_other_types_have_their_own_remainder() -> None:
    intervals = Intervals(windows=count().__next__)
    assert intervals.remainder("%d of %d", (1, 2), 0, "a.py:1", "", True) == "1 of 2"
    assert intervals.remainder(7.5, 2, 0, "a.py:2", "", True) == 1.5


@pytest.mark.parametrize(
    "condition",
    [
        "step % 1000 == 0", "step and not step % 1000", "(step + 1) % EVERY == 0 or step == 10**6",
        "step % EVERY == EVERY - 1", "(True if step % 1000 == 999 else False)",
    ],
)  # fmt: skip
def test_what_runs_every_so_many_steps_is_seen(tmp_path: Path, condition: str) -> None:
    outcome = trace_here(
        tmp_path,
        f"{NET}EVERY = 5000\nfor step in range(10**6):\n{STEP}    if {condition}:\n        evaluate(2)\n"
        "        torch.save(net.state_dict(), 'last.pt')\n",
    )
    assert outcome.error is None, outcome.error.text
    assert outcome.footprint is not None
    assert set(outcome.footprint.phases) >= {"train", "validate", "save"}
    assert [(Path(answer.where).name, answer.answer) for answer in outcome.assumed] == [("train.py:19", "True")]
    assert not outcome.not_seen


def test_a_forward_that_a_condition_led_to_early_is_not_one_of_each_window(tmp_path: Path) -> None:
    script = NET + (
        "for it in range(100):\n"
        "    with torch.no_grad(): made = net(torch.ones(8, 64).cuda())\n"
        "    net(made).sum().backward()\n"
        "    optimizer.step(); optimizer.zero_grad()\n"
        "    if it % 20 == 0:\n"
        "        with torch.no_grad(): sample = net(torch.ones(65536, 64).cuda())\n"
        "    del made\n"
        "    if it == 2: break\n"
    )
    outcome = trace_here(tmp_path, script)
    assert outcome.footprint is not None
    phases = outcome.footprint.phases
    assert phases["validate"].allocated_bytes > phases["train"].allocated_bytes + (24 << 20)


def test_what_is_skipped_except_every_so_many_steps_is_seen(tmp_path: Path) -> None:
    text = f"{NET}for step in range(10**6):\n{STEP}    if step % 1000 != 0:\n        continue\n    evaluate(2)\n"
    outcome = trace_here(tmp_path, text, assumed=())
    assert [answer.answer for answer in outcome.assumed] == ["False"]
    assert outcome.footprint is not None
    assert "validate" in outcome.footprint.phases


def test_a_given_answer_leaves_a_condition_as_it_is(tmp_path: Path) -> None:
    text = f"{NET}for step in range(10**6 - 1):\n{STEP}    if step % 1000 == 999:\n        evaluate(2)\n"
    outcome = trace_here(tmp_path, text, assumed=(("train.py", 18, "False"),))
    assert not outcome.assumed
    assert outcome.not_seen == ("no validation ran", "nothing was saved")


def test_a_number_that_is_looked_for_is_found(tmp_path: Path) -> None:
    outcome = trace_here(
        tmp_path,
        f"{NET}for step in range(12):\n{STEP}    length = 17 + step\n    while length % 8 != 0:\n        length += 1\n"
        "    assert length % 8 == 0\n",
    )
    assert outcome.error is None, outcome.error.text


def test_a_loop_without_gradients_that_repeats_is_left(tmp_path: Path) -> None:
    outcome = trace_here(tmp_path, f"{NET}for step in range(4):\n{STEP}evaluate(10**9)\nassert calls < 9, calls\n")
    assert outcome.error is None, outcome.error.text
    assert any("whose turns repeat" in line for line in outcome.not_seen)


def test_a_loop_that_keeps_its_outputs_runs_to_its_end(tmp_path: Path) -> None:
    outcome = trace_here(
        tmp_path, f"{NET}for step in range(4):\n{STEP}evaluate(20, keep=True)\nassert calls == 20, calls\n"
    )
    assert outcome.error is None, outcome.error.text
    assert outcome.footprint is not None
    assert outcome.footprint.phases["validate"].allocated_bytes > 20 * 512 * 64 * 4


def test_the_loop_over_equal_layers_of_a_net_runs_to_its_end(tmp_path: Path) -> None:
    outcome = trace_here(
        tmp_path,
        "import torch\n"
        "ran = 0\n"
        "class Net(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(9))\n"
        "    def forward(self, x):\n"
        "        global ran\n"
        "        for layer in self.layers:\n"
        "            x = layer(x)\n"
        "            ran += 1\n"
        "        return x\n"
        "net = Net().cuda()\n"
        "optimizer = torch.optim.AdamW(net.parameters())\n"
        f"for step in range(4):\n{STEP}"
        "ran = 0\n"
        "with torch.no_grad():\n"
        "    net(torch.ones(8, 64).cuda())\n"
        "assert ran == 9, ran\n",
    )
    assert outcome.error is None, outcome.error.text


def test_a_loop_holds_no_element_longer_than_the_script(tmp_path: Path) -> None:
    outcome = trace_here(
        tmp_path,
        f"{NET}for step in range(4):\n{STEP}"
        "net.eval()\n"
        "with torch.no_grad():\n"
        "    for x in [torch.ones(1 << 20, 64) for _ in range(1)]:\n"
        "        x = x.cuda()\n"
        "    batches = iter(range(5))\n"
        "    for x in (torch.ones(1 << 14, 64).cuda() for _ in batches):\n"
        "        net(x)\n"
        "        del x\n"
        "        assert torch.cuda.memory_allocated() < (1 << 28) + (1 << 20)\n",
    )
    assert outcome.error is None, outcome.error.text


SAMPLER = """
import torch
from torch import nn

net = nn.Linear(64, 64).cuda()
optimizer = torch.optim.Adam(net.parameters())
for step in range(4):
    net(torch.randn(8, 64).cuda()).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
net.eval()
with torch.no_grad():
    sample, shown = torch.randn(256, 64, device="cuda"), []
    for step in {steps}:
        sample = sample - 0.1 * net(sample)
        if step % 10 == 0:
            {then}
torch.save(net.state_dict(), "net.pt")
"""


@pytest.mark.parametrize("steps", ["range(60)", "reversed(range(60))", "range(1, 61)"])
def test_a_loop_that_keeps_something_every_so_many_turns_is_traced_to_its_end(tmp_path, steps):
    text = SAMPLER.format(steps=steps, then="shown.append(sample)")
    peaks = [trace_here(tmp_path, text, whole_passes=whole).peak_bytes["validate"] for whole in (False, True)]
    assert peaks[0] == peaks[1]
    assert peaks[0] > 7 * 256 * 64 * 4


def test_a_loop_that_keeps_nothing_every_so_many_turns_is_left(tmp_path):
    outcome = trace_here(tmp_path, SAMPLER.format(steps="range(600)", then="print(step, sample.mean().item())"))
    assert any("whose turns repeat" in line for line in outcome.not_seen)
