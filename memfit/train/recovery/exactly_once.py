"""An optimizer step that memory may fail in the middle of, and that is still applied once.

Three cases:

- A parameter's first step makes its state. It is done parameter by parameter, each copied before, where the optimizer
  treats parameters alone; else with a copy of all. A failure puts the copy back and drops the state that was begun.
- Later, autograd's version counter tells how often each tensor was written before the failure. The step runs again, and
  as many writes to each tensor are left out. What it computes on the way is computed again; if that would read a value
  which the first attempt had already changed, the step is given up.
- A step that is given up (``TornStepError``) must not be saved: the run goes on from its last checkpoint.

Fused steps leave the version counter as it is; a dispatch mode notes those that are done. Where a first step shows that
the counter misses other writes too (through ``.data``, or of operators on lists in older versions of torch), and for
DTensors, a dispatch mode counts every write from the start, which takes as long as the step. Not seen: writes outside
of torch's operators.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from memfit.apply.state_streaming import alone, streams
from memfit.nested_tensors import tensors_in
from memfit.torch_compat import TorchDispatchMode, current_dispatch_mode
from memfit.torch_compat.attributes import local_storage_id, local_tensor, schema_of, version_of
from memfit.train.launch.memory_limit import is_memory_failure
from memfit.train.recovery.failure import describe_memory_failure
from memfit.train.recovery.step_attributes import StepAttributes, state_values

ATTEMPTS = 3
_NO_MODE = nullcontext()


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
            self._written_once(act, further, None, counted=True)
            return
        values = state_values(optimizer)
        learning, written = _changed_by(optimizer, values)
        new = () if self._stepped.issuperset(map(id, learning)) else set(map(id, learning)) - self._stepped
        if new and any(id(p) in new and not _has_state(optimizer, p) for p in learning):
            self._first_step(act, optimizer, learning)
        else:
            attributes = StepAttributes(optimizer, values)
            written = _with_others(written, attributes)
            # averages are written through ``.data`` as often as not, which the counter does not see, nor does it see
            # operators on lists of DTensors
            parts = not _PLAIN.issuperset(map(type, written)) and any(map(_is_part, written))
            unseen = id(optimizer) in self._unseen or bool(attributes.further) or parts
            counted = unseen or current_dispatch_mode() is not None
            fused = not counted and _is_fused(optimizer)
            self._written_once(act, written, attributes, counted=counted, fused=fused)
        self._stepped.update(new)

    def _first_step(self, act: Callable[[], None], optimizer: Optimizer, learning: list[nn.Parameter]) -> None:
        """The step that makes the optimizer's state. It shows whether the version counter sees its writes."""
        versions = list(map(version_of, learning))
        fused: set[int] = set()

        def noted() -> None:
            with _FusedWrites() as record:
                act()
            fused.update(record.counts())

        step = noted if _is_fused(optimizer) else act
        if streams(optimizer):
            for group in optimizer.param_groups:
                for parameter in [p for p in group["params"] if p.grad is not None]:
                    with alone(optimizer, group, [parameter]):
                        self._first(step, optimizer, [parameter])
        else:
            self._first(step, optimizer, learning)
        unmoved = [p for p, before in zip(learning, versions, strict=True) if version_of(p) == before]
        if any(local_storage_id(parameter) not in fused for parameter in unmoved):
            self._unseen.add(id(optimizer))

    def _first(self, act: Callable[[], None], optimizer: Optimizer, parameters: list[nn.Parameter]) -> None:
        """A first step of these parameters, undone and done again where it fails."""
        attributes = StepAttributes(optimizer, state_values(optimizer))
        gradients = [p.grad for p in parameters if p.grad is not None]
        changed = _with_others([*parameters, *gradients], attributes)
        copies, had = self._copies(changed), set(optimizer.state)
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
            for key in {*parameters, *optimizer.state} - had:
                optimizer.state.pop(key, None)
            optimizer.state.update({parameter: dict(state) for parameter, state in states.items()})
            attributes.put_back()
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
            return describe_memory_failure(error)
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
        written: Sequence[Tensor],
        attributes: StepAttributes | None,
        *,
        counted: bool,
        fused: bool = False,
    ) -> None:
        """Runs ``act``; after a failure again, without the writes that were done.

        Args:
            counted: whether a dispatch mode counts every write.
            fused: whether one notes those of fused steps.
        """
        versions = list(map(version_of, written))
        counter = _WithoutTheDone({local_storage_id(tensor): 0 for tensor in written}) if counted else None
        record = _FusedWrites() if fused else None
        with counter or record or _NO_MODE:
            failure = self._failure_of(act)
        if failure is None:
            return
        done = counter.done if counter else _writes_since(written, versions, record)
        if any(done.values()) and not all(type(local_tensor(tensor)) in (Tensor, nn.Parameter) for tensor in written):
            raise TornStepError(failure)
        times = Counter(map(local_storage_id, written))
        shared = [key for key, count in times.items() if count > 1]  # as gradients of one unit of FSDP2
        for _ in range(ATTEMPTS):
            if any(done[key] for key in shared) or (attributes is not None and not attributes.put_back()):
                raise TornStepError(failure)
            with _WithoutTheDone(done):
                failure = self._failure_of(act)
            if failure is None:
                return
        raise TornStepError(failure)


class _FusedWrites(TorchDispatchMode):
    """Notes what fused steps write to, which do not raise the versions of it; nor does what works on lists, inside of a
    dispatch mode."""

    def __init__(self) -> None:
        super().__init__()
        self._fused: list[Any] = []
        self._counts: Counter[int] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not func.__name__.startswith(("_fused_", "_foreach_")):
            return func(*args, **kwargs)
        written, _ = _split_arguments(func, args, kwargs)
        first = next(tensors_in(written), None)
        before = None if first is None else version_of(first)
        given = func(*args, **kwargs)
        if first is not None and version_of(first) == before:
            if func.__name__.startswith("_fused_"):
                self._fused.append(written)  # all of it stays after the step, so that only a failure has to look at it
            else:
                self._counts.update(map(local_storage_id, tensors_in(written)))
        return given

    def counts(self) -> Counter[int]:
        """How often each tensor was written to, by the key of its storage."""
        return self._counts + Counter(map(local_storage_id, tensors_in(self._fused)))


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
        written, read = _split_arguments(func, args, kwargs)
        targets = list(tensors_in(written))
        skipped = [self._is_done(tensor) for tensor in targets]
        stale = any(self._is_stale(tensor) for tensor in tensors_in(read))
        if not targets:
            given = func(*args, **kwargs)
            self._note(given, stale)
            return given
        if not any(skipped):
            if stale and any(local_storage_id(tensor) in self.done for tensor in targets):
                raise TornStepError(f"{func} reads what an earlier attempt has changed")
            given = func(*args, **kwargs)
            for tensor in targets:
                self._count(tensor, really=True)
                if stale:
                    self._stale.add(local_storage_id(tensor))
            return given
        if not all(
            skip for skip, tensor in zip(skipped, targets, strict=True) if local_storage_id(tensor) in self.done
        ):
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
        key = local_storage_id(tensor)
        return self._walked.get(key, 0) < self.done.get(key, 0)

    def _is_stale(self, tensor: Tensor) -> bool:
        return local_storage_id(tensor) in self._stale or self._is_done(tensor)

    def _count(self, tensor: Tensor, *, really: bool) -> None:
        key = local_storage_id(tensor)
        if key in self.done:
            self._walked[key] += 1
            self.done[key] += really

    def _note(self, given: Any, stale: bool) -> None:
        made = list(tensors_in(given))
        if stale and not made:
            raise TornStepError("a number was read from what an earlier attempt has changed")
        for tensor in made:
            if local_storage_id(tensor) not in self.done:
                (self._stale.add if stale else self._stale.discard)(local_storage_id(tensor))


def _split_arguments(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
    """(what an operator writes to, what it only reads)."""
    written: list[Any] = []
    read: list[Any] = []
    for position, argument in enumerate(schema_of(func).arguments):
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        writes = argument.alias_info is not None and argument.alias_info.is_write
        (written if writes else read).append(value)
    return written, read


def _is_part(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor."""
    return local_tensor(tensor) is not tensor


def _writes_since(tensors: Sequence[Tensor], versions: Sequence[int], record: _FusedWrites | None) -> dict[int, int]:
    """How often the storage of each tensor was written to after it had this version."""
    done: dict[int, int] = {}
    for tensor, before in zip(tensors, versions, strict=True):
        done[local_storage_id(tensor)] = max(version_of(tensor) - before, done.get(local_storage_id(tensor), 0))
    for key, count in (record.counts() if record else {}).items():
        if key in done:
            done[key] += count
    return done


def _changed_by(optimizer: Optimizer, values: Sequence[Any]) -> tuple[list[nn.Parameter], list[Tensor]]:
    """(parameters with a gradient, all tensors that a step may write to).

    Args:
        values: all that the optimizer keeps of its parameters.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    pairs = [(p, p.grad) for p in parameters]
    learning = [p for p, gradient in pairs if gradient is not None]
    changed = parameters + [gradient for _, gradient in pairs if gradient is not None]
    if _TENSORS.issuperset(map(type, values)):
        return learning, [*changed, *values]
    for value in values:
        if type(value) is Tensor:
            changed.append(value)
        elif type(value) not in _NUMBERS:
            changed += tensors_in(value)
    return learning, changed


def _with_others(written: list[Tensor], attributes: StepAttributes) -> list[Tensor]:
    """These tensors and those of the optimizer's groups, attributes and hooks, each once."""
    others = [*attributes.group_tensors, *attributes.further]
    return list({id(tensor): tensor for tensor in (*written, *others)}.values()) if others else written


def _has_state(optimizer: Optimizer, parameter: Tensor) -> bool:
    return next(tensors_in(optimizer.state.get(parameter, {})), None) is not None


_NUMBERS = frozenset((int, float, bool))
_PLAIN = frozenset((Tensor, nn.Parameter))
_TENSORS = frozenset((Tensor,))


def _is_fused(optimizer: Optimizer) -> bool:
    """Whether a step may run fused operators, as far as the optimizer says so."""
    return any(group.get("fused") for group in optimizer.param_groups)
