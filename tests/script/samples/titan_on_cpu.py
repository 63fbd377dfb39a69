"""torchtitan's own trainer with its debug model on the CPU: python titan_on_cpu.py

Attention is torch's own, since FlexAttention has no backward on the CPU. With WORLD_SIZE and RANK, one rank of FSDP.
With TITAN_FLOAT8=1, torchao's Float8 layers in its emulation, which a CPU runs. With TITAN_COMPILE=1, blocks and loss
are compiled. TITAN_MODEL names another model with a debug model, and TITAN_PARALLELISM has settings of ``parallelism``
as JSON; tokens then go to all experts alike where ranks hold some of the experts. With TITAN_PLAIN=1, nothing is
recomputed.
"""

import importlib
import json
import os
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from memfit.device.virtual.fake_group import is_simulated
from memfit.device.virtual.patching import replaced
from memfit.script.titan.balanced_experts import balance_experts
from memfit.script.titan.config import importable
from memfit.script.titan.other_stages import other_stages
from memfit.script.titan.trainer import stand_in

MONITOR = {
    "set_device": lambda device: None, "current_device": lambda: 0, "device_count": lambda: 1,
    "get_device_name": lambda device: "CPU", "get_device_properties": lambda device: SimpleNamespace(total_memory=1),
    "reset_peak_memory_stats": lambda: None, "empty_cache": lambda: None, "memory_stats": lambda device: {},
}  # fmt: skip
"""What the trainer asks of its card's module for its log."""
COLLECTIVES = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single")
"""Those that layers call, of torch.ops._c10d_functional."""
SECONDS = 0.005
"""In which gloo's threads let go of the tensors of a collective that is done."""
SINGLE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29533"}

for name, value in SINGLE.items():
    os.environ.setdefault(name, value)


class Settled:
    """A collective of which no thread of gloo holds a tensor when it returns."""

    def __init__(self, operator: Any) -> None:
        self._operator = operator

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        out = torch.ops._c10d_functional.wait_tensor(self._operator(*args, **kwargs))
        time.sleep(SECONDS)
        return out

    def __getattr__(self, name: str) -> Any:
        return getattr(self._operator, name)


def settled() -> AbstractContextManager[None]:
    """A context in which layers' collectives are."""
    operators = torch.ops._c10d_functional
    return replaced(operators, **{name: Settled(getattr(operators, name)) for name in COLLECTIVES})


with importable():
    from torchtitan.models.common.attention import ScaledDotProductAttention

    model = os.environ.get("TITAN_MODEL", "llama3")
    registry = importlib.import_module(f"torchtitan.models.{model}.config_registry")
    for name, module in list(sys.modules.items()):
        if name.startswith("torchtitan") and getattr(module, "device_type", None) == "cuda":
            module.device_type, module.device_module = "cpu", SimpleNamespace(**MONITOR)
    config = getattr(registry, f"{model}_debugmodel")()
    if os.environ.get("TITAN_FLOAT8") == "1":
        from torchtitan.components.quantization import Float8LinearConverter
        from torchtitan.models.llama3 import model_registry

        config.model_spec = model_registry("debugmodel", converters=[Float8LinearConverter.Config(emulate=True)])
    for layer in config.model_spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config.training.local_batch_size, config.training.seq_len, config.training.steps = 2, 1024, 3
    config.parallelism.spmd_backend = "full_dtensor"
    settings = json.loads(os.environ.get("TITAN_PARALLELISM", "{}"))
    if os.environ.get("TITAN_PLAIN") == "1":
        config.activation_checkpoint = None
    if settings:
        config.training.local_batch_size, config.training.seq_len = 8, 256
    for name, value in settings.items():
        setattr(config.parallelism, name, value)
    config.compile.enable = os.environ.get("TITAN_COMPILE") == "1"
    config.debug.moe_force_load_balance = config.parallelism.expert_parallel_degree > 1
    stand_in(config)
    balance_experts()
    with other_stages(config) as follow:
        trainer = config.build()
        follow(trainer)
        for part in trainer.model_parts:
            for module in part.modules():
                if isinstance(module, FSDPModule):
                    module.set_force_sum_reduction_for_comms(True)  # gloo has no sum that scales
        with nullcontext() if is_simulated() else settled():
            trainer.train()
        trainer.close()
