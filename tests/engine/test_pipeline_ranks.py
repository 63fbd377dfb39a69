"""Stages of a pipeline on real gloo processes: the steps of one rank, and its checkpoints.

python -m pytest tests/engine/test_pipeline_ranks.py
"""

from functools import partial

import pytest
import torch

from memfit.engine.single import Single
from memfit.mesh import parse_mesh
from memfit.torch_compat.pipelining import OLDEST
from memfit.torch_compat.versions import release_number
from tests.engine.mesh_launch import results_of_ranks
from tests.engine.pipeline_ranks import (
    ALL,
    BOTH,
    COPIED,
    CUT,
    HYBRID,
    MESHES,
    NAMED,
    ON_TWO_RANKS,
    STATES,
    STEPS,
    goes_on,
    saved,
    train,
)  # fmt: skip

pytestmark = pytest.mark.skipif(
    release_number(torch.__version__) < OLDEST, reason="memfit refuses pp before torch 2.13"
)


ranks = partial(results_of_ranks, "pipeline_ranks")


@pytest.mark.parametrize(
    ("mesh", "cases"),
    [("pp=2", ["llama"]), pytest.param("pp=2", [*STEPS], marks=pytest.mark.slow),
     pytest.param("pp=3", [case for case in STEPS if case not in (NAMED, ON_TWO_RANKS)], marks=pytest.mark.slow),
     pytest.param(BOTH, [*STEPS], marks=pytest.mark.slow), pytest.param(COPIED, [*STEPS], marks=pytest.mark.slow),
     pytest.param(CUT, [*STEPS], marks=pytest.mark.slow),
     pytest.param(HYBRID, ["llama", "recomputed"], marks=pytest.mark.slow),
     pytest.param(ALL, ["llama", "recomputed"], marks=pytest.mark.slow)],
)  # fmt: skip
def test_stages_take_the_steps_of_one_rank(tmp_path, mesh, cases):
    gave = ranks(tmp_path, mesh, *cases)
    for case in cases:
        alone = train(case, Single())
        for mine in gave:
            for theirs, ours in zip(mine[case]["numbers"], alone["numbers"], strict=True):
                assert theirs == pytest.approx(ours, rel=1e-5)
        same(gave[0][case]["weights"], alone["weights"])


def same(result, expected):
    assert result.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(result[name], value, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["pp=2", CUT])
def test_stages_and_any_other_mesh_and_one_device_go_on_with_what_another_wrote(tmp_path, mesh):
    expected, meshes = saved(Single(), tmp_path / "single"), MESHES[parse_mesh(mesh).world]
    for rank in ranks(tmp_path, mesh, STATES):
        for reader in meshes:
            same(rank["saved", reader], expected)
            for writer in ("single", *meshes):
                same(rank[writer, reader], expected)
    for writer in meshes:
        same(goes_on(Single(), tmp_path / writer), expected)
