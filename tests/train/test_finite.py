"""No checkpoint holds a number that is not finite, unless the job says so."""

import warnings

import pytest
import torch

from memfit.apply.train_state import build
from memfit.loading import load_job
from memfit.train.loop.finite import NotFiniteError, check_state, is_finite, not_finite_buffers
from memfit.train.recovery.memory_growth import MemoryGrowth, largest_holder
from testing.faulty_jobs import Gan, Noisy

INFINITE = torch.tensor(float("inf"))


class Masked(Noisy):
    def nets(self):
        nets = super().nets()
        nets["net"].register_buffer("mask", torch.full((3, 3), float("-inf")).triu(1))
        return nets


class Allowed(Masked):
    allows_not_finite = True


def test_a_mask_of_minus_infinity_is_no_fault_and_a_weight_is():
    train_state = build(Masked(), "cpu")
    allowed = not_finite_buffers(train_state)
    assert allowed == {"buffer net.mask"}
    check_state(train_state, 3, allowed)
    with torch.no_grad():
        train_state.nets["net"][1].bias[0] = float("nan")
    with pytest.raises(NotFiniteError, match=r"window 3: parameter net\.1\.bias: .*no checkpoint is written"):
        check_state(train_state, 3, allowed)


def test_an_optimizers_state_an_average_and_running_statistics_are_looked_at():
    for spoil, words in (
        (lambda state: state.optimizers["judge"].state.update({first(state): {"m": INFINITE}}), "m of judge"),
        (lambda state: state.ema["maker"][0].weight.data.fill_(float("nan")), "the average of maker.0.weight"),
        (lambda state: state.nets["maker"][1].running_var.fill_(float("inf")), "buffer maker.1.running_var"),
    ):  # fmt: skip
        train_state = build(Gan(), "cpu")
        spoil(train_state)
        with pytest.raises(NotFiniteError, match=words):
            check_state(train_state, 0, frozenset())


def first(train_state):
    return next(train_state.nets["judge"].parameters())


def test_a_job_can_allow_it():
    train_state = build(Allowed(), "cpu")
    check_state(train_state, 0, frozenset())


def test_formats_without_infinity_count_as_finite():
    assert is_finite(torch.tensor([1, 2]))
    assert is_finite(torch.empty(0))
    assert is_finite(torch.zeros(4, dtype=torch.float8_e4m3fn))
    assert not is_finite(torch.tensor([0.0, float("nan")], dtype=torch.bfloat16))


def readings(values):
    growth = MemoryGrowth()
    for window, held in enumerate(values):
        if growth.wants(window):
            growth.note(window, held)
    return growth


def test_growth_is_steady_or_none():
    grown = readings([100] * 3 + [100 + 10 * i for i in range(1000)]).steady()
    assert grown.bytes / (grown.last - grown.first) == pytest.approx(10)
    assert readings([100 + 10 * i for i in range(8)]).steady() is None
    assert readings([min(100 + 10 * i, 400) for i in range(1000)]).steady() is None
    assert readings([100] * 1000).steady() is None
    assert len(readings(range(100_000))._readings) <= 64


def test_few_readings_show_a_fast_growth_where_memory_has_run_out():
    assert readings([100, 110, 120, 130, 140, 150]).steady() is None
    for values in ([100, 110, 120, 130, 140, 150], range(100, 180, 10), range(100, 170, 10)):
        grown = readings(values).latest(0)
        assert grown.bytes == 10 * (grown.last - grown.first)
    assert readings([100, 110, 120, 130, 140]).latest(0) is None
    assert readings([100, 110, 120, 130, 130, 150]).latest(0) is None
    assert readings([100, 110, 120, 130, 200, 150]).latest(0) is None


@pytest.mark.parametrize(
    "held",
    [
        # MiB at the beginning of windows 3 to 39 of a job that keeps 2 MiB a window in tensors of 39 and 16 KiB
        [
            *(16.6, 22.9, 26.9, 31.8, 35.2, 47.4, 51.5, 55.0, 56.2, 58.3, 60.1, 62.1, 64.2, 66.2, 68.2, 70.3, 72.3),
            *(74.3, 60.2, 62.2, 64.2, 66.2, 68.3, 70.3, 72.3, 74.4, 76.4, 78.4, 80.5, 82.5, 84.5, 86.6, 88.6, 90.6),
            *(92.7, 94.7, 96.7),
        ],
        [
            *(12.7, 23.3, 27.9, 56.0, *[56.5] * 14, 57.2, 59.2, 61.3, 63.3, 65.3, 67.3, 69.3, 71.3, 73.4, 75.4, 77.4),
            *(79.4, 81.4, 83.4, 85.5, 87.5, 89.6, 91.6, 93.6),
        ],
        [  # its buffers were given back eight windows before the end, and three
            *(15.4, 23.9, 28.4, 37.6, 41.5, 50.1, 54.6, 56.9, 58.8, 61.1, 63.1, 65.3, 67.3, 69.5, 71.6, 73.7, 75.9),
            *(78.0, 63.4, 65.5, 67.6, 69.8, 71.9, 74.0, 76.1, 78.3),
        ],
        [15.4, 20.6, 26.0, 31.4, 36.7, 42.1, 47.5, 52.9, 58.3, 63.7, 53.7, 59.1, 64.5],
    ],
)
def test_buffers_that_are_made_or_given_back_once_do_not_hide_a_growth(held):
    growth = readings([0, 0, 0, *(round(value * 10) for value in held)])
    assert growth.steady() is None
    assert growth.latest(100).end == round(held[-1] * 10)
    assert growth.latest(100).bytes >= 100
    assert growth.latest(1000) is None


def test_windows_of_one_micro_batch_do_not_hide_a_growth():
    """MiB at the beginning of windows 3 to 10 of a job that keeps 4 MiB of each micro-batch: one in some windows, three
    in the others. The first quarter of the readings is one window, the others are two."""
    held = (52.4, 56.4, 68.4, 80.5, 92.5, 96.5, 108.5, 120.5)
    growth = readings([0, 0, 0, *(round(value * 10) for value in held)]).latest(128)
    assert (growth.first, growth.last, growth.bytes) == (3, 10, 681)


def test_memory_that_no_longer_grows_is_not_blamed():
    assert readings([100] * 3 + [100 + 10 * i for i in range(20)] + [300] * 20).latest(1) is None
    assert readings([100] * 3 + [100, 200, 150, 120, 180, 110, 190] * 6).latest(1) is None


def test_the_holder_of_most_bytes_is_named():
    train_state = build(Noisy(), "cpu")
    samples = train_state.job.dataset()
    train_state.job.__dict__["small"] = [torch.zeros(10)]
    train_state.job.__dict__["history"] = {"losses": [torch.zeros(1 << 16) for _ in range(4)]}
    assert largest_holder(train_state, samples).startswith("Noisy.history holds 4 tensors, 1.0 MiB")


def test_a_holder_in_the_jobs_file_is_named_as_the_file_is(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "import torch\nfrom testing.faulty_jobs import Noisy\nclass Mine(Noisy): ...\nKEPT = [torch.zeros(1 << 16)]\n"
    )
    train_state = build(load_job(f"{file}:Mine"), "cpu")
    assert largest_holder(train_state, []).startswith("mine.KEPT holds 1 tensors, 256 KiB")


class Deprecated:
    """As ``torch.distributed.reduce_op``: it warns when it is looked at."""

    @property
    def __class__(self):
        warnings.warn("deprecated", FutureWarning, stacklevel=2)
        return Deprecated


def test_the_search_for_the_holder_warns_of_nothing():
    train_state = build(Noisy(), "cpu")
    train_state.job.__dict__["history"] = [Deprecated(), torch.zeros(1 << 16)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert largest_holder(train_state, []).startswith("Noisy.history holds 1 tensors")
