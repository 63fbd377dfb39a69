"""Plans of meshes of eight ranks.

python -m pytest tests/planner/test_eight_ranks.py
"""

import pytest

from memfit.device.hardware.catalogue import find_device, with_memory
from memfit.planner.request import PlanRequest
from memfit.planner.search.search import find_plan
from tests.engine.eight_rank_cases import EIGHT_CASES, refused

CARD = with_memory(find_device("cpu"), 1 << 30)
SHARES = 4
"""Samples of a rank in a window."""


@pytest.mark.slow
@pytest.mark.parametrize("case", EIGHT_CASES, ids=lambda case: str(case.mesh))
def test_a_mesh_of_eight_ranks_is_planned(case):
    if why := refused(case):
        pytest.skip(why)
    request = PlanRequest(
        name="job", global_batch=SHARES * case.mesh.data_ranks, micro_batch=1, device=CARD,
        devices=case.mesh.data_ranks, mesh=case.mesh,
    )  # fmt: skip
    answer = find_plan(case.job(), request)
    plan = answer.plan
    assert (plan.engine, plan.mesh, plan.ranks) == ("fsdp2", case.mesh.sizes(), 8)
    assert [sum(share) for share in plan.micro_batches] == [SHARES] * case.mesh.data_ranks
    assert answer.chosen.footprint.fits
