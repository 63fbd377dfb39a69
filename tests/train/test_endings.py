"""A run is done only when its windows, checkpoint and weights are there; whatever else ends it says so, and it goes on.

python -m pytest tests/train/test_endings.py
"""

import json
import re
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest

from memfit.device.hardware.catalogue import with_memory
from memfit.device.hardware.local_devices import local_cpu
from memfit.errors import Exit
from memfit.loading import load_job
from memfit.plan import read_plan, write_plan
from memfit.planner.request import PlanRequest
from memfit.planner.search.search import find_plan
from memfit.train.checkpoint.checkpoints import Checkpoints, read_checkpoint
from memfit.train.launch.launch import judged
from memfit.train.launch.outcome import read_outcome
from memfit.train.launch.supervisor import Supervisor
from memfit.train.run_folder import RunFolder
from testing.kill_and_resume import new_run, same_end, server
from tests.train.test_reduced_limits import PLAN

JOB = f"{Path(__file__).parent}/ending_job.py:Ending"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """(a server, a folder with a plan and a run to its end)."""
    folder = tmp_path_factory.mktemp("endings")
    plan = find_plan(
        load_job(JOB),
        PlanRequest(name=JOB, global_batch=10, device=with_memory(local_cpu(), 64 << 20), micro_batch=5),
    ).plan
    write_plan(plan, folder / "plan.toml")
    with server() as processes:
        ended = processes.run(new_run(folder / "undisturbed", folder / "plan.toml"), resume=False)
        assert ended["code"] == 0, (folder / "undisturbed" / "log.txt").read_text()
        yield processes, folder


def start(undisturbed, tmp_path, place, how, budget=None, settings=MappingProxyType({}), **options):
    """(the exit code as ``memfit run`` gives it, the run's folder, what was said)."""
    processes, folder = undisturbed
    run = new_run(tmp_path / "run", folder / "plan.toml")
    (run / "mark").touch()
    (run / "wait").touch()
    plan = read_plan(run / "plan.toml")
    settings = {**plan.settings, **settings, "place": place, "how": how, "mark": str(run / "mark")}
    write_plan(replace(plan, settings=settings, budget_bytes=budget or plan.budget_bytes), run / "plan.toml")
    code = processes.run(run, resume=False, **options)["code"]
    launched = judged(RunFolder(run), code, Supervisor())
    return launched.code, run, (run / "log.txt").read_text() + launched.line


def goes_on(undisturbed, run):
    """Resumes without what disturbed it: the end is that of the undisturbed run, bit for bit."""
    processes, folder = undisturbed
    (run / "mark").unlink()
    for left in run.glob(".ended-*"):
        left.unlink()
    assert processes.run(run, resume=True)["code"] == 0, (run / "log.txt").read_text()
    assert judged(RunFolder(run), 0, Supervisor()).code == Exit.DONE
    same_end(run, folder / "undisturbed")


@pytest.mark.parametrize("place", ["dataset", "collate", "loss", "validate"])
@pytest.mark.parametrize(
    ("how", "code", "words"),
    [
        ("exit", Exit.BAD_INPUT, "in at(): it called sys.exit(None), which ends the training before its last window"),
        ("_exit", Exit.STOPPED, "ended by itself with exit code 0"),  # the training, or a worker that reads its data
        ("interrupt", Exit.BAD_INPUT, "in at(): it raised KeyboardInterrupt"),
        ("leave", Exit.BAD_INPUT, "in at(): it raised LeftError, which ends the training before its last window"),
    ],
)
def test_code_of_a_job_that_ends_the_process_is_not_done(undisturbed, tmp_path, place, how, code, words):
    ended, run, said = start(undisturbed, tmp_path, place, how)
    assert (ended, words in said) == (code, True), said
    assert "Traceback" not in said
    assert "--resume" in said
    goes_on(undisturbed, run)


@pytest.mark.parametrize("place", ["collate", "loss", "validate"])
def test_a_crash_in_native_code_is_named_with_the_line_that_called_it(undisturbed, tmp_path, place):
    code, run, said = start(undisturbed, tmp_path, place, "crash")
    assert code == Exit.STOPPED, said
    crash = run / "stacks" / "crash-0.txt"
    at = r"ending_job\.py:\d+ in at\(\)"
    assert re.search(
        rf"killed by signal 11 \(SIGSEGV\), a crash in native code that \S*{at} called \(stacks: ", said
    ), said
    assert f"(stacks: {crash}); go on with: " in said
    assert f"in {place}" in crash.read_text()
    goes_on(undisturbed, run)
    assert not crash.exists()


def test_ranks_that_torchrun_had_to_kill_were_not_stopped_before_the_first_window(tmp_path):
    folder, supervisor = RunFolder(tmp_path), Supervisor()
    supervisor.signalled = 1.0
    assert judged(folder, Exit.STOPPED, supervisor).line.startswith("stopped before the first window; go on with")
    folder.write_window_range(0, 4)
    launched = judged(folder, Exit.STOPPED, supervisor)
    assert launched.code == Exit.STOPPED
    assert launched.line.startswith("the run did not end after it was told to stop, and was killed; go on with")


def test_done_means_that_lines_checkpoint_and_weights_are_there(undisturbed, tmp_path):
    result = undisturbed[1] / "undisturbed"
    assert read_outcome(result).windows == 6
    assert judged(RunFolder(result), 0, Supervisor()).code == Exit.DONE
    for number, (change, words) in enumerate([
        (lambda run: (run / "final" / "net.safetensors").unlink(), "the final weights"),
        (lambda run: shutil.rmtree(run / "checkpoints" / "00000006"), "the final checkpoint"),
        (lambda run: cut(run / "metrics.jsonl"), "the last line of metrics.jsonl is of window 4"),
    ]):  # fmt: skip
        run = shutil.copytree(result, tmp_path / str(number))
        change(run)
        launched = judged(RunFolder(run), 0, Supervisor())
        assert launched.code == Exit.STOPPED
        assert launched.line.startswith(f"the run is not done: {words}")


def cut(path):
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))


def test_a_data_set_that_hangs_ends_the_run_after_its_patience(undisturbed, tmp_path):
    code, run, said = start(undisturbed, tmp_path, "dataset", "hang", more={"patience": 4.0})
    assert code == Exit.STOPPED
    assert re.search(r"the run has made no progress for [4-9] s in fetch of window \d, at ", said), said
    assert "tests/train/ending_job.py" in said
    assert "in at()" in said
    stacks = (run / "stacks" / "rank-0.txt").read_text()
    assert "Thread MainThread" in stacks
    assert "time.sleep(3600)" in stacks
    goes_on(undisturbed, run)


@pytest.mark.parametrize("place", ["dataset", "loss", "validate"])
def test_a_signal_ends_a_run_that_hangs(undisturbed, tmp_path, place):
    """The signal comes once the call hangs; validation is abandoned, the rest ended by the watchdog."""
    stop = {"folder": str(tmp_path / "run"), "place": "", "number": int(signal.SIGINT), "lasts": 0.0}
    begin = time.monotonic()
    code, run, said = start(undisturbed, tmp_path, place, "hang", stop=stop, more={"end_seconds": 1.0})
    assert code == Exit.STOPPED, said
    assert "Traceback" not in said
    assert time.monotonic() - begin < 60
    assert "stopped; go on with" in said or "did not end" in said
    goes_on(undisturbed, run)


def test_a_gradient_that_is_not_finite_is_not_applied_and_names_its_samples(undisturbed, tmp_path):
    code, run, said = start(undisturbed, tmp_path, "none", "nan")
    window = Checkpoints(run / "checkpoints").numbers()[0]
    ids = undisturbed_ids(undisturbed, window)
    assert code == Exit.BAD_INPUT
    assert f"window {window}: the norm of the gradients of 'loss' is nan" in said
    assert f"or look at samples {', '.join(map(str, ids))}" in said
    kept = read_checkpoint(run / "checkpoints" / f"{window:08d}")
    assert kept.next_window == window
    assert [json.loads(line)["window"] for line in (run / "metrics.jsonl").read_text().splitlines()][-1] == window - 1
    goes_on(undisturbed, run)


def undisturbed_ids(undisturbed, window):
    lines = (undisturbed[1] / "undisturbed" / "samples.jsonl").read_text().splitlines()
    return sorted(json.loads(lines[window])["ids"])


@pytest.mark.parametrize(
    ("elements", "skips", "budget"),
    [
        (1 << 18, False, 96 << 20),
        (1 << 18, True, 96 << 20),
        (10_000, False, 96 << 20),
        (64, False, 96 << 20),
        # the saver's buffers are given back a few windows before the end, or memory runs out in validation
        (10_000, True, 80_982_016),
        (10_000, False, 84_213_760),
        (10_000, True, 62_509_056),
        (10_000, False, 67_194_880),
    ],
)
def test_memory_that_grows_is_named_with_what_holds_it_and_no_sample_is_blamed(
    undisturbed, tmp_path, elements, skips, budget
):
    code, run, said = start(
        undisturbed,
        tmp_path,
        "none",
        "keep",
        budget=budget,
        settings={"kept_elements": elements},
        windows=400,
        more={"skip_oversized": skips},
    )
    assert code == Exit.STOPPED, said
    assert "memory held between windows grew from" in said
    assert "Ending.kept holds" in said
    assert "no sample is to blame" in said, said
    assert "does not fit alone" not in said
    assert "Traceback" not in said
    newest = Checkpoints(run / "checkpoints").numbers()[0]
    assert newest == len((run / "samples.jsonl").read_text().splitlines())


def test_memory_that_is_gone_at_once_leaves_out_a_few_samples_and_then_blames_none(undisturbed, tmp_path):
    more = {"skip_oversized": True}
    code, run, said = start(undisturbed, tmp_path, "none", "jump", budget=96 << 20, windows=400, more=more)
    assert code == Exit.STOPPED, said
    assert "one after another" in said, said
    assert "no sample is to blame" in said
    assert len((run / "samples.jsonl").read_text().splitlines()) < 12
    (run / "mark").unlink()
    assert undisturbed[0].run(run, resume=True, windows=12)["code"] == 0, (run / "log.txt").read_text()


def test_a_validation_that_raises_ends_the_run_before_its_first_window(undisturbed, tmp_path):
    processes, folder = undisturbed
    run = new_run(tmp_path / "run", folder / "plan.toml")
    (tmp_path / "wrong.py").write_text(
        "from tests.train.ending_job import Ending\n"
        "class Wrong(Ending):\n"
        "    def validate(self, nets, batch):\n"
        "        return {'size': 1 / (len(batch) - 2)}\n"
    )
    write_plan(replace(read_plan(run / "plan.toml"), job=f"{tmp_path}/wrong.py:Wrong"), run / "plan.toml")
    assert processes.run(run, resume=False)["code"] == Exit.BAD_INPUT
    said = (run / "log.txt").read_text()
    assert "wrong.py:4 in validate(): ZeroDivisionError" in said
    assert not (run / "metrics.jsonl").exists()


def test_one_that_raises_later_ends_the_run_with_4_after_its_last_window(undisturbed, tmp_path):
    code, run, said = start(undisturbed, tmp_path, "validate", "raise")
    assert code == Exit.CHECK_FAILED
    assert "validation was left out: ZeroDivisionError: planted" in said
    lines = (run / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == 6
    assert json.loads(lines[-1])["validation"] is None
    (run / "mark").unlink()
    assert undisturbed[0].run(run, resume=True)["code"] == Exit.DONE
    assert json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["validation"] is not None


DAMAGE = {
    "a broken line": lambda lines: [*lines[:2], lines[2][:20], *lines[3:]],
    "not UTF-8": lambda lines: [*lines[:2], b"\xff\xfe\x00", *lines[3:]],
    "a list": lambda lines: [*lines[:2], b"[1, 2]", *lines[3:]],
    "an object without a window": lambda lines: [*lines[:2], b"{}", *lines[3:]],
    "a window of text": lambda lines: [*lines[:2], b'{"window": "2"}', *lines[3:]],
    "a line that is missing": lambda lines: [*lines[:2], *lines[3:]],
    "a line twice": lambda lines: [*lines, lines[1]],
    "cut to nothing": lambda lines: [],
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_damaged_lines_cost_no_window_and_their_loss_is_said(undisturbed, tmp_path, damage, capsys):
    from memfit.cli.run import show_summary

    processes, folder = undisturbed
    run = new_run(tmp_path / "run", folder / "plan.toml")
    assert processes.run(run, resume=False, windows=4)["code"] == 0
    for name in ("metrics.jsonl", "samples.jsonl"):
        lines = damage((run / name).read_bytes().splitlines())
        (run / name).write_bytes(b"".join(line + b"\n" for line in lines))
    for left in run.glob(".ended-*"):
        left.unlink()
    assert processes.run(run, resume=True)["code"] == 0, (run / "log.txt").read_text()
    said, kept = (run / "log.txt").read_text(), len((run / "metrics.jsonl").read_text().splitlines())
    assert judged(RunFolder(run), 0, Supervisor()).code == Exit.DONE
    if kept < 6:
        assert f"metrics.jsonl has lost the lines of {6 - kept} window" in said
        assert f"samples.jsonl has lost the lines of {6 - kept} window" in said
    weights = [(path / "final" / "net.safetensors").read_bytes() for path in (run, folder / "undisturbed")]
    assert weights[0] == weights[1]
    show_summary(RunFolder(run), PLAN, as_json=False)
    assert "Done: 6 windows" in capsys.readouterr().out


def test_fewer_windows_than_were_trained_are_refused(undisturbed, tmp_path):
    processes, folder = undisturbed
    run = shutil.copytree(folder / "undisturbed", tmp_path / "run")
    (run / ".ended-once").unlink()
    assert processes.run(run, resume=True, windows=3)["code"] == Exit.BAD_INPUT
    assert "--windows 3: the run has trained 6 already; write --windows 6 or more" in (run / "log.txt").read_text()
