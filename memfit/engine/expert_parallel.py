"""Expert parallelism: the experts of mixtures divided over the ranks of a mesh's dimension, whole ones on each.

transformers divides them, by the plan that it has for a net (``ep_plan``), and carries tokens to them in two ways:

- ``ep``, its implementation ``all_reduce``: the ranks see the same samples, each runs its own experts on the tokens
  that chose them, and the outputs are summed over the ranks, as are gradients of what the experts are given. Tensors
  have sizes that do not follow from what a router chooses. What is not an expert is whole on every rank, and becomes a
  replicated DTensor. With ``tp``, layers and experts are cut first; a rank has a part of some experts.
- ``dp_shard_in_ep``, its implementation ``all_to_all``, as torchtitan does: each rank has samples of its own, sends
  each token to the ranks of its experts and gets their outputs back. What is not an expert is sharded over the ranks.
  How many tokens a rank gets follows from the router; on simulated ranks it gets as many as it sends. With ``tp``,
  the ranks that hold the same parts send each other the tokens. With ``cp``, the ranks of both divide the experts,
  together, as torchtitan's do: its ``expert_parallel_degree`` is taken from ``dp_shard`` and ``cp``.

Source: ``transformers.distributed.expert_parallel``.
"""

from __future__ import annotations

import fnmatch
import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from memfit.device.virtual.patching import replaced
from memfit.engine.adapters import planned_nets
from memfit.engine.local_parameters import replicate_parameters
from memfit.errors import InputError
from memfit.job import Nets
from memfit.torch_compat import FakeTensor
from memfit.torch_compat.attributes import own_parameters
from memfit.torch_compat.distributed import OWN_VALUES

EXPERTS = "ep"
"""The dimension of a mesh of ranks that hold some of the experts and see the same samples."""
DIVIDED, CALLED = "grouped_gemm", "ep_dispatch_experts"
"""transformers' layouts: of a parameter whose first dimension is the experts, and of the module that holds them."""


def divide_experts(nets: Nets, mesh: DeviceMesh, cut: DeviceMesh | None = None) -> None:
    """Divides the experts of nets in place over a mesh of one dimension; every rank has the same values before.

    Args:
        nets: those that are trained, or averages of them.
        cut: of two dimensions: this one, and the one over which layers and experts are cut already; None: nothing is
            cut.

    Raises:
        InputError: no net has experts, or those of a net cannot be divided; names the module.
    """
    where = f"{EXPERTS}={mesh.size()}"
    plans = plans_of(nets, mesh.size())
    for name, net in nets.items():
        if name in plans:
            with _over_both(net, plans[name], mesh, cut):
                _library(where).apply_expert_parallelism(net, mesh, mesh, plans[name], ep_implementation="all_reduce")
        replicate_parameters(net, mesh)


@contextmanager
def _over_both(net: nn.Module, plan: Mapping[str, str], mesh: DeviceMesh, cut: DeviceMesh | None) -> Iterator[None]:
    """Inside, modules of experts that are cut have their local parts, which are to be divided over ``mesh``; after it,
    parameters of which a rank has a part of some are tensors over both dimensions of ``cut``."""
    placements: dict[str, Any] = {}
    for path in (path for path, layout in plan.items() if layout == DIVIDED):
        module, key, parameter = _parameter_at(net, path)
        if isinstance(parameter, DTensor):
            (placements[path],) = parameter.placements
            own_parameters(module)[key] = nn.Parameter(parameter.to_local().detach(), parameter.requires_grad)
    yield
    for path, placement in placements.items():
        module, key, parameter = _parameter_at(net, path)
        assert isinstance(parameter, DTensor)
        assert cut is not None
        divided_first = (cut.mesh_dim_names or ())[0] == (mesh.mesh_dim_names or ())[0]
        both = (*parameter.placements, placement) if divided_first else (placement, *parameter.placements)
        local = DTensor.from_local(parameter.to_local().detach(), cut, both, run_check=False)
        own_parameters(module)[key] = nn.Parameter(local, parameter.requires_grad)


def _parameter_at(net: nn.Module, path: str) -> tuple[nn.Module, str, nn.Parameter]:
    inside, _, key = path.rpartition(".")
    module = net.get_submodule(inside)
    parameter = own_parameters(module)[key]
    assert parameter is not None
    return module, key, parameter


def exchange_tokens(nets: Nets, mesh: DeviceMesh, where: str, cut: DeviceMesh | None = None) -> None:
    """Divides the experts of nets in place over a mesh of one dimension, whose ranks send each other tokens; every rank
    has the same values before. All other parameters stay as they are.

    Args:
        nets: those that are trained, or averages of them.
        where: the dimensions of these ranks in messages, ``dp_shard_in_ep=2,cp=2``.
        cut: as of ``divide_experts``.

    Raises:
        InputError: no net has experts, or those of a net cannot be divided; names the module.
    """
    plans = plans_of(nets, mesh.size(), where)
    library = _library(where)
    kinds = library.EPImplementationInterface
    fake = dist.get_backend(mesh.get_group()) == "fake"
    for plan, net in ((plan, nets[name]) for name, plan in plans.items()):
        if fake:
            kinds.register(_BALANCED, _balanced(kinds()["all_to_all"]))
        way = _BALANCED if fake else "all_to_all"
        with _over_both(net, plan, mesh, cut):
            library.apply_expert_parallelism(net, mesh, _OneRank(mesh), plan, ep_implementation=way)
        for module in experts_of(net).values():
            setattr(module, _SENDS, True)


def experts_of(net: nn.Module) -> dict[str, nn.Module]:
    """Modules of a net whose parameters are experts that transformers has a plan to divide, by path."""
    paths = [path for path, layout in _expanded(net).items() if layout == CALLED]
    return {path: net.get_submodule(path) for path in paths}


def sending_experts(net: nn.Module) -> list[nn.Module]:
    """Modules of experts in a net, or in a stage of one, whose ranks send each other tokens."""
    return [module for module in net.modules() if _SENDS in vars(module)]


class _OneRank:
    """What transformers asks of the mesh of ranks that have the same samples: there is this one alone."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh

    def size(self) -> int:
        return 1

    def get_group(self) -> dist.ProcessGroup:
        """Of the mesh over which experts are divided: transformers compares it with that one alone."""
        return self._mesh.get_group()


_BALANCED = "memfit_balanced"
_SENDS = "memfit_sends_tokens"
"""The attribute of a module of experts that ``exchange_tokens`` has divided."""


def _balanced(all_to_all: Any) -> Any:
    """transformers' implementation ``all_to_all`` on tensors without data, whose counts of tokens are unknown: a rank
    sends as many to each rank, and gets as many back."""

    class Balanced(all_to_all):
        def _dispatch_tokens(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Any:
            ranks = self.ep_mesh.size()
            least, more = divmod(top_k_index.numel(), ranks)
            counts = [least + (rank < more) for rank in range(ranks)]
            with replaced(FakeTensor, tolist=lambda tensor: [counts, list(counts)]):
                return super()._dispatch_tokens(hidden_states, top_k_index, top_k_weights)

    return Balanced


def has_experts(nets: Nets) -> bool:
    """Whether a net has experts that transformers has a plan to divide."""
    return any(_expanded(net) for net in nets.values())


def plans_of(nets: Nets, ranks: int, where: str = "") -> Mapping[str, Mapping[str, str]]:
    """transformers' layout of each module and parameter of each net that has experts.

    Args:
        where: the dimensions of the mesh over which they are divided, for messages; empty: ``ep``.

    Raises:
        InputError: no net has experts, or those of a net cannot be divided; names the module.
    """
    plans = {name: plan for name, net in nets.items() if (plan := _expanded(net))}
    where = where or f"{EXPERTS}={ranks}"
    if not plans:
        kinds = ", ".join(f"{name!r} ({type(net).__name__})" for name, net in nets.items())
        why = "no net has a mixture of experts with an expert-parallel plan of transformers"
        raise InputError(f"net{'s' * (len(nets) > 1)} {kinds} on {where}", why, _without(where))
    for name, plan in plans.items():
        for path, layout in plan.items():
            if layout not in (DIVIDED, CALLED):
                why = f"its layout {layout!r} is not carried"
                raise InputError(f"module {name}.{path} on {where}", why, _without(where))
            if layout == CALLED:
                _check_module(f"{name}.{path}", where, nets[name].get_submodule(path), plan, path, ranks)
    return plans


def _expanded(net: nn.Module) -> dict[str, str]:
    """transformers' plan with paths of modules and parameters for its patterns. Parameters stand first: modules count
    them."""
    layouts: dict[str, str] = {}
    for inside, planned in planned_nets(net, "ep_plan").items():
        plan: Mapping[str, str] = planned.ep_plan
        paths = [path for path, _ in (*planned.named_parameters(), *planned.named_modules())]
        layouts |= {
            f"{inside}.{path}".lstrip("."): layout
            for key, layout in plan.items()
            for path in paths
            if fnmatch.fnmatchcase(path, key)
        }
    return dict(sorted(layouts.items(), key=lambda item: item[1] == CALLED))


def _check_module(name: str, where: str, module: nn.Module, plan: Mapping[str, str], path: str, ranks: int) -> None:
    """Raises InputError where a parameter of a module of experts is not divided, or the experts do not divide."""
    seen = f"module {name} on {where}"
    for key, parameter in own_parameters(module).items():
        if parameter is None:
            continue
        if plan.get(f"{path}.{key}") != DIVIDED:
            raise InputError(seen, f"transformers' plan does not divide its {key}", _without(where))
        if len(parameter) % ranks:
            why = f"its {len(parameter)} experts do not divide by {ranks}"
            raise InputError(seen, why, f"write another {where.partition('=')[0]}")


def _without(where: str) -> str:
    return f"leave {where.partition('=')[0]} out of the mesh"


def _library(where: str) -> Any:
    """transformers' module that divides experts.

    Raises:
        InputError: the installed version has none, or needs a later torch.
    """
    try:
        library = importlib.import_module("transformers.distributed.expert_parallel")
    except ImportError as error:
        why = "the installed transformers has no transformers.distributed.expert_parallel"
        raise InputError(f"--mesh {where}", why, "install transformers 5.23 or newer") from error
    if not OWN_VALUES:
        raise InputError(f"--mesh {where}", "transformers divides experts with torch 2.7 or newer", _without(where))
    return library
