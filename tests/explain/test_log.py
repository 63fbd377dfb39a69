"""Logs: ranks' prefixes, tracebacks, steps, and memory that is printed with them.

pytest tests/explain/test_log.py
"""

import pytest

from memfit.explain.diagnosis import explain
from memfit.explain.log import read_log
from tests.explain.samples import KERNEL, MIB, TORCH_2_14, TRACEBACK


def prefixed(prefix: str, text: str) -> str:
    return "\n".join(prefix + line for line in text.splitlines()) + "\n"


@pytest.mark.parametrize("prefix", ["[rank3]:", "[rank3]: ", "[default3]:", "3: ", "(rank 3) ", "[3]:"])
def test_the_rank_and_line_of_a_traceback_among_other_ranks_lines(prefix: str) -> None:
    other = prefix.replace("3", "0")
    own = prefixed(prefix, TRACEBACK + TORCH_2_14).splitlines()
    mixed = "\n".join(f"{line}\n{other}Traceback (most recent call last):" for line in own)
    evidence = read_log(mixed)
    assert evidence is not None
    (failure,) = evidence.failures
    assert failure.rank == 3
    assert str(failure.own_frame) == "/home/u/train.py:61 in main"
    assert failure.frames[-1].function == "cross_entropy"
    explanation = explain(evidence)
    assert explanation.verdict.startswith("Rank 3 ran out of memory in forward at /home/u/train.py:61")
    assert any(change.name == "cross entropy in chunks" for change in explanation.changes)


def test_the_first_rank_is_named_first_and_endings_of_others_are_left_out() -> None:
    text = "".join(prefixed(f"[rank{rank}]: ", TRACEBACK + TORCH_2_14) for rank in (5, 2))
    evidence = read_log(text + "  exitcode  : -9 (pid: 1)\n")
    assert evidence is not None
    assert [failure.rank for failure in evidence.failures] == [5, 2]
    assert dict(explain(evidence).facts)["ranks that failed"] == "2, 5; rank 5 first"


def test_a_kernel_line_counts_beside_a_torch_message() -> None:
    evidence = read_log(TORCH_2_14 + "\n" + KERNEL)
    assert evidence is not None
    assert [failure.allocator for failure in evidence.failures] == ["cuda"]


def grown(per_step: int) -> str:
    lines = [
        f"[{step}/100] step {step} | loss 2.1 | memory: {1000 + per_step * step} MiB | lr 1e-4" for step in range(30)
    ]
    return "\n".join(lines) + "\n" + TRACEBACK + TORCH_2_14


def test_memory_that_grows_with_the_steps_is_a_leak() -> None:
    evidence = read_log(grown(10))
    assert evidence is not None
    assert evidence.growth is not None
    assert evidence.growth.per_step == pytest.approx(10 * MIB, rel=0.05)
    assert evidence.failures[0].step == 29
    assert explain(evidence).cause == "leak"


def test_memory_that_stays_is_none() -> None:
    evidence = read_log(grown(0))
    assert evidence is not None
    assert evidence.growth is None
    explanation = explain(evidence)
    assert explanation.cause == "fragmentation"
    assert dict(explanation.facts)["over the steps"] == "no growth over 30 readings"


def test_one_long_sample() -> None:
    text = grown(0).replace("step 20 | loss 2.1 | memory: 1000", "step 20 | loss 2.1 | memory: 9000")
    evidence = read_log(text.replace("6.50 GiB is reserved", "0.10 GiB is reserved"))
    assert evidence is not None
    assert explain(evidence).cause == "long_sample"
    assert "step 20 needed 8.79 GiB" in explain(evidence).verdict


@pytest.mark.parametrize(
    ("frames", "part"),
    [
        ('  File "t.py", line 5, in main\n    loss.backward()\n', "backward"),
        ('  File "t.py", line 5, in validate\n    out = model(x)\n', "validation"),
        ('  File "t.py", line 5, in main\n    optimizer.step()\n', "optimizer step"),
        ('  File "t.py", line 5, in main\n    model.cuda()\n', "loading"),
    ],
)
def test_the_part_of_training(frames: str, part: str) -> None:
    evidence = read_log("Traceback (most recent call last):\n" + frames + TORCH_2_14)
    assert evidence is not None
    assert f" in {part} at t.py:5" in explain(evidence).verdict
