"""What stands in for Triton where it is not installed (``--stub triton``): decorators whose kernels can be launched,
and the functions of sizes. ``memfit.script.triton_launches`` says what a launch does."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

from memfit.script.triton_driver import Driver


class _Launched:
    """``kernel[grid](...)`` runs the kernel."""

    run: Callable[..., Any]

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        return partial(self.run, grid=grid, warmup=False)

    def warmup(self, *args: Any, grid: Any = None, **kwargs: Any) -> Any:
        """Compiles a kernel without a launch."""
        return self.run(*args, grid=grid, warmup=True, **kwargs)


class JITFunction(_Launched):
    """A kernel that cannot run."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn, self.__name__, self.__module__, self.__doc__ = fn, fn.__name__, fn.__module__, fn.__doc__
        self.arg_names = list(inspect.signature(fn).parameters)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Replaced while a script is traced."""
        raise RuntimeError("Triton is not installed")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("Cannot call @triton.jit'd outside of the scope of a kernel")


class Config:
    """A configuration that an autotuner tries."""

    def __init__(
        self, kwargs: Mapping[str, Any], num_warps: int = 4, num_stages: int = 3, num_ctas: int = 1,
        maxnreg: int | None = None, pre_hook: Callable[..., None] | None = None, **_: Any,
    ) -> None:  # fmt: skip
        self.kwargs, self.pre_hook = dict(kwargs), pre_hook
        self.num_warps, self.num_stages, self.num_ctas, self.maxnreg = num_warps, num_stages, num_ctas, maxnreg


class Autotuner(_Launched):
    """Tries a kernel's configurations in the first launch with a key; the first of them is the fastest."""

    @staticmethod
    def bench(launch: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        """Measures a launch; replaced while a script is traced."""
        return launch()

    def __init__(
        self, fn: Any, arg_names: Sequence[str], configs: Sequence[Config] | None, key: Sequence[str],
        reset_to_zero: Sequence[str] | None = None, restore_value: Sequence[str] | None = None, pre_hook: Any = None,
        post_hook: Any = None, prune_configs_by: Mapping[str, Any] | None = None, **_: Any,
    ) -> None:  # fmt: skip
        self.fn, self.arg_names, self.configs, self.keys = fn, arg_names, list(configs or [Config({})]), key
        self.reset_to_zero, self.restore_value = list(reset_to_zero or ()), list(restore_value or ())
        self.user_defined_pre_hook, self.user_defined_post_hook = pre_hook is not None, post_hook is not None
        self.pre_hook, self.post_hook = pre_hook or self._keep, post_hook or self._restore
        self.early_config_prune = (prune_configs_by or {}).get("early_config_prune")
        self.cache: dict[Any, Config] = {}
        self.restore_copies: dict[str, Any] = {}

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Launches the kernel with the fastest configuration."""
        given = {**dict(zip(self.arg_names, args, strict=False)), **kwargs}
        values = [given[name] for name in self.keys if name in given]
        key = (*values, *(str(value.dtype) for value in given.values() if hasattr(value, "dtype")))
        if key not in self.cache:
            prune = self.early_config_prune
            configs = prune(self.configs, given, **kwargs) if prune and len(self.configs) > 1 else self.configs
            for config in configs if len(configs) > 1 else ():
                self.bench(partial(self._tried, config, given, *args, **kwargs))
            self.cache[key] = configs[0]
        config = self.cache[key]
        if config.pre_hook is not None:
            config.pre_hook({**given, **config.kwargs})
        return self.fn.run(*args, **{**kwargs, **config.kwargs})

    def _tried(self, config: Config, given: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        every = {**given, **config.kwargs}
        if config.pre_hook is not None:
            config.pre_hook(every)
        self.pre_hook(every)
        self.fn.run(*args, **{**kwargs, **config.kwargs})
        self.post_hook(every, exception=None)

    def _keep(self, given: Mapping[str, Any], reset_only: bool = False) -> None:
        for name in self.reset_to_zero:
            given[name].zero_()
        self.restore_copies = {name: given[name].clone() for name in self.restore_value if not reset_only}

    def _restore(self, given: Mapping[str, Any], exception: Any = None) -> None:
        for name, copy in self.restore_copies.items():
            given[name].copy_(copy)
        self.restore_copies = {}


class Heuristics(_Launched):
    """Computes some of a kernel's arguments from the others."""

    def __init__(self, fn: Any, values: Mapping[str, Callable[..., Any]]) -> None:
        self.fn, self.values, self.arg_names = fn, values, fn.arg_names

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Launches the kernel."""
        for name, value in self.values.items():
            kwargs[name] = value({**dict(zip(self.arg_names, args, strict=False)), **kwargs})
        return self.fn.run(*args, **kwargs)


class GPUTarget(NamedTuple):
    """What a kernel is compiled for."""

    backend: str
    arch: int
    warp_size: int


def jit(fn: Callable[..., Any] | None = None, **_: Any) -> Any:
    """``triton.jit``, with and without arguments."""
    return JITFunction if fn is None else JITFunction(fn)


def autotune(
    configs: Sequence[Config], key: Sequence[str], prune_configs_by: Any = None, reset_to_zero: Any = None,
    restore_value: Any = None, pre_hook: Any = None, post_hook: Any = None, cache_results: bool = False, **_: Any,
) -> Callable[..., Any]:  # fmt: skip
    """``triton.autotune``."""
    hooks = {"pre_hook": pre_hook, "post_hook": post_hook, "prune_configs_by": prune_configs_by}
    return lambda fn: Autotuner(fn, fn.arg_names, configs, key, reset_to_zero, restore_value, **hooks)


def heuristics(values: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    """``triton.heuristics``."""
    return lambda fn: Heuristics(fn, values)


def cdiv(x: int, y: int) -> int:
    """A quotient, rounded up."""
    return -(-x // y)


def next_power_of_2(n: int) -> int:
    """The least power of 2 that is ``n`` or more."""
    return 1 << max(n - 1, 0).bit_length()


_TUNERS = {"autotune": autotune, "heuristics": heuristics, "Config": Config, "Autotuner": Autotuner}
ATTRIBUTES: dict[str, dict[str, Any]] = {
    "triton": {"jit": jit, "cdiv": cdiv, "next_power_of_2": next_power_of_2, "JITFunction": JITFunction, **_TUNERS},
    "triton.language": {"cdiv": cdiv, "next_power_of_2": next_power_of_2},
    "triton.runtime": {"JITFunction": JITFunction, "driver": SimpleNamespace(active=Driver()), **_TUNERS},
    "triton.runtime.driver": {"driver": SimpleNamespace(active=Driver()), "active": Driver()},
    "triton.testing": {"do_bench": lambda kernel, *args, **kwargs: Autotuner.bench(kernel, *args, **kwargs)},
    "triton.backends.compiler": {"GPUTarget": GPUTarget},
    "triton.experimental.gluon": {"jit": jit},
    "triton.runtime.jit": {"jit": jit, "JITFunction": JITFunction},
    "triton.runtime.autotuner": {**_TUNERS, "Heuristics": Heuristics},
}
"""What the stand-in's modules have; every other name of them is a class that does nothing."""
