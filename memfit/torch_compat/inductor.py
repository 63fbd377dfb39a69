"""Names of torch's compiler: dynamo, AOTAutograd and inductor, of which memfit runs all but the kernels; seconds to
import."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from memfit.torch_compat.versions import lacks

try:
    import torch._dynamo.config as dynamo_config
    import torch._dynamo.utils as dynamo_nodes
    import torch._functorch.aot_autograd as aot_autograd
    import torch._functorch.config as functorch_config
    import torch._inductor.codecache as code_cache
    import torch._inductor.compile_fx as compile_fx
    import torch._inductor.config as inductor_config
    import torch._inductor.scheduler as scheduling
    import torch._prims.rng_prims as random_states
    import torch.nn.modules.module as module_hooks
    import torch.utils._triton as triton_questions
    from torch._dynamo.device_interface import CudaInterface
    from torch._dynamo.exc import TorchDynamoException
    from torch._inductor import virtualized
    from torch._inductor.debug import DebugContext
    from torch._inductor.decomposition import select_decomp_table as decompositions
    from torch._inductor.fx_passes import joint_graph
    from torch._inductor.graph import GraphLowering
    from torch._inductor.select_algorithm import extern_kernels
    from torch._inductor.utils import GPU_TYPES
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp
    from torch.overrides import _get_current_function_mode_stack as function_modes
    from torch.overrides import _pop_mode as pop_function_mode
    from torch.overrides import _push_mode as push_function_mode
    from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as dispatch_modes
except (ImportError, AttributeError) as error:
    raise lacks(error) from error

_HOOKS = ("_global_forward_pre_hooks", "_global_forward_hooks", "_global_backward_hooks", "_global_backward_pre_hooks")


class Modes:
    """The modes and the hooks of all modules that are entered, to be left for a while and entered again inside."""

    def __init__(self) -> None:
        self.dispatch: list[Any] = list(dispatch_modes())
        self.function: list[Any] = list(function_modes())
        self.hooks = {name: dict(getattr(module_hooks, name)) for name in _HOOKS}

    @contextmanager
    def left(self) -> Iterator[None]:
        """A context without them."""
        for _ in self.function:
            pop_function_mode()
        try:
            with disable_current_modes(), _hooks({name: {} for name in _HOOKS}):
                yield
        finally:
            for mode in self.function:
                push_function_mode(mode)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """A context inside of ``left`` that has them again."""
        with ExitStack() as stack:
            stack.enter_context(_hooks(self.hooks))
            for mode in self.dispatch:
                stack.enter_context(mode)
            for mode in self.function:
                push_function_mode(mode)
                stack.callback(pop_function_mode)
            yield


@contextmanager
def _hooks(hooks: dict[str, dict[Any, Any]]) -> Iterator[None]:
    before = {name: dict(getattr(module_hooks, name)) for name in hooks}
    for name, held in hooks.items():
        _set(getattr(module_hooks, name), held)
    try:
        yield
    finally:
        for name, held in before.items():
            _set(getattr(module_hooks, name), held)


def _set(kept: dict[Any, Any], held: dict[Any, Any]) -> None:
    kept.clear()
    kept.update(held)


@contextmanager
def compiler_settings() -> Iterator[None]:
    """A context in which a backward is compiled with its forward, no code is kept on the disk, and any number of
    graphs of one function."""
    without = dict.fromkeys(("automatic_dynamic_local_pgo", "automatic_dynamic_remote_pgo"), False)
    for_dynamo = without | dict.fromkeys(_LIMITS, 1 << 20)
    for_backward = {"force_non_lazy_backward_lowering": True, "enable_autograd_cache": False}
    with (
        _patched(dynamo_config, for_dynamo),
        _patched(functorch_config, for_backward),
        _patched(inductor_config, {"fx_graph_cache": False, "fx_graph_remote_cache": False}),
    ):
        yield


_LIMITS = ("recompile_limit", "accumulated_recompile_limit", "cache_size_limit", "accumulated_cache_size_limit")
"""Of graphs of one function; versions have one pair of names or the other."""


def _patched(config: Any, values: dict[str, Any]) -> Any:
    return config.patch({name: value for name, value in values.items() if hasattr(config, name)})


def compile_graph(gm: Any, inputs: Any, inner_compile: Any) -> Any:
    """inductor's function of a graph of dynamo, whose forward and backward ``inner_compile`` compiles."""
    return compile_fx.compile_fx(gm, inputs, inner_compile=inner_compile)


def compiled_code(gm: Any, inputs: Any, *, is_backward: bool, is_inference: bool) -> str:
    """The Python code that inductor writes for a graph."""
    lowering = GraphLowering(gm, example_inputs=inputs, is_backward=is_backward, is_inference=is_inference)
    handlers = virtualized.V
    with handlers.set_debug_handler(DebugContext()), handlers.set_graph_handler(lowering):
        lowering.run(*inputs)
        written = lowering.codegen()[0]
    return str(getattr(written, "value", written))


def finish_graph(gm: Any, inputs: Any, mode: Any) -> None:
    """What inductor does to a graph before its last passes: shapes anew, views that may copy, strides noted."""
    compile_fx.view_to_reshape(gm)
    FakeTensorProp(gm, mode).propagate_dont_convert_inputs(*inputs)
    compile_fx._recursive_record_original_output_strides(gm)


def last_passes(gm: Any, *, is_inference: bool) -> None:
    """inductor's passes over one forward's or backward's graph."""
    compile_fx._recursive_post_grad_passes(gm, is_inference=is_inference)


__all__ = [
    "GPU_TYPES",
    "CudaInterface",
    "DebugContext",
    "FakeTensorProp",
    "GraphLowering",
    "Modes",
    "TorchDynamoException",
    "aot_autograd",
    "code_cache",
    "compile_fx",
    "compile_graph",
    "compiled_code",
    "compiler_settings",
    "decompositions",
    "dynamo_nodes",
    "extern_kernels",
    "finish_graph",
    "joint_graph",
    "last_passes",
    "random_states",
    "scheduling",
    "triton_questions",
    "virtualized",
]
