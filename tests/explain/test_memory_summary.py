"""torch.cuda.memory_summary(), alone and in a log.

pytest tests/explain/test_memory_summary.py
"""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from memfit.explain.diagnosis import explain
from memfit.explain.evidence_reader import read_evidence
from memfit.explain.memory_summary import read_memory_summary
from tests.explain.samples import MIB, TORCH_2_14, TRACEBACK


@pytest.fixture
def summary(monkeypatch: pytest.MonkeyPatch) -> str:
    """As the installed torch prints it for these statistics."""
    sizes = {"allocated_bytes": 4000, "reserved_bytes": 6000, "active_bytes": 4000, "inactive_split_bytes": 1500}
    sizes["requested_bytes"] = 3900

    class Stats(dict[str, int]):
        def __missing__(self, key: str) -> int:
            name, _, kind = key.partition(".")
            size = sizes.get(name, 0) * MIB
            return size * 2 if kind.endswith("peak") else size

        def get(self, key: str, default: Any = None) -> Any:
            return self[key]

    stats = Stats(num_ooms=1, num_alloc_retries=3)
    monkeypatch.setattr(torch.cuda.memory, "memory_stats", lambda device=None: stats)
    monkeypatch.setattr(torch.cuda.memory, "_get_device_index", lambda device, optional=False: 0)
    return torch.cuda.memory.memory_summary()


def test_a_memory_summary_as_torch_prints_it(summary: str) -> None:
    evidence = read_memory_summary(summary)
    assert evidence is not None
    state = evidence.state
    assert state is not None
    assert (state.allocated, state.reserved, state.peak_reserved) == (4000 * MIB, 6000 * MIB, 12000 * MIB)
    assert (state.ooms, state.retries, state.releasable) == (1, 3, 500 * MIB)


def test_a_summary_after_a_message_joins_it(summary: str, tmp_path: Path) -> None:
    (tmp_path / "log.txt").write_text(f"{TORCH_2_14}\n{summary}")
    evidence = read_evidence(str(tmp_path / "log.txt"))
    assert evidence.failures
    assert evidence.state is not None


def test_a_summary_after_a_failure_says_what_would_have_helped(summary: str) -> None:
    evidence = read_memory_summary(summary)
    assert evidence is not None
    explanation = explain(evidence)
    assert explanation.cause == "unknown_request"
    assert explanation.verdict == (
        "A request failed, and the summary does not say of how many bytes: 3.91 GiB is allocated now and 1.95 GiB is "
        "reserved and free; the peak was 7.81 GiB."
    )
    saved = {change.name: (change.helps, change.saves_bytes) for change in explanation.changes}
    assert saved == {
        "checkpoint activations": ("perhaps", 4000 * MIB * 2 // 3),
        "half the micro-batch, twice the accumulation": ("perhaps", 2000 * MIB),
        "expandable segments": ("perhaps", 1500 * MIB),
        "torch.cuda.empty_cache()": ("no", 0),
    }
    assert "Which line asked" in explanation.unknown[0]


def test_a_summary_without_a_failure(summary: str) -> None:
    """Retries alone say that there is little room."""
    evidence = read_memory_summary(summary.replace("CUDA OOMs: 1", "CUDA OOMs: 0"))
    assert evidence is not None
    assert explain(evidence).verdict.startswith(
        "No failure, and little room: the allocator gave its cache back 3 times"
    )
    evidence = read_memory_summary(re.sub(r"CUDA OOMs: 1 (.*)retries: 3", r"CUDA OOMs: 0 \1retries: 0", summary))
    assert evidence is not None
    explanation = explain(evidence)
    assert explanation.verdict.startswith("No failure is recorded")
    assert (explanation.changes, explanation.unknown) == ((), ())


def test_the_summary_of_the_card_that_failed_behind_a_loggers_prefix(summary: str, tmp_path: Path) -> None:
    """A log with summaries of several cards, each line with a time."""
    others = [summary.replace("ID 0", f"ID {card}").replace("4000 MiB", f"{card}000 MiB") for card in (2, 1)]
    text = "".join(f"10:00:01 INFO {line}\n" for line in "\n".join([summary, *others]).splitlines())
    (tmp_path / "log.txt").write_text(f"{TRACEBACK}{TORCH_2_14}\n{text}")
    state = read_evidence(str(tmp_path / "log.txt")).state
    assert state is not None
    assert (state.device, state.allocated) == (2, 2000 * MIB)
