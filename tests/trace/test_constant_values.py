"""python -m pytest tests/trace/test_constant_values.py"""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from memfit.device.virtual.card_rules import CardRules
from memfit.device.virtual.fake_group import predicted_ranks
from memfit.device.virtual.virtual_device import virtual_cpu, virtual_gpu
from memfit.trace import constant_values
from memfit.trace.tracer import Tracer


@pytest.mark.parametrize("device", [virtual_cpu, lambda: virtual_gpu(CardRules())], ids=["cpu", "gpu"])
def test_numbers_that_follow_from_the_code_are_known_also_as_a_list(device):
    with device() as virtual, Tracer(virtual).recording(), virtual.device:
        assert (4 ** torch.arange(3)).flip(0).tolist() == [16, 4, 1]
        assert torch.stack([torch.tensor(2), torch.tensor(3)]).tolist() == [2, 3]
        assert [part.item() for part in torch.arange(6).split(2)[1]] == [2, 3]


@pytest.mark.parametrize("device", [virtual_cpu, lambda: virtual_gpu(CardRules())], ids=["cpu", "gpu"])
def test_a_copy_of_a_net_has_its_own_known_numbers(device):
    with device() as virtual, Tracer(virtual).recording(), virtual.device:
        net = nn.BatchNorm2d(3)
        average = copy.deepcopy(net)
        net.num_batches_tracked += 1
        assert (net.num_batches_tracked.item(), average.num_batches_tracked.item()) == (1, 0)


def class_mask(labels, **how):
    mask = torch.zeros(len(labels), 10, **how)
    mask[torch.arange(len(labels)), labels] = 1
    return mask


@pytest.mark.parametrize("device", [virtual_cpu, lambda: virtual_gpu(CardRules())], ids=["cpu", "gpu"])
def test_places_that_are_written_in_a_filled_tensor_are_known(device):
    """A mask of classes selects an element of each row."""
    with device() as virtual, Tracer(virtual).recording(), virtual.device:
        labels = torch.arange(64) % 10
        for dtype in (torch.float32, torch.bool):
            hits = constant_values.value_of(class_mask(labels, dtype=dtype) == 1)
            assert hits is not None
            assert hits.sum(1).tolist() == [1] * 64
        like = torch.full_like(torch.rand(64, 10), 2).scatter_(1, labels[:, None], 3.0)
        assert constant_values.value_of(like > 2).sum() == 64


@pytest.mark.parametrize("device", [virtual_cpu, lambda: virtual_gpu(CardRules())], ids=["cpu", "gpu"])
def test_what_else_is_written_to_a_filled_tensor_makes_it_unknown(device):
    with device() as virtual, Tracer(virtual).recording(), virtual.device:
        labels = torch.arange(64) % 10
        drawn = torch.zeros(64, 10).normal_()
        drawn[torch.arange(64), labels] = 1
        through_a_view = torch.zeros(64, 10)
        through_a_view.view(-1).uniform_()
        through_a_view[torch.arange(64), labels] = 1
        at_unknown_places = class_mask(torch.randint(0, 10, (64,)))
        afterwards = class_mask(labels).add_(torch.rand(64, 10))
        copied = copy.deepcopy(torch.zeros(64, 10).normal_())
        copied[torch.arange(64), labels] = 1
        for tensor in (drawn, through_a_view, at_unknown_places, afterwards, copied):
            assert constant_values.value_of(tensor == 1) is None


@pytest.mark.parametrize("device", [virtual_cpu, lambda: virtual_gpu(CardRules())], ids=["cpu", "gpu"])
def test_numbers_are_finite_whatever_their_count(device):
    with device() as virtual, Tracer(virtual).recording(), virtual.device:
        many = torch.rand(300, 300)
        assert torch.isfinite(many).all()
        assert torch.isfinite(many.sum())
        assert not torch.isnan(many).any()
        assert not torch.isinf(many).any()
        mask = torch.isfinite(many)
        mask &= many > 0.5
        assert not mask.all()


@pytest.mark.parametrize("device", [virtual_cpu, lambda: virtual_gpu(CardRules())], ids=["cpu", "gpu"])
def test_rates_and_widths_of_layers_are_known(device):
    with device() as virtual, Tracer(virtual).recording(), virtual.device:
        assert [round(rate.item(), 2) for rate in torch.linspace(0, 0.3, 4)] == [0, 0.1, 0.2, 0.3]
        assert (torch.tensor([0.25, 0.5, 1.0]) * 64).int().tolist() == [16, 32, 64]
        assert torch.logspace(0, 2, 3).tolist() == [1, 10, 100]
        assert [part.tolist() for part in torch.linspace(0, 1, 5).split([2, 3])] == [[0, 0.25], [0.5, 0.75, 1]]


@pytest.mark.parametrize("device", [virtual_cpu, lambda: virtual_gpu(CardRules())], ids=["cpu", "gpu"])
def test_positions_of_a_long_batch_are_known_to_follow_each_other(device):
    with device() as virtual, Tracer(virtual).recording(), virtual.device:
        positions = torch.arange(131072).expand(4, -1)
        steps = torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1)
        assert ((steps != 1).cumsum(-1)[:, -1] == 0).all(), "transformers makes a mask of packed sequences otherwise"


@pytest.mark.parametrize("device", [virtual_cpu, lambda: virtual_gpu(CardRules())], ids=["cpu", "gpu"])
def test_a_slice_from_a_random_place_keeps_its_width(device):
    with device() as virtual, Tracer(virtual).recording():
        x = torch.empty(2, 64, device=virtual.device)
        i = torch.randint(0, 32, (1,), device=virtual.device)
        assert x[:, i : i + 32].shape == (2, 32)
        assert x[:, i * 4 : (i + 8) * 4].shape == (2, 32)
        assert x[:, 2 * i[0] : 2 * i[0] + 7].shape == (2, 7)
        assert x[:, : (i // i)].shape == (2, 0)
        i += 5
        assert x[:, i : i + 3].shape == (2, 3)
        end = torch.randint(32, 64, (1,), device=virtual.device)
        assert x[:, end - 32 : end].shape == (2, 32)
        assert x[:, end.item() - 32 : end.item()].shape == (2, 32)
        starts = (torch.rand(3, device=virtual.device) * 32).long()
        ends = starts + 32
        assert x[:, starts[1] : ends[1]].shape == (2, 32)
        lasts = torch.randint(32, 64, (3,), device=virtual.device)
        assert x[:, lasts[2] - 8 : lasts[2]].shape == (2, 8)


@pytest.mark.parametrize("device", [virtual_cpu, lambda: virtual_gpu(CardRules())], ids=["cpu", "gpu"])
def test_what_is_written_through_a_view_is_forgotten_of_the_whole(device):
    """``pad_sequence`` copies sequences into the rows of a tensor of zeros: it was taken for zeros afterwards."""
    with device() as virtual, Tracer(virtual).recording(), virtual.device:
        padded = nn.utils.rnn.pad_sequence([torch.randint(3, 9, (length,)) for length in (5, 2)], batch_first=True)
        assert padded.shape == (2, 5)
        valid = (padded != 0).sum()
        assert bool(valid == 0) is False
        counts = torch.zeros(4, dtype=torch.int64)
        first, row = counts[:2], counts.view(2, 2)[1]
        row.fill_(7)
        assert (counts.sum().item(), first.sum().item()) == (14, 0)
        first.copy_(torch.randint(3, 9, (2,)))
        assert constant_values.known_item(row[0]) is None
        assert constant_values.known_item(counts.sum()) is None


@pytest.mark.parametrize("device", [virtual_cpu, lambda: virtual_gpu(CardRules())], ids=["cpu", "gpu"])
def test_one_operand_decides_what_is_or_true_and_what_is_and_false(device):
    """A library's loop over tokens ends where all rows are done: by their tokens, or by their length."""
    with device() as virtual, Tracer(virtual).recording(), virtual.device:
        unknown = torch.randint(0, 9, (4,)) == 3
        yes, no = torch.full((4,), True), torch.full((4,), False)
        value = constant_values.value_of
        for result in (unknown | yes, yes | unknown, torch.logical_or(unknown, yes)):
            assert value(result).tolist() == [True] * 4
        for result in (unknown & no, no & unknown, torch.logical_and(no, unknown), unknown.long() & ~yes):
            assert value(result).tolist() == [0] * 4
        assert value(unknown.long() * torch.zeros(4, dtype=torch.int64)).tolist() == [0] * 4
        for result in (unknown | no, unknown & yes, torch.rand(4) * torch.zeros(4), unknown | torch.arange(4).bool()):
            assert value(result) is None
        unfinished = torch.ones(4, dtype=torch.int64)
        unfinished &= (~unknown).long()
        assert value(unfinished) is None
        unfinished &= (~(unknown | True)).long()
        assert bool(unfinished.max() == 0)
        unfinished |= unknown.long()
        assert value(unfinished) is None


@pytest.mark.parametrize("device", [virtual_cpu, lambda: virtual_gpu(CardRules())], ids=["cpu", "gpu"])
def test_what_was_not_written_to_yet_is_0_and_becomes_what_is_written(device):
    with device() as virtual, Tracer(virtual).recording(), virtual.device:
        places = torch.arange(64)
        shifted = torch.empty_like(places)
        assert shifted.tolist() == places.new_empty((64,)).tolist() == [0] * 64
        shifted[1:] = places[:-1]
        shifted[0] = 7
        assert shifted[:3].tolist() == [7, 0, 1]


@pytest.mark.parametrize(
    ("collective", "kept"),
    [
        (lambda given, own: dist.all_reduce(given), True),
        (lambda given, own: dist.all_to_all_single(given, own), False),
        (lambda given, own: dist.all_gather([own, given], own.clone()), False),
        (lambda given, own: dist.scatter(given, [own, own]), False),
        (lambda given, own: dist.recv(given, 1), False),
    ],
    ids=["summed", "exchanged", "gathered", "scattered", "received"],
)
def test_what_other_ranks_send_is_not_known(collective, kept):
    with virtual_cpu() as virtual, predicted_ranks(2), Tracer(virtual).recording(), virtual.device:
        given, own = torch.tensor([5, 5]), torch.tensor([3, 4])
        collective(given, own)
        assert (constant_values.value_of(given) is not None) is kept


@pytest.mark.parametrize("device", [virtual_cpu, lambda: virtual_gpu(CardRules())], ids=["cpu", "gpu"])
def test_what_unknown_integers_are_taken_for_is_worked_out_with_one_of_them(device, monkeypatch):
    """Thousands of codes of a quantized state, of each parameter: their content was made at each operator."""
    made, full = [], torch.full

    def noted(size, *arguments, **named):
        made.append(torch.Size(size).numel())
        return full(size, *arguments, **named)

    with device() as virtual, Tracer(virtual).recording(), virtual.device:
        codes = torch.randn(64, 256).long()
        monkeypatch.setattr(torch, "full", noted)
        later = (codes + 32).view(128, 128).to(torch.uint8).flatten()[5:] * 3 - torch.tensor(6)
        assert later.expand(2, -1).max().item() == 90
        assert (codes.to(torch.int8) + 2000).max().item() == -48
        assert (codes + 2**40).view(torch.int32).max().item() == codes.max().item() == 0
        assert (codes[:0] + 7).sum().item() == 0
        assert sum(size > 1 for size in made) <= 1, "only the view of another type needs all of them"
        assert ((codes[0] + 5) * (torch.arange(256) >= 0).long()).max().item() == 5
        assert ((codes[0] + 5) * torch.arange(256)).max().item() == 0


def test_what_a_card_computes_and_the_cpu_does_not_is_not_known():
    def counted():
        return torch.histc(torch.arange(6).int(), bins=3, min=0, max=2)

    with virtual_gpu(CardRules()) as virtual, Tracer(virtual).recording(), virtual.device:
        counts = counted()
        assert counts.shape == (3,)
        assert constant_values.value_of(counts) is None
    with virtual_cpu() as virtual, Tracer(virtual).recording(), virtual.device, pytest.raises(RuntimeError):
        counted()


@pytest.mark.parametrize("device", [virtual_cpu, lambda: virtual_gpu(CardRules())], ids=["cpu", "gpu"])
def test_a_lower_bound_of_numbers_that_are_not_known_counts(device):
    """VITS makes as many frames as it predicts, and at least one: a convolution of none was refused."""
    with device() as virtual, Tracer(virtual).recording(), virtual.device:
        frames = torch.rand(2, 1, 8).ceil().sum((1, 2))
        for bounded in (
            torch.clamp_min(frames, 4),
            frames.clamp(min=4),
            frames.clamp(4, 9),
            frames.clamp(min=torch.full((), 4.0)),
            torch.maximum(frames, torch.full((), 4.0)),
            frames.clone().clamp_(min=4),
            (2 * frames.clamp(min=1.7).view(2, 1)).ceil(),
        ):
            assert torch.arange(bounded.long().max()).shape == (4,)
            assert bounded.max().item() == 4
            assert bounded.float().min() > 3
        assert frames.long().clamp_(min=4).max().item() == 4
        lengths = frames.clamp(min=4)
        lengths.copy_(frames)
        assert lengths.long().max().item() == 0, "what is not known was written to it"
        for free in (frames, frames.clamp(min=0.1), frames.clamp(max=0.1), frames.clamp(min=4) * frames):
            assert (free.max().item(), free.long().max().item()) == (0.5, 0)
