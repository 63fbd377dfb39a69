"""FlexAttention in a script: what its kernel keeps, with selective checkpointing and without."""

from pathlib import Path

import pytest

from tests.script.script_trace import trace_here

LAYERS, HEADS, LENGTH, WIDTH = 4, 2, 4096, 64
SCRIPT = """
import functools, torch
from torch.nn.attention.flex_attention import AuxRequest, flex_attention
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

KEPT = {{torch.ops.higher_order.flex_attention}} if {keep} else set()

def policy(context, operator, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if operator in KEPT else CheckpointPolicy.PREFER_RECOMPUTE

def attend(layer, x):
    q, k, v = (part.view(1, {length}, {heads}, {width}).transpose(1, 2) for part in layer(x).chunk(3, -1))
    out, aux = flex_attention(q, k, v, return_aux=AuxRequest(lse=True))
    assert aux.lse.shape == q.shape[:-1] and aux.max_scores is None
    return x + out.transpose(1, 2).flatten(2)

layers = torch.nn.ModuleList(torch.nn.Linear({size}, 3 * {size}) for _ in range({layers})).cuda()
optimizer = torch.optim.SGD(layers.parameters(), 0.1)
contexts = functools.partial(create_selective_checkpoint_contexts, policy)
for _ in range(3):
    x = torch.ones(1, {length}, {size}, device="cuda", requires_grad=True)
    for layer in layers:
        x = checkpoint(attend, layer, x, use_reentrant=False, context_fn=contexts)
    x.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.slow
def test_a_policy_that_keeps_flex_attention_keeps_its_output_and_log_sums(tmp_path: Path) -> None:
    peaks = []
    for keep in (True, False):
        text = SCRIPT.format(keep=keep, length=LENGTH, heads=HEADS, width=WIDTH, size=HEADS * WIDTH, layers=LAYERS)
        outcome = trace_here(tmp_path, text)
        assert outcome.error is None, outcome.error.text
        peaks.append(outcome.peak_bytes["train"])
    one_layer = 4 * HEADS * LENGTH * (WIDTH + 1)
    assert peaks[0] - peaks[1] == pytest.approx((LAYERS - 1) * one_layer, rel=0.05), "the last one is alive in both"
