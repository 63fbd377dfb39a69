"""What a window gave, read by an engine around the engine: losses of micro-batches, gradients, weights."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from memfit.apply.train_state import TrainState
from memfit.engine.protocol import Engine
from memfit.job import Job, Nets, Turn
from memfit.torch_compat.batch_norm import BatchNormBase
from memfit.verify.step_keys import step_key


@dataclass(kw_only=True)
class RecordedWindow:
    """One window on one rank; tensors of steps by key (``memfit.verify.step_keys``), others by ``net.path``."""

    micro_losses: dict[str, list[dict[str, tuple[float, float]]]] = field(default_factory=dict)
    """By turn, for each micro-batch: (sum, units) of each loss."""
    gradients: dict[str, Tensor] = field(default_factory=dict)
    """Over all ranks, normalised, before clipping."""
    magnitudes: dict[str, Tensor] = field(default_factory=dict)
    """The sum of the micro-batches' gradients' absolute values, on the same scale: what rounding is relative to."""
    loss_magnitudes: dict[str, float] = field(default_factory=dict)
    """By loss, what is added to its terms' magnitudes: rounding inside of micro-batches, where layers are cut."""
    weights: dict[str, Tensor] = field(default_factory=dict)
    """Weights after their step."""
    averages: dict[str, Tensor] = field(default_factory=dict)
    """Averages of the weights after the window."""
    moved: dict[str, None] = field(default_factory=dict)
    """Buffers that a forward wrote, but for batch normalisation's running statistics."""
    scales: dict[str, float] = field(default_factory=dict)
    """The factor by which clipping scaled each gradient."""
    steps: list[tuple[Optimizer, list[list[str]]]] = field(default_factory=list)
    """Of each step in order: the optimizer as before it, and the keys of the parameters of each of its groups."""


class RecordingEngine:
    """An engine that notes what passes through it; everything else is the engine's own."""

    def __init__(self, engine: Engine, *, magnitudes: bool = False) -> None:
        self._engine, self._magnitudes = engine, magnitudes
        self.seen = RecordedWindow()
        self._names: dict[int, str] = {}
        self._parameters: list[nn.Parameter] = []
        self.forced: dict[str, Tensor] = {}
        """Weights by key to go on with after their step: a later turn then begins from equal weights too."""
        self._buffers: dict[str, Tensor] = {}
        self._nets: Nets = {}
        self._at_begin: dict[str, Tensor] = {}
        self._stepped: dict[str, int] = {}
        """Steps of each parameter in this window."""
        self._raw: dict[str, Tensor] = {}
        self._sums: dict[str, Tensor] = {}

    @property
    def engine(self) -> Engine:
        """The engine itself."""
        return self._engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def watch(self, train_state: TrainState) -> None:
        """Learns the parameters' names, and listens to the losses."""
        self._names = {
            id(p): f"{name}.{path}" for name, net in train_state.nets.items() for path, p in net.named_parameters()
        }
        self._parameters = [p for net in train_state.nets.values() for p in net.parameters() if p.requires_grad]
        self._buffers = {
            f"{name}.{path}.{key}".replace("..", "."): buffer
            for name, net in train_state.nets.items()
            for path, module in net.named_modules()
            for key, buffer in module.named_buffers(recurse=False)
            if not isinstance(module, BatchNormBase)
        }
        self._nets = train_state.nets
        _listen(train_state.job, self)

    def begin(self) -> None:
        """A new window."""
        self.seen, self._raw, self._stepped = RecordedWindow(), {}, {}
        self._at_begin = {name: buffer.detach().clone() for name, buffer in self._buffers.items()}

    @contextmanager
    def accumulating(self, nets: Any, last: bool, shared: bool = True) -> Iterator[None]:
        """One micro-batch, from the window's first buffers; where asked, notes the size of its own gradient."""
        for name, buffer in self._buffers.items():
            buffer.data.copy_(self._at_begin[name])
        before = {id(p): p.grad.clone() for p in self._parameters if self._magnitudes and p.grad is not None}
        with self._engine.accumulating(nets, last, shared):
            yield
        moved = [name for name, buffer in self._buffers.items() if not torch.equal(buffer, self._at_begin[name])]
        self.seen.moved.update(dict.fromkeys(moved))
        for parameter in self._parameters if self._magnitudes else ():
            if parameter.grad is not None:
                name = self._names[id(parameter)]
                own = parameter.grad - before[id(parameter)] if id(parameter) in before else parameter.grad
                self._raw[name] = self._raw[name] + own.abs() if name in self._raw else own.abs()
                self._sums[name] = parameter.grad.clone()

    def clip(self, parameters: Sequence[nn.Parameter], max_norm: float) -> Tensor:
        """Notes the gradients before they are clipped."""
        self._note({self.name_of(parameter): parameter for parameter in parameters})
        norm = self._engine.clip(parameters, max_norm)
        scale = min(1.0, max_norm / (float(norm) + 1e-6))
        for parameter in parameters:
            self.seen.scales[self._key(self.name_of(parameter))] = scale
        return norm

    def step(self, optimizer: Optimizer) -> None:
        """Notes the gradients that were not clipped."""
        parameters = self._engine.stepped_parameters(optimizer, self._names)
        self._note({name: p for name, p in parameters.items() if self._key(name) not in self.seen.scales})
        if self._magnitudes and not self.forced:
            groups = [[self._key(self.name_of(p)) for p in group["params"]] for group in optimizer.param_groups]
            self.seen.steps.append((copy.deepcopy(optimizer), groups))
        self._engine.step(optimizer)
        self._raw = {}
        keys = {name: self._key(name) for name in parameters}
        weights = self._engine.full_weights(parameters)  # of other stages too
        self.seen.weights |= {self._key(name): weight for name, weight in weights.items()}
        forced = {name: self.forced[key] for name, key in keys.items() if key in self.forced}
        self._engine.put_weights(parameters, forced)
        for name in weights:
            self._stepped[name] = self._stepped.get(name, 0) + 1

    def note_averages(self, averages: Nets) -> None:
        """Notes averages of the weights, without buffers, as full tensors; every rank that keeps some calls it."""
        for name, net in averages.items():
            values = self._engine.weights(net)
            buffers = {path for path, _ in net.named_buffers()}
            learnt = [path for path in values if path not in buffers]
            self.seen.averages |= {f"{name}.{path}": values[path].detach().clone() for path in learnt}

    def _note(self, parameters: Mapping[str, nn.Parameter]) -> None:
        if not parameters:
            return
        gradients = {self._key(name): value for name, value in self._engine.full_gradients(parameters).items()}
        self.seen.gradients |= gradients
        self.seen.scales |= dict.fromkeys(gradients, 1.0)
        for name in self._raw.keys() & parameters.keys():
            key, gradient = self._key(name), parameters[name].grad
            if key in gradients and gradient is not None:
                summed = float(self._sums[name].double().norm())
                normalised = float(gradient.double().norm()) / summed if summed else 1.0
                self.seen.magnitudes[key] = self._raw[name] * normalised

    def _key(self, name: str) -> str:
        return step_key(name, self._stepped.get(name, 0))

    def name_of(self, parameter: nn.Parameter) -> str:
        """``net.path``."""
        return self._names.get(id(parameter), f"parameter of {tuple(parameter.shape)}")


def _listen(job: Job, recording: RecordingEngine) -> None:
    """Wraps the losses of the job's turns, on this instance."""
    turns = job.turns

    def listening(optimizers: Sequence[str]) -> list[Turn]:
        return [replace(turn, loss=_noted(turn, recording)) for turn in turns(optimizers)]

    job.turns = listening  # type: ignore[method-assign]


def _noted(turn: Turn, recording: RecordingEngine) -> Any:
    def loss(nets: Any, batch: Any, shared: dict[str, Any]) -> Any:
        given = turn.loss(nets, batch, shared)
        named = dict(given) if isinstance(given, Mapping) else {turn.name: given}
        noted = {
            name: (float(pair[0].detach()), float(pair[1])) for name, pair in named.items()
            if isinstance(pair, tuple) and len(pair) == 2
        }  # fmt: skip
        recording.seen.micro_losses.setdefault(turn.name, []).append(noted)
        return given

    return loss
