"""Probe: the prediction held to real trials, and corrected by them; finds the largest micro-batch that really runs.

The first trial is at the largest micro-batch whose prediction, with the process's margin, is within the budget. What it
took beyond its prediction corrects those of its neighbours: the second trial is at the largest that is then within the
budget. Only a size that was run is ever given.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from memfit.device.hardware.catalogue import Device
from memfit.footprint import Footprint
from memfit.geometry import shape_of
from memfit.job import Job, Shape
from memfit.planner.predict import footprint_on
from memfit.planner.timing.probed_windows import ProbedWindow, keep_probed
from memfit.trace.step import Tracing, trace_job
from memfit.train.probe.trial import Question, Trial, run_trial

CPU_BOUND = 0.02
"""Of a CPU's allocated bytes: what prediction and truth may differ by (tests/trace/test_cpu_truth.py)."""
MARGIN, MARGIN_BYTES = 0.02, 24 << 20
"""Left by the first trial for what is no tensor, until it was measured."""
GAIN = 0.01
"""After a trial that ran, the next is of a micro-batch that is larger by this part at least; a proof asks for all."""
MOST_TRIALS = 4
STEPS_OF_LONGEST = 64
FIRST_SIZES = (*range(1, 17), 32, 64, 128, 256, 512)
"""Steps of the sizes that are tried, until the job takes one."""


@dataclass(frozen=True, kw_only=True)
class Probe:
    """What was asked of the machine, and what it answered."""

    trials: tuple[Trial, ...]
    largest: int | None
    """The largest micro-batch that ran, in units; None where none did."""
    step: int
    """Units between neighbouring sizes."""
    proved: bool
    """Whether one step more was run too, and failed."""
    predicted: Footprint
    """Of the micro-batch that was found, or of the last one tried."""
    relative_error: Mapping[str, float]
    """By phase: predicted over measured allocated bytes, less one; empty where nothing ran."""
    within_bound: bool
    seconds: float


Run = Callable[[Question], Trial]


class Prober:
    """Predictions and trials of one job on one device."""

    def __init__(self, job: Job, name: str, device: Device, budget: int, how: Tracing, run: Run = run_trial) -> None:
        self._job, self._name, self._device, self._budget = job, name, device, budget
        self._how, self._run = how, run
        self.step = max((job.longest or 1) // STEPS_OF_LONGEST, 1)
        """Units between the sizes that are looked at: a sample, or a part of the longest item; more where the job takes
        only multiples."""
        self.smallest = self.step
        """The smallest of these sizes, in units: batch normalisation refuses one item."""
        self._footprints: dict[int, Footprint] = {}
        self.trials: dict[int, Trial] = {}

    @property
    def is_cuda(self) -> bool:
        return self._device.is_cuda

    def shape(self, units: int) -> Shape:
        return shape_of(self._job, units)

    def footprint(self, units: int) -> Footprint:
        if units not in self._footprints:
            self._footprints[units] = footprint_on(trace_job(self._job, self.shape(units), self._how), self._device)
        return self._footprints[units]

    def begin(self) -> None:
        """Looks for the smallest size that the job takes, and whether it takes the one after it too.

        Raises:
            Exception: what the job raised at the first size, where it takes none.
        """
        refused: Exception | None = None
        for size in FIRST_SIZES:
            error = self._refusal(size * self.step)
            if error is None:
                break
            refused = refused or error
        else:
            assert refused is not None
            raise refused
        self.smallest = size * self.step
        if size > 1 and self._refusal((size + 1) * self.step) is not None:
            self.step *= size

    def _refusal(self, units: int) -> Exception | None:
        """What the job raises at a size; None where it takes it."""
        try:
            self.footprint(units)
        except MemoryError:
            raise
        except Exception as error:  # the job's code is the user's
            return error
        return None

    def need(self, units: int) -> int:
        """Predicted bytes of the process, of its most demanding phase."""
        return max(phase.process_bytes for phase in self.footprint(units).phases.values())

    def trial(self, units: int) -> Trial:
        """Really runs a micro-batch under the budget, once."""
        if units not in self.trials:
            shape = self.shape(units)
            self.trials[units] = self._run(
                Question(
                    job=self._name,
                    settings=self._job.settings(),
                    items=shape.items,
                    length=shape.length,
                    micro_batches=min(self._how.micro_batches, 2),
                    checkpointing=dict(self._how.checkpointing),
                    device="cuda" if self._device.is_cuda else "cpu",
                    budget_bytes=self._budget,
                )
            )
        return self.trials[units]

    def remember(self, units: int, seconds: float) -> None:
        """Keeps a window's time, to which a plan of this job then holds its estimates."""
        shape = self.shape(units)
        window = ProbedWindow(
            items=shape.items, length=shape.length, micro_batches=min(self._how.micro_batches, 2),
            checkpointing=dict(self._how.checkpointing), seconds=seconds,
        )  # fmt: skip
        keep_probed(self._job, self._device, window)

    def largest(self, budget: float, near: int) -> int:
        """The largest micro-batch, in whole steps, whose predicted need is within ``budget``; 0 where none is.

        Needs are taken to grow with the micro-batch, nearly in proportion: a line through the two nearest known ones is
        followed until two neighbours stand on both sides of the budget.
        """
        first = self.smallest // self.step
        low, high = first - 1, 0
        guess = max(near // self.step, first)
        while not high or high - low > 1:
            if self.need(guess * self.step) <= budget:
                low = guess
            else:
                high = guess
            guess = self._between(low, high, budget)
        return low * self.step if low >= first else 0

    def _between(self, low: int, high: int, budget: float) -> int:
        """The next number of steps to predict, above ``low`` and below ``high`` (0: not known yet)."""
        known = sorted(self._footprints, key=lambda units: abs(self.need(units) - budget))[:2]
        guess = 2 * max(low, 1) if not high else (low + high) // 2
        if len(known) == 2 and self.need(known[0]) != self.need(known[1]):
            slope = (self.need(known[1]) - self.need(known[0])) / (known[1] - known[0])
            guess = int((known[0] + (budget - self.need(known[0])) / slope) // self.step)
        return min(max(guess, low + 1), high - 1 if high else max(4 * low, 4))


def probe(prober: Prober, budget: int, start: int, *, prove: bool = False) -> Probe:
    """The largest micro-batch that really runs within a budget.

    Args:
        start: any micro-batch to predict first, in units.
        prove: also run one step more than what was found, which must fail.
    """
    begin = time.perf_counter()
    prober.begin()
    margin = 0 if prober.is_cuda else int(budget * MARGIN) + MARGIN_BYTES
    units = prober.largest(budget - margin, start)
    if units == 0:
        units = max(prober.largest(budget, start), prober.smallest)
    ok, failed = 0, None
    while True:
        trial = prober.trial(units)
        if trial.ok:
            ok = max(ok, units)
            process_bytes = trial.process_bytes or 0
            better = prober.largest(budget - (process_bytes - prober.need(units)), units)
        else:
            failed = units if failed is None else min(failed, units)
            margin = 2 * margin + MARGIN_BYTES
            better = prober.largest(budget - margin, units)
        better = better if failed is None else min(better, failed - prober.step)
        if better >= prober.smallest and better > ok and (prove or better - ok >= GAIN * ok):
            units = better
        elif prove and ok and failed != ok + prober.step:
            units = ok + prober.step
        else:
            break
        if len(prober.trials) >= MOST_TRIALS:
            break
    return finish(prober, ok or None, begin, proved=failed == ok + prober.step)


def probe_one(prober: Prober, units: int) -> Probe:
    """One micro-batch, really run once."""
    begin = time.perf_counter()
    trial = prober.trial(units)
    return finish(prober, units if trial.ok else None, begin, proved=False)


def finish(prober: Prober, largest: int | None, begin: float, *, proved: bool) -> Probe:
    """The answer, with the found size's prediction held to its trial."""
    shown = largest if largest is not None else list(prober.trials)[-1]
    predicted, trial = prober.footprint(shown), prober.trials[shown]
    measured_phases = dict(trial.phases)
    if "setup" not in predicted.phases and (setup := measured_phases.pop("setup", 0)):  # it counts to training then
        measured_phases["train"] = max(measured_phases.get("train", 0), setup)
    errors = {
        name: predicted.phases[name].allocated_bytes / measured - 1
        for name, measured in measured_phases.items()
        if name in predicted.phases and measured
    }
    if trial.ok and trial.seconds is not None:
        prober.remember(shown, trial.seconds)
    return Probe(
        trials=tuple(prober.trials.values()),
        largest=largest,
        step=prober.step,
        proved=proved,
        predicted=predicted,
        relative_error=errors,
        within_bound=not trial.ok or _within(predicted, trial, errors, is_cuda=prober.is_cuda),
        seconds=time.perf_counter() - begin,
    )


def _within(predicted: Footprint, trial: Trial, errors: Mapping[str, float], *, is_cuda: bool) -> bool:
    """On a CPU every phase to two percent; on a GPU the process's bytes within the predicted interval.

    Where sizes that depend on data were taken at their largest, the prediction may be over by any amount.
    """
    if not is_cuda:
        most = float("inf") if predicted.assumed else CPU_BOUND
        return all(-CPU_BOUND <= error <= most for error in errors.values())
    worst = max(predicted.phases.values(), key=lambda phase: phase.process_bytes)
    low = 0 if predicted.assumed else worst.process_bytes_low
    return low <= (trial.process_bytes or 0) <= worst.process_bytes_high
