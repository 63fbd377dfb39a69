"""StepMonitor: one line of metrics for each optimizer step of a loop that a person owns.

    watch = memfit.watch(optimizer, units=32)

A hook after the optimizer's step reads memory and time, writes a line and looks for growth. Growth that goes on over
all readings is a leak: it is named once with what holds it, and again each time it has doubled.
"""

from __future__ import annotations

import json
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from memfit.accumulation.refusals import is_deepspeed_engine
from memfit.accumulation.wrapped_optimizer import unwrapped
from memfit.errors import InputError, unwritable
from memfit.monitoring.engine_steps import EngineStepHook
from memfit.monitoring.epoch_lengths import EpochLengths
from memfit.monitoring.holders import holders
from memfit.monitoring.predicted import predicted_bytes
from memfit.monitoring.readings import CardMemory, HostMemory, children_bytes
from memfit.show.scalars import TensorBoard, Wandb
from memfit.sizes import format_size
from memfit.train.recovery.memory_growth import Growth, MemoryGrowth

CHILDREN_EVERY, FLUSH_EVERY = 1.0, 1.0
"""Seconds between two readings of the workers' memory, and between two writes to the disk."""
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
        self._epoch, self._epoch_step = epoch, 0
        self._modules = [*models, *([target] if isinstance(target, nn.Module) else [])]
        self._optimizers: list[Optimizer] = [target] if isinstance(target, Optimizer) else []
        self._units, self._counted = units, 0.0
        self._predicted = {f"predicted_{k}": v for k, v in predicted_bytes(prediction).items()} if prediction else {}
        self._outputs = [*_outputs(tensorboard, wandb, self._predicted)]
        self._callback = callback
        self._file = _opened(out)
        self._host, self._card = HostMemory(), _card(_device(target))
        self._children, self._children_at = 0, 0.0
        self._growth = {name: MemoryGrowth() for name in _KEYS}
        self._notes, self._named = 0, dict.fromkeys(self._growth, 0)
        self._before = self._flushed = time.perf_counter()
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
        if self._file is not None:
            self._file.write(_text(line))
            if now - self._flushed > FLUSH_EVERY:
                self._file.flush()
                self._flushed = now
        for output in self._outputs:
            output.line(line)
        if self._callback is not None:
            self._callback(line)
        self.steps += 1
        if self._epoch is not None:
            self._epoch_step += 1
            self._warn_of_next()

    def new_epoch(self, epoch: EpochLengths) -> None:
        """Begins an epoch of these lengths."""
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
            return f"{text}: the data set or its workers keep something"
        largest = holders(self._modules, self._optimizers)
        return f"{text}: {'; '.join(largest)}" if largest else f"{text}: no object of Python holds it"

    def close(self) -> None:
        """Ends the watch: files are whole, and the hook is gone. It can be called again."""
        self._hook.remove()
        if self._file is not None and not self._file.closed:
            self._file.close()
            self._host.close()
        for output in self._outputs:
            output.close()
        self._outputs.clear()

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
    return StepMonitor(target, **options)


def _text(line: dict[str, Any]) -> str:
    """A line of JSON; without a leak it holds finite numbers alone, for which this is half of what json takes."""
    if "leak" in line:
        return json.dumps(line) + "\n"
    return "{" + ", ".join([f'"{name}": {value}' for name, value in line.items()]) + "}\n"


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
    held = {id(p) for p in target.parameters()}

    def any_stepped(optimizer: Optimizer, *_: Any) -> None:
        alive = own()
        if alive is not None and any(id(p) in held for group in optimizer.param_groups for p in group["params"][:1]):
            if optimizer not in alive._optimizers:
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


def _opened(out: str | Path | None) -> Any:
    if out is None:
        return None
    try:
        return open(out, "a", buffering=1 << 16)
    except OSError as error:
        raise unwritable(f"memfit.watch(out={str(out)!r})", error) from error


def _outputs(tensorboard: str | Path | None, wandb: str | Path | None, known: dict[str, int]) -> Iterator[Any]:
    if tensorboard is not None:
        yield TensorBoard(Path(tensorboard))
    if wandb is not None:
        yield Wandb(Path(wandb), known)
