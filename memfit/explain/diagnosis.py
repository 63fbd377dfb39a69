"""Draws conclusions from evidence: the cause, what was alive, and what would have made the step fit."""

from __future__ import annotations

from dataclasses import dataclass

from memfit.explain.changes import Change, changes_for
from memfit.explain.evidence import AllocatorState, DeviceUse, Evidence, MemoryFailure
from memfit.explain.phase import step_part
from memfit.sizes import format_size

CAUSES = {
    "too_large": "the step needs more than the card has",
    "fragmentation": "enough was reserved and free, in pieces that are too small",
    "other_processes": "other processes hold the card's memory",
    "limit": "a limit that the process set itself",
    "leak": "memory that is held between steps grew",
    "long_sample": "one step needed far more than the others",
    "host": "the host's memory ran out, not the card's",
    "shared_memory": "the shared memory of the data loader's workers ran out",
    "unknown_request": "a request failed, and the file does not say which",
    "none": "no failure",
}


FEWEST = 8
"""Readings from which on the absence of growth is stated."""
ROUNDING = 64 << 20
"""What the difference of several numbers of two decimals may be wrong by."""


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """The answer to "why did it run out of memory?"."""

    verdict: str
    cause: str
    """A key of ``CAUSES``."""
    facts: tuple[tuple[str, str], ...]
    """(name, value) in the order in which a person reads them."""
    changes: tuple[Change, ...]
    unknown: tuple[str, ...]
    """What the file does not tell, and where it would stand."""
    evidence: Evidence


def explain(evidence: Evidence) -> Explanation:
    """The cause and the cures."""
    failure = evidence.failures[0] if evidence.failures else None
    cause = _cause(evidence, failure)
    return Explanation(
        verdict=_verdict(evidence, failure, cause),
        cause=cause,
        facts=tuple(_facts(evidence, failure)),
        changes=tuple(changes_for(evidence, failure, cause)),
        unknown=tuple(_unknown(evidence, failure)),
        evidence=evidence,
    )


def _cause(evidence: Evidence, failure: MemoryFailure | None) -> str:
    if failure is None:
        if evidence.growth is not None:
            return "leak"
        if evidence.spike is not None:
            return "long_sample"
        if evidence.state is not None and evidence.state.ooms:
            return "unknown_request"
        crowded = [device for device in evidence.devices if device.used > 0.5 * device.total]
        return "other_processes" if any(len(device.processes) > 1 for device in crowded) else "none"
    if failure.allocator in ("shared_memory", "host"):
        return "leak" if evidence.growth is not None and failure.allocator == "host" else failure.allocator
    if failure.allocator == "cpu":
        return "leak" if evidence.growth is not None else "host"
    if evidence.growth is not None:
        return "leak"
    requested = failure.requested or 0
    foreign, missing = failure.foreign or 0, failure.short or 0
    if failure.allowed is not None and (failure.free or 0) >= requested > 0:
        return "limit"
    if failure.capacity and foreign > 0.1 * failure.capacity and foreign >= missing:
        return "other_processes"
    if _is_fragmented(evidence.state, failure):
        return "fragmentation"
    return "long_sample" if evidence.spike is not None else "too_large"


def _is_fragmented(state: AllocatorState | None, failure: MemoryFailure) -> bool:
    """Whether what was reserved and free would have served the request, joined with what the card had free."""
    unallocated = state.unallocated if state is not None else failure.unallocated
    if state is not None and (state.largest_hole or 0) >= (failure.requested or 0) > 0:
        return False
    missing = failure.short if failure.short is not None else failure.requested
    return bool(missing and unallocated is not None and unallocated >= missing)


def _verdict(evidence: Evidence, failure: MemoryFailure | None, cause: str) -> str:
    if failure is None:
        return _verdict_without_failure(evidence, cause)
    rank = f"Rank {failure.rank}" if failure.rank is not None else "The process"
    memory = {"cpu": "host memory", "host": "host memory", "shared_memory": "shared memory"}.get(
        failure.allocator, "memory"
    )
    frame = failure.own_frame if failure.allocator != "host" else None  # where the end of a worker was noticed
    where = f" in {part}" if frame and (part := step_part(failure.frames)) else ""
    where += f" at {frame.file}:{frame.line}" if frame else ""
    went_on = ", and the run went on" if failure.last_step is not None else ""
    return f"{rank} ran out of {memory}{where}{went_on}: {_why(evidence, failure, cause)}."


def _why(evidence: Evidence, failure: MemoryFailure, cause: str) -> str:
    asked = format_size(failure.requested) if failure.requested is not None else None
    request = f"it asked for {asked}" if asked else "the message does not say how much it asked for"
    unallocated = evidence.state.unallocated if evidence.state is not None else failure.unallocated
    if cause == "leak" and evidence.growth is not None:
        return f"memory {evidence.growth}"
    if cause == "long_sample":
        return f"{evidence.spike}"
    if cause == "fragmentation" and unallocated is not None:
        return f"{request}, and {format_size(unallocated)} was reserved and free, in pieces that are too small"
    if cause == "other_processes":
        return f"{request}, and other processes hold {format_size(failure.foreign or 0)} of the card"
    if cause == "limit" and failure.allowed is not None:
        return f"{request}, and the process limits itself to {format_size(failure.allowed)}"
    if cause == "shared_memory":
        return "the data loader's workers pass batches through /dev/shm, which is full"
    if failure.allocator == "host":
        held = f" when it held {format_size(failure.allocated)}" if failure.allocated else ""
        return f"the system ended it{held} (signal 9, exit code 137)"
    if failure.short:
        return f"{request}, and {format_size(failure.short)} of that was missing"
    return request


def _verdict_without_failure(evidence: Evidence, cause: str) -> str:
    if cause == "leak" and evidence.growth is not None and evidence.growth.of_host:
        return f"The host's memory {evidence.growth}: the loop or the data set keeps objects from one step to the next."
    if cause == "leak":
        return f"Memory {evidence.growth}: something keeps tensors from one step to the next."
    if cause == "long_sample":
        return f"No leak: {evidence.spike}."
    if evidence.devices:
        return _verdict_of_devices(evidence.devices)
    if evidence.state is not None:
        return _verdict_of_state(evidence.state)
    return f"No failure, and no growth over {evidence.readings} readings of memory."


def _verdict_of_state(state: AllocatorState) -> str:
    now = f"{format_size(state.allocated)} is allocated now and {format_size(state.unallocated)} is reserved and free"
    if state.ooms:
        failed = "A request failed" if state.ooms == 1 else f"{state.ooms} requests failed"
        peak = f"; the peak was {format_size(state.peak_allocated)}" if state.peak_allocated is not None else ""
        return f"{failed}, and the summary does not say of how many bytes: {now}{peak}."
    if state.retries:
        times = "once" if state.retries == 1 else f"{state.retries} times"
        return f"No failure, and little room: the allocator gave its cache back {times} to serve a request. {now}."
    return f"No failure is recorded: {now}."


def _verdict_of_devices(devices: tuple[DeviceUse, ...]) -> str:
    fullest = max(devices, key=lambda device: device.used / max(device.total, 1))
    free = format_size(fullest.total - fullest.used)
    name = f" ({fullest.name})" if fullest.name else ""
    text = f"GPU {fullest.index}{name} has {free} of {format_size(fullest.total)} free"
    known = [process for process in fullest.processes if process[2]]
    if not known:
        return f"{text}."
    process = max(known, key=lambda process: process[2] or 0)
    return f"{text}; process {process[0]} ({process[1]}) holds most, {format_size(process[2] or 0)}."


def _facts(evidence: Evidence, failure: MemoryFailure | None) -> list[tuple[str, str]]:
    facts: list[tuple[str, str]] = []
    if failure is not None:
        facts += _facts_of(failure)
    ranks = sorted({each.rank for each in evidence.failures if each.rank is not None})
    if len(ranks) > 1:
        facts.append(("ranks that failed", f"{', '.join(map(str, ranks))}; rank {evidence.failures[0].rank} first"))
    if evidence.state is not None:
        facts += _facts_of_state(evidence.state, failure)
    for device in evidence.devices:
        instance = f", MIG{device.name.partition(' MIG')[2]}" if " MIG" in device.name else ""
        facts.append(
            (f"GPU {device.index}{instance}", f"{format_size(device.used)} of {format_size(device.total)} used")
        )
        facts += [
            (f"  process {number}", f"{name}, {format_size(nbytes) if nbytes else 'unknown bytes'}")
            for number, name, nbytes in device.processes
        ]
    if evidence.growth is not None:
        facts.append(("over the steps", str(evidence.growth)))
    elif evidence.spike is not None:
        facts.append(("over the steps", evidence.spike))
    elif evidence.readings >= FEWEST:
        facts.append(("over the steps", f"no growth over {evidence.readings} readings"))
    return facts


def _facts_of(failure: MemoryFailure) -> list[tuple[str, str]]:
    rows: list[tuple[str, int | None]] = [
        ("asked for", failure.requested),
        ("card", failure.capacity),
        ("limit", failure.allowed),
        ("free on the card", failure.free),
        ("allocated by PyTorch", failure.allocated if failure.allocator != "host" else None),
        ("in private pools (CUDA graphs)", failure.private_pools),
        ("reserved and free", failure.unallocated),
        ("context, libraries, NCCL", failure.outside),
        ("other processes", failure.foreign if failure.others or (failure.foreign or 0) > ROUNDING else None),
        ("held by the process", failure.allocated if failure.allocator == "host" else None),
    ]
    facts = [(name, format_size(nbytes)) for name, nbytes in rows if nbytes is not None]
    if failure.own_frame is not None:
        text = f": {failure.own_frame.text}" if failure.own_frame.text else ""
        facts.insert(0, ("line", f"{failure.own_frame}{text}"))
    inner = failure.frames[-1] if failure.frames else None
    if inner is not None and inner is not failure.own_frame:
        facts.insert(1, ("library line", f"{inner}{f': {inner.text}' if inner.text else ''}"))
    if failure.step is not None:
        went_on = f"; the run went on to step {failure.last_step}" if failure.last_step is not None else ""
        facts.insert(0, ("step", f"{failure.step}{went_on}"))
    return facts


def _facts_of_state(state: AllocatorState, failure: MemoryFailure | None) -> list[tuple[str, str]]:
    rows: list[tuple[str, int | None]] = [
        ("allocated", None if failure is not None and failure.allocated is not None else state.allocated),
        ("reserved", state.reserved),
        ("reserved and free", None if failure is not None and failure.unallocated is not None else state.unallocated),
        ("largest hole", state.largest_hole),
        ("in free segments", state.releasable),
        ("peak allocated", state.peak_allocated),
        ("peak reserved", state.peak_reserved),
        ("lost to rounding", state.allocated - state.requested if state.requested is not None else None),
    ]
    facts = [(name, format_size(nbytes)) for name, nbytes in rows if nbytes is not None]
    if state.retries:
        facts.append(("retries of the allocator", f"{state.retries}: it gave its cache back to serve a request"))
    if state.ooms:
        facts.append(("failures so far", str(state.ooms)))
    return facts


def _unknown(evidence: Evidence, failure: MemoryFailure | None) -> list[str]:
    unknown = list(evidence.notes)
    if failure is None and evidence.state is not None and evidence.state.ooms:
        unknown.append("Which line asked, and for how much: the text of the error tells it. Give the whole log.")
    if failure is not None and failure.allocator not in ("host", "shared_memory"):
        if failure.own_frame is None and evidence.kind != "memory snapshot":
            unknown.append("Which line asked: the traceback is not in the text. Give the whole log.")
        if not evidence.alive and failure.allocator in ("cuda", "hip", "xpu"):
            unknown.append(
                "What was alive: a memory snapshot tells it, line by line "
                "(torch.cuda.memory._record_memory_history(), then _dump_snapshot() after the failure)."
            )
        if not evidence.readings and evidence.growth is None and evidence.kind != "memory snapshot":
            unknown.append("Whether memory grew: memfit.watch(optimizer) writes it step by step.")
    return unknown
