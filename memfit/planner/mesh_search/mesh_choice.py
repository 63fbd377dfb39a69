"""The fastest mesh that fits: families of meshes are estimated, and the best ones traced, replayed and planned in full.

A mesh is left out by bounds: state alone exceeds the card's memory, or the time of a window that recomputes nothing is
no shorter than that of a plan that fits. Tensor and expert parallelism stay inside a node unless nothing else fits:
they communicate in every layer, and nothing hides it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from memfit.apply.phase_memory import with_settings
from memfit.device.hardware.cluster import Cluster, cluster_of
from memfit.device.hardware.process_limits import check_fake_ranks
from memfit.engine.context_parallel import names_sequences
from memfit.engine.expert_parallel import has_experts
from memfit.engine.factory import check_known
from memfit.errors import InputError
from memfit.geometry import shape_of
from memfit.job import Job, Nets
from memfit.mesh import INSIDE
from memfit.plan import PhasePolicy
from memfit.planner.mesh_nets import rank_nets
from memfit.planner.mesh_search.family_search import FamilySearch
from memfit.planner.mesh_search.mesh_row import CHOSEN, FITS, REFUSED, SLOWER, TOO_LARGE, MeshRow
from memfit.planner.mesh_search.mesh_shapes import MeshFamily, mesh_families
from memfit.planner.options import options
from memfit.planner.pipeline.pipeline_costs import PipelineCosts
from memfit.planner.predict import plain_nets
from memfit.planner.request import PlanRequest
from memfit.planner.search.engine_search import Answer
from memfit.planner.search.search import find_plan
from memfit.planner.variable_length.length_check import check_longest
from memfit.trace.step import Tracing

TRACED = 3
"""Meshes that are planned in full, at most, once one of them fits."""
NOT_LOOKED_AT = "it cuts layers over several nodes, which is looked at where nothing else fits"


def find_any_plan(job: Job, request: PlanRequest, nodes: int | None, network: str | None = None) -> Answer:
    """The plan of a request: without nodes for one node, with them for a cluster, whose mesh is searched where the
    request has none.

    Args:
        network: between nodes, as ``cluster_of`` has it.
    """
    if nodes is None:
        return find_plan(job, request)
    request = replace(request, cluster=cluster_of(request.device, request.world, nodes, network))
    return find_mesh_plan(job, request) if request.mesh is None else find_plan(job, request)


def find_mesh_plan(job: Job, request: PlanRequest) -> Answer:
    """The plan of the fastest mesh that fits, with the other meshes; what is lacking where none fits.

    Args:
        request: for ``devices`` cards of its cluster, without a mesh.

    Raises:
        InputError: no engine carries the job on so many devices, the card's rates are not known, or what ``find_plan``
            refuses.
    """
    begin = time.perf_counter()
    assert request.cluster is not None
    _check(job, request)
    job = with_settings(job, {"wrapper": "none"})
    whole = plain_nets(job)
    families = mesh_families(
        request.devices, request.engine, experts=has_experts(whole), sequences=names_sequences(job)
    )  # fmt: skip
    if not families:
        seen, why = f"--engine {request.engine} --nodes", f"{request.engine} carries no mesh"
        raise InputError(seen, why, "leave --nodes out, or write --engine fsdp2")
    costs = _pipeline_costs(job, request, whole)
    inside = [family for family in families if not _crosses(request.cluster, family)]
    beyond = [family for family in families if family not in inside]
    rows = _rows(job, request, inside, whole, costs)
    crossing = ""
    if any(row.state == FITS for row in rows):
        rows += [row for family in beyond for row in _refused(family, NOT_LOOKED_AT)]
    else:
        crossed = _rows(job, request, beyond, whole, costs)
        if any(row.state == FITS for row in crossed):
            crossing = "layers are cut over several nodes, since no mesh fits that cuts them inside a node"
        rows += crossed
    if all(row.state == REFUSED for row in rows):
        raise InputError(
            f"--devices {request.devices} --nodes", rows[0].remark, "write --mesh with one that is carried"
        )
    answer = _planned(job, request, rows)
    if answer.plan is not None:
        reasons = {"mesh": _reason(answer, crossing), "time": _time_words(answer, request.cluster)}
        answer = replace(answer, plan=replace(answer.plan, reasons={**answer.plan.reasons, **reasons}))
    return replace(answer, seconds=time.perf_counter() - begin)


def _check(job: Job, request: PlanRequest) -> None:
    check_fake_ranks(f"--devices {request.devices}", request.devices)
    check_longest(job, request)
    if request.engine is not None:
        check_known(request.engine)
    device = request.device
    if device.fp32_flops is None or device.bandwidth is None:
        why = f"the rates of {device.key} are not known, so that meshes cannot be compared by time"
        raise InputError("--nodes without --mesh", why, "write --mesh dp_shard=N")
    if request.devices < 2:
        raise InputError(f"--devices {request.devices} --nodes", "one device has no mesh", "leave --nodes out")


def _pipeline_costs(job: Job, request: PlanRequest, whole: Nets) -> PipelineCosts:
    """What the job's modules take, which is traced where a family cuts them into stages."""
    device = request.device
    keeps = "optimizer" in request.keep
    implementation = "job" if keeps else options.implementation(job, whole, device)
    how = Tracing(
        device=device, implementation=implementation, validation=PhasePolicy(), saving=PhasePolicy()
    )  # fmt: skip
    return PipelineCosts(job, whole, how, shape_of(job, min(job.longest or 2, request.global_batch)))


def _crosses(cluster: Cluster, family: MeshFamily) -> bool:
    mesh = family.meshes[0]
    return any(cluster.crosses(mesh, name) for name in INSIDE if name in mesh.sizes())


def _rows(
    job: Job, request: PlanRequest, families: Sequence[MeshFamily], whole: Nets, costs: PipelineCosts
) -> list[MeshRow]:
    rows: list[MeshRow] = []
    state_per_byte = 0.0
    for family in families:
        remark = _too_few(job, request, family)
        if not remark:
            try:
                search = FamilySearch(job, request, family, rank_nets(job, family.cut, whole), whole, costs)
                enough = min((row.seconds for row in rows if row.state == FITS and row.seconds), default=float("inf"))
                rows += search.rows(state_per_byte, enough)
                state_per_byte = search.state_per_byte
                continue
            except InputError as error:
                remark = str(error)
        rows += _refused(family, remark)
    return rows


def _refused(family: MeshFamily, remark: str) -> list[MeshRow]:
    return [MeshRow(mesh=mesh, engine=family.engine, state=REFUSED, remark=remark) for mesh in family.meshes]


def _too_few(job: Job, request: PlanRequest, family: MeshFamily) -> str:
    """Why a family has more ranks with samples of their own than the global batch has samples; else empty."""
    samples = request.global_batch // (job.longest or 1)
    if family.data_ranks <= max(samples, 1):
        return ""
    return f"{family.data_ranks} ranks take samples of their own, and the global batch has {samples}"


def _planned(job: Job, request: PlanRequest, rows: Sequence[MeshRow]) -> Answer:
    """The best meshes planned in full, until none of the others is estimated to be faster."""
    rows, answers = list(rows), dict[int, Answer]()
    order = sorted(
        (index for index, row in enumerate(rows) if row.state == FITS), key=lambda index: rows[index].seconds or 0.0
    )
    best: int | None = None
    for place, index in enumerate(order):
        if best is not None and (place >= TRACED or (rows[best].seconds or 0.0) <= (rows[index].seconds or 0.0)):
            break
        answers[index] = _plan_of(job, request, rows[index])
        rows[index] = _traced_row(rows[index], answers[index])
        if rows[index].state == FITS and (best is None or (rows[index].seconds or 0.0) < (rows[best].seconds or 0.0)):
            best = index
    if best is None:
        return _planned_for_host(job, request, rows, answers)
    rows[best] = replace(rows[best], state=CHOSEN)
    return replace(answers[best], meshes=_ladder(rows))


def _planned_for_host(
    job: Job, request: PlanRequest, rows: list[MeshRow], answers: dict[int, Answer]
) -> Answer:  # fmt: skip
    """The mesh with the smallest parts, which may wait on the host; what the smallest peak lacks where that does not
    fit either."""
    carried = [index for index, row in enumerate(rows) if row.state != REFUSED]
    sharded = max(carried, key=lambda index: (rows[index].mesh.shards, -(rows[index].peak or 0)))
    smallest = min(
        carried, key=lambda index: (rows[index].mesh.data_ranks / rows[index].mesh.dp_shard, rows[index].peak or 0)
    )
    for index in dict.fromkeys([sharded, smallest] if rows[sharded].mesh.shards > 1 else [smallest]):
        answers[index] = answers.get(index) or _plan_of(job, request, rows[index])
        if answers[index].plan is not None:
            rows[index] = replace(_traced_row(rows[index], answers[index]), state=CHOSEN)
            return replace(answers[index], meshes=_ladder(rows))
    return replace(next(iter(answers.values())), meshes=_ladder(rows))


def _plan_of(job: Job, request: PlanRequest, row: MeshRow) -> Answer:
    return find_plan(job, replace(request, mesh=row.mesh, devices=row.mesh.data_ranks, engine=None))


def _traced_row(row: MeshRow, answer: Answer) -> MeshRow:
    shown = answer.chosen or answer.floor
    peak = max(phase.process_bytes for phase in shown.footprint.phases.values())
    return replace(
        row, state=FITS if answer.plan is not None else TOO_LARGE, seconds=shown.seconds, peak=peak, traced=True,
        arithmetic=shown.geometry.arithmetic(), policy=shown.policy, remark="",
    )  # fmt: skip


_ORDER = (CHOSEN, FITS, SLOWER, TOO_LARGE, REFUSED)


def _ladder(rows: Sequence[MeshRow]) -> tuple[MeshRow, ...]:
    return tuple(sorted(rows, key=lambda row: (_ORDER.index(row.state), row.seconds or 0.0, row.peak or 0)))


def _reason(answer: Answer, crossing: str) -> str:
    rows = answer.meshes
    counts = {state: sum(row.state == state for row in rows) for state in _ORDER}
    fit = counts[CHOSEN] + counts[FITS]
    parts = [f"fastest {f'of {fit} meshes that fit' if fit > 1 else 'mesh that fits'}, of {len(rows)}"]
    if counts[SLOWER]:
        takes, they = ("takes", "it recomputes") if counts[SLOWER] == 1 else ("take", "they recompute")
        parts.append(f"{counts[SLOWER]} {takes} as long at least, whatever {they}")
    return "; ".join([*parts, *([crossing] if crossing else [])])


def _time_words(answer: Answer, cluster: Cluster) -> str:
    assert answer.plan is not None
    before = answer.plan.reasons.get("time", "")
    return f"{before}; {cluster.words()}, at the makers' rates; switches are not modelled"
