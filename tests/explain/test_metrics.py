"""Metrics files: growth, long samples, units, and a failure in the middle.

pytest tests/explain/test_metrics.py
"""

import json
from pathlib import Path

import pytest

from memfit.errors import InputError
from memfit.explain.diagnosis import explain
from memfit.explain.evidence_reader import read_evidence
from memfit.explain.metrics import read_metrics
from tests.explain.samples import GIB, MIB, TORCH_2_14, TRACEBACK


def lines(memory: list[int], key: str = "process_bytes") -> str:
    return "".join(
        json.dumps({"window": index, "loss": 1.0, key: nbytes}) + "\n" for index, nbytes in enumerate(memory)
    )


def test_metrics_that_grow() -> None:
    evidence = read_metrics(lines([GIB + 10 * MIB * step for step in range(40)]))
    assert evidence is not None
    assert evidence.growth is not None
    assert evidence.growth.per_step == pytest.approx(10 * MIB)
    assert explain(evidence).cause == "leak"


def test_metrics_whose_host_memory_grows_alone() -> None:
    objects = [{"step": i, "reserved_bytes": 6 << 30, "host_bytes": (2 << 30) + i * (50 << 20)} for i in range(40)]
    evidence = read_metrics("\n".join(map(json.dumps, objects)))
    assert evidence is not None
    diagnosis = explain(evidence)
    assert diagnosis.verdict.startswith("The host's memory grew from 2.10 GiB (step 2)")
    assert [change.name for change in diagnosis.changes] == ["let go of what each step keeps on the host"]
    objects = [each | {"reserved_bytes": each["host_bytes"]} for each in objects]
    evidence = read_metrics("\n".join(map(json.dumps, objects)))
    assert evidence is not None
    assert explain(evidence).verdict.startswith("Memory grew")


def test_metrics_with_one_long_sample() -> None:
    evidence = read_metrics(lines([GIB] * 20 + [2 * GIB] + [GIB] * 20))
    assert evidence is not None
    assert evidence.growth is None
    assert explain(evidence).verdict.startswith("No leak: step 20 needed 2.00 GiB")


def test_metrics_in_other_units_and_without_memory() -> None:
    evidence = read_metrics(lines([1, 1, 1], key="memory/max_reserved_(GiB)") + "cut\n")
    assert evidence is not None
    assert evidence.readings == 3
    assert read_metrics(lines([1, 1], key="loss_2")) is None
    assert read_metrics("plain text\n{}\nmore\ntext") is None


@pytest.mark.parametrize("text", ["{}", lines([1, 1], key="loss_2")])
def test_metrics_without_memory_tell_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "metrics.jsonl").write_text(text)
    with pytest.raises(InputError, match="no memory failure and no reading of memory is in it"):
        read_evidence(str(tmp_path / "metrics.jsonl"))


def test_a_failure_among_metrics_is_not_lost(tmp_path: Path) -> None:
    text = lines([GIB + 10 * MIB * step for step in range(40)])
    (tmp_path / "log.jsonl").write_text(text + TRACEBACK + TORCH_2_14 + "\n")
    evidence = read_evidence(str(tmp_path / "log.jsonl"))
    assert [failure.requested for failure in evidence.failures] == [2 * GIB]
    assert evidence.readings == 40
    explanation = explain(evidence)
    assert explanation.cause == "leak"
    assert explanation.verdict.startswith(
        "The process ran out of memory in forward at /home/u/train.py:61: memory grew"
    )
