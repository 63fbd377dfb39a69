"""torch.cuda.memory_summary(), nvidia-smi and metrics files.

pytest tests/explain/test_tables.py
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from memfit.explain.diagnosis import explain
from memfit.explain.evidence_reader import read_evidence
from memfit.explain.metrics import read_metrics
from memfit.explain.tables import read_memory_summary, read_nvidia_smi
from tests.explain.samples import GIB, MIB, NVIDIA_SMI, TORCH_2_14


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


def test_nvidia_smi() -> None:
    evidence = read_nvidia_smi(NVIDIA_SMI)
    assert evidence is not None
    assert [(device.index, device.used, device.total) for device in evidence.devices] == [
        (0, 22000 * MIB, 24564 * MIB), (1, 300 * MIB, 24564 * MIB),
    ]  # fmt: skip
    assert evidence.devices[0].processes == (
        (1234, "python", 12000 * MIB), (9999, "/opt/other/bin/python3", 9500 * MIB),
    )  # fmt: skip
    explanation = explain(evidence)
    assert explanation.cause == "other_processes"
    assert "process 1234 (python) holds most, 11.7 GiB" in explanation.verdict or "11.72 GiB" in explanation.verdict


def test_nvidia_smi_as_csv() -> None:
    text = "index, name, memory.used [MiB], memory.total [MiB]\n0, NVIDIA A100, 1000 MiB, 40960 MiB\n"
    evidence = read_nvidia_smi(text)
    assert evidence is not None
    assert (evidence.devices[0].name, evidence.devices[0].used) == ("NVIDIA A100", 1000 * MIB)


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
    assert read_metrics(lines([1, 1], key="loss_2")) is not None
    assert read_metrics("plain text\n{}\nmore\ntext") is None
