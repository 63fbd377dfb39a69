"""What a process holds on a card outside PyTorch's allocator, stage by stage: context, libraries, a communicator.

python -m bench.accuracy_parts.gpu_overheads    (bench/measure_gpu.py starts it in a fresh process); a line of JSON
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

Outside = Callable[[], int]
"""Bytes in use on the card that no segment of the allocator holds."""


def stages(device: torch.device) -> dict[str, Callable[[], None]]:
    """What a run loads, in the order in which it loads it; each stage keeps what the earlier ones loaded."""

    def context() -> None:
        torch.zeros(1, device=device)

    def products(dtype: torch.dtype) -> None:
        left = torch.randn(256, 256, device=device, dtype=dtype, requires_grad=True)
        (left @ left).sum().backward()  # type: ignore[no-untyped-call]

    def convolutions(dtype: torch.dtype) -> None:
        net = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()).to(device, dtype)
        net(torch.randn(2, 3, 64, 64, device=device, dtype=dtype)).sum().backward()

    def attention(dtype: torch.dtype) -> None:
        query = torch.randn(2, 4, 128, 64, device=device, dtype=dtype, requires_grad=True)
        nn.functional.scaled_dot_product_attention(query, query, query).sum().backward()

    def optimizer() -> None:
        parameter = nn.Parameter(torch.randn(256, 256, device=device))
        parameter.grad = torch.randn_like(parameter)
        torch.optim.AdamW([parameter]).step()

    loads: dict[str, Callable[[], None]] = {"context": context}
    for name, dtype in (("fp32", torch.float32), ("fp16", torch.float16), ("bf16", torch.bfloat16)):
        loads[f"products {name}"] = lambda dtype=dtype: products(dtype)  # type: ignore[misc]
        loads[f"convolutions {name}"] = lambda dtype=dtype: convolutions(dtype)  # type: ignore[misc]
        loads[f"attention {name}"] = lambda dtype=dtype: attention(dtype)  # type: ignore[misc]
    return loads | {"optimizer": optimizer}


def communicator(device: torch.device) -> None:
    """NCCL's first communicator, of one rank, after its first barrier."""
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29551")
    torch.distributed.init_process_group("nccl", rank=0, world_size=1, device_id=device)
    torch.distributed.barrier()


def measure(loaded: Mapping[str, Callable[[], None]], outside: Outside) -> dict[str, int | str]:
    """Bytes that each stage adds, in order; of a stage that fails, why."""
    answer: dict[str, int | str] = {}
    before = outside()
    for name, load in loaded.items():
        try:
            load()
        except (RuntimeError, ImportError) as error:  # a card without bf16, a build without NCCL
            answer[name] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            continue
        after = outside()
        answer[name] = after - before
        before = after
    return answer


def main() -> None:
    """Measures the first card, which nothing else uses meanwhile, by NVML."""
    import pynvml

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    device = torch.device("cuda", 0)

    def outside() -> int:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        used = int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)
        return used - (torch.cuda.memory_reserved() if torch.cuda.is_initialized() else 0)

    answer: dict[str, Any] = dict(measure({**stages(device), "nccl": lambda: communicator(device)}, outside))
    print(json.dumps({"torch": torch.__version__, "cuda": torch.version.cuda, "added_bytes": answer}))


if __name__ == "__main__":
    main()
