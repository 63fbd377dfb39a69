"""Which layers a forward shows that can be cut, without ranks.

python -m pytest tests/engine/test_traced_plan.py
"""

from typing import ClassVar

import pytest
import torch
from torch import nn

from memfit.cli.prediction_output import predictions_json
from memfit.device.hardware.catalogue import find_device
from memfit.engine import traced_plan
from memfit.engine.split_rules import carried
from memfit.engine.tensor_split import MixedError, Operation, Split
from memfit.engine.traced_plan import traced_plans
from memfit.errors import InputError
from memfit.events import CutParameters
from memfit.job import Shape
from memfit.mesh import MeshShape
from memfit.planner.predict import predict
from memfit.show.footprint_table import footprint_remarks
from memfit.show.trace_file import read_trace, write_trace
from memfit.trace.step import Tracing, trace_job
from tests.engine.encoder_jobs import (
    T5,
    TOKENS,
    Attention,
    Clip,
    Decoder,
    Groups,
    ModernBert,
    MpNet,
    NormedHeads,
    OwnAttention,
    OwnProducts,
    Umt5,
    Vit,
    Whisper,
)

WHOLE_ATTENTION = {"3.0": "colwise", "3.2": "rowwise"}
"""Where the feed-forward alone is cut."""
ATTENTION = dict.fromkeys(("2.ask", "2.key", "2.give"), "colwise") | {"2.back": "rowwise"}


def plan(job, ranks=2):
    return traced_plans(job, job.nets(), ["net"], ranks)["net"]


def own(ranks=2, **how):
    class Job(OwnAttention):
        pass

    Job.how = how
    return plan(Job(), ranks)


def test_attention_of_any_names_is_cut_by_heads_and_its_feed_forward_by_width():
    traced = own()
    assert traced.layouts == ATTENTION | WHOLE_ATTENTION
    assert traced.counts == {"2": ("heads",)}


def test_an_embedding_that_has_a_column_for_each_head_is_cut_with_them():
    assert own(bias="embedded").layouts == {**ATTENTION, **WHOLE_ATTENTION, "2.near": "colwise"}


def test_norms_of_single_heads_go_with_them():
    assert own(norm="head").layouts == ATTENTION | WHOLE_ATTENTION


@pytest.mark.parametrize(
    "how", [{"norm": "all"}, {"bias": "learned"}, {"reads": True}, {"ranks": 8}, {"heads": 1}], ids=str
)
def test_attention_that_mixes_heads_or_has_too_few_stays_whole(how):
    assert own(**how).layouts == WHOLE_ATTENTION


def layers(traced):
    """Layouts by path, of a net's last layers alone, without numbers."""
    return {
        ".".join(part for part in path.split(".") if not part.isdigit()): layout
        for path, layout in traced.layouts.items()
    }


def test_layers_that_hold_several_tensors_are_cut_by_each_of_them():
    assert layers(plan(ModernBert())) == {
        "model.layers.attn.Wqkv": "colwise_fused_3", "model.layers.attn.Wo": "rowwise",
        "model.layers.mlp.Wi": "colwise_fused_2", "model.layers.mlp.Wo": "rowwise",
    }  # fmt: skip


def test_both_sides_of_an_encoder_with_a_decoder_are_cut_and_their_embeddings_of_relative_positions():
    kinds = layers(plan(T5()))
    for side in ("encoder", "decoder"):
        prefix = f"{side}.block.layer.SelfAttention"
        assert [kinds[f"{prefix}.{key}"] for key in "qkvo"] == ["colwise"] * 3 + ["rowwise"]
        assert kinds[f"{prefix}.relative_attention_bias"] == "colwise"
    assert kinds["decoder.block.layer.DenseReluDense.wo"] == "rowwise"
    assert not any("shared" in path or "lm_head" in path for path in kinds)


@pytest.mark.parametrize(("kind", "count"), [(MpNet, ("all_head_size",)), (Whisper, ("num_heads",)), (Vit, None)])
def test_modules_count_the_heads_of_a_rank_by_the_attribute_that_their_forward_reads(kind, count):
    assert set(plan(kind()).counts.values()) == ({count} if count else set())


def test_modules_of_one_class_count_whole_heads_where_they_are_not_cut():
    traced = plan(Umt5())
    assert {path.rpartition(".")[2] for path in traced.counts} == {"SelfAttention"}
    assert not any("EncDecAttention" in path for path in traced.layouts)


def test_two_towers_are_cut():
    kinds = layers(plan(Clip()))
    for tower in ("text_model", "vision_model"):
        assert kinds[f"{tower}.encoder.layers.self_attn.q_proj"] == "colwise"
        assert kinds[f"{tower}.encoder.layers.mlp.fc2"] == "rowwise"


def test_layers_whose_weight_lies_the_other_way_are_cut():
    assert layers(plan(Decoder())) == {
        "transformer.h.attn.c_attn": "colwise_fused_3", "transformer.h.attn.c_proj": "rowwise",
        "transformer.h.mlp.c_fc": "colwise", "transformer.h.mlp.c_proj": "rowwise",
    }  # fmt: skip


def test_linear_layers_with_a_forward_of_their_own_are_cut_and_groups_of_queries_with_their_keys():
    traced = plan(Groups())
    assert layers(traced) == {
        "transformer.h.self_attention.query_key_value": "colwise", "transformer.h.self_attention.dense": "rowwise",
        "transformer.h.mlp.dense_h_to_4h": "colwise", "transformer.h.mlp.dense_4h_to_h": "rowwise",
    }  # fmt: skip
    assert set(traced.counts.values()) == {("num_heads", "num_kv_heads")}


def test_modules_that_are_one_product_of_a_matrix_are_linear_layers():
    traced = plan(OwnProducts())
    assert traced.layouts == {"2.wide": "colwise_fused_2", "2.back": "rowwise", **WHOLE_ATTENTION}
    assert {path: layer.inputs for path, layer in traced.products.items()} == {"2.wide": 0, "2.back": 1}


@pytest.mark.parametrize("more", ["softmax", "twice"])
def test_modules_that_do_more_than_a_product_are_none(more):
    class Job(OwnProducts):
        how: ClassVar = {"more": more}

    assert plan(Job()).layouts == WHOLE_ATTENTION


class Convolutions(OwnAttention):
    def nets(self):
        return {"net": nn.Sequential(nn.Embedding(64, 16), nn.LayerNorm(16), nn.Linear(16, 16), nn.Softmax(-1))}


class Unknown(OwnAttention):
    """Its loss cannot run without values."""

    def loss(self, nets, batch):
        nets["net"](batch["input_ids"])
        return super().loss({"net": nn.Linear(3, 3)}, batch)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Convolutions, "net 'net' on tp=2: transformers has no tensor-parallel plan for Sequential, and no two linear"),
        (Unknown, "Unknown on tp=2: its loss does not run on tensors without bytes, on which its nets are"),
    ],
)
def test_a_net_of_which_nothing_can_be_cut_is_refused_by_name(kind, words):
    how = Tracing(device=find_device("cpu"), engine="fsdp2", world=2, mesh=MeshShape(tp=2))
    with pytest.raises(InputError) as said:
        trace_job(kind(), Shape(items=2), how)
    assert words in str(said.value)


@pytest.mark.parametrize(("mesh", "world"), [(MeshShape(tp=2), 2), (MeshShape(dp_shard=2, tp=2), 4)])
def test_a_prediction_says_how_many_parameters_are_cut_and_where_most_are_whole(tmp_path, mesh, world):
    class Normed(OwnAttention):
        how: ClassVar = {"norm": "all"}

    def predicted(kind):
        return predict(kind(), "job", Shape(items=2), find_device("rtx4090"), world=world,
                       engine="fsdp2", mesh=mesh)  # fmt: skip

    few, most = predicted(Normed), predicted(NormedHeads)
    nets = [sum(p.numel() for p in kind().nets()["net"].parameters()) for kind in (Normed, NormedHeads)]
    feed_forward, attention = 16 * 32 + 32 + 32 * 16, 3 * (16 * 16 + 16) + 16 * 16 + TOKENS * 4
    assert few.footprint.tensor_parallel == CutParameters(parameters=nets[0], cut=feed_forward)
    assert most.footprint.tensor_parallel == CutParameters(parameters=nets[1], cut=feed_forward + attention)
    line = "tp cuts 0.00106 M of 0.00325 M parameters; the others are whole on each of its ranks."
    assert line in footprint_remarks(few.footprint)
    assert not any(words.startswith("tp cuts") for words in footprint_remarks(most.footprint))
    assert predictions_json([few], None, None)["tensor_parallel"] == {"parameters": nets[0], "cut": feed_forward}
    write_trace(tmp_path / "t.npz", few)
    back = read_trace(tmp_path / "t.npz")
    assert back.footprint.tensor_parallel == back.trace.tensor_parallel == few.footprint.tensor_parallel


def test_without_tp_nothing_is_said_of_what_is_cut():
    footprint = predict(OwnAttention(), "job", Shape(items=2), find_device("rtx4090")).footprint
    assert footprint.tensor_parallel is None
    assert not any(words.startswith("tp cuts") for words in footprint_remarks(footprint))


def carry(name, given, output, *more, split, ranks=2):
    operation = Operation(
        name=name, args=(given, *more), kwargs={}, output=output, ranks=ranks, sums_gradients=False,
        split_of=lambda tensor: split if tensor is given else None,
    )  # fmt: skip
    result = carried(operation, pointwise=False)
    return result and (result.dim, result.outer, result.units)


def test_elements_by_indices_keep_the_split_of_other_dimensions():
    given, both = torch.empty(2, 6, 32), torch.zeros(3, 5, dtype=torch.long)
    assert carry("index", given, given[:, [1]], [None, torch.tensor([1])], split=COLUMNS) == (2, 1, 32)
    assert carry("index", given, given[:, both], [None, both], split=COLUMNS) == (3, 1, 32)
    assert carry("index", given, given[both, both], [both, both], split=COLUMNS) == (2, 1, 32)
    for indices in ([None, None, both], [torch.zeros(2, dtype=torch.bool)], [both[0], None, both[0]]):
        with pytest.raises(MixedError):
            carry("index", given, given, indices, split=COLUMNS)


def test_repeats_pairs_and_rows_keep_the_split_of_other_dimensions():
    given, rows = torch.empty(2, 6, 32), torch.zeros(3, dtype=torch.long)
    assert carry("repeat", given, given.repeat(4, 1, 3, 1), [4, 1, 3, 1], split=COLUMNS) == (3, 1, 32)
    assert carry("index_select", given, given[:, :3], 1, rows, split=COLUMNS) == (2, 1, 32)
    pairs = torch.empty(2, 6, 32, 2)
    assert carry("view_as_complex", pairs, torch.view_as_complex(pairs), split=COLUMNS) == (2, 1, 32)
    numbers = torch.view_as_complex(pairs)
    assert carry("view_as_real", numbers, torch.view_as_real(numbers), split=COLUMNS) == (2, 1, 32)
    mixed = (("repeat", [1, 1, 2]), ("index_select", 2, rows), ("view_as_complex",))
    for name, *more in mixed:
        with pytest.raises(MixedError):
            carry(name, given, given, *more, split=COLUMNS)


COLUMNS = Split(dim=2, outer=1, units=32, sources=frozenset(["layer"]))


def test_a_view_by_heads_shares_out_heads_and_one_of_several_tensors_their_parts():
    given = torch.empty(2, 6, 32)
    assert carry("view", given, given.view(2, 6, 4, 8), [2, 6, 4, 8], split=COLUMNS) == (2, 1, 4)
    assert carry("view", given, given.view(12, 32), [12, 32], split=COLUMNS) == (1, 1, 32)
    heads = Split(dim=1, outer=1, units=4, sources=frozenset(["layer"]))
    by_heads = torch.empty(2, 4, 6, 8)
    assert carry("view", by_heads, by_heads.view(8, 6, 8), [8, 6, 8], split=heads) == (0, 2, 4)
    three = torch.empty(2, 6, 24)
    with pytest.raises(MixedError, match="3 do not divide by 2") as mixed:
        carry("view", three, three.view(2, 6, 3, 8), [2, 6, 3, 8], split=COLUMNS_OF_THREE)
    assert mixed.value.parts == 3
    parts = Split(dim=2, outer=3, units=8, sources=frozenset(["layer"]))
    assert carry("view", three, three.view(2, 6, 3, 4, 2), [2, 6, 3, 4, 2], split=parts) == (3, 1, 4)


COLUMNS_OF_THREE = Split(dim=2, outer=1, units=24, sources=frozenset(["layer"]))


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("sum", ([-1],)),
        ("softmax", (-1, False)),
        ("select", (2, 0)),
        ("roll", ([1], [2])),
        ("conv1d", ()),
        ("mean", ()),
    ],
)
def test_what_mixes_columns_or_has_no_rule_is_not_carried(name, more):
    given = torch.empty(2, 6, 32)
    with pytest.raises(MixedError):
        carry(name, given, given[..., 0], *more, split=COLUMNS)


def test_own_attention_is_the_same_function_with_and_without_an_embedding_of_zeros():
    torch.manual_seed(0)
    plain, biased = Attention(), Attention(bias="embedded")
    biased.load_state_dict(plain.state_dict(), strict=False)
    nn.init.zeros_(biased.near.weight)
    x = torch.randn(2, 8, 16)
    torch.testing.assert_close(plain(x), biased(x))


def test_nets_that_a_search_builds_anew_are_followed_once(monkeypatch):
    asked = []
    monkeypatch.setattr(traced_plan, "in_copied_process", lambda ask: asked.append(ask) or ask())
    job = Vit()
    plans = [traced_plans(job, job.nets(), ["net"], 2)["net"] for _ in range(2)]
    assert len(asked) == 1
    assert plans[0] == plans[1]
    traced_plans(job, job.nets(), ["net"], 4)
    traced_plans(Vit(), Vit().nets(), ["net"], 2)
    assert len(asked) == 3
