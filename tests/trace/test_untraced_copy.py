"""Code that keeps tensors: commands that trace several steps say of each what a process of its own says, to the byte.
Real commands, from processes of their own, since the first backward of a process forbids forks.

python -m pytest tests/trace/test_untraced_copy.py
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from memfit.device.virtual.card_rules import note_fact, recorded_facts
from memfit.forked_process import NoResultError, fork
from memfit.job import Job
from memfit.trace import untraced_copy
from memfit.trace.event_limit import event_limit, most_events
from memfit.trace.untraced_copy import before_trace, is_untraced_copy_needed, recorded_in_copy, untraced_copy_allowed

ROOT = Path(__file__).resolve().parents[2]
JOB = "tests/trace/kept_tensors_jobs.py:Kept"


def ask(*arguments, cores=None):
    """The command's JSON, in a process of its own."""
    command = [sys.executable, "-m", "memfit", *map(str, arguments), "--json"]
    pinned = (lambda: os.sched_setaffinity(0, cores)) if cores else None
    environment = os.environ | {"MEMFIT_TRACE_AHEAD": "0"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, preexec_fn=pinned, check=False
    )
    assert done.returncode in (0, 3), done.stderr
    return json.loads(done.stdout)


def predicted(micro_batch, *options, job=JOB):
    """Whether a step fits, and its process bytes by phase, of a process that traces nothing else."""
    answer = ask("predict", job, "--fresh", "--micro-batch", micro_batch, *options)
    return answer["fits"], {name: phase["process_bytes"] for name, phase in answer["phases"].items()}


def test_the_largest_micro_batch_is_that_of_a_process_of_its_own():
    by_checkpoint = {each["checkpoint"]: each for each in ask("max", JOB, "--device", "rtx3060")["results"]}
    each = by_checkpoint["none"]
    fits, phases = predicted(each["largest"], "--device", "rtx3060")
    assert (fits, max(phases.values()), each["exact"]) == (True, each["process_bytes"], True)
    assert not predicted(each["largest"] + 1, "--device", "rtx3060")[0]


@pytest.mark.parametrize("count", [1, 2])
def test_a_plan_is_that_of_a_process_of_its_own(count, tmp_path):
    cores = sorted(os.sched_getaffinity(0))[:count]
    out, device = tmp_path / "plan.toml", ("--device", "rtx3060")
    plan = ask("plan", JOB, "--global-batch", 1000, *device, "--out", out, cores=cores)
    accumulated = ("--accumulate", len(plan["micro_batches"]))
    _, phases = predicted(plan["micro_batch"], *accumulated, "--checkpoint", out, *device)
    assert {name: phase["process_bytes"] for name, phase in plan["phases"].items()} == phases


def test_each_variant_of_a_comparison_is_that_of_a_process_of_its_own():
    settings, options = ("width=256", "width=1024"), ("--device", "rtx3060", "--micro-batch", 4)
    compared = ask("compare", JOB, "--set", settings[0], "--set", settings[1], *options)["subjects"]
    for subject, setting in zip(compared[1:], settings, strict=True):
        _, phases = predicted(4, "--device", "rtx3060", "--set", setting)
        assert {name: phase["process_bytes"] for name, phase in subject["phases"].items()} == phases


class Counted(Job):
    """A job of which ``record`` reads one setting."""

    count: int = 0

    def nets(self):
        return {}


def record(job, more):
    if job.count < 0:
        raise ValueError
    note_fact("name")
    return job.count + more, event_limit(), os.getpid()


@pytest.fixture
def is_untraced(monkeypatch):
    """This process, as if it had traced nothing and the next trace would find something; threads that other tests have
    left do not matter to what is done here."""
    monkeypatch.setattr(untraced_copy, "_copies", untraced_copy._Copies())
    monkeypatch.setattr(untraced_copy, "is_forkable", lambda: True)
    monkeypatch.setattr(untraced_copy, "has_room_for_copy", lambda: True)
    monkeypatch.setattr(untraced_copy, "are_storages_left", lambda: True)


def test_each_trace_has_a_process_of_its_own(is_untraced):
    with untraced_copy_allowed():
        before_trace(record)
        assert is_untraced_copy_needed()
        with recorded_facts() as read, most_events(7):
            answers = [recorded_in_copy(Counted(count=5), more) for more in (1, 2)]
    assert [answer[:2] for answer in answers] == [(6, 7), (7, 7)]
    assert len({os.getpid(), *(answer[2] for answer in answers)}) == 3
    assert read == {"name"}
    assert not is_untraced_copy_needed()


def test_there_is_no_result_where_a_trace_raises(is_untraced):
    with untraced_copy_allowed():
        before_trace(record)
        with pytest.raises(NoResultError):
            recorded_in_copy(Counted(count=-1), 1)
        assert recorded_in_copy(Counted(count=1), 1)[0] == 2


def test_a_class_that_is_made_later_is_found_by_its_name(is_untraced):
    class Younger(Counted):
        pass

    name = Younger.__qualname__
    with untraced_copy_allowed():
        before_trace(record)

        class Younger(Counted):
            pass

        class Other(Counted):
            pass

        assert Younger.__qualname__ == name
        assert recorded_in_copy(Younger(count=1), 1)[0] == 2
        with pytest.raises(NoResultError):
            recorded_in_copy(Other(count=1), 1)


def test_it_is_made_before_the_first_trace_alone_and_stays_until_the_outer_context_ends(is_untraced):
    before_trace(record)
    with untraced_copy_allowed():
        before_trace(record)
        assert not is_untraced_copy_needed()
    untraced_copy._copies.has_traced = False
    with untraced_copy_allowed():
        with untraced_copy_allowed():
            before_trace(record)
        assert is_untraced_copy_needed()


@pytest.mark.parametrize("lacks", ["is_forkable", "has_room_for_copy"])
def test_there_is_none_where_it_could_not_do_what_this_process_does(is_untraced, monkeypatch, lacks):
    monkeypatch.setattr(untraced_copy, lacks, lambda: False)
    with untraced_copy_allowed():
        before_trace(record)
        assert not is_untraced_copy_needed()
        with pytest.raises(NoResultError):
            recorded_in_copy(Counted(count=1), 1)


def test_a_forked_process_does_not_ask_the_copy_of_its_parent(is_untraced):
    with untraced_copy_allowed():
        before_trace(record)
        child = fork()
        if child == 0:
            os._exit(is_untraced_copy_needed())
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert is_untraced_copy_needed()
