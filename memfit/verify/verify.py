"""Runs ``verify.ranks`` for every world, in real processes, and puts together what they found."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memfit.child_process import for_child
from memfit.device.hardware.process_limits import RANK_BYTES, check_ranks
from memfit.engine.capabilities import CAPABILITIES
from memfit.engine.factory import check_known
from memfit.errors import Exit, InputError
from memfit.mesh import MeshShape
from memfit.plan import Plan, write_plan
from memfit.planner.predict import net_sizes, plain_nets
from memfit.train.launch.torchrun import torchrun
from memfit.verify.findings import VerifyFinding
from memfit.verify.verify_plan import job_of, on_ranks

RANKS = "memfit.verify.rank_entry"
_WITH_FIGURES = frozenset({"rank_draws", "coarse_gradients"})
"""Findings whose text has figures of a window."""


@dataclass(frozen=True, kw_only=True)
class VerifiedWorld:
    """One world beside one rank; differences are the largest over all windows, relative as ``bounds`` says."""

    world: int
    engine: str
    differences: dict[str, float]
    of_bounds: dict[str, float]
    """How much of its bound each takes; above 1, it is no rounding."""
    names: dict[str, str]
    """By part, the tensor whose difference is the largest."""
    bound: float
    """The bound of losses and gradients. Every weight has its own, from its gradient's and its optimizer."""
    mesh: str = ""
    """The ranks by dimension; empty where all are in the one that the engine is for."""

    @property
    def ok(self) -> bool:
        """Whether everything is within its bound."""
        return all(value <= 1 for value in self.of_bounds.values())


@dataclass(frozen=True, kw_only=True)
class Verified:
    """Every world, and what was found."""

    worlds: tuple[VerifiedWorld, ...]
    findings: tuple[VerifyFinding, ...]

    @property
    def ok(self) -> bool:
        """No difference beyond rounding, and no fault."""
        return all(world.ok for world in self.worlds) and not any(finding.kind == "fault" for finding in self.findings)


def verify(
    plan: Plan,
    worlds: Sequence[int],
    engine: str,
    windows: int,
    tell: Callable[[str], None] = lambda line: None,
    *,
    mesh: MeshShape | None = None,
    choices: Mapping[str, Any] | None = None,
) -> Verified:
    """Runs the plan's first windows on one rank and on each of these worlds.

    Args:
        mesh: the ranks by dimension of every world but that of one rank; None: all in the one the engine is for.
        choices: of the engine, beside those of the plan.

    Raises:
        InputError: the job cannot be built or run, or the engine cannot carry it.
    """
    check_known(engine)
    _check_memory(plan, max(worlds), engine)
    verified_worlds: list[VerifiedWorld] = []
    findings: list[VerifyFinding] = []
    for world in (*sorted({*worlds} - {1}), 1):
        name = "single" if world == 1 else engine
        tell(f"world {world}, {name}")
        several = on_ranks(plan, name, world, mesh, choices) if world > 1 else on_ranks(plan, name, world)
        result = _run(several, world, windows)
        findings += [VerifyFinding(**{**finding, "world": None}) for finding in result.get("findings", [])]
        findings += [
            VerifyFinding(**{**finding, "world": world}) for seen in result["windows"] for finding in seen["findings"]
        ]
        if world in worlds:
            verified_worlds.append(_world(world, name, mesh if world > 1 else None, result["windows"]))
    verified_worlds.sort(key=lambda finding: finding.world)
    return Verified(worlds=tuple(verified_worlds), findings=tuple(_first_of_each(findings)))


def _check_memory(plan: Plan, ranks: int, engine: str) -> None:
    """Raises InputError where this machine does not hold so many ranks with what each trains.

    Each holds weights, gradients and two moments in fp32, or its part of them; rank 0 also runs every window alone.
    """
    option = f"--world-sizes {ranks}"
    check_ranks(option, ranks)
    if ranks == 1:
        return
    sizes = net_sizes(plain_nets(job_of(plan)))
    frozen = 4 * sum(size.parameters - size.trainable for size in sizes)
    trained = 16 * sum(size.trainable for size in sizes)
    each = frozen + (trained if CAPABILITIES[engine].whole_state else trained // ranks)
    check_ranks(option, ranks, RANK_BYTES + each, bytes_once=frozen + trained)


def _run(plan: Plan, world: int, windows: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="memfit-verify-") as place:
        folder = Path(place)
        write_plan(plan, folder / "plan.toml")
        arguments = [str(folder), str(windows)]
        if world == 1:
            kept = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
            command = [sys.executable, "-m", RANKS, *arguments]
            environment = {**kept, **for_child()}
            done = subprocess.run(command, env=environment, stdout=sys.stderr, check=False, start_new_session=True)
            code = done.returncode
        else:
            os.environ.update(for_child())
            code = torchrun(world, RANKS, arguments, folder, max_restarts=0, resumable=False)
        if code == Exit.DONE:
            result: dict[str, Any] = json.loads((folder / "result.json").read_text())
            return result
        if (folder / "error.txt").exists():
            seen, _, rest = (folder / "error.txt").read_text("utf-8").partition(": ")
            why, _, write = rest.partition("; ")
            raise InputError(seen, why, write)
        if code == Exit.STOPPED:
            raise KeyboardInterrupt
        raise RuntimeError(f"a process of world {world} ended with code {code}; what it said stands above")


def _world(world: int, engine: str, mesh: MeshShape | None, windows: Sequence[dict[str, Any]]) -> VerifiedWorld:
    worst = {
        part: max((window["differences"][part] for window in windows), key=lambda difference: difference["of_bound"])
        for part in ("loss", "gradients", "parameters", "averages")
    }
    return VerifiedWorld(
        world=world,
        engine=engine,
        mesh=str(mesh or ""),
        differences={part: difference["relative"] for part, difference in worst.items()},
        of_bounds={part: difference["of_bound"] for part, difference in worst.items()},
        names={part: difference["name"] for part, difference in worst.items()},
        bound=max(window["bound"] for window in windows),
    )


def _first_of_each(findings: Sequence[VerifyFinding]) -> list[VerifyFinding]:
    """Faults first; of findings with one code that a world found, the first world's alone, and of those with figures
    of a window the first one's."""
    kept: dict[tuple[str, str], VerifyFinding] = {}
    for finding in sorted(findings, key=lambda finding: (finding.kind != "fault", finding.world or 0)):
        kept.setdefault((finding.code, finding.text if finding.code not in _WITH_FIGURES else ""), finding)
    return list(kept.values())


def as_json(verified: Verified) -> dict[str, Any]:
    """The verb's JSON. A difference that is infinite, or takes infinitely much of its bound, is null."""
    return {
        "worlds": [
            {
                "world": world.world,
                "engine": world.engine,
                "mesh": world.mesh,
                "max_relative_difference": _finite(world.differences),
                "bound": world.bound,
                "of_bounds": _finite(world.of_bounds),
                "largest_in": world.names,
                "ok": world.ok,
            }
            for world in verified.worlds
        ],
        "findings": [
            {"code": world.code, "kind": world.kind, "world": world.world, "text": world.text}
            for world in verified.findings
        ],
        "ok": verified.ok,
    }


def _finite(values: Mapping[str, float]) -> dict[str, float | None]:
    return {name: value if math.isfinite(value) else None for name, value in values.items()}
