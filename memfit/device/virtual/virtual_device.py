"""The virtual GPU: a context in which tensors on its device have shapes, types and storages, but no bytes.

Everything here that reaches into torch's internals is undone on leaving. A trace of a step on this device makes the
allocations that the step makes on CUDA; what a kernel allocates inside of itself is in
``memfit.device.virtual.workspace``.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.compiler import set_stance
from torch.nn.parameter import is_lazy

from memfit.device.virtual import backend
from memfit.device.virtual.assumptions import Assumptions
from memfit.device.virtual.attention import attend, cuda_attention
from memfit.device.virtual.autocast import HALF_TO_FLOAT, cuda_autocast
from memfit.device.virtual.card_rules import CardRules
from memfit.device.virtual.compiled_functions import compiled_functions
from memfit.device.virtual.cuda_kernels import COMPOSITES, FUSED_ON_CUDA, cuda_kernels
from memfit.device.virtual.data_dependent import NOT_HANDLED, answer_operator, asks_data
from memfit.device.virtual.environment import environment_kept
from memfit.device.virtual.fake_mode import VirtualMode
from memfit.device.virtual.flex_attention import flex_attention_kernels
from memfit.device.virtual.fused_encoder import FUSED_IN_EVALUATION
from memfit.device.virtual.patching import appended, replaced
from memfit.device.virtual.pretrained import without_weights
from memfit.device.virtual.redirect import default_device_kept, says_cuda
from memfit.device.virtual.tensor_classes import tensor_classes_kept
from memfit.device.virtual.wrapper_classes import wrappers_on_the_card
from memfit.torch_compat import DispatchKey, FakeTensor, TorchDispatchMode, disable_current_modes, has_kernel
from memfit.torch_compat.attributes import storage_id_of
from memfit.torch_compat.grad_scaler import MAYBE_STEP
from memfit.torch_compat.operators import missing_shapes
from memfit.torch_compat.tracing import foreach_types, shape_functions, trace_rules
from memfit.torch_compat.versions import check_torch_version


@dataclass(frozen=True, kw_only=True, eq=False)
class Virtual:
    """A virtual device that was entered."""

    device: torch.device
    mode: VirtualMode
    rules: CardRules | None = None
    """None for the virtual CPU."""
    on_empty_cache: list[Callable[[], None]] = field(default_factory=list)
    """Called, in order, where code calls torch.cuda.empty_cache."""
    on_resize: list[Callable[[torch.UntypedStorage, int], None]] = field(default_factory=list)
    """Called, in order, after a storage was given another number of bytes: no operator does that (FSDP2 does)."""

    @property
    def assumptions(self) -> Assumptions:
        """What was assumed of data so far."""
        return self.mode.assumptions

    def intercept(self, mode: TorchDispatchMode, func: Any, args: Any, kwargs: Any) -> Any:
        """What a tracing dispatch mode must not simply call: the result, or NOT_HANDLED. Call it for every operator.

        These are questions to data, and operators that inference mode hands over whole. Operators that they are
        made of are dispatched through ``mode`` again.
        """
        fused = FUSED_IN_EVALUATION.get(func)
        if fused is not None:
            with mode:
                result = fused(self.rules, *args, **kwargs)
            if result is not NotImplemented:
                return result
        if torch.is_inference_mode_enabled():
            kernel = self._inference_kernel(func)
            if kernel is not None:
                with mode:
                    result = kernel(*args, **kwargs)
                if result is not NotImplemented:
                    return result
        if asks_data(func):
            with mode:
                return answer_operator(func, args, kwargs, self.assumptions)
        return NOT_HANDLED

    def _inference_kernel(self, func: Any) -> Callable[..., Any] | None:
        if self.rules is not None:
            if func is torch.ops.aten.scaled_dot_product_attention.default:
                return partial(attend, self.rules)
            steps = HALF_TO_FLOAT.get(func) or COMPOSITES.get(func)
            if steps is not None:
                return steps
        composite = DispatchKey.CompositeImplicitAutograd
        if self.rules is not None and func.name().removeprefix("aten::") in FUSED_ON_CUDA:
            return None
        if has_kernel(func.name(), composite):
            return func.decompose
        return None


def is_intercepted(func: Any) -> bool:
    """Whether ``Virtual.intercept`` may have something to say about an operator outside of inference mode."""
    return func in FUSED_IN_EVALUATION or asks_data(func)


def _device_hint(tensor: Any) -> str:
    """What the meta kernels take a tensor's device for; they know CUDA's rules under the name of cuda."""
    if not isinstance(tensor, FakeTensor):
        return "cuda"
    kind = tensor.fake_device.type
    return "cuda" if kind == backend.NAME else kind


def _copied(tensor: FakeTensor, memo: dict[int, Any]) -> Any:
    """``copy.deepcopy`` of a fake tensor, whose known content (of a constant) is copied for real.

    Of a parameter its values alone are copied, as by ``nn.Parameter``: no gradient and no other attribute.
    """
    if isinstance(tensor, nn.Parameter):
        if id(tensor) not in memo:
            copied = tensor.data.clone(memory_format=torch.preserve_format)
            memo[id(tensor)] = nn.Parameter(copied, tensor.requires_grad)
        return memo[id(tensor)]
    if tensor.constant is not None:
        with disable_current_modes():
            memo[id(tensor.constant)] = tensor.constant.clone()
    return Tensor.__deepcopy__(tensor, memo)


def _swapped(swap: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """``torch.utils.swap_tensors`` of fake tensors, which ``Module.to`` calls where a plain tensor's data are set.

    It refuses a tensor that C++ code refers to, as DistributedDataParallel does to each parameter. A conversion that
    changes nothing needs no swap, and one on the same device sets the data. A tensor of a lazy module has no data yet.
    """

    def call(tensor: Any, applied: Any) -> None:
        fakes = isinstance(tensor, FakeTensor) and isinstance(applied, FakeTensor)
        if not fakes or is_lazy(tensor) or tensor.fake_device != applied.fake_device:
            swap(tensor, applied)
        elif storage_id_of(tensor) != storage_id_of(applied) or tensor.dtype != applied.dtype:
            tensor.data = applied

    return call


@contextlib.contextmanager
def _torch_choices_kept() -> Iterator[None]:
    """A context that restores what code inside may choose for all of torch: cuDNN's flags (``benchmark``, say), kernels
    of attention, the default type of floating point numbers, and deterministic algorithms."""
    cudnn: Any = torch.backends.cudnn
    before = {name: getattr(cudnn, name) for name in ("enabled", "benchmark", "deterministic", "allow_tf32")}
    cuda = torch.backends.cuda
    attention = {
        cuda.enable_flash_sdp: cuda.flash_sdp_enabled(), cuda.enable_math_sdp: cuda.math_sdp_enabled(),
        cuda.enable_mem_efficient_sdp: cuda.mem_efficient_sdp_enabled(),
        cuda.enable_cudnn_sdp: cuda.cudnn_sdp_enabled(),
    }  # fmt: skip
    default_type, debug_mode = torch.get_default_dtype(), torch.get_deterministic_debug_mode()
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(cudnn, name, value)
        for enable, was_enabled in attention.items():
            enable(was_enabled)
        torch.set_default_dtype(default_type)
        if torch.get_deterministic_debug_mode() != debug_mode:  # to set it imports inductor
            torch.set_deterministic_debug_mode(debug_mode)


@contextlib.contextmanager
def _fakes_pass_for_tensors() -> Iterator[None]:
    """A context in which torch's questions for a tensor's Python type or weak references get a plain tensor's answers.

    A fault of the job is told in one line: what a meta kernel fails on is raised, and not logged as well.
    """
    with (
        replaced(torch.utils, weakref=SimpleNamespace(**vars(weakref) | {"getweakrefs": lambda tensor: []})),
        replaced(torch.utils, swap_tensors=_swapped(torch.utils.swap_tensors)),
        appended(foreach_types()[0], FakeTensor),
        appended(foreach_types()[1], FakeTensor),
        replaced(shape_functions, device_hint=_device_hint),
        replaced(FakeTensor, __deepcopy__=_copied, item=_the_one_item),
        replaced(GradScaler, **{MAYBE_STEP: _step_without_looking}),
        default_device_kept(),
        _torch_choices_kept(),
        environment_kept(),
        without_weights(),
        missing_shapes(),
        tensor_classes_kept(),
        replaced(logging.getLogger(FakeTensor.__module__), disabled=True),
        warnings.catch_warnings(),
    ):
        # copy.deepcopy asks a tensor of another class than Tensor for its address.
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
        # The hooks are the tracer's, and nothing is compiled here.
        warnings.filterwarnings("ignore", message=r"Using `torch.compile\(module\)` when there are global hooks")
        yield


def _the_one_item(tensor: FakeTensor) -> Any:
    """A number of a tensor whose size may be taken too high: ``(steps == t).nonzero().item()`` asks for the one match,
    and the trace took every place for one. Code that asks for one number has one; of floats, what is read may be a loss
    that is none, which stays an error."""
    too_many = tensor.numel() > 1 and not tensor.is_floating_point() and tensor.dtype is not torch.bool
    mode: Any = tensor.fake_mode
    is_bound = too_many and any(assumption.most for assumption in getattr(mode, "assumptions", ()))
    return Tensor.item(tensor.flatten()[0] if is_bound else tensor)


def _step_without_looking(self: Any, optimizer: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
    """GradScaler steps unless it found an infinity, which a trace has no way to see."""
    return optimizer.step(*args, **kwargs)


@contextlib.contextmanager
def _storages_tell(hooks: list[Callable[[torch.UntypedStorage, int], None]]) -> Iterator[None]:
    resize = torch.UntypedStorage.resize_

    def resize_(self: torch.UntypedStorage, size: int) -> Any:
        result = resize(self, size)
        for hook in hooks:
            hook(self, size)
        return result

    with replaced(torch.UntypedStorage, resize_=resize_):
        yield


@contextlib.contextmanager
def _compiled_runs_as_written() -> Iterator[None]:
    """A context in which what torch.compile made runs as it was written.

    Dynamo makes a table of torch's functions when it is first asked, and again after a process group was initialised;
    for the table, two names of one function are an error. It is therefore made before functions of torch.cuda are
    replaced, and kept.
    """
    table = trace_rules.get_torch_obj_rule_map()
    kept = cache(lambda: table)
    with set_stance("force_eager"), replaced(trace_rules, get_torch_obj_rule_map=kept):
        yield


@contextlib.contextmanager
def virtual_cpu(mode: type[VirtualMode] = VirtualMode) -> Iterator[Virtual]:
    """Fake tensors on the plain CPU, with CPU's own rules: the same step as a real one here, without its bytes.

    As on the virtual GPU, what torch.compile made is run as it was written.

    Args:
        mode: the class of the fake mode.
    """
    check_torch_version()
    backend.register_virtual_device()  # autograd's engine knows only the devices that were there at its first backward
    virtual = Virtual(device=torch.device("cpu"), mode=mode())
    compiled = compiled_functions(virtual.assumptions.compiled.add)
    runs_as_written = _compiled_runs_as_written()
    with _fakes_pass_for_tensors(), _storages_tell(virtual.on_resize), runs_as_written, compiled, virtual.mode:
        yield virtual


@contextlib.contextmanager
def virtual_gpu(card: CardRules, mode: type[VirtualMode] = VirtualMode) -> Iterator[Virtual]:
    """The card's device: what is built and run in this context behaves as on CUDA, and code that says cuda runs on it.

    Args:
        mode: the class of the fake mode.

    Raises:
        InputError: a version of torch that does not work.
    """
    check_torch_version()
    backend.register_virtual_device()
    virtual = Virtual(device=torch.device(backend.NAME), mode=mode(on_gpu=True), rules=card)

    def emptied() -> None:
        for hook in virtual.on_empty_cache:
            hook()

    with contextlib.ExitStack() as stack:
        stack.enter_context(backend.entered())
        stack.enter_context(_fakes_pass_for_tensors())
        stack.enter_context(_storages_tell(virtual.on_resize))
        stack.enter_context(_compiled_runs_as_written())
        stack.enter_context(compiled_functions(virtual.assumptions.compiled.add))
        stack.enter_context(cuda_autocast())
        stack.enter_context(cuda_kernels())
        stack.enter_context(cuda_attention(card))
        stack.enter_context(flex_attention_kernels(lambda line: virtual.assumptions.note_kernel(line)))
        stack.enter_context(virtual.mode)
        stack.enter_context(says_cuda(card, emptied, virtual.assumptions.note_memory))
        stack.enter_context(wrappers_on_the_card())
        yield virtual
