"""Runs of ``memfit run`` that are attacked and resumed: for tests and for bench/attack.py.

A case is a job on an engine, and a schedule of launches drawn by chance. Each launch but the last is disturbed, or what
it left is damaged; the last is not, and has to end like a run that never was.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from testing.small_disk import CannotMountError, Disk, small_disk

ROOT = Path(__file__).parents[1]
JOBS = Path(__file__).parent / "attacked_job.py"
KINDS = {
    "plain": ("Plain", 1, "single"),
    "dropout": ("Dropout", 1, "single"),
    "average": ("Average", 1, "single"),
    "gan": ("Gan", 1, "single"),
    "workers": ("Workers", 1, "single"),
    "ddp": ("Average", 2, "ddp"),
    "fsdp2": ("Validated", 2, "fsdp2"),
    "zero1": ("Average", 2, "zero1"),
    "zero2": ("Plain", 2, "zero2"),
    "zero3": ("Dropout", 2, "zero3"),
}
DISTURBANCES = (
    "kill", "kill worker", "terminate", "interrupt", "interrupt all", "pause", "full disk", "no inodes",
    "read-only disk", "slow disk", "clock",
)  # fmt: skip
DISK_DISTURBANCES = ("full disk", "no inodes", "read-only disk")
DAMAGES = (
    "nothing", "checkpoint byte", "checkpoint cut", "manifest gone", "metrics cut", "metrics line", "samples",
    "temporary file", "small files", "outcome",
)  # fmt: skip
ENDED = 15.0
"""Seconds within which a launch that was told to stop has ended: 10 on a machine with nothing else to do."""
MOST = 240.0
UNHEARD = 1.0
"""Seconds in which Python itself starts, and a signal ends it without a line."""


class AttackError(AssertionError):
    """An invariant that does not hold."""


@dataclass(kw_only=True)
class Launch:
    """What happens to one launch, and to what it left."""

    disturbance: str
    after: float
    """Seconds from its start, as a part of an undisturbed run's."""
    damage: str


@dataclass(kw_only=True)
class Case:
    """A job, an engine, and launches."""

    number: int
    kind: str
    launches: list[Launch] = field(default_factory=list)


def draw_case(seed: int, number: int, kinds: tuple[str, ...] = tuple(KINDS)) -> Case:
    """The case of a number: the same for the same seed.

    Cases in a row go through all kinds and, in their first launch, through all disturbances of each kind; damages
    follow in another order. Further launches are drawn.
    """
    chance = random.Random(f"{seed} {number}")
    turn, place = divmod(number, len(kinds))
    launches = [
        Launch(
            disturbance=DISTURBANCES[(turn + place) % len(DISTURBANCES)],
            after=chance.uniform(0.2, 1.0),
            damage=DAMAGES[(turn + 3 * place + seed) % len(DAMAGES)],
        )
    ]
    for _ in range(chance.choice((0, 0, 0, 0, 1, 2))):
        drawn = {"disturbance": chance.choice(DISTURBANCES), "damage": chance.choice(DAMAGES)}
        launches.append(Launch(after=chance.uniform(0.0, 1.1), **drawn))
    return Case(number=number, kind=kinds[place], launches=launches)


class Attacker:
    """Plans and undisturbed runs, each made once, and cases against them."""

    def __init__(self, base: Path) -> None:
        base.mkdir(parents=True, exist_ok=True)
        self.base, self._log = base, base / "log.txt"
        self._made: dict[str, tuple[Path, Path, float]] = {}

    def attack(self, case: Case) -> None:
        """Runs a case.

        Raises:
            AttackError: an invariant does not hold; says which, and after which launch.
            CannotMountError: the case disturbs a disk, and none can be mounted here.
        """
        plan, undisturbed, seconds = self._undisturbed(case.kind)
        place = self.base / f"case-{case.number}"
        with small_disk(place) as disk:
            if not disk.mounted and any(launch.disturbance in DISK_DISTURBANCES for launch in case.launches):
                raise CannotMountError("no small file system can be mounted here, so none can be spoiled; root may")
            run, chance, lost = place / "run", random.Random(case.number), False
            for launch in case.launches:
                with self._naming(case, launch):
                    code = self._launch(plan, run, disk, launch, seconds, chance)
                    if code == 0:
                        _same_end(run, undisturbed, metrics=not lost)
                    elif launch.disturbance not in ("kill", "read-only disk"):  # nothing can remove a file there
                        _nothing_temporary(run)
                    disk.restore()
                    _damage(run, launch.damage, chance)
                    lost = lost or launch.damage in ("metrics cut", "metrics line")
            with self._naming(case, Launch(disturbance="none", after=0, damage="nothing")):
                code, said = _run(plan, run, self._log, {}, lambda process: None)
                _require(code == 0, f"undisturbed, it ends with {code}: {said[-400:]}")
                _same_end(run, undisturbed, metrics=not lost)
        shutil.rmtree(place, ignore_errors=True)

    def _launch(self, plan: Path, run: Path, disk: Disk, launch: Launch, seconds: float, chance: random.Random) -> int:
        after = launch.after * seconds
        environment = {}
        if launch.disturbance == "slow disk":
            environment["ATTACK_DISK"] = "0.3"
        elif launch.disturbance == "clock":
            environment["ATTACK_CLOCK"] = "1"

        def disturb(process: subprocess.Popen[bytes]) -> None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(after)
                return
            _sockets_on_loopback(process.pid)
            match launch.disturbance:
                case "kill":
                    process.kill()
                case "kill worker":
                    if processes := launched_processes(process.pid):
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(chance.choice(processes), signal.SIGKILL)
                case "terminate" | "interrupt":
                    process.send_signal(signal.SIGTERM if launch.disturbance == "terminate" else signal.SIGINT)
                    _ends(process)
                case "interrupt all":
                    os.killpg(process.pid, signal.SIGINT)
                    _ends(process)
                case "pause":
                    os.killpg(process.pid, signal.SIGSTOP)
                    time.sleep(1.0)
                    os.killpg(process.pid, signal.SIGCONT)
                case "full disk" | "no inodes" | "read-only disk":
                    disk.spoil(launch.disturbance)

        code, said = _run(plan, run, self._log, environment, disturb)
        allowed = {0, 5}
        if launch.disturbance == "kill":
            allowed |= {-signal.SIGKILL}
        if launch.disturbance in ("full disk", "no inodes", "read-only disk"):
            allowed |= {2}
        if launch.disturbance in ("terminate", "interrupt", "interrupt all") and after < UNHEARD:
            allowed |= {-signal.SIGINT, -signal.SIGTERM} if not said else set()
        _require(code in allowed, f"exit code {code}: {said[-600:]}")
        done = code == 0 or (code == -signal.SIGKILL and (run / "final").is_dir())  # killed while it wrote the report
        _require(code == -signal.SIGKILL or done == ("Done" in said), f"exit code {code}, and it says {said[-300:]}")
        _require(done or "Done" not in said, f"exit code {code}, and it says {said[-300:]}")
        last = next((line for line in reversed(said.splitlines()) if line.strip()), "")
        _require(code not in (2, 5) or last.startswith("memfit: "), f"exit code {code}, and its last line is {last!r}")
        if launch.disturbance != "kill":
            _require("Traceback" not in said, f"a traceback: {said[-1500:]}")
            _require("frame #" not in said, f"frames of C++: {said[-1500:]}")
        return 0 if "Done" in said else code

    def _undisturbed(self, kind: str) -> tuple[Path, Path, float]:
        if kind not in self._made:
            plan, run = self.base / f"{kind}.toml", self.base / f"{kind}-undisturbed"
            make_plan(kind, plan)
            begin = time.monotonic()
            code, said = _run(plan, run, self._log, {}, lambda process: None)
            _require(code == 0, f"undisturbed, {kind} ends with {code}: {said[-600:]}")
            self._made[kind] = plan, run, time.monotonic() - begin
        return self._made[kind]

    @contextlib.contextmanager
    def _naming(self, case: Case, launch: Launch) -> Iterator[None]:
        try:
            yield
        except AssertionError as error:
            raise AttackError(f"{case.kind}, {launch.disturbance}, then {launch.damage}: {error}") from error


def make_plan(kind: str, path: Path, **settings: Any) -> None:
    """A plan of a kind's job, three micro-batches in a window.

    Args:
        settings: of the job, other than its own.
    """
    from memfit.loading import load_job
    from memfit.plan import Plan, write_plan

    name, ranks, engine = KINDS[kind]
    job = f"{JOBS}:{name}"
    sizes = [[6, 6, 4]] if ranks == 1 else [[4, 4], [4, 4]]
    plan = Plan(
        job=job, settings=load_job(job, settings).settings(), device="cpu",
        budget_bytes=512 << 20, unit="samples", global_batch=16,
        micro_batch=max(max(sizes)), micro_batches=sizes, arithmetic="16", engine=engine, precision="fp32", seed=0,
    )  # fmt: skip
    plan = replace(plan, settings={name: value for name, value in plan.settings.items() if value is not None})
    write_plan(plan, path)


def run_plan(
    plan: Path,
    run: Path,
    save_every: int = 0,
    environment: dict[str, str] | None = None,
    disturb: Callable[[subprocess.Popen[bytes]], None] = lambda process: None,
) -> tuple[int, str]:
    """A launch: its exit code and what it said."""
    return _run(plan, run, run.with_suffix(".log"), environment or {}, disturb, save_every)


def _run(
    plan: Path,
    run: Path,
    said: Path,
    environment: dict[str, str],
    disturb: Callable[[subprocess.Popen[bytes]], None],
    save_every: int = 0,
) -> tuple[int, str]:
    """A launch to its end: the exit code and what it said, once no process of it is left."""
    mark = f"{run}-{time.monotonic_ns()}"
    temporary = said.parent / "temporary"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    everything = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "ATTACK_MARK": mark}
    everything |= {"TMPDIR": str(temporary), **environment}
    arguments = [sys.executable, "-m", "memfit", "run", str(plan), "--out", str(run), "--resume"]
    arguments += ["--save-every", str(save_every)]
    with open(said, "wb") as log:
        process = subprocess.Popen(arguments, env=everything, stdout=log, stderr=log, start_new_session=True, cwd=ROOT)
        try:
            disturb(process)
            process.wait(MOST)
        except subprocess.TimeoutExpired:
            raise AttackError(f"it does not end in {MOST:.0f} s") from None
        finally:
            left = _left(mark, 0.0 if process.poll() is None else 10.0)
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()
    _require(not left, f"{len(left)} processes are left")
    files = [path.name for path in temporary.iterdir() if not path.name.startswith("torchinductor_")]
    _require(not files, f"temporary files are left: {files}")
    return process.returncode, said.read_text(errors="replace")


def _ends(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(ENDED)
    except subprocess.TimeoutExpired:
        raise AttackError(f"told to stop, it does not end in {ENDED:.0f} s") from None


def _left(mark: str, patience: float) -> list[int]:
    """Processes of a launch, after so many seconds in which they may end."""
    until = time.monotonic() + patience
    while True:
        left = []
        for place in Path("/proc").iterdir():
            if place.name.isdecimal():
                with contextlib.suppress(OSError):
                    state = (place / "stat").read_text().rpartition(")")[2].split()[0]
                    if state != "Z" and f"ATTACK_MARK={mark}".encode() in (place / "environ").read_bytes():
                        left.append(int(place.name))
        if not left or time.monotonic() > until:
            return left
        time.sleep(0.1)


def launched_processes(pid: int) -> list[int]:
    """Children of a process."""
    processes = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            processes += [int(child) for child in (task / "children").read_text().split()]
    return processes


def _sockets_on_loopback(pid: int) -> None:
    """Requires that a launch's processes listen on loopback alone."""
    inodes = set()
    for process in (pid, *launched_processes(pid)):
        with contextlib.suppress(OSError):
            for descriptor in Path(f"/proc/{process}/fd").iterdir():
                with contextlib.suppress(OSError):
                    inodes.add(os.readlink(descriptor))
    for table, loopback in (("tcp", "0100007F"), ("tcp6", "00000000000000000000000001000000")):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            local, state, inode = (line.split()[place] for place in (1, 3, 9))
            if state == "0A" and f"socket:[{inode}]" in inodes:
                _require(local.startswith(loopback), f"a socket listens on {local}")


def _damage(run: Path, how: str, chance: random.Random) -> None:
    """What somebody or a crash did to a run's folder between two launches."""
    checkpoints = sorted((run / "checkpoints").glob("[0-9]*")) if (run / "checkpoints").is_dir() else []
    if how in ("checkpoint byte", "checkpoint cut", "manifest gone"):
        if len(checkpoints) < 2:
            return
        files = [file for file in sorted(checkpoints[-1].rglob("*")) if file.is_file()]
        path = chance.choice(files)
        if how == "manifest gone":
            (checkpoints[-1] / "manifest.json").unlink()
        elif how == "checkpoint cut":
            os.truncate(path, path.stat().st_size // 2)
        else:
            content = bytearray(path.read_bytes())
            content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
            path.write_bytes(content)
    elif how == "temporary file" and (run / "checkpoints").is_dir():
        (run / "checkpoints" / ".00000099.1").mkdir(exist_ok=True)
        (run / "checkpoints" / ".00000099.1" / "state.safetensors").write_bytes(b"half")
    elif how == "small files":
        for name in ("window_range.json", "reduced_limits.json"):
            (run / name).write_bytes(chance.choice((b"", b"[", b"{}", b"[1]", b"\xff")))
    elif how == "outcome":
        (run / ".ended-once").write_text(json.dumps({"code": 0, "windows": 20, "trained": 20}))
    elif how.startswith("metrics") or how == "samples":
        path = run / ("samples.jsonl" if how == "samples" else "metrics.jsonl")
        if path.exists() and how == "metrics line":
            with open(path, "ab") as file:
                file.write(chance.choice((b"{}\n", b"[]\n", b"\xff\xfe\n", b'{"window": 3\n')))
        elif path.exists() and how == "metrics cut":
            os.truncate(path, path.stat().st_size * 2 // 3)
        elif path.exists():
            with open(path, "ab") as file:
                file.write(b'{"window": 9')


def _same_end(run: Path, undisturbed: Path, *, metrics: bool = True) -> None:
    """Weights byte for byte, each sample once and the same, no file left that is of no use."""
    for path in sorted((undisturbed / "final").iterdir()):
        _require((run / "final" / path.name).read_bytes() == path.read_bytes(), f"final/{path.name} differs")
    samples = [_samples(folder) for folder in (run, undisturbed)]
    _require(samples[0] == samples[1], f"samples differ: {len(samples[0])} lines for {len(samples[1])}")
    if metrics:
        losses = [_losses(folder) for folder in (run, undisturbed)]
        _require(losses[0] == losses[1], "losses differ")
    _nothing_temporary(run)


def _nothing_temporary(run: Path) -> None:
    left = [str(path.relative_to(run)) for path in run.rglob(".*") if path.name != ".memfit-run"]
    _require(not left, f"files are left: {left}")


def _losses(run: Path) -> list[dict[str, float]]:
    return [json.loads(line)["losses"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def _samples(run: Path) -> list[tuple[int, int, tuple[int, ...]]]:
    lines = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    return sorted((line["window"], line["rank"], tuple(line["ids"])) for line in lines)


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise AttackError(what)
