"""A window's gradients do not depend on how it is split; its loss is normalised by its own valid units."""

from collections import UserDict, defaultdict
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from memfit.apply.losses import WindowUnits, host_units, known_units
from memfit.apply.train_state import build
from memfit.apply.window import MicroBatch, run_window
from memfit.errors import InputError
from memfit.job import Job, Loss, Turn
from memfit.nested_tensors import map_tensors, tensors_in
from testing.nets import JOBS


class Sentences(Job):
    """Items of varied length; padding does not count."""

    unit = "frames"
    longest: int | None = 20
    counts: bool = False
    clip: float | None = None

    def nets(self):
        torch.manual_seed(1)
        return {"net": nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 1))}

    def optimizers(self, nets):
        return {"net": torch.optim.SGD(nets["net"].parameters(), lr=1.0)}

    def loss(self, nets, batch):
        x, valid = batch
        error = nets["net"](x).squeeze(-1).square() * valid
        return Loss(error.sum(), valid.sum())


class Counted(Sentences):
    def units(self, batch):
        return int(batch[1].sum())


def data(count=64):
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 21, (count,), generator=generator)
    return torch.randn(count, 20, 6, generator=generator), torch.arange(20)[None] < lengths[:, None]


def gradients(job, sizes):
    """The step that SGD with rate 1 takes is the gradient."""
    train_state = build(job, "cpu")
    before = [p.detach().clone() for p in train_state.nets["net"].parameters()]
    x, valid = data()
    micro_batches, start = [], 0
    for size in sizes:
        part = (x[start : start + size], valid[start : start + size].float())
        units = job.units(part)
        micro_batches.append(MicroBatch(fetch=lambda part=part: part, padded_units=size * 20, units=units))
        start += size
    result = run_window(train_state, micro_batches)
    return [b - p.detach() for b, p in zip(before, train_state.nets["net"].parameters(), strict=True)], result


RAGGED = [5] * 12 + [4]


@pytest.mark.parametrize("job", [Sentences, Counted], ids=["units from the loss", "units known before"])
def test_thirteen_ragged_micro_batches_of_64_samples_give_the_full_batchs_gradients(job):
    assert len(RAGGED) == 13
    assert sum(RAGGED) == 64
    undivided, alone = gradients(job(), [64])
    split, many = gradients(job(), RAGGED)

    for a, b in zip(undivided, split, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-7)
    torch.testing.assert_close(alone.losses["loss"], many.losses["loss"], rtol=1e-5, atol=0)
    assert float(many.units["loss"]) == float(data()[1].sum())


def test_a_mean_of_means_would_have_been_another_gradient():
    """The check above can fail: dividing each micro-batch by its own units is not the same."""
    undivided, _ = gradients(Sentences(), [64])
    x, valid = data()
    net = build(Sentences(), "cpu").nets["net"]
    start = 0
    for size in RAGGED:
        part = slice(start, start + size)
        error = net(x[part]).squeeze(-1).square() * valid[part]
        (error.sum() / valid[part].sum() / len(RAGGED)).backward()
        start += size
    worst = max(
        float((a - p.grad).abs().max() / a.abs().max()) for a, p in zip(undivided, net.parameters(), strict=True)
    )
    assert worst > 1e-3


def test_two_optimizers_take_their_turns_with_the_same_random_numbers_however_the_window_is_split():
    class Noisy(JOBS["gan"]):
        def fake(self, nets, batch, shared):
            if "fake" not in shared:
                shared["fake"] = nets["generator"](batch["z"] + torch.randn_like(batch["z"]))
                seen.append(float(shared["fake"].detach().sum()))
            return shared["fake"]

    seen: list[float] = []
    job = Noisy()
    train_state = build(job, "cpu")
    batches = [job.batch(type("Shape", (), {"items": 3})()) for _ in range(2)]
    micro = [
        MicroBatch(fetch=lambda b=b: b, padded_units=3, units=dict.fromkeys(("judge", "adversarial", "near"), 3))
        for b in batches
    ]
    run_window(train_state, micro)
    judged, generated = seen[:2], seen[2:]
    assert judged == pytest.approx(generated, rel=1e-6)


def test_a_window_without_valid_units_takes_no_step():
    train_state = build(Sentences(), "cpu")
    before = [p.detach().clone() for p in train_state.nets["net"].parameters()]
    nothing = MicroBatch(fetch=lambda: (torch.randn(2, 20, 6), torch.zeros(2, 20)), padded_units=40)
    result = run_window(train_state, [nothing])
    assert result.skipped == ("loss",)
    assert all(torch.equal(a, b) for a, b in zip(before, train_state.nets["net"].parameters(), strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_losses_in_a_half_type_are_summed_over_the_window_in_fp32(dtype):
    class Half(Counted):
        def loss(self, nets, batch):
            total = super().loss(nets, batch).sum
            return Loss((total * 0 + 1000).to(dtype), self.units(batch))

    _, result = gradients(Half(), [1] * 64)
    assert float(result.losses["loss"]) == pytest.approx(64_000 / int(data()[1].sum()), rel=1e-6)


def test_several_losses_with_units_known_too_late_are_refused():
    class Two(Sentences):
        def turns(self, optimizers):
            return [Turn(name="both", loss=self.both, optimizers=tuple(optimizers))]

        def both(self, nets, batch, shared):
            loss = self.loss(nets, batch)
            return {"one": loss, "two": loss}

    with pytest.raises(InputError, match="write units"):
        gradients(Two(), [32, 32])


@dataclass(frozen=True)
class Record:
    x: torch.Tensor
    names: tuple[str, ...]
    rest: dict | None = None


def test_tensors_are_found_and_changed_in_mappings_and_records():
    ones = torch.ones(2)
    batch = UserDict(ids=ones, record=Record(ones, ("a",), defaultdict(list, {"b": [ones, None]})))
    made = map_tensors(batch, lambda tensor: tensor + 1)
    assert [t.tolist() for t in tensors_in(made)] == [[2.0, 2.0]] * 3
    assert (type(made), made["record"].names, made["record"].rest["new"]) == (UserDict, ("a",), [])
    assert [t.tolist() for t in tensors_in(batch)] == [[1.0, 1.0]] * 3


class Closing(Sentences):
    def optimizers(self, nets):
        return {"net": torch.optim.LBFGS(nets["net"].parameters())}


class Plateau(Sentences):
    def schedules(self, optimizers, windows):
        return {"rate": torch.optim.lr_scheduler.ReduceLROnPlateau(optimizers["net"])}


class Stateless(Sentences):
    """Its schedule is of its own making, and a checkpoint could not keep where it stands."""

    def schedules(self, optimizers, windows):
        return {"rate": SimpleNamespace(step=lambda: None)}


@pytest.mark.parametrize(
    ("job", "says"),
    [
        (Closing(), "optimizer 'net': LBFGS steps with a closure.*write one such as torch.optim.AdamW"),
        (Plateau(), "schedule 'rate': ReduceLROnPlateau steps by metrics.*CosineAnnealingLR"),
        (Stateless(), r"schedule 'rate': a SimpleNamespace, which has no state_dict\(\)"),
    ],
    ids=["LBFGS", "ReduceLROnPlateau", "no state"],
)
def test_a_step_that_asks_for_more_is_refused(job, says):
    with pytest.raises(InputError, match=says):
        build(job, "cpu")


@pytest.mark.parametrize("job", [Sentences, Counted], ids=["units from the loss", "units known before"])
@pytest.mark.parametrize("sizes", [[32, 32], [50, 14], [20, 30, 14]])
def test_two_and_three_micro_batches_are_normalised_by_the_windows_units(job, sizes):
    full, _ = gradients(job(), [64])
    split, _ = gradients(job(), sizes)
    for a, b in zip(full, split, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-7)


@pytest.mark.parametrize("sizes", [[64], [32, 32], [20, 30, 14]])
def test_gradients_that_are_freed_after_the_forward_are_those_of_the_window_alone(sizes):
    """Two windows one after the other: only the second window's gradients are in its step."""

    class AfterForward(Sentences):
        zero_grad = "after_forward"

    def two_windows(job):
        train_state = build(job, "cpu")
        x, valid = data()
        for _ in range(2):
            micro_batches, start = [], 0
            for size in sizes:
                part = (x[start : start + size], valid[start : start + size].float())
                micro_batches.append(MicroBatch(fetch=lambda part=part: part, padded_units=size * 20))
                start += size
            run_window(train_state, micro_batches)
        return [p.detach() for p in train_state.nets["net"].parameters()]

    for a, b in zip(two_windows(AfterForward()), two_windows(Sentences()), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("turns", "why"),
    [
        (lambda turn: [turn, "generator"], "gave list, not a list of turns"),
        (lambda turn: turn, "gave Turn, not a list of turns"),
        (lambda turn: [], "gave no turn"),
        (lambda turn: [Turn(name="d", loss=turn.loss, optimizers=("adam",))], "the job has no optimizer 'adam'"),
    ],
)
def test_turns_that_are_none_are_refused(turns, why):
    class Wrong(Sentences):
        def turns(self, optimizers):
            return turns(Turn(name="all", loss=lambda nets, batch, shared: self.loss(nets, batch), optimizers=("net",)))

    with pytest.raises(InputError, match=why):
        gradients(Wrong(), [64])


@pytest.mark.parametrize("given", [torch.tensor(7), {"loss": torch.tensor(7)}, 7, {"loss": 7}, 7.0], ids=repr)
def test_units_known_before_the_forward_may_be_tensors_of_one_number(given):
    window_units = WindowUnits(units=(host_units(given), host_units(given)), padded=20)
    assert known_units(window_units, ["loss"]) == {"loss": 14}


@pytest.mark.parametrize("given", [torch.tensor([7]), {"loss": torch.tensor([7])}, "7", torch.tensor(-1)], ids=repr)
def test_units_that_are_no_number_are_refused_in_one_line(given):
    with pytest.raises(InputError, match="units"):
        known_units(WindowUnits(units=(host_units(given),), padded=20), ["loss"])


class SparseWords(Sentences):
    """Its embedding gives sparse gradients, which are to be clipped."""

    clip: float | None = 1.0

    def nets(self):
        return {"net": nn.Embedding(8, 20, sparse=True)}

    def loss(self, nets, batch):
        return nets["net"](batch[1].sum(1).long() % 8).square().sum(), batch[1].sum()


def test_sparse_gradients_are_refused_by_name():
    with pytest.raises(InputError, match=r"gradient of net.weight: it is sparse.*write sparse=False"):
        gradients(SparseWords(), [64])
