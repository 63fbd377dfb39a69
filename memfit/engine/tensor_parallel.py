"""Tensor parallelism: the layers of trained nets cut over the ``tp`` ranks of a mesh.

torch's ``parallelize_module`` cuts them, by the plan that transformers gives for a net (``tp_plan``), or by the job's
own ``parallelize``. What stays whole becomes a replicated DTensor: norms and optimizers see tensors of one kind.

Source of the layouts' names: ``transformers.distributed.tensor_parallel``.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from memfit.errors import InputError
from memfit.job import Job, Nets
from memfit.torch_compat import tree_map
from memfit.torch_compat.attributes import own_buffers, own_parameters
from memfit.torch_compat.distributed import OWN_VALUES

TENSOR = "tp"
"""The dimension of a mesh of ranks that hold parts of each layer."""
STYLES = {
    "colwise": lambda: ColwiseParallel(),
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),
    "rowwise": lambda: RowwiseParallel(),
    "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate()),
    "rowwise_rep": lambda: RowwiseParallel(input_layouts=Replicate()),
    "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
}
"""torch's style for each layout that transformers names."""
_HOOK = "write parallelize(self, nets, mesh) in the job, or leave tp out of the mesh"


def cut_layers(job: Job, nets: Nets, mesh: DeviceMesh) -> None:
    """Cuts nets in place over a mesh of one dimension; every rank has the same values before.

    Args:
        nets: those that are trained, or averages of them.

    Raises:
        InputError: a net cannot be cut; names the module.
    """
    if type(job).parallelize is not Job.parallelize:
        job.parallelize(nets, mesh)
        for name, net in nets.items():
            if not any(isinstance(parameter, DTensor) for parameter in net.parameters()):
                seen = f"{type(job).__name__}.parallelize() on tp={mesh.size()}"
                raise InputError(seen, f"it cut no parameter of net {name!r}", "cut it, or leave tp out of the mesh")
    else:
        for name, net in nets.items():
            parallelize_module(net, mesh, _styles(name, net, mesh.size()), **OWN_VALUES)
    for name, net in nets.items():
        _replicate(name, net, mesh)


def _styles(name: str, net: nn.Module, ranks: int) -> dict[str, ParallelStyle]:
    """A style for each module of transformers' plan for a net.

    Raises:
        InputError: it has no plan, or the plan has what is not carried.
    """
    plan = getattr(net, "tp_plan", None)
    if not plan:
        why = f"transformers has no tensor-parallel plan for {type(net).__name__}"
        raise InputError(f"net {name!r} on tp={ranks}", why, _HOOK)
    styles: dict[str, ParallelStyle] = {}
    for path, module in net.named_modules():
        layout = next((plan[key] for key in plan if fnmatch.fnmatchcase(path, key)), None)
        if layout is None or _is_tied(net, module):
            continue
        if layout not in STYLES:
            raise InputError(f"module {name}.{path} on tp={ranks}", f"its layout {layout!r} is not carried", _HOOK)
        _check_sizes(f"{name}.{path}", module, layout, ranks)
        styles[path] = STYLES[layout]()
    if not styles:
        raise InputError(f"net {name!r} on tp={ranks}", f"no module of {type(net).__name__} is in its plan", _HOOK)
    _check_heads(name, net, ranks)
    return styles


def _is_tied(net: nn.Module, module: nn.Module) -> bool:
    """Whether another module of the net holds one of its parameters: then both stay whole."""
    own = {id(parameter) for parameter in module.parameters(recurse=False)}
    return any(
        other is not module and any(id(p) in own for p in other.parameters(recurse=False)) for other in net.modules()
    )


def _check_sizes(where: str, module: nn.Module, layout: str, ranks: int) -> None:
    """Raises InputError where a module's dimension that is cut does not divide by the ranks."""
    weight = own_parameters(module).get("weight")
    if weight is None:
        raise InputError(f"module {where} on tp={ranks}", f"{type(module).__name__} has no weight to cut", _HOOK)
    size = weight.shape[1 if layout.startswith("rowwise") else 0]
    if size % ranks:
        raise InputError(f"module {where} on tp={ranks}", f"{size} does not divide by {ranks}", "write another tp")


def _check_heads(name: str, net: nn.Module, ranks: int) -> None:
    """Raises InputError where heads of attention do not divide by the ranks."""
    config: Any = getattr(net, "config", None)
    for key in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, key, None)
        if isinstance(heads, int) and heads % ranks:
            raise InputError(
                f"net {name!r} on tp={ranks}", f"{key} = {heads} does not divide by it", "write another tp"
            )


def _replicate(name: str, net: nn.Module, mesh: DeviceMesh) -> None:
    """Every parameter that is whole as a replicated DTensor; one that modules share stays shared.

    Raises:
        InputError: a module holds parameters beside other modules, or beside buffers.
    """
    whole: dict[int, nn.Parameter] = {}
    for path, module in _with_whole_parameters(net):
        where = f"module {name}.{path}".rstrip(".") + f" on tp={mesh.size()}"
        if next(module.children(), None) is not None:
            raise InputError(where, "it holds parameters beside other modules", _HOOK)
        if own_buffers(module):
            raise InputError(where, f"{type(module).__name__} holds buffers, which are not cut", _HOOK)
        for key, parameter in own_parameters(module).items():
            if parameter is not None and not isinstance(parameter, DTensor):
                if id(parameter) not in whole:
                    replicated = DTensor.from_local(parameter.data, mesh, [Replicate()], run_check=False)
                    whole[id(parameter)] = nn.Parameter(replicated, requires_grad=parameter.requires_grad)
                module.register_parameter(key, whole[id(parameter)])
        module.register_forward_pre_hook(_Enter(mesh), with_kwargs=True)
        module.register_forward_hook(_leave)


def _with_whole_parameters(net: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for path, module in list(net.named_modules()):
        own = [parameter for parameter in own_parameters(module).values() if parameter is not None]
        if any(not isinstance(parameter, DTensor) for parameter in own):
            yield path, module


class _Enter:
    """Before a forward: tensors, of which every rank has the same, become replicated DTensors."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        def entered(value: Any) -> Any:
            if not isinstance(value, Tensor) or isinstance(value, DTensor):
                return value
            return DTensor.from_local(value, self._mesh, [Replicate()], run_check=False)

        return tree_map(entered, (args, kwargs))


def _leave(module: nn.Module, args: Any, output: Any) -> Any:
    """After a forward: DTensors become this rank's tensors."""
    return tree_map(lambda value: value.to_local() if isinstance(value, DTensor) else value, output)
