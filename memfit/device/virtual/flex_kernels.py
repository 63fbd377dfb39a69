"""FlexAttention in a graph that inductor compiles: operators with its kernels' outputs, in place of Triton templates.

The sizes and strides are those of inductor's lowerings (``torch/_inductor/kernel/flex/flex_attention.py``). The forward
has an output like the query and two float32 numbers for each query: the log-sum-exp and the largest score. The backward
is given the row sums of output times gradient, which a kernel of their own computes, and has three gradients.
"""

from __future__ import annotations

import functools
import operator
from typing import Any

import torch
from torch import Tensor

from memfit.torch_compat.selective_checkpoint import flex_operator

_FORWARD, _BACKWARD = "memfit::flex_attention", "memfit::flex_attention_backward"
_ARGUMENTS = "Tensor query, Tensor key, Tensor value, Tensor[] read"


def replace_flex_attention(graph: Any) -> None:
    """Replaces the nodes of FlexAttention in an ``fx.GraphModule``.

    Raises:
        NotImplementedError: a score_mod captures what needs a gradient.
    """
    backward = torch.ops.higher_order.flex_attention_backward
    nodes = [node for node in graph.graph.nodes if node.target in (flex_operator, backward)]
    for node in nodes:
        _define()
        with graph.graph.inserting_before(node):
            outputs = _backward(graph.graph, node) if node.target is backward else _forward(graph.graph, node)
        for user in list(node.users):
            user.replace_all_uses_with(outputs[user.args[1]])
            graph.graph.erase_node(user)
        graph.graph.erase_node(node)
    if nodes:
        graph.recompile()


def _forward(graph: Any, node: Any) -> list[Any]:
    query, key, value = node.args[:3]
    kernel = graph.call_function(torch.ops.memfit.flex_attention.default, (query, key, value, _read(node.args[3:])))
    return _parts(graph, kernel)


def _backward(graph: Any, node: Any) -> list[Any]:
    query, key, value, out, log_sum, grad, grad_log_sum = node.args[:7]
    if any(isinstance(each, Tensor) for each in node.meta["val"][3]):
        raise NotImplementedError("a trace does not run FlexAttention with gradients of what score_mod captures")
    call, aten = graph.call_function, torch.ops.aten
    products = call(aten.mul.Tensor, (out, grad))
    sums = call(aten.sum.dim_IntList, (products, [-1]))
    sums = call(torch.ops.prims.convert_element_type.default, (sums, torch.float32))
    if grad_log_sum is not None:
        sums = call(aten.sub.Tensor, (sums, call(aten.mul.Tensor, (grad_log_sum, 1.0))))
    read = [log_sum, grad, sums, *_read(node.args[7:])]
    gradients = _parts(graph, call(torch.ops.memfit.flex_attention_backward.default, (query, key, value, read)))
    if query.meta["val"].shape[0] != key.meta["val"].shape[0]:
        gradients[1:] = [call(aten.sum.dim_IntList, (each, [0], True)) for each in gradients[1:]]
    return [*gradients, None]


def _read(arguments: Any) -> list[Any]:
    """The tensors among a node's arguments, such as those of a block mask."""
    nodes: list[Any] = []
    torch.fx.map_arg(arguments, nodes.append)
    return [node for node in nodes if isinstance(node.meta.get("val"), Tensor)]


def _parts(graph: Any, kernel: Any) -> list[Any]:
    return [graph.call_function(operator.getitem, (kernel, index)) for index in range(3)]


@functools.cache
def _define() -> None:
    """Makes the operators; they have shapes and no code."""
    for name, shapes in ((_FORWARD, _outputs), (_BACKWARD, _gradients)):
        returns = "(Tensor, Tensor, Tensor)"
        torch.library.define(name, f"({_ARGUMENTS}) -> {returns}", tags=(torch.Tag.flexible_layout,))
        torch.library.register_fake(name, shapes)


def _outputs(query: Tensor, key: Tensor, value: Tensor, read: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    rows = (*query.shape[:-1],)
    out = _like(query, (*rows, value.shape[-1]))
    return out, query.new_empty(rows, dtype=torch.float32), query.new_empty(rows, dtype=torch.float32)


def _gradients(query: Tensor, key: Tensor, value: Tensor, read: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    return (
        _like(query, tuple(query.shape)),
        _like(key, (query.shape[0], *key.shape[1:])),
        _like(value, (query.shape[0], *value.shape[1:])),
    )


def _like(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A dense tensor whose dimensions are in the order of the tensor's strides."""
    order = sorted(range(len(shape)), key=lambda dim: (tensor.stride(dim), -dim))
    strides, step = [0] * len(shape), 1
    for dim in order:
        strides[dim], step = step, step * shape[dim]
    return tensor.new_empty_strided(shape, strides)
