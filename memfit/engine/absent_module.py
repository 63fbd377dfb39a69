"""Modules of a net that another stage of a pipeline holds: in their place stand modules without parameters.

A stage runs its net's own forward from the beginning. Modules before its own give tensors of the right shape that hold
nothing (``absent``), so that what the forward computes beside them, such as masks and positions, is there; the first of
its own modules takes what was received in place of its first argument, and the forward ends where the next stage's
first module is called. What an absent tensor gives is absent too: a module or loss that needs one is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from memfit.engine.function_caches import without_fake_results
from memfit.errors import InputError
from memfit.torch_compat import FakeTensorMode, disable_current_modes, tree_flatten, tree_map
from memfit.torch_compat.context_parallel import without_rings

_MARK = "_memfit_absent"
_READS = (
    Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__,
)  # fmt: skip
"""What reads the values of a tensor."""
_WRITE = "let the modules of pipeline(self, nets) pass on one tensor each, or leave pp out of the mesh"


class StageEndError(Exception):
    """A forward has come to the first module of the next stage; ``hidden`` is that module's first argument."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__("the forward goes on in the next stage")
        self.hidden = hidden


def mark_absent(value: Any) -> Any:
    """Marks every tensor of a nesting as absent."""
    for leaf in tree_flatten(value)[0]:
        if isinstance(leaf, Tensor):
            setattr(leaf, _MARK, True)
    return value


def is_absent(value: Any) -> bool:
    """Whether a tensor of a nesting is absent."""
    return any(isinstance(leaf, Tensor) and hasattr(leaf, _MARK) for leaf in tree_flatten(value)[0])


class AbsentTracking(TorchFunctionMode):
    """Inside, what is computed from absent tensors is absent, and their values are not read."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if not (_has_mark(args) or (kwargs and _has_mark(kwargs.values()))):
            return output
        if func in _READS:
            why = "its value is read, and another stage computes it"
            raise InputError("a tensor of the net's forward on pp", why, _WRITE)
        mark_absent(args[0] if func is Tensor.__setitem__ else output)
        return output


def _has_mark(values: Any) -> bool:
    for value in values:
        if isinstance(value, Tensor):
            if hasattr(value, _MARK):
                return True
        elif isinstance(value, list | tuple) and _has_mark(value):
            return True
    return False


class StandIn:
    """A copy of a module on tensors without bytes, which tells the shapes of what the module would give."""

    def __init__(self, path: str, module: nn.Module, mode: FakeTensorMode) -> None:
        self.module, self._path, self._mode = module, path, mode
        self._known: dict[Any, Any] = {}

    def __call__(self, args: Any, kwargs: Any, *, absent: bool = True) -> Any:
        """Tensors of the shapes that the module gives, nested as it nests them.

        Args:
            absent: whether they are marked.

        Raises:
            InputError: its shapes depend on values.
        """
        key = _key((args, kwargs))
        if key is None or key not in self._known:
            shapes = self._shapes(args, kwargs)
            if key is not None:
                self._known[key] = shapes
        else:
            shapes = self._known[key]
        given = tree_map(lambda value: value() if isinstance(value, _Shape) else value, shapes)
        return mark_absent(given) if absent else given

    def _shapes(self, args: Any, kwargs: Any) -> Any:
        with (
            disable_current_modes(), torch.no_grad(), torch.random.fork_rng(devices=[]), without_fake_results(),
            without_rings(), self._mode,
        ):  # fmt: skip

            def fake(value: Any) -> Any:
                return fake_like(value) if isinstance(value, Tensor) else value

            try:
                given = self.module(*tree_map(fake, args), **tree_map(fake, kwargs))
            except Exception as error:
                why = f"the shape of what it gives is not known without its values: {error}".splitlines()[0]
                raise InputError(f"module {self._path} on pp", why, "leave pp out of the mesh") from error
            return tree_map(lambda value: _Shape(value) if isinstance(value, Tensor) else value, given)


class _Shape:
    """Shape, type and device of a tensor; called, a tensor of one number that looks like it."""

    def __init__(self, tensor: Tensor) -> None:
        self._shape = tuple(tensor.shape)
        self._kind: dict[str, Any] = {"dtype": tensor.dtype, "device": tensor.device}

    def __call__(self) -> Tensor:
        number: Tensor = torch.zeros((), **self._kind)
        return number.expand(self._shape)


def fake_like(tensor: Tensor, device: torch.device | None = None) -> Tensor:
    """A tensor without bytes, in the FakeTensorMode at hand, on the tensor's device or another."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device or tensor.device)


def _key(value: Any) -> Any:
    """What the shapes of a module's outputs follow from; None where that is not known."""
    leaves, nesting = tree_flatten(value)
    parts: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            parts.append((tuple(leaf.shape), leaf.dtype, leaf.device))
        elif leaf is None or isinstance(leaf, bool | int | float | str):
            parts.append((type(leaf), leaf))
        else:
            return None
    kinds = {leaf.device.type for leaf in leaves if isinstance(leaf, Tensor)}
    autocast = tuple((kind, torch.is_autocast_enabled(kind)) for kind in sorted(kinds))
    return str(nesting), tuple(parts), autocast


class AbsentModule(nn.Module):
    """Stands in the place of a module that another stage holds, under its name.

    Args:
        run: what a call does: the stand-in and the call's arguments -> what the call gives.
        stand_in: tells the shapes of what the module gives.
    """

    def __init__(self, run: Callable[[StandIn, Any, Any], Any], stand_in: StandIn) -> None:
        super().__init__()
        self._held = (run, stand_in)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        run, stand_in = self._held
        return run(stand_in, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        """Attributes that a forward reads of a module, such as its kind of attention."""
        stand_in = self.__dict__.get("_held", (None, None))[1]
        if stand_in is None or name.startswith("__"):
            return super().__getattr__(name)
        return getattr(stand_in.module, name)

    def __deepcopy__(self, memo: Any) -> AbsentModule:
        """Of a copy of the net, such as an average: stands for the same module."""
        return AbsentModule(*self._held)
