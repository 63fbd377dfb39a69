"""What CPU kernels return where torch's shape functions say otherwise.

- Normalisation in mixed precision: with a half-precision input and float32 weights the CPU kernels keep mean and
  inverse deviation in float32 (aten/src/ATen/native/cpu/mixed_data_type.h), and give a group norm's input gradient in
  the input's type.
- oneDNN's recurrent layer keeps a workspace for its backward, whose size the library alone knows
  (aten/src/ATen/native/mkldnn/RNN.cpp; torch's shape function gives 0 bytes): the layer is run once, and it is kept.
- The layer's backward gives float32 gradients in half precision, too; torch's shape function does so from 2.13 on.
"""

from __future__ import annotations

import contextlib
import json
from typing import Any

import torch
from torch import Tensor

from memfit.errors import InputError
from memfit.torch_compat import disable_current_modes
from memfit.trace import operator_scratch
from memfit.user_cache import is_count, keep, read_kept

_aten = torch.ops.aten
_FORWARD = {_aten.native_batch_norm.default: 1, _aten.native_group_norm.default: 1, _aten.native_layer_norm.default: 2}
"""Normalisations, and the position of their weight."""
_RECURRENT, _WORKSPACE = _aten.mkldnn_rnn_layer.default, 3
_RECURRENT_BACKWARD = _aten.mkldnn_rnn_layer_backward.default
_NO_KERNEL = "could not create a primitive descriptor"
"""What oneDNN says of a layer and a data type that this CPU's instructions do not carry."""
_HALF = (torch.bfloat16, torch.float16)


def correct(func: Any, args: Any, out: Any) -> Any:
    """The operator's outputs as the CPU's kernel makes them."""
    if func in _FORWARD:
        weight = args[_FORWARD[func]]
        if args[0].dtype in _HALF and isinstance(weight, Tensor) and weight.dtype is torch.float32:
            return (out[0], *(statistic.new_empty(statistic.shape, dtype=torch.float32) for statistic in out[1:]))
    elif (
        func is _aten.native_group_norm_backward.default
        and isinstance(out[0], Tensor)
        and out[0].dtype is not args[1].dtype
    ):
        return (out[0].new_empty(out[0].shape, dtype=args[1].dtype), *out[1:])
    elif func is _RECURRENT and torch.is_grad_enabled():
        nbytes = _recurrent_workspace(args)
        return (*out[:_WORKSPACE], out[_WORKSPACE].new_empty(nbytes))
    elif func is _RECURRENT_BACKWARD:
        gradients = {id(gradient): gradient for gradient in out if isinstance(gradient, Tensor)}
        full = {
            key: gradient
            if gradient.dtype is torch.float32
            else gradient.new_empty(gradient.shape, dtype=torch.float32)
            for key, gradient in gradients.items()
        }
        return tuple(full.get(id(gradient), gradient) for gradient in out)
    return out


def _recurrent_workspace(args: Any) -> int:
    """Bytes that the layer keeps for its backward, on this machine."""
    key = operator_scratch.call_key(_RECURRENT, args, {})
    if key is None:
        return 0
    place = operator_scratch.store("recurrent")
    known: dict[operator_scratch.Key, int] = read_kept(place, is_count)
    if key not in known:
        if not operator_scratch.fits_here(key):
            seen = f"a recurrent layer on {tuple(args[0].shape)}"
            why = "its workspace is measured here, and this machine's free memory does not hold the call"
            raise InputError(seen, why, "ask for a smaller micro-batch, or on a machine with more memory")
        try:
            with disable_current_modes(), torch.enable_grad():
                made = _RECURRENT(*(operator_scratch.real(argument) for argument in json.loads(key)[1]))
        except RuntimeError as error:
            if _NO_KERNEL not in str(error):
                raise
            seen = f"a recurrent layer in {str(args[0].dtype).removeprefix('torch.')}"
            why = "oneDNN has no kernel for it on this CPU, so that torch cannot train it here either"
            raise InputError(seen, why, "ask for --precision fp32, or for a card with --device") from error
        known[key] = made[_WORKSPACE].nbytes
        with contextlib.suppress(OSError):
            keep(place, known)
    return known[key]
