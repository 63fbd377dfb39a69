"""Meshes of several dimensions with real gloo processes: the same steps as one rank, and any mesh reads any checkpoint.

python -m pytest tests/engine/test_mesh_engines.py
"""

from functools import partial

import pytest
import torch

from memfit.engine.single import Single
from tests.engine import built_in_jobs
from tests.engine.expert_jobs import CUT
from tests.engine.mesh_launch import results_of_ranks
from tests.engine.mesh_ranks import (
    ALL,
    BOTH,
    COPIED,
    COPIED_BOTH,
    COPIED_EXPERTS,
    CUT_DIVIDED,
    CUT_DIVIDED_ALL,
    CUT_DIVIDED_BOTH,
    CUT_SENT,
    CUT_SENT_BOTH,
    DIVIDED,
    DIVIDED_ALL,
    DIVIDED_BOTH,
    DIVIDED_TOKENS,
    FIRST,
    HYBRID,
    KEPT,
    READERS,
    REFUSALS,
    SCALED,
    SENT,
    SENT_ALL,
    SENT_BOTH,
    SEQUENCES,
    STATES,
    STEPS,
    TENSOR,
    WHOLE_STATES,
    drawn,
    first_values,
    goes_on,
    kept,
    read,
    readers_of,
    saved,
    scaled_steps,
)  # fmt: skip
from tests.engine.rank_steps import BUILT_IN_CASES, ENCODER_CASES, EXPERT_CASES, TENSOR_CASES
from tests.engine.tensor_jobs import REFUSED
from tests.engine.test_fsdp2 import compare

SHARED = "activation that is learned twice"
STAGES = ("pp=2,dp_shard=2", "pp=2,tp=2", "pp=2,dp_replicate=2")
SENT_STAGES = "pp=2,dp_shard_in_ep=2"

ranks = partial(results_of_ranks, "mesh_ranks")


@pytest.mark.slow
def test_two_sharded_replicas_take_the_steps_of_one_rank(tmp_path):
    cases = STEPS.keys() - TENSOR_CASES.keys()
    gave = ranks(tmp_path, HYBRID, *cases)
    for case in cases:
        compare(gave, case)


def test_nets_that_are_sharded_and_cut_take_the_steps_of_one_rank(tmp_path):
    cases = ("llama", "llama, parts", "linear attention", "linear attention, parts", "learned activation", SHARED)
    gave = ranks(tmp_path, BOTH, *cases)
    for case in cases:
        compare(gave, case)


def test_replicas_of_cut_nets_take_the_steps_of_one_rank(tmp_path):
    cases = ("llama", "tied llama", "learned activation")
    gave = ranks(tmp_path, COPIED, *cases)
    for case in cases:
        compare(gave, case)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [TENSOR, BOTH, COPIED, ALL])
def test_cut_nets_take_the_steps_of_one_rank(tmp_path, mesh):
    gave = ranks(tmp_path, mesh, *TENSOR_CASES)
    for case in TENSOR_CASES:
        compare(gave, case)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [TENSOR, BOTH])
def test_built_in_jobs_and_nets_of_diffusers_that_are_cut_take_the_steps_of_one_rank(tmp_path, mesh):
    gave = ranks(tmp_path, mesh, *BUILT_IN_CASES)
    for case in BUILT_IN_CASES:
        compare(gave, case)


@pytest.mark.parametrize(
    ("mesh", "cases"),
    [
        (TENSOR, ["norms of own heads", "beit", "products"]),
        *(pytest.param(mesh, [*ENCODER_CASES], marks=pytest.mark.slow) for mesh in (TENSOR, BOTH, COPIED)),
    ],
)
def test_nets_that_are_cut_as_a_forward_shows_take_the_steps_of_one_rank(tmp_path, mesh, cases):
    gave = ranks(tmp_path, mesh, *cases)
    for case in cases:
        compare(gave, case)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [DIVIDED, DIVIDED_BOTH, COPIED_EXPERTS, DIVIDED_ALL, SENT, SENT_BOTH, SENT_ALL])
def test_nets_whose_experts_are_divided_take_the_steps_of_one_rank(tmp_path, mesh):
    gave = ranks(tmp_path, mesh, *EXPERT_CASES)
    for case in EXPERT_CASES:
        compare(gave, case)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh", [TENSOR, BOTH, COPIED, CUT_DIVIDED, CUT_DIVIDED_BOTH, CUT_DIVIDED_ALL, COPIED_BOTH, CUT_SENT, CUT_SENT_BOTH]
)
def test_nets_whose_experts_are_cut_take_the_steps_of_one_rank(tmp_path, mesh):
    gave = ranks(tmp_path, mesh, *CUT)
    for case in CUT:
        compare(gave, case)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [TENSOR, BOTH, COPIED])
def test_nets_whose_tokens_are_divided_take_the_steps_of_one_rank(tmp_path, mesh):
    gave = ranks(tmp_path, mesh, SEQUENCES)
    for case in DIVIDED_TOKENS:
        compare([{case: rank[SEQUENCES, case]} for rank in gave], case)


@pytest.mark.slow
def test_a_net_that_cannot_be_cut_is_refused_by_the_name_of_its_module(tmp_path):
    for rank in ranks(tmp_path, TENSOR, REFUSALS):
        for kind, words in (REFUSED | built_in_jobs.REFUSED).items():
            assert words in rank[REFUSALS][kind.__name__]


def same(result, expected):
    assert result.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(result[name], value, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_any_mesh_and_one_device_go_on_with_what_another_wrote(tmp_path):
    expected = saved(Single(), tmp_path / "single")
    for rank in ranks(tmp_path, HYBRID, STATES):
        for reader in READERS:
            same(rank["saved", reader], expected)
            for writer in ("single", *READERS):
                same(rank[writer, reader], expected)
    for writer in READERS:
        same(goes_on(Single(), tmp_path / writer), expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", KEPT)
def test_the_state_of_fused_projections_stacked_tensors_and_experts_goes_to_any_mesh_bit_for_bit(tmp_path, name):
    expected = {"single": kept(name, Single(), tmp_path / name / "single")}
    for rank in ranks(tmp_path, HYBRID, WHOLE_STATES, name):
        expected |= {writer: rank[name, writer] for writer in readers_of(name)}
        for writer in ("single", *readers_of(name)):
            assert len(expected[writer]) == len(expected["single"])
            for reader in readers_of(name):
                assert not differing(rank[name, writer, reader], expected[writer])
    for writer in readers_of(name):
        assert not differing(read(name, Single(), tmp_path / name / writer), expected[writer])


def test_scaled_adam_steps_parts_of_tensors_as_whole_ones(tmp_path):
    expected = scaled_steps()
    for rank in ranks(tmp_path, TENSOR, SCALED):
        torch.testing.assert_close(rank[SCALED], expected, rtol=1e-5, atol=1e-6)


def differing(result, expected):
    assert result.keys() == expected.keys()
    return [key for key, value in expected.items() if not torch.equal(result[key], value)]


@pytest.mark.parametrize(
    "mesh",
    [
        "pp=2",
        *(pytest.param(mesh, marks=pytest.mark.slow) for mesh in (BOTH, HYBRID, SENT, SENT_BOTH, *STAGES, SENT_STAGES)),
    ],
)
def test_nets_that_no_rank_builds_whole_begin_with_the_values_of_one_rank(tmp_path, mesh):
    gave = ranks(tmp_path, mesh, FIRST)
    for kind in drawn(mesh):
        expected = first_values(kind, Single())
        assert float(expected["net", "model.layers.0.self_attn.q_proj.weight"].std()) == pytest.approx(0.02, rel=0.1)
        for rank in gave:
            mine = rank[FIRST][kind.__name__]
            assert mine.keys() == expected.keys()
            assert [key for key, value in expected.items() if not torch.equal(mine[key], value)] == []
