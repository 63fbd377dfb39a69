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

ROOT = Path(__file__).parents[2]
JOBS = Path(__file__).parent / "attacked_job.py"
KINDS = {
    "plain": ("Plain", 1, "single"),
    "dropout": ("Dropout", 1, "single"),
    "average": ("Average", 1, "single"),
    "gan": ("Gan", 1, "single"),
    "ddp": ("Average", 2, "ddp"),
    "fsdp2": ("Plain", 2, "fsdp2"),
    "zero2": ("Plain", 2, "zero2"),
}
DISTURBANCES = (
    "kill", "kill worker", "terminate", "interrupt", "interrupt all", "pause", "full disk", "no inodes",
    "read-only disk",
    "slow disk", "clock",
)  # fmt: skip
DAMAGES = (
    "nothing", "nothing", "checkpoint byte", "checkpoint cut", "manifest gone", "metrics cut", "metrics line",
    "samples",
    "temporary file",
)  # fmt: skip
ENDED = 30.0
"""Seconds within which a launch that was told to stop has ended; two ranks on a busy machine take longest."""
MOST = 240.0


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
    """The case of a number: the same for the same seed."""
    chance = random.Random(f"{seed} {number}")
    launches = [
        Launch(disturbance=chance.choice(DISTURBANCES), after=chance.uniform(0.0, 1.1), damage=chance.choice(DAMAGES))
        for _ in range(chance.choice((1, 1, 2, 3)))
    ]
    return Case(number=number, kind=chance.choice(kinds), launches=launches)


class Attacker:
    """Plans and undisturbed runs, each made once, and cases against them."""

    def __init__(self, base: Path) -> None:
        self.base, self._log = base, base / "log.txt"
        self._whole: dict[str, tuple[Path, Path, float]] = {}

    def attack(self, case: Case) -> None:
        """Runs a case.

        Raises:
            AttackError: an invariant does not hold; says which, and after which launch.
        """
        plan, whole, seconds = self._undisturbed(case.kind)
        place = self.base / f"case-{case.number}"
        with _disk(place) as disk:
            run, chance, lost = place / "run", random.Random(case.number), False
            for launch in case.launches:
                with self._naming(case, launch):
                    code = self._launch(plan, run, disk, launch, seconds)
                    if code == 0:
                        _same_end(run, whole, metrics=not lost)
                    disk.restore()
                    _damage(run, launch.damage, chance)
                    lost = lost or launch.damage in ("metrics cut", "metrics line")
            with self._naming(case, Launch(disturbance="none", after=0, damage="nothing")):
                code, said = _run(plan, run, self._log, {}, lambda process: None)
                _require(code == 0, f"undisturbed, it ends with {code}: {said[-400:]}")
                _same_end(run, whole, metrics=not lost)
        shutil.rmtree(place, ignore_errors=True)

    def _launch(self, plan: Path, run: Path, disk: Disk, launch: Launch, seconds: float) -> int:
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
            match launch.disturbance:
                case "kill":
                    process.kill()
                case "kill worker":
                    for pid in _children(process.pid):
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(pid, signal.SIGKILL)
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
        if launch.disturbance in ("terminate", "interrupt", "interrupt all"):
            allowed |= {-signal.SIGINT, -signal.SIGTERM} if not said else set()
        _require(code in allowed, f"exit code {code}: {said[-600:]}")
        _require(("Done" in said) == (code == 0), f"exit code {code}, and it says {said[-300:]}")
        _require(code not in (2, 5) or "memfit: " in said, f"exit code {code} without a line: {said[-300:]!r}")
        if launch.disturbance != "kill":
            _require("Traceback" not in said, f"a traceback: {said[-1500:]}")
        return code

    def _undisturbed(self, kind: str) -> tuple[Path, Path, float]:
        if kind not in self._whole:
            plan, run = self.base / f"{kind}.toml", self.base / f"{kind}-whole"
            make_plan(kind, plan)
            begin = time.monotonic()
            code, said = _run(plan, run, self._log, {}, lambda process: None)
            _require(code == 0, f"undisturbed, {kind} ends with {code}: {said[-600:]}")
            self._whole[kind] = plan, run, time.monotonic() - begin
        return self._whole[kind]

    @contextlib.contextmanager
    def _naming(self, case: Case, launch: Launch) -> Iterator[None]:
        try:
            yield
        except AssertionError as error:
            raise AttackError(f"{case.kind}, {launch.disturbance}, then {launch.damage}: {error}") from error


def make_plan(kind: str, path: Path) -> None:
    """A plan of a kind's job, three micro-batches in a window."""
    from memfit.loading import load_job
    from memfit.plan import Plan, write_plan

    name, ranks, engine = KINDS[kind]
    job = f"{JOBS}:{name}"
    sizes = [[6, 6, 4]] if ranks == 1 else [[4, 4], [4, 4]]
    plan = Plan(
        job=job, settings=load_job(job).settings(), device="cpu",
        budget_bytes=512 << 20, unit="samples", global_batch=16,
        micro_batch=max(max(sizes)), micro_batches=sizes, arithmetic="16", engine=engine, precision="fp32", seed=0,
    )  # fmt: skip
    plan = replace(plan, settings={name: value for name, value in plan.settings.items() if value is not None})
    write_plan(plan, path)


def _run(
    plan: Path, run: Path, said: Path, environment: dict[str, str], disturb: Callable[[subprocess.Popen[bytes]], None]
) -> tuple[int, str]:
    """A launch to its end: the exit code and what it said, once no process of it is left."""
    mark = f"{run}-{time.monotonic_ns()}"
    everything = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "ATTACK_MARK": mark, **environment}
    arguments = [sys.executable, "-m", "memfit", "run", str(plan), "--out", str(run), "--resume", "--save-every", "0"]
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
        found = []
        for place in Path("/proc").iterdir():
            if place.name.isdecimal():
                with contextlib.suppress(OSError):
                    state = (place / "stat").read_text().rpartition(")")[2].split()[0]
                    if state != "Z" and f"ATTACK_MARK={mark}".encode() in (place / "environ").read_bytes():
                        found.append(int(place.name))
        if not found or time.monotonic() > until:
            return found
        time.sleep(0.1)


def _children(pid: int) -> list[int]:
    found = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += [int(child) for child in (task / "children").read_text().split()]
    return found


class Disk:
    """A small file system of its own, where one can be mounted."""

    def __init__(self, path: Path, mounted: bool) -> None:
        self._path, self._mounted = path, mounted
        self._ballast = path / "ballast"

    def spoil(self, how: str) -> None:
        """Fills it, takes its inodes, or makes it read-only."""
        if not self._mounted:
            return
        if how == "read-only disk":
            self._remount("ro")
        elif how == "no inodes":
            self._remount("nr_inodes=1")
            with contextlib.suppress(OSError):
                self._ballast.mkdir(exist_ok=True)
                for number in range(100_000):
                    (self._ballast / str(number)).touch()
        else:
            with contextlib.suppress(OSError), open(self._ballast, "wb") as file:
                while True:
                    file.write(b"0" * 4096)
                    file.flush()

    def restore(self) -> None:
        """As it was before, with what was written into it."""
        if not self._mounted:
            return
        self._remount("rw")
        if self._ballast.is_dir():
            shutil.rmtree(self._ballast)
        self._ballast.unlink(missing_ok=True)

    def _remount(self, option: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{option}", str(self._path)], check=False, capture_output=True)


@contextlib.contextmanager
def _disk(path: Path) -> Iterator[Disk]:
    path.mkdir(parents=True)
    options = ["-o", "size=24m,nr_inodes=2000"]
    made = subprocess.run(["mount", "-t", "tmpfs", *options, "tmpfs", str(path)], capture_output=True, check=False)
    try:
        yield Disk(path, made.returncode == 0)
    finally:
        if made.returncode == 0:
            subprocess.run(["umount", "-l", str(path)], check=False)


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


def _same_end(run: Path, whole: Path, *, metrics: bool = True) -> None:
    """Weights byte for byte, each sample once and the same, no file left that is of no use."""
    for path in sorted((whole / "final").iterdir()):
        _require((run / "final" / path.name).read_bytes() == path.read_bytes(), f"final/{path.name} differs")
    samples = [_samples(folder) for folder in (run, whole)]
    _require(samples[0] == samples[1], f"samples differ: {len(samples[0])} lines for {len(samples[1])}")
    if metrics:
        losses = [_losses(folder) for folder in (run, whole)]
        _require(losses[0] == losses[1], "losses differ")
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
