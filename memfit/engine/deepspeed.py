"""DeepSpeed's ZeRO optimizers, as memfit makes them: quietly, on the process group at hand, summing over ranks."""

from __future__ import annotations

import importlib
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from memfit.device.virtual.patching import replaced
from memfit.device.virtual.redirect import SaysCuda
from memfit.errors import InputError, install_extra, is_installed

MOST_ELEMENTS = 500_000_000
"""DeepSpeed's own reduce_bucket_size and allgather_bucket_size."""

_SHARED_MEMORY = "deepspeed_shm_comm"
"""DeepSpeed's own all-reduce on a CPU, which it would compile here; collectives are torch.distributed's."""
_LATER = (
    "deepspeed.runtime.zero.stage_1_and_2",
    "deepspeed.runtime.zero.stage3",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "deepspeed.compile.z3_eager_fallback",
)
"""Imported in the middle of a window otherwise. Muon's kernels, which nothing here uses, would load a compiler."""


@dataclass(frozen=True, kw_only=True)
class Choices:
    """What DeepSpeed lets one choose; sizes are in elements. None: DeepSpeed's own, or all there is where that is less.

    Attributes:
        reduce_bucket_size: gradients are reduced in parts of so many; a buffer of that size stands through a backward.
        allgather_bucket_size: stepped weights are gathered in parts of so many.
        overlap_comm: gradients are reduced beside the backward, which takes a second such buffer.
        offload_optimizer: the optimizer's state, its copy of the weights and its step are on the host.
        offload_param: weights lie on the host while they are not gathered (stage 3).
        prefetch_bucket_size: parameters gathered before their module is reached (stage 3).
        param_persistence_threshold: smaller parameters stay gathered (stage 3).
        max_live_parameters: parameters that are not released before they are used again (stage 3).
    """

    reduce_bucket_size: int | None = None
    allgather_bucket_size: int | None = None
    overlap_comm: bool = False
    offload_optimizer: bool = False
    offload_param: bool = False
    prefetch_bucket_size: int = 50_000_000
    param_persistence_threshold: int = 100_000
    max_live_parameters: int = 1_000_000_000


def load() -> None:
    """Imports DeepSpeed with all that it imports later, silent but for errors.

    Raises:
        InputError: it is not installed.
    """
    if not is_installed("deepspeed"):
        write = f"run {install_extra('deepspeed')}, or write --engine fsdp2"
        raise InputError("--engine zero1, zero2 or zero3", "DeepSpeed is not installed", write)
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    if "deepspeed" not in sys.modules:
        with replaced(os, environ={**os.environ, "DS_ACCELERATOR": "cpu"}):
            importlib.import_module("deepspeed")
    from deepspeed import ops
    from deepspeed.utils import logger

    logger.setLevel(logging.ERROR)
    ops.__compatible_ops__ = {_SHARED_MEMORY: False}  # looked for, it would be filled by runs of a compiler
    with replaced(torch, compile=lambda function=None, **how: function or (lambda decorated: decorated)):
        for module in _LATER:
            importlib.import_module(module)


def ready(device: torch.device) -> None:
    """DeepSpeed imported, on this kind of device, and joined to the default process group."""
    load()
    import deepspeed.comm
    from deepspeed.accelerator import get_accelerator, set_accelerator

    warnings.filterwarnings("ignore", message=".*all_gather_into_tensor. is deprecated", category=FutureWarning)
    warnings.filterwarnings("ignore", message=".*reduce_scatter_tensor. is deprecated", category=FutureWarning)
    if device.type in ("cpu", "cuda") and get_accelerator().device_name() != device.type:
        set_accelerator(_accelerator(device.type))
    if deepspeed.comm.comm.cdb is None:
        deepspeed.comm.init_distributed(
            dist_backend=dist.get_backend(), auto_mpi_discovery=False, verbose=False, dist_init_required=False
        )


def _accelerator(kind: str) -> Any:
    """DeepSpeed's interface to a kind of device."""
    name = "CPU_Accelerator" if kind == "cpu" else "CUDA_Accelerator"
    return getattr(importlib.import_module(f"deepspeed.accelerator.{kind}_accelerator"), name)()


@contextmanager
def traced(device: torch.device) -> Iterator[None]:
    """Inside, DeepSpeed runs on fake tensors and a fake process group, whose ranks are all taken to be like this one.

    Args:
        device: the CPU, or what stands for a card.
    """
    load()
    from deepspeed.accelerator import real_accelerator
    from deepspeed.runtime.zero import partitioned_param_coordinator as coordinator

    accelerator = _accelerator("cpu" if device.type == "cpu" else "cuda")
    with ExitStack() as stack:
        stack.enter_context(replaced(real_accelerator, ds_accelerator=accelerator))
        answers: dict[str, Callable[..., Any]] = {
            "available_memory": lambda index=None: 1 << 60,
            "current_device_name": lambda: str(device),
            "device_name": lambda index=None: str(device),
        }
        stack.enter_context(replaced(accelerator, **answers))
        if device.type != "cpu":
            stack.enter_context(_backwards_on_what_stands_for_cuda())
        stack.enter_context(replaced(coordinator, assert_ints_same_as_other_ranks=lambda numbers: None))
        stack.enter_context(replaced(torch.nn.functional, linear=torch.nn.functional.linear))
        stack.enter_context(replaced(os, environ={**os.environ, "LOCAL_RANK": "0"}))
        yield


@contextmanager
def _backwards_on_what_stands_for_cuda() -> Iterator[None]:
    """What autograd's own thread calls of DeepSpeed says cuda too, and that thread does not know what it means."""
    from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    def redirected(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with SaysCuda():
                return method(*args, **kwargs)

        return call

    called = {
        DeepSpeedZeRoOffload: ("pre_sub_module_backward_function", "post_sub_module_backward_function"),
        DeepSpeedZeroOptimizer_Stage3: ("reduce_ready_partitions_and_remove_grads",),
        DeepSpeedZeroOptimizer: ("process_gradients",),
    }
    with ExitStack() as stack:
        for owner, names in called.items():
            stack.enter_context(replaced(owner, **{name: redirected(vars(owner)[name]) for name in names}))
        yield


def partitioned(
    optimizer: Optimizer,
    names: Mapping[nn.Parameter, str],
    group: dist.ProcessGroup,
    choices: Choices,
    *,
    gradients: bool,
) -> Any:
    """DeepSpeed's optimizer of stage 1 or 2 around this one, whose groups then hold this rank's flat part.

    Args:
        names: of the parameters.
        gradients: whether they are partitioned too (stage 2).
    """
    from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadOptimizerConfig
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
    from deepspeed.utils.timer import NoopTimer

    most = _most(names)
    offload = DeepSpeedZeroOffloadOptimizerConfig(device="cpu") if choices.offload_optimizer else None
    return DeepSpeedZeroOptimizer(
        optimizer,
        dict(names),
        timers=NoopTimer(),
        optimizer_params=None,
        dp_process_group=group,
        reduce_bucket_size=choices.reduce_bucket_size or most,
        allgather_bucket_size=choices.allgather_bucket_size or most,
        overlap_comm=choices.overlap_comm,
        offload_optimizer_config=offload,
        clip_grad=0.0,
        communication_data_type=torch.float32,
        gradient_average=False,
        partition_grads=gradients,
        check_grad_overflow=False,
        compute_grad_norm=offload is not None,
    )


def sharded(
    optimizer: Optimizer,
    nets: nn.ModuleDict,
    names: Mapping[nn.Parameter, str],
    group: dist.ProcessGroup,
    choices: Choices,
) -> Any:
    """DeepSpeed's optimizer of stage 3 around this one; the nets' parameters become parts, gathered around their use.

    Gradients come out as means over ranks.

    Args:
        names: of the parameters that the optimizer steps.
    """
    from deepspeed.runtime.zero.offload_config import (
        DeepSpeedZeroOffloadOptimizerConfig,
        DeepSpeedZeroOffloadParamConfig,
    )
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
    from deepspeed.utils.timer import NoopTimer

    return DeepSpeedZeroOptimizer_Stage3(
        nets,
        optimizer,
        dict(names),
        timers=NoopTimer(),
        ds_config=None,
        dp_process_group=group,
        reduce_bucket_size=choices.reduce_bucket_size or _most(names),
        prefetch_bucket_size=choices.prefetch_bucket_size,
        max_live_parameters=choices.max_live_parameters,
        param_persistence_threshold=choices.param_persistence_threshold,
        overlap_comm=choices.overlap_comm,
        offload_optimizer_config=DeepSpeedZeroOffloadOptimizerConfig(device="cpu")
        if choices.offload_optimizer
        else None,
        offload_param_config=DeepSpeedZeroOffloadParamConfig(device="cpu") if choices.offload_param else None,
        offload_ratio=1.0,
        clip_grad=0.0,
        communication_data_type=torch.float32,
    )


def _most(names: Mapping[nn.Parameter, str]) -> int:
    """DeepSpeed's own bucket, or one that holds all parameters, which is as good."""
    elements = sum(p.numel() for p in names)
    return min(MOST_ELEMENTS, elements + elements % 2)
