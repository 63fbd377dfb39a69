"""No checkpoint holds a number that is not finite, unless the job says so."""

import warnings

import pytest
import torch

from memfit.apply.train_state import build
from memfit.loading import load_job
from memfit.train.loop.finite import NotFiniteError, check_state, is_finite, not_finite_buffers
from memfit.train.recovery.memory_growth import FEW, MemoryGrowth, largest_holder
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
        grown = readings(values).steady(FEW)
        assert grown.bytes == 10 * (grown.last - grown.first)
    assert readings([100, 110, 120, 130, 140]).steady(FEW) is None
    assert readings([100, 110, 120, 130, 130, 150]).steady(FEW) is None
    assert readings([100, 110, 120, 130, 200, 150]).steady(FEW) is None


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
