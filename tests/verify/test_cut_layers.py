"""memfit verify of layers that are cut: rounding is within the bound, and every planted fault far beyond it.

python -m pytest tests/verify/test_cut_layers.py -m slow
"""

import pytest

from tests.verify.test_verify import ROOT, verify

FAULTS = {
    "NoAllReduceInForward": (("loss", "gradients"), 10_000),
    "NoAllReduceInBackward": (("gradients",), 10_000),
    "ScaledGradient": (("gradients",), 100),
    "LostSample": (("loss", "gradients"), 10_000),
}
"""By fault, what differs, and by how many times its bound at least; one scales gradients by 1.001."""

pytestmark = pytest.mark.slow


def of_bounds(name):
    code, answer = verify(f"{ROOT}/tests/verify/cut_jobs.py:{name}", "--mesh", "tp=2", "--windows", "2")
    return code, answer["worlds"][1]["of_bounds"]


def test_layers_that_are_cut_differ_by_rounding():
    code, used = of_bounds("Cut")
    assert code == 0
    assert 0 < used["gradients"] <= 1
    assert 0 < used["parameters"] <= 1


@pytest.mark.parametrize("name", FAULTS)
def test_a_wrong_plan_is_caught_far_beyond_the_bound(name):
    code, used = of_bounds(name)
    assert code == 4
    parts, times = FAULTS[name]
    for part in parts:
        assert used[part] > times
