"""The bytes of tensors at batch sizes that were not traced."""

from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from memfit.events import Trace
from memfit.script import batch_scan
from memfit.script.batch_scan import BatchScan, LargestBatch, different_events, fitted
from memfit.script.outcome import ScriptCommand, ScriptOutcome, TraceRequest
from memfit.show.script_table import largest_batch

SIZES = (2, 3, 5)


def trace_of(nbytes: list[int]) -> Trace:
    """Storages that are allocated one after another."""
    count = len(nbytes)
    numbers, zeros = np.arange(count, dtype=np.int32), np.zeros(count, np.int32)
    zero = np.zeros(1, np.int32)
    return Trace(
        kind=np.zeros(count, np.int8), storage=numbers, operator=zeros, nbytes=np.array(nbytes, np.int64),
        category=zeros.astype(np.uint8), stream=zeros.astype(np.uint8), made_by=zeros, operator_name=zero,
        operator_module=zero, operator_part=zero, operator_flops=zero.astype(np.int64),
        operator_bytes=zero.astype(np.int64), names=("aten::empty",), modules=("",), parts=("forward",),
        phases=(("train", 0, count),),
    )  # fmt: skip


def family(formula) -> list[Trace]:
    """Traces of three storages at each size."""
    return [trace_of([formula(size), 4 * size + 8, 16]) for size in SIZES]


@pytest.mark.parametrize(
    ("formula", "is_quadratic"),
    [(lambda n: 12 * n, False), (lambda n: 4 * n * n, True), (lambda n: 4 * n * n + 8 * n + 100, True)],
)
def test_bytes_follow_from_the_size_or_its_square(formula, is_quadratic: bool) -> None:
    growth = fitted(family(formula), SIZES)
    assert growth is not None
    assert growth.is_quadratic is is_quadratic
    for size in (1, 7, 64, 1001):
        assert growth.nbytes(size).tolist() == [formula(size), 4 * size + 8, 16]
        assert growth.holds_for(trace_of([formula(size), 4 * size + 8, 16]), size)
    assert not growth.holds_for(trace_of([formula(9) + 1, 44, 16]), 9)


@pytest.mark.parametrize("formula", [lambda n: n**3, lambda n: 2**n, lambda n: 100 - 3 * n * n, lambda n: (n + 1) // 2])
def test_other_growth_through_three_sizes_is_refused_or_left_to_the_check_at_a_fourth(formula) -> None:
    growth = fitted(family(formula), SIZES)
    assert growth is None or not growth.holds_for(trace_of([formula(11), 52, 16]), 11)


def test_other_events_at_another_size_are_named() -> None:
    traces = family(lambda n: n)
    assert different_events(traces, SIZES) == ""
    traces[2] = replace(traces[2], kind=np.append(traces[2].kind, 1), storage=np.append(traces[2].storage, 0))
    assert "a batch of 5 than with 2" in different_events(traces, SIZES)


def test_a_largest_batch_that_could_not_be_traced_says_why() -> None:
    ended = SimpleNamespace(footprint=None, windows=0, ended="the script ended")
    fits, nbytes, why = batch_scan._fits(cast(ScriptOutcome, ended))
    assert fits is nbytes is None
    largest = LargestBatch(batch=1824, card="rtx4090", verified=False, sizes=(2, 3, 5), reason=why)
    said = largest_batch(BatchScan(outcome=cast(ScriptOutcome, None), largest=largest))
    assert said == (
        "Largest batch on rtx4090: 1824 (computed; 0 complete steps ran at that size: the script ended)."
    )  # fmt: skip


def checked(monkeypatch: pytest.MonkeyPatch, fits, best: int, cores: int = 2) -> LargestBatch:
    """The largest batch after the computed one was traced, where sizes fit as ``fits`` says."""

    def traced(size: int) -> SimpleNamespace:
        phase = SimpleNamespace(process_bytes=100 * size)
        return SimpleNamespace(windows=2, footprint=SimpleNamespace(fits=fits(size), phases={"train": phase}))

    monkeypatch.setattr(batch_scan, "at_size", lambda request, size: size)
    monkeypatch.setattr(batch_scan, "at_once", lambda: cores)
    monkeypatch.setattr(batch_scan, "trace_script", traced)
    monkeypatch.setattr(batch_scan, "trace_scripts", lambda requests: [traced(size) for size in requests])
    grown = cast(batch_scan._Family, SimpleNamespace(share=lambda nbytes: 1000 / nbytes, process_bytes=lambda size: 0))

    def answer(batch, **named) -> BatchScan:
        verified = named.pop("verified", False)
        made = LargestBatch(
            batch=batch, card="t4", sizes=SIZES, process_bytes=named.pop("nbytes", None), verified=verified,
            **{"traced": verified} | named,
        )  # fmt: skip
        return BatchScan(outcome=cast(ScriptOutcome, None), largest=made)

    request = TraceRequest(command=ScriptCommand(target="train.py"), device="t4")
    return batch_scan._verified(request, best, grown, answer).largest


@pytest.mark.parametrize("best", [9, 10, 11, 13, 40])
@pytest.mark.parametrize("cores", [1, 2])
def test_a_computed_size_is_corrected_by_traces(monkeypatch: pytest.MonkeyPatch, best: int, cores: int) -> None:
    largest = checked(monkeypatch, lambda size: size <= 10, best, cores)
    assert (largest.batch, largest.verified) == (10, True)


def test_where_no_traced_size_fits_no_computed_one_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    largest = checked(monkeypatch, lambda size: False, 3)
    assert largest.batch is None
    assert largest.reason == "a batch of 1 does not fit"


def test_no_size_past_the_largest_that_is_tried_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_scan, "MOST", 16)
    largest = checked(monkeypatch, lambda size: True, 16)
    assert (largest.batch, largest.traced, largest.verified) == (16, True, False)
    said = largest_batch(BatchScan(outcome=cast(ScriptOutcome, None), largest=largest))
    assert said == "Largest batch on t4: 16 (traced at that size; larger ones were not tried)."
