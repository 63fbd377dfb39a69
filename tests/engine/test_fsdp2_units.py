"""Which modules FSDP2 gathers one by one.

python -m pytest tests/engine/test_fsdp2_units.py
"""

from torch import nn

from memfit.engine.fsdp2 import LEAST, units


def block(nbytes):
    """A module of two layers with so many bytes of float32 in all, without its memory."""
    rest = nn.Linear(1, nbytes // 4 - 1, bias=False, device="meta")
    return nn.Sequential(nn.Linear(1, 1, bias=False, device="meta"), rest)


def net(blocks, beside):
    return nn.ModuleDict(
        {"blocks": nn.ModuleList(map(block, blocks)), "rest": nn.Linear(1, beside // 4, bias=False, device="meta")}
    )


def test_a_block_of_a_hundredth_of_the_net_is_gathered_alone_and_a_smaller_one_with_the_net():
    assert units(net([4000], 396_000)) == ["blocks.0", ""]
    assert units(net([4000], 396_400)) == [""]


def test_a_block_of_least_bytes_is_gathered_alone_however_large_the_net_is():
    assert units(net([LEAST], 200 * LEAST)) == ["blocks.0", ""]
    assert units(net([LEAST - 4], 200 * LEAST)) == [""]
