"""DeepSpeed's ZeRO optimizers, as memfit makes them: quietly, on the process group at hand, summing over ranks."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from memfit.device.patching import replaced
from memfit.errors import InputError

MOST_ELEMENTS = 500_000_000
"""DeepSpeed's own reduce_bucket_size and allgather_bucket_size."""

_SHARED_MEMORY = "deepspeed_shm_comm"
"""DeepSpeed's own all-reduce on a CPU, which it would compile here; collectives are torch.distributed's."""
_MUON = "deepspeed.runtime.zero.muon.muon_optimizer"
"""Imported by the first reduction of any gradient; its kernels, which nothing here uses, would load a compiler."""


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


def ready(device: torch.device) -> None:
    """DeepSpeed imported with all that it imports later, silent but for errors, and joined to the process group.

    Raises:
        InputError: it is not installed.
    """
    if importlib.util.find_spec("deepspeed") is None:
        raise InputError(
            "--engine zero1, zero2 or zero3",
            "DeepSpeed is not installed",
            "pip install memfit[deepspeed], or write fsdp2",
        )
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    import deepspeed.comm
    import deepspeed.ops
    from deepspeed.utils import logger

    logger.setLevel(logging.ERROR)
    deepspeed.ops.__compatible_ops__[_SHARED_MEMORY] = False
    with replaced(torch, compile=lambda function=None, **how: function or (lambda decorated: decorated)):
        importlib.import_module(_MUON)
    if deepspeed.comm.comm.cdb is None:
        deepspeed.comm.init_distributed(
            dist_backend=dist.get_backend(), auto_mpi_discovery=False, verbose=False, dist_init_required=False
        )


@contextmanager
def quiet() -> Iterator[None]:
    """Without what torch remarks of DeepSpeed's calls."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*is deprecated", category=FutureWarning)
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
