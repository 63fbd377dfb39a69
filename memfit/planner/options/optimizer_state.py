"""Options for state that stays from window to window: the weights' average and optimizer state."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from memfit.apply.state_streaming import left_on_the_device, parts_by_size
from memfit.engine.capabilities import CAPABILITIES, WHOLE_STATE
from memfit.job import is_trained
from memfit.plan import MemoryOption
from memfit.planner.live_bytes import fall, highest, live_bytes_of
from memfit.planner.options import offload_options
from memfit.planner.options.offload_options import CPU_OFFLOAD
from memfit.planner.options.option_context import STEP, OptionContext, memory_option
from memfit.planner.search.traced_job import open_traced_job
from memfit.trace.step import Tracing, trace_job

EIGHT_BIT = frozenset({"Adam", "AdamW", "SGD", "RMSprop", "Adagrad"})
"""Optimizers of torch.optim that bitsandbytes has with 8-bit state (bitsandbytes/optim)."""
BLOCK, SMALL = 256, 4096
"""Of 8-bit state: elements that share an fp32 scale, and elements below which a tensor's state stays in fp32
(bitsandbytes/optim/optimizer.py, ``blocksize`` and ``min_8bit_size``)."""
SCALAR = 4
"""Bytes: state no larger is a single number, which is not moved."""


def average_on_host(context: OptionContext) -> MemoryOption:
    """The average waits on the host between updates; an update moves it to the card in parts."""
    name, live_bytes, link = "average of the weights on the host", context.live_bytes, context.device.link_bytes
    if context.job.ema is None:
        return memory_option(context, name, False, {}, "the job keeps no average of the weights", seconds=0.0)
    if not context.device.is_cuda:
        return memory_option(context, name, False, {}, "the host is the device", seconds=0.0)
    if context.candidate.engine not in WHOLE_STATE:
        return memory_option(
            context,
            name,
            False,
            {},
            f"under {context.candidate.engine} each rank already holds only a part",
            seconds=0.0,
        )
    applied, tensors = context.full_step.how.average == "host", _averaged(context)
    average = sum(nbytes for _, nbytes in tensors)
    if applied:
        saves = fall(live_bytes.peaks(live_bytes.less(_made_in(context, "ema")) + average), context.peaks)
    else:
        sizes = [
            sum(part) for part in parts_by_size([size for kind, size in tensors if kind], [s for k, s in tensors if k])
        ]
        visiting = max((sum(sizes[i : i + 2]) for i in range(len(sizes))), default=0)
        held = live_bytes.less(live_bytes.of("ema"))
        after = held[np.flatnonzero(live_bytes.events_in(("train",)))[-1]]
        peaks = live_bytes.peaks(held)
        saves = fall(context.peaks, peaks | {"train": max(peaks["train"], int(after) + visiting)})
    seconds = None if link is None else 2 * average / link
    return memory_option(
        context, name, applied, dict(saves), "nothing fits without it" if applied else "the plan fits without it",
        seconds=seconds, costs="copies", unknown=_no_link(seconds),
    )  # fmt: skip


def _averaged(context: OptionContext) -> list[tuple[bool, int]]:
    """(whether it is a parameter, bytes) of every tensor of the averages."""
    trained = [net for net in context.nets.values() if is_trained(net)]
    return [(True, p.nbytes) for net in trained for p in net.parameters()] + [
        (False, b.nbytes) for net in trained for b in net.buffers()
    ]


def _made_in(context: OptionContext, part: str) -> np.ndarray:
    """bool (S,): storages that operators of this part made."""
    trace = context.live_bytes.trace
    inside = np.array([name == part for name in trace.parts])[trace.operator_part[np.maximum(trace.made_by, 0)]]
    made: np.ndarray = inside & (trace.made_by >= 0)
    return made


def state_on_host(context: OptionContext) -> MemoryOption:
    """Optimizers' state between steps; a step brings it to the card part by part."""
    if CAPABILITIES[context.candidate.engine].takes_cpu_offload and context.device.is_cuda:
        return _parts_on_host(context)
    name, live_bytes, traces = "optimizer state on the host", context.live_bytes, context.traces
    how, link, state = context.full_step.how, context.device.link_bytes, context.traces.streamed_bytes
    applied = how.optimizer_state == "host"
    saves: dict[str, int | None]
    if applied:
        left = left_on_the_device(context.job.optimizers(context.nets))
        reason = "nothing fits without it" + (f"; the state of {', '.join(left)} stays" if left else "")
        saves = dict(_without_host(context, how, state))
    elif "by parts" not in traces.steps:
        reason = offload_options.why_not(context.job, context.nets, context.device, context.candidate.engine)
        return memory_option(context, name, False, {}, reason, seconds=0.0)
    else:
        reason = offload_options.why_not(context.job, context.nets, context.device, context.candidate.engine)
        held = live_bytes.alive - np.minimum(live_bytes.alive - live_bytes.less(live_bytes.of("optimizer")), state)
        stepping, now = live_bytes.parts(STEP), highest(live_bytes.alive, live_bytes.parts(STEP))
        step = now + traces.steps["by parts"].peak - traces.steps["chosen"].peak
        train = max(step, highest(held, live_bytes.events_in(("setup", "train")) & ~stepping))
        saves = dict(fall(context.peaks, live_bytes.peaks(held) | {"train": train}))
    seconds = None if link is None else 2 * state / link
    return memory_option(
        context, name, applied, saves, reason, seconds=seconds, costs="copies", unknown=_no_link(seconds)
    )  # fmt: skip


def _parts_on_host(context: OptionContext) -> MemoryOption:
    """FSDP2's offload of parts, gradients, state and steps together, against the same plan without it."""
    name, how = "optimizer state on the host", context.full_step.how
    if how.mesh is not None and how.mesh.shards == 1:
        return memory_option(context, name, False, {}, f"the mesh {how.mesh} shards nothing", seconds=0.0)
    if how.mesh is not None and how.mesh.dp_shard_in_ep > 1:
        reason = f"experts whose ranks send each other tokens are on the device, so {CPU_OFFLOAD} is not carried"
        return memory_option(context, name, False, {}, reason, seconds=0.0)
    if not how.engine_choices.get(CPU_OFFLOAD):
        reason = f"the plan fits without it; --engine-choice {CPU_OFFLOAD}=true offloads parts, gradients and steps too"
        unknown = f"bytes and time: {CPU_OFFLOAD} was not traced"
        saved: dict[str, int | None] = dict.fromkeys(context.phases)
        return memory_option(context, name, False, saved, reason, seconds=None, unknown=unknown)
    there = replace(how, engine_choices={**how.engine_choices, CPU_OFFLOAD: False})
    trace = trace_job(context.job, there.shape_of(context.job, context.candidate.geometry.micro_batch), there)
    saves = fall(live_bytes_of(trace, context.device).peaks(), context.peaks)
    reason = f"{CPU_OFFLOAD}: with parts of parameters and gradients; see the reason for engine_choices"
    return memory_option(
        context, name, True, dict(saves), reason, seconds=None, costs="copies, and steps on the host",
        unknown="time: the plan without it was not timed",
    )  # fmt: skip


def _without_host(context: OptionContext, how: Tracing, state: int) -> dict[str, int]:
    """What the state on the host saves, against the same plan with it on the card, whose step is traced for this."""
    there = replace(how, optimizer_state="device", micro_batches=1, checkpointing={})
    with open_traced_job(
        context.job, there, there.shape_of(context.job, context.candidate.geometry.micro_batch)
    ) as traced_job:
        traced = traced_job.optimizer_step()
    assert traced is not None
    live_bytes = context.live_bytes
    stepping = live_bytes.parts(STEP)
    held = live_bytes.alive + state * (np.cumsum(stepping) > 0)
    step = live_bytes_of(traced.trace, context.device).peaks()["train"]
    train = max(step, highest(held, live_bytes.events_in(("setup", "train")) & ~stepping))
    return fall(live_bytes.peaks(held) | {"train": train}, context.peaks)


def eight_bit(context: OptionContext) -> MemoryOption:
    """State of a byte an element and a scale a block, in one kernel a tensor; changes what is learned."""
    name, live_bytes = "8-bit optimizer", context.live_bytes
    optimizers = context.job.optimizers(context.nets)
    kinds = [
        type(optimizer).__name__
        for optimizer in optimizers.values()
        if type(optimizer).__module__.startswith("torch.optim")
    ]
    lacking = [
        type(optimizer).__name__
        for optimizer in optimizers.values()
        if type(optimizer).__name__ not in EIGHT_BIT & set(kinds)
    ]
    if lacking and len(lacking) == len(optimizers):
        reason = f"no 8-bit {' or '.join(dict.fromkeys(lacking))} exists"
        return memory_option(context, name, False, {}, reason, seconds=0.0, changes_learning=True)
    reason = "use --set if the job has a setting for it"
    timeless = "time: its kernels belong to another library and were not timed"
    if lacking:
        unknown = (
            f"bytes: no 8-bit {' or '.join(dict.fromkeys(lacking))} exists, and other optimizers' state is not separate"
        )
        saves: dict[str, int | None] = dict.fromkeys(context.phases)
        return memory_option(context, name, False, saves, reason, seconds=None, changes_learning=True, unknown=unknown)
    width = max(
        (p.itemsize for optimizer in optimizers.values() for group in optimizer.param_groups for p in group["params"]),
        default=4,
    )
    elements = live_bytes.trace.nbytes // width
    small = live_bytes.trace.nbytes < SMALL * width
    bytes_then = np.where(small, live_bytes.nbytes, elements + 4 * -(-elements // BLOCK))
    state = live_bytes.of("optimizer")
    passing = live_bytes.of("temporaries") & _made_in(context, "optimizer")
    less = np.where(state, live_bytes.nbytes - bytes_then, np.where(passing, live_bytes.nbytes, 0))
    saves = dict(fall(context.peaks, live_bytes.peaks(live_bytes.less(state | passing, less))))
    return memory_option(context, name, False, saves, reason, seconds=None, changes_learning=True, unknown=timeless)


def _no_link(seconds: float | None) -> str:
    return "" if seconds is not None else "time: the rate of the link to the host is unknown"
