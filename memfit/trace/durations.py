"""Durations: how long operators take on this machine's processor. Each distinct call is run here, once, and kept.

As with scratch, a call is made again from its description, on tensors of the same shapes, strides and types. In a step
its weights were last read a whole pass ago, so before each run the caches are filled with something else. Left out:
results that the next call still finds in the caches, and fresh pages that the system zeroes.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from memfit.apply.checkpointing import recompute
from memfit.nested_tensors import tensors_in
from memfit.torch_compat import disable_current_modes
from memfit.trace import operator_scratch
from memfit.trace.operator_scratch import Key
from memfit.user_cache import is_amount, keep, read_kept

FLUSH = 64 << 20
"""Bytes that are written between the runs of a call: more than the caches hold."""
FLUSHED, SHORT = 1 << 18, 0.05
"""A call on fewer bytes of tensors stays in the caches in a step too; one of more seconds hardly needs them."""
ENOUGH = 0.03
"""Seconds after which a call has been timed often enough."""
MOST = 5
"""Runs of one call; the shortest counts, since what else the machine does only adds to a run."""


def now() -> float:
    """Seconds: of this process's own work where torch runs on one thread, which other processes hardly disturb."""
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()


def durations(keys: set[Key]) -> dict[Key, float | None]:
    """Seconds of calls, from the disk where they were timed before; None where a call cannot be made again, or is too
    large for this machine's memory."""
    place = operator_scratch.store("seconds")
    known: dict[Key, float | None] = read_kept(place, lambda value: value is None or is_amount(value))
    missing = sorted(keys - known.keys())
    if missing:
        with disable_current_modes(), torch.no_grad():
            before = torch.default_generator.get_state()
            known |= {key: _timed(key) for key in missing if operator_scratch.fits_here(key)}
            torch.default_generator.set_state(before)
        with contextlib.suppress(OSError):
            keep(place, known)
    return {key: known.get(key) for key in keys}


def _timed(key: Key) -> float | None:
    name, args, kwargs = json.loads(key)
    try:
        operator = operator_scratch.traced_operator(name)
        real = [operator_scratch.real(key_word) for key_word in args]
        named = {key_word: operator_scratch.real(value) for key_word, value in kwargs.items()}
        return _least_seconds(operator, real, named)
    except (RuntimeError, TypeError, NotImplementedError, IndexError, ValueError):
        return None


def _least_seconds(operator: Any, args: list[Any], kwargs: dict[str, Any]) -> float:
    begin = now()
    operator(*args, **kwargs)
    is_short = now() - begin < SHORT
    flushed = is_short and sum(tensor.nbytes for tensor in tensors_in([args, kwargs])) > FLUSHED
    runs: list[float] = []
    while len(runs) < MOST and (not runs or sum(runs) < ENOUGH):
        if flushed:
            _other().add_(1)
        begin = now()
        operator(*args, **kwargs)
        runs.append(now() - begin)
    return min(runs)


@cache
def _other() -> Tensor:
    return torch.zeros(FLUSH // 4)


class _Chain(nn.Module):
    """So many products and activations of a few numbers each, whose own work takes next to no time."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(length))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = functional.gelu(layer(x))
        return x


def overheads() -> dict[str, list[float]]:
    """Seconds that recomputing takes beyond its operators, by mode: for one call, and for each operator in it.

    Autograd's hooks and, for ``selective``, a Python mode around every operator. Measured once on this machine.
    """
    place = operator_scratch.store("overheads")
    known: dict[str, list[float]] = read_kept(place, _is_overhead)
    if not known.keys() >= {"full", "selective"}:
        with disable_current_modes():
            before = torch.default_generator.get_state()
            known = _measured_overheads()
            torch.default_generator.set_state(before)
        with contextlib.suppress(OSError):
            keep(place, known)
    return known


def _is_overhead(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(is_amount, value))


def _measured_overheads() -> dict[str, list[float]]:
    short, long = (2, 24)
    more: dict[str, list[float]] = {"full": [], "selective": []}
    for length in (short, long):
        net, x = nn.Sequential(_Chain(length)), torch.randn(4, 8, requires_grad=True)
        kept, forward = _step_seconds(net, x, "keep"), _forward_seconds(net, x)
        more["full"].append(_step_seconds(net, x, "full") - kept - forward)
        more["selective"].append(_step_seconds(net, x, "selective") - kept - forward / 2)
    overheads = {}
    for mode, (first, last) in more.items():
        each = max((last - first) / (2 * (long - short)), 0.0)
        overheads[mode] = [max(first - 2 * short * each, 0.0), each]
    return overheads


def _step_seconds(net: nn.Module, x: Tensor, mode: str) -> float:
    with recompute({"net": net}, {"net.0": mode}):
        return _repeated(lambda: net(x).sum().backward())


def _forward_seconds(net: nn.Module, x: Tensor) -> float:
    return _repeated(lambda: net(x))


def _repeated(work: Callable[[], Any], times: int = 15) -> float:
    work()
    runs = []
    for _ in range(times):
        begin = now()
        work()
        runs.append(now() - begin)
    return statistics.median(runs)
