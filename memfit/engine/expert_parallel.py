"""Expert parallelism: the experts of mixtures divided over the ``ep`` ranks of a mesh, whole ones on each.

transformers divides them, by the plan that it has for a net (``ep_plan``), and carries tokens to them by its
implementation ``all_reduce``: the ranks see the same samples, each runs its own experts on the tokens that chose them,
and the outputs are summed over the ranks, as are gradients of what the experts are given. Of its implementations this
is the one whose tensors have sizes that do not follow from what a router chooses, so that a trace knows them. What is
not an expert is whole on every rank, and becomes a replicated DTensor.

Source: ``transformers.distributed.expert_parallel``.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from memfit.engine.local_parameters import replicate_parameters
from memfit.errors import InputError
from memfit.job import Nets
from memfit.torch_compat.attributes import own_parameters
from memfit.torch_compat.distributed import OWN_VALUES

EXPERTS = "ep"
"""The dimension of a mesh of ranks that hold some of the experts."""
DIVIDED, CALLED = "grouped_gemm", "ep_dispatch_experts"
"""transformers' layouts: of a parameter whose first dimension is the experts, and of the module that holds them."""
_ALONE = "leave ep out of the mesh"


def divide_experts(nets: Nets, mesh: DeviceMesh) -> None:
    """Divides the experts of nets in place over a mesh of one dimension; every rank has the same values before.

    Args:
        nets: those that are trained, or averages of them.

    Raises:
        InputError: no net has experts, or those of a net cannot be divided; names the module.
    """
    plans = plans_of(nets, mesh.size())
    for name, net in nets.items():
        if name in plans:
            _library(mesh.size())(net, mesh, mesh, plans[name], ep_implementation="all_reduce")
        replicate_parameters(net, mesh)


def has_experts(nets: Nets) -> bool:
    """Whether a net has experts that transformers has a plan to divide."""
    return any(_expanded(net) for net in nets.values())


def plans_of(nets: Nets, ranks: int) -> Mapping[str, Mapping[str, str]]:
    """transformers' layout of each module and parameter of each net that has experts.

    Raises:
        InputError: no net has experts, or those of a net cannot be divided; names the module.
    """
    plans = {name: plan for name, net in nets.items() if (plan := _expanded(net))}
    if not plans:
        kinds = ", ".join(f"{name!r} ({type(net).__name__})" for name, net in nets.items())
        why = "no net has a mixture of experts with an expert-parallel plan of transformers"
        raise InputError(f"net {kinds} on ep={ranks}", why, _ALONE)
    for name, plan in plans.items():
        for path, layout in plan.items():
            if layout not in (DIVIDED, CALLED):
                raise InputError(f"module {name}.{path} on ep={ranks}", f"its layout {layout!r} is not carried", _ALONE)
            if layout == CALLED:
                _check_module(f"module {name}.{path} on ep={ranks}", nets[name].get_submodule(path), plan, path, ranks)
    return plans


def _expanded(net: nn.Module) -> dict[str, str]:
    """transformers' plan with paths of modules and parameters for its patterns. Parameters stand first: modules count
    them."""
    plan: Any = getattr(net, "ep_plan", None)
    paths = [path for path, _ in net.named_parameters()] + [path for path, _ in net.named_modules()]
    layouts = {path: layout for key, layout in (plan or {}).items() for path in paths if fnmatch.fnmatchcase(path, key)}
    return dict(sorted(layouts.items(), key=lambda item: item[1] == CALLED))


def _check_module(seen: str, module: nn.Module, plan: Mapping[str, str], path: str, ranks: int) -> None:
    """Raises InputError where a parameter of a module of experts is not divided, or the experts do not divide."""
    for key, parameter in own_parameters(module).items():
        if parameter is None:
            continue
        if plan.get(f"{path}.{key}") != DIVIDED:
            raise InputError(seen, f"transformers' plan does not divide its {key}", _ALONE)
        if len(parameter) % ranks:
            raise InputError(seen, f"its {len(parameter)} experts do not divide by {ranks}", "write another ep")


def _library(ranks: int) -> Any:
    """transformers' function that divides experts.

    Raises:
        InputError: the installed version has none, or needs a later torch.
    """
    try:
        from transformers.distributed.expert_parallel import apply_expert_parallelism
    except ImportError as error:
        why = "the installed transformers has no transformers.distributed.expert_parallel"
        raise InputError(f"--mesh ep={ranks}", why, "install transformers 5.23 or newer") from error
    if not OWN_VALUES:
        raise InputError(f"--mesh ep={ranks}", "transformers divides experts with torch 2.7 or newer", _ALONE)
    return apply_expert_parallelism
