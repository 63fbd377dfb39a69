"""python -m pytest tests/device/test_cudnn_benchmark.py"""

import numpy as np
import pytest
import torch
from torch import nn

from memfit.device.hardware.catalogue import find_device
from memfit.events import ALLOCATE, EMPTY_CACHE, FREE
from memfit.job import Job, Shape
from memfit.trace.extra_window import with_third_window
from memfit.trace.step import Tracing, trace_family, trace_job


class Twice(Job):
    """A 3 x 3 convolution used twice on the same shape, a depthwise one, and a pointwise one."""

    def nets(self):
        self.shared = nn.Conv2d(16, 16, 3, padding=1, bias=False)
        return {"net": nn.Sequential(self.shared, self.shared, nn.Conv2d(16, 16, 3, groups=16), nn.Conv2d(16, 4, 1))}

    def optimizers(self, nets):
        return {"sgd": torch.optim.SGD(nets["net"].parameters(), lr=0.1)}

    def batch(self, shape):
        return torch.randn(shape.items, 16, 32, 32)

    def loss(self, nets, batch):
        return nets["net"](batch).square().mean((1, 2, 3)).sum(), len(batch)


@pytest.fixture
def benchmark(request):
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = request.param
    yield request.param
    torch.backends.cudnn.benchmark = before


@pytest.mark.parametrize("benchmark", [True, False], indirect=True)
def test_the_cache_is_emptied_once_for_each_convolution_and_pass(benchmark):
    trace = trace_job(Twice(), Shape(items=4), Tracing(device=find_device("a100-40gb")))
    emptied = np.flatnonzero(trace.kind == EMPTY_CACHE)
    names = [trace.names[trace.operator_name[trace.operator[event]]] for event in emptied]
    if not benchmark:
        assert names == []
        return
    # 3 x 3: forward, gradients of input and weight (the batch needs no gradient, the second use does); 1 x 1: the same
    assert sorted(names) == ["aten.convolution.default"] * 2 + ["aten.convolution_backward.default"] * 4
    first_window = next(end for name, _, end in trace.phases if name == "train")
    assert emptied.max() < first_window


@pytest.mark.parametrize("benchmark", [True], indirect=True)
def test_a_search_and_its_workspace_lie_between_the_gradients_of_input_and_weight(benchmark):
    trace = trace_job(Twice(), Shape(items=4), Tracing(device=find_device("a100-40gb")))
    backward = trace.names.index("aten.convolution_backward.default")
    rows = np.flatnonzero(trace.operator_name == backward)
    pointwise, spatial = rows[0], rows[2]

    def events(row):
        result = np.flatnonzero(trace.operator == row)
        return [
            (int(trace.kind[e]), int(trace.nbytes[trace.storage[e]]) if trace.storage[e] >= 0 else 0) for e in result
        ]

    image = 4 * 16 * 32 * 32 * 4
    weight = 16 * 16 * 9 * 4
    workspace = 2 * image + weight
    made = [event for event in events(spatial) if event[0] != FREE or event[1] == workspace]
    assert made == [
        (ALLOCATE, image), (EMPTY_CACHE, 0), (ALLOCATE, workspace), (FREE, workspace),
        (ALLOCATE, weight), (EMPTY_CACHE, 0), (ALLOCATE, workspace), (FREE, workspace),
    ]  # fmt: skip
    assert [kind for kind, _ in events(pointwise) if kind != FREE].count(EMPTY_CACHE) == 2


class OnASideStream(Twice):
    """The batch comes on a stream of its own, as a prefetching loader brings it."""

    def batch(self, shape):
        with torch.cuda.stream(torch.cuda.Stream()):
            return torch.randn(shape.items, 16, 32, 32)


def test_what_is_made_on_another_stream_comes_from_its_own_pool():
    trace = trace_job(OnASideStream(), Shape(items=4), Tracing(device=find_device("a100-40gb")))
    beside = trace.nbytes[trace.stream > 0]
    assert set(beside.tolist()) == {4 * 16 * 32 * 32 * 4}
    assert len(beside) == 2  # a batch for each of the two windows


@pytest.mark.parametrize("benchmark", [True], indirect=True)
def test_the_third_window_does_what_a_traced_third_one_would(benchmark):
    trace = trace_job(Twice(), Shape(items=4), Tracing(device=find_device("a100-40gb")))
    three = with_third_window(trace)

    assert [name for name, _, _ in three.phases] == ["setup", "train", "train", "train", "save"]
    (second, third) = [slice(start, end) for name, start, end in three.phases if name == "train"][1:]
    assert np.array_equal(three.kind[second], three.kind[third])
    sizes = three.nbytes[three.storage]
    assert np.array_equal(sizes[second], sizes[third])
    balance = np.zeros(len(three.nbytes), int)
    for kind, storage in zip(three.kind, three.storage, strict=True):
        if storage >= 0:
            balance[storage] += kind
            assert balance[storage] in (0, 1)  # allocated once, freed at most once, after that
    live = np.cumsum(np.where(three.kind == EMPTY_CACHE, 0, three.kind * sizes))
    assert live[second.stop - 1] == live[third.stop - 1]


def test_what_a_job_sets_of_cudnn_ends_with_its_trace():
    class Sets(Twice):
        def nets(self):
            torch.backends.cudnn.benchmark = True
            return super().nets()

    before = torch.backends.cudnn.benchmark
    assert (trace_job(Sets(), Shape(items=4), Tracing(device=find_device("a100-40gb"))).kind == EMPTY_CACHE).any()
    assert torch.backends.cudnn.benchmark is before is False


@pytest.mark.parametrize("benchmark", [True], indirect=True)
def test_a_family_derives_micro_batches_although_each_is_searched_for_anew(benchmark):
    family = trace_family(Twice(), Tracing(device=find_device("a100-40gb")), Shape(items=4))
    assert family.derives
    direct = trace_job(Twice(), Shape(items=7), Tracing(device=find_device("a100-40gb"), scratch=False))
    derived = family.at(Shape(items=7))
    assert np.array_equal(derived.nbytes[derived.storage], direct.nbytes[direct.storage])
    assert np.array_equal(derived.kind, direct.kind)
