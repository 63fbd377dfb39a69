"""A configuration of torchtitan to which questions are asked, as to a job: a micro-batch is rows of tokens."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

from memfit.device.hardware.catalogue import Device, find_device
from memfit.device.hardware.process_limits import check_fake_ranks
from memfit.errors import InputError, is_installed
from memfit.events import Trace
from memfit.job import Job, Shape
from memfit.mesh import MeshShape
from memfit.planner.asked_job import DEFAULTS, AskedJob
from memfit.planner.job_facts import JobFacts, Policy
from memfit.planner.prediction import TracedQuestion, device_facts
from memfit.script.asked_script import AS_WRITTEN
from memfit.script.command import torchrun_variables
from memfit.script.launch import free_host_bytes, trace_script
from memfit.script.outcome import ScriptCommand, TraceRequest
from memfit.script.titan.advice import advice
from memfit.script.titan.describe import Description, describe_target
from memfit.script.titan.target import (
    DEGREES,
    STAND_INS,
    TitanTarget,
    allocator_of,
    ranks_of,
    titan_mesh,
    without_variables,
)
from memfit.script.triton_launches import LINE, TRIED

KERNEL_LINES = (LINE, TRIED)
"""Of what a trace does not see, the lines that belong to an answer on torchtitan."""
WITHOUT_GRAPHS = "CUDA graphs are off (training.disable_cuda_graphs): their memory pool is not modelled"
_STEPS, _SECONDS, _NODE = 2, 3600.0, 8
"""Steps of a trace, the most time for it, and cards of a node."""
_SPMD_TYPES = (2, 14)
"""The version of torch whose ``fully_shard`` takes parameters that the backend ``spmd_types`` annotates."""


class AskedTitan(AskedJob):
    """The configuration's questions.

    Args:
        name: what to call it, as it was written.
        world: ranks; None: those of the mesh, else the product of the configuration's degrees.
        mesh: ranks by dimension, in place of the configuration's degrees.
    """

    def __init__(self, name: str, target: TitanTarget, world: int | None = None, mesh: MeshShape | None = None) -> None:
        super().__init__(name, self._no_job)
        if mesh is not None:
            mesh = titan_mesh(mesh)
            sizes = {degree: getattr(mesh, dimension) for dimension, degree in DEGREES.items()}
            target = target.changed({f"parallelism.{degree}": size for degree, size in sizes.items()})
            world = ranks_of(mesh)
        self._target, self._variables = without_variables(target)
        self._allocator, self._asked_world = allocator_of(self._variables), world

    @cached_property
    def description(self) -> Description:
        """The configuration, as torchtitan has it.

        Raises:
            InputError: it is none, or has what memfit does not model or cannot feed.
        """
        described = describe_target(self._target)
        for what, write in described.not_modelled.items():
            raise InputError(self.name, f"{what} is not modelled", write)
        if not described.makes_rows:
            why = f"it reads {described.loader}; memfit makes up rows of tokens, with images or without, and flux's"
            raise InputError(self.name, why, "write a configuration that trains on text")
        return described

    @property
    def micro_batch(self) -> int:
        """Rows of the configuration's own micro-batch."""
        return self.description.batch

    @property
    def facts(self) -> JobFacts:
        """What questions need; what only a job has is empty."""
        policy = Policy(name=AS_WRITTEN, checkpointing={}, changes={})
        return JobFacts(
            unit="rows", longest=None, precision="", checkpoint="none", nets=(self.description.net,), own={}, every={},
            whole_numbers={}, policies=(policy,),
        )  # fmt: skip

    @cached_property
    def mesh(self) -> MeshShape:
        """Ranks by dimension; ``dp_shard`` has those that the others leave.

        Raises:
            InputError: the ranks do not divide so, or are more than one process simulates.
        """
        degrees = dict(self.description.degrees)
        left_over = degrees["dp_shard"] < 0
        others = MeshShape(**{**degrees, "dp_shard": 1})
        least = others.ep // math.gcd(others.ep, others.cp * others.tp)  # ep divides the ranks of dp_shard, cp and tp
        world = self._asked_world or ranks_of(others) * (least if left_over else degrees["dp_shard"])
        sizes = MeshShape(**{**degrees, "dp_shard": world // ranks_of(others) if left_over else degrees["dp_shard"]})
        if ranks_of(sizes) != world:
            why = f"its degrees ({sizes}) make {ranks_of(sizes)} ranks"
            raise InputError(f"{self.name} on {world} ranks", why, "write --world or --mesh to suit them")
        if sizes.dp_shard % least:
            why = (
                f"ep={sizes.ep} does not divide the {sizes.dp_shard * sizes.cp * sizes.tp} ranks of dp_shard, cp and tp"
            )
            write = f"write --world {ranks_of(others) * least}, or a multiple of it"
            if not left_over:
                write = f"write --set parallelism.{DEGREES['dp_shard']}={least}, or a multiple of it"
            raise InputError(f"{self.name} on {world} ranks", why, write)
        check_fake_ranks(f"{world} ranks of {self.name}", world)
        return sizes

    @property
    def world(self) -> int:
        """Ranks of all dimensions."""
        return ranks_of(self.mesh)

    def _traced(
        self, identity: str, shape: Shape, device: Device, changes: Mapping[str, Any], choices: Mapping[str, Any]
    ) -> TracedQuestion:
        known = {**DEFAULTS, "checkpointing": {}}
        if other := next(
            (name for name, value in choices.items() if name != "rank" and known.get(name) != value), None
        ):
            option = "--accumulate" if other == "micro_batches" else f"--{other}"
            raise InputError(f"{option} with {self.name}", "its configuration says it", "write --set SECTION.KEY=VALUE")
        if not device.is_cuda:
            raise InputError(f"{self.name} on {device.key}", "torchtitan trains on cards alone", "write --device h100")
        self._check_torch()
        asked = choices.get("rank")
        if asked is not None and asked >= self.world:
            write = f"write --rank {self.world - 1} or less"
            raise InputError(f"--rank {asked}", f"there are ranks 0 to {self.world - 1}", write)
        facts: set[str] = set()
        ranks = self._binding_ranks if asked is None else (asked,)
        traces = {rank: self._rank(rank, shape, device, facts) for rank in ranks}
        reason = ""
        if asked is None and self.world > 1:
            reason = _FIRST if self.mesh.pp == 1 else _FIRST_OF_PLACES
        return TracedQuestion(
            settings={"training.seq_len": self.description.length, **self._target.changes, **self._variables},
            shape=shape,
            unit=self.facts.unit,
            nets=self.facts.nets, checkpointing={}, engine="torchtitan", world=self.world, traces=traces,
            allocator=self._allocator, facts=device_facts(device, facts), mesh=self.mesh.sizes(), rank_reason=reason,
            not_validated=self.description.not_validated,
        )  # fmt: skip

    @property
    def _binding_ranks(self) -> tuple[int, ...]:
        """Ranks of which one needs most: the first of each place in the pipeline, whose ranks are neighbours."""
        return tuple(range(0, self.world, self.world // self.mesh.pp))

    def _rank(self, rank: int, shape: Shape, device: Device, facts: set[str]) -> Trace:
        """One rank's trace; ``facts`` gets what it asked of the card."""
        outcome = trace_script(self.request(rank, shape, device))
        if outcome.error is not None:
            summary = outcome.error.summary
            raise InputError(self.name, summary, advice(summary, outcome.error.hint))
        if outcome.trace is None or outcome.windows < _STEPS:
            write = "write more steps (--set training.steps=10)"
            raise InputError(self.name, f"it was not traced to two complete steps ({outcome.ended})", write)
        facts.update(outcome.facts)
        kernels = tuple(line for line in KERNEL_LINES if line in outcome.not_seen)
        return replace(outcome.trace, assumed=(WITHOUT_GRAPHS, *kernels, *outcome.trace.assumed))

    def request(self, rank: int, shape: Shape, device: Device) -> TraceRequest:
        """How torchtitan's trainer is traced for a rank and a device."""
        own_memory = device.is_cuda and device.memory_bytes != find_device(device.key).memory_bytes
        target = self._target.changed({"training.local_batch_size": shape.items})
        command = ScriptCommand(
            target="memfit.script.titan.trainer", is_module=True, args=(target.to_json(),), world=self.world,
            environment=torchrun_variables(self.world, min(self.world, _NODE), rank),
        )  # fmt: skip
        return TraceRequest(
            command=command, device=device.key, memory_bytes=device.memory_bytes if own_memory else None, rank=rank,
            steps=_STEPS, limit_seconds=_SECONDS, stubs=tuple(name for name in STAND_INS if not is_installed(name)),
            every_card=False, host_bytes=free_host_bytes(),
        )  # fmt: skip

    def _check_torch(self) -> None:
        """Refuses what torchtitan asks of a later torch than the installed one."""
        described = self.description
        if self.mesh.pp > 1 and not described.has_pipelines:
            why = f"schedules of torch {described.torch} do not take micro-batches as torchtitan gives them (arg_mbs)"
            raise InputError(f"{self.name} with pp={self.mesh.pp}", why, "install torch 2.14, or leave pp out")
        version = tuple(int(part) for part in re.findall(r"\d+", described.torch)[:2])
        if described.backend == "spmd_types" and self.world > 1 and version < _SPMD_TYPES:
            why = f"fully_shard of torch {described.torch} does not take the parameters of parallelism.spmd_backend"
            write = "write --set parallelism.spmd_backend=full_dtensor, or install torch 2.14"
            raise InputError(f"{self.name} with spmd_types", why, write)

    def _no_job(self) -> Job:
        raise InputError(self.name, "a configuration of torchtitan has no such question", "write a job (docs/job.md)")


_FIRST = "rank 0 was traced: tensors are cut by ceiling division, first parts are largest"
_FIRST_OF_PLACES = _FIRST.replace("rank 0", "the first rank of each place in the pipeline")
