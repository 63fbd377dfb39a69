"""Which modules of a net are cut, without ranks.

python -m pytest tests/engine/test_attention_plan.py
"""

from itertools import chain
from types import SimpleNamespace

import pytest
import torch
from diffusers.models.attention import FeedForward
from diffusers.models.attention_processor import Attention
from torch import nn

from memfit.engine.attention_plan import check_attentions, derived_plan, share_heads, unknown_attention
from memfit.engine.fused_projection import FusedColwiseParallel, _exchange_plan
from memfit.engine.local_parameters import LocalParameters
from memfit.engine.traced_plan import traced_plans
from memfit.errors import InputError
from memfit.jobs.f5_tts import F5Tiny
from memfit.jobs.nets.unet3d import UNet3D
from tests.engine.built_in_jobs import CARRIED


def planned(net):
    return derived_plan(net, set(net.modules()))


class Flipped(nn.Sequential):
    def forward(self, x):
        return super().forward(x.flip(-1))


class Block(nn.Module):
    def __init__(self, **feed_forward):
        super().__init__()
        self.attn = Attention(16, heads=2, dim_head=8)
        self.ff = FeedForward(16, **feed_forward)


def test_attention_feed_forward_and_modulation_of_a_diffusion_transformer_are_cut():
    plan = planned(F5Tiny(depth=1).nets()["dit"])
    block = {path.removeprefix("transformer_blocks.0."): layout for path, layout in plan.items() if "blocks" in path}
    assert block == {
        "modulation.1": "colwise_gather_output",
        "attn.to_q": "colwise", "attn.to_k": "colwise", "attn.to_v": "colwise", "attn.to_out": "rowwise",
        "ff.0": "colwise", "ff.3": "rowwise",
    }  # fmt: skip
    assert {path: layout for path, layout in plan.items() if "blocks" not in path} == {
        "time_embed.time_mlp.0": "colwise", "time_embed.time_mlp.2": "rowwise",
        "out_modulation.1": "colwise_gather_output",
    }  # fmt: skip


def test_the_second_stream_of_joint_attention_is_cut_with_the_first():
    net = CARRIED["joint"]().nets()["image"]
    plan, prefix = planned(net), "transformer_blocks.0.attn."
    attention = {path.removeprefix(prefix): layout for path, layout in plan.items() if path.startswith(prefix)}
    assert attention == {
        **dict.fromkeys(("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj"), "colwise"),
        "to_out.0": "rowwise", "to_add_out": "rowwise",
    }  # fmt: skip
    check_attentions("image", net, set(net.modules()), 2)
    assert unknown_attention(net, set(net.modules())) is None
    share_heads(net, set(net.modules()), 2)
    first = net.transformer_blocks[0].attn
    assert (first.heads, first.inner_dim) == (2, 16)


def test_a_second_stream_of_another_width_is_not_cut_by_the_names_of_its_layers():
    attention = Attention(16, heads=2, dim_head=8, added_kv_proj_dim=4)
    attention.add_k_proj = nn.Linear(4, 8)
    why = "queries, keys and values have different sizes"
    assert unknown_attention(nn.Sequential(attention), set(attention.modules())) == ("0", why)


@pytest.mark.parametrize(
    ("case", "cut", "whole"),
    [
        ("normed video", {"ffn.net.0.proj": "colwise", "ffn.net.2": "rowwise"}, ["attn1.to_q", "attn1.to_out.0"]),
        (
            "grouped image",
            {
                "attn.to_q": "colwise",
                "attn.to_k": "colwise",
                "attn.to_out.0": "rowwise",
                "feed_forward.linear_2": "rowwise",
            },
            ["norm1.linear"],
        ),
    ],
)
def test_attention_that_the_names_of_its_layers_do_not_cut_is_cut_as_a_forward_shows(case, cut, whole):
    job = CARRIED[case]()
    nets = job.nets()
    (name,) = nets
    assert unknown_attention(nets[name], set(nets[name].modules())) is not None
    layouts = traced_plans(job, nets, [name], 2)[name].layouts
    ends = {".".join(path.split(".")[2:]): layout for path, layout in layouts.items()}
    assert cut.items() <= ends.items()
    assert not set(whole) & ends.keys()


def test_convolutions_and_norms_of_a_unet_stay_whole():
    net = UNet3D(channels=(32, 64), layers=1, heads=4, context_dim=32, groups=8, motion="all")
    plan = planned(net)
    assert {type(net.get_submodule(path)) for path in plan} == {nn.Linear}
    last = {path.rsplit(".transformer_blocks.0.")[-1] for path in plan}
    assert {"attn1.to_q", "attn2.to_out", "ff.net.0.proj", "ff.net.2", "attention_blocks.1.to_v"} <= last
    assert not any("proj_in" in path or "resnets" in path for path in plan)


@pytest.mark.parametrize(
    ("activation", "layout"),
    [
        ("geglu", "colwise_fused_2"),
        ("swiglu", "colwise_fused_2"),
        ("gelu", "colwise"),
        ("geglu-approximate", "colwise"),
        ("linear-silu", "colwise"),
    ],
)
def test_the_gate_of_a_feed_forward_goes_with_its_values(activation, layout):
    plan = planned(Block(activation_fn=activation))
    assert (plan["ff.net.0.proj"], plan["ff.net.2"], plan["attn.to_out.0"]) == (layout, "rowwise", "rowwise")


@pytest.mark.parametrize(
    "layers",
    [
        nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 4)),
        nn.Sequential(nn.Linear(4, 8), nn.Softmax(-1), nn.Linear(8, 4)),
        nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)),
        nn.Sequential(nn.Linear(4, 8), nn.GELU()),
        Flipped(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)),
    ],
)
def test_layers_that_mix_what_ranks_hold_stay_whole(layers):
    block = Block()
    before = planned(block)
    block.more = layers
    assert planned(block) == before


def test_a_net_without_attention_has_no_plan():
    assert planned(nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))) == {}


def test_attention_counts_the_heads_of_its_rank():
    net = CARRIED["f5"]().nets()["dit"]
    share_heads(net, set(net.modules()), 2)
    assert [block.attn.num_heads for block in net.transformer_blocks] == [1, 1]


@pytest.mark.parametrize("parts", [2, 3, 5])
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_every_rank_is_sent_its_piece_of_every_part(parts, ranks):
    """An all-to-all in one process: chunk c of all is the number c."""
    boxes = {}
    for rank in range(ranks):
        order, sent, _ = _exchange_plan(parts, ranks, rank, 1)
        chunks = iter([rank * parts + k for k in order])
        boxes |= {(rank, to): [next(chunks) for _ in range(count)] for to, count in enumerate(sent)}
    for rank in range(ranks):
        _, _, received = _exchange_plan(parts, ranks, rank, 1)
        arrived = [boxes[source, rank] for source in range(ranks)]
        assert [len(box) for box in arrived] == received
        assert list(chain(*arrived)) == [part * ranks + rank for part in range(parts)]


def test_a_module_has_its_parameters_back_after_an_error(monkeypatch):
    class Fails(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self, x):
            assert type(self.weight) is torch.Tensor
            raise ValueError("planted")

    monkeypatch.setattr("memfit.engine.local_parameters.DTensor", Sharded)
    net = Fails()
    net.weight = Sharded(torch.ones(2))
    LocalParameters().watch(net)
    for _ in range(2):
        with pytest.raises(ValueError, match="planted"):
            net(torch.ones(2))
        assert type(net.weight) is Sharded


class Sharded(nn.Parameter):
    """Stands for a DTensor."""

    def to_local(self):
        return self.data * 1


@pytest.mark.parametrize(
    ("module", "words"), [(nn.Embedding(4, 4), "not Embedding"), (nn.Linear(4, 9), "an output of 9 does not divide")]
)
def test_a_projection_that_cannot_be_cut_so_is_told_in_a_line(module, words):
    ranks_only = SimpleNamespace(size=lambda: 2)
    with pytest.raises(InputError, match=words):
        FusedColwiseParallel(parts=3)._apply(module, ranks_only)
