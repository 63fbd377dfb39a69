import sys

import pytest
import torch
from torch import nn

from memfit.device.virtual import assumptions, data_dependent
from memfit.device.virtual.card_rules import CardRules
from memfit.device.virtual.virtual_device import virtual_cpu, virtual_gpu
from memfit.errors import InputError
from tests.device.minimal_tracer import MinimalTracer


@pytest.fixture(params=[lambda: virtual_gpu(CardRules()), virtual_cpu], ids=["gpu", "cpu"])
def traced(request):
    """A virtual device, traced: the GPU and the CPU."""
    with request.param() as device, MinimalTracer(device):
        yield device


def test_values(traced):
    x = torch.rand(3, device=traced.device)
    assert x[0].item() == 0.5
    assert float(x.sum()) == 0.5
    assert (x > 0).any().item() is False
    assert int((x > 0).sum()) == 0
    assert x.tolist() == [0.5, 0.5, 0.5]
    assert [a.doubtful for a in traced.assumptions] == [False, False, False, True, False]


def test_masked_select_on_a_card_holds_the_indices_that_it_makes_of_the_mask():
    with virtual_gpu(CardRules()) as device, MinimalTracer(device) as tracer:
        x = torch.rand(64, 64, device=device.device)
        mask, before = x > 0, tracer.live
        tracer.peak = before
        chosen = torch.masked_select(x, mask)
        assert chosen.shape == (64 * 64,)
        assert tracer.peak - before == 64 * 64 * (2 * 8 + 4)


def test_the_place_is_named(traced):
    x = torch.rand(3, device=traced.device)
    for _ in range(3):
        x.max().item()
    where = f"{__file__}:{sys._getframe().f_lineno - 1}"
    (assumption,) = traced.assumptions
    assert (assumption.where, assumption.times, assumption.operator) == (where, 3, "item")


def test_values_that_are_known_are_no_assumptions(traced):
    assert torch.tensor(7).item() == 7
    assert len(traced.assumptions) == 0


def test_comparisons(traced):
    x, y = torch.rand(3, device=traced.device), torch.rand(3, device=traced.device)
    assert torch.equal(x, y)
    assert torch.allclose(x, y)
    assert not torch.equal(x, y[:2])


def test_sizes_are_the_largest_possible(traced):
    x = torch.rand(4, 5, device=traced.device)
    assert x.nonzero().shape == (20, 2)
    assert torch.masked_select(x, x > 0).shape == (20,)
    assert x[x > 0].shape == (20,)
    assert x[x[:, 0] > 0].shape == (4, 5)
    assert x[:, x[0] > 0].shape == (4, 5)
    assert torch.where(x > 0)[1].shape == (20,)
    x[x > 0] = 0
    assert x.shape == (4, 5)


def test_a_mask_becomes_indices_first(no_gc):
    with virtual_gpu(CardRules()) as gpu, MinimalTracer(gpu) as tracer:
        x = torch.rand(4, 5, device="cuda")
        mask = x > 0
        start = tracer.live
        chosen = x[mask]
        assert tracer.peak == start + 20 * 2 * 8 + 20 * 4
        assert tracer.live == start + chosen.numel() * 4


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda x: torch.bincount(x.long()), "bincount"),
        (lambda x: torch.repeat_interleave(x, x.long()), "repeat_interleave"),
    ],
)
def test_what_cannot_be_bounded_is_refused(traced, call, name):
    x = torch.rand(4, device=traced.device)
    with pytest.raises(
        InputError, match=rf"{name} at .*test_data_dependent\.py:\d+: the size of its result depends on data"
    ):
        call(x)


def test_values_that_differ_are_as_many_as_there_can_be(traced):
    x = torch.rand(4, 5, device=traced.device)
    assert [part.shape for part in torch.unique_consecutive(x, return_inverse=True)] == [(20,), (4, 5)]
    values, inverse, counts = torch.unique_consecutive(x, return_inverse=True, return_counts=True, dim=1)
    assert (values.shape, inverse.shape, counts.shape) == ((4, 5), (5,), (5,))
    assert [part.shape for part in torch.unique(x, dim=0, return_counts=True)] == [(4, 5), (4,)]
    assert {assumption.most for assumption in traced.assumptions} == {20, 5, 4}


def test_sizes_that_the_code_gives_are_taken(traced):
    x = torch.rand(4, device=traced.device)
    assert torch.bincount(x.long(), minlength=9).shape == (9,)
    assert torch.bincount(x.long(), x.half(), minlength=9).dtype is torch.float64
    assert [assumption.doubtful for assumption in traced.assumptions] == [True, True]
    before = len(traced.assumptions)
    assert torch.repeat_interleave(x, x.long(), output_size=12).shape == (12,)
    assert len(traced.assumptions) == before


def test_sizes_that_a_person_gives_are_taken(traced):
    x = torch.rand(4, device=traced.device)
    traced.assumptions.given[__file__, sys._getframe().f_lineno + 1] = "30"
    assert torch.repeat_interleave(x, x.long()).shape == (30,)


@pytest.mark.parametrize(("kind", "given"), [(bool, "4"), (int, "True"), (int, "4.5"), (float, "True")])
def test_an_answer_of_another_type_is_refused(kind, given):
    given_here = assumptions.Assumptions()
    given_here.given["train.py", 7] = given
    with pytest.raises(InputError, match=r"--assume train\.py:7=.* asks for .*write --assume train\.py:7="):
        given_here.answer(kind(), "train.py:7")


def test_a_loop_that_waits_for_data_ends(traced, monkeypatch):
    monkeypatch.setattr(assumptions, "MOST_PER_LINE", 100)
    x = torch.rand(4, device=traced.device)
    rounds = []

    def wait():
        while not (x > 0).all():
            rounds.append(1)

    with pytest.raises(InputError, match=r"test_data_dependent\.py:\d+: item was asked 100 times"):
        wait()
    assert len(rounds) == 100


def test_torchs_own_lines_have_no_limit(traced, monkeypatch):
    monkeypatch.setattr(assumptions, "MOST_PER_LINE", 3)
    parameters = [nn.Parameter(torch.rand(2, device=traced.device)) for _ in range(4)]
    for _ in range(2):
        sum(p.sum() for p in parameters).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0, error_if_nonfinite=True)


OPTIMIZERS = "Adam AdamW NAdam RAdam Adamax Adagrad Adafactor RMSprop SGD Adadelta Rprop ASGD LBFGS Muon"


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")  # torch 2.8's LBFGS
@pytest.mark.parametrize("name", [name for name in OPTIMIZERS.split(" ") if hasattr(torch.optim, name)])
def test_optimizers_step(traced, name):
    net = nn.Linear(4, 4, bias=False).to(traced.device)
    optimizer = getattr(torch.optim, name)(net.parameters(), lr=0.1)
    x = torch.rand(2, 4, device=traced.device)

    def closure():
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure) if name == "LBFGS" else (closure(), optimizer.step())
    assert net.weight.shape == (4, 4)


def test_real_tensors_answer_for_themselves():
    real = torch.tensor([1.0, 0.0, 3.0])
    with virtual_cpu() as cpu:
        nonzero = torch.ops.aten.nonzero.default
        assert data_dependent.answer_operator(nonzero, (real,), {}, cpu.assumptions) is data_dependent.NOT_HANDLED


def test_inference_mode_is_traced(traced):
    net = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).to(traced.device)
    with torch.inference_mode(), MinimalTracer(traced) as tracer:
        net(torch.rand(2, 4, 16, device=traced.device))
    assert "aten.addmm.default" in tracer.ops
    assert "aten.linear.default" not in tracer.ops


def test_arguments_of_a_distribution_are_as_they_should_be(traced):
    mean = torch.rand(4, 3, device=traced.device)
    drawn = torch.distributions.Normal(mean, mean.exp()).rsample()
    chosen = torch.distributions.Categorical(logits=drawn).sample()
    assert (drawn.shape, chosen.shape) == ((4, 3), (4,))


def test_a_padded_encoder_computes_its_padding_in_evaluation(traced):
    net = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2).eval().to(traced.device)
    x, padding = torch.rand(2, 5, 8, device=traced.device), torch.zeros(2, 5, dtype=torch.bool, device=traced.device)
    with torch.no_grad():
        assert net(x, src_key_padding_mask=padding).shape == (2, 5, 8)


@pytest.mark.parametrize("device", [virtual_cpu, lambda: virtual_gpu(CardRules())], ids=["cpu", "gpu"])
def test_code_that_asks_for_the_one_match_has_one(device):
    """As examples of flow matching look up the noise of a random step."""
    with device() as virtual, virtual.device:
        steps, noise = torch.rand(1000), torch.rand(1000)
        with pytest.raises(RuntimeError, match="cannot be converted to Scalar"):
            torch.randint(0, 9, (4,)).item()
        picked = steps[torch.randint(0, 1000, (4,))]
        places = [(steps == step).nonzero().item() for step in picked]
        assert noise[places].shape == (4,)
        assert noise[torch.nonzero(steps == picked[0], as_tuple=True)[0].item()].shape == ()
        with pytest.raises(RuntimeError, match="cannot be converted to Scalar"):
            noise.item()
