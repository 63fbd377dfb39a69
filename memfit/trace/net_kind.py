"""What kind of net a step runs, by its operators alone: predictions of one kind share their measured errors."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor

from memfit.device.virtual.layout_copies import convolution_layout
from memfit.torch_compat.attributes import schema_of

_aten = torch.ops.aten
_CONVOLUTION = _aten.convolution.default
_SOFTMAX = frozenset({_aten._softmax.default, _aten._safe_softmax.default})
_PRODUCTS = frozenset(
    getattr(getattr(_aten, name), overload)
    for name in ("mm", "addmm", "bmm", "baddbmm")
    for overload in ("default", "out")  # the second one by the code that inductor writes
)
_ATTENTION = frozenset(
    getattr(_aten, f"_scaled_dot_product_{name}").default
    for name in ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")
)
_RECURRENT = ("_cudnn_rnn", "lstm", "gru", "rnn_")


class NetKind:
    """Counts a step's operators. ``note`` every one of the forward; ``str`` gives the kind."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.types: Counter[torch.dtype] = Counter()
        self._names: dict[Any, str | None] = {}

    def note(self, func: Any, args: Any) -> None:
        """Counts a call that ``func`` was dispatched with."""
        name = self._names[func] if func in self._names else self._names.setdefault(func, _name(func))
        if name is None:
            return
        if func is _CONVOLUTION:
            name = _convolution(args)
        elif func in _SOFTMAX and not _weighs(args):
            return
        self.counts[name] += 1
        if isinstance(args[0], Tensor):
            self.types[args[0].dtype] += 1
            if func is _CONVOLUTION:
                layout = convolution_layout(args[0], args[1])
                self.counts["plain" if layout is torch.contiguous_format else "channels last"] += 1

    def __str__(self) -> str:
        """``family, precision``: convolution, depthwise (convolutions), attention, hybrid of it with spatial
        convolutions, matmul (matrix products alone), recurrent, or "1-d …", "3-d …"; empty where nothing was noted."""
        if not self.types:
            return ""
        counts = self.counts
        attends = counts["attention"] > 0
        spatial = counts["spatial"] + counts["depthwise"] > 0
        other = counts["1-d"] + counts["3-d"]
        if counts["recurrent"]:
            family = "recurrent"
        elif other > counts["spatial"] + counts["depthwise"] + counts["cut"]:
            family = f"{'1-d' if counts['1-d'] else '3-d'} {'hybrid' if attends else 'convolution'}"
        elif attends:
            family = "hybrid" if spatial else "attention"
        elif counts["depthwise"]:
            family = "depthwise"
        else:
            family = "convolution" if counts["spatial"] else "matmul"
        (precision, _), *_ = self.types.most_common(1)
        last = ", channels last" if counts["channels last"] > counts["plain"] else ""
        return f"{family}, {str(precision).removeprefix('torch.')}{last}"


def _name(func: Any) -> str | None:
    if func is _CONVOLUTION or func in _SOFTMAX or func in _ATTENTION:
        return "attention"
    if func in _PRODUCTS:
        return "matmul"
    return "recurrent" if any(word in schema_of(func).name for word in _RECURRENT) else None


def _convolution(args: Any) -> str:
    """spatial, depthwise, or cut (kernels that do not overlap: 1 x 1, patches); those of other than two dimensions."""
    x, weight, stride, groups = args[0], args[1], args[3], args[8]
    if weight.dim() != 4:
        return f"{weight.dim() - 2}-d"
    if all(size <= step for size, step in zip(weight.shape[2:], stride, strict=False)):
        return "cut"
    return "depthwise" if groups > 1 and groups == x.shape[1] else "spatial"


def _weighs(args: Any) -> bool:
    """Whether a softmax is over the last dimension of several, as attention's is."""
    x, dim = args[:2]
    return x.dim() >= 3 and dim % x.dim() == x.dim() - 1 and x.shape[-1] > 1
