"""Measures this machine's own device: operator rates, copies, and on a GPU what its context and cuBLAS take.

Each figure is the best of several rounds: others' work on the machine only slows. Takes some 10 seconds.
Left out: NCCL's buffers (they need two devices), and cuDNN's workspaces, which depend on each convolution.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional as F

from memfit.device.hardware.calibration import Rates, processor

ROUND_SECONDS, ROUNDS = 0.1, 4

PRECISIONS = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def calibrate(device: torch.device) -> Rates:
    """Measures a device of this machine; ``cuda`` is the first card.

    On a GPU, call it in a process that has not used it yet: what the context takes is measured on the way.
    """
    gpu = device.type == "cuda"
    memory = _Outside() if gpu else None
    size = 8192 if gpu else 512
    rates: dict[str, dict[str, float]] = {}
    workspace, low = _first_product(device, memory)
    for precision, dtype in PRECISIONS.items():
        if precision == "tf32" and not (gpu and torch.cuda.get_device_capability()[0] >= 8):
            continue
        with _products_in(precision), torch.no_grad():
            for name, work, call in _calls(device, dtype, size, gpu):
                try:
                    rates.setdefault(name, {})[precision] = work / _seconds(call, device)
                except (RuntimeError, NotImplementedError):  # this device has no such kernel in this precision
                    continue
    outside = memory.bytes() if memory else None
    scalar = torch.ones(1, device=device)
    host, copied = (torch.ones(64 << 20, dtype=torch.uint8) for _ in range(2))
    to_gpu, from_gpu = _copies(device) if gpu else (None, None)
    return Rates(
        device=torch.cuda.get_device_name() if gpu else processor(),
        threads=0 if gpu else torch.get_num_threads(),
        torch=torch.__version__,
        matmul_flops=rates["matmul_flops"],
        convolution_flops=rates["convolution_flops"],
        attention_flops=rates["attention_flops"],
        elementwise_bytes=rates["elementwise_bytes"],
        call_seconds=_seconds(lambda: scalar + scalar, device),
        host_copy_bytes=host.numel() / _seconds(lambda: copied.copy_(host), torch.device("cpu")),
        copy_to_bytes=to_gpu,
        copy_from_bytes=from_gpu,
        context_bytes=outside,
        context_low=low,
        cublas_workspace_bytes=workspace,
    )


def _calls(
    device: torch.device, dtype: torch.dtype, size: int, gpu: bool
) -> Iterator[tuple[str, float, Callable[[], Any]]]:
    """(figure, its work for one call, the call)."""
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    yield "matmul_flops", 2.0 * size**3, lambda: a @ b
    items, side = (32, 64) if gpu else (2, 32)
    x = torch.randn(items, 128, side, side, device=device).to(dtype)
    weight = torch.randn(128, 128, 3, 3, device=device).to(dtype)
    yield "convolution_flops", 2.0 * x.numel() * 128 * 9, lambda: F.conv2d(x, weight, padding=1)
    heads, length = (64, 4096) if gpu else (8, 512)
    q = torch.randn(1, heads, length, 64, device=device).to(dtype)
    yield "attention_flops", 4.0 * heads * length**2 * 64, lambda: F.scaled_dot_product_attention(q, q, q)
    count = 1 << (28 if gpu else 21)
    left, right = (torch.ones(count, device=device, dtype=dtype) for _ in range(2))
    yield "elementwise_bytes", 2.0 * count * dtype.itemsize + count * dtype.itemsize, lambda: torch.add(left, right)


def _seconds(call: Callable[[], Any], device: torch.device) -> float:
    """Seconds of one call: the best of several rounds, each of as many calls as a tenth of a second holds."""
    call()
    _wait(device)
    begin = time.perf_counter()
    call()
    _wait(device)
    best = time.perf_counter() - begin
    count = max(1, min(1000, round(ROUND_SECONDS / max(best, 1e-7))))
    for _ in range(ROUNDS if best < ROUND_SECONDS else 1):
        _wait(device)
        begin = time.perf_counter()
        for _ in range(count):
            call()
        _wait(device)
        best = min(best, (time.perf_counter() - begin) / count)
    return best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


@contextmanager
def _products_in(precision: str) -> Iterator[None]:
    """float32 products in full precision, or through TF32 where that is asked for."""
    before = torch.get_float32_matmul_precision()
    convolutions = torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
        torch.backends.cudnn.allow_tf32 = convolutions


def _copies(device: torch.device) -> tuple[float, float]:
    """Bytes a second to the GPU and from it, out of and into pinned memory."""
    host = torch.empty(256 << 20, dtype=torch.uint8).pin_memory()
    there = torch.empty_like(host, device=device)
    nbytes = host.numel()
    to_gpu = _seconds(lambda: there.copy_(host, non_blocking=True), device)
    return nbytes / to_gpu, nbytes / _seconds(lambda: host.copy_(there, non_blocking=True), device)


class _Outside:
    """Bytes of the first card that were taken since, beyond the allocator's: NVML's count of the whole card, so that
    it is right inside containers too, where no other process uses the card meanwhile."""

    def __init__(self) -> None:
        import pynvml

        pynvml.nvmlInit()
        self._nvml, self._card = pynvml, pynvml.nvmlDeviceGetHandleByIndex(0)
        self._before = self._used()

    def _used(self) -> int:
        return int(self._nvml.nvmlDeviceGetMemoryInfo(self._card).used)

    def bytes(self) -> int:
        torch.cuda.synchronize()
        return self._used() - self._before - torch.cuda.memory_reserved()


def _first_product(device: torch.device, memory: _Outside | None) -> tuple[int | None, int | None]:
    """(what cuBLAS takes out of the allocator with its first product, bytes outside of it then); None on a CPU."""
    if memory is None:
        return None, None
    a = torch.ones(512, 512, device=device)
    before = torch.cuda.memory_allocated()
    product = a @ a
    return torch.cuda.memory_allocated() - before - product.nbytes, memory.bytes()
