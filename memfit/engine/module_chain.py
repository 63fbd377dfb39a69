"""The modules of a net that run one after the other, as a forward of the job calls them.

The list of blocks that holds most parameters is the middle of the chain: its items, and before and after them what else
of the net has parameters, in the order of the calls. A stage may begin with a module where nothing of the modules
before it is needed from there on but the tensor that it is given first.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from memfit.engine.fake_forward import (
    CPU,
    WithAnswers,
    fake_copies,
    in_copied_process,
    refusal,
    run_losses,
    structure_of,
)
from memfit.errors import InputError
from memfit.job import Job, Nets
from memfit.nested_tensors import tensors_in


@dataclass(frozen=True, kw_only=True)
class Call:
    """A call of a module: the numbers of its begin and its end among all."""

    begin: int
    end: int


Calls = Mapping[nn.Module, Sequence[Call]]


@dataclass(frozen=True, kw_only=True)
class ModuleChain:
    """Modules that run one after the other.

    Attributes:
        paths: of the modules within their net, in their order.
        joined: numbers of those that are on the stage of the one before, because more than one tensor is passed on.
    """

    paths: tuple[str, ...]
    joined: frozenset[int]


def module_chain(job: Job, nets: Nets, name: str, where: str, write: str) -> ModuleChain:
    """The modules of a net that run one after the other; none where it has no blocks.

    Args:
        where: what was asked for, for messages.
        write: what to write where the net cannot be cut.

    Raises:
        InputError: the job's loss does not run on tensors without bytes, or the modules run otherwise; names one.
    """
    known, key = _KNOWN.setdefault(job, {}), (name, structure_of(nets))
    if key not in known:
        known[key] = in_copied_process(lambda: _followed(job, nets, name, where, write))
    return known[key]


_KNOWN: weakref.WeakKeyDictionary[Job, dict[Any, ModuleChain]] = weakref.WeakKeyDictionary()
"""Chains of a job's nets: a plan asks for them often, and a search builds nets anew for each mesh."""


def _followed(job: Job, nets: Nets, name: str, where: str, write: str) -> ModuleChain:
    mode, fakes = fake_copies(nets, CPU, everywhere=True)
    net, calls = fakes[name], dict[nn.Module, list[Call]]()
    try:
        run_losses(job, fakes, mode, WithAnswers(), _noted(net, calls))
        blocks = _blocks(net, calls)
        if blocks is None:
            return ModuleChain(paths=(), joined=frozenset())
        chain = list(_chain(net, blocks, calls))
        _check_chain(name, net, chain, calls, where, write)
        flow = _Flow()
        run_losses(job, fakes, mode, flow, flow.watched(chain))
    except InputError:
        raise
    except Exception as error:
        raise refusal(job, where, error, write) from error
    paths = {module: path for path, module in net.named_modules()}
    return ModuleChain(paths=tuple(paths[module] for module in chain), joined=frozenset(flow.joined))


def _check_chain(name: str, net: nn.Module, chain: Sequence[nn.Module], calls: Calls, where: str, write: str) -> None:
    """Raises InputError where modules do not run one after the other, each once."""
    paths = {module: path for path, module in net.named_modules()}
    ends = 0
    for module in chain:
        seen = f"module {name}.{paths[module]} on {where}"
        own = calls.get(module, ())
        if len(own) != 1:
            raise InputError(seen, f"a forward calls it {len(own)} times, and stages call each module once", write)
        if own[0].begin < ends:
            raise InputError(seen, "it runs inside of another one of the modules between which a net is cut", write)
        ends = own[0].end


class _Flow(WithAnswers):
    """Notes which tensors of a module are used once a later one has begun."""

    def __init__(self) -> None:
        super().__init__()
        self.joined: set[int] = set()
        self._begun, self._inside = -1, False
        self._made = WeakIdKeyDictionary()
        """By tensor that comes from a module, the last module that had begun when it was made."""
        self._given: Any = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operator."""
        output = self.run(func, args, kwargs or {})
        used = self._use((args, kwargs))
        if used or self._inside:
            for tensor in tensors_in(output):
                self._made[tensor] = self._begun
        return output

    def _use(self, value: Any) -> bool:
        """Notes that tensors are needed now; whether one of them comes from a module."""
        known = [tensor for tensor in tensors_in(value) if tensor in self._made]
        for tensor in known:
            given = self._inside and tensor is self._given  # the module that runs is called with what was received
            self.joined.update(range(self._made[tensor] + 1, self._begun + (not given)))
        return bool(known)

    @contextmanager
    def watched(self, chain: Sequence[nn.Module]) -> Iterator[None]:
        """Inside, the calls of the modules of a chain are noted."""

        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._begun, self._inside = self._begun + 1, True
            self._given = args[0] if args else None
            self._use((args[1:], kwargs))
            if self._begun and (not args or args[0] not in self._made):
                self.joined.add(self._begun)

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            self._inside = False

        hooks = [module.register_forward_pre_hook(enter, with_kwargs=True) for module in chain]
        hooks += [module.register_forward_hook(leave, always_call=True) for module in chain]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


@contextmanager
def _noted(net: nn.Module, calls: dict[nn.Module, list[Call]]) -> Iterator[None]:
    """Inside, the calls of a net's modules are noted."""
    count, running = [0], list[int]()

    def enter(module: nn.Module, args: Any) -> None:
        count[0] += 1
        running.append(count[0])

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        count[0] += 1
        calls.setdefault(module, []).append(Call(begin=running.pop(), end=count[0]))

    modules = list(net.modules())
    hooks = [module.register_forward_pre_hook(enter) for module in modules]
    hooks += [module.register_forward_hook(leave, always_call=True) for module in modules]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _blocks(net: nn.Module, calls: Calls) -> nn.ModuleList | nn.Sequential | None:
    """The list of several modules that are called once each which holds most parameters, the outermost of those that
    hold as many."""
    lists = [
        module
        for module in net.modules()
        if isinstance(module, nn.ModuleList | nn.Sequential)
        and sum(len(calls.get(child, ())) == 1 for child in module.children()) > 1
    ]
    return max(lists, key=_size, default=None)


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _chain(module: nn.Module, blocks: nn.Module, calls: Calls) -> Iterator[nn.Module]:
    """Modules with parameters in the order of their calls: the blocks, and what runs beside a module that holds them.
    Lists that are not called themselves stand for their items."""
    for child in sorted(module.children(), key=lambda child: _first_call(child, calls)):
        if not any(True for _ in child.parameters()):
            continue
        holds_blocks = any(part is blocks for part in child.modules())
        if holds_blocks or child not in calls:
            yield from _chain(child, blocks, calls)
        else:
            yield child


def _first_call(module: nn.Module, calls: Calls) -> int:
    return min((call.begin for part in module.modules() for call in calls.get(part, ())), default=0)
