"""The search for a plan: the fastest way to run the exact global batch within the device's memory.

Free options come first: they cost neither speed nor learning. Then the search chooses micro-batch and checkpointing
together, by time: at a fixed global batch a smaller micro-batch that keeps everything is often faster than a larger one
that recomputes. Last it frees memory for validation and saving. The answer is traced in full and replayed before it is
given.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from memfit.apply.phase_memory import with_settings
from memfit.device.hardware.process_limits import check_fake_ranks
from memfit.errors import InputError
from memfit.frame_room import in_frame_room
from memfit.geometry import shape_of
from memfit.job import Job
from memfit.planner.batch_check import check_batch
from memfit.planner.cpu_margin import without_cpu_margin
from memfit.planner.options.offload_options import offload_choices
from memfit.planner.predict import check_world, with_precision
from memfit.planner.request import PlanRequest
from memfit.planner.search.engine_choice import engine_candidates
from memfit.planner.search.engine_search import Answer, EngineSearch
from memfit.planner.search.pipeline_search import PipelineSearch
from memfit.planner.suggestions.larger_hardware import larger_hardware
from memfit.planner.suggestions.smaller_settings import smaller_settings
from memfit.planner.variable_length.length_check import check_longest
from memfit.sizes import format_size


@in_frame_room
def find_plan(job: Job, request: PlanRequest) -> Answer:
    """The fastest plan that fits, or what is lacking where none does.

    Raises:
        InputError: an unknown learning-rate rule, more devices than this machine can trace, an engine that is unknown
            or cannot carry the job, or lengths of samples with which no plan could run.
    """
    begin = time.perf_counter()
    asked = f"--devices {request.devices}" if request.mesh is None else f"--mesh {request.mesh}"
    check_fake_ranks(asked, request.world)
    check_world(request.world, request.mesh)
    check_longest(job, request)
    check_batch(job, shape_of(job, request.micro_batch or -(-request.global_batch // request.devices)))
    engines = engine_candidates(request.engine, request.devices, request.mesh)
    job = with_settings(job, {"wrapper": "none"})
    best = _fastest_engine(job, request, engines)
    has_bf16 = (request.device.compute_capability or (8, 0)) >= (8, 0)
    if "precision" in request.allow and job.precision == "fp32" and has_bf16:
        best = _best([best, _fastest_engine(with_precision(job, "bf16"), request, engines)])
    return replace(best, seconds=time.perf_counter() - begin)


def _best(answers: Sequence[Answer]) -> Answer:
    """The fastest answer that fits; where none does, the one that exceeds the memory least."""
    fitting = [answer for answer in answers if answer.plan is not None]
    if not fitting:
        return max(answers, key=lambda answer: answer.floor.footprint.headroom_bytes)
    return min(fitting, key=lambda answer: (answer.floor.seconds is None, answer.floor.seconds or 0.0))


def _fastest_engine(job: Job, request: PlanRequest, engines: Sequence[str]) -> Answer:
    """The best engine's answer, with the reason.

    Raises:
        InputError: no engine can carry the job.
    """
    answers: list[Answer] = []
    remarks: list[str] = []
    for engine in engines:
        first = answers[0].chosen if answers else None
        if first is not None and not first.checkpointing and len(first.geometry.micro_batches[0]) == 1:
            remarks.append(f"{engine} could only add communication")
            continue
        try:
            answer = _search(job, request, engine)
        except InputError as error:
            if not answers and engine == engines[-1]:
                raise
            remarks.append(str(error))
            continue
        answers.append(answer)
        remarks.append(_remark(answer))
    best = _best(answers)
    if best.plan is None:
        return _with_suggestions(best, job, request)
    if request.world == 1:
        return best
    return replace(best, plan=replace(best.plan, reasons={**best.plan.reasons, "engine": "; ".join(remarks)}))


def _with_suggestions(answer: Answer, job: Job, request: PlanRequest) -> Answer:
    """The answer of a search in which nothing fits, with what would help; the suggestions are traced only here.

    Raises:
        InputError: ``smaller_settings`` of the job names no setting of it.
    """
    if answer.how is None:
        return answer
    device = without_cpu_margin(request.device)
    return replace(
        answer,
        smaller_settings=tuple(smaller_settings(job, answer.how, device)),
        larger_hardware=tuple(larger_hardware(answer.floor.footprint, job.precision, device, answer.how)),
    )


def _remark(answer: Answer) -> str:
    """What an engine needs or takes, in words."""
    shown = answer.floor
    if answer.plan is None:
        return f"{shown.engine} needs {format_size(-shown.footprint.headroom_bytes)} too much"
    if shown.seconds is None:
        return f"{shown.engine} fits"
    ranks = f", {shown.communication_seconds:.2g} s of them between ranks" if shown.communication_seconds else ""
    return f"{shown.engine} takes {shown.seconds:.3g} s a window{ranks}"


def _search(job: Job, request: PlanRequest, engine: str) -> Answer:
    """The answer for one engine and precision; state waits on the host where nothing fits otherwise."""
    kind = EngineSearch if request.mesh is None or request.mesh.pp == 1 else PipelineSearch
    answer = kind(job, request, engine).answer()
    if answer.plan is not None:
        return answer
    for places in offload_choices(job, request, engine):
        if answer.plan is not None:
            break
        answer = _best([answer, kind(job, request, engine, **places).answer()])
    return answer
