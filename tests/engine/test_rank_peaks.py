"""The memory predicted for each rank against what real gloo processes allocate, phase by phase.

python -m pytest tests/engine/test_rank_peaks.py
"""

import pickle

import pytest
import torch

from memfit.device.hardware.catalogue import find_device
from memfit.installation import release_number
from memfit.planner.predict import BINDING_RANK, default_checkpointing, last_of_sequence, plain_nets
from memfit.planner.request import PlanRequest
from memfit.planner.search.search import find_plan
from memfit.torch_compat.pipelining import OLDEST
from memfit.trace.self_test import live_peaks
from memfit.trace.step import Tracing, trace_job
from testing.rank_copies import run_ranks
from testing.truth import operator_names
from tests.engine.eight_rank_cases import EIGHT_CASES, refused
from tests.engine.rank_peak_cases import (
    BOTH_CASES,
    BUILT_IN_BOTH,
    BUILT_IN_CUT,
    BUILT_IN_HYBRID,
    CASES,
    CONTEXT_CASES,
    COPIED_CUT_CASES,
    COPIED_STAGE_CASES,
    CUT_DIVIDED_CASES,
    CUT_EXPERT_CASES,
    CUT_STAGE_CASES,
    DECODER_CASES,
    DIVIDED_CONTEXT_CASES,
    DIVIDED_STAGE_CASES,
    ENCODER_CASES,
    EXPERT_CASES,
    MESH_CASES,
    PLANNED_STAGE_CASES,
    SENT_CASES,
    SENT_CONTEXT_CASES,
    SENT_STAGE_CASES,
    SEQUENCE_CASES,
    SEQUENCE_STAGE_CASES,
    SHARDED_CONTEXT_CASES,
    SHARDED_CUT_EXPERT_CASES,
    SHARDED_ENCODER_CASES,
    SHARDED_EXPERT_CASES,
    SHARDED_SENT_CASES,
    SHARDED_SEQUENCE_CASES,
    SHARDED_STAGE_CASES,
    STAGE_CASES,
    TENSOR_CASES,
    ZERO_BUBBLE_CASES,
    ZERO_CASES,
)
from tests.engine.rank_peaks import OPERATORS

FAST = (2, 5, 6, 13)
"""Their numbers: DDP and FSDP2, accumulation, bf16 and half-precision gathers, clipping, an average, two nets."""


def compare(cases, world, folder):
    """{(case, rank, phase): (traced bytes, measured bytes)}, without what lives inside one operator or collective."""
    traces = {}
    for case in cases:
        modes = default_checkpointing(case.job(), plain_nets(case.job()))
        for rank in range(world):
            how = Tracing(
                device=find_device("cpu"), micro_batches=case.micro_batches, checkpointing=modes, scratch=False,
                engine=case.engine, world=world, rank=rank, engine_choices=case.choices, mesh=case.mesh,
            )  # fmt: skip
            traces[str(case), rank] = trace_job(case.job(), case.shape, how)
    operators = set().union(*map(operator_names, traces.values()))
    (folder / OPERATORS).write_bytes(pickle.dumps(operators))
    run_ranks(world, "tests.engine.rank_peaks", [str(folder), *map(str, cases)], timeout=600)
    ranks = [pickle.loads((folder / f"{rank}.pickle").read_bytes()) for rank in range(world)]
    return {
        (case, rank, phase): (peak, ranks[rank][case][phase].without_scratch_bytes)
        for (case, rank), trace in traces.items()
        for phase, peak in live_peaks(trace).items()
    }


def check(result, within=0.01):
    for where, (traced, measured) in result.items():
        assert traced == pytest.approx(measured, rel=within, abs=64), where


@pytest.mark.slow
def test_every_rank_of_three(tmp_path):
    compared = compare([CASES[number] for number in FAST], 3, tmp_path)
    assert len(compared) == 3 * (2 * 4 + 2 * 3)
    check(compared)
    for (case, rank, phase), (peak, _) in compared.items():
        assert peak <= compared[case, BINDING_RANK, phase][0], (case, rank, phase)
    uneven = {
        rank: peak for (case, rank, phase), (peak, _) in compared.items() if "fsdp2 gan" in case and phase == "save"
    }
    assert uneven[0] > uneven[2], "the last rank's shards are smaller"


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])
def test_every_case(tmp_path, world):
    check(compare(CASES, world, tmp_path))


@pytest.mark.slow
def test_every_rank_of_a_mesh(tmp_path):
    compared = compare(MESH_CASES, 4, tmp_path)
    check(compared)
    for (case, rank, phase), (peak, _) in compared.items():
        assert peak <= compared[case, BINDING_RANK, phase][0], (case, rank, phase)


@pytest.mark.slow
@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(TENSOR_CASES, id="cut"),
        pytest.param(BOTH_CASES, id="cut and sharded"),
        pytest.param(COPIED_CUT_CASES, id="cut, with replicas"),
        pytest.param(ENCODER_CASES, id="cut as a forward shows"),
        pytest.param(SHARDED_ENCODER_CASES, id="cut as a forward shows, and sharded"),
        pytest.param(SEQUENCE_CASES, id="tokens divided"),
        pytest.param(SHARDED_SEQUENCE_CASES, id="tokens divided and sharded"),
    ],
)
def test_every_rank_of_nets_that_are_cut(cases, tmp_path):
    compared = compare(cases, cases[0].mesh.world, tmp_path)
    check(compared, within=0.03)
    for (case, rank, phase), (peak, _) in compared.items():
        assert peak <= compared[case, BINDING_RANK, phase][0], (case, rank, phase)


@pytest.mark.slow
@pytest.mark.parametrize(
    "cases",
    [
        EXPERT_CASES,
        SHARDED_EXPERT_CASES,
        SENT_CASES,
        SHARDED_SENT_CASES,
        CUT_EXPERT_CASES,
        SHARDED_CUT_EXPERT_CASES,
        CUT_DIVIDED_CASES,
    ],
    ids=[
        "divided",
        "divided and sharded",
        "tokens sent",
        "tokens sent and sharded",
        "cut",
        "cut and sharded",
        "cut and divided",
    ],
)
def test_every_rank_of_nets_whose_experts_are_divided_or_cut(cases, tmp_path):
    compared = compare(cases, cases[0].mesh.world, tmp_path)
    check(compared, within=0.03)
    for (case, rank, phase), (peak, _) in compared.items():
        assert peak <= compared[case, BINDING_RANK, phase][0], (case, rank, phase)


@pytest.mark.slow
@pytest.mark.skipif(release_number(torch.__version__) < OLDEST, reason="memfit refuses cp before torch 2.13")
@pytest.mark.parametrize(
    "cases",
    [CONTEXT_CASES, SHARDED_CONTEXT_CASES, DIVIDED_CONTEXT_CASES, SENT_CONTEXT_CASES],
    ids=["divided", "sharded or cut", "experts too", "tokens sent"],
)
def test_every_rank_of_nets_whose_sequences_are_divided(cases, tmp_path):
    compared = compare(cases, cases[0].mesh.world, tmp_path)
    check(compared, within=0.03)
    meshes = {str(case): case.mesh for case in cases}
    for (case, rank, phase), (peak, _) in compared.items():
        traced = (BINDING_RANK, last_of_sequence(meshes[case]))
        assert peak <= max(compared[case, first, phase][0] for first in traced), (case, rank, phase)


@pytest.mark.slow
@pytest.mark.parametrize(
    "cases", [BUILT_IN_CUT, BUILT_IN_HYBRID, BUILT_IN_BOTH], ids=["cut", "replicas", "cut and sharded"]
)
def test_every_rank_of_built_in_jobs_on_a_mesh(cases, tmp_path):
    check(compare(cases, cases[0].mesh.world, tmp_path), within=0.03)


@pytest.mark.slow
@pytest.mark.skipif(release_number(torch.__version__) < OLDEST, reason="memfit refuses pp before torch 2.13")
@pytest.mark.parametrize("stages", [2, 3])
def test_every_stage_of_a_pipeline(stages, tmp_path):
    compared = compare([case for case in STAGE_CASES if case.mesh.pp == stages], stages, tmp_path)
    check(compared, within=0.03)


@pytest.mark.slow
@pytest.mark.skipif(release_number(torch.__version__) < OLDEST, reason="memfit refuses pp before torch 2.13")
def test_every_stage_of_a_zero_bubble_schedule(tmp_path):
    check(compare(ZERO_BUBBLE_CASES, 2, tmp_path), within=0.03)


@pytest.mark.slow
@pytest.mark.skipif(release_number(torch.__version__) < OLDEST, reason="memfit refuses pp before torch 2.13")
def test_every_stage_of_the_schedules_and_cuts_that_plans_have(tmp_path):
    for case in PLANNED_STAGE_CASES:
        request = PlanRequest(
            name="llama", global_batch=case.shape.items * case.micro_batches, micro_batch=case.shape.items,
            device=find_device("h100"), mesh=case.mesh, engine_choices={"schedule": case.choices["schedule"]},
        )  # fmt: skip
        assert find_plan(case.job(), request).plan.engine_choices == case.choices
    check(compare(PLANNED_STAGE_CASES, 2, tmp_path), within=0.03)


@pytest.mark.slow
@pytest.mark.skipif(release_number(torch.__version__) < OLDEST, reason="memfit refuses pp before torch 2.13")
def test_every_stage_of_a_net_with_a_decoder_at_the_end_wherever_it_is_cut(tmp_path):
    compared = compare(DECODER_CASES, 2, tmp_path)
    check(compared, within=0.03)
    traced = {(case, rank): peak for (case, rank, phase), (peak, _) in compared.items() if phase == "train"}
    late, early = (str(case) for case in DECODER_CASES[1:])
    assert traced[late, 0] > traced[early, 0], "modules moved to the last stage"
    assert traced[late, 1] < traced[early, 1]


@pytest.mark.slow
@pytest.mark.skipif(release_number(torch.__version__) < OLDEST, reason="memfit refuses pp before torch 2.13")
@pytest.mark.parametrize(
    "cases",
    [
        SHARDED_STAGE_CASES,
        COPIED_STAGE_CASES,
        CUT_STAGE_CASES,
        DIVIDED_STAGE_CASES,
        SEQUENCE_STAGE_CASES,
        SENT_STAGE_CASES,
    ],
    ids=["sharded", "replicas", "cut", "divided", "sequences", "tokens sent"],
)
def test_every_rank_of_stages_that_are_sharded_or_cut_or_have_replicas(cases, tmp_path):
    compared = compare(cases, 4, tmp_path)
    check(compared, within=0.03)
    for (case, rank, phase), (peak, _) in compared.items():
        traced = {rank - rank % 2, rank - rank % 2 + last_of_sequence(cases[0].mesh)}
        assert peak <= max(compared[case, each, phase][0] for each in traced), (case, rank, phase)


@pytest.mark.slow
@pytest.mark.parametrize("half", [0, 1])
def test_every_rank_of_eight(half, tmp_path):
    carried = [case for case in EIGHT_CASES if not refused(case)]
    check(compare(carried[half::2], 8, tmp_path), within=0.03)


ZERO = [(case, world) for world in (2, 3) for case in ZERO_CASES]


@pytest.mark.parametrize(
    ("case", "world"), [ZERO[0], *(pytest.param(*item, marks=pytest.mark.slow) for item in ZERO[1:])], ids=str
)
def test_every_rank_under_zero(case, world, tmp_path):
    compared = compare([case], world, tmp_path)
    assert len(compared) == world * (3 + case.job().validates)
    check(compared, within=0.03)
