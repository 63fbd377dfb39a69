"""Fitting: a job in a session, its uniform choices observed, and a selection that is traced again until it fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

import numpy as np
from torch import nn

from memfit.device.hardware.cluster import GroupLink
from memfit.engine.pipeline import Pipeline
from memfit.job import Job, Shape, is_trained
from memfit.planner.search.checkpoint_options import RECOMPUTED, Observed, checkpoint_options_of
from memfit.planner.search.layout import Layout, blocks_of, holds, kept_by_module, with_parts
from memfit.planner.search.observation import Observation, observe
from memfit.planner.search.resized_trace import resized
from memfit.planner.search.second_core import SecondCore, TraceKey
from memfit.planner.search.selection import Problem, floor, problem_of, solve
from memfit.planner.timing.roofline import OVERHEADS, operator_seconds
from memfit.trace.durations import overheads
from memfit.trace.session import MicroTrace, Session, open_session
from memfit.trace.step import Tracing

ROUNDS = 6
"""Choices that are traced again for one budget, at most."""
_OVER_BATCH = (
    nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.InstanceNorm1d, nn.InstanceNorm2d,
    nn.InstanceNorm3d,
)  # fmt: skip
OUTSIDE = 0.1
"""Of a budget, what is set aside for fragmentation at first; a choice's own trace says how much it is."""
CLOSE = 0.01
"""Of a budget: a choice that leaves less than this is not improved further."""


@contextmanager
def open_traced_job(
    job: Job, how: Tracing, shape: Shape, links: Mapping[str, GroupLink] | None = None
) -> Iterator[TracedJob]:
    """A job on ``how.device``, to be traced from this shape on; ``links`` as ``operator_seconds`` has them."""
    traced_job = TracedJob(job, how, shape, links)
    try:
        yield traced_job
    finally:
        traced_job.pause()


@dataclass(frozen=True, kw_only=True)
class Selection:
    """A choice for every block, with its traced peak and its estimated time for one micro-batch."""

    modes: Mapping[str, str]
    peak: int
    """Bytes, as the peak function given to ``select`` counts them."""
    seconds: float | None
    """Seconds of the micro-batch's forward and backward; None where the device's rates are not known."""
    more_seconds: float
    """Than keeping everything takes, by the sums of the integer program."""
    traced: int
    """Choices that were traced on the way."""


class TracedJob:
    """One job on one device. What was traced once is not traced again."""

    def __init__(self, job: Job, how: Tracing, shape: Shape, links: Mapping[str, GroupLink] | None = None) -> None:
        self.job, self.device, self.links = job, how.device, links
        mine = OVERHEADS if how.device.is_cuda else overheads()
        self.overheads = {mode: (call, each) for mode, (call, each) in mine.items()}
        self.how, self._first = how, shape
        self._session: Session | None = None
        self._open = ExitStack()
        self._overwritten: set[str] = set()
        self._net_kind = ""
        self._normalises: bool | None = None
        self._layout: Layout | None = None
        self._observed: dict[tuple[Shape, bool], Observed] = {}
        self._problems: dict[tuple[Shape, bool], Problem] = {}
        self._traces: dict[TraceKey, MicroTrace] = {}
        self._estimates: dict[TraceKey, MicroTrace | None] = {}
        self._steps: dict[tuple[str, bool], MicroTrace | None] = {}
        self._sent: dict[Shape, int] = {}
        self.second_core: SecondCore | None = None

    @property
    def session(self) -> Session:
        """The job on the virtual device; opened when it is first asked for."""
        if self._session is None:
            self._session = self._open.enter_context(open_session(self.job, self.how, self._first))
            if self.second_core is not None:
                self.second_core.set_up()
        return self._session

    def pause(self) -> None:
        """Leaves the virtual device, so that something else can be traced; what was traced is still known."""
        if self._session is not None:
            self._overwritten, self._net_kind = self.overwritten, self.net_kind
        self._session = None
        self._open.close()

    @property
    def net_kind(self) -> str:
        """The kind of net, as in ``Trace.net_kind``."""
        if self._session is not None:
            self._net_kind = self._session.net_kind
        return self._net_kind

    @property
    def overwritten(self) -> set[str]:
        """Modules whose outputs are overwritten, as in ``Session.overwritten``."""
        return self._overwritten | (self._session.overwritten if self._session is not None else set())

    def normalises_over_batch(self) -> bool:
        """Whether a trained net has batch or instance normalisation, which may refuse a single value per channel."""
        if self._normalises is None:
            nets = [net for net in self.session.train_state.nets.values() if is_trained(net)]
            self._normalises = any(isinstance(module, _OVER_BATCH) for net in nets for module in net.modules())
        return self._normalises

    def trace(
        self, shape: Shape, modes: Mapping[str, str], *, accumulated: bool, precision: str | None = None
    ) -> MicroTrace:
        """One micro-batch under these modes; ``precision`` as ``Session.micro_batch`` has it."""
        key = (shape, frozenset(modes.items()), accumulated, precision)
        if key not in self._traces:
            copied = self.second_core.trace(key, self.session) if self.second_core is not None else None
            if copied is None:
                copied = self.session.micro_batch(shape, modes, accumulated=accumulated, precision=precision)
            self._traces[key] = copied
            engine = self.session.train_state.engine
            if isinstance(engine, Pipeline):
                self._sent[shape] = engine.sent_bytes
        return self._traces[key]

    def begin_trace(self, shape: Shape, modes: Mapping[str, str], *, accumulated: bool) -> None:
        """Has a micro-batch traced on the second core, where there is one: ``trace`` will be asked for it."""
        key = (shape, frozenset(modes.items()), accumulated, None)
        if self.second_core is not None and key not in self._traces:
            self.second_core.begin_trace(key)

    def sent_bytes(self, shape: Shape) -> int:
        """Bytes that a stage of a pipeline sends on for a micro-batch that was traced; 0 where nets are not cut so."""
        return self._sent.get(shape, 0)

    def kept(self, shape: Shape, *, accumulated: bool) -> MicroTrace:
        """One micro-batch with everything kept."""
        return self.trace(shape, {}, accumulated=accumulated)

    def optimizer_step(self, implementation: str = "job", *, by_parts: bool = False) -> MicroTrace | None:
        """The optimizers' step alone, as ``Session.optimizer_step`` has it."""
        key = (implementation, by_parts)
        if key not in self._steps:
            self._steps[key] = self.session.optimizer_step(implementation, by_parts=by_parts)
        return self._steps[key]

    def work(self, traced: MicroTrace) -> np.ndarray:
        """For each operator, what candidates are ranked by where no rates are known: its time on some card."""
        return traced.trace.operator_flops * 1e-14 + traced.trace.operator_bytes * 1e-12

    def resident(self, traced: MicroTrace) -> int:
        """Process bytes before the micro-batch."""
        outside = (self.device.context_bytes or 0) if self.device.is_cuda else 0
        return int(traced.trace.nbytes[traced.trace.made_by < 0].sum()) + outside

    @property
    def knows_rates(self) -> bool:
        """Whether seconds are known."""
        return not self.device.is_cuda or (self.device.fp32_flops is not None and self.device.bandwidth is not None)

    def step_seconds(self) -> float:
        """Seconds of the optimizers' step."""
        traced = self.optimizer_step()
        assert traced is not None
        return self.total_seconds(traced)

    def overhead_seconds(self, shape: Shape, mode: str, *, accumulated: bool) -> float:
        """Seconds beyond the operators where every block is in this mode."""
        layout = self.layout(shape, accumulated=accumulated)
        call, each = self.overheads[mode]
        inside = self._forward_operators(self.kept(shape, accumulated=accumulated), layout)
        return float(call * len(layout.blocks) + each * inside.sum())

    def total_seconds(self, traced: MicroTrace, precision: str | None = None) -> float:
        """Seconds of all operators in another precision than the job's; without rates, the work that stands for
        them."""
        seconds = self.seconds(traced, precision)
        return float(self.work(traced).sum() if seconds is None else seconds.sum())

    def seconds(self, traced: MicroTrace, precision: str | None = None, *, timed: bool = True) -> np.ndarray | None:
        """Seconds of each operator; None where the device's rates are not known.

        Args:
            timed: whether operators of a CPU are timed on this machine; else they follow its rates.
        """
        calls = traced.calls if timed else ()
        return operator_seconds(traced.trace, self.device, precision or self.job.precision, calls, self.links)

    def observed(self, shape: Shape, *, accumulated: bool) -> Observed:
        """This shape under every uniform choice."""
        key = (shape, accumulated)
        if key not in self._observed:
            self._observed[key] = self._observe(shape, accumulated)
        return self._observed[key]

    def problem(self, shape: Shape, *, accumulated: bool) -> Problem:
        """The integer program of a shape."""
        key = (shape, accumulated)
        if key not in self._problems:
            observed = self.observed(shape, accumulated=accumulated)
            self._problems[key] = problem_of(observed.layout, observed.keep, checkpoint_options_of(observed))
        return self._problems[key]

    def layout(self, shape: Shape, *, accumulated: bool) -> Layout:
        """Blocks and parts, the same for every shape."""
        if self._layout is None:
            train_state, kept = self.session.train_state, self.kept(shape, accumulated=accumulated)
            self._layout = with_parts(
                blocks_of(train_state.job, train_state.nets), train_state.nets, kept_by_module(kept.trace)
            )
        return self._layout

    def blocks(self, shape: Shape, *, accumulated: bool) -> list[str]:
        """Paths of the blocks."""
        return [block.path for block in self.layout(shape, accumulated=accumulated).blocks]

    def _observe(self, shape: Shape, accumulated: bool) -> Observed:
        kept, layout = self.kept(shape, accumulated=accumulated), self.layout(shape, accumulated=accumulated)

        def modes_of(paths: list[str], mode: str) -> dict[str, str]:
            return dict.fromkeys([path for path in paths if mode != "selective" or path not in barred], mode)

        def under(paths: list[str], mode: str) -> Observation:
            return self._seen(self._uniform(shape, modes_of(paths, mode), accumulated), layout)

        tops, parts = [block.path for block in layout.blocks], [part for block in layout.blocks for part in block.parts]
        barred = frozenset(path for path in (*tops, *parts) if holds(path, self.overwritten))
        uniform = [modes_of(paths, mode) for paths in (tops, parts) if paths for mode in RECOMPUTED]
        uniform = [modes for modes in uniform if self._resized(shape, modes, accumulated) is None]
        for modes in uniform[1::3] + uniform[2::3]:  # of four, half of what blocks take and half of what parts take
            self.begin_trace(shape, modes, accumulated=accumulated)
        for modes in uniform[::3]:
            self.trace(shape, modes, accumulated=accumulated)
        operators = self._forward_operators(kept, layout)
        by_block = np.bincount(layout.block_of, weights=operators, minlength=len(tops))
        more: dict[str, np.ndarray] = {mode: call + each * operators for mode, (call, each) in self.overheads.items()}
        observed = Observed(
            layout=layout,
            keep=self._seen(kept, layout),
            blocks={"full": under(tops, "full")} if tops else {},
            parts={},
            overhead=more,
            block_overhead={mode: call + each * by_block for mode, (call, each) in self.overheads.items()},
            barred=barred,
        )
        offload_pays = self._offload_pays(observed)
        if offload_pays:  # here, while a second core traces the rest
            self._offloaded(shape, layout, accumulated)
        rest = {mode: under(tops, mode) for mode in RECOMPUTED if mode != "full"} if tops else {}
        parts_seen = {mode: under(parts, mode) for mode in RECOMPUTED} if parts else {}
        observed = replace(observed, blocks={**observed.blocks, **rest}, parts=parts_seen)
        return self._with_offload(shape, observed, accumulated) if offload_pays else observed

    def _uniform(self, shape: Shape, modes: Mapping[str, str], accumulated: bool) -> MicroTrace:
        """A micro-batch under one choice for all: traced at the first shape, and estimated from that at others."""
        resized = self._resized(shape, modes, accumulated)
        return self.trace(shape, modes, accumulated=accumulated) if resized is None else resized

    def _resized(self, shape: Shape, modes: Mapping[str, str], accumulated: bool) -> MicroTrace | None:
        """A micro-batch estimated from one of another size; None where it was traced, or does not follow. On a CPU
        operators are timed, one by one."""
        key = (shape, frozenset(modes.items()), accumulated, None)
        if key in self._traces or not self.device.is_cuda:
            return None
        if key not in self._estimates:
            self._estimates[key] = self._estimated(key, modes)
        return self._estimates[key]

    def _estimated(self, key: TraceKey, modes: Mapping[str, str]) -> MicroTrace | None:
        shape, _, accumulated, precision = key
        for known, had_accumulated in self._observed:
            traced = self._traces.get((known, key[1], had_accumulated, precision))
            if traced is not None and had_accumulated == accumulated and known.length == shape.length:
                kept, other = (self.kept(some, accumulated=accumulated).trace for some in (known, shape))
                trace = resized(traced.trace, kept, other, shape.items / known.items)
                return None if trace is None else MicroTrace(trace=trace, calls=())
        return None

    def _seen(self, traced: MicroTrace, layout: Layout) -> Observation:
        seconds = self.seconds(traced)
        return observe(traced.trace, self.work(traced) if seconds is None else seconds, layout)

    def _offload_pays(self, observed: Observed) -> bool:
        """Whether moving what some block keeps to the host and back takes less time than recomputing it."""
        if not self.knows_rates or not self.device.link_bytes or "full" not in observed.blocks:
            return False
        block_of, count = observed.layout.block_of, len(observed.layout.blocks)
        kept = np.bincount(block_of, weights=observed.keep.kept.sum(0), minlength=count)
        more = observed.blocks["full"].seconds - observed.keep.seconds
        recomputed = np.bincount(block_of, weights=more, minlength=count) + observed.block_overhead["full"]
        return bool((2 * kept / self.device.link_bytes < recomputed).any())

    def _with_offload(self, shape: Shape, observed: Observed, accumulated: bool) -> Observed:
        traced = self._offloaded(shape, observed.layout, accumulated)
        return replace(observed, blocks={**observed.blocks, "offload": self._seen(traced, observed.layout)})

    def _offloaded(self, shape: Shape, layout: Layout, accumulated: bool) -> MicroTrace:
        """Traced at each size: what is large enough to be moved is of a size."""
        return self.trace(
            shape, dict.fromkeys([block.path for block in layout.blocks], "offload"), accumulated=accumulated
        )

    def offload_too(self, shape: Shape, *, accumulated: bool) -> bool:
        """Lets what blocks keep be moved to the host, however long that takes; False where that is no new choice."""
        observed = self.observed(shape, accumulated=accumulated)
        if not self.device.link_bytes or "offload" in observed.blocks or not observed.layout.blocks:
            return False
        self._observed[shape, accumulated] = self._with_offload(shape, observed, accumulated)
        self._problems.pop((shape, accumulated), None)
        return True

    def _forward_operators(self, traced: MicroTrace, layout: Layout) -> np.ndarray:
        """int (units,): operators in each unit's forward."""
        trace = traced.trace
        unit = layout.of_modules(trace.modules)[trace.operator_module]
        forward = np.array([part == "forward" for part in trace.parts])[trace.operator_part]
        return np.bincount(unit[(unit >= 0) & forward], minlength=len(layout.units))

    def select(
        self, shape: Shape, budget: int, peak_of: Callable[[MicroTrace], int], *, accumulated: bool, outside: float = 0
    ) -> Selection | None:
        """The fastest choice whose traced peak is within the budget; None where none is.

        Args:
            peak_of: the bytes that a traced micro-batch takes, to be held against the budget.
            outside: how much of them should be no tensor's.
        """
        problem = self.problem(shape, accumulated=accumulated)
        best: Selection | None = None
        lowest = floor(problem)
        fitted, failed = problem.peak(lowest), float(budget)
        aim, tried = budget - min(outside, OUTSIDE * budget), set()
        for _ in range(ROUNDS):
            choice = solve(problem, aim) or lowest
            if tuple(choice) in tried:
                break
            tried.add(tuple(choice))
            selection = self.check(shape, problem, choice, peak_of, accumulated=accumulated, traced=len(tried))
            if selection.peak > budget:
                failed = min(failed, aim)
            elif best is None or selection.more_seconds < best.more_seconds:
                best, fitted = selection, max(fitted, aim)
            if selection.peak <= budget and (budget - selection.peak <= CLOSE * budget or not selection.modes):
                break
            aim = budget - (selection.peak - problem.peak(choice))
            if not fitted < aim < failed:
                aim = (fitted + failed) / 2
        if best is None and self.offload_too(shape, accumulated=accumulated):
            return self.select(shape, budget, peak_of, accumulated=accumulated, outside=outside)
        return best

    def lowest(self, shape: Shape, peak_of: Callable[[MicroTrace], int], *, accumulated: bool) -> Selection:
        """The choice of the lowest peak."""
        problem = self.problem(shape, accumulated=accumulated)
        return self.check(shape, problem, floor(problem), peak_of, accumulated=accumulated, traced=1)

    def check(
        self, shape: Shape, problem: Problem, choice: list[int], peak_of: Callable[[MicroTrace], int], *,
        accumulated: bool, traced: int,
    ) -> Selection:  # fmt: skip
        """A choice, traced."""
        modes = problem.modes(choice)
        micro_trace = self.trace(shape, modes, accumulated=accumulated)
        seconds = self.seconds(micro_trace)
        return Selection(
            modes=modes,
            peak=peak_of(micro_trace),
            seconds=None if seconds is None else float(seconds.sum()),
            more_seconds=problem.seconds(choice),
            traced=traced,
        )
