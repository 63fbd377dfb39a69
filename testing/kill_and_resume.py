"""Runs that are killed with SIGKILL and resumed: for tests and for bench/kills.py.

A server imports torch and memfit once, and forks a process for each run: the same child that ``memfit run`` starts,
real and killed for real, without three seconds of imports each time. No thread runs in the server when it forks.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memfit.plan import Plan

ROOT = Path(__file__).parents[1]
JOB = f"{Path(__file__).parent}/killed_job.py:Killed"


def serve() -> None:
    """For each line ``{"options", "log", "kill_after", "stop"}`` forks a child; answers with its exit status and
    seconds."""
    from memfit.garbage import freeze_loaded
    from memfit.loading import load_job
    from memfit.planner.predict import plain_nets
    from memfit.train.launch import watchdog, worker
    from memfit.train.run_options import RunOptions

    plain_nets(load_job(JOB))
    freeze_loaded()
    for line in sys.stdin:
        asked = json.loads(line)
        begin = time.monotonic()
        pid = os.fork()
        if pid == 0:
            log = os.open(asked["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 2)
            code = 1
            if asked["stop"]:
                os.environ["SLOW"] = asked["stop"]["place"]
            if asked["end_seconds"]:
                watchdog.END_SECONDS = asked["end_seconds"]
            try:
                code = worker.main(RunOptions(**asked["options"]))
            except SystemExit as ended:
                code = int(ended.code)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        if asked["stop"]:
            stop(pid, **asked["stop"])
        if asked["kill_after"] is not None:
            time.sleep(asked["kill_after"])
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        seconds = time.monotonic() - begin
        print(json.dumps({"code": os.waitstatus_to_exitcode(status), "seconds": seconds}), flush=True)


def stop(pid: int, *, folder: str, place: str, number: int, lasts: float) -> None:
    """Waits until a child has written ``reached`` into the folder, tells it to stop, and takes ``wait`` away later."""
    until = time.monotonic() + 120
    while not (Path(folder) / "reached").exists() and time.monotonic() < until:
        time.sleep(0.02)
    os.kill(pid, number)
    time.sleep(lasts)
    (Path(folder) / "wait").unlink()


class Server:
    """The forking process."""

    def __init__(self) -> None:
        from memfit.train.launch.memory_limit import ENVIRONMENT

        environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", "from testing.kill_and_resume import serve; serve()"]
        self._process = subprocess.Popen(
            command, env=environment, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(
        self,
        folder: Path,
        *,
        resume: bool,
        kill_after: float | None = None,
        windows: int = 0,
        keep: int = 2,
        log: Path | None = None,
        stop: dict[str, Any] | None = None,
        more: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """One process of a run: saved after every window. ``kill_after``: seconds, None: to its end. ``stop``: see
        ``stop``. ``more``: further options of the run, and ``end_seconds`` after a signal."""
        more = more or {}
        options = {"folder": str(folder), "windows": windows or None, "resume": resume, "keep": keep, "save_every": 0.0}
        options |= {name: value for name, value in more.items() if name != "end_seconds"}
        asked = {"options": options, "log": str(log or folder / "log.txt"), "kill_after": kill_after}
        asked |= {"stop": stop, "end_seconds": more.get("end_seconds")}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


@contextlib.contextmanager
def server() -> Iterator[Server]:
    process = Server()
    try:
        yield process
    finally:
        process.close()


@dataclass(kw_only=True)
class Count:
    """What happened over all runs."""

    kills: int = 0
    while_saving: int = 0
    """Kills that left a checkpoint half-written beside its place."""
    finished: int = 0
    passed_over: int = 0
    """Torn checkpoints met when resuming."""
    repeated: int = 0
    """Windows trained again."""


def make_plan(folder: Path, writing: str) -> Path:
    """A plan of the job in three micro-batches."""
    from memfit.plan import write_plan

    write_plan(replace(planned(), checkpoint_writing=writing), folder / "plan.toml")
    return folder / "plan.toml"


@cache
def planned() -> Plan:
    """The job's plan, made once in a process."""
    from memfit.device.hardware.catalogue import with_memory
    from memfit.device.hardware.local_devices import local_cpu
    from memfit.loading import load_job
    from memfit.planner.request import PlanRequest
    from memfit.planner.search.search import find_plan

    device = with_memory(local_cpu(), 128 << 20)
    answer = find_plan(load_job(JOB), PlanRequest(name=JOB, global_batch=16, device=device, micro_batch=6))
    assert answer.plan is not None
    return answer.plan


def new_run(folder: Path, plan: Path) -> Path:
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "plan.toml").write_bytes(plan.read_bytes())
    return folder


def kill_and_resume(server_process: Server, base: Path, plan: Path, kills: int, chance: random.Random) -> Count:
    """Kills runs at random moments and resumes them until so many kills and the last run's end; checks each.

    Raises:
        AssertionError: a run's end differs from the undisturbed run's, or a checkpoint under its name is torn.
    """
    from memfit.train.checkpoint.checkpoints import Checkpoints, read_checkpoint

    undisturbed = new_run(base / "undisturbed", plan)
    ended = server_process.run(undisturbed, resume=False)
    assert ended["code"] == 0, (undisturbed / "log.txt").read_text()
    count, number = Count(), 0
    while count.kills < kills:
        run = new_run(base / f"killed-{number}", plan)
        number += 1
        resume = False
        while True:
            after = chance.uniform(0, ended["seconds"]) if count.kills < kills else None
            code = server_process.run(run, resume=resume, kill_after=after)["code"]
            resume = True
            if code == 0:
                break
            assert code == -signal.SIGKILL, (run / "log.txt").read_text()
            count.kills += 1
            count.while_saving += any(entry.name.startswith(".0") for entry in (run / "checkpoints").iterdir())
            checkpoints = Checkpoints(run / "checkpoints")
            for window in checkpoints.numbers():
                read_checkpoint(checkpoints.folder(window))
            if (run / "samples.jsonl").exists():
                done = len((run / "samples.jsonl").read_text().splitlines())
                count.repeated += done - next(iter(checkpoints.numbers()), 0)
        count.finished += 1
        count.passed_over += (run / "log.txt").read_text().count("torn")
        same_end(run, undisturbed)
    return count


def same_end(run: Path, undisturbed: Path) -> None:
    """Final weights byte for byte; each (window, rank) once, with the same samples; the same losses."""
    for path in sorted((undisturbed / "final").iterdir()):
        assert (run / "final" / path.name).read_bytes() == path.read_bytes(), path.name
    assert (run / "samples.jsonl").read_text() == (undisturbed / "samples.jsonl").read_text()
    lines = [(folder / "metrics.jsonl").read_text().splitlines() for folder in (run, undisturbed)]
    losses = [[json.loads(line)["losses"] for line in each] for each in lines]
    assert losses[0] == losses[1]
