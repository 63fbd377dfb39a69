"""A compiled net, or another function with gradients, in a trace: what inductor's own code allocates and saves.

dynamo, AOTAutograd and its partition, which chooses what a backward is given and what it computes again, run as they
are, on tensors without data; inductor's code then takes the place of the function (``inductor_code.py``). A function
that is not one graph (it asks for data, prints, or calls what dynamo does not know) runs as it was written. Hooks of a
module whose ``compile`` was called run around its code, on the virtual device.
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
from memfit.device.virtual.redirect import redirected
from memfit.torch_compat import tree_map_only
from memfit.torch_compat.attributes import MODULE_CALL


class RegionCompiler:
    """The backend of the compiled regions of one virtual device.

    Args:
        note: called with PLANNED or EAGER for each call of compiled code.
    """

    def __init__(self, note: Callable[[str], None]) -> None:
        self.note = note
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


def _on_the_device(run_node: Callable[..., Any]) -> Callable[..., Any]:
    """dynamo's run of one node, which computes its shape, where a node that names cuda is on the virtual device."""

    def run(tracer: Any, node: Any, args: Any, kwargs: Any, nnmodule: Any) -> Any:
        node.args, node.kwargs = tree_map_only(DEVICES, redirected, (node.args, node.kwargs))
        args, kwargs = tree_map_only(DEVICES, redirected, (args, kwargs))
        return run_node(tracer, node, args, kwargs, nnmodule)

    return run


DEVICES = (str, torch.device)
"""What names a device among a node's arguments."""


_entered: list[RegionCompiler] = []
"""Those of the virtual devices that are entered, innermost last."""


@contextmanager
def regions_entered(compiler: RegionCompiler) -> Iterator[None]:
    """A context in which regions are compiled by this compiler, those that another one made before, too."""
    _entered.append(compiler)
    try:
        yield
    finally:
        _entered.remove(compiler)


def entered_compiler() -> RegionCompiler | None:
    """The compiler of the innermost virtual device; None outside of all, where code runs for real."""
    return _entered[-1] if _entered else None


class CompiledRegion:
    """A function that torch.compile was given: called as what inductor makes of it, or as it was written.

    Code may keep one longer than the trace in which it was made. In another trace it is compiled anew, and outside of
    all it is what torch made.

    Args:
        compiled: what torch makes of the function with a backend.
        written: the function.
        made: what torch made of it as the code asked.
    """

    def __init__(
        self, compiled: Callable[[RegionCompiler], Callable[..., Any]], written: Callable[..., Any], made: Any
    ) -> None:
        functools.update_wrapper(self, written)
        self.compiled, self.written, self.made = compiled, written, made
        self.noted_by: list[Callable[[str], None]] = []
        """Called with PLANNED or EAGER at each call, beside what the virtual device has."""
        self.compiler: RegionCompiler | None = None
        """Which compiled what is planned."""
        self.planned: Callable[..., Any] = made
        self.is_one_graph = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs inductor's code where the function is one graph, and else the function as it was written."""
        if torch.compiler.is_dynamo_compiling():
            return self.written(*args, **kwargs)
        compiler = entered_compiler()
        if compiler is None:
            return self.made(*args, **kwargs)
        if compiler.modes is not None:
            return self.written(*args, **kwargs)
        if compiler is not self.compiler:
            self.compiler, self.planned, self.is_one_graph = compiler, self.compiled(compiler), True
        if self.is_one_graph:
            try:
                out = self._call(compiler, args, kwargs)
            except Exception:  # dynamo and inductor are private to torch, and a function may be more than one graph
                if compiler.is_running:
                    raise
                self.is_one_graph = False
            else:
                self.note(compiler, PLANNED)
                return out
        self.note(compiler, EAGER)
        return self.written(*args, **kwargs)

    def __get__(self, owner: Any, kind: Any = None) -> Any:
        return self if owner is None else functools.partial(self, owner)

    def note(self, compiler: RegionCompiler, how: str) -> None:
        """Notes how a call was traced."""
        for note in (compiler.note, *self.noted_by):
            note(how)

    def _call(self, compiler: RegionCompiler, args: Any, kwargs: Any) -> Any:
        from memfit.torch_compat.inductor import Modes, compiler_settings, dynamo_nodes

        compiler.modes, compiler.is_running = Modes(), False
        try:
            nodes = replaced(dynamo_nodes, run_node=_on_the_device(dynamo_nodes.run_node))
            with compiler.modes.left(), set_stance("default"), compiler_settings(), nodes:
                return self.planned(*args, **kwargs)
        finally:
            compiler.modes = None


def compiled_region(function: Callable[..., Any], made: Any, compile_: Callable[..., Any]) -> CompiledRegion:
    """The region of a function that is no module."""
    return CompiledRegion(
        lambda compiler: compile_(function, backend=compiler, fullgraph=True, dynamic=False), function, made
    )


def compile_module(module: nn.Module, made: Any, compile_: Callable[..., Any]) -> CompiledRegion:
    """Gives what torch.compile made of a module a region in place of its forward."""

    def compiled(compiler: RegionCompiler) -> Callable[..., Any]:
        forward: Callable[..., Any] = compile_(module, backend=compiler, fullgraph=True, dynamic=False).forward
        return forward

    made.forward = region = CompiledRegion(compiled, made.forward, made.forward)
    return region


class CompiledCall:
    """The call of a module whose ``compile`` was called: its hooks run as they were written, its forward is compiled.

    So does torch: it compiles no frame of ``Module._call_impl``, nor of the hooks of ``fully_shard``, which allocate.
    """

    def __init__(self, module: nn.Module, made: Any, compile_: Callable[..., Any]) -> None:
        self.module, self.made = module, made
        self.region = compiled_region(module.forward, module.forward, compile_)
        self.noted_by = self.region.noted_by

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module."""
        if entered_compiler() is None:
            return self.made(*args, **kwargs)
        held = vars(self.module)
        before = {name: held[name] for name in ("forward",) if name in held}
        held["forward"] = self.region
        try:
            return getattr(self.module, MODULE_CALL)(*args, **kwargs)
        finally:
            del held["forward"]
            held.update(before)


def called_module(function: Any) -> nn.Module | None:
    """The module of which a function is the whole call, hooks included, as ``Module.compile`` compiles it."""
    owner = getattr(function, "__self__", None)
    return owner if isinstance(owner, nn.Module) and getattr(function, "__name__", "") == MODULE_CALL else None
