"""StepMonitor: one line of metrics for each optimizer step of a loop that a person owns.

    watch = memfit.watch(optimizer, units=32)

A hook after the optimizer's step reads memory and time, writes a line and looks for growth. Growth that goes on over
all readings is a leak: it is named once with what holds it, and again each time it has doubled.
"""

from __future__ import annotations

import inspect
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from memfit.accumulation.refusals import is_deepspeed_engine
from memfit.accumulation.wrapped_optimizer import unwrapped
from memfit.errors import InputError
from memfit.monitoring.engine_steps import EngineStepHook
from memfit.monitoring.epoch_lengths import EpochLengths
from memfit.monitoring.holders import data_sets_of_workers, holders
from memfit.monitoring.predicted import predicted_bytes
from memfit.monitoring.readings import CardMemory, HostMemory, children_bytes
from memfit.monitoring.step_outputs import StepOutputs
from memfit.sizes import format_size
from memfit.train.recovery.memory_growth import Growth, MemoryGrowth

CHILDREN_EVERY = 1.0
"""Seconds between two readings of the workers' memory."""
LEAST_LEAK = 8 << 20
"""Bytes from which on growth is named."""
LEAST_PART = 0.02
"""Growth is named from this part of what was held at its beginning on."""
LOOK_EVERY = 16
"""Readings between two looks for growth."""

_KEYS = {"host memory": "host_bytes", "workers' memory": "workers_bytes", "card memory": "allocated_bytes"}
"""What may leak, and its reading."""

Callback = Callable[[dict[str, Any]], None]


class StepMonitor:
    """Watches the steps of one optimizer, or of those that hold a model's parameters.

    Attributes:
        steps: steps so far.
        line: what was read after the last one.
        leaks: what was found, in words.
        warnings: of the epoch's largest step, each before it.
    """

    def __init__(
        self,
        target: Optimizer | nn.Module,
        *,
        out: str | Path | None = "metrics.jsonl",
        prediction: Any = None,
        units: float = 1,
        tensorboard: str | Path | None = None,
        wandb: str | Path | None = None,
        callback: Callback | None = None,
        models: Sequence[nn.Module] = (),
        epoch: EpochLengths | None = None,
    ) -> None:
        _check_options(units, callback, models, epoch)
        self._epoch, self._epoch_step = epoch, 0
        self._modules = [*models, *([target] if isinstance(target, nn.Module) else [])]
        self._optimizers: list[Optimizer] = [target] if isinstance(target, Optimizer) else []
        self._units, self._counted = units, 0.0
        self._predicted = {f"predicted_{k}": v for k, v in predicted_bytes(prediction).items()} if prediction else {}
        self._callback = callback
        self._outputs = StepOutputs(out, tensorboard, wandb, self._predicted)
        self._host, self._target = HostMemory(), target
        self._card: CardMemory | None = None
        self._children, self._children_at = 0, 0.0
        self._growth = {name: MemoryGrowth() for name in _KEYS}
        self._notes, self._named = 0, dict.fromkeys(self._growth, 0)
        self._before = time.perf_counter()
        self.steps = 0
        self.line: dict[str, Any] = {}
        self.leaks: list[str] = []
        self.warnings: list[str] = []
        self._warn_of_next()
        self._hook = _register(self, target)

    def count(self, units: float) -> None:
        """Adds units (samples, tokens) that the next step learns from, in place of the constant number."""
        self._counted += units

    def _stepped(self) -> None:
        now = time.perf_counter()
        seconds, self._before = now - self._before, now
        if not self.steps:
            self._card = _card(_device(self._target))
        if now - self._children_at > CHILDREN_EVERY:
            self._children, self._children_at = children_bytes(), now
        line = {
            "window": self.steps,
            "seconds": seconds,
            "units_per_second": (self._counted or self._units) / seconds,
            "host_bytes": self._host.resident(),
            "workers_bytes": self._children,
            **self._predicted,
        }
        if self._card is not None:
            line |= self._card.read()
        self.line, self._counted = line, 0.0
        self._note(line)
        self._outputs.line(line)
        if self._callback is not None:
            self._callback(line)
        self.steps += 1
        if self._epoch is not None:
            self._epoch_step += 1
            self._warn_of_next()

    def new_epoch(self, epoch: EpochLengths) -> None:
        """Begins an epoch of these lengths.

        Raises:
            InputError: no EpochLengths.
        """
        _check_options(0, None, (), epoch)
        self._epoch, self._epoch_step = epoch, 0

    def _warn_of_next(self) -> None:
        """Says before it that the next step is the epoch's largest."""
        epoch, step = self._epoch, self._epoch_step
        if epoch is None or step >= len(epoch.units) or not epoch.rises_at(step):
            return
        largest = max(epoch.units[:step])
        text = (
            f"the next step ({self.steps}) is the largest of the epoch: {epoch.units[step]:,.0f} padded units, where "
            f"no step before had more than {largest:,.0f}"
        )
        self.warnings.append(text)
        sys.stderr.write(f"memfit: {text}\n")

    def _note(self, line: dict[str, Any]) -> None:
        """Adds a reading of each memory, all in the same steps."""
        if not self._growth["host memory"].wants(self.steps):
            return
        for name, key in _KEYS.items():
            self._growth[name].note(self.steps, line.get(key, 0))
        self._notes += 1
        if self._notes % LOOK_EVERY == 0:
            self._look(line)

    def _look(self, line: dict[str, Any]) -> None:
        for name, readings in self._growth.items():
            growth = readings.steady()
            least = max(LEAST_LEAK, 2 * self._named[name])
            if growth is None or growth.bytes < max(least, growth.begin * LEAST_PART):
                continue
            self._named[name] = growth.bytes
            text = self._leak(name, growth)
            self.leaks.append(text)
            line["leak"] = text
            sys.stderr.write(f"memfit: {text}\n")

    def _leak(self, name: str, growth: Growth) -> str:
        per_step = growth.bytes / max(growth.last - growth.first, 1)
        text = (
            f"{name} grew from {format_size(growth.begin)} (step {growth.first}) to {format_size(growth.end)} "
            f"(step {growth.last}), {format_size(per_step)} a step"
        )
        if name == "workers' memory":
            return f"{text}: {'; '.join(data_sets_of_workers()) or 'the data set or its workers keep something'}"
        try:
            largest = holders(self._modules, self._optimizers, growth.bytes)
        except Exception as error:  # an object of the script may raise where it is looked at
            return f"{text}: what holds it cannot be searched ({type(error).__name__})"
        return f"{text}: {'; '.join(largest) or 'no object of Python that can be reached holds so much'}"

    def close(self) -> None:
        """Ends the watch: files are whole, and the hook is gone. It can be called again."""
        self._hook.remove()
        self._outputs.close()
        self._host.close()

    def __enter__(self) -> StepMonitor:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def watch(target: Optimizer | nn.Module, **options: Any) -> StepMonitor:
    """Writes memory, time and speed of each step, beside a prediction, and names leaks.

    Args:
        target: the optimizer whose steps are watched, a DeepSpeed engine, or a model: then every optimizer that holds
            its parameters.
        options: ``out`` (default metrics.jsonl; None: no file), ``prediction`` (a Prediction, a plan, or the JSON of
            memfit trace or memfit predict), ``units`` a step learns from, ``tensorboard`` and ``wandb`` (folders),
            ``callback`` (called with each line), ``models`` whose attributes may hold what leaks, ``epoch`` (an
            ``EpochLengths``: the watch warns before the epoch's largest step).

    Raises:
        InputError: neither an optimizer nor a model, an unknown option, or a file that cannot be written.
    """
    target = unwrapped(target)
    if not isinstance(target, Optimizer | nn.Module):
        write = "write memfit.watch(optimizer) or memfit.watch(model)"
        raise InputError(f"memfit.watch({type(target).__name__})", "neither an optimizer nor a model", write)
    known = [name for name in inspect.signature(StepMonitor).parameters if name != "target"]
    for name in options.keys() - known:
        raise InputError(f"memfit.watch({name}=...)", "no such option", f"write one of {', '.join(known)}")
    return StepMonitor(target, **options)


def _check_options(units: Any, callback: Any, models: Any, epoch: Any) -> None:
    """Raises InputError for a value that would end the training in a later step."""
    if isinstance(units, bool) or not isinstance(units, int | float) or not 0 <= units < float("inf"):
        raise InputError(
            f"memfit.watch(units={units!r})", "no number of units", "write the samples or tokens of a step"
        )
    if callback is not None and not callable(callback):
        write = "write a function that takes the line, a dict"
        raise InputError(f"memfit.watch(callback={callback!r})", "it cannot be called", write)
    if not isinstance(models, Sequence) or not all(isinstance(each, nn.Module) for each in models):
        raise InputError("memfit.watch(models=...)", "not a list of nn.Module", "write models=[model]")
    if epoch is not None and not isinstance(epoch, EpochLengths):
        write = "write epoch=memfit.epoch_lengths(batches, lengths)"
        raise InputError(f"memfit.watch(epoch={type(epoch).__name__})", "no EpochLengths", write)


def _register(monitor: StepMonitor, target: Optimizer | nn.Module) -> Any:
    """A hook after the steps, which does not keep the monitor alive."""
    own = weakref.ref(monitor)

    def stepped(*_: Any) -> None:
        if (alive := own()) is not None:
            alive._stepped()

    if isinstance(target, Optimizer):
        return target.register_step_post_hook(stepped)
    if is_deepspeed_engine(target):
        return EngineStepHook(target, stepped)
    others: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    def any_stepped(optimizer: Optimizer, *_: Any) -> None:
        alive = own()
        if alive is None or optimizer in others:
            return
        if not any(optimizer is each for each in alive._optimizers):
            assert isinstance(alive._target, nn.Module)
            held = {
                id(p) for p in alive._target.parameters()
            }  # those of now: a wrapper or to_empty() replaces parameters
            if not any(id(p) in held for group in optimizer.param_groups for p in group["params"]):
                others.add(optimizer)
                return
            alive._optimizers.append(optimizer)
        if optimizer is alive._optimizers[0]:
            alive._stepped()

    return register_optimizer_step_post_hook(any_stepped)


def _device(target: Optimizer | nn.Module) -> torch.device:
    if isinstance(target, nn.Module):
        return next((p.device for p in target.parameters()), torch.device("cpu"))
    return next((p.device for group in target.param_groups for p in group["params"]), torch.device("cpu"))


def _card(device: torch.device) -> CardMemory | None:
    return CardMemory(device) if device.type == "cuda" else None
