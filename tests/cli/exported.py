"""What DeepSpeed, Accelerate and torchrun start in tests/cli/test_export.py: prints what each rank was given."""

import json
import os
import sys

import torch.distributed as dist

how = next(word for word in sys.argv if word in ("deepspeed", "accelerate", "torchrun"))
given = {key: int(os.environ[key]) for key in ("RANK", "WORLD_SIZE")}
if how == "deepspeed":
    import deepspeed
    import deepspeed.ops
    from deepspeed.runtime.config import DeepSpeedConfig

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # or it would be compiled here
    deepspeed.init_distributed("gloo")
    config = DeepSpeedConfig(sys.argv[sys.argv.index("--deepspeed_config") + 1])
    given |= {
        "train_batch_size": config.train_batch_size,
        "micro_batch": config.train_micro_batch_size_per_gpu,
        "accumulation": config.gradient_accumulation_steps,
        "stage": config.zero_optimization_stage,
        "clip": config.gradient_clipping,
    }
elif how == "accelerate":
    from accelerate import Accelerator

    accelerator = Accelerator()
    given |= {
        "processes": accelerator.num_processes,
        "kind": accelerator.distributed_type.value,
        "precision": accelerator.mixed_precision,
        "stage": os.environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE"),
        "accumulation": os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS"),
        "fsdp": os.environ.get("FSDP_VERSION"),
        "gathered": os.environ.get("FSDP_TRANSFORMER_CLS_TO_WRAP"),
    }
else:
    dist.init_process_group("gloo")
    given |= {"mine": json.loads(os.environ["MEMFIT_MICRO_BATCHES"])[given["RANK"]], "world": dist.get_world_size()}
os.write(1, (f"GIVEN {json.dumps(given)}\n").encode())
if dist.is_initialized():
    dist.barrier()
    dist.destroy_process_group()
