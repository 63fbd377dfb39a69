"""A lost rank is told by where an error was raised: a job's own error with the same words is the job's mistake.

python -m pytest tests/train/test_lost_ranks.py [-m slow]
"""

import subprocess
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from memfit.engine.lost_rank import describe_loss, is_lost_rank
from memfit.plan import read_plan, write_plan
from testing.attacker import JOBS, make_plan, run_plan

ROOT = Path(__file__).parents[2]
WORDS = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection reset by peer"


def caught(function, *arguments):
    try:
        function(*arguments)
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def say(kind, text):
    raise kind(text)


def say_in_backward(text):
    tensor = torch.ones(1, requires_grad=True)
    tensor.register_hook(lambda gradient: say(RuntimeError, text))
    tensor.sum().backward()


def test_a_lost_rank_is_described_without_sources_and_advice_of_gloo():
    advice = ". This is typically caused by a remote worker crashing. Check the logs of the remote worker."
    assert describe_loss(RuntimeError(WORDS + advice)) == "RuntimeError: Connection reset by peer"


@pytest.mark.parametrize(
    ("wait", "error"), [("wait_in_vain", "RuntimeError"), ("wait_in_vain_and_say_so", "ValueError")]
)
def test_a_collective_that_waits_in_vain_has_lost_a_rank(wait, error):
    command = [sys.executable, "-m", "tests.train.lonely_rank", wait]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert ended.stdout.split() == [error, "True"], ended.stderr


@pytest.mark.parametrize("kind", [RuntimeError, dist.DistBackendError, dist.DistNetworkError])
@pytest.mark.parametrize("text", ["Connection reset by peer", "Broken pipe", WORDS])
def test_the_words_alone_are_the_jobs_own(kind, text):
    assert not is_lost_rank(caught(say, kind, text))
    assert not is_lost_rank(caught(say_in_backward, text))
    assert not is_lost_rank(kind(text))


def test_a_file_with_such_a_name_and_a_store_of_the_jobs_own_are_no_lost_rank():
    assert not is_lost_rank(caught(lambda: torch.from_file("gloo/Broken pipe", size=3)))
    assert not is_lost_rank(
        caught(lambda: dist.TCPStore("127.0.0.1", 1, is_master=False, timeout=timedelta(seconds=0.1)))
    )


def run_that_raises(kind, place, folder):
    """(exit code, what was said)"""
    make_plan(kind, folder / "plan.toml")
    plan = read_plan(folder / "plan.toml")
    settings = {**plan.settings, "place": place, "text": WORDS}
    write_plan(replace(plan, job=f"{JOBS}:Raises", settings=settings), folder / "plan.toml")
    return run_plan(folder / "plan.toml", folder / "run", save_every=60)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "place"), [("ddp", "loss"), ("ddp", "collate"), ("fsdp2", "hook")])
def test_a_run_ends_with_the_line_of_the_job(tmp_path, kind, place):
    code, said = run_that_raises(kind, place, tmp_path)
    assert code == 2, said
    assert said.rstrip().endswith(f"in at(): RuntimeError: {WORDS}; mend the job at that line")
    assert "another rank is gone" not in said


@pytest.mark.slow
def test_a_validation_that_raises_on_one_of_sharded_ranks_ends_the_run_with_4_after_its_last_window(tmp_path):
    code, said = run_that_raises("fsdp2", "validate", tmp_path)
    assert code == 4, said
    assert f"rank 1: validation: RuntimeError: {WORDS}" in said
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 20
