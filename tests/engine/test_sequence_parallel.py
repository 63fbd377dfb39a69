"""Tokens that are divided between cut layers: what a trace holds, and what is refused.

python -m pytest tests/engine/test_sequence_parallel.py
"""

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from memfit.device.hardware.catalogue import find_device
from memfit.errors import InputError
from memfit.job import Shape
from memfit.mesh import parse_mesh
from memfit.trace.self_test import live_peaks
from memfit.trace.step import Tracing, trace_job
from tests.engine.expert_jobs import Mixture
from tests.engine.tensor_jobs import SIZES, Own, Words


class Long(Words):
    """Rows of 96 tokens, whose activations are most of what a rank holds."""

    tokens: int = 96

    def batch(self, shape):
        return super().batch(Shape(items=shape.items * self.tokens // 6)).view(shape.items, self.tokens)


class Uncut(Words):
    """Rows of 6 tokens, and heads that divide by four."""

    def nets(self):
        config = LlamaConfig(**SIZES, num_attention_heads=4, num_key_value_heads=4)
        return {"net": LlamaForCausalLM(config)}


def traced(job, text, **choices):
    mesh = parse_mesh(text)
    how = Tracing(
        device=find_device("cpu"), engine="fsdp2", world=mesh.world, mesh=mesh, scratch=False, engine_choices=choices
    )
    return trace_job(job, Shape(items=8), how)


def test_activations_between_cut_layers_are_those_of_one_ranks_tokens():
    whole, divided = (live_peaks(traced(Long(), "tp=2", **how))["train"] for how in ({}, {"sequence_parallel": True}))
    assert divided < 0.9 * whole


def test_what_is_summed_over_the_ranks_without_it_is_gathered_and_scattered():
    names = set(traced(Long(), "dp_shard=2,tp=2", sequence_parallel=True).names)
    assert {"reduce_scatter_tensor over tp", "all_gather_into_tensor over tp"} <= names


@pytest.mark.parametrize(
    ("job", "mesh", "why"),
    [
        (Words, "dp_replicate=2,dp_shard=2", "it is of layers that are cut"),
        (Own, "tp=2", "net 'net' on tp=2: tokens are divided by transformers' plan for a net, and Sequential is not"),
        (Mixture, "tp=2", "module net.model.layers.0.mlp on tp=2: "),
    ],
)
def test_what_cannot_be_divided_is_refused_by_name(job, mesh, why):
    with pytest.raises(InputError) as refused:
        traced(job(), mesh, sequence_parallel=True)
    assert why in str(refused.value)


def test_sequences_that_do_not_divide_are_refused():
    with pytest.raises(InputError, match="a sequence of 6 tokens on tp=4: it does not divide over the ranks"):
        traced(Uncut(), "tp=4", sequence_parallel=True)
