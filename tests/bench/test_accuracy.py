"""python -m pytest tests/bench/test_accuracy.py

Nets of timm are traced where the benchmark's own timm and the measured table are there; the tests of those say so.
"""

import csv
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from bench import accuracy
from bench.accuracy_parts import fitting
from bench.accuracy_parts.gpumemnet import Predicted, predict
from bench.accuracy_parts.ladder import RUNGS, rungs
from bench.accuracy_parts.statistics import context_of, regular, shortest_interval, summary, weighted_median
from bench.accuracy_parts.table import MIB, Run, is_fitting_half, models_in_order, read_table
from bench.accuracy_parts.timm_job import VERSION, timm_folder
from bench.accuracy_parts.traces import trace_sources
from bench.result_file import read_result
from memfit.errors import InputError

ROOT = Path(accuracy.__file__).parents[1]


@pytest.fixture(scope="module")
def timm():
    if not (timm_folder() / f"timm-{VERSION}.dist-info").exists():
        pytest.skip(f"timm {VERSION} is not in {timm_folder()}: bench/accuracy.py puts it there")


@pytest.fixture(scope="module")
def table():
    if not accuracy.PUBLIC.exists():
        pytest.skip(f"{accuracy.PUBLIC} is not there")
    return read_table(accuracy.PUBLIC)


def run(measured, naive, model="net", batch=8):
    return Run(model=model, batch=batch, measured_mib=measured, naive_mib=naive)


def predicted(measured, process_mib, *, low=0, high=1 << 20, fits=True, naive=100, verdict="yes", need=0):
    return Predicted(
        run=run(measured, naive), net_kind="attention, float32", process_bytes=process_mib * MIB, low=low * MIB,
        high=high * MIB, need=(need or process_mib) * MIB, fits=fits, verdict=verdict,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("measured", "naive", "label"),
    [
        (5000, 3000, "ran"), (4499, 3000, "crashed"), (4500, 3000, "ran"), (26_000, 25_001, "does not fit"),
        (26_000, 25_000, "crashed"), (39_000, 10_000, "ran"), (39_001, 10_000, "ambiguous"),
        (39_500, 39_000, "does not fit"),
    ],
)  # fmt: skip
def test_labels_follow_from_the_table_alone(measured, naive, label):
    assert run(measured, naive).label == label


def test_the_halves_have_no_model_in_common_and_an_order_has_every_model_once():
    runs = [run(1, 1, model=f"net{i}", batch=batch) for i in range(400) for batch in (8, 16)]
    fitted = {item.model for item in fitting.half(runs)}
    assert 160 < len(fitted) < 240
    assert all(is_fitting_half(name) == (name in fitted) for name in models_in_order(runs))
    assert sorted(models_in_order(runs)) == sorted({item.model for item in runs})


def test_statistics_of_a_few_runs():
    rows = [
        predicted(2000, 2020, low=1800, high=2010),
        predicted(4000, 3200, low=3400, high=3800),
        predicted(8000, 8800),
        predicted(20_000, 30_000, naive=26_000, fits=False, verdict="no", need=60_000),
        predicted(39_500, 100),
    ]
    figures = summary(rows, 40_000 * MIB)
    assert figures["runs"] == 3
    assert figures["median"] == pytest.approx(0.1)
    assert figures["mean"] == pytest.approx((0.01 + 0.2 + 0.1) / 3)
    assert figures["worst_under"] == pytest.approx(0.2)
    assert figures["worst_over"] == pytest.approx(0.1)
    assert figures["within_5_percent"] == pytest.approx(1 / 3)
    assert figures["fits_right"] == 1.0
    assert figures["coverage"] == pytest.approx(2 / 3)


def test_the_constant_is_the_one_of_least_relative_error():
    rows = [predicted(3000, 2000), predicted(3100, 2200), predicted(9000, 2000)]
    assert context_of(rows, 500 * MIB) == 1500 * MIB  # reserved 1500, 1700, 1500; the last weighs a third
    assert weighted_median(np.array([1.0, 2.0, 3.0]), np.array([1.0, 1.0, 3.0])) == 3.0


def test_a_margin_is_the_shortest_interval_that_holds_its_part():
    errors = [*np.linspace(-0.01, 0.02, 99), 0.8]
    assert shortest_interval(errors) == pytest.approx((-0.01, 0.02), abs=1e-3)
    assert shortest_interval([0.0, 1.0]) == (0.0, 1.0)


def test_a_table_without_a_column_is_refused_with_a_line_to_write(tmp_path):
    path = tmp_path / "runs.csv"
    path.write_text("model,batch,measured_mib\nnet,8,1\n")
    with pytest.raises(InputError, match="naive_faketensor_mib"):
        read_table(path)
    with pytest.raises(InputError, match="no such file"):
        read_table(tmp_path / "other.csv")


def test_what_is_committed_was_reached_on_the_half_that_nothing_was_fitted_on():
    kept = read_result("accuracy")
    gpumemnet = kept["gpumemnet"]
    assert gpumemnet["models"] >= 60
    assert gpumemnet["median"] <= 0.015
    assert gpumemnet["within_5_percent"] >= 0.85
    ran = [row for row in kept["rows"] if row[2] == "ran" and not is_fitting_half(row[0])]
    assert len(ran) == gpumemnet["runs"]
    errors = sorted(abs(row[4] / row[3] - 1) for row in ran)
    assert errors[len(errors) // 2] == pytest.approx(gpumemnet["median"], abs=5e-4)
    assert [row["rule"] for row in kept["ladder"]["rungs"]] == list(RUNGS)
    assert kept["context_mib"] == fitting.context_bytes() // MIB


@pytest.mark.parametrize("model", ["vit_small_patch16_224", "hardcorenas_c"])
def test_a_net_of_timm_is_near_its_measured_runs(model, timm, table):
    from bench.accuracy_parts.traces import trace_net
    from memfit.job import Shape
    from memfit.trace.step import Tracing, trace_job

    runs = [run for run in table if run.model == model]
    traced = trace_net(model, [run.batch for run in runs])
    assert traced.derives
    for run in runs:
        prediction = predict(run, traced.at(run.batch), fitting.context_bytes())
        assert run.label == "ran"
        assert prediction.fits
        assert prediction.error == pytest.approx(0, abs=0.03)
    rows = dict(zip(RUNGS, rungs(runs[0], traced.at(8)), strict=True))
    assert rows["+ prefetcher's stream"] > rows["+ cache emptied by plan searches"]
    from bench.accuracy_parts.timm_job import Timm
    from memfit.device.hardware.catalogue import find_device

    direct = trace_job(Timm(model=model), Shape(items=20), Tracing(device=find_device("a100-40gb")))
    assert np.array_equal(direct.nbytes, traced.at(20).nbytes)
    assert set(direct.stream.tolist()) == {0, 1}


def test_any_table_with_these_columns_is_answered_and_a_net_that_fails_is_named(timm, tmp_path):
    data, out = tmp_path / "runs.csv", tmp_path / "out.json"
    with data.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["model", "batch", "measured_mib", "naive_faketensor_mib"])
        rows.writerows([["resnet10t", 4, 2100, 100], ["resnet10t", 1, 2000, 80], ["resnet_of_nobody", 8, 3000, 100]])
    command = [sys.executable, ROOT / "bench" / "accuracy.py", "--data", data, "--out", out, "--workers", "0"]
    again = [*command, "--cache", tmp_path / "cache"]
    done = subprocess.run(again, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    answer = json.loads(out.read_text())
    wanted = {"runs", "median", "mean", "p95", "worst_under", "fits_right", "coverage"}
    assert wanted <= answer["gpumemnet"].keys()
    assert answer["gpumemnet"]["runs"] == 2
    assert list(answer["not_traced"]) == ["resnet_of_nobody"]
    assert {row[1] for row in answer["rows"]} == {1, 4}
    assert (tmp_path / "cache" / "resnet10t.npz").exists()
    assert subprocess.run([*command, "--data", tmp_path / "no.csv"], capture_output=True, check=False).returncode == 2


def test_the_stand_in_for_torchvision_does_not_stay(timm):
    from bench.accuracy_parts.timm_job import import_timm

    assert import_timm().__version__ == VERSION
    assert not [name for name in sys.modules if name.split(".")[0] == "torchvision"]


def test_models_with_a_reading_far_above_their_line_show_trials_of_cudnn():
    line = [run(2000 + 100 * batch, 10, batch=batch) for batch in (8, 16, 32, 64, 128)]
    assert regular(line) == line
    assert regular([run(19_000, 10, batch=8), *line[1:]]) == []  # falls
    assert regular([*line[:4], run(19_000, 10, batch=128)]) == []  # above the line
    assert regular(line[:2]) == []  # two readings cannot tell
    other = [run(3000 + 50 * batch, 10, model="other", batch=batch) for batch in (8, 16, 32)]
    assert regular([run(19_000, 10, batch=8), *line[1:], *other]) == other


def test_kept_traces_depend_on_every_file_of_the_virtual_gpu():
    names = {f"{path.parent.name}/{path.name}" for path in trace_sources()}
    assert {"virtual/workspace.py", "virtual/attention.py", "hardware/catalogue.py", "trace/tracer.py"} <= names
    assert "accuracy_parts/timm_job.py" in names
