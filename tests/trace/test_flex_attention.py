"""FlexAttention in a job, which has imported and compiled it before any trace: traced as in a script."""

import sys

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from memfit.device.hardware.catalogue import find_device, with_memory
from memfit.device.virtual.card_rules import CardRules
from memfit.device.virtual.virtual_device import virtual_gpu
from memfit.job import Shape
from memfit.loading import load_job
from memfit.planner.predict import predict
from memfit.torch_compat.selective_checkpoint import FLEX_DEVICE_CHECK
from tests.script.script_trace import trace_alone

GPU, CPU = find_device("rtx4090"), with_memory(find_device("cpu"), 1 << 34)
STEP = """
import torch
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

flex = torch.compile(flex_attention)

@torch.compile(fullgraph=True)
def decorated(q, k, v):
    return flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + (i - j))

def causal(b, h, i, j):
    return i >= j

def attend(q, k, v, how):
    if how == "compiled in the step":
        return torch.compile(flex_attention)(q, k, v)
    if how == "decorated":
        return decorated(q, k, v)
    if how == "not compiled":
        return flex_attention(q, k, v)
    mod = (lambda s, b, h, i, j: s * 2 + (i - j)) if how == "score_mod" else None
    mask = create_block_mask(causal, None, None, 1024, 1024, device=q.device) if how == "block mask" else None
    return flex(q, k, v, score_mod=mod, block_mask=mask)

def loss_of(net, x, how):
    q, k, v = net(x).view(len(x), 1024, 3, 4, 64).permute(2, 0, 3, 1, 4)
    return attend(q, k, v, how).float().sum()
"""
JOB = """
import memfit

class Attends(memfit.Job):
    how: str = "compiled"

    def nets(self):
        return {"net": nn.Linear(256, 768)}

    def optimizers(self, nets):
        return {"net": torch.optim.SGD(nets["net"].parameters(), lr=0.1)}

    def batch(self, shape):
        return torch.randn(shape.items, 1024, 256)

    def loss(self, nets, x):
        return loss_of(nets["net"], x, self.how), len(x)
"""
SCRIPT = """
import gc

net = nn.Linear(256, 768).cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

def step():
    loss = loss_of(net, torch.randn(2, 1024, 256, device="cuda"), "{how}")
    (loss / 2).backward()  # as memfit does with a job's loss, which it keeps
    optimizer.step()
    optimizer.zero_grad()

for _ in range(3):
    step()
    gc.collect()
"""
"""A job's windows end with a collection of cycles. dynamo, which traces FlexAttention's score_mod by itself, keeps the
query, key and value of the first call in one, in a real run too: a script keeps them until Python collects it."""
HOW = ["compiled", "decorated", "not compiled", "block mask", "score_mod"]


def job_trace(folder, how, device=GPU):
    file = folder / "attends.py"
    file.write_text(STEP + JOB)
    job = load_job(f"{file}:Attends", {"how": how})
    return predict(job, "attends", Shape(items=2), device)


def train_bytes(prediction):
    return prediction.footprint.phases["train"].allocated_bytes


@pytest.mark.parametrize("how", HOW)
def test_a_job_with_flex_attention_takes_what_the_same_step_takes_as_a_script(tmp_path, how):
    outcome = trace_alone(tmp_path, STEP + SCRIPT.format(how=how))
    assert outcome.error is None, outcome.error.text
    assert train_bytes(job_trace(tmp_path, how)) == train_bytes(outcome)


def test_a_function_compiled_when_the_job_is_loaded_takes_what_one_compiled_in_the_step_takes(tmp_path):
    loaded, in_step = (job_trace(tmp_path, how) for how in ("compiled", "compiled in the step"))
    assert train_bytes(loaded) == train_bytes(in_step)
    assert any("not validated on a card" in line for line in loaded.trace.assumed)


def test_flex_attention_that_is_not_compiled_says_what_is_left_out(tmp_path):
    (line,) = job_trace(tmp_path, "not compiled").trace.assumed
    assert "traced as its compiled kernel" in line
    assert "it keeps all scores" in line


@pytest.mark.skipif(
    not hasattr(sys.modules[flex_attention.__module__], FLEX_DEVICE_CHECK), reason="this torch does not refuse it"
)  # fmt: skip
@pytest.mark.parametrize("how", ["compiled", "compiled in the step", "not compiled"])
def test_on_a_cpu_torch_itself_refuses_a_backward_of_flex_attention(tmp_path, how):
    with pytest.raises(NotImplementedError, match="does not support backward on CPU"):
        job_trace(tmp_path, how, CPU)


def test_a_trace_takes_arguments_by_position_and_leaves_torch_s_function_as_it_was():
    before = flex_attention.__code__, flex_attention.__defaults__, flex_attention.__kwdefaults__
    with virtual_gpu(CardRules()):
        query = torch.ones(1, 2, 128, 32, device="cuda")
        out, log_sums = flex_attention(query, query, query, None, None, None, False, True)
        assert (out.shape, log_sums.shape) == (query.shape, query.shape[:-1])
    assert (flex_attention.__code__, flex_attention.__defaults__, flex_attention.__kwdefaults__) == before
    query = torch.ones(1, 1, 4, 2)
    assert torch.equal(flex_attention(query, query, query), query)
