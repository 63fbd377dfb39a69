"""Sequences divided over real gloo ranks: the steps of one rank, and what cannot be divided is refused by name.

python -m pytest tests/engine/test_context_parallel.py
"""

from functools import partial

import pytest
import torch

from memfit.device.hardware.catalogue import find_device
from memfit.engine.capabilities import engine_of
from memfit.errors import InputError
from memfit.installation import release_number
from memfit.job import Shape
from memfit.mesh import MeshShape
from memfit.torch_compat.context_parallel import OLDEST
from memfit.trace.step import Tracing, trace_job
from tests.engine.context_jobs import Long
from tests.engine.mesh_launch import results_of_ranks
from tests.engine.mesh_ranks import UNDIVIDED
from tests.engine.rank_steps import CONTEXT_CASES, DIVIDED_MIXTURES
from tests.engine.test_fsdp2 import compare
from tests.engine.undivided_jobs import REFUSED

ranks = partial(results_of_ranks, "mesh_ranks")
pytestmark = pytest.mark.skipif(
    release_number(torch.__version__) < OLDEST, reason="memfit refuses cp before torch 2.13"
)  # fmt: skip
BOTH = "dp_shard=2,cp=2"
MIXTURE_MESHES = (
    "cp=2,ep=2", "cp=4,ep=2", "dp_shard=2,cp=2,ep=2", "dp_replicate=2,cp=2,ep=2", "cp=2,tp=2,ep=2",
    "dp_shard_in_ep=2,cp=2", "dp_shard=2,dp_shard_in_ep=2,cp=2", "dp_shard_in_ep=2,cp=2,tp=2",
)  # fmt: skip


def test_two_ranks_with_parts_of_each_sequence_take_the_steps_of_one(tmp_path):
    gave = ranks(tmp_path, "cp=2", *CONTEXT_CASES)
    for case in CONTEXT_CASES:
        compare(gave, case)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [BOTH, "dp_replicate=2,cp=2", "cp=4", "dp_replicate=2,dp_shard=2,cp=2"])
def test_divided_sequences_on_shards_and_replicas_take_the_steps_of_one_rank(tmp_path, mesh):
    gave = ranks(tmp_path, mesh, *CONTEXT_CASES)
    for case in CONTEXT_CASES:
        compare(gave, case)


def test_what_sees_parts_of_a_sequence_and_all_columns_takes_the_steps_of_one_rank_where_other_layers_are_cut(tmp_path):
    gave = ranks(tmp_path, "cp=2,tp=2", "divided llama, whole attention")
    compare(gave, "divided llama, whole attention")


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["cp=2,tp=2", "dp_shard=2,cp=2,tp=2"])
def test_divided_sequences_in_cut_layers_take_the_steps_of_one_rank(tmp_path, mesh):
    cases = [case for case in CONTEXT_CASES if "llama" in case]
    gave = ranks(tmp_path, mesh, *cases)
    for case in cases:
        compare(gave, case)


@pytest.mark.parametrize(
    ("mesh", "cases"),
    [
        *((mesh, ["divided mixture", "skewed mixture"]) for mesh in ("cp=2,ep=2", "dp_shard_in_ep=2,cp=2")),
        *(pytest.param(mesh, [*DIVIDED_MIXTURES], marks=pytest.mark.slow) for mesh in MIXTURE_MESHES),
    ],
)
def test_mixtures_whose_sequences_and_experts_are_divided_take_the_steps_of_one_rank(tmp_path, mesh, cases):
    gave = ranks(tmp_path, mesh, *cases)
    for case in cases:
        compare(gave, case)


@pytest.mark.slow
def test_sequences_that_cannot_be_divided_are_refused_by_name(tmp_path):
    for rank in ranks(tmp_path, "cp=2", UNDIVIDED):
        for kind, words in REFUSED.items():
            assert words in rank[UNDIVIDED][kind.__name__], kind.__name__


@pytest.mark.parametrize("others", [{"pp": 2}, {"ep": 2}, {"pp": 2, "ep": 2}, {"dp_shard_in_ep": 2}], ids=str)
def test_parts_of_sequences_are_carried_with_stages_and_with_divided_experts(others):
    assert engine_of(MeshShape(cp=2, **others)) == "fsdp2"


@pytest.mark.parametrize(("tokens", "precision"), [(64, "fp32"), (64, "bf16"), (128, "fp32")])
def test_on_a_card_parts_that_the_single_precision_kernel_pads_are_refused_with_what_to_write(tokens, precision):
    how = Tracing(device=find_device("h100"), engine="fsdp2", world=2, mesh=MeshShape(cp=2), scratch=False)
    job = Long(tokens=tokens, precision=precision)
    if (tokens, precision) != (64, "fp32"):
        assert trace_job(job, Shape(items=2), how).names
        return
    with pytest.raises(InputError, match=r"torch's ring fails on an attention .* multiples of 32 tokens"):
        trace_job(job, Shape(items=2), how)
