"""memfit run on meshes of eight ranks: verified during the run, killed, and resumed bit for bit.

python -m pytest tests/train/test_eight_rank_runs.py -m slow
"""

import functools
import inspect
from dataclasses import replace

import pytest

from memfit.verify.verify_plan import on_ranks
from tests.engine.context_jobs import DividedMixture, EvenDividedMixture
from tests.engine.eight_rank_cases import EIGHT_CASES, refused
from tests.engine.expert_jobs import EvenMixture, Mixture
from tests.train.test_mesh_runs import planned_and_run, verified_killed_and_resumed

pytestmark = pytest.mark.slow
WITH_ROUTERS = {EvenMixture: Mixture, EvenDividedMixture: DividedMixture}
"""Jobs with routers of their own for those whose routers go by the place in a micro-batch."""


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Of a job, a plan for one device and the weights of its run; each job once."""
    return functools.cache(lambda job: planned_and_run(job, tmp_path_factory.mktemp("alone")))


@pytest.mark.parametrize("case", EIGHT_CASES, ids=lambda case: str(case.mesh))
def test_a_run_of_eight_ranks_is_verified_killed_and_resumed_bit_for_bit(case, alone, tmp_path):
    if refused(case):
        pytest.skip(refused(case))
    kind = type(case.job())
    kind = WITH_ROUTERS.get(kind, kind)  # those routers go by the place in a micro-batch, as ranks share it
    plan, expected = alone(f"{inspect.getfile(kind)}:{kind.__name__}")
    divided = replace(on_ranks(plan, "fsdp2", 8, case.mesh), engine_choices=dict(case.choices))
    verified_killed_and_resumed(divided, expected, tmp_path)
