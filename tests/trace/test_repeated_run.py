"""A second window that follows where kernels differ: rows omitted and added, and what is freed within a run."""

import pytest
import torch

from memfit.device.hardware.catalogue import find_device
from memfit.job import Shape
from memfit.loading import load_job
from memfit.planner.job_reading import facts_of
from memfit.trace.step import Tracing, trace_job
from tests.trace.test_second_window import CARD, Norms, check, differing, windows_run


class Wrapped(Norms):
    """In DDP, with a gradient scaler. Its events differ between one item and more, and between cards."""

    precision: str = "fp16"
    wrapper: str = "ddp"

    def loss(self, nets, batch):
        with self.autocast(batch.device):
            x = nets["net"](self.prepared(nets, batch))
            x = x.t().reshape(1, 1, -1, 4)  # copies where there are several items
            x = x.expand(1, 8, -1, 4).repeat(1, 1, 1, 2)
            x = torch.nn.functional.scaled_dot_product_attention(x, x, x)
        return x.float().sum(), len(batch)

    def prepared(self, nets, batch):
        return batch * 2


class CalledBefore(Wrapped):
    """Calls the net's first layer before the net, too."""

    def prepared(self, nets, batch):
        nets["net"][0](batch)
        return batch * 2


class FreesBefore(Wrapped):
    """Frees a copy of the batch right before the net is called, where there are several items."""

    def prepared(self, nets, batch):
        flat = batch.t().reshape(-1)
        doubled = flat * 2
        del flat
        return doubled.view(batch.shape)


class Weighted(Wrapped):
    """Whose forward replaces the weight of each layer by the one that it computes from its norm."""

    wrapper: str = "none"

    def nets(self):
        layers = [torch.nn.utils.weight_norm(torch.nn.Linear(8, 8)) for _ in range(3)]
        return {"net": torch.nn.Sequential(*layers, torch.nn.Linear(8, 4))}


class WeightedTwice(Weighted):
    """Whose first layer runs before, too: the net's call frees what that one has made."""

    prepared = CalledBefore.prepared


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("job", [Wrapped(), Weighted(), WeightedTwice()], ids=["wrapped", "weighted", "twice"])
def test_it_follows_where_what_is_made_once_differs(job, micro_batches):
    """DDP cuts its buckets anew at the net's second call: in the first window where that has two micro-batches."""
    how = Tracing(device=CARD, micro_batches=micro_batches)
    like, t4 = trace_job(job, Shape(items=1), how), find_device("t4")
    for shape, device in ((Shape(items=2), CARD), (Shape(items=1), t4), (Shape(items=2), t4)):
        check(job, like, shape, Tracing(device=device, micro_batches=micro_batches))


def test_events_of_one_item_and_of_two_differ():
    """What the test above is about."""
    traces = [trace_job(Wrapped(), Shape(items=items), Tracing(device=CARD)) for items in (1, 2)]
    names = [[trace.names[name] for name in trace.operator_name.tolist()] for trace in traces]
    assert names[1].count("aten.clone.default") > names[0].count("aten.clone.default")


@pytest.mark.parametrize("job", [CalledBefore(), FreesBefore()], ids=["called before", "frees before"])
def test_it_is_traced_where_the_place_of_what_is_added_is_not_sure(job):
    how = Tracing(device=CARD)
    like = trace_job(job, Shape(items=1), how)
    assert windows_run(job, Shape(items=2), Tracing(device=CARD, like=like)) == 2
    alone, own = (trace_job(job, Shape(items=2), Tracing(device=CARD, like=known)) for known in (None, like))
    assert differing(own, alone) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["latentsync/stage1", "latentsync/stage2", "musetalk/stage2", "gpt_sovits/s2"])
def test_it_follows_from_one_item_and_to_other_cards(name):
    job = load_job(name)
    length, cards = facts_of(job).longest, [find_device(key) for key in ("rtx3090", "t4")]
    like = trace_job(job, Shape(items=1, length=length), Tracing(device=cards[0]))
    for items, card in ((2, cards[0]), (1, cards[1]), (2, cards[1])):
        check(job, like, Shape(items=items, length=length), Tracing(device=card))
