"""RUN/flight.json: what was resident when memory ran out, the failed request, and what would have saved how much.

Parameters, gradients, optimizer state and buffers are measured, by module too; the rest of what was held is
activations, temporaries and the host's own. Predicted categories and options are the plan's.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from typing import Any

from torch import Tensor, nn

from memfit.apply.train_state import TrainState
from memfit.atomic_file import write_atomic
from memfit.job import is_trained
from memfit.nested_tensors import tensors_in
from memfit.plan import Plan
from memfit.torch_compat.attributes import own_buffers, own_parameters
from memfit.train.recovery.failure import Failure
from memfit.train.run_folder import RunFolder

MODULES = 12


def write_oom_record(
    folder: RunFolder, plan: Plan, train_state: TrainState, window: int, failure: Failure, held_before: int
) -> None:
    """Writes the record of a memory failure over the one before.

    Args:
        held_before: bytes that no budget counts: of a CPU's process, what it held before the job was built.
    """
    record = oom_record(plan, train_state, window, failure, held_before)
    write_atomic(folder.path / "flight.json", json.dumps(record, indent=1) + "\n")


def oom_record(plan: Plan, train_state: TrainState, window: int, failure: Failure, held_before: int) -> dict[str, Any]:
    """The record, as plain values."""
    categories, modules = resident(train_state)
    held = failure.held_bytes - held_before
    predicted = plan.phases.get("train", {})
    return {
        "window": window,
        **asdict(failure),
        "budget_bytes": plan.budget_bytes,
        "resident": {
            "measured": {**categories, "rest": max(held - sum(categories.values()), 0)},
            "by_module": [{"module": name, "bytes": nbytes} for name, nbytes in modules],
            "predicted_at_peak": predicted.get("categories", {}),
            "predicted_peak": {key: predicted.get(key) for key in ("allocated_bytes", "process_bytes", "at")},
        },
        "options": [
            {"name": option.name, "saves_bytes": option.saves_bytes, "costs": option.costs}
            for option in sorted(plan.options, key=lambda option: -option.saves_bytes)
            if not option.applied and option.saves_bytes > 0
        ],
    }


def resident(train_state: TrainState) -> tuple[dict[str, int], list[tuple[str, int]]]:
    """(bytes of what lives between forwards, by category; the modules that hold most of it)."""
    categories: Counter[str] = Counter(
        dict.fromkeys(("parameters", "gradients", "optimizer", "buffers", "ema", "frozen"), 0)
    )
    modules: Counter[str] = Counter()
    states = {p: state for optimizer in train_state.optimizers.values() for p, state in optimizer.state.items()}
    for name, net in train_state.nets.items():
        trained = is_trained(net)
        for path, module in net.named_modules():
            for kind, tensor in _own(module, states):
                categories[kind if trained else "frozen"] += tensor.nbytes
                modules[f"{name}.{path}".rstrip(".")] += tensor.nbytes
    for average in train_state.ema.values():
        categories["ema"] += sum(tensor.nbytes for tensor in (*average.parameters(), *average.buffers()))
    return dict(categories), modules.most_common(MODULES)


def _own(module: nn.Module, states: dict[Any, Any]) -> list[tuple[str, Tensor]]:
    tensors: list[tuple[str, Tensor]] = [("buffers", b) for b in own_buffers(module).values() if b is not None]
    for parameter in own_parameters(module).values():
        if parameter is not None:
            tensors.append(("parameters", parameter))
            if parameter.grad is not None:
                tensors.append(("gradients", parameter.grad))
            tensors += [("optimizer", tensor) for tensor in tensors_in(states.get(parameter, {}))]
    return tensors
