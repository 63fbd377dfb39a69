"""What is measured beside the training: memory, utilisation, gradient noise, losses that leap.

Gradient noise scale: McCandlish et al. 2018, "An Empirical Model of Large-Batch Training" (arXiv 1812.06162), appendix
A.1: from the squared norm of the gradient of a small batch (the window's first micro-batch) and of the whole window,

    |G|^2 ~ (B |g_B|^2 - b |g_b|^2) / (B - b)        S ~ (|g_b|^2 - |g_B|^2) / (1/b - 1/B)        noise = S / |G|^2

each averaged over windows before they are divided. A global batch far below it learns as much from each sample as a
smaller one; far above it, samples are wasted. Left out: jobs of several turns, several ranks, and windows of one
micro-batch. Where valid units are known only after the forward, padded ones stand in for the share of a micro-batch.
"""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from memfit.apply.losses import MicroBatch
from memfit.apply.train_state import TrainState
from memfit.train.launch.memory_limit import ProcessMemory, resident_bytes
from memfit.train.recovery.memory_growth import MemoryGrowth

PROCESS_EVERY, DEVICE_EVERY = 0.1, 1.0
"""Seconds between two readings at most."""
DECAY, NOISE_AFTER = 0.9, 5
SPIKE_AFTER, SPIKE = 10, 6.0
"""A loss is a spike when it is so many standard deviations above the mean of the last 50 windows."""


class Monitor:
    """One for a run; ``begin`` and ``end`` around each window."""

    def __init__(self, train_state: TrainState, memory: ProcessMemory) -> None:
        self._state, self._memory = train_state, memory
        self._alone = len(train_state.job.turns(list(train_state.optimizers))) == 1 and train_state.engine.world == 1
        self._losses: deque[float] = deque(maxlen=50)
        self._noise, self._signal, self._windows = 0.0, 0.0, 0
        self._parts: Sequence[MicroBatch] = ()
        self._fetched = 0
        self._small: Tensor | None = None
        self._readings: dict[str, Any] = {}
        self._process_at, self._device_at = -math.inf, -math.inf
        self._device: dict[str, float | None] = {"gpu_utilisation": None}
        self._nvml = _nvml_handle(train_state.device)
        self._clock = (time.perf_counter(), time.process_time())
        self.growth = MemoryGrowth()
        """What is held when windows begin."""

    def begin(self, parts: Sequence[MicroBatch], window: int = 0) -> bool:
        """A window of these micro-batches begins; gives whether it was read what is held now."""
        self._parts, self._fetched, self._small = parts, 0, None
        reads = self.growth.wants(window)
        if reads:
            self.growth.note(window, self._held())
        return reads

    def fetches(self) -> None:
        """A micro-batch begins; before the second one, the first one's gradient lies there."""
        if self._alone and len(self._parts) > 1:
            self._fetched += 1
            if self._fetched == 2:
                gradients = [
                    p.grad for p in self._state.parameters_of(tuple(self._state.optimizers)) if p.grad is not None
                ]
                self._small = torch.nn.utils.get_total_norm(gradients)

    def end(self, norms: Mapping[str, Tensor | None], retries: int) -> dict[str, Any]:
        """The newest readings; a dict that stays as it is.

        Args:
            norms: of the gradients of each turn; None where they were not computed.
        """
        if self._small is not None and not retries:
            (norm,) = norms.values()
            if norm is not None:
                self._learn_noise(float(self._small), float(norm))
        now = time.perf_counter()
        if self._nvml is not None and now - self._device_at > DEVICE_EVERY:
            self._device, self._device_at = {"gpu_utilisation": _gpu_utilisation(self._nvml)}, now
        if now - self._process_at > PROCESS_EVERY:
            self._readings = {**self._read_memory(), **self._read_cpu(now), **self._device}
            self._process_at = now
        return self._readings

    @property
    def noise_scale(self) -> float | None:
        """In units of the global batch; None where it is not known yet."""
        if self._windows < NOISE_AFTER or self._signal <= 0 or self._noise <= 0:
            return None
        return self._noise / self._signal

    def _learn_noise(self, small: float, big: float) -> None:
        scale = self._state.scaler.get_scale() if self._state.scaler is not None else 1.0
        units = [m.units if isinstance(m.units, int) and m.units else m.padded_units for m in self._parts]
        b, all_units = units[0], sum(units)
        if b >= all_units or not math.isfinite(big):
            return
        g_b, g_whole = (small / scale * all_units / b) ** 2, big**2
        signal, noise = (all_units * g_whole - b * g_b) / (all_units - b), (g_b - g_whole) / (1 / b - 1 / all_units)
        weight = DECAY if self._windows else 0.0
        self._signal = weight * self._signal + (1 - weight) * signal
        self._noise = weight * self._noise + (1 - weight) * noise
        self._windows += 1

    def alarm(self, loss: float | None) -> str | None:
        """What is to be looked at in a window of this loss; called once for each window, in their order."""
        if loss is None:
            return "no valid unit"
        if not math.isfinite(loss):
            return "not finite"
        spike = len(self._losses) >= SPIKE_AFTER and self._is_spike(loss)
        self._losses.append(loss)
        return "spike" if spike else None

    def _is_spike(self, loss: float) -> bool:
        seen = self._losses
        mean = sum(seen) / len(seen)
        if loss <= mean + SPIKE * 1e-3 * abs(mean):
            return False
        return loss > mean + SPIKE * math.dist(seen, [mean] * len(seen)) / math.sqrt(len(seen))

    def _read_cpu(self, now: float) -> dict[str, Any]:
        wall, cpu = now - self._clock[0], time.process_time() - self._clock[1]
        self._clock = (now, self._clock[1] + cpu)
        return {"cpu_utilisation": cpu / wall / len(os.sched_getaffinity(0))}

    def _held(self) -> int:
        """Bytes of the tensors on a card; of a CPU's process, over what it held before the job."""
        if self._state.device.type == "cuda":
            return torch.cuda.memory_allocated(self._state.device)
        return resident_bytes() - self._memory.resident_before

    def _read_memory(self) -> dict[str, Any]:
        """The peak since the last reading: of the card's process, or of this one."""
        device = self._state.device
        if device.type != "cuda":
            measured = self._memory.peak()
            self._memory.reset_peak()
            return {"measured_process_bytes": measured, "allocated_bytes": None, "reserved_bytes": None}
        free, total = torch.cuda.mem_get_info(device)
        reserved = torch.cuda.max_memory_reserved(device)
        context = total - free - torch.cuda.memory_reserved(device)
        allocated = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return {
            "measured_process_bytes": reserved + context,
            "allocated_bytes": allocated,
            "reserved_bytes": reserved,
        }


def _nvml_handle(device: torch.device) -> Any:
    if device.type != "cuda":
        return None
    import pynvml

    try:
        pynvml.nvmlInit()
        return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    except pynvml.NVMLError:
        return None


def _gpu_utilisation(handle: Any) -> float | None:
    import pynvml

    try:
        return float(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu) / 100
    except pynvml.NVMLError:
        return None
