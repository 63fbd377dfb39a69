"""Nothing that a script writes lasts, and it has no network."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from memfit.script import namespaces, sandbox

ENTER = """
import fcntl, json, os, shutil, socket, sys, termios
from pathlib import Path
from memfit.script.sandbox import SandboxError, changes, enter_sandbox

scratch, folder, port, writable = sys.argv[1:5]
try:
    layers = enter_sandbox(Path(scratch), writable=[Path(writable)])
except SandboxError as error:
    print("NONE", error)
    sys.exit()
child = os.fork()
if child == 0:
    for layer in layers:
        os.close(layer.descriptor)
    failed = []

    def attempt(name, call):
        try:
            call()
        except OSError as error:
            failed.append(name)

    Path(folder, "checkpoint.pt").write_text("overwritten")
    shutil.rmtree(Path(folder, "run"))
    Path(folder, "new").write_text("new")
    Path.home().joinpath(".memfit-break-out").write_text("out")
    Path(writable, "kept").write_text("kept")
    attempt("network", lambda: socket.create_connection(("192.0.2.1", 80), 2))
    attempt("host", lambda: socket.create_connection(("127.0.0.1", int(port)), 2))
    attempt("service", lambda: socket.socket(socket.AF_UNIX).connect(os.path.join(folder, "service")))
    attempt("chroot", lambda: os.chroot("/"))
    attempt("kill", lambda: os.kill(int(sys.argv[5]), 0))
    setting = Path("/proc/sys/vm/swappiness")
    attempt("setting", lambda: setting.write_text(setting.read_text()))
    for point in json.loads(sys.argv[6]):
        attempt(point, lambda: Path(point, "made-by-a-script").touch())
    attempt("terminal", lambda: fcntl.ioctl(int(sys.argv[7]), termios.TIOCSTI, b"x"))
    attempt("device", lambda: os.utime("/dev/null"))
    Path("/dev/null").write_text("taken")
    Path(folder, "closed", "new").write_text("new") if os.getuid() == 0 else None
    print("FAILED", json.dumps(failed), flush=True)
    os._exit(0)
os.waitpid(child, 0)
print("CHANGED", json.dumps([[one.path, one.deleted] for one in changes(layers)]))
"""


@pytest.mark.skipif(not namespaces.is_supported(), reason="there are no namespaces on this system")
def test_what_a_script_writes_vanishes_and_it_reaches_nothing(tmp_path: Path) -> None:
    folder, scratch, writable = tmp_path / "folder", tmp_path / "scratch", tmp_path / "writable"
    for made in (folder / "run", folder / "closed", scratch, writable):
        made.mkdir(parents=True)
    (folder / "closed").chmod(0o555)
    system = [mounted.point for mounted in sandbox._mounts() if mounted.point.startswith(("/sys/", "/proc/"))]
    (folder / "checkpoint.pt").write_text("precious")
    (folder / "run" / "log").write_text("precious")
    listening = socket.create_server(("127.0.0.1", 0))
    service = socket.socket(socket.AF_UNIX)
    here = os.open(folder, os.O_RDONLY)
    _, terminal = os.openpty()
    service.bind(f"/proc/self/fd/{here}/service")
    service.listen()
    done = subprocess.run(
        [
            sys.executable, "-c", ENTER, str(scratch), str(folder), str(listening.getsockname()[1]), str(writable),
            str(os.getpid()), json.dumps(system), str(terminal),
        ],
        capture_output=True, text=True, check=True, pass_fds=(terminal,),
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )  # fmt: skip
    listening.close()
    service.close()
    os.close(here)
    said = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    if "NONE" in said:
        pytest.skip(said["NONE"])
    assert (folder / "checkpoint.pt").read_text() == "precious"
    assert (folder / "run" / "log").read_text() == "precious"
    assert not (folder / "new").exists()
    assert not (Path.home() / ".memfit-break-out").exists()
    assert (writable / "kept").read_text() == "kept"
    assert set(json.loads(said["FAILED"])) >= {
        "network", "host", "service", "chroot", "kill", "setting", "terminal", "device", *system,
    }  # fmt: skip
    changed = dict(json.loads(said["CHANGED"]))
    assert changed[str(folder / "checkpoint.pt")] is False
    assert changed[str(folder / "new")] is False
    assert changed[str(folder / "run")] is True


def test_a_folder_whose_name_is_no_text_is_mounted(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[object, ...]] = []

    class Library:
        def mount(self, *arguments: object) -> int:
            asked.append(arguments)
            return 0

    monkeypatch.setattr(namespaces, "_libc", Library)
    namespaces.mount(os.fsdecode(b"/data/\xff"), "/tree", "overlay", 0, os.fsdecode(b"lowerdir=/data/\xff"))
    assert asked[0][:3] == (b"/data/\xff", b"/tree", b"overlay")
    assert asked[0][4] == b"lowerdir=/data/\xff"


@pytest.mark.parametrize("name", ["données", "a b", "back\\slash", os.fsdecode(b"\xff")])
def test_a_mount_point_keeps_its_name(name: str) -> None:
    escaped = os.fsencode(name).replace(b"\\", rb"\134").replace(b" ", rb"\040")
    assert sandbox._unescaped(escaped) == name
