"""Tensors that code keeps in its module's variables: a process that traces several steps counts them in each.

python -m pytest tests/trace/test_kept_by_modules.py
"""

import functools

import pytest
import torch

from memfit.device.hardware.catalogue import find_device
from memfit.job import Shape
from memfit.planner.prediction import footprint_on
from memfit.trace.step import Tracing, trace_job
from tests.planner.test_options import Deep

CARD = find_device("t4")
_kept: dict[tuple[str, int], torch.Tensor] = {}


@functools.lru_cache
def _mask(items, device):
    return torch.zeros(items, 1 << 18, device=device)


class Kept(Deep):
    """Makes a tensor of 64 MiB in its first step, and one that depends on the micro-batch."""

    def loss(self, nets, batch):
        key = (str(batch.device), 0)
        if key not in _kept:
            _kept[key] = torch.zeros(1 << 24, device=batch.device)
        made = super().loss(nets, batch)
        self.use(_kept[key], [_mask(len(batch), batch.device)])
        return made

    def use(self, kept, masks):
        assert (kept[:8] * 2).numel() == torch.cat(masks).flatten()[:8].numel()


class Stacked(Kept):
    def use(self, kept, masks):
        torch.stack([kept[:8], kept[:8]])
        torch.where(masks[0].bool(), masks[0], 0)


class Written(Kept):
    def use(self, kept, masks):
        kept.zero_()
        masks[0].add_(1)


def bytes_of(job, items):
    trace = trace_job(job, Shape(items=items), Tracing(device=CARD))
    phases = footprint_on(trace, CARD, 1).phases
    return {name: phase.process_bytes for name, phase in phases.items()}


@pytest.fixture(autouse=True)
def nothing_kept():
    forget()
    yield
    forget()


def forget():
    _kept.clear()
    _mask.cache_clear()


@pytest.mark.parametrize("kind", [Kept, Stacked, Written])
def test_each_trace_counts_what_a_process_of_its_own_would(kind):
    alone = {}
    for items in (4, 8, 16):
        forget()
        alone[items] = bytes_of(kind(), items)
    forget()
    assert {items: bytes_of(kind(), items) for items in (4, 8, 16)} == alone
    assert {items: bytes_of(kind(), items) for items in (16, 4, 8)} == alone


def test_what_a_trace_left_and_this_one_does_not_use_is_not_counted():
    plain = bytes_of(Deep(), 4)
    bytes_of(Kept(), 16)
    assert bytes_of(Deep(), 4) == plain


def test_what_is_gone_is_made_again():
    alone = bytes_of(Kept(), 4)
    forget()
    assert bytes_of(Kept(), 4) == alone
