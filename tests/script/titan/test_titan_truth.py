"""torchtitan's own trainer traced on the virtual CPU and really run on the CPU under the profiler, on one rank and on
several of FSDP and pipelines.
"""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
import torch

from memfit.errors import is_installed
from memfit.installation import release_number
from memfit.script.command import parse_command, torchrun_variables
from memfit.script.launch import trace_script
from memfit.script.outcome import TraceRequest
from memfit.script.titan.target import DEGREES
from memfit.trace.self_test import live_peaks
from testing.ports import free_port
from testing.truth import operator_names

pytest.importorskip("torchtitan", reason="torchtitan is not installed: pip install 'memfit[titan]'")

HERE = Path(__file__).parents[1]
SCRIPT = str(HERE / "samples" / "titan_on_cpu.py")
BOUND = 0.01
needs_compiler = pytest.mark.skipif(
    release_number(torch.__version__) < (2, 14) or shutil.which("g++") is None,
    reason="torch compiles blocks of DTensors from 2.14 on, and inductor compiles for the CPU with g++",
)
needs_pipelines = pytest.mark.skipif(
    release_number(torch.__version__) < (2, 14), reason="schedules take torchtitan's micro-batches from torch 2.14 on"
)
IN_PLACE = {"aten::add_"}
"""Of tensors of unequal types, whose copy within the call is not counted; a trace notes no operator that allocates
nothing."""
needs_torchao = pytest.mark.skipif(not is_installed("torchao"), reason="torchao is not installed: pip install torchao")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "variable"),
    [
        (1, ""), (2, ""), pytest.param(1, "TITAN_FLOAT8", marks=needs_torchao),
        pytest.param(1, "TITAN_COMPILE", marks=needs_compiler), pytest.param(2, "TITAN_COMPILE", marks=needs_compiler),
    ],
)  # fmt: skip
def test_the_trace_has_the_bytes_of_a_real_rank(world: int, variable: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    if variable:
        monkeypatch.setenv(variable, "1")
    traced, operators = traced_peak(world, 0)
    assert traced == pytest.approx(real_peaks(world, operators)[0], rel=BOUND)


@needs_pipelines
@pytest.mark.slow
@pytest.mark.parametrize(
    ("degrees", "schedule", "model"),
    [
        ({"pp": 2}, "1F1B", "llama3"), ({"pp": 2}, "GPipe", "llama3"), ({"pp": 2}, "Interleaved1F1B", "llama3"),
        ({"pp": 2}, "InterleavedZeroBubble", "llama3"), ({"pp": 2}, "ZBVZeroBubble", "llama3"),
        ({"pp": 4}, "1F1B", "llama3"), ({"pp": 4}, "GPipe", "llama3"), ({"pp": 4}, "Interleaved1F1B", "llama3"),
        ({"pp": 4}, "ZBVZeroBubble", "llama3"),
        ({"pp": 2, "dp_shard": 2}, "1F1B", "llama3"), ({"pp": 2, "dp_shard": 2}, "Interleaved1F1B", "llama3"),
        ({"pp": 2}, "1F1B", "deepseek_v3"), ({"pp": 2}, "1F1B", "gpt_oss"), ({"pp": 2, "tp": 2}, "1F1B", "llama3"),
    ],
)  # fmt: skip
def test_each_rank_of_a_pipeline_has_the_bytes_of_a_real_one(
    degrees: dict[str, int], schedule: str, model: str, tmp_path: Path, monkeypatch
) -> None:
    compare(degrees, schedule, model, {}, tmp_path, monkeypatch)


def compare(
    degrees: dict[str, int], schedule: str, model: str, more: dict[str, str], tmp_path: Path, monkeypatch
) -> None:
    """Every rank of a mesh, traced and real; ``more``: further settings of ``parallelism``."""
    monkeypatch.chdir(tmp_path)
    settings = {DEGREES[name]: size for name, size in degrees.items()} | {"pipeline_parallel_schedule": schedule} | more
    monkeypatch.setenv("TITAN_PARALLELISM", json.dumps(settings))
    monkeypatch.setenv("TITAN_MODEL", model)
    if "ZeroBubble" in schedule:  # torch's selective checkpointing recomputes for one backward alone
        monkeypatch.setenv("TITAN_PLAIN", "1")
    world = prod(size for name, size in degrees.items() if name != "ep")  # which are ranks of dp_shard
    traced = [traced_peak(world, rank) for rank in range(world)]
    operators = set.union(*(operators for _, operators in traced))
    runs = [real_peaks(world, operators) for _ in range(3 if {"dp_shard", "tp"} & degrees.keys() else 1)]
    least = [min(peaks) for peaks in zip(*runs, strict=True)]  # on a busy machine gloo's threads hold tensors on
    assert [peak for peak, _ in traced] == pytest.approx(least, rel=BOUND)


@needs_pipelines
@pytest.mark.slow
@pytest.mark.parametrize(
    ("degrees", "model"),
    [
        ({"dp_shard": 2}, "llama3"), ({"pp": 2}, "llama3"), ({"pp": 2, "tp": 2}, "llama3"),
        ({"dp_shard": 2, "ep": 2}, "deepseek_v3"), ({"pp": 2, "dp_shard": 2, "ep": 2}, "deepseek_v3"),
    ],
)  # fmt: skip
def test_each_rank_of_spmd_types_has_the_bytes_of_a_real_one(
    degrees: dict[str, int], model: str, tmp_path: Path, monkeypatch
) -> None:
    compare(degrees, "1F1B", model, {"spmd_backend": "spmd_types"}, tmp_path, monkeypatch)


def traced_peak(world: int, rank: int) -> tuple[int, set[str]]:
    """The largest bytes of live tensors of training of a traced rank, and the operators that it called."""
    environment = torchrun_variables(world, world, rank)
    command = replace(parse_command(["python", SCRIPT]), world=world, environment=environment)
    request = TraceRequest(command=command, device="cpu", memory_bytes=8 << 30, batches=1000, rank=rank)
    outcome = trace_script(request)
    assert outcome.error is None, outcome.error.text
    assert outcome.bare is not None
    return live_peaks(outcome.bare)["train"], operator_names(outcome.bare)


def real_peaks(world: int, operators: set[str]) -> list[int]:
    """The largest bytes of live tensors of training, of each rank of real processes on gloo."""
    names = ",".join(sorted(operators | IN_PLACE))
    port = str(free_port())
    ranks = []
    path = os.pathsep.join((str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")))
    for rank in range(world):
        environment = {
            **os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
            **torchrun_variables(world, world, rank), "MASTER_PORT": port,
        }  # fmt: skip
        run = [sys.executable, str(HERE / "run_for_real.py"), f"real{rank}.json", names, SCRIPT]
        ranks.append(
            subprocess.Popen(run, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        )
    said = [each.communicate(timeout=900)[0] for each in ranks]
    assert all(each.returncode == 0 for each in ranks), said
    return [json.loads(Path(f"real{rank}.json").read_text())["train"] for rank in range(world)]
