"""pytest tests/audit/test_faults.py: every fault is found by its code, and its cure passes."""

import re
from pathlib import Path

import pytest

from memfit.audit import CURES, Meant, audit
from tests.audit import faults
from tests.audit.collect import targets

TARGETS = targets(faults)
GLOBAL_64, FRAMES_3200 = Meant(global_batch=64), Meant(global_batch=3200, unit="frames")
CASES = [
    ("sovits_s1", "double-sharding", (1, 2, 3), None, (2, 3)),
    ("wrapped_by_accelerate", "double-sharding", (2, 3), None, (2, 3)),
    ("f5_epoch", "same-order", (1, 2, 3), None, (2, 3)),
    ("f5_too_long", "silent-drops", (1,), None, (1,)),
    ("sovits_s2_repeats", "over-sampling", (1, 2, 3), None, (1, 2, 3)),
    ("sovits_s2_drops", "silent-drops", (1, 2), None, (1, 2)),
    ("unsharded", "no-sharding", (1, 2, 3, 8), None, (2, 3, 8)),
    ("rank_zero_everywhere", "same-shard", (1, 2, 3, 8), None, (2, 3, 8)),
    ("weighted_alike", "no-sharding", (1, 2, 3, 8), None, (2, 3, 8)),
    ("weighted_shares_alike", "same-shard", (1, 2, 3, 8), None, (2, 3, 8)),
    ("none_left_out", "silent-drops", (1, 2), None, (1, 2)),
    ("handed_on", "replaced-samples", (1, 2), None, (1, 2)),
    ("shuffled_apart", "ranks-disagree", (1, 2, 3, 8), None, (2, 3, 8)),
    ("workers_repeat", "over-sampling", (1, 2, 3), None, (1, 2, 3)),
    ("uneven", "unequal-counts", (1, 2, 3), None, (2, 3)),
    ("same_order", "same-order", (1, 2), None, (1, 2)),
    ("shard_without_epoch", "same-order", (1, 2), None, (1, 2)),
    ("same_stream", "same-order", (1, 2), None, (1, 2)),
    ("s1_steps", "uneven-windows", (1, 2), None, (1, 2)),
    ("s1_short_epoch", "step-never-comes", (1, 2), None, (1, 2)),
    ("musetalk_steps", "step-counts-micro-batches", (1, 2), GLOBAL_64, (1, 2)),
    ("global_for_each", "global-given-as-per-gpu", (1, 2, 4, 8), GLOBAL_64, (2, 4, 8)),
    ("divided_twice", "per-gpu-given-as-global", (1, 2, 4), GLOBAL_64, (2, 4)),
    ("frames_as_samples", "frames-taken-for-samples", (1,), FRAMES_3200, (1,)),
    ("replacing", "replaced-samples", (1, 2), None, (1, 2)),
    ("videos", "replaced-samples", (1, 2), None, (1, 2)),
    ("replacing_loop", "replaced-samples", (1, 2), None, (1, 2)),
    ("with_replacement", "replaced-samples", (1, 2, 8), None, (1, 2, 8)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "code", "worlds", "meant", "found_in"), CASES, ids=[case[0] for case in CASES])
def test_the_fault_is_found_and_the_cure_passes(name, code, worlds, meant, found_in) -> None:
    audited = audit(TARGETS[name], worlds, meant=meant)
    assert {finding.code for finding in audited.findings} == {code}, audited.findings
    assert tuple(finding.world for finding in audited.findings) == found_in
    assert all(CURES[code] in finding.text for finding in audited.findings)
    cured = audit(TARGETS[f"{name}_cured"], worlds, meant=meant)
    assert cured.ok, cured.findings


def test_every_target_is_tried() -> None:
    names = {case[0] for case in CASES}
    assert set(TARGETS) == names | {f"{name}_cured" for name in names}


def test_every_code_is_tried_and_documented() -> None:
    assert {case[1] for case in CASES} == set(CURES)
    page = (Path(__file__).parents[2] / "docs" / "audit.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `([a-z-]+)` \|", page, re.MULTILINE)) == set(CURES)
