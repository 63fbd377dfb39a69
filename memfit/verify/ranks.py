"""One world of ``memfit verify``: the same windows on one rank and on all of them, each from the same weights.

Rank 0 first runs every window alone, as Single, all micro-batches of all ranks one after the other. Then all ranks run
it with their engine, each window from the weights and the optimizers' state with which rank 0 began it.
"""

from __future__ import annotations

import copy
import json
import os
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from memfit.apply.recompute import recompute
from memfit.apply.rig import Rig, build
from memfit.apply.window import run_window
from memfit.batch.windows import Window, Windows
from memfit.engine.mesh import join
from memfit.engine.place import launched
from memfit.engine.protocol import Engine
from memfit.engine.ranks import gather, part_of
from memfit.engine.single import Single
from memfit.engine.start import start
from memfit.engine.zero import Zero
from memfit.errors import Exit, InputError, mistake_in_job
from memfit.plan import Plan, read_plan
from memfit.train.folder import RunFolder, replace_file
from memfit.train.loop import Course, micro_batches
from memfit.verify.additivity import split_findings
from memfit.verify.bounds import sum_bound
from memfit.verify.compare import compare
from memfit.verify.record import Recording
from memfit.verify.rounding import allow_for, move_last_bits, moved
from memfit.verify.spec import job_of, samples_of
from memfit.verify.zero import put_zero_back

ALONE_SECONDS = 3600
"""How long the other ranks may wait while rank 0 runs alone."""
ERROR = "error.txt"
"""What a rank found wrong; the others then fail where they wait for it, and have nothing to add."""


def main(arguments: list[str]) -> int:
    """FOLDER WINDOWS: verifies ``FOLDER/plan.toml``; rank 0 writes ``FOLDER/result.json``.

    One rank also asks whether the job's losses may be split.
    """
    folder, windows = Path(arguments[0]), int(arguments[1])
    try:
        if launched() is not None:
            os.environ.setdefault("MEMFIT_COLLECTIVE_SECONDS", str(ALONE_SECONDS))
            join()
        plan = read_plan(folder / "plan.toml")
        engine = start(plan.engine, torch.device("cpu"), **plan.engine_choices)
        result = verify_world(plan, engine, folder, windows)
        if engine.world == 1:
            result["findings"] = [asdict(one) for one in split_findings(job_of(plan), plan.seed)]
        if engine.rank == 0:
            replace_file(folder / "result.json", json.dumps(result).encode())
    except InputError as error:
        return _failed(folder, str(error))
    except Exception as error:
        if (folder / ERROR).exists():
            return Exit.BAD_INPUT
        mistake = mistake_in_job(error)
        if mistake is None:
            raise
        return _failed(folder, str(mistake))
    if dist.is_initialized():
        dist.destroy_process_group()
    return Exit.DONE


def _failed(folder: Path, line: str) -> int:
    replace_file(folder / ERROR, line.encode())
    return Exit.BAD_INPUT


def verify_world(plan: Plan, engine: Engine, folder: Path, windows: int) -> dict[str, Any]:
    """Differences of every window and what they point at; on ranks above 0 an empty dict."""
    recording = Recording(engine)
    rig, course = _built(plan, recording, engine.world, folder)
    if engine.rank == 0:
        torch.save(_alone(plan, engine, windows), folder / "alone.pt")
    gather(engine, None)
    alone = torch.load(folder / "alone.pt", weights_only=False, mmap=True)
    found = []
    with recompute(rig.nets, plan.checkpointing):
        for number, before in enumerate(alone):
            _put_back(rig, engine, before["begin"])
            recording.begin()
            recording.forced = before["seen"].weights
            result = run_window(rig, micro_batches(rig, course, course.windows.window(number)))
            losses = {name: float(value) for name, value in result.losses.items()}
            everyone = gather(engine, (recording.seen.micro_losses, _sums_by_net(recording)))
            seen = (recording.seen, losses)
            if engine.rank == 0:
                shares = [len(share) for share in course.windows.window(number).ranks]
                found.append(compare(rig.job, before, seen, everyone, shares))
    return {"windows": found} if engine.rank == 0 else {}


def _alone(plan: Plan, engine: Engine, windows: int) -> list[dict[str, Any]]:
    """Every window of an engine's ranks on one rank, with what it began and ended with."""
    recording = Recording(Single(), magnitudes=True)
    rig, course = _built(plan, recording, engine.world, Path())
    found = []
    with recompute(rig.nets, plan.checkpointing):
        for number in range(windows):
            begin = copy.deepcopy(_state(rig))
            window = course.windows.window(number)
            whole = Window(number=number, epoch=window.epoch, ranks=(window.micro_batches,))
            optimizers = {name: copy.deepcopy(optimizer) for name, optimizer in rig.optimizers.items()}
            names = {
                name: [[recording.name_of(p) for p in group["params"]] for group in optimizer.param_groups]
                for name, optimizer in rig.optimizers.items()
            }
            recording.begin()
            result, seen = run_window(rig, micro_batches(rig, course, whole)), recording.seen
            if engine.lockstep:
                after = copy.deepcopy(_state(rig))
                _put_back(rig, recording.engine, begin)
                move_last_bits(rig)
                recording.begin()
                recording.forced = moved(seen.weights)
                run_window(replace(rig, schedules={}, ema={}), micro_batches(rig, course, whole))
                allow_for(seen, recording.seen, sum_bound(len(window.micro_batches)))
                recording.forced = {}
                _put_back(rig, recording.engine, after)
            found.append(
                {
                    "begin": begin,
                    "seen": seen,
                    "losses": {name: float(value) for name, value in result.losses.items()},
                    "optimizers": optimizers,
                    "names": names,
                }
            )
    return found


def _built(plan: Plan, recording: Recording, ranks: int, folder: Path) -> tuple[Rig, Course]:
    job = job_of(plan)
    samples, lengths = samples_of(job)
    torch.manual_seed(plan.seed)
    rig = build(job, "cpu", recording)
    recording.watch(rig)
    windows = Windows(
        size=len(samples),
        lengths=lengths,
        global_batch=plan.global_batch,
        micro_batch=plan.micro_batch,
        seed=plan.seed,
        ranks=ranks,
    )
    course = Course(
        plan=plan,
        folder=RunFolder(folder),
        samples=samples,
        lengths=lengths,
        windows=windows,
        first=0,
        last=0,
        resident_before=0,
        saver=None,
    )
    return rig, course


def _state(rig: Rig) -> dict[str, Any]:
    return {
        "nets": {name: net.state_dict() for name, net in rig.nets.items()},
        "optimizers": {name: optimizer.state_dict() for name, optimizer in rig.optimizers.items()},
    }


def _put_back(rig: Rig, engine: Engine, state: dict[str, Any]) -> None:
    """A state of one rank, put into nets and optimizers that may be sharded."""
    state = copy.deepcopy(state)
    if isinstance(engine, Zero):
        put_zero_back(rig, engine, state)
        return
    for name, net in rig.nets.items():
        here = net.state_dict()
        net.load_state_dict({key: part_of(value, here[key]) for key, value in state["nets"][name].items()})
    for name, optimizer in rig.optimizers.items():
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for index, own in state["optimizers"][name]["state"].items():
            like = parameters[index]
            for key, value in own.items():
                if isinstance(value, torch.Tensor) and value.shape == like.shape:
                    own[key] = part_of(value, like)
        optimizer.load_state_dict(state["optimizers"][name])


def _sums_by_net(recording: Recording) -> dict[str, list[float]]:
    """Sums of each net's weights after their step, which tell whether two ranks hold the same net."""
    found: dict[str, list[float]] = {}
    for name, value in recording.seen.weights.items():
        found.setdefault(name.split(".")[0], []).append(float(value.double().sum()))
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
