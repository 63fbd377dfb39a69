"""The first line of a plan's report, by where its predicted peak and interval lie.

python -m pytest tests/show/test_plan_verdict.py
"""

import pytest

from memfit.plan import MemoryOption, Plan
from memfit.show.report import plan_section, plan_verdict

MIB = 1 << 20


@pytest.mark.parametrize(
    ("peak", "high", "words", "tone"),
    [
        (900, 950, "Fits on rtx4090 with 124 MiB to spare", "good"),
        (900, 1024, "Fits on rtx4090", "good"),
        (900, 1025, "May not fit on rtx4090 with 124 MiB to spare", "close"),
        (1025, 1100, "Does not fit on rtx4090: 1.0 MiB too much", "bad"),
    ],
)
def test_the_verdict_follows_the_interval_as_well_as_the_peak(peak, high, words, tone):
    peaks = {"allocated_bytes": 1, "process_bytes": peak * MIB, "process_bytes_high": high * MIB}
    plan = Plan(
        job="job.py:Job", settings={}, device="rtx4090", budget_bytes=1024 * MIB, unit="samples", global_batch=8,
        micro_batch=8, micro_batches=[[8]], arithmetic="8 = 1 x 8", engine="single", precision="fp32", seed=0,
        reasons={}, options=[], phases={"train": peaks},
    )  # fmt: skip
    line, colour = plan_verdict(plan)
    assert line.startswith(words)
    assert colour == tone


def test_a_plan_without_predicted_memory_gives_no_verdict():
    plan = Plan(
        job="job.py:Job", settings={}, device="rtx4090", budget_bytes=MIB, unit="samples", global_batch=8,
        micro_batch=8, micro_batches=[[8]], arithmetic="8 = 1 x 8", engine="single", precision="fp32", seed=0,
        reasons={}, options=[], phases={},
    )  # fmt: skip
    assert plan_verdict(plan) == ("8 = 1 x 8 (samples); the plan has no predicted memory", "close")


def test_options_that_save_nothing_are_folded_and_unknown_ones_are_not():
    options = [
        MemoryOption(name=name, applied=applied, saves_bytes=saves, costs="", reason="", unknown=unknown)
        for name, applied, saves, unknown in (
            ("used", True, 0, ""), ("useful", False, MIB, ""), ("idle", False, 0, ""),
            ("unknown", False, 0, "bytes: not traced"),
        )
    ]  # fmt: skip
    plan = Plan(
        job="job.py:Job", settings={}, device="rtx4090", budget_bytes=MIB, unit="samples", global_batch=8,
        micro_batch=8, micro_batches=[[8]], arithmetic="8 = 1 x 8", engine="single", precision="fp32", seed=0,
        reasons={}, options=options, phases={},
    )  # fmt: skip
    section = plan_section(plan)
    assert [[row[0] for row in table.rows] for table in section.tables] == [["used", "useful", "unknown"]]
    assert [[row[0] for row in table.rows] for table in section.folded] == [["idle"]]
