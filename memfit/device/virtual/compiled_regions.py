"""A compiled net, or another function with gradients, in a trace: what inductor's own code allocates and saves.

dynamo, AOTAutograd and its partition, which chooses what a backward is given and what it computes again, run as they
are, on tensors without data; inductor's code then takes the place of the function (``inductor_code.py``). A function
that is not one graph (it asks for data, prints, or calls what dynamo does not know) runs as it was written.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import set_stance

from memfit.device.virtual.assumptions import EAGER, PLANNED
from memfit.device.virtual.inductor_code import joint_passes_on_the_host, run_graph
from memfit.device.virtual.patching import replaced


class RegionCompiler:
    """The backend of the compiled regions of one virtual device."""

    def __init__(self) -> None:
        self.modes: Any = None
        """What was left for dynamo, while a region is called."""
        self.is_running = False
        """Whether a region's code has begun: what it raises then is its own."""

    def __call__(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        """Compiles one graph of dynamo."""
        from memfit.torch_compat.inductor import compile_graph

        fakes = [node.meta["example_value"] for node in graph.graph.nodes if node.op == "placeholder"]
        with joint_passes_on_the_host(), _random_states_on_the_host():
            function = compile_graph(graph, fakes, _inner)

        def run(*args: Any) -> Any:
            self.is_running = True
            with self.modes.entered():
                return function(*args)

        return run


def _inner(graph: Any, inputs: Any, **options: Any) -> Callable[[list[Any]], Any]:
    flags = {name: bool(options.get(name, False)) for name in ("is_backward", "is_inference")}
    run = run_graph(graph, inputs, **flags)

    def call(args: list[Any]) -> Any:
        return run(args)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


@contextmanager
def _random_states_on_the_host() -> Iterator[None]:
    """A context in which operators that are recomputed keep a random state of the host, as a card's states are, too:
    torch knows no other device by its name."""
    from memfit.torch_compat.inductor import random_states

    states = {"get_rng_state": _random_state, "set_rng_state": lambda state: None}
    with replaced(random_states, get_device=lambda args, kwargs: "cpu"), replaced(torch, **states):
        yield


def _random_state() -> Tensor:
    """A card's: a seed and an offset."""
    return torch.empty(16, dtype=torch.uint8, device="cpu")


class CompiledRegion:
    """A function that torch.compile was given: called as what inductor makes of it, or as it was written."""

    def __init__(
        self,
        compiler: RegionCompiler,
        planned: Callable[..., Any],
        written: Callable[..., Any],
        note: Callable[[str], None],
    ) -> None:
        functools.update_wrapper(self, written)
        self.compiler, self.planned, self.written = compiler, planned, written
        self.noted_by = [note]
        """Called with PLANNED or EAGER at each call."""
        self.is_one_graph = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs inductor's code where the function is one graph, and else the function as it was written."""
        if self.is_one_graph and self.compiler.modes is None:
            try:
                out = self._call(args, kwargs)
            except Exception:  # dynamo and inductor are private to torch, and a function may be more than one graph
                if self.compiler.is_running:
                    raise
                self.is_one_graph = False
            else:
                self._note(PLANNED)
                return out
        if self.compiler.modes is None:
            self._note(EAGER)
        return self.written(*args, **kwargs)

    def __get__(self, owner: Any, kind: Any = None) -> Any:
        return self if owner is None else functools.partial(self, owner)

    def _note(self, how: str) -> None:
        for note in self.noted_by:
            note(how)

    def _call(self, args: Any, kwargs: Any) -> Any:
        from memfit.torch_compat.inductor import Modes, compiler_settings

        compiler = self.compiler
        compiler.modes, compiler.is_running = Modes(), False
        try:
            with compiler.modes.left(), set_stance("default"), compiler_settings():
                return self.planned(*args, **kwargs)
        finally:
            compiler.modes = None


def compiled_region(
    compiler: RegionCompiler, function: Callable[..., Any], compile_: Callable[..., Any], note: Callable[[str], None]
) -> CompiledRegion:
    """The region of a function that is no module."""
    planned = compile_(function, backend=compiler, fullgraph=True, dynamic=False)
    return CompiledRegion(compiler, planned, function, note)


def compile_module(
    compiler: RegionCompiler, module: nn.Module, made: Any, compile_: Callable[..., Any], note: Callable[[str], None]
) -> CompiledRegion:
    """Gives what torch.compile made of a module a region in place of its forward."""
    planned = compile_(module, backend=compiler, fullgraph=True, dynamic=False)
    made.forward = region = CompiledRegion(compiler, planned.forward, made.forward, note)
    return region
