"""Probe against a simulated machine, whose trials obey a formula, and really on this one.

python -m pytest tests/train/test_probe.py
"""

import json
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from memfit.cli.probe import command
from memfit.device.hardware.catalogue import find_device, with_memory
from memfit.errors import Exit, InputError
from memfit.plan import Plan, write_plan
from memfit.trace.step import Tracing
from memfit.train.probe.probe import Prober, probe, probe_one
from memfit.train.probe.trial import Question, Trial, run_trial

BUDGET = 1000 << 20


class SimulatedProber(Prober):
    """Predicts 10 MiB and 16 MiB a unit, in no time."""

    assumed: tuple[str, ...] = ()

    def need(self, units: int) -> int:
        return self.footprint(units).process_bytes

    def footprint(self, units: int):
        nbytes = (10 << 20) + units * (16 << 20)
        phase = SimpleNamespace(allocated_bytes=nbytes, process_bytes=nbytes, assumed=self.assumed)
        phase.phases = {"train": phase}
        self._footprints[units] = phase
        return phase


def simulated(need, longest=None):
    """A prober on a machine on which ``units`` take ``need(units)`` bytes, and the trials that it was asked for."""
    asked: list[int] = []

    def run(question: Question) -> Trial:
        units = question.items * (question.length or 1)
        asked.append(units)
        nbytes = need(units)
        if nbytes > BUDGET:
            return Trial(micro_batch=units, ok=False)
        allocated = (10 << 20) + units * (16 << 20)
        return Trial(
            micro_batch=units, ok=True, allocated_bytes=allocated, process_bytes=nbytes, phases={"train": allocated}
        )

    job = SimpleNamespace(longest=longest, settings=dict)
    device = with_memory(find_device("cpu"), BUDGET)
    return SimulatedProber(job, "simulated", device, BUDGET, Tracing(device=device), run), asked


def exact(units):
    return (10 << 20) + units * (16 << 20)


@pytest.mark.parametrize(
    ("need", "largest", "trials"),
    [
        (exact, 61, [59, 61]),
        (lambda units: exact(units) + (5 << 20), 61, [59, 61]),
        (lambda units: exact(units) + (40 << 20), 59, [59]),
        (lambda units: exact(units) * 102 // 100, 60, [59, 60]),
        (lambda units: exact(units) + (70 << 20), 57, [59, 54, 57]),
    ],
)
def test_the_largest_was_run_in_few_trials_of_a_simulated_machine(need, largest, trials):
    prober, asked = simulated(need)
    answer = probe(prober, BUDGET, 1)
    assert need(largest) <= BUDGET < need(largest + 1)
    assert (answer.largest, asked) == (largest, trials)


def test_a_few_units_in_thousands_are_no_further_trial_on_a_simulated_machine():
    """The process's own bytes differ by some pages from trial to trial."""

    class Small(SimulatedProber):
        def footprint(self, units: int):
            footprint = super().footprint(units)
            footprint.allocated_bytes = footprint.process_bytes = (10 << 20) + units * (128 << 10)
            return footprint

    asked: list[int] = []

    def run(question: Question) -> Trial:
        asked.append(question.items)
        allocated = (10 << 20) + question.items * (128 << 10)
        process_bytes = allocated + (2 << 20) - len(asked) * (300 << 10)
        return Trial(
            micro_batch=question.items, ok=True, allocated_bytes=allocated, process_bytes=process_bytes,
            phases={"train": allocated},
        )  # fmt: skip

    device = with_memory(find_device("cpu"), BUDGET)
    job = SimpleNamespace(longest=None, settings=dict)
    answer = probe(Small(job, "simulated", device, BUDGET, Tracing(device=device), run), BUDGET, 1)
    assert len(asked) == 2
    assert answer.largest == asked[-1] > 7800


def test_proof_runs_one_more_on_a_simulated_machine():
    prober, asked = simulated(exact)
    answer = probe(prober, BUDGET, 1, prove=True)
    assert (answer.largest, answer.proved, asked) == (61, True, [59, 61, 62])


@pytest.mark.parametrize(
    ("takes", "largest", "step"),
    [(lambda items: items > 1, 61, 1), (lambda items: items % 2 == 0, 60, 2), (lambda items: items % 6 == 0, 60, 6)],
    ids=["two or more", "even", "sixfold"],
)
def test_sizes_that_a_job_refuses_are_left_out_on_a_simulated_machine(takes, largest, step):
    prober, asked = simulated(exact)
    predicts = prober.footprint

    def footprint(units):
        if not takes(units):
            raise InputError(f"a batch of {units}", "it cannot be divided", "write another size")
        return predicts(units)

    prober.footprint = footprint
    answer = probe(prober, BUDGET, 1, prove=True)
    assert (answer.largest, answer.step, answer.proved) == (largest, step, True)
    assert all(map(takes, asked))
    prober, asked = simulated(lambda units: 2 * BUDGET)
    prober.footprint = footprint
    assert probe(prober, BUDGET, 1).largest is None


def test_a_job_that_takes_no_size_raises_what_it_raised_first():
    prober, _ = simulated(exact)

    def footprint(units):
        raise InputError(f"a batch of {units}", "no", "write another job")

    prober.footprint = footprint
    with pytest.raises(InputError, match="a batch of 1: no"):
        probe(prober, BUDGET, 1)


def test_nothing_runs_on_a_simulated_machine_that_is_too_small():
    prober, asked = simulated(lambda units: 2 * BUDGET)
    answer = probe(prober, BUDGET, 1)
    assert answer.largest is None
    assert not answer.proved
    assert len(asked) <= 4
    assert not any(trial.ok for trial in answer.trials)


def test_a_prediction_that_is_off_is_outside_its_bound():
    prober, _ = simulated(exact)
    trial = Trial(micro_batch=3, ok=True, allocated_bytes=exact(3), phases={"train": int(exact(3) * 1.05)})
    prober._run = lambda question: trial
    answer = probe_one(prober, 3)
    assert answer.relative_error["train"] == pytest.approx(1 / 1.05 - 1)
    assert not answer.within_bound


def test_where_the_largest_was_assumed_a_prediction_may_be_over_and_not_under():
    for share, within in ((0.5, True), (1.05, False)):
        prober, _ = simulated(exact)
        prober.assumed = ("nonzero was taken to find all 9",)
        measured = {"train": int(exact(3) * share)}
        trial = Trial(micro_batch=3, ok=True, allocated_bytes=measured["train"], phases=measured)
        prober._run = lambda question, trial=trial: trial
        assert probe_one(prober, 3).within_bound == within


def plan_of(tmp_path, **changes):
    plan = Plan(
        job="testing/nets.py:Convolution", settings={}, device="cpu", budget_bytes=60 << 20, unit="samples",
        global_batch=24, micro_batch=16, micro_batches=[[16, 8]], arithmetic="", engine="single", precision="fp32",
        seed=0, **changes,
    )  # fmt: skip
    write_plan(plan, tmp_path / "plan.toml")
    return str(tmp_path / "plan.toml")


def test_a_plan_is_really_run_beside_its_prediction(tmp_path):
    done = CliRunner().invoke(command, [plan_of(tmp_path), "--json"], standalone_mode=False)
    assert done.exception is None, done.stderr
    answer = json.loads(done.stdout)
    (trial,) = answer["trials"]
    assert (answer["found"], trial["micro_batch"], trial["ok"], done.return_value) == (16, 16, True, Exit.DONE)
    assert answer["relative_error"].keys() == {"train", "validate", "save"}
    assert answer["relative_error"]["train"] == pytest.approx(0, abs=0.02)
    assert trial["allocated_bytes"] <= trial["process_bytes"] <= 60 << 20
    assert trial["seconds"] > 0


@pytest.mark.slow
def test_a_trial_fails_under_half_of_what_it_needs():
    question = Question(job="testing/nets.py:Convolution", settings={}, items=64, length=None, budget_bytes=24 << 20)
    trial = run_trial(question)
    assert not trial.ok
    assert "memory" in trial.error
    assert trial.process_bytes is None


def test_a_step_that_fails_otherwise_is_the_jobs_fault(tmp_path):
    (tmp_path / "bad.py").write_text(
        "import memfit\nclass Bad(memfit.Job):\n    pass\nraise ValueError('no such net')\n"
    )
    with pytest.raises(InputError, match="no such net"):
        run_trial(Question(job=f"{tmp_path}/bad.py:Bad", settings={}, items=1, length=None))
    (tmp_path / "bad.py").write_text("import memfit\nclass Bad(memfit.Job):\n    pass\n")
    with pytest.raises(InputError, match=r"^Bad: the job has no nets\(\); write nets\(self\)"):
        run_trial(Question(job=f"{tmp_path}/bad.py:Bad", settings={}, items=1, length=None))


@pytest.mark.parametrize(
    ("options", "seen"),
    [
        (["testing/nets.py:Convolution", "--micro-batch", "4", "--prove"], "--prove"),
        (["plan.toml", "--micro-batch", "4"], "options beside plan.toml"),
    ],
)
def test_options_that_contradict_each_other(options, seen):
    done = CliRunner().invoke(command, options, standalone_mode=False)
    assert isinstance(done.exception, InputError)
    assert str(done.exception).startswith(seen)


@pytest.mark.slow
def test_the_largest_is_found_and_proved_on_this_machine():
    done = CliRunner().invoke(
        command, ["testing/nets.py:Convolution", "--memory", "200MiB", "--prove", "--json"], standalone_mode=False
    )
    answer = json.loads(done.stdout)
    result, trials = answer["found"], {trial["micro_batch"]: trial["ok"] for trial in answer["trials"]}
    assert answer["proved"]
    assert (trials[result], trials[result + 1]) == (True, False)
    assert len(trials) <= 4
