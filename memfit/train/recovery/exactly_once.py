"""An optimizer step that memory may fail in the middle of, and that is still applied once.

Three cases:

- A parameter's first step makes its state. It is done parameter by parameter, each copied before, where the optimizer
  treats parameters alone; else with a copy of all. A failure puts the copy back and drops the state that was begun.
- Later, autograd's version counter tells how often each tensor was written before the failure. The step runs again, and
  as many writes to each tensor are left out. What it computes on the way is computed again; if that would read a value
  which the first attempt had already changed, the step is given up.
- A step that is given up (``TornStepError``) must not be saved: the run goes on from its last checkpoint.

Operators on lists, fused steps and writes through ``.data`` leave the version counter as it is; there a dispatch mode
counts from the start. Not seen: writes outside of torch's operators.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from memfit.apply.state_streaming import alone, streams
from memfit.apply.train_state import tensors_in
from memfit.errors import describe
from memfit.torch_compat import TorchDispatchMode, current_dispatch_mode
from memfit.torch_compat.attributes import schema_of, storage_id_of, version_of
from memfit.train.launch.memory_limit import is_memory_failure

ATTEMPTS = 3


class TornStepError(RuntimeError):
    """A step stopped in the middle and cannot be finished: the weights in memory are of no use."""


class ExactlyOnce:
    """Applies steps once. ``relieve`` is called with each failure, and makes room."""

    def __init__(self, relieve: Callable[[BaseException], None]) -> None:
        self._relieve = relieve
        self._stepped: set[int] = set()
        self._unseen: set[int] = set()

    def __call__(self, act: Callable[[], None], optimizer: Optimizer | None, further: Sequence[Tensor] = ()) -> None:
        """Runs ``act``, which steps ``optimizer`` and changes ``further`` tensors in place.

        Raises:
            TornStepError: it stopped in the middle, and what is left cannot be done alone.
        """
        if optimizer is None:
            self._written_once(act, lambda: further, [], counted=True)
            return
        learning = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        new = set(map(id, learning)) - self._stepped
        if not any(id(p) in new and not _has_state(optimizer, p) for p in learning):
            self._stepped |= new
            counted = id(optimizer) in self._unseen or _by_lists(optimizer) or current_dispatch_mode() is not None
            self._written_once(act, lambda: _changed_by(optimizer), numbers_of(optimizer), counted=counted)
            return
        versions = [version_of(p) for p in learning]
        if streams(optimizer):
            for group in optimizer.param_groups:
                for parameter in [p for p in group["params"] if p.grad is not None]:
                    with alone(optimizer, group, [parameter]):
                        self._first(act, optimizer, [parameter])
        else:
            self._first(act, optimizer, learning)
        if any(version_of(p) == version for p, version in zip(learning, versions, strict=True)):
            self._unseen.add(id(optimizer))
        self._stepped |= new

    def _first(self, act: Callable[[], None], optimizer: Optimizer, parameters: list[nn.Parameter]) -> None:
        """A first step of these parameters, undone and done again where it fails."""
        changed = [*parameters, *(p.grad for p in parameters if p.grad is not None)]
        copies, numbers = self._copies(changed), numbers_of(optimizer)
        states = {p: dict(optimizer.state[p]) for p in parameters if p in optimizer.state}
        versions = [version_of(tensor) for tensor in changed]
        for attempt in range(ATTEMPTS):
            failure = self._failure_of(act)
            if failure is None:
                return
            if copies is None and [version_of(tensor) for tensor in changed] != versions:
                break
            with torch.no_grad():
                for tensor, copy in zip(changed, copies or (), strict=False):
                    tensor.copy_(copy)
            for parameter in parameters:
                optimizer.state.pop(parameter, None)
                if parameter in states:
                    optimizer.state[parameter] = states[parameter]
            put_numbers_back(numbers)
            if attempt == 0 and copies is None:
                copies = self._copies(changed)
        raise TornStepError(failure)

    def _failure_of(self, act: Callable[[], None]) -> str | None:
        """Runs ``act``; gives what was said where memory failed it, after there was made room; None: it is done."""
        try:
            act()
        except Exception as error:
            if not is_memory_failure(error):
                raise
            self._relieve(error)
            return describe(error)
        return None

    def _copies(self, parameters: Iterable[Tensor]) -> list[Tensor] | None:
        """Copies, or None where there is no room for them."""
        copies: list[Tensor] | None = None

        def copy() -> None:
            nonlocal copies
            copies = [parameter.detach().clone() for parameter in parameters]

        self._failure_of(copy)
        return copies

    def _written_once(
        self,
        act: Callable[[], None],
        changes: Callable[[], Iterable[Tensor]],
        numbers: list[tuple[dict[Any, Any], dict[Any, Any]]],
        *,
        counted: bool,
    ) -> None:
        """Runs ``act``; after a failure again, without the writes that were done."""
        before = [(tensor, version_of(tensor)) for tensor in changes()]
        counter = _WithoutTheDone({_key(tensor): 0 for tensor, _ in before}) if counted else None
        with counter or nullcontext():
            failure = self._failure_of(act)
        if failure is None:
            return
        done = counter.done if counter else {_key(tensor): version_of(tensor) - version for tensor, version in before}
        alike = len(done) == len(before) and all(type(tensor) in (Tensor, nn.Parameter) for tensor, _ in before)
        if any(done.values()) and not alike:
            raise TornStepError(failure)
        for _ in range(ATTEMPTS):
            put_numbers_back(numbers)
            with _WithoutTheDone(done):
                failure = self._failure_of(act)
            if failure is None:
                return
        raise TornStepError(failure)


class _WithoutTheDone(TorchDispatchMode):
    """Leaves out the first ``done[key]`` writes to each tensor; counts what it does, so that it may run again.

    Args:
        done: writes done by the storage of each tensor that stays. Other tensors are made and written as ever.
    """

    def __init__(self, done: dict[int, int]) -> None:
        super().__init__()
        self.done, self._walked = done, dict.fromkeys(done, 0)
        self._stale: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        written: list[Any] = []
        read: list[Tensor] = []
        for position, argument in enumerate(schema_of(func).arguments):
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            if argument.alias_info is not None and argument.alias_info.is_write:
                written.append(value)
            else:
                read += tensors_in(value)
        targets = list(tensors_in(written))
        skipped = [self._is_done(tensor) for tensor in targets]
        stale = any(self._is_stale(tensor) for tensor in read)
        if not targets:
            given = func(*args, **kwargs)
            self._note(given, stale)
            return given
        if not any(skipped):
            if stale and any(_key(tensor) in self.done for tensor in targets):
                raise TornStepError(f"{func} reads what an earlier attempt has changed")
            given = func(*args, **kwargs)
            for tensor in targets:
                self._count(tensor, really=True)
                if stale:
                    self._stale.add(_key(tensor))
            return given
        if not all(skip for skip, tensor in zip(skipped, targets, strict=True) if _key(tensor) in self.done):
            lists = [value for value in args if isinstance(value, list | tuple)]
            if any(len(value) != len(skipped) for value in lists) or len(written) != 1:
                raise TornStepError(f"{func} was done in part")
            left = [index for index, skip in enumerate(skipped) if not skip]
            self.__torch_dispatch__(
                func,
                types,
                tuple([value[i] for i in left] if isinstance(value, list | tuple) else value for value in args),
                kwargs,
            )
        for tensor, skip in zip(targets, skipped, strict=True):
            if skip:
                self._count(tensor, really=False)
        return written[0] if schema_of(func).returns else None

    def _is_done(self, tensor: Tensor) -> bool:
        key = _key(tensor)
        return self._walked.get(key, 0) < self.done.get(key, 0)

    def _is_stale(self, tensor: Tensor) -> bool:
        return _key(tensor) in self._stale or self._is_done(tensor)

    def _count(self, tensor: Tensor, *, really: bool) -> None:
        key = _key(tensor)
        if key in self.done:
            self._walked[key] += 1
            self.done[key] += really

    def _note(self, given: Any, stale: bool) -> None:
        made = list(tensors_in(given))
        if stale and not made:
            raise TornStepError("a number was read from what an earlier attempt has changed")
        for tensor in made:
            if _key(tensor) not in self.done:
                (self._stale.add if stale else self._stale.discard)(_key(tensor))


def _key(tensor: Tensor) -> int:
    return storage_id_of(tensor)


def _changed_by(optimizer: Optimizer) -> list[Tensor]:
    values: list[Tensor] = []
    for group in optimizer.param_groups:
        values += group["params"]
        values += [p.grad for p in group["params"] if p.grad is not None]
    for state in optimizer.state.values():
        for value in state.values() if type(state) is dict else (state,):
            if type(value) is Tensor:
                values.append(value)
            elif type(value) not in _NUMBERS:
                values += tensors_in(value)
    return values


def _has_state(optimizer: Optimizer, parameter: Tensor) -> bool:
    return next(tensors_in(optimizer.state.get(parameter, {})), None) is not None


_NUMBERS = frozenset((int, float, bool))


def numbers_of(optimizer: Optimizer) -> list[tuple[dict[Any, Any], dict[Any, Any]]]:
    """Dicts of the optimizer, with what they hold beside tensors."""
    dicts = [*optimizer.param_groups, *(state for state in optimizer.state.values() if isinstance(state, dict))]
    return [
        (table, {k: v for k, v in table.items() if type(v) in _NUMBERS})
        for table in dicts
        if not _NUMBERS.isdisjoint(map(type, table.values()))
    ]


def put_numbers_back(numbers: list[tuple[dict[Any, Any], dict[Any, Any]]]) -> None:
    for table, values in numbers:
        table.update(values)


def _by_lists(optimizer: Optimizer) -> bool:
    """Whether its step works on lists of tensors, as far as it says so; on a CPU the default is one by one."""
    device = next(p.device.type for group in optimizer.param_groups for p in group["params"])
    return any(
        group.get("fused") or (group.get("foreach") is not False and (group.get("foreach") or device != "cpu"))
        for group in optimizer.param_groups
    )
