"""Stages of a pipeline on real gloo processes: the steps of one rank, and its checkpoints.

python -m pytest tests/engine/test_pipeline_ranks.py
"""

import math
from functools import partial

import pytest
import torch

from memfit.engine.single import Single
from memfit.installation import release_number
from memfit.mesh import parse_mesh
from memfit.torch_compat.pipelining import OLDEST
from memfit.verify.perturbation import ROOM, ROOM_OF_PRODUCTS
from tests.engine.context_jobs import MIXTURES, STAGED
from tests.engine.mesh_launch import results_of_ranks
from tests.engine.pipeline_ranks import (
    ADAPTED,
    ALL,
    BOTH,
    COPIED,
    COPIED_CUT,
    CUT,
    DIVIDED,
    DIVIDED_BOTH,
    DIVIDED_SEQUENCES,
    DIVIDED_TOO,
    EVERY,
    HALF,
    HALF_GATHERED,
    HYBRID,
    MESHES,
    MIXTURE,
    NAMED,
    ON_TWO_RANKS,
    SENT,
    SEQUENCES,
    SHARED,
    SIZES,
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
TOKENS = sum(SIZES) * 5
"""What a window's loss is the mean of."""
BF16_UNIT = 2**-8
"""The largest relative error of a number that is rounded to bf16."""


SPLIT_MIXTURES = [case for case in STEPS if case.partition(", ")[0] in MIXTURES]
TWICE = [case for case in STEPS if case.startswith("mixture, ")]
"""A mixture of which each rank has two stages."""
WHOLE = [case for case in STEPS if case not in [*STAGED, *SPLIT_MIXTURES, *TWICE]]
"""Nets whose sequences are not divided."""
WITHOUT_ADAPTERS = [case for case in WHOLE if case != ADAPTED]
"""Adapters lie in layers alone, of which there are two, and are not cut."""
TO_BE_CUT = [case for case in WITHOUT_ADAPTERS if case != "head only"]
"""Without the net that ``tp`` does not cut."""
CUT_SEQUENCES = [case for case in STAGED if case != "divided table"]
"""Without the net that ``tp`` cuts across its modules."""
ON_THREE = [case for case in WITHOUT_ADAPTERS if case not in (NAMED, ON_TWO_RANKS)]


@pytest.mark.parametrize(
    ("mesh", "cases"),
    [("pp=2", ["llama", ADAPTED, "classified", "beit"]), pytest.param("pp=2", WHOLE, marks=pytest.mark.slow),
     pytest.param("pp=3", ON_THREE, marks=pytest.mark.slow),
     pytest.param(BOTH, WHOLE, marks=pytest.mark.slow), pytest.param(COPIED, WHOLE, marks=pytest.mark.slow),
     pytest.param(CUT, TO_BE_CUT, marks=pytest.mark.slow),
     pytest.param(HYBRID, ["llama", "recomputed"], marks=pytest.mark.slow),
     pytest.param(ALL, ["llama", "recomputed"], marks=pytest.mark.slow),
     pytest.param(COPIED_CUT, ["llama", "recomputed"], marks=pytest.mark.slow),
     pytest.param(DIVIDED, [MIXTURE, SHARED, *TWICE], marks=pytest.mark.slow),
     pytest.param(DIVIDED_BOTH, [MIXTURE], marks=pytest.mark.slow),
     *(pytest.param(f"pp=2,{other}", [MIXTURE], marks=pytest.mark.slow) for other in DIVIDED_TOO),
     *(pytest.param(other, [*STAGED], marks=pytest.mark.slow) for other in SEQUENCES[:-1]),
     pytest.param(SEQUENCES[-1], CUT_SEQUENCES, marks=pytest.mark.slow),
     *(pytest.param(other, SPLIT_MIXTURES, marks=pytest.mark.slow) for other in DIVIDED_SEQUENCES),
     *(pytest.param(other, [MIXTURE, SHARED, *TWICE], marks=pytest.mark.slow) for other in SENT),
     pytest.param(EVERY, ["llama"], marks=pytest.mark.slow)],
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
def test_stages_that_are_gathered_in_bf16_take_the_steps_of_one_rank_in_bf16(tmp_path):
    """The steps of one rank in fp32 show what rounding to bf16 does to a weight. Parameters that autocast leaves in
    fp32 are rounded too where they are gathered, which is one more draw of the same kind (``verify.perturbation``).
    """
    gave = ranks(tmp_path, BOTH, HALF)
    for case in HALF_GATHERED:
        alone, exact = train(case, Single(), "bf16"), train(case, Single())
        for rank in gave:
            for theirs, ours in zip(rank[HALF, case]["numbers"], alone["numbers"], strict=True):
                assert theirs == pytest.approx(ours, rel=BF16_UNIT)
            for theirs, ours in zip(rank[HALF, case]["numbers"][::2], alone["numbers"][::2], strict=True):
                assert theirs == pytest.approx(ours, rel=BF16_UNIT / TOKENS**0.5)
        apart = distances(gave[0][HALF, case]["weights"], alone["weights"])
        rounding = distances(exact["weights"], alone["weights"])
        for name, value in apart.items():
            assert value <= ROOM_OF_PRODUCTS * rounding[name], name
        assert 0 < math.hypot(*apart.values()) <= ROOM * math.hypot(*rounding.values())


def distances(result, expected):
    """Of tensors by name: the Euclidean norm of the difference."""
    assert result.keys() == expected.keys()
    return {name: float((result[name] - value).norm()) for name, value in expected.items()}


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
