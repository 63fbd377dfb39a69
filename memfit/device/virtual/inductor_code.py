"""The code that torch's inductor writes for one graph, run on a virtual device without its kernels.

inductor writes a Python function for each forward and backward: it allocates buffers, starts kernels, calls operators
of other libraries (products of matrices, convolutions, attention), and deletes each buffer and input after its last
use. All of that is done here but the start of the kernels; Triton and a card are not needed. The operators are called,
so that a trace sees what they take inside of themselves.
"""

from __future__ import annotations

import ast
import math
import random
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from memfit.device.virtual.backend import NAME
from memfit.device.virtual.flex_kernels import replace_flex_attention
from memfit.device.virtual.inductor_plan import card_answers
from memfit.device.virtual.patching import replaced
from memfit.torch_compat import FakeTensor, tree_map_only

_CARD = torch.device("cuda", 0)


class _NoKernel:
    """Stands for a kernel, and for what compiles kernels."""

    def __getattr__(self, name: str) -> Any:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self


class _Operators:
    """``torch.ops``, where an operator that is recomputed gives, or takes, a random state: a card's has 16 bytes."""

    higher_order = SimpleNamespace(
        run_and_save_rng_state=lambda op, *args, **kwargs: (
            torch.empty(16, dtype=torch.uint8, device="cpu"), op(*args, **kwargs)
        ),
        run_with_rng_state=lambda state, op, *args, **kwargs: op(*args, **kwargs),
    )  # fmt: skip

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.ops, name)


def run_graph(graph: Any, inputs: Sequence[Any], **flags: bool) -> Callable[[list[Any]], Any]:
    """What inductor makes of a graph: a function of a list of its inputs, which it empties.

    Args:
        graph: an fx.GraphModule whose nodes know their shapes on the virtual device or on the CPU.
        inputs: fake tensors like its inputs.
        flags: ``is_backward`` and ``is_inference``.
    """
    from memfit.torch_compat.inductor import GPU_TYPES, compiled_code, finish_graph, last_passes, virtualized

    mode = next(each.fake_mode for each in inputs if isinstance(each, FakeTensor))
    on_card = any(each.fake_device.type == NAME for each in inputs if isinstance(each, FakeTensor))
    with torch.no_grad(), card_answers() if on_card else nullcontext():
        with mode:
            like = [
                torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device=each.fake_device)
                if isinstance(each, FakeTensor)
                else each
                for each in inputs
            ]
        replace_flex_attention(graph)
        finish_graph(graph, like, mode)
        with virtualized.V.set_fake_mode(mode), _card_type(GPU_TYPES):
            last_passes(graph, is_inference=flags["is_inference"])
        if on_card:
            move_graph(graph, NAME, _CARD)
            for each in like:
                _move(each, NAME, _CARD)
        with virtualized.V.set_fake_mode(mode):
            source = compiled_code(graph, like, **flags)
    return _function(source)


@contextmanager
def _card_type(types: list[str]) -> Iterator[None]:
    """A context in which the virtual device is the one type of card that inductor knows."""
    before = list(types)
    types[:] = [NAME]
    try:
        yield
    finally:
        types[:] = before


def move_graph(graph: Any, source: str, target: torch.device, *, but: frozenset[Any] = frozenset()) -> None:
    """Gives another device to the nodes of a graph that are on devices of the type ``source``."""

    def moved(device: torch.device) -> torch.device:
        return target if device.type == source else device

    for node in graph.graph.nodes:
        if node in but:
            continue
        node.args = tree_map_only(torch.device, moved, node.args)
        node.kwargs = tree_map_only(torch.device, moved, node.kwargs)
        tree_map_only(FakeTensor, partial(_move, source=source, target=target), node.meta.get("val"))
    graph.recompile()


def _move(tensor: Any, source: str, target: torch.device) -> Any:
    if isinstance(tensor, FakeTensor) and tensor.fake_device.type == source:
        tensor.fake_device = target
    return tensor


@contextmanager
def joint_passes_on_the_host() -> Iterator[None]:
    """A context in which inductor's passes over a graph of forward and backward take the virtual device for the CPU:
    they compute constants, for which there must be a device."""
    from memfit.torch_compat.inductor import compile_fx, joint_graph

    host, card = torch.device("cpu"), torch.device(NAME, 0)
    make_patterns, passes = joint_graph.lazy_init, compile_fx.joint_graph_passes

    def on_host(graph: Any, *args: Any, **kwargs: Any) -> Any:
        before = frozenset(node for node in graph.graph.nodes if _is_on(node, "cpu"))
        is_on_card = any(_is_on(node, NAME) for node in graph.graph.nodes)
        move_graph(graph, NAME, host)
        out = passes(graph, *args, **kwargs)
        if is_on_card:
            move_graph(out, "cpu", card, but=before)
        return out

    patterns_on_host = _patterns_on_host(make_patterns, host)
    with replaced(joint_graph, lazy_init=patterns_on_host), replaced(compile_fx, joint_graph_passes=on_host):
        yield


def _patterns_on_host(make_patterns: Callable[..., Any], host: torch.device) -> Callable[..., None]:
    def make(*args: Any, **kwargs: Any) -> None:
        with replaced(torch.cuda, is_available=lambda: False):
            make_patterns(host) if args or kwargs else make_patterns()

    return make


def _is_on(node: Any, kind: str) -> bool:
    value = node.meta.get("val")
    return isinstance(value, FakeTensor) and value.fake_device.type == kind


def _function(source: str) -> Callable[[list[Any]], Any]:
    """The function ``call`` of inductor's code, with kernels that do nothing, on the virtual device."""
    others = set(re.findall(r"higher_order\.(\w+)", source)) - vars(_Operators.higher_order).keys()
    if others:
        raise NotImplementedError(f"a trace does not run {', '.join(sorted(others))}")
    names = _names()
    kept = [each for each in ast.parse(source).body if _is_kept(each, names)]
    exec(compile(ast.Module(kept, []), "<inductor>", "exec", dont_inherit=True), names)
    call: Callable[[list[Any]], Any] = names["call"]
    return call


def _is_kept(statement: ast.stmt, names: dict[str, Any]) -> bool:
    if isinstance(statement, ast.ClassDef | ast.FunctionDef):
        return statement.name not in ("get_args", "benchmark_compiled_module")
    return isinstance(statement, ast.Assign) and not any(
        isinstance(target, ast.Name) and target.id in names for target in statement.targets
    )


_CHECKS = ("assert_size_stride", "assert_alignment", "assert_tensor_metadata", "run_intermediate_hooks")
"""Functions of inductor's code that allocate nothing; the third from torch 2.14 on."""


def _names() -> dict[str, Any]:
    """What inductor's code imports and binds before its functions."""
    from memfit.torch_compat.inductor import extern_kernels

    cuda = SimpleNamespace(_DeviceGuard=nullcontext, set_device=_nothing, synchronize=_nothing)
    nothing = dict.fromkeys(_CHECKS, _nothing)
    return nothing | {
        "torch": SimpleNamespace(**{**vars(torch), "cuda": cuda, "ops": _Operators()}),
        "aten": torch.ops.aten,
        "inductor_ops": torch.ops.inductor,
        "math": math,
        "random": random,
        "inf": math.inf,
        "nan": math.nan,
        "device": _device,
        "extern_kernels": extern_kernels,
        "async_compile": _NoKernel(),
        "get_raw_stream": _nothing,
        "empty_strided": torch.empty_strided,
        "empty_strided_cpu": partial(_empty, torch.device("cpu")),
        "empty_strided_cpu_pinned": partial(_empty, torch.device("cpu")),
        "empty_strided_cuda": partial(_empty, torch.device(NAME)),
        "reinterpret_tensor": _view,
    }


def _nothing(*args: Any) -> None: ...


def _device(type: str = "cpu", index: int | None = None) -> torch.device:
    return torch.device(NAME if type == "cuda" else type)


def _empty(device: torch.device, size: Any, stride: Any, dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=device)


def _view(tensor: Tensor, size: Any, stride: Any, offset: int = 0) -> Tensor:
    return tensor.as_strided(size, stride, int(tensor.storage_offset()) + offset)
