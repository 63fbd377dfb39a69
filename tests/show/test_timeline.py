"""pytest tests/show/test_timeline.py: a trace reduced, by module, as a file and for Perfetto."""

import json
from dataclasses import replace

import numpy as np
import pytest

from memfit.device.hardware.catalogue import find_device, with_memory
from memfit.errors import InputError
from memfit.events import ALLOCATE, CATEGORIES, FREE, Trace
from memfit.geometry import shape_of
from memfit.loading import load_job
from memfit.planner.predict import footprint_on, predict
from memfit.planner.request import PlanRequest
from memfit.planner.search.search import find_plan
from memfit.show.module_totals import ELSEWHERE, module_totals
from memfit.show.perfetto import write_perfetto
from memfit.show.report import plan_report, prediction_report
from memfit.show.run_log import seen, shown_windows, whole_lines
from memfit.show.timeline import MOST, alive_by_category, place_of, timeline
from memfit.show.trace_file import read_trace, write_trace
from tests.cli.asking import ROOT

MIB = 1 << 20


@pytest.fixture(scope="module")
def prediction():
    spec = f"{ROOT}/testing/nets.py:Transformer"
    job = load_job(spec)
    return predict(job, spec, shape_of(job, 640), with_memory(find_device("rtx4090"), 2 << 30), micro_batches=2)


def random_trace(events: int, seed: int = 0) -> Trace:
    """A trace of ``events`` allocations and frees in random order, in five phases."""
    random = np.random.default_rng(seed)
    kind, storage, live = [], [], []
    made = 0
    for _ in range(events):
        if live and random.random() < 0.48:
            kind.append(FREE)
            storage.append(live.pop(int(random.integers(len(live)))))
        else:
            kind.append(ALLOCATE)
            storage.append(made)
            live.append(made)
            made += 1
    cuts = [0, *sorted(random.integers(1, events, 4).tolist()), events]
    names = ("setup", "train", "train", "validate", "save")
    phases = tuple((name, low, high) for name, low, high in zip(names, cuts[:-1], cuts[1:], strict=True))
    operators = events // 3 + 1
    return Trace(
        kind=np.array(kind, np.int8),
        storage=np.array(storage, np.int32),
        operator=(np.arange(events) // 3).astype(np.int32),
        nbytes=random.integers(1, 8 * MIB, made),
        category=random.integers(0, len(CATEGORIES), made).astype(np.uint8),
        stream=np.zeros(made, np.uint8),
        made_by=random.integers(0, operators, made).astype(np.int32),
        operator_name=random.integers(0, 9, operators).astype(np.int32),
        operator_module=random.integers(0, 40, operators).astype(np.int32),
        operator_part=(np.arange(operators) * 9 // operators).astype(np.int32),
        operator_flops=np.zeros(operators, np.int64),
        operator_bytes=np.zeros(operators, np.int64),
        names=tuple(f"aten.op{i}" for i in range(9)),
        modules=("", *(f"net.{i // 8}.{i}" for i in range(39))),
        parts=tuple(f"part{i}" for i in range(9)),
        phases=phases,
    )


@pytest.mark.parametrize(
    "device", [find_device("a100-80gb"), with_memory(find_device("cpu"), 1 << 40)], ids=["cuda", "cpu"]
)
def test_few_moments_keep_every_maximum_exactly(device) -> None:
    trace = random_trace(20_000)
    line = timeline(trace, device)
    assert len(line.events) <= MOST
    assert (np.diff(line.events) > 0).all()
    alive = alive_by_category(trace)
    assert np.array_equal(line.alive, alive[:, line.events])
    for _, start, end in trace.phases:
        inside = (line.events >= start) & (line.events < end)
        assert line.total[inside].max() == alive[:, start:end].sum(0).max()
        assert np.array_equal(line.alive[:, inside].max(1), alive[:, start:end].max(1))
    assert line.spans[0].start == 0
    assert all(item.end == two.start for item, two in zip(line.spans[:-1], line.spans[1:], strict=True))
    assert {span.peak_event for span in line.spans} <= set(line.events.tolist())


def test_what_the_allocator_holds_is_the_replays_peak(prediction) -> None:
    line = timeline(prediction.trace, prediction.device)
    assert line.held.max() == max(phase.reserved_bytes for phase in prediction.footprint.phases.values())
    assert line.failed is None


def test_the_failed_request_is_the_replays(prediction) -> None:
    worst = prediction.footprint.phases["train"]
    device = with_memory(find_device("rtx4090"), worst.process_bytes - 8 * MIB)
    footprint = footprint_on(prediction.trace, device)
    line = timeline(prediction.trace, device)
    assert footprint.failed_request is not None
    assert line.failed in line.events
    assert place_of(prediction.trace, line.failed) == (
        footprint.failed_request.module,
        footprint.failed_request.operator,
    )


def test_rows_by_module_sum_to_all_that_is_alive() -> None:
    trace = random_trace(5000)
    alive = alive_by_category(trace)
    for event in (17, int(alive.sum(0).argmax()), 4999):
        rows = module_totals(trace, event)
        assert sum(row.total for row in rows) == alive[:, event].sum()
        for code, category in enumerate(CATEGORIES):
            assert sum(row.categories.get(category, 0) for row in rows) == alive[code, event]
        assert len(rows) <= 24


def test_parameters_go_to_their_modules_where_they_add_up(prediction) -> None:
    trace, event = prediction.trace, int(alive_by_category(prediction.trace).sum(0).argmax())
    held = int(alive_by_category(trace)[CATEGORIES.index("parameters"), event])
    right = module_totals(trace, event, {"dit.into": {"parameters": held - 100}, "dit.out": {"parameters": 100}})
    assert {row.module: row.categories["parameters"] for row in right if "parameters" in row.categories} == {
        "dit.into": held - 100,
        "dit.out": 100,
    }
    wrong = module_totals(trace, event, {"dit.into": {"parameters": held - 1}})
    assert {row.module: row.categories["parameters"] for row in wrong if "parameters" in row.categories} == {
        ELSEWHERE: held
    }
    page = prediction_report(prediction)
    table = next(section for section in page.sections if section.title.startswith("By module")).tables[0]
    column = table.columns.index("parameters")
    assert next(row for row in table.rows if row[0] == ELSEWHERE)[column] == "–", "the job's own parameters add up"


def test_a_trace_file_gives_the_prediction_back(prediction, tmp_path) -> None:
    write_trace(tmp_path / "t.npz", prediction)
    back = read_trace(tmp_path / "t.npz")
    assert replace(back, trace=prediction.trace) == prediction
    of_this_card = replace(prediction.trace, operator_card_call=None, card_calls=())
    for name in Trace.__dataclass_fields__:
        first, two = getattr(of_this_card, name), getattr(back.trace, name)
        assert (
            np.array_equal(first, two) and first.dtype == two.dtype if isinstance(first, np.ndarray) else first == two
        )


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04nonsense", b"text"])
def test_what_is_no_trace_file_is_one_line(tmp_path, content) -> None:
    (tmp_path / "t.npz").write_bytes(content)
    with pytest.raises(InputError, match="trace "):
        read_trace(tmp_path / "t.npz")


def test_a_pickle_in_a_trace_file_is_not_opened(tmp_path) -> None:
    np.savez(tmp_path / "t.npz", told=np.array([{"memfit_trace": 2}], dtype=object))
    with pytest.raises(InputError, match="not a trace of memfit"):
        read_trace(tmp_path / "t.npz")


def test_perfetto_counts_the_same_bytes(prediction, tmp_path) -> None:
    write_perfetto(tmp_path / "t.json", prediction.trace, "dit")
    entries = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    alive = alive_by_category(prediction.trace)
    counters = [entry for entry in entries if entry["ph"] == "C"]
    for name, values in (("allocated", alive.sum(0)), *zip(CATEGORIES, alive, strict=True)):
        collected = [(entry["ts"], entry["args"]["bytes"]) for entry in counters if entry["name"] == name]
        assert all(values[event] == nbytes for event, nbytes in collected)
        assert max((nbytes for _, nbytes in collected), default=0) == values.max()
    slices = [entry for entry in entries if entry["ph"] == "X"]
    assert [entry["name"] for entry in slices if entry["tid"] == 1] == ["setup", "window 1", "window 2", "validate"]
    operators = [entry for entry in slices if entry["tid"] == 3]
    assert sum(entry["dur"] for entry in operators) == len(prediction.trace.kind)
    event = operators[len(operators) // 2]["ts"]
    assert (operators[len(operators) // 2]["args"]["module"], operators[len(operators) // 2]["name"]) == place_of(
        prediction.trace, event
    )


def test_lines_that_were_cut_off_and_ids_of_ranks(tmp_path) -> None:
    (tmp_path / "s.jsonl").write_text(
        '{"window": 0, "rank": 0, "ids": [0, 1]}\n{"window": 0, "rank": 1, "ids": [2, 2]}\n{"window": 1, "ra'
    )
    lines = whole_lines(tmp_path / "s.jsonl")
    assert len(lines) == 2
    picture, ranks = seen(lines)
    assert picture.share.tolist() == [[1, 1, 0], [0, 0, 1]]
    assert picture.together.tolist() == [1, 1, 1]
    assert [(rank.samples, rank.distinct, rank.most) for rank in ranks] == [(2, 2, 1), (2, 1, 2)]
    assert seen([]) is None
    far, (item,) = seen([{"window": 0, "rank": 0, "ids": [5, (1 << 39) + 1]}])
    assert (far.size, item.distinct) == ((1 << 39) + 2, 2), "ids that lie far apart take no memory for those between"
    assert whole_lines(tmp_path / "none.jsonl") == []


def test_the_extremes_of_many_windows_are_shown() -> None:
    lines = [{"window": i, "a": i % 997, "b": float("nan") if i % 2 else 1.0} for i in range(10_000)]
    shown = shown_windows(lines, ("a", "b"), 100)
    assert len(shown) <= 102
    assert max(line["a"] for line in shown) == 996
    assert (shown[0]["window"], shown[-1]["window"]) == (0, 9999)


def test_a_plan_that_is_out_of_date_says_so(tmp_path) -> None:
    spec = f"{ROOT}/testing/nets.py:Transformer"
    plan = find_plan(
        load_job(spec), PlanRequest(name=spec, global_batch=256, device=with_memory(find_device("cpu"), 1 << 30))
    ).plan
    assert plan is not None
    assert plan_report(plan).notes == []
    plan.phases["train"]["allocated_bytes"] *= 2
    (note,) = plan_report(plan).notes
    assert note.startswith("Traced again, the peak of train is ")
