"""Random draws pinned to constants, and noted: then a loss depends on its samples and weights alone.

A constant is the same for every sample, so it does not matter how a batch is split. Seen are torch's operators, however
they are called; what draws is known by torch's own tag for it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from memfit.job import Nets
from memfit.torch_compat import TorchDispatchMode
from memfit.torch_compat.attributes import schema_of

_DROPS = {"native_dropout", "bernoulli_", "bernoulli"}
_WHOLE = {"randint", "randint_like", "random_", "random"}
_BATCH_NORM = {"native_batch_norm", "_native_batch_norm_legit", "cudnn_batch_norm", "miopen_batch_norm"}


class FixedDraws(TorchDispatchMode):
    """Notes what draws random numbers, and gives constants in their place.

    Args:
        batch_statistics: False: batch normalisation uses its running statistics, in training mode too.

    Attributes:
        dropout: modules (``net.path``) that drop values.
        drawing: operators that draw otherwise, with the module where they do.
        host: generators outside of torch, as ``noting_host_draws`` finds them.
        normalising: modules that normalise by the statistics of their batch.
    """

    def __init__(self, nets: Nets, *, batch_statistics: bool = True) -> None:
        super().__init__()
        self._nets, self._batch_statistics = nets, batch_statistics
        self._path = ["the loss"]
        self.dropout: dict[str, None] = {}
        self.drawing: dict[str, None] = {}
        self.normalising: dict[str, None] = {}
        self.host: dict[str, None] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = func.overloadpacket.__name__
        if torch.Tag.nondeterministic_seeded in func.tags:
            given = _named(func, args, kwargs)
            if name == "native_dropout" and not (given.get("train", True) and given.get("p", 0.0)):
                return func(*args, **kwargs)
            drops_late = any(argument.name == "dropout_p" for argument in schema_of(func).arguments)
            if drops_late and not given.get("dropout_p"):
                return func(*args, **kwargs)
            if name in _DROPS or given.get("dropout_p"):
                self.dropout.setdefault(self._path[-1])
            else:
                self.drawing.setdefault(f"{name.rstrip('_')} in {self._path[-1]}")
            return _constant(name, func, args, kwargs, given)
        if name in _BATCH_NORM:
            given = _named(func, args, kwargs)
            if given.get("training", given.get("train", False)):
                self.normalising.setdefault(self._path[-1])
                if not self._batch_statistics:
                    return _by_running_statistics(given)
        return func(*args, **kwargs)

    @contextmanager
    def watching(self) -> Iterator[FixedDraws]:
        """A context in which module paths are known and the mode is on."""
        handles = []
        for net_name, net in self._nets.items():
            for path, module in net.named_modules():
                handles += [
                    module.register_forward_pre_hook(self._entering(f"{net_name}.{path}".rstrip("."))),
                    module.register_forward_hook(self._leaving, always_call=True),
                ]
        try:
            with self:
                yield self
        finally:
            for handle in handles:
                handle.remove()

    def _entering(self, where: str) -> Callable[..., None]:
        def enter(module: nn.Module, args: Any) -> None:
            self._path.append(where)

        return enter

    def _leaving(self, module: nn.Module, args: Any, output: Any) -> None:
        self._path.pop()


@contextmanager
def noting_host_draws(into: dict[str, None]) -> Iterator[None]:
    """Notes which generators outside of torch are drawn from inside."""
    before = (random.getstate(), np.random.get_state())
    yield
    after = (random.getstate(), np.random.get_state())
    if before[0] != after[0]:
        into.setdefault("Python's random")
    if not all(np.array_equal(a, b) for a, b in zip(before[1], after[1], strict=True)):
        into.setdefault("numpy.random")


def _constant(name: str, func: Any, args: Any, kwargs: Any, given: dict[str, Any]) -> Any:
    with torch.random.fork_rng(devices=[]):
        if given.get("dropout_p"):
            arguments = {**given, "dropout_p": 0.0}
            return func(**{("self" if key == "self" else key): value for key, value in arguments.items()})
        out = func(*args, **kwargs)
    if name == "native_dropout":
        return given["input"].clone(), torch.ones_like(given["input"], dtype=torch.bool)
    if not isinstance(out, Tensor):
        return out
    if name == "randperm":
        return out.copy_(torch.arange(len(out), dtype=out.dtype))
    if name in _WHOLE:
        return out.fill_(_middle(given))
    return out.fill_(1 if name in _DROPS else 0 if not out.is_floating_point() else 0.5)


def _by_running_statistics(given: dict[str, Any]) -> Any:
    values: Tensor = given["input"]
    shape = [1, -1] + [1] * (values.dim() - 2)
    mean, variance = given.get("running_mean"), given.get("running_var")
    mean = torch.zeros(values.shape[1]) if mean is None else mean
    variance = torch.ones(values.shape[1]) if variance is None else variance
    out = (values - mean.view(shape)) / (variance.view(shape) + 1e-5).sqrt()
    for key, act in (("weight", torch.mul), ("bias", torch.add)):
        if given.get(key) is not None:
            out = act(out, given[key].view(shape))
    return out, mean.clone(), variance.clone()


def _named(func: Any, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by the names in the operator's schema."""
    names = [argument.name for argument in schema_of(func).arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _middle(given: dict[str, Any]) -> int:
    """A whole number in the range that was asked for."""
    low = given.get("low", given.get("from")) or 0
    high = given.get("high", given.get("to"))
    return (int(low) + int(high if high is not None else 2) - 1) // 2
