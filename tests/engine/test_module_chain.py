"""Which modules of a net run one after the other, without ranks.

python -m pytest tests/engine/test_module_chain.py
"""

import pytest

from memfit.engine.pipeline_cut import cut_into_stages, pipeline_modules
from memfit.engine.stage_bounds import may_be_stage
from tests.engine.encoder_jobs import Classified, Decoder, MpNet, Vit


def chain(kind):
    job = kind()
    modules = pipeline_modules(job, job.nets(), 2, "pp=2")
    return [path.removeprefix("net.") for path in modules.paths], modules.joined


def test_blocks_and_what_runs_before_and_after_them_are_a_chain():
    assert chain(Vit) == (
        ["vit.embeddings", "vit.layers.0", "vit.layers.1", "vit.layernorm", "classifier"],
        frozenset(),
    )
    paths, joined = chain(Classified)
    assert paths[-2:] == ["bert.pooler", "classifier"]
    assert not joined


def test_no_stage_begins_between_modules_of_which_a_later_one_needs_both():
    paths, joined = chain(Decoder)
    assert [paths[number] for number in joined] == ["transformer.wpe"], "positions, which are added to the words"
    paths, joined = chain(MpNet)
    assert [paths[number] for number in sorted(joined)][1:] == ["mpnet.encoder.layer.0", "mpnet.encoder.layer.1"]
    job = Decoder()
    assert 1 not in cut_into_stages(job, job.nets(), 4, "pp=4").bounds


@pytest.mark.parametrize(("joined", "allowed"), [((), True), ((1,), False), ((2,), False), ((0, 3), True)])
def test_a_stage_neither_begins_nor_ends_before_a_module_that_is_joined(joined, allowed):
    job = Vit()
    net = job.nets()["net"].vit
    assert may_be_stage([net.embeddings, *net.layers, net.layernorm], frozenset(joined))(1, 2) is allowed
