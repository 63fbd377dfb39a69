"""What rounding inside of a micro-batch may do to gradients and losses: draws, and what is made of them.

python -m pytest tests/verify/test_perturbation.py
"""

import math

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from memfit.apply.train_state import build
from memfit.engine.single import Single
from memfit.mesh import MeshShape
from memfit.verify.bounds import sum_bound
from memfit.verify.perturbation import (
    DRAWS_OF_PRODUCTS,
    ROOM,
    ROOM_OF_PRODUCTS,
    PerturbedWindow,
    allow_for,
    perturbed_windows,
    product_parts,
)
from memfit.verify.recording_engine import RecordedWindow, RecordingEngine
from memfit.verify.split_products import SplitProducts
from tests.verify.cut_jobs import Cut

BOUND = sum_bound(2)


def gradients_of(net, x, split=None):
    net.zero_grad()
    if split is None:
        net(x).square().sum().backward()
    else:
        with split:
            net(x).square().sum().backward()
    return [p.grad.clone() for p in net.parameters()]


@pytest.mark.parametrize("pieces", [2, 3, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_in_parts_differ_by_rounding_of_their_type_forward_and_backward(dtype, pieces):
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(48, 40), nn.GELU(), nn.Linear(40, 8, bias=False)).to(dtype), torch.randn(5, 7, 48)
    x = x.to(dtype)
    with SplitProducts(pieces, 0):
        out = net(x)
    apart = (out - net(x)).float().abs().max() / net(x).float().abs().max()
    unit = torch.finfo(dtype).eps
    assert 0 < apart < 20 * math.sqrt(pieces) * unit
    before, after = gradients_of(net, x), gradients_of(net, x, SplitProducts(pieces, 0))
    for ours, theirs in zip(before, after, strict=True):
        assert 0 < (ours - theirs).float().abs().max() < 60 * math.sqrt(pieces) * unit * ours.float().abs().max()


def test_products_with_factors_are_the_same_in_parts():
    torch.manual_seed(0)
    a, b, c = torch.randn(6, 9).double(), torch.randn(9, 4).double(), torch.randn(6, 4).double()
    batched = [torch.randn(3, *sizes).double() for sizes in ((6, 4), (6, 9), (9, 4))]
    with SplitProducts(2, 0):
        single, several = torch.addmm(c, a, b, beta=0.5, alpha=3), torch.baddbmm(*batched, beta=2, alpha=-1)
    torch.testing.assert_close(single, torch.addmm(c, a, b, beta=0.5, alpha=3))
    torch.testing.assert_close(several, torch.baddbmm(*batched, beta=2, alpha=-1))


def test_draws_of_parts_leave_the_job_its_random_numbers_and_let_it_recompute():
    net, x = nn.Linear(8, 8), torch.randn(3, 8, requires_grad=True)
    state = torch.get_rng_state()
    with SplitProducts(2, 0):
        checkpoint(net, x, use_reentrant=False).sum().backward()
    assert torch.equal(torch.get_rng_state(), state)


def perturbed(changes):
    windows = [RecordedWindow(gradients={"net.w": torch.tensor([1.0, 1.0 + change])}) for change in changes]
    return [
        PerturbedWindow(seen=seen, losses={"loss": 2.0 + change}) for seen, change in zip(windows, changes, strict=True)
    ]


@pytest.mark.parametrize(
    ("engine", "mesh", "parts"),
    [
        ("fsdp2", MeshShape(dp_shard=2), 1),
        ("fsdp2", MeshShape(dp_shard=2, tp=4), 4),
        ("fsdp2", MeshShape(ep=2), 2),
        ("zero2", MeshShape(), 1),
        ("zero3", MeshShape(), 2),
    ],
)
def test_products_are_rounded_in_parts_where_layers_are_cut_or_deepspeed_computes_them(engine, mesh, parts):
    assert product_parts(engine, mesh) == parts


@pytest.mark.parametrize(
    ("changes", "room", "loss_room"),
    [
        ([0.5], ROOM * 0.5, 0.0),
        ([0.5, -0.5, 0.0, 0.0], ROOM_OF_PRODUCTS * math.sqrt(1 / 8), ROOM_OF_PRODUCTS * math.sqrt(1 / 8)),
    ],
)
def test_one_change_or_the_root_mean_square_of_several_is_allowed(changes, room, loss_room):
    seen = RecordedWindow(gradients={"net.w": torch.ones(2)}, magnitudes={"net.w": torch.tensor([3.0, 0.0])})
    allow_for(seen, {"loss": 2.0}, perturbed(changes), BOUND)
    torch.testing.assert_close(seen.magnitudes["net.w"] * BOUND, torch.tensor([3.0, 1.0]) * BOUND + room)
    assert seen.loss_magnitudes.get("loss", 0.0) * BOUND == pytest.approx(loss_room)


@pytest.mark.parametrize(("ranks", "draws"), [(1, 1), (2, DRAWS_OF_PRODUCTS)])
def test_every_draw_begins_anew_and_has_other_roundings(ranks, draws):
    recording = RecordingEngine(Single(), magnitudes=True)
    train_state = build(Cut(), "cpu", recording)
    recording.watch(train_state)
    net = train_state.nets["net"]
    first = {path: weight.detach().clone() for path, weight in net.named_parameters()}
    seen, begun, moved = RecordedWindow(weights={"net.x": torch.ones(3)}), [], []

    def begin():
        begun.append(recording.forced)
        net.load_state_dict(first)

    def run(this):
        assert this.ema == {}
        moved.append(net[2].weight.detach().clone())
        return {"loss": float(net(torch.ones(1, 8)).sum().detach())}

    losses = [window.losses["loss"] for window in perturbed_windows(recording, train_state, seen, begin, run, ranks)]
    assert len(begun) == len(losses) == draws
    for index, weight in enumerate(moved):
        torch.testing.assert_close(weight, first["2.weight"], rtol=2.5e-7, atol=0)
        assert not any(torch.equal(weight, other) for other in [first["2.weight"], *moved[:index]])
    assert recording.forced == {}
