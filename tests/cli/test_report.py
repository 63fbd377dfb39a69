"""pytest tests/cli/test_report.py: what the command line writes for reports, Perfetto and memory_viz."""

import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from memfit.cli import main
from memfit.show.report import run_report
from memfit.train.launch.process_guard import alone_in

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


HOLDS = """
import sys, time
from pathlib import Path
from memfit.train.launch.process_guard import alone_in
with alone_in(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def run(tmp_path) -> Path:
    """A run's folder with two windows."""
    folder = tmp_path / "run"
    (folder / "checkpoints").mkdir(parents=True)
    plan = ["plan", JOB, "--global-batch", "256", "--device", "cpu", "--memory", "1GiB", "--micro-batch", "256"]
    assert left_with(*plan, "--out", str(folder / "plan.toml")) == 0
    lines = ({"window": window, "loss": 1.0, "measured_process_bytes": 1 << 20} for window in range(2))
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return folder


@pytest.mark.parametrize("held", [".", "checkpoints"])
def test_a_run_whose_process_lives_is_running_and_one_whose_process_was_killed_is_not(run, held) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLDS, str(run / held)], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"held\n"
            page = run_report(run, trace=False)
            assert page.verdict == "Running: 2 windows so far, loss 1 to 1; peak 1.0 MiB of 1.00 GiB"
            assert "--resume" not in page.advice
        finally:
            process.kill()
    page = run_report(run, trace=False)
    assert page.verdict.startswith("Not finished: stopped after 2 windows")
    assert "--resume" in page.advice


def test_a_run_that_was_done_and_is_continued_is_running(run) -> None:
    (run / "final").mkdir()
    (run / "final" / "net.safetensors").touch()
    assert run_report(run, trace=False).verdict.startswith("Done: 2 windows")
    with alone_in(run):
        assert run_report(run, trace=False).verdict.startswith("Running: 2 windows so far")
        assert run_report(run, trace=False, ended=True).verdict.startswith("Done: 2 windows")
        (run / "metrics.jsonl").unlink()
        assert run_report(run, trace=False).verdict == "Running: no window is finished yet"
