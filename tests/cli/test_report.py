"""pytest tests/cli/test_report.py: what the command line writes for reports, Perfetto and memory_viz."""

import json
import pickle
from pathlib import Path

import pytest

from memfit.cli import main

JOB = f"{Path(__file__).parents[2]}/testing/nets.py:Transformer"


def left_with(*arguments: str) -> int:
    with pytest.raises(SystemExit) as left:
        main(list(arguments))
    return int(str(left.value.code))


@pytest.mark.parametrize("arguments", [["--compare", "a"], ["a", "b"], ["--compare", ".", "plan.toml"], ["."]])
def test_bad_input_is_one_line(arguments, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert left_with("report", *arguments) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_predict_writes_traces_and_a_snapshot_under_the_cards_memory(tmp_path, capsys) -> None:
    predict = ["predict", JOB, "--micro-batch", "640", "--device", "rtx4090", "--memory", "450MiB", "--json"]
    files = [tmp_path / name for name in ("t.json", "t.npz", "s.pickle")]
    assert left_with(*predict, "--trace", str(files[0]), "--snapshot", str(files[2])) == 3
    answer = json.loads(capsys.readouterr().out)
    assert answer["failed_request"]
    assert json.loads(files[0].read_text())["traceEvents"]
    (entries,) = pickle.loads(files[2].read_bytes())["device_traces"]
    assert (entries[-1]["action"], entries[-1]["size"]) == ("oom", answer["failed_request"]["bytes"])
    assert left_with(*predict, "--trace", str(files[1])) == 3
    capsys.readouterr()
    assert left_with("report", str(files[1]), "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result == {
        "report": str(tmp_path / "t.html"),
        "verdict": result["verdict"],
        "bytes": (tmp_path / "t.html").stat().st_size,
    }
    assert answer["failed_request"]["phase"] in result["verdict"]


def test_another_ending_of_a_trace_is_one_line(tmp_path, capsys) -> None:
    assert left_with("predict", JOB, "--device", "rtx4090", "--trace", str(tmp_path / "t.txt")) == 2
    assert "neither .json nor .npz" in capsys.readouterr().err


def test_a_plan_whose_job_is_gone_still_has_its_report(tmp_path, capsys) -> None:
    (tmp_path / "job.py").write_text(Path(JOB.partition(":")[0]).read_text())
    plan = ["plan", f"{tmp_path}/job.py:Transformer", "--global-batch", "256", "--device", "cpu", "--memory", "1GiB"]
    assert left_with(*plan, "--micro-batch", "256", "--out", str(tmp_path / "plan.toml")) == 0
    (tmp_path / "job.py").unlink()
    assert left_with("report", str(tmp_path / "plan.toml")) == 0
    page = (tmp_path / "plan.html").read_text()
    assert "could not be traced" in page
    assert "256 = 1 x 256 on 1 device" in page
