"""What would have made a step fit: each change with its bytes, as far as they are known, and the line to write."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from memfit.explain.evidence import AllocatorState, Evidence, MemoryFailure
from memfit.explain.phase import BACKWARD, FORWARD, LOADING, OPTIMIZER, VALIDATION, attends, makes_logits, step_part
from memfit.sizes import format_size


@dataclass(frozen=True, kw_only=True)
class Change:
    """One change."""

    name: str
    write: str
    """The line or setting, as it is written."""
    helps: str
    """yes, no, perhaps: whether it would have helped."""
    saves_bytes: int | None = None
    """None: the file does not tell."""
    why: str = ""


def changes_for(evidence: Evidence, failure: MemoryFailure | None, cause: str) -> Iterator[Change]:
    """The changes, those that help first."""
    changes = [*_for_cause(evidence, failure, cause)]
    if failure is not None and failure.allocator in ("cuda", "hip", "xpu"):
        changes += _for_the_allocator(evidence, failure)
    if failure is not None and cause in ("too_large", "fragmentation", "long_sample", "limit") and _on_device(failure):
        changes += _for_the_step(evidence, failure)
    if failure is None and cause == "unknown_request" and evidence.state is not None:
        changes += _for_an_unknown_request(evidence.state)
    order = {"yes": 0, "perhaps": 1, "no": 2}
    named: dict[str, Change] = {}
    for change in changes:
        named.setdefault(change.name, change)
    yield from sorted(named.values(), key=lambda change: (order[change.helps], -(change.saves_bytes or 0)))


def _on_device(failure: MemoryFailure) -> bool:
    return failure.allocator not in ("host", "cpu", "shared_memory")


def _for_cause(evidence: Evidence, failure: MemoryFailure | None, cause: str) -> Iterator[Change]:
    if cause == "leak" and evidence.growth is not None and evidence.growth.of_host:
        yield Change(
            name="let go of what each step keeps on the host", helps="yes",
            saves_bytes=evidence.growth.end - evidence.growth.begin,
            write="outputs.append(float(loss))  # no list of outputs, no cache without a bound in the data set",
            why="the host's memory grew from step to step",
        )  # fmt: skip
    elif cause == "leak":
        added = evidence.growth.end - evidence.growth.begin if evidence.growth else None
        yield Change(
            name="let go of what each step keeps", helps="yes", saves_bytes=added,
            write="total += loss.item()  # not total += loss, and no list of losses or outputs with their graph",
            why="memory that is held between steps grew",
        )  # fmt: skip
    elif cause == "long_sample":
        yield Change(
            name="bound the longest sample", helps="yes",
            write="memfit.batch.LengthBatchSampler(lengths, most=...)  # or cut samples to a longest length",
            why="one step needed far more than the others",
        )  # fmt: skip
    elif cause == "other_processes" and failure is not None:
        ids = ", ".join(str(number) for number, _ in failure.others)
        yield Change(
            name="end the other processes on the card", helps="yes", saves_bytes=failure.foreign,
            write=f"kill {ids.replace(',', '')}" if ids else "nvidia-smi  # names the processes",
        )  # fmt: skip
        yield Change(
            name="use another card", helps="perhaps", write="CUDA_VISIBLE_DEVICES=1 python train.py",
            why="where another card is free",
        )  # fmt: skip
    elif cause == "limit" and failure is not None and failure.allowed is not None and failure.capacity is not None:
        yield Change(
            name="raise the process's own limit", helps="yes", saves_bytes=failure.capacity - failure.allowed,
            write="torch.cuda.set_per_process_memory_fraction(1.0)",
        )  # fmt: skip
    elif cause == "host":
        yield Change(
            name="fewer or smaller loader workers", helps="perhaps",
            write="DataLoader(..., num_workers=2, prefetch_factor=2, persistent_workers=True)",
            why="each worker holds its own copy of what the data set keeps in Python objects",
        )  # fmt: skip
        yield Change(
            name="load weights without a second copy", helps="perhaps",
            write="torch.load(path, map_location='cpu', mmap=True)  # or low_cpu_mem_usage in from_pretrained",
        )  # fmt: skip
    elif cause == "shared_memory":
        yield Change(
            name="a larger /dev/shm", helps="yes", write="docker run --shm-size=16g ...  # or --ipc=host",
        )  # fmt: skip
        yield Change(
            name="pass batches by files", helps="yes",
            write="torch.multiprocessing.set_sharing_strategy('file_system')",
        )  # fmt: skip


def _for_the_allocator(evidence: Evidence, failure: MemoryFailure) -> Iterator[Change]:
    """expandable_segments and empty_cache: whether they would have helped, and by how much at most."""
    state = evidence.state
    unallocated = state.unallocated if state is not None else failure.unallocated
    requested, expandable = failure.requested, state.expandable if state is not None else None
    if unallocated is not None and requested is not None and not expandable:
        missing = failure.short if failure.short is not None else requested
        enough = unallocated >= missing > 0
        yield replace(
            _EXPANDABLE, helps="perhaps" if enough else "no", saves_bytes=unallocated,
            why=f"it can join at most the {format_size(unallocated)} that was reserved and free; "
            f"{format_size(missing)} was missing",
        )  # fmt: skip
    if requested is not None:
        yield _EMPTY_CACHE


def _for_an_unknown_request(state: AllocatorState) -> Iterator[Change]:
    """What the allocator's figures say of a failure whose request is not known."""
    releasable = state.releasable or 0
    split, added = max(state.unallocated - releasable, 0), max((state.peak_allocated or 0) - state.allocated, 0)
    yield replace(
        _EXPANDABLE, helps="perhaps" if split else "no", saves_bytes=split,
        why=f"it can join at most the {format_size(split)} that is free in segments with live blocks",
    )  # fmt: skip
    yield replace(
        _EMPTY_CACHE, why=f"PyTorch gives free segments back before it raises the error; {format_size(releasable)} now"
    )
    yield replace(_HALF_BATCH, saves_bytes=added // 2 or None, why=_ADDED.format(format_size(added)))
    yield replace(_CHECKPOINT, saves_bytes=added * 2 // 3 or None, why=_ADDED.format(format_size(added)))


_ADDED = "the peak was {} above what is allocated now, which is the step's where the summary was made between steps"
_EXPANDABLE = Change(
    name="expandable segments", helps="perhaps",
    write="PYTORCH_ALLOC_CONF=expandable_segments:True  # before torch 2.9: PYTORCH_CUDA_ALLOC_CONF",
)  # fmt: skip
_EMPTY_CACHE = Change(
    name="torch.cuda.empty_cache()", helps="no", saves_bytes=0, write="# leave it out of the loop",
    why="PyTorch gives every free segment back before it raises this error",
)  # fmt: skip
_HALF_BATCH = Change(
    name="half the micro-batch, twice the accumulation", helps="perhaps",
    write="for part in guard.window(batches): ...  # guard = memfit.guard(optimizer, model): exact",
    why="activations and their gradients shrink with the micro-batch",
)  # fmt: skip
_CHECKPOINT = Change(
    name="checkpoint activations", helps="perhaps",
    write="model.gradient_checkpointing_enable()  # or torch.utils.checkpoint.checkpoint(block, x, "
    "use_reentrant=False)",
    why="a block's activations are made again in the backward",
)  # fmt: skip


def _for_the_step(evidence: Evidence, failure: MemoryFailure) -> Iterator[Change]:
    """Less memory in the part of the step that failed."""
    part, frames = step_part(failure.frames), failure.frames
    held = dict(evidence.categories)
    if part == VALIDATION:
        yield Change(
            name="validate without autograd", helps="perhaps", write="with torch.inference_mode():",
            saves_bytes=held.get("activations"), why="where validation runs with autograd, it keeps all activations",
        )  # fmt: skip
        yield Change(
            name="free gradients before validation", helps="perhaps", saves_bytes=held.get("gradients"),
            write="optimizer.zero_grad(set_to_none=True)",
        )  # fmt: skip
    if part == LOADING:
        yield Change(
            name="load the checkpoint on the host", helps="perhaps", write="torch.load(path, map_location='cpu')",
            why="without it, weights and optimizer state are on the card twice while they are loaded",
        )  # fmt: skip
    if part == OPTIMIZER:
        yield Change(
            name="8-bit or paged optimizer state", helps="perhaps", write="bitsandbytes.optim.PagedAdamW8bit(...)",
            saves_bytes=held.get("optimizer") and held["optimizer"] * 3 // 4,
            why="Adam's first step makes two tensors for each parameter",
        )  # fmt: skip
        yield Change(
            name="step without lists of temporaries", helps="perhaps",
            write="torch.optim.AdamW(..., foreach=False)  # or fused=True",
        )  # fmt: skip
    if makes_logits(frames):
        yield Change(
            name="cross entropy in chunks", helps="perhaps", saves_bytes=failure.requested,
            write="for rows in hidden.chunk(8): loss = loss + F.cross_entropy(head(rows), ...)",
            why="the request is a copy of the logits; the loss and its gradient hold several",
        )  # fmt: skip
    if attends(frames):
        yield Change(
            name="attention without the matrix of scores", helps="perhaps", saves_bytes=failure.requested,
            write="F.scaled_dot_product_attention(q, k, v)",
        )  # fmt: skip
    if part in (None, FORWARD, BACKWARD):
        held_bytes = held.get("activations")
        yield replace(_HALF_BATCH, saves_bytes=held_bytes // 2 if held_bytes else None)
        yield replace(_CHECKPOINT, saves_bytes=held_bytes and held_bytes * 2 // 3)
