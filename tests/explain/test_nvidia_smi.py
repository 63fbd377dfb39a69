"""nvidia-smi: the tables of several drivers, MIG, -q and CSV.

pytest tests/explain/test_nvidia_smi.py
"""

from pathlib import Path

import pytest

from memfit.explain.diagnosis import explain
from memfit.explain.evidence_reader import read_evidence
from memfit.explain.nvidia_smi import read_nvidia_smi
from tests.explain.samples import MIB, NVIDIA_SMI, NVIDIA_SMI_418, NVIDIA_SMI_525, NVIDIA_SMI_MIG, NVIDIA_SMI_Q


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


@pytest.mark.parametrize(
    ("text", "cards", "processes"),
    [
        (NVIDIA_SMI_418, [(15500, 16130), (3000, 11019)], [(1234, 8000), (4321, 7400)]),
        (NVIDIA_SMI_525, [(79000, 81920)], [(1234, 40000), (1235, None), (1236, 38000)]),
        (NVIDIA_SMI_MIG, [(9856, 40192), (37, 40192)], [(1234, 9800)]),
        (NVIDIA_SMI_Q, [(79000, 81920), (10, 81920)], [(1234, 40000), (1235, 38000)]),
    ],
    ids=["driver 418", "driver 525", "MIG", "-q"],
)
def test_forms(
    text: str, cards: list[tuple[int, int]], processes: list[tuple[int, int | None]], tmp_path: Path
) -> None:
    (tmp_path / "smi.txt").write_text(text)
    evidence = read_evidence(str(tmp_path / "smi.txt"))
    assert evidence.kind == "nvidia-smi"
    assert [(device.used // MIB, device.total // MIB) for device in evidence.devices] == cards
    first = [(number, size and size // MIB) for number, _, size in evidence.devices[0].processes]
    assert first == processes


def test_an_instance_of_mig_is_named() -> None:
    evidence = read_nvidia_smi(NVIDIA_SMI_MIG)
    assert evidence is not None
    explanation = explain(evidence)
    assert "GPU 0 (NVIDIA A100-SXM4-80GB MIG instance 1) has 29.62 GiB of 39.25 GiB free" in explanation.verdict
    assert [name for name, _ in explanation.facts if name.startswith("GPU")] == [
        "GPU 0, MIG instance 1", "GPU 0, MIG instance 2",
    ]  # fmt: skip
