"""torchtitan's own trainer traced on the virtual CPU and really run on the CPU under the profiler, one rank and two."""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from memfit.errors import is_installed
from memfit.script.command import parse_command, torchrun_variables
from memfit.script.launch import trace_script
from memfit.script.outcome import TraceRequest
from memfit.torch_compat.versions import release_number
from memfit.trace.self_test import live_peaks
from testing.truth import operator_names

pytest.importorskip("torchtitan", reason="torchtitan is not installed: pip install 'memfit[titan]'")

HERE = Path(__file__).parents[1]
SCRIPT = str(HERE / "samples" / "titan_on_cpu.py")
BOUND = 0.01
needs_compiler = pytest.mark.skipif(
    release_number(torch.__version__) < (2, 14) or shutil.which("g++") is None,
    reason="torch compiles blocks of DTensors from 2.14 on, and inductor compiles for the CPU with g++",
)
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
    from dataclasses import replace

    monkeypatch.chdir(tmp_path)
    if variable:
        monkeypatch.setenv(variable, "1")
    command = replace(parse_command(["python", SCRIPT]), world=world, environment=torchrun_variables(world, world, 0))
    outcome = trace_script(TraceRequest(command=command, device="cpu", memory_bytes=8 << 30, batches=1000))
    assert outcome.error is None, outcome.error.text
    assert outcome.bare is not None
    traced = live_peaks(outcome.bare)["train"]
    really = real_peak(world, ",".join(sorted(operator_names(outcome.bare))))
    assert traced == pytest.approx(really, rel=BOUND)


def real_peak(world: int, operators: str) -> int:
    """The largest bytes of live tensors of training, of rank 0 of real processes on gloo."""
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        port = str(opened.getsockname()[1])
    ranks = []
    path = os.pathsep.join((str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")))
    for rank in range(world):
        environment = {
            **os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
            **torchrun_variables(world, world, rank), "MASTER_PORT": port,
        }  # fmt: skip
        run = [sys.executable, str(HERE / "run_for_real.py"), f"real{rank}.json", operators, SCRIPT]
        ranks.append(
            subprocess.Popen(run, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        )
    said = [each.communicate(timeout=900)[0] for each in ranks]
    assert all(each.returncode == 0 for each in ranks), said
    peaks: dict[str, int] = json.loads(Path("real0.json").read_text())
    return peaks["train"]
