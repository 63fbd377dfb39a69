"""Tensor parallelism: the layers of trained nets cut over the ``tp`` ranks of a mesh.

torch's ``parallelize_module`` cuts them, by the plan that transformers gives for a net (``tp_plan``), by the plan that
follows from its attention and feed-forward (``attention_plan``) or from a forward (``traced_plan``), or by the job's
own ``parallelize``. What stays whole
becomes a replicated DTensor: norms and optimizers see tensors of one kind.

Source of the layouts' names: ``transformers.distributed.tensor_parallel``.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from memfit.engine.adapters import cut_parts, is_adapted, planned_nets
from memfit.engine.attention_plan import check_attentions, derived_plan, share_heads, unknown_attention
from memfit.engine.expert_cut import EXPERTS_CUT, check_experts, cut_experts
from memfit.engine.fused_projection import FusedColwiseParallel
from memfit.engine.local_parameters import replicate_parameters
from memfit.engine.product_layers import ProductLayer
from memfit.engine.product_styles import ProductColwise, ProductRowwise
from memfit.engine.sequence_parallel import WITHOUT, divide_tokens, scattering_styles, sequence_layers
from memfit.engine.traced_plan import TracedPlan, traced_plans
from memfit.engine.writable_outputs import make_writable
from memfit.errors import InputError
from memfit.events import CutParameters
from memfit.job import Job, Nets
from memfit.torch_compat.attributes import own_parameters
from memfit.torch_compat.distributed import OWN_VALUES

TENSOR = "tp"
"""The dimension of a mesh of ranks that hold parts of each layer."""
STYLES: Mapping[str, Callable[[], ParallelStyle]] = {
    "colwise": lambda: ColwiseParallel(),
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),
    "rowwise": lambda: RowwiseParallel(),
    "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate()),
    "rowwise_rep": lambda: RowwiseParallel(input_layouts=Replicate()),
    "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
}
"""torch's style for each layout that transformers names."""
FUSED = "colwise_fused_"
"""The beginning of the layout of a layer whose output is several tensors, whose number follows."""
SUMMED = "replicated_with_grad_allreduce"
"""The layout of a module that is whole on every rank and sees this rank's heads, as norms of single heads do."""
_HOOK = "write parallelize(self, nets, mesh) in the job, or leave tp out of the mesh"


def cut_layers(job: Job, nets: Nets, mesh: DeviceMesh, *, whole: Nets, sequence: bool = False) -> None:
    """Cuts nets in place over a mesh of one dimension; every rank has the same values before.

    Args:
        nets: those that are trained, or averages of them.
        whole: all nets of the job, of which those that are trained are not cut yet, or are ``nets``.
        sequence: whether tokens are divided between the layers that are cut (``sequence_parallel``).

    Raises:
        InputError: a net cannot be cut; names the module.
    """
    planned = type(job).parallelize is Job.parallelize
    if sequence:
        for name, net in nets.items():
            if not planned or not getattr(net, "tp_plan", None):
                why = f"tokens are divided by transformers' plan for a net, and {type(net).__name__} is not cut by one"
                raise InputError(f"net {name!r} on tp={mesh.size()}", why, WITHOUT)
    if type(job).parallelize is not Job.parallelize:
        job.parallelize(nets, mesh)
        for name, net in nets.items():
            if not any(isinstance(parameter, DTensor) for parameter in net.parameters()):
                seen = f"{type(job).__name__}.parallelize() on tp={mesh.size()}"
                raise InputError(seen, f"it cut no parameter of net {name!r}", "cut it, or leave tp out of the mesh")
    else:
        traced = _traced(job, nets, whole, mesh.size())
        divided = {name: _cut(name, net, mesh, sequence, traced.get(name)) for name, net in nets.items()}
        for name, net in nets.items():
            replicate_parameters(net, mesh, _of_single_heads(net) | divided[name])
        return
    for net in nets.values():
        replicate_parameters(net, mesh)


def cut_parameters(nets: Nets) -> CutParameters:
    """What of nets on a mesh with ``tp`` is cut over it."""
    every = {id(parameter): parameter for net in nets.values() for parameter in net.parameters()}.values()
    return CutParameters(
        parameters=sum(parameter.numel() for parameter in every),
        cut=sum(parameter.numel() for parameter in every if _is_cut(parameter)),
    )


def _is_cut(parameter: nn.Parameter) -> bool:
    if not isinstance(parameter, DTensor):
        return False
    names = parameter.device_mesh.mesh_dim_names or ()
    return TENSOR in names and not parameter.placements[names.index(TENSOR)].is_replicate()


def _traced(job: Job, nets: Nets, whole: Nets, ranks: int) -> dict[str, TracedPlan]:
    """Plans that follow from a forward, of the nets for which there is no other one.

    Raises:
        InputError: no layer of such a net can be cut; names the net and a module.
    """
    names = [name for name, net in nets.items() if not planned_nets(net, "tp_plan") and not _is_derived(net)]
    unknown = {name: _unknown(name, nets[name], frozenset(nets[name].modules()), ranks) for name in names}
    try:
        plans = traced_plans(job, whole, names, ranks) if names else {}
    except InputError as error:
        raise next((refusal for refusal in unknown.values() if refusal is not None), error) from error
    for name, plan in plans.items():
        if not plan.layouts:
            if (refusal := unknown[name]) is not None:
                raise refusal
            why = f"transformers has no tensor-parallel plan for {type(nets[name]).__name__}, and no two linear layers "
            because = f": {plan.refused}" if plan.refused else ""
            raise InputError(f"net {name!r} on tp={ranks}", f"{why}of a forward can be cut together{because}", _HOOK)
    return plans


def _is_derived(net: nn.Module) -> bool:
    """Whether the plan that follows from a net's modules cuts it."""
    every = frozenset(net.modules())
    return bool(derived_plan(net, every)) and unknown_attention(net, every) is None


def _unknown(name: str, net: nn.Module, among: frozenset[nn.Module], ranks: int) -> InputError | None:
    """What refuses the plan that follows from a net's modules, where its attention is not as diffusers has it."""
    unknown = unknown_attention(net, among)
    if unknown is None:
        return None
    path, why = unknown
    return InputError(f"module {f'{name}.{path}'.rstrip('.')} on tp={ranks}", why, _HOOK)


def _cut(
    name: str, net: nn.Module, mesh: DeviceMesh, sequence: bool, traced: TracedPlan | None
) -> frozenset[nn.Module]:
    """Cuts a net by the plan of transformers, else by the one that follows from its modules or from a forward.

    Returns:
        Modules that see a part of the tokens.

    Raises:
        InputError: it has neither, or the plan has what is not carried.
    """
    if traced is not None:
        styles = _styles(name, net, traced.layouts, mesh.size(), traced.products)
        _parallelize(net, mesh, styles)
        traced.divide_counts(net, mesh.size())
        return frozenset()
    planned = planned_nets(net, "tp_plan")
    norms = [_cut_planned(f"{name}.{path}".rstrip("."), inner, mesh, sequence) for path, inner in planned.items()]
    rest = [module for path, module in net.named_modules() if not any(_holds(outer, path) for outer in planned)]
    _cut_derived(name, net, frozenset(rest), mesh)
    return frozenset().union(*norms)


def _parallelize(net: nn.Module, mesh: DeviceMesh, styles: dict[str, ParallelStyle]) -> None:
    parallelize_module(net, mesh, styles, **OWN_VALUES)
    for path in styles:
        make_writable(net.get_submodule(path))


def _holds(outer: str, path: str) -> bool:
    return not outer or path == outer or path.startswith(f"{outer}.")


def _cut_planned(name: str, net: Any, mesh: DeviceMesh, sequence: bool) -> frozenset[nn.Module]:
    """Cuts a net by the plan that transformers has for it. Returns modules that see a part of the tokens."""
    plan, ranks = net.tp_plan, mesh.size()
    _check_heads(name, net, ranks)
    mixtures = _mixtures(name, net, plan, ranks)
    if sequence:
        _check_unadapted(name, net, ranks)
    tokens = sequence_layers(name, net, partial(_layout_of, plan=plan), ranks) if sequence else None
    styles = _styles(name, net, plan, ranks)
    if tokens is not None:
        styles |= scattering_styles(net, tokens, styles)
    _parallelize(net, mesh, styles)
    for module, layouts in mixtures.items():
        cut_experts(module, layouts, mesh)
    if tokens is None:
        return frozenset()
    divide_tokens(tokens, mesh)
    return tokens.norms


def _cut_derived(name: str, net: nn.Module, rest: frozenset[nn.Module], mesh: DeviceMesh) -> None:
    """Cuts what of a net no plan is for, by the plan that follows from its modules."""
    ranks, derived = mesh.size(), derived_plan(net, rest)
    if not derived:
        return
    if (refusal := _unknown(name, net, rest, ranks)) is not None:
        raise refusal
    check_attentions(name, net, rest, ranks)
    styles = _styles(name, net, derived, ranks)
    for path in derived:
        if not any(_holds(path, cut) for cut in styles):
            raise InputError(f"module {name}.{path} on tp={ranks}", "it shares a parameter with another module", _HOOK)
    _parallelize(net, mesh, styles)
    share_heads(net, rest, ranks)


def _styles(
    name: str,
    net: nn.Module,
    plan: Mapping[str, str],
    ranks: int,
    products: Mapping[str, ProductLayer] = MappingProxyType({}),
) -> dict[str, ParallelStyle]:
    """A style for each module that a plan names by path or pattern.

    Args:
        products: how modules that are linear layers of their own making hold their matrix, by path.

    Raises:
        InputError: the plan has what is not carried, or no module of the net.
    """
    styles: dict[str, ParallelStyle] = {}
    for path, module in net.named_modules():
        layout = _layout_of(path, plan)
        if layout in (None, SUMMED, EXPERTS_CUT):
            continue
        where = f"module {name}.{path} on tp={ranks}"
        parts = dict(cut_parts(where, module, layout, _HOOK))
        if any(_is_tied(net, part) for part in parts.values()):
            continue
        if layout not in STYLES and not layout.startswith(FUSED):
            raise InputError(where, f"its layout {layout!r} is not carried", _HOOK)
        if path in products:
            layer, parts_of = products[path], _parts_of(layout)
            styles[path] = ProductRowwise(layer) if layout == "rowwise" else ProductColwise(layer, parts=parts_of)
            continue
        for within, part in parts.items():
            _check_sizes(where, part, layout, ranks)
            fused = layout.startswith(FUSED)
            style = FusedColwiseParallel(parts=_parts_of(layout)) if fused else STYLES[layout]()
            styles[f"{path}.{within}".rstrip(".")] = style
    if not styles:
        raise InputError(f"net {name!r} on tp={ranks}", f"no module of {type(net).__name__} is in its plan", _HOOK)
    return styles


def _mixtures(name: str, net: nn.Module, plan: Mapping[str, str], ranks: int) -> dict[nn.Module, dict[str, str | None]]:
    """The layouts of the own parameters of each module of experts.

    Raises:
        InputError: they cannot be cut.
    """
    mixtures: dict[nn.Module, dict[str, str | None]] = {}
    for path, module in net.named_modules():
        if _layout_of(path, plan) == EXPERTS_CUT:
            mixtures[module] = {key: _layout_of(f"{path}.{key}", plan) for key in own_parameters(module)}
            check_experts(f"module {name}.{path} on tp={ranks}", module, mixtures[module], ranks, _HOOK)
    return mixtures


def _layout_of(path: str, plan: Mapping[str, str]) -> str | None:
    """The layout of a plan for a module; None where it names none."""
    return plan.get(path) or next((plan[key] for key in plan if fnmatch.fnmatchcase(path, key)), None)


def _of_single_heads(net: nn.Module) -> frozenset[nn.Module]:
    """Modules whose gradients are sums over the ranks, by transformers' plan."""
    return frozenset(
        module
        for planned in planned_nets(net, "tp_plan").values()
        for path, module in planned.named_modules()
        if _layout_of(path, planned.tp_plan) == SUMMED
    )


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
        raise InputError(where, f"{type(module).__name__} has no weight to cut", _HOOK)
    size = weight.shape[1 if layout.startswith("rowwise") or isinstance(module, nn.Embedding) else 0]
    pieces = _parts_of(layout) * ranks
    if size % pieces:
        raise InputError(where, f"{size} does not divide by {pieces}", "write another tp")


def _parts_of(layout: str) -> int:
    """How many tensors a layer's output is."""
    return int(layout.removeprefix(FUSED)) if layout.startswith(FUSED) else 1


def _check_unadapted(name: str, net: nn.Module, ranks: int) -> None:
    """Raises InputError where a net whose tokens are to be divided has adapters."""
    for path, module in net.named_modules():
        if is_adapted(module):
            raise InputError(f"module {name}.{path} on tp={ranks}", "adapters take all tokens", WITHOUT)


def _check_heads(name: str, net: nn.Module, ranks: int) -> None:
    """Raises InputError where heads of attention do not divide by the ranks."""
    config: Any = getattr(net, "config", None)
    for key in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, key, None)
        if isinstance(heads, int) and heads % ranks:
            raise InputError(
                f"net {name!r} on tp={ranks}", f"{key} = {heads} does not divide by it", "write another tp"
            )
