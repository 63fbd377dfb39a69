"""A window of a run done again on one device, from a copy of the state, and compared: see
``memfit.train.loop.online_verify``."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

from memfit.apply.checkpointing import recompute
from memfit.apply.train_state import TrainState, build
from memfit.apply.window import run_window
from memfit.batch.dataset import dataset_of, lengths_of
from memfit.batch.windows import Window, Windows
from memfit.device.virtual import backend
from memfit.engine.single import Single
from memfit.errors import Exit
from memfit.loading import load_job
from memfit.mesh import MeshShape
from memfit.plan import Plan, read_plan
from memfit.train.checkpoint.sharded_checkpoint import load_sharded, load_sharded_nets
from memfit.train.launch import memory_limit
from memfit.train.launch.plan_device import device_of_plan
from memfit.train.loop.rng import seed_all
from memfit.train.loop.run_context import RunContext, micro_batches
from memfit.train.run_folder import RunFolder
from memfit.verify.bounds import Difference, bounds_of_steps, loss_difference, sum_bound, weight_difference
from memfit.verify.perturbation import allow_for, perturbed_windows, product_parts
from memfit.verify.recording_engine import RecordingEngine
from memfit.verify.step_keys import at_the_end


def main(arguments: list[str]) -> int:
    """RUN: replays the window that lies in RUN/.proof; adds a line to RUN/verified.jsonl, and says what differs."""
    memory_limit.lift()
    backend.register_virtual_device()
    folder = RunFolder(arguments[0])
    comparison = replay(read_plan(folder.plan), folder.path / ".proof")
    folder.append("verified", comparison)
    if comparison["ok"]:
        return Exit.DONE
    worst = max(comparison["of_bounds"], key=lambda part: comparison["of_bounds"][part])
    print(
        f"memfit: WINDOW {comparison['window']} IS NOT THE SAME ON ONE DEVICE: {worst} differ by "
        f"{comparison['of_bounds'][worst]:.3g} times what rounding explains ({comparison['largest_in'][worst]}); "
        "memfit verify says more",
        file=sys.stderr,
        flush=True,
    )
    return Exit.CHECK_FAILED


def replay(plan: Plan, folder: Path) -> dict[str, Any]:
    """The window alone, beside what the ranks made of it."""
    recorded = json.loads((folder / "window.json").read_text())
    recording = RecordingEngine(Single(), magnitudes=True)
    job, device = load_job(plan.job, dict(plan.settings), unit=plan.unit), device_of_plan(plan)
    train_state = build(
        job, device, recording, plan.implementation, rate=plan.learning_rate, warmup_windows=plan.warmup_windows,
        optimizer_state=plan.optimizer_state, average=plan.average,
    )  # fmt: skip
    recording.watch(train_state)
    shares = tuple(tuple(ids) for rank in recorded["ranks"] for ids in rank)
    window = Window(number=recorded["window"], epoch=0, ranks=(shares,))
    context = _context(plan, train_state, folder)
    bound = sum_bound(len(shares))

    def run(this: TrainState) -> dict[str, float]:
        with recompute(train_state.nets, plan.checkpointing):
            result = run_window(this, micro_batches(this, context, window))
        return {name: float(value) for name, value in result.losses.items()}

    load_sharded(train_state, folder / "before")
    recording.begin()
    losses, seen = run(train_state), recording.seen
    if recorded["sharded_state"]:
        begin = partial(load_sharded, train_state, folder / "before")
        parts = product_parts(recorded["engine"], MeshShape(**plan.mesh))
        others = perturbed_windows(recording, train_state, seen, begin, run, parts)
        allow_for(seen, losses, others, bound)
    load_sharded_nets(train_state, folder / "after")
    apart = set(job.unsynchronised)
    theirs = {
        f"{name}.{path}": p.detach() for name, net in train_state.nets.items() for path, p in net.named_parameters()
    }
    allowed = bounds_of_steps(seen.steps, seen.gradients, seen.magnitudes, seen.scales, bound)
    mine = {name: value for name, value in at_the_end(seen.weights).items() if name.split(".")[0] not in apart}
    weights = weight_difference(mine, theirs, at_the_end(allowed))
    loss = Difference()
    for name, value in losses.items():
        scale = abs(value) + seen.loss_magnitudes.get(name, 0.0)
        loss = loss.worse(loss_difference(name, value, recorded["losses"][name], scale, bound))
    return {
        "window": recorded["window"],
        "world": len(recorded["ranks"]),
        "engine": recorded["engine"],
        "max_relative_difference": {"loss": loss.relative, "parameters": weights.relative},
        "bound": bound,
        "of_bounds": {"loss": loss.of_bound, "parameters": weights.of_bound},
        "largest_in": {"loss": loss.name, "parameters": weights.name},
        "ok": loss.of_bound <= 1 and weights.of_bound <= 1,
    }


def _context(plan: Plan, train_state: TrainState, folder: Path) -> RunContext:
    seed_all(plan.seed)
    samples, lengths = dataset_of(train_state.job), lengths_of(train_state.job)
    windows = Windows.of_plan(plan, size=len(samples), lengths=lengths)
    return RunContext(
        plan=plan, folder=RunFolder(folder), samples=samples, lengths=lengths, windows=windows, first=0, last=0,
        saver=None,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
