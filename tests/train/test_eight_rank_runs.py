"""memfit run on meshes of eight ranks: verified during the run, killed, and resumed bit for bit.

python -m pytest tests/train/test_eight_rank_runs.py -m slow
"""

import functools
import inspect
from dataclasses import replace

import pytest
import torch

from memfit.plan import write_plan
from memfit.verify.verify_plan import on_ranks
from tests.engine.eight_rank_cases import EIGHT_CASES, refused
from tests.engine.expert_jobs import EvenMixture, Mixture
from tests.train.test_built_in_mesh_runs import WINDOWS, killed_after_a_window
from tests.train.test_mesh_runs import planned_and_run, ran, same
from tests.train.test_ranks import lines

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Of a job, a plan for one device and the weights of its run; each job once."""
    return functools.cache(lambda job: planned_and_run(job, tmp_path_factory.mktemp("alone")))


@pytest.mark.parametrize("case", EIGHT_CASES, ids=lambda case: str(case.mesh))
def test_a_run_of_eight_ranks_is_verified_killed_and_resumed_bit_for_bit(case, alone, tmp_path):
    if refused(case):
        pytest.skip(refused(case))
    kind = type(case.job())
    kind = Mixture if kind is EvenMixture else kind  # whose routers go by the place in a micro-batch, as ranks share it
    plan, expected = alone(f"{inspect.getfile(kind)}:{kind.__name__}")
    divided = replace(on_ranks(plan, "fsdp2", 8, case.mesh), engine_choices=dict(case.choices))
    complete, _ = ran(divided, tmp_path / "whole", "--windows", WINDOWS, "--verify-every", 2)
    same(complete, expected)
    proofs = lines(tmp_path / "whole" / "run", "verified")
    assert proofs
    assert all(proof["ok"] for proof in proofs)
    write_plan(divided, tmp_path / "plan.toml")
    killed_after_a_window(tmp_path / "plan.toml", tmp_path / "cut" / "run")
    cut, _ = ran(divided, tmp_path / "cut", "--windows", WINDOWS, "--resume")
    assert [name for name, weight in complete.items() if not torch.equal(cut[name], weight)] == []
