"""Loops that train are cut short once enough steps were seen, so that what comes after them is seen too."""

from pathlib import Path

import pytest

from memfit.script import stop_rule
from memfit.script.outcome import NO_SAVE, NO_VALIDATION, ScriptOutcome
from tests.script.script_trace import trace_here

NET = (
    "import torch\n"
    "net = torch.nn.Linear(64, 64).cuda()\n"
    "optimizer = torch.optim.AdamW(net.parameters())\n"
    "def step():\n"
    "    net(torch.ones(8, 64).cuda()).sum().backward(); optimizer.step(); optimizer.zero_grad()\n"
    "def validate():\n"
    "    with torch.no_grad():\n"
    "        net(torch.ones(512, 64).cuda())\n"
    "def save():\n"
    "    torch.save(net.state_dict(), 'net.pt')\n"
)
END = "validate(); save()\n"
LOADER = "loader = torch.utils.data.DataLoader(torch.ones(64, 64), 8)\n"


def trace(tmp_path: Path, text: str, **request: object) -> ScriptOutcome:
    outcome = trace_here(tmp_path, NET + text, **request)
    assert outcome.error is None, outcome.error.text
    return outcome


@pytest.mark.parametrize(
    "loop",
    [
        "for number in range(10**6):\n    step()\n",
        "number = 0\nwhile number < 10**6:\n    step(); number += 1\n",
        "number = 0\nwhile True:\n    step(); number += 1\n    if number > 10**6:\n        break\n",
        "for epoch in range(100):\n    for turn in range(100):\n        step()\n",
        f"{LOADER}for epoch in range(1000):\n    for batch in loader:\n        step()\n",
        "def batches():\n    while True:\n        yield 1\nfor batch in batches():\n    step()\n",
        "def fit():\n    while True:\n        step()\n        yield 1\nfor loss in fit():\n    print(loss)\n",
        "losses = [step() for number in range(10**6)]\n",
        "losses = {number: step() for epoch in range(100) for number in range(10**4)}\n",
        "for loss in (step() for number in range(10**6)):\n    print(loss)\n",
        f"{LOADER}for epoch in range(1000):\n    list(map(lambda batch: step(), loader))\n",
        f"{LOADER}for epoch in range(1000):\n    print(sum((step() or 0) for batch in loader) / len(loader))\n",
        "def batches():\n    while True:\n        yield 1\n"
        "endless = batches()\nfor number in range(10**6):\n    next(endless); step()\n",
    ],
)
def test_what_comes_after_the_last_step_is_seen(tmp_path: Path, loop: str) -> None:
    outcome = trace(tmp_path, loop + END)
    assert outcome.ended.startswith("the script ended, its loops cut short after ")
    assert outcome.peak_bytes.keys() == {"train", "validate", "save"}
    assert not {NO_SAVE, NO_VALIDATION} & set(outcome.not_seen)
    assert outcome.windows < 30


def test_the_last_turn_of_a_range_is_seen(tmp_path: Path) -> None:
    outcome = trace(
        tmp_path,
        "seen = []\n"
        "for number in range(1000):\n"
        "    seen.append(number); step()\n"
        "    if number == 999:\n        validate(); save()\n"
        "assert seen == [*range(len(seen) - 1), 999]\n",
    )
    assert outcome.peak_bytes.keys() == {"train", "validate", "save"}


def test_validation_every_few_steps_is_no_part_of_training_where_the_last_turn_leads_to_it_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stop_rule, "SHORT_TRACE", 0)
    outcome = trace(
        tmp_path,
        "for number in range(1, 100):\n    step()\n    if number % 3 == 0:\n        validate()\nsave()\n",
    )
    assert outcome.peak_bytes.keys() == {"train", "validate", "save"}
    assert NO_VALIDATION not in outcome.not_seen


def test_what_an_outer_turn_does_before_its_first_step_is_seen_with_the_optimizers_state(tmp_path: Path) -> None:
    outcome = trace(
        tmp_path,
        "for game in range(1000):\n"
        "    net.eval()\n"
        "    validate()\n"
        "    net.train()\n"
        "    for number in range(16):\n        step()\n"
        "save()\n",
    )
    footprint = outcome.footprint
    assert footprint is not None
    assert footprint.phases["validate"].categories["optimizer"] > 0
    assert "save" in outcome.peak_bytes


def test_loops_that_do_not_train_make_all_their_turns(tmp_path: Path) -> None:
    outcome = trace(
        tmp_path,
        "for number in range(1000):\n    step()\n"
        "turns = 0\n"
        "for turn in range(50):\n    turns += 1\n"
        "while turns < 80:\n    turns += 1\n"
        "assert turns == 80\n"
        "second = torch.optim.SGD(net.parameters(), 0.1)\n"
        "for chosen in (second, optimizer):\n    chosen.step(); turns += 1\n"
        f"assert turns == 82\n{END}",
    )
    assert "save" in outcome.peak_bytes


def test_a_script_that_misses_a_later_step_after_its_loops_were_cut_short_is_answered(tmp_path: Path) -> None:
    outcome = trace(
        tmp_path,
        "best = None\n"
        "for number in range(10**6):\n"
        "    step()\n"
        "    if 1000 < number < 2000:\n        best = number\n"
        "print(best + 1)\n",
    )
    assert any(line.startswith("the rest of the script, past the training") for line in outcome.not_seen)
    assert any("TypeError" in line for line in outcome.not_seen)
    assert outcome.windows >= 3


def test_what_was_seen_already_is_not_waited_for(tmp_path: Path) -> None:
    outcome = trace(
        tmp_path,
        f"{LOADER}for epoch in range(1000):\n    for batch in loader:\n        step()\n    validate(); save()\n"
        "raise SystemExit('not reached')\n",
    )
    assert outcome.ended.endswith("steps of every optimizer")
    assert "cut short" not in outcome.ended


def test_steps_that_a_person_asks_for_are_as_many(tmp_path: Path) -> None:
    outcome = trace(tmp_path, f"for number in range(10**6):\n    step()\n{END}", steps=4)
    assert outcome.windows == 4
    assert NO_SAVE in outcome.not_seen


@pytest.mark.parametrize("loop", ["for number in range(1000):\n", "if True:\n"])
def test_a_later_stage_of_training_is_seen(tmp_path: Path, loop: str) -> None:
    outcome = trace(
        tmp_path,
        "for number in range(1000):\n    step()\n"
        "optimizer = torch.optim.LBFGS(net.parameters(), max_iter=2)\n"
        "def closure():\n"
        "    optimizer.zero_grad()\n"
        "    loss = net(torch.ones(4096, 64).cuda()).sum(); loss.backward()\n"
        "    return loss\n"
        f"{loop}    optimizer.step(closure)\n",
    )
    assert outcome.windows > 12
    assert [steps for _, steps in outcome.steps][1] > 0
    assert outcome.peak_bytes["train"] > 4096 * 64 * 4


def test_validation_in_some_steps_of_an_earlier_stage_is_no_part_of_training(tmp_path: Path) -> None:
    outcome = trace(
        tmp_path,
        "for number in range(8):\n    step()\n    if number in (1, 4, 6):\n        validate()\n"
        "optimizer = torch.optim.SGD(net.parameters(), 0.1)\n"
        "for number in range(3):\n    step()\nsave()\n",
    )
    assert outcome.peak_bytes.keys() == {"train", "validate", "save"}


def test_each_fold_has_its_optimizer_and_a_verdict(tmp_path: Path) -> None:
    outcome = trace(
        tmp_path,
        f"{LOADER}folds = []\n"
        "for fold in iter(range(5)):\n"
        "    optimizer = torch.optim.AdamW(net.parameters())\n"
        "    for epoch in iter(range(20)):\n"
        "        for batch in loader:\n            step()\n"
        "    folds.append(fold)\n"
        f"assert len(folds) == 2\n{END}",
    )
    assert outcome.windows >= 2
    assert outcome.peak_bytes.keys() == {"train", "validate", "save"}


def test_a_loop_in_a_coroutine_ends(tmp_path: Path) -> None:
    outcome = trace(
        tmp_path,
        "import asyncio\n"
        "async def main():\n"
        "    for number in iter(range(10**6)):\n        step(); await asyncio.sleep(0)\n"
        "    validate(); save()\n"
        "asyncio.run(main())\n",
    )
    assert outcome.peak_bytes.keys() == {"train", "validate", "save"}


def test_what_comes_after_the_loops_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop_rule, "SHORT_TRACE", 400)
    outcome = trace(
        tmp_path,
        "for number in range(1000):\n    step()\n"
        "validate()\nnumber = torch.ones(4).cuda()\n"
        "while True:\n    number = number + 1\n",
    )
    assert outcome.ended == f"{outcome.windows} complete steps"
    assert "validate" in outcome.peak_bytes
    assert NO_SAVE in outcome.not_seen


@pytest.mark.parametrize("loop", ["for number in range(10**6):\n    step()\n", "step(); step(); step()\n"])
def test_a_script_that_ends_its_process_at_once_is_answered(tmp_path: Path, loop: str) -> None:
    outcome = trace(tmp_path, f"{loop}{END}import os\nos._exit(0)\n")
    assert outcome.ended.startswith("the script ended")
    assert outcome.peak_bytes.keys() == {"train", "validate", "save"}
