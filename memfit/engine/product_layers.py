"""Modules that are linear layers of their own making: one matrix product of the input and a parameter, and a bias.

Such are layers that hold the weight as (in, out), as those of GPT-2, and classes with a forward of their own for a
weight (out, in), as those of Falcon. A forward on tensors without bytes shows which modules are: every call of one runs
a single product, changes of shape or type, an addition of the bias, and a scaling by a number. Nothing in it mixes
columns of the output.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Number
from typing import Any

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from memfit.engine.adapters import holders_of, is_adapted, outside_adapters
from memfit.engine.fake_forward import WithAnswers
from memfit.nested_tensors import tensors_in
from memfit.torch_compat.attributes import own_parameters


@dataclass(frozen=True, kw_only=True)
class ProductLayer:
    """How a module holds the matrix of its product.

    Attributes:
        weight: the parameter's name.
        inputs: its dimension over which the product sums; the other one is that of the outputs.
    """

    weight: str
    inputs: int

    def dimension(self, key: str, *, of_outputs: bool) -> int | None:
        """The dimension of a parameter that is cut with the layer's outputs, or with its inputs; None: it is whole."""
        if key == self.weight:
            return 1 - self.inputs if of_outputs else self.inputs
        return 0 if of_outputs else None


def possible_products(name: str, net: nn.Module) -> dict[str, nn.Module]:
    """Modules of a net whose parameters are a matrix and at most a bias, which they share with no other module, by
    name."""
    holders, possible = holders_of(net), dict[str, nn.Module]()
    for path, module in outside_adapters(net):
        plain = isinstance(module, nn.Embedding) or type(module).forward is nn.Linear.forward
        if not (is_adapted(module) or plain) and _is_matrix(module, holders):
            possible[f"{name}.{path}"] = module
    return possible


def _is_matrix(module: nn.Module, holders: Mapping[int, int]) -> bool:
    held = list(module.parameters())
    own = {id(parameter) for parameter in own_parameters(module).values() if parameter is not None}
    if sorted(parameter.dim() for parameter in held) not in ([2], [1, 2]):
        return False
    return all(id(parameter) in own and holders[id(parameter)] == 1 for parameter in held)


class ProductTrace(WithAnswers):
    """Looks at every call of some modules.

    Args:
        modules: by name.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self._modules = modules
        self._running: list[_Call] = []
        self._shown: dict[str, set[ProductLayer | None]] = {}

    def products(self) -> dict[str, ProductLayer]:
        """The modules that are linear layers in every call, by name."""
        shown = {name: next(iter(ways)) for name, ways in self._shown.items() if len(ways) == 1}
        return {name: way for name, way in shown.items() if way is not None}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operator."""
        kwargs = kwargs or {}
        output = self.run(func, args, kwargs)
        namespace, name, _ = str(func).split(".")
        if self._running and namespace != "prim" and not name.startswith("sym_"):
            self._running[-1].note(name, args, kwargs, output)
        return output

    def call(self, name: str, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A module's forward."""
        call = _Call(self._modules[name], args, kwargs)
        self._running.append(call)
        try:
            output = inner(*args, **kwargs)
        finally:
            self._running.pop()
        self._shown.setdefault(name, set()).add(call.product(output))
        return output

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Nothing is noted."""

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """Nothing is noted."""

    def end_net(self, module: nn.Module, args: Any, output: Any) -> None:
        """Nothing is noted."""


_INPUT, _MATRIX, _TRANSPOSED, _BIAS, _OUTPUT = "input", "matrix", "transposed matrix", "bias", "output"
_SAME = frozenset({"to_copy", "clone", "detach", "alias", "lift_fresh"})
_SHAPES = frozenset({"view", "unsafe_view", "reshape", "reshape_alias"})
_TURNS = frozenset({"t", "transpose", "permute"})


class _Call:
    """What the operators of one call of a module do with its input and its parameters."""

    def __init__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._roles = WeakIdKeyDictionary()
        self._weight = ""
        for key, parameter in own_parameters(module).items():
            if parameter is not None:
                self._roles[parameter] = _MATRIX if parameter.dim() == 2 else _BIAS
                self._weight = key if parameter.dim() == 2 else self._weight
        given = list(tensors_in((args, kwargs)))
        self._given = given[0] if len(given) == 1 and args and args[0] is given[0] else None
        if self._given is not None:
            self._roles[self._given] = _INPUT
        self._inputs: int | None = None
        """The matrix's dimension over which the product sums, once it has run."""
        self._other = self._given is None
        """Whether the call does something else."""

    def product(self, output: Any) -> ProductLayer | None:
        """What the call shows of the module; None where it is no linear layer."""
        if self._other or self._given is None or self._inputs is None or not isinstance(output, Tensor):
            return None
        if self._roles.get(output) != _OUTPUT or output.shape[:-1] != self._given.shape[:-1]:
            return None
        return ProductLayer(weight=self._weight, inputs=self._inputs)

    def note(self, name: str, args: Any, kwargs: Any, output: Any) -> None:
        """An operator runs."""
        role = None if self._other else self._role(name.strip("_"), args, kwargs, output)
        if role is None:
            self._other = True
        else:
            self._roles[output] = role

    def _role(self, name: str, args: Any, kwargs: Any, output: Any) -> str | None:
        """What an operator's output is; None: nothing that a linear layer has."""
        roles = [self._roles.get(each) if isinstance(each, Tensor) else None for each in args]
        if not roles or len(list(tensors_in((args, kwargs)))) != sum(role is not None for role in roles):
            return None
        if name in _SAME:
            return roles[0]
        if name in _SHAPES:
            same = tuple(output.shape) == tuple(args[0].shape)
            rows = roles[0] in (_INPUT, _OUTPUT) and output.dim() > 0 and output.shape[-1] == args[0].shape[-1]
            return roles[0] if rows or same else None
        if name in _TURNS and tuple(output.stride()) == tuple(reversed(args[0].stride())):
            return {_MATRIX: _TRANSPOSED, _TRANSPOSED: _MATRIX}.get(roles[0] or "")
        if name in ("mm", "addmm", "linear"):
            return self._multiplied(name, roles)
        if name == "add":
            return _OUTPUT if sorted(map(str, roles[:2])) == [_BIAS, _OUTPUT] else None
        scaled = name in ("mul", "div") and roles[0] == _OUTPUT and isinstance(args[1], Number)
        return _OUTPUT if scaled else None

    def _multiplied(self, name: str, roles: list[str | None]) -> str | None:
        operands = roles[1:3] if name == "addmm" else roles[:2]
        added = roles[:1] if name == "addmm" else roles[2:3]
        again = self._inputs is not None
        if again or operands not in ([_INPUT, _MATRIX], [_INPUT, _TRANSPOSED]) or added not in ([], [None], [_BIAS]):
            return None
        self._inputs = int((operands[1] == _TRANSPOSED) != (name == "linear"))
        return _OUTPUT
