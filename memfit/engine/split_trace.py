"""A forward of a job on tensors without bytes, which follows what columns of linear layers give.

Every linear layer and embedding may be cut by columns: its output is then split (``split_rules``). A linear layer whose
input is split along its last dimension takes the parts as its rows, and gives a whole tensor. Where parts meet what
they cannot be computed with, their layers are not cut.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from memfit.engine.adapters import holders_of, is_adapted, is_linear, outside_adapters
from memfit.engine.fake_forward import WithAnswers
from memfit.engine.split_rules import carried, is_pointwise
from memfit.engine.tensor_split import MixedError, Operation, Split
from memfit.engine.writable_outputs import writable
from memfit.nested_tensors import tensors_in
from memfit.torch_compat.attributes import own_parameters


@dataclass(frozen=True, kw_only=True)
class Step:
    """One operator of a forward, as it runs where layers are cut.

    Attributes:
        function: the operator.
        shapes: of its outputs on a rank.
        module: the innermost module that called it.
        sizes: of the dimensions of its tensors of which a rank has a part, on one device.
        sources: the layers that gave those.
    """

    function: str
    shapes: tuple[tuple[int, ...], ...]
    module: nn.Module | None
    sizes: frozenset[int]
    sources: frozenset[str]


@dataclass(kw_only=True)
class Findings:
    """What a forward showed.

    Attributes:
        rows: layers that took parts as their rows, each with the layers that gave them.
        mixed: layers whose parts were mixed, each with the reason.
        parts: of those, how many tensors one after the other their output may be.
        sources: layers that gave parts.
        read: layers whose weights were read outside of their forward.
        whole_inputs: layers that were called with whole tensors.
        steps: the operators outside of layers, in their order.
        together: of each layer those that are cut with it.
    """

    rows: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    mixed: dict[str, str] = field(default_factory=dict)
    parts: dict[str, int] = field(default_factory=dict)
    sources: set[str] = field(default_factory=set)
    read: set[str] = field(default_factory=set)
    whole_inputs: set[str] = field(default_factory=set)
    steps: list[Step] = field(default_factory=list)
    together: dict[str, set[str]] = field(default_factory=dict)

    def join(self, sources: Set[str]) -> None:
        """Notes that these layers are cut together or not at all."""
        joined = set(sources).union(*(self.together.get(source, {source}) for source in sources))
        for source in joined:
            self.together[source] = joined

    def mix(self, split: Split, reason: str, parts: int = 0) -> None:
        """Notes that parts were mixed."""
        for source in split.sources:
            self.mixed.setdefault(source, reason)
            if parts and len(split.sources) == 1:
                self.parts.setdefault(source, parts)

    def uncut(self) -> dict[str, str]:
        """Layers that gave parts and cannot be cut, each with the reason. What else they would do shows once those are
        whole whose parts were mixed."""
        reasons = self.mixed | dict.fromkeys(self.read & self.sources, "its weight is read outside of its forward")
        for name in sorted(self.rows.keys() & self.read):
            reasons |= dict.fromkeys(self.rows[name], f"the weight of {name} is read outside of its forward")
        for source in sorted(self.sources):
            reason = next((reasons[other] for other in sorted(self.group_of(source)) if other in reasons), None)
            if reason is not None:
                reasons.setdefault(source, reason)
        useful = {source for given in self.rows.values() for source in given}
        for name in () if reasons else sorted(self.rows.keys() & self.whole_inputs):
            for source in self.rows[name]:
                reasons |= dict.fromkeys(self.group_of(source), f"{name} is called with whole tensors too")
        idle = () if reasons else [source for source in self.sources if not self.group_of(source) & useful]
        return reasons | dict.fromkeys(idle, "no linear layer takes its parts")

    def group_of(self, source: str) -> set[str]:
        """Layers that are cut together with one, itself included."""
        return self.together.get(source, {source})


class SplitTrace(WithAnswers):
    """Follows splits through the operators of a forward.

    Args:
        layers: those that may be cut, by name.
        columns: names of those that give parts, and of how many tensors their output is made.
    """

    def __init__(self, layers: Mapping[str, nn.Module], columns: Mapping[str, int], ranks: int) -> None:
        super().__init__()
        self._layers, self._columns, self._ranks = layers, columns, ranks
        self._splits = WeakIdKeyDictionary()
        self._inside = 0
        self._running: list[tuple[nn.Module, bool]] = []
        self._unknown = WeakIdKeyDictionary()
        self._weights = {
            id(parameter): name for name, layer in layers.items() for parameter in layer.parameters(recurse=True)
        }
        self.findings = Findings()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operator, and notes the splits of its outputs."""
        kwargs = kwargs or {}
        output = self.run(func, args, kwargs)
        if not self._inside and not _is_question(func):
            self._follow(func, args, kwargs, output)
        return output

    def call(self, name: str, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A layer's forward."""
        given = next(tensors_in((args, kwargs)), None)
        split = self._splits.get(given) if given is not None else None
        self._inside += 1
        try:
            output = writable(inner(*args, **kwargs))
        finally:
            self._inside -= 1
        if self._inside or not isinstance(output, Tensor):
            return output
        if split is not None and given is not None and self._take_rows(name, given, split):
            return output
        self.findings.whole_inputs.add(name)
        parts = self._columns.get(name)
        if parts:
            self._give_columns(name, output, parts)
        return output

    def _take_rows(self, name: str, given: Tensor, split: Split) -> bool:
        embeds = isinstance(self._layers[name], nn.Embedding)
        if split.dim == given.dim() - 1 and split.outer == 1 and not embeds:
            self.findings.rows[name] |= split.sources
            self.findings.join(split.sources)
            return True
        self.findings.mix(split, f"{name} takes parts along another dimension than its rows")
        return False

    def _give_columns(self, name: str, output: Tensor, parts: int) -> None:
        self.findings.sources.add(name)
        units, rest = divmod(output.shape[-1], parts)
        split = Split(dim=output.dim() - 1, outer=parts, units=units, sources=frozenset([name]))
        if rest or units % self._ranks:
            self.findings.mix(split, f"{output.shape[-1]} columns do not divide")
        else:
            self._splits[output] = split

    def _follow(self, func: Any, args: Any, kwargs: Any, output: Any) -> None:
        tensors = list(tensors_in((args, kwargs)))
        for tensor in tensors:
            name = self._weights.get(id(tensor))
            if name is not None:
                self.findings.read.add(name)
        outputs = list(tensors_in(output))
        known = [split for tensor in tensors if (split := self._splits.get(tensor)) is not None]
        carried_on: list[Split | None] = [None] * len(outputs)
        unknown = any(tensor in self._unknown for tensor in tensors)
        if known and not unknown:
            try:
                carried_on = self._carried(func, args, kwargs, output, known)
            except MixedError as error:
                unknown = error.parts > 0  # else the layers are whole, and what they give is
                for split in known:
                    self.findings.mix(split, error.reason, error.parts)
        if unknown:
            for tensor in outputs:
                self._unknown[tensor] = True
        for tensor, split in zip(outputs, carried_on, strict=True):
            if split is not None:
                self._splits[tensor] = split
            elif tensor in self._splits:
                del self._splits[tensor]
        self._note(func, tensors, outputs, known)

    def _carried(self, func: Any, args: Any, kwargs: Any, output: Any, known: list[Split]) -> list[Split | None]:
        """The splits of an operator's outputs. Where a layer's output may be several tensors, what is computed from it
        is not looked at until a layer takes it."""
        name = str(func).split(".")[1]
        operation = Operation(
            name=name, args=args, kwargs=kwargs, output=output, split_of=self._splits.get, ranks=self._ranks,
            sums_gradients=self._sums_gradients(),
        )  # fmt: skip
        self.findings.join(frozenset().union(*(split.sources for split in known)))
        splits = carried(operation, is_pointwise(func))
        return splits if isinstance(splits, list) else [splits] * len(list(tensors_in(output)))

    def _sums_gradients(self) -> bool:
        """Whether the module that runs is one whose gradients are summed where it sees parts: its input is split, and
        its own parameters are all that it has (``local_parameters``)."""
        if not self._running:
            return False
        module, of_parts = self._running[-1]
        own = any(parameter is not None for parameter in own_parameters(module).values())
        return of_parts and own and not any(True for child in module.children() for _ in child.parameters())

    def _note(self, func: Any, tensors: list[Tensor], outputs: list[Tensor], known: list[Split]) -> None:
        if _is_copy(func):
            return
        made = [(tensor, self._splits.get(tensor)) for tensor in outputs]
        given = [(tensor, self._splits.get(tensor)) for tensor in tensors]
        sizes = {tensor.shape[split.dim] for tensor, split in (*made, *given) if split is not None}
        sources = frozenset().union(*(split.sources for split in known))
        shapes = tuple(self._on_a_rank(tensor, split) for tensor, split in made)
        module = self._running[-1][0] if self._running else None
        step = Step(function=_kind_of(func), shapes=shapes, module=module, sizes=frozenset(sizes), sources=sources)
        self.findings.steps.append(step)

    def _on_a_rank(self, tensor: Tensor, split: Split | None) -> tuple[int, ...]:
        sizes = tuple(tensor.shape)
        if split is None:
            return sizes
        return (*sizes[: split.dim], sizes[split.dim] // self._ranks, *sizes[split.dim + 1 :])

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """A module is called."""
        of_parts = not self._inside and any(
            self._splits.get(tensor) is not None for tensor in tensors_in((args, kwargs))
        )
        self._running.append((module, of_parts))

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """A module's forward ends, also with an error."""
        while self._running and self._running.pop()[0] is not module:
            pass

    def end_net(self, module: nn.Module, args: Any, output: Any) -> None:
        """What a net gives is whole."""
        for tensor in tensors_in(output):
            split = self._splits.get(tensor)
            if split is not None:
                self.findings.mix(split, "the net gives what it gives")


def _is_question(func: Any) -> bool:
    """Whether an operator asks for a tensor's device, sizes or strides."""
    namespace, name, _ = str(func).split(".")
    return namespace == "prim" or name.startswith("sym_")


def _is_copy(func: Any) -> bool:
    """Whether an operator gives what it takes: whether one runs follows from sizes that are one, and from views."""
    return str(func).split(".")[1] in ("clone", "detach", "alias")


def _kind_of(func: Any) -> str:
    """An operator's name; that of a view where it makes one of a tensor that it has copied."""
    return str(func).replace("aten._unsafe_view.", "aten.view.")


def layers_of(name: str, net: nn.Module) -> dict[str, nn.Module]:
    """Linear layers and embeddings of a net that share no parameter, by name; those within adapted ones are left
    out."""
    holders, layers = holders_of(net), dict[str, nn.Module]()
    for path, module in outside_adapters(net):
        plain = type(module).forward in (nn.Linear.forward, nn.Embedding.forward)
        held = [holders[id(parameter)] for parameter in module.parameters()]
        if (plain or (is_adapted(module) and is_linear(module))) and held and max(held) == 1:
            layers[f"{name}.{path}"] = module
    return layers


@contextmanager
def watched(nets: Mapping[str, nn.Module], layers: Mapping[str, nn.Module], trace: Any) -> Iterator[None]:
    """Inside, the trace learns of the calls of modules, and calls the forwards of layers."""
    hooks: list[Any] = []
    for net in nets.values():
        hooks.append(net.register_forward_hook(trace.end_net))
        for module in net.modules():
            hooks.append(module.register_forward_pre_hook(trace.enter, with_kwargs=True, prepend=True))
            hooks.append(module.register_forward_hook(trace.leave, always_call=True))
    for name, layer in layers.items():
        vars(layer)["forward"] = partial(trace.call, name, layer.forward)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for layer in layers.values():
            del vars(layer)["forward"]


class _DiffersError(Exception):
    """An operator is not the one that runs on one device, or gives another shape than a rank has."""


class LocalTrace(WithAnswers):
    """Compares the operators of a forward whose layers are cut with those that were followed.

    Args:
        columns, rows: layers that are cut.
    """

    def __init__(self, steps: list[Step], columns: Set[str], rows: Set[str], ranks: int) -> None:
        super().__init__()
        self._steps, self._columns, self._rows, self._ranks = steps, columns, rows, ranks
        self._inside = 0
        self.position = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operator.

        Raises:
            _DiffersError: it is another one than it was, or its output is no part of what it was.
        """
        output = self.run(func, args, kwargs or {})
        if self._inside or _is_question(func) or _is_copy(func):
            return output
        step = self._steps[self.position] if self.position < len(self._steps) else None
        shapes = tuple(tuple(tensor.shape) for tensor in tensors_in(output))
        if step is None or step.function != _kind_of(func) or step.shapes != shapes:
            raise _DiffersError(f"{func} gives {shapes}")
        self.position += 1
        return output

    def call(self, name: str, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A layer's forward: of a layer that is cut, a tensor of the shape that a rank has."""
        self._inside += 1
        try:
            if name in self._rows:
                return writable(self._whole(inner, *args, **kwargs))
            output = inner(*args, **kwargs)
            return writable(self._part(output) if name in self._columns and not self._inside > 1 else output)
        finally:
            self._inside -= 1

    def _whole(self, inner: Any, *args: Any, **kwargs: Any) -> Any:
        given = next(tensors_in((args, kwargs)))
        return inner(torch.cat([given] * self._ranks, -1))

    def _part(self, output: Tensor) -> Tensor:
        return output.chunk(self._ranks, -1)[0].clone()

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Nothing is noted."""

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """Nothing is noted."""

    def end_net(self, module: nn.Module, args: Any, output: Any) -> None:
        """Nothing is noted."""
