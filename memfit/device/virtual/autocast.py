"""CUDA's autocast on the virtual GPU: which operators run in which type, and the cache of cast weights.

The lists are those of ATen/autocast_mode.h and of the AutocastCUDA kernels; a version has some of them (torch 2.8 lacks
rms_norm, 2.14 adds linalg_matrix_sqrth). ``cat`` and ``stack`` are not among them: CUDA leaves these to type promotion.
Left out: overloads for named dimensions, and _cudnn_rnn, which no step calls here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from memfit.device.virtual.backend import NAME
from memfit.device.virtual.patching import replaced
from memfit.torch_compat import (
    DisableTorchFunction,
    DispatchKey,
    DispatchKeySet,
    ExcludeDispatchKeys,
    FakeTensor,
    arg_tree_leaves,
    has_kernel,
    scoped_library,
)
from memfit.torch_compat.attributes import is_view, schema_of
from memfit.torch_compat.operators import has_operator, operator


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


LOWER_PRECISION = _names("""
_convolution.deprecated _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input
conv_transpose3d.input convolution cudnn_convolution cudnn_convolution_transpose prelu addmm addmv addr matmul einsum
mm mv linalg_vecdot linear addbmm baddbmm bmm chain_matmul linalg_multi_dot _thnn_fused_lstm_cell _thnn_fused_gru_cell
lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell _scaled_dot_product_flash_attention scaled_dot_product_attention
""")
"""Run in autocast's own type."""

FLOAT32 = _names("""
acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar pow.Tensor_Tensor
pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim nuclear_norm nuclear_norm.dim
cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss
smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss
multi_margin_loss linalg_matrix_sqrth
binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp upsample_nearest1d
_upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d
upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d
_upsample_bicubic2d_aa
""")
"""Run on float32 copies of their arguments."""

FLOAT32_OUTPUT = _names("""
prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm
linalg_matrix_norm.str_ord sum sum.dim_IntList
""")
"""Given dtype=float32, where the caller gave none."""

FLOAT32_APPENDED = {"norm.Scalar": "norm.ScalarOpt_dtype", "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype"}
"""Replaced by an overload that takes a dtype."""

PROMOTED = _names("addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add")
"""Run in float32 if any argument is float32, else in autocast's own type."""

BANNED = ("binary_cross_entropy",)

_KEY = "AutocastPrivateUse1"
_EXCLUDED = DispatchKeySet(getattr(DispatchKey, _KEY))
_below_autocast = ExcludeDispatchKeys
_cast_weights: dict[int, tuple[Tensor, Tensor]] = {}
"""id of a weight -> (the weight, its copy), emptied where the outermost autocast context ends."""

Kernel = Callable[..., Any]


_autocast_dtype = torch.get_autocast_dtype
"""torch's own, which takes the device's name; the virtual GPU puts one in its place that takes cuda."""


def _eligible(tensor: Tensor) -> bool:
    device: torch.device = tensor.fake_device if type(tensor) is FakeTensor else tensor.device
    return device.type == NAME and tensor.is_floating_point() and tensor.dtype is not torch.float64


def _cast_tensor(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor in ``dtype``; a float32 weight comes from the cache (at::autocast::cached_cast)."""
    if tensor.dtype is dtype or not _eligible(tensor):
        return tensor
    if not (
        tensor.dtype is torch.float32
        and tensor.requires_grad
        and tensor.is_leaf
        and dtype is _autocast_dtype(NAME)
        and torch.is_autocast_cache_enabled()
        and not is_view(tensor)
    ):
        return tensor.to(dtype)
    entry = _cast_weights.get(id(tensor))
    if entry is None:
        _cast_weights[id(tensor)] = entry = (tensor, tensor.to(dtype))
    return entry[1]


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        return _cast_tensor(value, dtype)
    if isinstance(value, (list, tuple)) and any(isinstance(item, Tensor) for item in value):
        return [_cast_tensor(item, dtype) if isinstance(item, Tensor) else item for item in value]
    return value


def _cast_all(args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype) -> tuple[list[Any], dict[str, Any]]:
    """All arguments cast, the last first, as the C++ kernels do: below torch functions."""
    with DisableTorchFunction():
        named = {name: _cast(value, dtype) for name, value in kwargs.items()}
        positional = [_cast(value, dtype) for value in reversed(args)]
    positional.reverse()
    return positional, named


def _lower_precision(op: Any) -> Kernel:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with _below_autocast(_EXCLUDED):
            positional, named = _cast_all(args, kwargs, _autocast_dtype(NAME))
            return op(*positional, **named)

    return kernel


def _float32(op: Any) -> Kernel:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with _below_autocast(_EXCLUDED):
            positional, named = _cast_all(args, kwargs, torch.float32)
            return op(*positional, **named)

    return kernel


def _float32_output(op: Any) -> Kernel:
    place = next(i for i, argument in enumerate(schema_of(op).arguments) if argument.name == "dtype")

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with _below_autocast(_EXCLUDED):
            if _eligible(args[0]):
                if len(args) > place and args[place] is None:
                    args = (*args[:place], torch.float32, *args[place + 1 :])
                elif len(args) <= place and kwargs.get("dtype") is None:
                    kwargs["dtype"] = torch.float32
            return op(*args, **kwargs)

    return kernel


def _float32_appended(op: Any) -> Kernel:
    names = [argument.name for argument in schema_of(op).arguments if argument.name != "dtype"]

    def kernel(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip(names, args, strict=False)) | kwargs
        filled = [given.get(name, _DEFAULTS.get(name)) for name in names]
        with _below_autocast(_EXCLUDED):
            return op(*filled, dtype=torch.float32 if _eligible(args[0]) else args[0].dtype)

    return kernel


_DEFAULTS: dict[str, Any] = {"p": 2, "keepdim": False}
"""Defaults of the overloads of ``norm`` without a dtype."""


def _promoted(op: Any) -> Kernel:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with _below_autocast(_EXCLUDED):
            tensors = arg_tree_leaves(*args, **kwargs)
            widest = any(isinstance(t, Tensor) and t.dtype is torch.float32 and _eligible(t) for t in tensors)
            positional, named = _cast_all(args, kwargs, torch.float32 if widest else _autocast_dtype(NAME))
            return op(*positional, **named)

    return kernel


def _banned(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError(
        "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast; "
        "use binary_cross_entropy_with_logits or BCEWithLogitsLoss"
    )


def kernels() -> dict[str, Kernel]:
    """Operator -> its autocast kernel, for all operators that CUDA's autocast treats in this version (119 in 2.13)."""
    made: dict[str, Kernel] = {}
    for names, make in (
        (LOWER_PRECISION, _lower_precision),
        (FLOAT32, _float32),
        (FLOAT32_OUTPUT, _float32_output),
        (PROMOTED, _promoted),
    ):
        made |= {name: make(operator(name)) for name in names if has_operator(name)}
    made |= {name: _float32_appended(operator(target)) for name, target in FLOAT32_APPENDED.items()}
    made |= dict.fromkeys(BANNED, _banned)
    return {name: kernel for name, kernel in made.items() if has_kernel(f"aten::{name}", DispatchKey.AutocastCUDA)}


def _half_to_float(composite: Any) -> Kernel:
    """softmax(half, dtype=float32) is one kernel on CUDA, without a float32 copy of its input."""

    def kernel(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
        if x.dtype is torch.float16 and dtype is torch.float32:
            return composite(x, dim, True)
        return composite(x if dtype is None else x.to(dtype), dim, False)

    return kernel


HALF_TO_FLOAT: dict[Any, Kernel] = {
    torch.ops.aten.softmax.int: _half_to_float(torch.ops.aten._softmax.default),
    torch.ops.aten.log_softmax.int: _half_to_float(torch.ops.aten._log_softmax.default),
}


@contextlib.contextmanager
def cuda_autocast() -> Iterator[None]:
    """``torch.autocast("vgpu")`` behaves as ``torch.autocast("cuda")`` does."""
    clear_others = torch.clear_autocast_cache

    def clear_autocast_cache() -> None:
        _cast_weights.clear()
        clear_others()

    with contextlib.ExitStack() as stack:
        rest = stack.enter_context(scoped_library("_", "IMPL", _KEY))
        rest.fallback(torch.library.fallthrough_kernel, _KEY)
        autocast = stack.enter_context(scoped_library("aten", "IMPL", _KEY))
        for name, kernel in kernels().items():
            autocast.impl(name, kernel)
        softmax = stack.enter_context(scoped_library("aten", "IMPL", "AutogradPrivateUse1"))
        for op, kernel in HALF_TO_FLOAT.items():
            softmax.impl(op, kernel)
        stack.enter_context(replaced(torch, clear_autocast_cache=clear_autocast_cache))
        stack.callback(_cast_weights.clear)
        yield
