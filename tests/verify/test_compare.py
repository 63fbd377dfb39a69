"""How one window on one rank is compared with the same window on many, and what is recorded of it.

python -m pytest tests/verify/test_compare.py
"""

import pytest
import torch
from torch import nn

import memfit
from memfit.apply.train_state import build
from memfit.engine.single import Single
from memfit.verify.bounds import sum_bound
from memfit.verify.compare import _moving_buffers, compare
from memfit.verify.fixed_rng import FixedDraws
from memfit.verify.recording_engine import RecordedWindow, RecordingEngine


class Normalised(memfit.Job):
    """Batch normalisation, and a net whose forward counts its calls in a buffer."""

    def nets(self):
        class Counting(nn.Module):
            def __init__(self):
                super().__init__()
                self.register_buffer("calls", torch.zeros(1))

            def forward(self, x):
                self.calls += 1
                return x

        return {"net": nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), Counting())}

    def optimizers(self, nets):
        return {"net": torch.optim.SGD(nets["net"].parameters(), lr=0.1)}


@pytest.mark.parametrize(("value", "relative"), [(2.0, 0.0), (2.5, 0.25), (1.0, 0.5)])
def test_a_loss_that_differs_is_told_relative_to_the_loss_of_one_rank(value, relative):
    micro = {"main": [{"loss": (4.0, 2.0)}]}
    alone = {"seen": RecordedWindow(micro_losses=micro), "optimizers": {}, "names": {}, "losses": {"loss": 2.0}}
    result = compare(Normalised(), alone, (RecordedWindow(), {"loss": value}), [(micro, {})], [1])
    assert result["differences"]["loss"]["relative"] == relative
    assert result["differences"]["loss"]["of_bound"] == pytest.approx(relative / result["bound"])


@pytest.mark.parametrize(("cut", "words"), [(True, "verify with dropout 0"), (False, "a generator of its own")])
def test_a_loss_that_depends_on_the_rank_says_what_may_draw(cut, words):
    one, other = ({"main": [{"loss": (value, 2.0)}]} for value in (4.0, 5.0))
    alone = {"seen": RecordedWindow(micro_losses=one), "optimizers": {}, "names": {}, "losses": {"loss": 2.0}}
    result = compare(Normalised(), alone, (RecordedWindow(), {"loss": 2.5}), [(other, {})], [1], cut=cut)
    (finding,) = result["findings"]
    assert finding["code"] == "rank_draws"
    assert words in finding["text"]


@pytest.mark.parametrize(("rounding", "codes"), [(0.2, []), (0.04, ["rank_draws"])])
def test_a_loss_of_cut_layers_may_differ_by_what_other_roundings_of_products_do(rounding, codes):
    micro, other = ({"main": [{"loss": (value, 8.0)}]} for value in (40.0, 41.0))
    seen = RecordedWindow(micro_losses=micro, loss_magnitudes={"loss": rounding / sum_bound(1)})
    alone = {"seen": seen, "optimizers": {}, "names": {}, "losses": {"loss": 5.0}}
    result = compare(Normalised(), alone, (RecordedWindow(), {"loss": 5.125}), [(other, {})], [1], cut=True)
    assert [finding["code"] for finding in result["findings"]] == codes


def test_an_average_of_weights_that_differs_by_more_than_rounding_is_told():
    weight = torch.tensor([1.0, -2.0])
    ratios = []
    for factor in (1.0, 1 + 1e-4):
        windows = [RecordedWindow(averages={"net.w": weight * scale}) for scale in (1.0, factor)]
        alone = {"seen": windows[0], "optimizers": {}, "names": {}, "losses": {}}
        result = compare(Normalised(), alone, (windows[1], {}), [({}, {})], [1])
        ratios.append(result["differences"]["averages"]["of_bound"])
    assert ratios[0] == 0
    assert ratios[1] > 1


def test_a_loss_of_nothing_differs_by_nothing():
    micro = {"main": [{"loss": (0.0, 0.0)}]}
    alone = {"seen": RecordedWindow(micro_losses=micro), "optimizers": {}, "names": {}, "losses": {"loss": 0.0}}
    result = compare(Normalised(), alone, (RecordedWindow(), {"loss": 0.0}), [(micro, {})], [1])
    assert result["differences"]["loss"]["relative"] == 0.0


@pytest.mark.parametrize(
    ("names", "text"), [(["a", "b", "c"], "(a, b, c)"), (["a", "b", "c", "d"], "(a, b, c and 1 more)")]
)
def test_buffers_that_move_are_named_up_to_three(names, text):
    (finding,) = _moving_buffers(names)
    assert text in finding.text


def test_buffers_that_a_forward_moves_are_recorded_but_for_batch_statistics():
    train_state = build(Normalised(), torch.device("cpu"), Single())
    engine = RecordingEngine(Single())
    engine.watch(train_state)
    engine.begin()
    with engine.accumulating(train_state.nets, True):
        train_state.nets["net"](torch.randn(3, 4))
    assert list(engine.seen.moved) == ["net.2.calls"]


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0, 2), (3, 4), (3, 9), (-4, -3)])
def test_a_pinned_whole_number_lies_in_the_range_that_was_asked_for(low, high):
    with FixedDraws({}).watching() as draws:
        values = torch.randint(low, high, (5,))
    assert (values == values[0]).all()
    assert low <= values[0] < high
    assert list(draws.drawing) == ["randint in the loss"]
