"""Runs a script on the virtual device, from its first line until enough was seen."""

from __future__ import annotations

import builtins
import os
import resource
import runpy
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.cuda.memory
from torch.optim import Optimizer

from memfit.device.hardware.catalogue import Device
from memfit.device.virtual import redirect
from memfit.device.virtual.backend import NAME
from memfit.device.virtual.card_rules import card_rules, recorded_facts
from memfit.device.virtual.cuda_module import ACCELERATOR, accelerator_memory
from memfit.device.virtual.hybrid_mode import HybridMode, fake_parameters
from memfit.device.virtual.library_patches import as_in_a_real_run
from memfit.device.virtual.patching import replaced
from memfit.device.virtual.value_masks import Walks
from memfit.device.virtual.virtual_device import Virtual, virtual_cpu, virtual_gpu
from memfit.library_warnings import without_library_warnings
from memfit.script.best_results import BestResults
from memfit.script.code_after import code_after
from memfit.script.compiled_kernels import compiled_kernels
from memfit.script.failures import script_error
from memfit.script.files import SavedFiles, checkpoints
from memfit.script.intervals import Intervals
from memfit.script.launchers import resolved
from memfit.script.lazy_parameters import lazy_parameters
from memfit.script.lbfgs_history import Histories
from memfit.script.live_allocator import LiveAllocator
from memfit.script.loaders import ShortPasses, short_loaders
from memfit.script.longest_samples import LongestSamples
from memfit.script.loop_ends import LoopEnds
from memfit.script.measure import outcome_of
from memfit.script.observations import Observations, observed
from memfit.script.other_processes import other_processes
from memfit.script.outcome import NOT_FOLLOWED, SCRIPT_ENDED, SCRIPT_EXITED, ScriptCommand, ScriptOutcome, TraceRequest
from memfit.script.own_calls import own_calls
from memfit.script.phase_spans import validated_after
from memfit.script.pretrained import absent_weights
from memfit.script.ranks import script_ranks
from memfit.script.repeated_trainings import RepeatedTrainings
from memfit.script.repeated_turns import RepeatedTurns
from memfit.script.request_device import requested_device
from memfit.script.rewritten_code import code_rewritten, compiled
from memfit.script.step_watch import EnoughError, StepWatch
from memfit.script.stop_rule import TraceStop
from memfit.script.stubs import stubbed
from memfit.script.tracer import MOST_KNOWN_INTEGERS, ScriptTracer
from memfit.script.zero_redundancy import consolidated_states
from memfit.torch_compat import DisableTorchDispatch, FakeTensor
from memfit.torch_compat.attributes import storage_id, storage_id_of
from memfit.torch_compat.backend import current_engine, engine_replaced
from memfit.trace import constant_values, sparse_parts

BATCHES = 4
"""Batches of a pass over a loader, if the command gives no other number."""


@dataclass(frozen=True, kw_only=True)
class Running:
    """The parts of a run, from which its outcome is computed at the end."""

    request: TraceRequest
    device: Device
    tracer: ScriptTracer
    watch: StepWatch
    stop: TraceStop
    loops: LoopEnds
    observations: Observations
    intervals: Intervals
    best_results: BestResults
    facts: set[str]
    """What was asked of the card, as ``recorded_facts`` notes it."""
    begin: float


def run_script(request: TraceRequest, report: Callable[[ScriptOutcome], None]) -> None:
    """Traces the script; ``report`` is called once, with the outcome."""
    _limit_host_memory(request.host_bytes)
    device = requested_device(request)
    begin, exit_at_once = time.perf_counter(), os._exit
    redirect.named_cards.clear()
    ended, failure = SCRIPT_ENDED, None
    with ExitStack() as stack:
        facts = stack.enter_context(recorded_facts())
        virtual = stack.enter_context(_virtual(device))
        virtual.assumptions.given.update({(file, line): value for file, line, value in request.assumed})
        virtual.assumptions.walks = Walks(assumed=dict(request.walks))
        tracer = ScriptTracer(virtual)
        watch = StepWatch(tracer=tracer)
        observations = stack.enter_context(observed(tracer))
        trainings = RepeatedTrainings(watch=watch)
        stop = TraceStop(request=request, watch=watch, begin=begin, trainings=trainings)
        intervals = Intervals(
            windows=lambda: watch.windows, allows=partial(_may_hold_early, tracer), on_early=watch.holds_early
        )
        best_results = BestResults(
            allows=partial(_may_hold_early, tracer), validated=lambda: validated_after(watch.cuts, watch.steps)
        )
        loops = LoopEnds(
            watch=watch, is_enough=lambda: stop.ends_loops, rest_alone=lambda: stop.rest_alone,
            trainings_grow=lambda: trainings.grow,
        )  # fmt: skip
        stop.can_end_loops, stop.meet_again = lambda: loops.can_end, intervals.meet_again
        stop.repeats_trainings = lambda: loops.repeats_trainings
        stop.find_code_after = partial(code_after, tracer.lines)
        running = Running(
            request=request, device=device, tracer=tracer, watch=watch, stop=stop, loops=loops,
            observations=observations, intervals=intervals, best_results=best_results, facts=facts, begin=begin,
        )  # fmt: skip

        def finish_now(why: str) -> None:
            watch.on_window = lambda: None
            watch.end_updates()
            tracer.pause()
            report(outcome_of(running, why, None))
            sys.stdout.flush()
            exit_at_once(0)

        stop.finish_now = finish_now
        _enter(stack, running)
        with stop.armed():
            try:
                _run(resolved(request.command))
            except EnoughError as enough:
                ended = str(enough)
            except SystemExit as left:
                ended = f"{SCRIPT_EXITED} {left.code}" if left.code else SCRIPT_ENDED
            except BaseException as error:
                if stop.reason or _fails_past_the_end(error, running):
                    ended = stop.reason
                else:
                    ended, failure = f"the script failed: {type(error).__name__}", script_error(error, tracer)
        watch.on_window = lambda: None
        watch.end_updates()
        tracer.pause()
        if loops.ended and not (failure or stop.reason):
            ended = f"the script ended, its loops cut short after {stop.enough}"
        if not watch.steps and running.observations.started_processes:
            ended += f"; {NOT_FOLLOWED}"
            failure = failure and replace(failure, hint=failure.hint or NOT_FOLLOWED)
        outcome = outcome_of(running, stop.reason or ended, failure)
    report(outcome)


@contextmanager
def _virtual(device: Device) -> Iterator[Virtual]:
    entered = virtual_gpu(card_rules(device), HybridMode) if device.is_cuda else virtual_cpu(HybridMode)
    with entered as virtual:
        yield virtual


def _enter(stack: ExitStack, running: Running) -> None:
    """Enters all contexts that replace parts of torch while the script runs."""
    tracer, watch, request, device = running.tracer, running.watch, running.request, running.device
    stack.enter_context(replaced(constant_values, MOST_ELEMENTS=MOST_KNOWN_INTEGERS, GATHERS_OWN=True))
    if request.longest_samples:
        stack.enter_context(replaced(sparse_parts, COUNTS_KNOWN=False))
    stack.enter_context(as_in_a_real_run())
    stack.enter_context(without_library_warnings())
    stack.enter_context(absent_weights(running.observations.note))
    stack.enter_context(compiled_kernels(running.observations.note))
    stack.enter_context(replaced(running.tracer.virtual.assumptions, note_kernel=running.observations.note))
    stack.enter_context(own_calls(watch))
    stack.enter_context(lazy_parameters())
    stack.enter_context(consolidated_states())
    running.observations.histories = Histories(running.observations.note, request.lbfgs_iterations)
    stack.enter_context(running.observations.histories.filled())
    stack.enter_context(fake_parameters(tracer.mode, tracer.parameter_made))
    stack.enter_context(tracer.draws.rejections())
    stack.enter_context(_addresses())
    if device.is_cuda:
        total = device.memory_bytes or 0
        context = device.context_bytes or 0
        capacity = (device.usable_bytes or 0) - context if request.enforced else None
        tracer.live = LiveAllocator(capacity, total, context, watch.failed)
        answers = tracer.live.answers()
        stack.enter_context(replaced(torch.cuda, **answers))
        stack.enter_context(replaced(torch.cuda.memory, **answers))
        for module in ACCELERATOR:
            stack.enter_context(replaced(module, **accelerator_memory(answers)))
    else:
        stack.enter_context(replaced(FakeTensor, __format__=_formatted, numpy=_as_array(tracer.mode)))
    stack.enter_context(replaced(FakeTensor, __repr__=_printed))
    backwards = [0]
    run_backward = current_engine()

    def counted(*args: Any, **kwargs: Any) -> Any:
        backwards[0] += 1
        return run_backward(*args, **kwargs)

    stack.enter_context(engine_replaced(watch.backward(counted)))
    passes = ShortPasses(
        most=request.batches or BATCHES, watch=watch, backwards=lambda: backwards[0],
        whole=request.whole_passes, on_cut=watch.pass_cut, on_training_cut=running.observations.cut_training,
        collects=request.batches is None, on_collecting_cut=running.observations.cut_collecting,
        longest=LongestSamples(running.observations.note) if request.longest_samples else None,
    )  # fmt: skip
    stack.enter_context(short_loaders(passes))
    stack.enter_context(
        checkpoints(watch, SavedFiles(tracer.mode, tracer.made_on_cpu, may_write=not request.unsafe_writes))
    )
    stack.enter_context(_exit_reported(watch))
    stack.enter_context(other_processes(running.observations.started))
    stack.enter_context(script_ranks(tracer, running.observations.joined))
    stack.enter_context(_loops_followed(running))
    stack.enter_context(_optimizers_known(watch))
    stack.enter_context(stubbed(request.stubs))
    tracer.watch = watch
    tracer.on_operator = running.stop.check
    watch.on_window = running.stop.window_ended
    watch.on_training = running.stop.training_goes_on
    stack.enter_context(tracer.recording())
    for hook in watch.hooks():
        stack.callback(hook.remove)


def _loops_followed(running: Running) -> Any:
    """Context in which the script's loops, and conditions on counters, ask the trace."""
    watch, loops, is_own = running.watch, running.loops, running.tracer.lines.is_own
    repeated = RepeatedTurns(watch=watch, note=running.observations.note, counted=running.intervals.counted)

    def turns(iterable: Any, where: str, yields: bool, collects: bool) -> Any:
        keeps_all = collects or running.request.whole_passes
        iterable = iterable if keeps_all else repeated.turns(iterable, where)
        return iterable if yields else loops.turns(iterable, where)

    return code_rewritten(
        is_own, running.intervals.remainder, turns, loops.goes_on, running.best_results.improves
    )  # fmt: skip


def _fails_past_the_end(error: BaseException, running: Running) -> bool:
    """Whether the script fails after its training was cut short, as where it misses a file of a later step."""
    if not running.loops.ended or isinstance(error, torch.OutOfMemoryError):
        return False
    summary = script_error(error, running.tracer).summary.rstrip(".")
    running.observations.note(f"the rest of the script, past the training that was cut short: {summary}")
    return True


@contextmanager
def _exit_reported(watch: StepWatch) -> Iterator[None]:
    """Context in which a script that has trained is left by ``os._exit`` as by ``sys.exit``: its trace is answered."""
    process, exit_at_once = os.getpid(), os._exit

    def leave(code: int) -> None:
        if watch.steps and os.getpid() == process and threading.current_thread() is threading.main_thread():
            raise SystemExit(code)
        exit_at_once(code)

    with replaced(os, _exit=leave):
        yield


@contextmanager
def _optimizers_known(watch: StepWatch) -> Iterator[None]:
    initialize = Optimizer.__init__

    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        initialize(self, *args, **kwargs)
        watch.optimizer_made(self)

    with replaced(Optimizer, __init__=made):
        yield


def _as_array(mode: HybridMode) -> Callable[..., Any]:
    """``Tensor.numpy`` on the virtual CPU: what is known of the content, else 0.5 or 0. The array, and views of
    it, hold the tensor's memory."""

    def numpy(tensor: FakeTensor, *, force: bool = False) -> Any:
        with DisableTorchDispatch():
            empty = torch.zeros(tuple(tensor.shape), dtype=tensor.dtype)
        real = mode.stand_in(tensor, None, lambda: empty)
        with DisableTorchDispatch():
            array = real.numpy()
        array.base.__dict__["_memfit_memory_of"] = tensor
        return array

    return numpy


def _printed(tensor: FakeTensor, **kwargs: Any) -> str:
    """A tensor without data, as a script prints it."""
    device = str(tensor.device).replace(NAME, "cuda")
    return f"tensor(..., device='{device}', size={tuple(tensor.shape)}, dtype={tensor.dtype})"


def _formatted(tensor: FakeTensor, spec: str) -> str:
    return tensor.item().__format__(spec) if tensor.dim() == 0 else object.__format__(tensor, spec)


@contextmanager
def _addresses() -> Iterator[None]:
    """Gives fake storages addresses: code that looks for shared weights compares them."""
    plain = torch.UntypedStorage.data_ptr
    pointer = torch.Tensor.data_ptr

    def address(storage: Any) -> int:
        return storage_id(storage) if storage.device.type in ("meta", "vgpu") else plain(storage) or storage_id(storage)

    def tensor_address(tensor: Any) -> int:
        if isinstance(tensor, FakeTensor):
            return int(storage_id_of(tensor) + tensor.storage_offset() * tensor.itemsize)
        return int(pointer(tensor))

    with replaced(torch.UntypedStorage, data_ptr=address):
        redirect.INSTEAD[pointer] = tensor_address
        try:
            yield
        finally:
            redirect.INSTEAD.pop(pointer)


def _may_hold_early(tracer: ScriptTracer, where: str) -> bool:
    """Whether a condition may hold early: while something is traced, and unless the user gave another answer."""
    return not tracer.is_paused and bool(tracer.virtual.assumptions.answer(True, where))


def _run(command: ScriptCommand) -> None:
    """Runs the script as ``python`` does."""
    os.environ.update(command.environment)
    if command.is_module:
        sys.argv = [command.target, *command.args]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(command.target, run_name="__main__", alter_sys=True)
        return
    path = Path(command.target).resolve()
    sys.argv = [command.target, *command.args]
    sys.path.insert(0, str(path.parent))
    before, main = sys.modules["__main__"], ModuleType("__main__")
    main.__dict__.update(__file__=str(path), __builtins__=builtins)
    sys.modules["__main__"] = main
    try:
        exec(compiled(path.read_bytes(), str(path)), main.__dict__)
    finally:
        sys.modules["__main__"] = before


def _limit_host_memory(nbytes: int | None) -> None:
    if nbytes is not None:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_DATA, (nbytes, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    signal.signal(signal.SIGINT, signal.default_int_handler)
