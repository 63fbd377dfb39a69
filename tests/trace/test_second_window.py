"""A second window that follows from another trace of the same step is the one that a trace gives."""

from dataclasses import fields, replace

import numpy as np
import pytest
import torch

import memfit
from memfit.device.hardware.catalogue import find_device
from memfit.events import Trace
from memfit.job import Shape
from memfit.loading import built_in_jobs, load_job
from memfit.planner.job_reading import facts_of
from memfit.planner.predict import trace_question
from memfit.trace.second_window import second_window_follows, with_second_window
from memfit.trace.step import Tracing, run_two_windows, trace_job, virtual_job

CARD = find_device("rtx4090")
OTHERS = ("h100", "t4", "rtx5090")


class Norms(memfit.Job):
    """Two layers, a norm and dropout, with state of an optimizer."""

    zero_grad: str = "after_step"
    width: int = 16

    def nets(self):
        norm = torch.nn.LayerNorm(self.width)
        return {"net": torch.nn.Sequential(torch.nn.Linear(8, self.width), norm, torch.nn.Linear(self.width, 4))}

    def optimizers(self, nets):
        return {"net": torch.optim.AdamW(nets["net"].parameters(), foreach=False)}

    def batch(self, shape):
        return torch.zeros(shape.items, 8)

    def loss(self, nets, batch):
        return nets["net"](batch).square().sum(), len(batch)

    def validate(self, nets, batch):
        return {"mean": nets["net"](batch).mean()}


class Attends(Norms):
    """Attention in half precision, for which cards have other kernels."""

    precision: str = "bf16"

    def loss(self, nets, batch):
        with self.autocast(batch.device):
            x = nets["net"](batch).reshape(1, 1, -1, 4).expand(1, 8, -1, 8 // 2).repeat(1, 1, 1, 2)
            x = torch.nn.functional.scaled_dot_product_attention(x, x, x)
        return x.float().sum(), len(batch)


class _StateAnew(torch.optim.SGD):
    """Makes its state anew in each step, parameter by parameter, and reads the state before from the second on."""

    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            state, mean = self.state[parameter], parameter.grad * 0.1
            if "mean" in state:
                mean = state["mean"].float() * 0.9 + mean
            state["mean"], state["largest"] = mean.bfloat16(), mean.abs().amax()
            parameter.sub_(mean / (state["largest"] + 1e-8))


class StateAnew(Norms):
    """Whose second step frees, tensor by tensor, the state that the first one made."""

    def optimizers(self, nets):
        return {"net": _StateAnew(nets["net"].parameters())}


class Remembers(Norms):
    """Keeps a tensor as large as the batch from its second step on."""

    def loss(self, nets, batch):
        net = nets["net"]
        if getattr(net, "seen", None) is not None:
            net.kept = torch.zeros(len(batch), 1024, device=batch.device)
        net.seen = True
        return super().loss(nets, batch)


class Concatenates(Norms):
    """Steps on the batch before, too, as Transformer-XL attends to it."""

    def loss(self, nets, batch):
        before = getattr(nets["net"], "before", batch[:0])
        nets["net"].before = batch.detach()
        return super().loss(nets, torch.cat([before, batch]))


class Caches(Norms):
    """Keeps a table for as many samples as it has seen at once, from 4 on."""

    def loss(self, nets, batch):
        table = getattr(nets["net"], "table", batch[:0])
        if len(batch) > max(len(table), 3):
            nets["net"].table = table = torch.ones_like(batch)
        scaled = batch * table[: len(batch)] if len(table) >= len(batch) else batch
        return super().loss(nets, scaled)


class TrainsLater(Norms):
    """Trains its last bias from the second step on: one operator more makes a gradient, and reads the batch."""

    def loss(self, nets, batch):
        net = nets["net"]
        net[2].bias.requires_grad_(getattr(net, "seen", False))
        net.seen = True
        return super().loss(nets, batch)


def differing(trace: Trace, other: Trace) -> list[str]:
    """The names of what differs."""

    def same(value, other_value) -> bool:
        if isinstance(value, np.ndarray):
            return value.dtype == other_value.dtype and np.array_equal(value, other_value)
        return value == other_value

    names = [field.name for field in fields(Trace)]
    return [name for name in names if not same(getattr(trace, name), getattr(other, name))]


def windows_run(job, shape, how) -> int:
    """How many windows a trace runs."""
    with virtual_job(job, how) as (_, tracer, train_state):
        run_two_windows(train_state, tracer, shape, how)
        return sum(name == "train" for name, _, _ in tracer.phases)


def check(job, like, shape, how) -> None:
    assert windows_run(job, shape, replace(how, like=like)) == 1
    assert differing(trace_job(job, shape, replace(how, like=like)), trace_job(job, shape, how)) == []


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize(
    "job",
    [Norms(), Norms(zero_grad="after_forward"), Attends(), StateAnew()],
    ids=["adam", "kept", "attends", "state anew"],
)
def test_it_follows_for_other_sizes_and_cards(job, micro_batches):
    how = Tracing(device=CARD, micro_batches=micro_batches)
    like = trace_job(job, Shape(items=1), how)
    for items in (2, 7):
        check(job, like, Shape(items=items), how)
    for card in OTHERS:
        check(job, like, Shape(items=1), replace(how, device=find_device(card)))
        check(job, like, Shape(items=5), replace(how, device=find_device(card)))


def test_cards_have_kernels_of_their_own():
    """What the test above is about: a window of other events."""
    how = Tracing(device=CARD)
    traces = [
        trace_job(Attends(), Shape(items=4), replace(how, device=find_device(key))) for key in ("rtx4090", "h100")
    ]
    names = [{trace.names[name] for name in trace.operator_name.tolist()} for trace in traces]
    assert names[0] != names[1]


@pytest.mark.parametrize(
    "job",
    [Remembers(), Concatenates(), Caches(), TrainsLater()],
    ids=["remembers", "concatenates", "caches", "trains later"],
)
def test_a_second_window_that_does_more_than_the_first_is_traced_at_another_size(job):
    how = Tracing(device=CARD)
    for items, other in ((2, 5), (5, 2)):
        like = trace_job(job, Shape(items=items), how)
        assert windows_run(job, Shape(items=other), replace(how, like=like)) == 2
        own, alone = (trace_job(job, Shape(items=other), asked) for asked in (replace(how, like=like), how))
        assert differing(own, alone) == []


@pytest.mark.parametrize("engine", ["ddp", "fsdp2", "zero1", "zero3"])
def test_several_ranks_have_the_trace_that_they_have_alone(engine):
    """Under FSDP2 the second window gathers in another order: what its operators cost does not follow."""
    if engine.startswith("zero"):
        pytest.importorskip("deepspeed")
    job, choices = load_job("f5_tts/tiny"), {"engine": engine, "world": 4, "checkpointing": {}}
    like = trace_question(job, Shape(items=1, length=64), CARD, **choices)
    shape = Shape(items=4, length=64)
    alone, own = (trace_question(job, shape, CARD, **choices, like=known) for known in (None, like))
    for rank, trace in alone.traces.items():
        assert differing(own.traces[rank], trace) == []


def test_a_step_of_other_nets_is_traced():
    how = Tracing(device=CARD)
    like = trace_job(Norms(width=32), Shape(items=2), how)
    assert windows_run(Norms(), Shape(items=2), replace(how, like=like)) == 2


def test_the_trace_alone_does_not_say_what_the_second_window_is():
    """One that has a single window shows nothing."""
    how = Tracing(device=CARD)
    like = trace_job(Norms(), Shape(items=2), how)
    start, end = next((start, end) for name, start, end in like.phases if name == "train")
    phases = tuple(phase for phase in like.phases if phase[1] < end)
    one_window = replace(
        like, kind=like.kind[:end], storage=like.storage[:end], operator=like.operator[:end], phases=phases
    )
    assert start > 0
    assert second_window_follows(one_window, like)
    assert not second_window_follows(one_window, one_window)
    assert with_second_window(one_window, one_window) is None


@pytest.mark.parametrize("name", ["f5_tts/tiny", pytest.param("latentsync/tiny", marks=pytest.mark.slow)])
def test_it_follows_for_built_in_jobs(name):
    job = load_job(name)
    facts = facts_of(job)
    how = Tracing(device=CARD)
    like = trace_job(job, Shape(items=1, length=facts.longest), how)
    check(job, like, Shape(items=4, length=facts.longest), how)
    check(job, like, Shape(items=1, length=facts.longest), replace(how, device=find_device("h100")))


LIKE_OTHERS = ("latentsync/stage1_512", "latentsync/stage2_512", "latentsync/stage2_efficient")
"""Jobs whose windows differ as those of others do, and which take long to trace."""


@pytest.mark.slow
@pytest.mark.parametrize("recomputes", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize(
    "name", [*sorted({*built_in_jobs()} - {*LIKE_OTHERS}), "examples/llama_lora.py:Llama8B", "examples/unet.py:Discs"]
)
def test_every_job_has_the_trace_that_it_has_alone(name, recomputes):
    """Whether or not the second window follows."""
    job = load_job(name)
    facts = facts_of(job)
    more = {"checkpointing": facts.every, "micro_batches": 2} if recomputes else {}
    how, length = Tracing(device=CARD, **more), facts.longest
    like = trace_job(job, Shape(items=1, length=length), how)
    for items, card in ((4, "rtx4090"), (1, "h100"), (2, "t4")):
        shape, on_card = Shape(items=items, length=length), replace(how, device=find_device(card))
        trace = trace_job(job, shape, on_card)
        assert differing(trace_job(job, shape, replace(on_card, like=like)), trace) == [], (items, card)
