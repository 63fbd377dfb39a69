"""One world of ``memfit verify``: the same windows on one rank and on all of them, each from the same weights.

Rank 0 first runs every window alone, as Single, all micro-batches of all ranks one after the other, in a process group
of its own: a collective in the job's code would otherwise wait for ranks that run nothing. Then all ranks join, and run
each window with their engine, from the weights and the optimizers' state with which rank 0 began it.
"""

from __future__ import annotations

import copy
import json
import os
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from memfit.apply.checkpointing import recompute
from memfit.apply.train_state import TrainState, build
from memfit.apply.window import run_window
from memfit.atomic_file import write_atomic
from memfit.batch.windows import Window, Windows
from memfit.device.hardware.process_limits import check_windows
from memfit.engine.collectives import gather_parts, gather_shares
from memfit.engine.factory import make_engine, syncs_in_backward
from memfit.engine.lost_rank import is_lost_rank
from memfit.engine.process_group import join, join_alone
from memfit.engine.protocol import Engine
from memfit.engine.single import Single
from memfit.engine.torchrun_env import TorchrunEnv, torchrun_env
from memfit.errors import Exit, InputError, mistake_in_job, mistake_of_leaving
from memfit.frame_room import in_frame_room
from memfit.job import Nets
from memfit.mesh import MeshShape
from memfit.plan import Plan, read_plan
from memfit.torch_compat import tree_flatten
from memfit.torch_compat.versions import refuse_sharded_ranks
from memfit.train.checkpoint.state_codec import decode, encode
from memfit.train.loop.rng import seed_all
from memfit.train.loop.run_context import RunContext, micro_batches
from memfit.train.run_folder import RunFolder
from memfit.verify.additivity import split_findings
from memfit.verify.bounds import sum_bound
from memfit.verify.compare import compare, sum_of_parts
from memfit.verify.optimizer_options import options_of, other_options
from memfit.verify.perturbation import allow_for, perturbed_windows, product_parts
from memfit.verify.recording_engine import RecordingEngine
from memfit.verify.verify_plan import job_of, samples_of

ALONE_SECONDS = 3600
"""Seconds that the other ranks may wait while rank 0 runs alone."""
STARTS = "starts.pt"
"""What rank 0 began each window with, and the weights after it."""
ERROR = "error.txt"
"""What a rank found wrong; the others then fail where they wait for it, and have nothing to add."""


@in_frame_room
def main(arguments: list[str]) -> int:
    """FOLDER WINDOWS: verifies ``FOLDER/plan.toml``; rank 0 writes ``FOLDER/result.json``.

    One rank also asks whether the job's losses may be split.
    """
    folder, windows = Path(arguments[0]), int(arguments[1])
    plan, started = read_plan(folder / "plan.toml"), torchrun_env()
    try:
        alone = _alone_first(plan, started, folder, windows)
        if started is not None:
            join()
        refuse_sharded_ranks(plan.engine, "cpu")
        engine = make_engine(plan.engine, torch.device("cpu"), plan.mesh_shape, **plan.engine_choices)
        result = verify_world(plan, engine, folder, alone)
        if engine.world == 1:
            result["findings"] += [asdict(finding) for finding in split_findings(job_of(plan), plan.seed)]
        if engine.rank == 0:
            write_atomic(folder / "result.json", json.dumps(result))
    except InputError as error:
        return _failed(folder, str(error))
    except Exception as error:
        if (folder / ERROR).exists():
            return Exit.BAD_INPUT
        mistake = _lost_rank(started) if is_lost_rank(error) else mistake_in_job(error)
        if mistake is None:
            raise
        return _failed(folder, str(mistake))
    except BaseException as error:
        return _failed(folder, str(mistake_of_leaving(error)))
    if dist.is_initialized():
        dist.destroy_process_group()
    return Exit.DONE


def _lost_rank(started: TorchrunEnv | None) -> InputError:
    """A rank that waited for a collective in vain."""
    return InputError(
        f"{1 if started is None else started.world} ranks",
        "a rank waited for a collective that another did not take part in: that one was killed, or the job's own code "
        "calls collectives, and the ranks run it different numbers of times",
        "choose a --global-batch that gives every rank as many micro-batches, or call collectives once a window",
    )


def _failed(folder: Path, line: str) -> int:
    write_atomic(folder / ERROR, line)
    return Exit.BAD_INPUT


def _alone_first(plan: Plan, started: TorchrunEnv | None, folder: Path, windows: int) -> list[dict[str, Any]]:
    """On rank 0, every window alone, and what each began with written for all ranks; other ranks wait for that.

    A process that is not one of several stays in its process group of one.
    """
    if started is not None and started.rank > 0:
        until = time.monotonic() + ALONE_SECONDS
        while not (folder / STARTS).exists():
            if (folder / ERROR).exists() or time.monotonic() > until:
                os._exit(Exit.BAD_INPUT)
            time.sleep(0.1)
        return []
    join_alone()
    alone = _alone(plan, windows)
    _write_starts([{"begin": each.pop("begin"), "weights": each["seen"].weights} for each in alone], folder)
    if started is not None:
        dist.destroy_process_group()
    return alone


def verify_world(plan: Plan, engine: Engine, folder: Path, alone: list[dict[str, Any]]) -> dict[str, Any]:
    """Differences of every window and what they point at; on ranks above 0 an empty dict.

    Args:
        alone: on rank 0, what ``_alone`` gave.
    """
    recording = RecordingEngine(engine)
    train_state, context = _built(plan, recording, engine.data_world, folder)
    compared, cut = [], plan.mesh.get("tp", 1) > 1
    findings = other_options(gather_shares(engine, options_of(train_state.optimizers)))
    with recompute(train_state.nets, plan.checkpointing):
        for number, start in enumerate(_read_starts(folder)):
            _put_back(train_state, engine, start["begin"])
            recording.begin()
            recording.forced = start["weights"]
            result = run_window(train_state, micro_batches(train_state, context, context.windows.window(number)))
            recording.note_averages(train_state.ema)
            losses = {name: float(value) for name, value in result.losses.items()}
            micro_losses = [sum_of_parts(parts) for parts in gather_parts(engine, recording.seen.micro_losses)]
            sums = gather_shares(engine, _sums_by_net(recording, train_state.nets))
            everyone = list(zip(micro_losses, sums, strict=True))
            findings = findings or other_options(gather_shares(engine, options_of(train_state.optimizers)))
            seen = (recording.seen, losses)
            if engine.rank == 0:
                shares = [len(share) for share in context.windows.window(number).ranks]
                compared.append(compare(train_state.job, alone[number], seen, everyone, shares, cut=cut))
    return {"windows": compared, "findings": list(map(asdict, findings))} if engine.rank == 0 else {}


def _write_starts(starts: list[dict[str, Any]], folder: Path) -> None:
    """Writes what every rank begins each window with, as plain values and tensors.

    Raises:
        InputError: the job's state holds something that needs code to be read, naming it.
    """
    coded, tensors = encode(starts, "the state of the nets and optimizers")
    torch.save({"coded": coded, "tensors": tensors}, folder / f"{STARTS}.part")
    (folder / f"{STARTS}.part").rename(folder / STARTS)


def _read_starts(folder: Path) -> list[dict[str, Any]]:
    """What ``_write_starts`` wrote; the tensors lie in the file."""
    kept = torch.load(folder / STARTS, weights_only=True, mmap=True)
    starts: list[dict[str, Any]] = decode(kept["coded"], lambda spec: kept["tensors"][spec["$tensor"]])
    return starts


def _alone(plan: Plan, windows: int) -> list[dict[str, Any]]:
    """Every window of a plan's ranks on one rank, with what it began and ended with."""
    recording = RecordingEngine(Single(), magnitudes=True)
    train_state, context = _built(plan, recording, len(plan.micro_batches), Path())
    perturbed = syncs_in_backward(plan.engine, plan.engine_choices)
    results = []
    with recompute(train_state.nets, plan.checkpointing):
        for number in range(windows):
            begin = copy.deepcopy(_state(train_state))
            if number == 1:  # the optimizers have their states now
                check_windows(windows, _tensor_bytes(begin))
            window = context.windows.window(number)
            single_rank = Window(number=number, epoch=window.epoch, ranks=(window.micro_batches,))

            def run(this: TrainState, window: Window = single_rank) -> dict[str, float]:
                result = run_window(this, micro_batches(this, context, window))
                return {name: float(value) for name, value in result.losses.items()}

            recording.begin()
            losses, seen = run(train_state), recording.seen
            recording.note_averages(train_state.ema)
            if perturbed:
                after = copy.deepcopy(_state(train_state))
                put_back = partial(_put_back, train_state, recording.engine)
                parts = product_parts(plan.engine, MeshShape(**plan.mesh))
                others = perturbed_windows(recording, train_state, seen, partial(put_back, begin), run, parts)
                allow_for(seen, losses, others, sum_bound(len(window.micro_batches)))
                put_back(after)
            results.append({"begin": begin, "seen": seen, "losses": losses})
    return results


def _built(plan: Plan, recording: RecordingEngine, ranks: int, folder: Path) -> tuple[TrainState, RunContext]:
    job = job_of(plan)
    seed_all(plan.seed)
    samples, lengths = samples_of(job)
    seed_all(plan.seed)
    train_state = build(job, "cpu", recording)
    recording.watch(train_state)
    context = RunContext(
        plan=plan,
        folder=RunFolder(folder),
        samples=samples,
        lengths=lengths,
        windows=Windows.of_plan(plan, size=len(samples), lengths=lengths, ranks=ranks),
        first=0,
        last=0,
        saver=None,
    )
    return train_state, context


def _state(train_state: TrainState) -> dict[str, Any]:
    return {
        "nets": {name: net.state_dict() for name, net in train_state.nets.items()},
        "optimizers": {name: optimizer.state_dict() for name, optimizer in train_state.optimizers.items()},
    }


def _tensor_bytes(state: dict[str, Any]) -> int:
    """Bytes of the tensors in a state."""
    return sum(leaf.nbytes for leaf in tree_flatten(state)[0] if isinstance(leaf, torch.Tensor))


def _put_back(train_state: TrainState, engine: Engine, state: dict[str, Any]) -> None:
    """A state of one rank, put into nets and optimizers that may be sharded."""
    state = copy.deepcopy(state)
    engine.put_state(train_state.nets, train_state.optimizers, state, train_state.stepped)


def _sums_by_net(recording: RecordingEngine, nets: Nets) -> dict[str, list[float]]:
    """Sums of each net's weights after their step, and of frozen ones that a rank holds whole, which a hook of the step
    may have moved: they tell whether two ranks hold the same net."""
    sums: dict[str, list[float]] = {}
    for name, value in recording.seen.weights.items():
        sums.setdefault(name.split(".")[0], []).append(float(value.double().sum()))
    for name, net in nets.items():
        frozen = [p for p in net.parameters() if not p.requires_grad and type(p) is torch.nn.Parameter]
        sums.setdefault(name, []).extend(float(parameter.double().sum()) for parameter in frozen)
    return sums
