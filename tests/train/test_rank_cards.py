"""Ranks on unequal cards are refused in one line, before the first window. No card is here: names are simulated.

python -m pytest tests/train/test_rank_cards.py
"""

import os
import subprocess
import sys

import pytest
import torch

from memfit.device.hardware.catalogue import find_device
from memfit.errors import Exit, InputError
from memfit.plan import Plan, write_plan
from memfit.train.launch.rank_cards import RankCard, card_of, check_rank_cards
from memfit.train.run_options import RunOptions
from tests.train.test_ranks import ROOT

LARGE, SMALL = find_device("rtx4090"), find_device("t4")


def plan(device="rtx4090", needs=10 << 30, **given):
    return Plan(
        job=f"{ROOT}/tests/verify/proven.py:Proven", settings={}, device=device, budget_bytes=2 << 30, unit="samples",
        global_batch=14, micro_batch=7, micro_batches=[[7], [7]], arithmetic="", engine="ddp", precision="fp32", seed=0,
        phases={"train": {"allocated_bytes": needs, "process_bytes": needs}}, **given,
    )  # fmt: skip


def card(device):
    return RankCard(name=device.name, total_bytes=device.memory_bytes)


def refusal(asked, cards):
    with pytest.raises(InputError) as raised:
        check_rank_cards(asked, cards)
    return str(raised.value)


def test_unequal_cards_are_named_with_their_ranks_and_what_to_write():
    said = refusal(plan(), [card(LARGE), card(SMALL), card(LARGE)])
    assert f"ranks 0, 2 on {LARGE.name}" in said
    assert f"rank 1 on {SMALL.name}" in said
    assert "the cards are unequal" in said
    assert f"plan again for the smallest of them, {SMALL.name}, or choose equal cards with CUDA_VISIBLE_DEVICES" in said


@pytest.mark.parametrize("device", ["t4", SMALL.name.lower().replace(" ", "-")])
def test_a_plan_for_the_smallest_card_runs_on_it_and_on_larger_ones(device):
    check_rank_cards(plan(device), [card(LARGE), card(SMALL)])


def test_unequal_cards_that_do_not_hold_what_was_planned_are_named():
    needs = SMALL.memory_bytes + 1
    assert f"{SMALL.name} has" in refusal(plan(needs=needs), [card(LARGE), card(SMALL)])
    assert f"{SMALL.name} has" in refusal(plan("t4", needs=needs), [card(LARGE), card(SMALL)])


@pytest.mark.parametrize("cards", [[card(LARGE)] * 2, [card(SMALL)] * 2, [None, None]])
def test_equal_cards_and_processors_are_not_refused_and_recover_where_memory_is_short(cards):
    check_rank_cards(plan(), cards)
    check_rank_cards(plan(needs=SMALL.memory_bytes + 1), cards)
    assert card_of(torch.device("cpu")) is None


@pytest.mark.slow
@pytest.mark.parametrize(("names", "code"), [(("Card A", "Card B"), Exit.BAD_INPUT), (("Card A", "Card A"), Exit.DONE)])
def test_ranks_with_simulated_cards_end_before_the_first_window_where_they_are_unequal(names, code, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    write_plan(plan("cpu", needs=1 << 20), run / "plan.toml")
    options = RunOptions(folder=str(run), windows=1).to_json()
    started = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "0"]
    done = subprocess.run(
        [*started, "-m", "tests.train.simulated_card_rank", options, *names],
        capture_output=True, text=True, timeout=200, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "MEMFIT_COLLECTIVE_SECONDS": "30"},
    )  # fmt: skip
    assert (done.returncode == 0) == (code == Exit.DONE), done.stderr
    assert (run / "metrics.jsonl").exists() == (code == Exit.DONE)
    if code != Exit.DONE:
        assert "rank 0 on Card A (24.00 GiB), rank 1 on Card B (24.00 GiB)" in done.stderr
        assert "memfit: plan for cpu, " in done.stderr
