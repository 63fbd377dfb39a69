"""Attention that is flash's on some cards and cuDNN's on others is in one trace for both, to the byte.

python -m pytest tests/trace/test_attention_kernels.py
"""

from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import memfit
from memfit.device.hardware.catalogue import find_device
from memfit.device.virtual import attention
from memfit.job import Shape
from memfit.planner import predict
from memfit.planner.asked_job import AskedJob
from memfit.planner.prediction import answer, holds_for, question_on

FLASH, CUDNN, TURING = find_device("rtx3090"), find_device("h100"), find_device("t4")
SHAPE = Shape(items=3)
KEEPS_STATE = "rng_state" in str(torch.ops.aten._scaled_dot_product_flash_attention.default._schema)
"""Whether flash keeps a generator's state; in torch 2.6 it keeps two numbers, and the card is asked."""
sharing = pytest.mark.skipif(not KEEPS_STATE, reason="with this torch, cards of the two kernels share no trace")


def attend(x, **options):
    x = x.unflatten(-1, (-1, 16)).transpose(1, 2)
    return F.scaled_dot_product_attention(x, x, x, **options).transpose(1, 2).flatten(2)


class Attention(nn.Module):
    def __init__(self, attend):
        super().__init__()
        self.into, self.out, self.attend = nn.Linear(32, 64), nn.Linear(64, 32), attend

    def forward(self, x):
        return x + self.out(self.attend(self.into(x)))


class Attends(memfit.Job):
    """Two layers of attention in bf16."""

    precision: str = "bf16"
    attend = staticmethod(attend)

    def nets(self):
        return {"net": nn.ModuleList(Attention(self.attend) for _ in range(2))}

    def batch(self, shape):
        return torch.randn(shape.items, 40, 32)

    def called(self, layer, x):
        return layer(x)

    def loss(self, nets, batch):
        with self.autocast(batch.device):
            for layer in nets["net"]:
                batch = self.called(layer, batch)
        return batch.float().square().mean(), len(batch)

    def optimizers(self, nets):
        return {"net": torch.optim.AdamW(nets["net"].parameters())}

    def validate(self, nets, batch):
        with torch.inference_mode():
            return {"loss": self.loss(nets, batch)[0]}


class Causal(Attends):
    attend = staticmethod(partial(attend, is_causal=True, scale=0.5))


class FewerKeys(Attends):
    """One head of keys and values for all queries, and a call whose output nothing keeps."""

    @staticmethod
    def attend(x):
        query = x.unflatten(-1, (-1, 16)).transpose(1, 2)
        F.scaled_dot_product_attention(query, query, query)
        few = query[:, :1]
        return F.scaled_dot_product_attention(query, few, few, enable_gqa=True).transpose(1, 2).flatten(2)


class OneQuery(Attends):
    """Few queries to many keys, which flash splits."""

    @staticmethod
    def attend(x):
        query = x.unflatten(-1, (-1, 16)).transpose(1, 2)
        many = query[:, :, :1].expand(-1, -1, 4096, -1)
        return F.scaled_dot_product_attention(query, many, many).transpose(1, 2).flatten(2)


class Small(Attends):
    """The output of a call has as many bytes as what is kept beside it: a query of one number of 8."""

    @staticmethod
    def attend(x):
        query = x[:1, :1, :8].reshape(1, 1, 1, 8)
        keys = x[:1, :2, :8].reshape(1, 1, 2, 8)
        return x + F.scaled_dot_product_attention(query, keys, keys).sum()


class Frozen(Attends):
    def nets(self):
        nets = super().nets()
        nets["net"][0].requires_grad_(False)
        return nets


class Recomputed(Attends):
    def called(self, layer, x):
        return checkpoint(layer, x, use_reentrant=False)


class RecomputedLast(Attends):
    """Attention is the last thing that is recomputed."""

    @staticmethod
    def attend(x):
        return checkpoint(attend, x, use_reentrant=False)


class RecomputedReentrant(Attends):
    def called(self, layer, x):
        return checkpoint(layer, x.requires_grad_(), use_reentrant=True)


class FlashAlone(Attends):
    @staticmethod
    def attend(x):
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return attend(x)


class CudnnAlone(Attends):
    @staticmethod
    def attend(x):
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return attend(x)


class Dropped(Attends):
    """With so many queries, cuDNN takes no dropout."""

    attend = staticmethod(partial(attend, dropout_p=0.125))


class DroppedOneQuery(Attends):
    @staticmethod
    def attend(x):
        x = x.unflatten(-1, (-1, 16)).transpose(1, 2)
        return F.scaled_dot_product_attention(x[:, :, :1], x, x, dropout_p=0.125).transpose(1, 2).flatten(2)


class Masked(Attends):
    @staticmethod
    def attend(x):
        return attend(x, attn_mask=torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril())


class Offloaded(Attends):
    def loss(self, nets, batch):
        with torch.autograd.graph.save_on_cpu():
            return super().loss(nets, batch)


class Packed(Attends):
    """Hooks of the job's own, which copy what is saved."""

    def loss(self, nets, batch):
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda tensor: tensor):
            return super().loss(nets, batch)


class Counted(Attends):
    def loss(self, nets, batch):
        with FlopCounterMode(display=False):
            return super().loss(nets, batch)


class Compiled(Attends):
    def nets(self):
        nets = super().nets()
        nets["net"] = nn.ModuleList(torch.compile(layer) for layer in nets["net"])
        return nets


class Transformed(Attends):
    """Gradients by torch.func."""

    @staticmethod
    def attend(x):
        return x + torch.func.grad(lambda y: attend(y).float().sum())(x.detach())


class FullPrecision(Attends):
    precision: str = "fp32"


SHARED = [Attends, Causal, FewerKeys, OneQuery, Small, Frozen, Recomputed, RecomputedLast, RecomputedReentrant]
SAME = [FlashAlone, Dropped, FullPrecision]
"""The same kernel on both."""
APART = [CudnnAlone, DroppedOneQuery, Masked, Offloaded, Packed, Counted, Compiled]
"""The card is asked: something else may see what a call keeps, or flash does not take it."""


def traced(job, device):
    return predict.trace_question(job, SHAPE, device)


def chosen(monkeypatch, job, device):
    """With the kernels that the card itself chooses."""
    with monkeypatch.context() as patched:
        patched.setattr(predict, "attention_shared", nullcontext)
        return question_on(traced(job, device), device)


def contents(question):
    """All that a trace says; storages by their bytes, as the kernels free numbers of 8 bytes in either order."""
    (trace,) = question.traces.values()
    known = trace.storage >= 0
    bytes_of_events = np.where(known, trace.nbytes[trace.storage], -1)
    names = [trace.names[i] for i in trace.operator_name]
    modules = [trace.modules[i] for i in trace.operator_module]
    parts = [trace.parts[i] for i in trace.operator_part]
    columns = (trace.kind, bytes_of_events, trace.operator, trace.nbytes, trace.category, trace.stream, trace.made_by)
    costs = (trace.operator_flops, trace.operator_bytes)
    lists = [column.tolist() for column in (*columns, *costs)]
    return [*lists, names, modules, parts, trace.phases, trace.assumed, trace.net_kind]


@pytest.mark.parametrize("job", [*SHARED, *SAME, *APART])
def test_a_trace_is_on_every_card_what_the_card_itself_chooses(monkeypatch, job):
    for first, second in ((FLASH, CUDNN), (CUDNN, FLASH)):
        question = traced(job(), first)
        assert contents(question_on(question, first)) == contents(chosen(monkeypatch, job(), first))
        assert holds_for(question, second) is (job in SAME or (job in SHARED and KEEPS_STATE))
        assert not holds_for(question, TURING) or job in SAME
        if holds_for(question, second):
            on_second, direct = question_on(question, second), chosen(monkeypatch, job(), second)
            assert contents(on_second) == contents(direct)
            assert contents(question_on(on_second, second)) == contents(on_second)
            footprints = [answer(each, "job", second).footprint for each in (question, on_second, direct)]
            assert footprints[0] == footprints[1] == footprints[2]


def test_a_call_within_a_transform_asks_the_card():
    """Its trace is not compared: what autograd's own thread frees there comes in no certain order."""
    assert not holds_for(traced(Transformed(), FLASH), CUDNN)


@sharing
@pytest.mark.parametrize("job", SHARED)
def test_shared_calls_are_cudnns_on_cards_that_prefer_it(job):
    question = traced(job(), FLASH)
    for device, kernel in ((FLASH, "flash"), (find_device("rtx4090"), "flash"), (CUDNN, "cudnn")):
        (trace,) = question_on(question, device).traces.values()
        used = {trace.names[i] for i in trace.operator_name if "_attention" in trace.names[i]}
        assert used == {f"aten._scaled_dot_product_{kernel}_attention{end}.default" for end in ("", "_backward")}


@sharing
def test_what_became_cudnns_is_no_other_cards():
    question = question_on(traced(Attends(), FLASH), CUDNN)
    assert holds_for(question, CUDNN)
    assert not holds_for(question, FLASH)


def test_where_torch_knows_no_shapes_of_a_kernel_which_a_patch_stands_for_the_card_is_asked(monkeypatch):
    def unknown(*given):
        raise NotImplementedError("no meta kernel")

    monkeypatch.setattr(attention, "_alike", {})
    monkeypatch.setattr(attention, "_compared", unknown)
    assert not holds_for(traced(Attends(), FLASH), CUDNN)


def test_torch_is_told_to_prefer_flash(monkeypatch):
    monkeypatch.setenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")
    for device in (FLASH, CUDNN):
        assert contents(question_on(traced(Attends(), device), device)) == contents(
            chosen(monkeypatch, Attends(), device)
        )


@sharing
@pytest.mark.parametrize("first", [FLASH, CUDNN], ids=lambda device: device.key)
def test_sizes_between_follow_on_both(first):
    asked = AskedJob("attends", Attends)
    for items in (2, 4, 8):
        asked.predict(Shape(items=items), first)
    traces = asked.traced
    for device in (FLASH, CUDNN):
        for items in (2, 6):
            footprint = asked.predict(Shape(items=items), device).footprint
            assert footprint == predict.predict(Attends(), "attends", Shape(items=items), device).footprint
    assert asked.traced == traces


def test_the_second_window_follows_on_a_card_of_the_other_kernel():
    first = traced(Recomputed(), FLASH)
    direct = predict.trace_question(Recomputed(), Shape(items=5), CUDNN)
    after = predict.trace_question(Recomputed(), Shape(items=5), CUDNN, like=first)
    assert contents(after) == contents(direct)
