"""What a function that inductor compiled allocates on a card, read from inductor's own scheduler without a card.

The function is traced to a graph, lowered, and its kernels are fused by ``Scheduler``: what one kernel alone makes and
uses stays in registers, and what another one uses is a buffer, allocated before the kernel that makes it and freed
after the last that reads it. Neither Triton nor a card is needed until code is generated, which is not done here.
Where inductor reuses a buffer for another of its size, this frees one and allocates the other: the same bytes. What
Triton takes while it tries the configurations of a kernel, in the first call, is not in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from memfit.device.virtual.patching import replaced
from memfit.torch_compat import DisableTorchFunction, FakeTensorMode, disable_current_modes

_CARD = torch.device("cuda", 0)
_PROPERTIES = SimpleNamespace(
    name="NVIDIA A100", major=8, minor=0, total_memory=40 << 30, multi_processor_count=108, warp_size=32,
    max_threads_per_multi_processor=2048, regs_per_multiprocessor=65536, L2_cache_size=40 << 20,
    shared_memory_per_block=48 << 10, shared_memory_per_block_optin=163 << 10, gcnArchName="",
)  # fmt: skip
"""Of the card that inductor asks: one for all, since what is fused does not depend on these. The last is AMD's, for
which a build without CUDA asks."""


@dataclass(frozen=True, kw_only=True)
class CompiledKernel:
    """One kernel's part of a plan."""

    allocates: tuple[tuple[str, int], ...]
    """(name, bytes) of the buffers that are allocated before it."""
    frees: tuple[str, ...]
    """Names of those that are freed after it."""


def compiled_plan(
    function: Callable[..., Any], tensors: Sequence[Tensor], device: torch.device = _CARD
) -> tuple[CompiledKernel, ...] | None:
    """The kernels of a function that writes to its arguments and returns no tensor; None of one that returns some.

    Args:
        function: called with tensors like those given, on the CPU, without gradients.
        tensors: their shapes, strides and types are used. Those without dimensions stay on the host.
        device: a card, or the CPU, for which inductor fuses by other rules.
    """
    from memfit.torch_compat.inductor import FakeTensorProp

    answers = card_answers() if device.type == "cuda" else nullcontext()
    with disable_current_modes(), DisableTorchFunction(), answers:
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        with mode:
            like = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype) for t in tensors]
            graph = _graph(function, like)
        (output,) = (node for node in graph.graph.nodes if node.op == "output")
        if any(value is not None for value in output.args[0]):
            return None
        for node in graph.graph.nodes:
            if node.kwargs.get("device") is not None:
                node.kwargs = {**node.kwargs, "device": device}
        graph.recompile()
        with mode:
            placed = [t if t.dim() == 0 else torch.empty_like(t, device=device) for t in like]
        FakeTensorProp(graph, mode).propagate_dont_convert_inputs(*placed)
        return _scheduled(graph, placed, mode)


def _graph(function: Callable[..., Any], tensors: list[Tensor]) -> Any:
    """The function's graph of the operators that inductor knows, whose last ones write to the arguments."""
    from memfit.torch_compat.inductor import aot_autograd, decompositions

    made: list[Any] = []

    def keep(gm: Any, example_inputs: Any) -> Any:
        made.append(gm)
        return gm.forward

    compiled = aot_autograd.aot_function(
        function, fw_compiler=keep, inference_compiler=keep, decompositions=decompositions(),
        keep_inference_input_mutations=True,
    )  # fmt: skip
    with torch.no_grad():
        compiled(*tensors)
    return made[0]


def _scheduled(graph: Any, inputs: list[Tensor], mode: Any) -> tuple[CompiledKernel, ...]:
    from memfit.torch_compat.inductor import DebugContext, GraphLowering, scheduling, virtualized

    lowering = GraphLowering(graph, example_inputs=inputs, is_inference=True)
    handlers = virtualized.V
    with (
        handlers.set_debug_handler(DebugContext()),
        handlers.set_graph_handler(lowering),
        handlers.set_fake_mode(mode),
    ):
        lowering.run(*inputs)
        lowering.init_wrapper_code()
        return tuple(_kernels(scheduling.Scheduler(lowering.operations)))


def _kernels(scheduler: Any) -> Iterator[CompiledKernel]:
    memory: dict[str, tuple[str, int]] = {}
    """Buffer that is live -> (the first buffer of its memory, bytes)."""
    for node in scheduler.nodes:
        inside = {each.get_name() for each in node.get_nodes()} | {node.get_name()}
        ends = memory.keys() & node.last_usage
        allocates = []
        for part, buffer in [(each, buffer) for each in node.get_nodes() for buffer in each.get_outputs()]:
            name = buffer.get_name()
            if buffer.get_mutations() or buffer.get_aliases():
                continue
            if scheduler.can_buffer_be_removed_through_fusion(name, inside):
                continue
            nbytes = _nbytes(buffer.node.get_layout())
            taken = next(
                (end for end in sorted(ends) if memory[end][1] == nbytes and _ends_in(scheduler, end, part)), None
            )
            if taken is None:
                allocates.append((name, nbytes))
                memory[name] = (name, nbytes)
            else:
                memory[name] = memory.pop(taken)
                ends -= {taken}
        last = ends | (memory.keys() & node.last_usage)
        yield CompiledKernel(allocates=tuple(allocates), frees=tuple(sorted(memory.pop(name)[0] for name in last)))


def _ends_in(scheduler: Any, name: str, part: Any) -> bool:
    """Whether a part of a kernel reads a buffer for the last time, element by element, and so may write over it
    (``decide_inplace_update``).
    """
    if type(part).__name__ != "SchedulerNode":  # a kernel of another library
        return False
    others = part.ancestors | {part.get_name()}
    users = [user for user in scheduler.name_to_buf[name].users if user.node is part or user.get_name() not in others]
    inside = {dep for user in scheduler.name_to_buf[name].users for dep in _dependencies(scheduler, user, part, name)}
    return len(users) == 1 and users[0].node is part and bool(users[0].can_inplace) and len(inside) <= 1


def _dependencies(scheduler: Any, user: Any, part: Any, name: str) -> set[Any]:
    """How a buffer is read by one of its users, where that is in the kernel of ``part``."""
    kernels = scheduler.name_to_fused_node
    if kernels.get(user.get_name()) is not kernels.get(part.get_name()):
        return set()
    return {dep for dep in user.node.read_writes.reads_and_writes() if dep.name == name}


def _nbytes(layout: Any) -> int:
    sizes, strides = [int(size) for size in layout.size], [int(stride) for stride in layout.stride]
    last = sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    return int((1 + last) * layout.dtype.itemsize) if all(sizes) else 0


@contextmanager
def card_answers() -> Iterator[None]:
    """A context in which inductor believes that there are Triton and a card."""
    from memfit.torch_compat.inductor import CudaInterface, aot_autograd, code_cache, scheduling, triton_questions

    asked: dict[str, Any] = {
        "get_device_properties": lambda device=None: _PROPERTIES,
        "get_device_capability": lambda device=None: (_PROPERTIES.major, _PROPERTIES.minor),
        "current_device": lambda: 0,
        "is_available": lambda: True,
    }
    of_class = {name: staticmethod(answer) for name, answer in asked.items() if hasattr(CudaInterface, name)}
    with ExitStack() as stack:
        stack.enter_context(replaced(scheduling, has_triton=lambda *args: True))
        stack.enter_context(replaced(triton_questions, triton_hash_with_backend=lambda: ""))
        if hasattr(code_cache, "triton_key"):
            stack.enter_context(replaced(code_cache, triton_key=lambda: ""))
        stack.enter_context(replaced(aot_autograd, preserve_rng_state=nullcontext))
        stack.enter_context(replaced(torch.cuda, **asked))
        stack.enter_context(replaced(CudaInterface, **of_class))
        stack.enter_context(
            replaced(
                CudaInterface.Worker,
                get_device_properties=staticmethod(asked["get_device_properties"]),
                current_device=staticmethod(asked["current_device"]),
            )
        )
        yield
