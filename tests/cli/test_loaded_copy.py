"""A copy of the process that answered has the job loaded: it traces what the next question needs, and ends by itself.

python -m pytest tests/cli/test_loaded_copy.py
"""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest

from memfit.cli.loaded_copy import serve
from memfit.device.hardware.process_limits import available_cores
from memfit.forked_process import is_forkable
from memfit.job import Shape
from memfit.planner import hand_over
from memfit.planner.hand_over import HandedOver, LoadedElsewhere
from tests.cli.asking import ROOT
from tests.cli.test_background_traces import JOB, answers, environment

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="copies are made on Linux alone")
FIRST = ("predict", "job.py:Own", "--device", "rtx4090", "--json")
SECOND = (*FIRST, "--micro-batch", "7")
NOTHING_KEPT = Mock(return_value=False)
STEP = HandedOver(shape=Shape(items=7), device="rtx4090", changes={}, derive=True, choices={"checkpointing": {}})


@pytest.fixture
def folder(tmp_path):
    """A job that stands in its batch of two items, which only the background asks for, while a file is there."""
    (tmp_path / "job.py").write_text(f"open('imported', 'a').write('once ')\n{JOB}")
    (tmp_path / "samples").mkdir()
    (tmp_path / "slow").touch()
    yield tmp_path
    (tmp_path / "slow").unlink(missing_ok=True)
    for process in those_in(tmp_path):
        process.kill()


def those_in(folder: Path) -> list[psutil.Process]:
    """The processes that work in a folder."""
    processes = []
    for process in psutil.process_iter():
        try:
            if process.cwd() == str(folder) and process.status() != psutil.STATUS_ZOMBIE:
                processes.append(process)
        except psutil.Error:
            continue
    return processes


def asked(folder: Path, *words: str, **options: object) -> subprocess.CompletedProcess[str]:
    """A question, for whose streams nobody waits longer than for its process."""
    return subprocess.run(
        [sys.executable, "-m", "memfit", *words], cwd=folder, env=environment(folder, MEMFIT_TRACE_AHEAD="1"),
        capture_output=True, text=True, timeout=120, **options,
    )  # fmt: skip


def imports(folder: Path) -> int:
    """How often the job was imported."""
    return (folder / "imported").read_text().count("once")


def wait_for(condition, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def sockets(folder: Path) -> list[Path]:
    """The sockets at which a copy listens."""
    return list((folder / "cache" / "memfit" / "traces").glob("*.socket"))


def test_the_next_question_is_traced_without_loading_the_job_again(folder):
    assert asked(folder, *FIRST).returncode == 0
    wait_for(lambda: sockets(folder))
    (path,) = sockets(folder)
    assert path.stat().st_mode & 0o077 == 0  # nobody else may connect
    second = asked(folder, *SECOND)
    assert (second.returncode, imports(folder)) == (0, 1)
    (folder / "slow").unlink()
    fresh = asked(folder, *SECOND, "--fresh")
    assert imports(folder) == 2
    assert answers(second.stdout) == answers(fresh.stdout)


def test_the_next_question_needs_no_setup(folder):
    """The copy has set the job up while the first question was answered."""
    text = (folder / "job.py").read_text()
    setup = "        open('setups', 'a').write('once ')\n        return {\"net\": torch.optim.SGD"
    (folder / "job.py").write_text(text.replace('        return {"net": torch.optim.SGD', setup))
    assert asked(folder, *FIRST).returncode == 0
    wait_for(lambda: sockets(folder) and (folder / "begun").exists())
    before = (folder / "setups").read_text()
    other_card = ("predict", "job.py:Own", "--device", "h100", "--json")
    answered = {words: asked(folder, *words) for words in (SECOND, other_card)}
    assert (folder / "setups").read_text() == before
    (folder / "slow").unlink()
    for words, process in answered.items():
        assert answers(process.stdout) == answers(asked(folder, *words, "--fresh").stdout)


def test_several_cards_are_traced_for_without_loading_the_job_again(folder):
    """A job that asks its card has a trace of its own for each compute capability."""
    text = (folder / "job.py").read_text()
    asks = "    def loss(self, nets, batch):\n        torch.cuda.get_device_capability()\n"
    (folder / "job.py").write_text(text.replace("    def loss(self, nets, batch):\n", asks))
    assert asked(folder, *FIRST).returncode == 0
    wait_for(lambda: sockets(folder))
    cards = [word for key in ("h100", "t4", "rtx5090") for word in ("--device", key)]
    several = (*SECOND, *cards)
    second = asked(folder, *several)
    assert (second.returncode, imports(folder)) == (0, 1)
    (folder / "slow").unlink()
    fresh = json.loads(asked(folder, *several, "--fresh").stdout)
    for key, card in json.loads(second.stdout)["devices"].items():
        assert card | {"seconds": 0} == fresh["devices"][key] | {"seconds": 0}


CARDS = ("cards", "job.py:Own", "--no-largest", "--device", "rtx4090", "--device", "t4", "--json")


def test_an_epoch_is_counted_without_loading_the_job_again(folder):
    (folder / "samples" / "one").touch()
    assert asked(folder, *FIRST).returncode == 0
    wait_for(lambda: sockets(folder))
    second = asked(folder, *CARDS)
    assert (second.returncode, imports(folder)) == (0, 1)
    (folder / "slow").unlink()
    cards, fresh = (json.loads(text) for text in (second.stdout, asked(folder, *CARDS, "--fresh").stdout))
    assert imports(folder) == 2
    assert cards["epoch_units"] == fresh["epoch_units"] == 1
    assert cards["cards"] == fresh["cards"]


def test_an_epoch_of_a_data_set_that_writes_is_counted_where_it_is_asked(folder):
    (folder / "samples" / "one").touch()
    text, begin = (folder / "job.py").read_text(), "    def dataset(self):\n"
    (folder / "job.py").write_text(text.replace(begin, f"{begin}        open('written', 'a').write('once ')\n"))
    assert asked(folder, *FIRST).returncode == 0
    wait_for(lambda: sockets(folder))
    second = asked(folder, *CARDS)
    assert (second.returncode, imports(folder)) == (0, 2)
    assert json.loads(second.stdout)["epoch_units"] == 1
    assert (folder / "written").read_text() == "once "


@pytest.mark.slow
def test_it_ends_with_the_background_and_leaves_nothing(folder):
    read, write = os.pipe()
    assert asked(folder, *FIRST, pass_fds=[write]).returncode == 0
    os.close(write)
    wait_for(lambda: (folder / "begun").exists())
    assert os.read(read, 1) == b""  # no copy holds what whoever started memfit had open
    os.close(read)
    assert len(those_in(folder)) == 3  # one listens, one works, and one has traced nothing
    (folder / "slow").unlink()
    wait_for(lambda: not those_in(folder))
    assert sockets(folder) == []


@pytest.mark.slow
def test_a_question_to_changed_code_is_traced_where_it_is_asked(folder):
    assert asked(folder, *FIRST).returncode == 0
    wait_for(lambda: sockets(folder) and (folder / "begun").exists())
    (folder / "slow").unlink()
    text = (folder / "job.py").read_text()
    (folder / "job.py").write_text(text.replace("Linear(8, 8)", "Linear(8, 1024)"))
    second, fresh = asked(folder, *SECOND), asked(folder, *SECOND, "--fresh")
    assert answers(second.stdout) == answers(fresh.stdout)


@pytest.mark.slow
def test_a_question_is_traced_where_it_is_asked_when_the_copy_is_killed(folder):
    assert asked(folder, *FIRST).returncode == 0
    wait_for(lambda: sockets(folder) and (folder / "begun").exists())
    for process in those_in(folder):
        process.send_signal(signal.SIGKILL)
    (folder / "slow").unlink()
    second = asked(folder, *SECOND)
    assert (second.returncode, imports(folder)) == (0, 2)
    wait_for(lambda: not those_in(folder))


def test_the_background_ends_when_it_is_asked_to(folder):
    """As by a machine that shuts down, while it is at work."""
    assert asked(folder, *FIRST).returncode == 0
    wait_for(lambda: sockets(folder) and (folder / "begun").exists())
    for process in those_in(folder):
        process.terminate()
    wait_for(lambda: not those_in(folder), seconds=20)


@pytest.mark.slow
def test_no_copy_stays_after_a_question_that_fails(folder):
    text = (folder / "job.py").read_text()
    (folder / "job.py").write_text(text.replace("return nets", "raise KeyError('loss')\n        return nets"))
    failed = asked(folder, *FIRST)
    assert failed.returncode == 2
    wait_for(lambda: not those_in(folder))


def test_a_process_that_does_nothing_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(hand_over, "PATIENCE", 0.05)
    with socket.socket(socket.AF_UNIX) as listener, hand_over.short_name(tmp_path / "a.socket") as name:
        listener.bind(name)
        listener.listen()
        elsewhere = LoadedElsewhere(tmp_path / "a.socket", NOTHING_KEPT)
        assert not elsewhere.trace(STEP)
        assert not elsewhere.trace(STEP)


def test_a_socket_that_nobody_listens_at_is_no_error(tmp_path):
    with socket.socket(socket.AF_UNIX) as listener, hand_over.short_name(tmp_path / "a.socket") as name:
        listener.bind(name)
    assert not LoadedElsewhere(tmp_path / "a.socket", NOTHING_KEPT).trace(STEP)


@pytest.mark.parametrize("choices", [{"plan": object()}, {"sizes": (1, 2)}, {"share": float("nan")}])
def test_a_step_that_json_would_change_is_not_handed_over(choices):
    assert HandedOver.from_json(STEP.to_json()) == STEP
    assert replace(STEP, choices=choices).to_json() is None


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'{"shape": 1}', b'{"shape": {}, "more": 1}', b"\xff"])
def test_what_is_no_step_ends_the_connection(text):
    own, other = Pipe()
    own.send_bytes(text)
    serve(other, Mock())
    assert own.recv_bytes() == str(os.getpid()).encode()
    with pytest.raises(EOFError):
        own.recv_bytes()


BESIDE_PROGRESS = """
import threading, torch
from rich.console import Console
from memfit.cli.loaded_copy import serve
from memfit.device.hardware.process_limits import available_cores
from memfit.forked_process import is_forkable
with Console(force_terminal=True, stderr=True).status("working"):
    seen = threading.active_count() > 1, is_forkable()
print(*seen)
"""


def test_a_process_with_threads_of_a_job_is_not_copied():
    command = [sys.executable, "-c", BESIDE_PROGRESS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "True True\n"
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    assert not is_forkable()
    end.set()
    thread.join()


STANDS = """
    def batch(self, shape):
        name, end = torch.cuda.get_device_name(), time.monotonic() + 60
        if "4090" in name:
            while not os.path.exists("other") and time.monotonic() < end:
                time.sleep(0.01)
        else:
            open("other", "a").close()
"""
"""The batch of the card that is asked for waits until another one is traced."""


@pytest.fixture
def standing(folder):
    """A job whose answer for an RTX 4090 needs another process's trace for another card."""
    text = (folder / "job.py").read_text()
    (folder / "job.py").write_text(text.replace("\n    def batch(self, shape):\n", STANDS, 1))
    return folder


needs_core = pytest.mark.skipif(available_cores() < 2, reason="another card is traced on a second core")


@needs_core
def test_other_cards_are_traced_while_the_first_question_is_answered(standing):
    assert asked(standing, *FIRST).returncode == 0
    assert (standing / "other").exists()
    (standing / "slow").unlink()
    other = ("predict", "job.py:Own", "--device", "t4", "--json")
    assert answers(asked(standing, *other).stdout) == answers(asked(standing, *other, "--fresh").stdout)
    assert imports(standing) == 2


@needs_core
@pytest.mark.parametrize("killed", [False, True], ids=["fails", "is killed"])
def test_no_process_traces_on_where_there_is_no_answer(standing, killed):
    """Another card's batch stands for ever."""
    text = (standing / "job.py").read_text()
    stands = "open('other', 'a').close()\n            while os.path.exists('slow'):\n                pass\n"
    fails = "time.sleep(60)" if killed else "raise KeyError('batch')"
    text = text.replace("open('other', 'a').close()\n", stands)
    text = text.replace("        else:\n            open", f"            {fails}\n        else:\n            open")
    (standing / "job.py").write_text(text)
    with subprocess.Popen(
        [sys.executable, "-m", "memfit", *FIRST], cwd=standing, env=environment(standing, MEMFIT_TRACE_AHEAD="1"),
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    ) as process:  # fmt: skip
        wait_for(lambda: (standing / "other").exists())
        if killed:
            process.kill()
        process.wait(timeout=60)
    wait_for(lambda: not those_in(standing), seconds=20)
    assert (standing / "slow").exists()
    left = {path.suffix for path in (standing / "cache" / "memfit" / "traces").iterdir()}
    assert left <= {"", ".npz", ".json"}  # of files that were being written, none


def test_what_another_process_keeps_meanwhile_is_waited_for_no_longer(tmp_path):
    """A process that traces the same step is ended: nobody needs it."""
    kept = Mock(side_effect=[False, True])
    with (
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process,
        socket.socket(socket.AF_UNIX) as listener,
        hand_over.short_name(tmp_path / "a.socket") as name,
    ):
        listener.bind(name)
        listener.listen()
        thread = threading.Thread(target=_tell, args=(listener, process.pid))
        thread.start()
        assert LoadedElsewhere(tmp_path / "a.socket", kept).trace(STEP)
        assert process.wait(timeout=20) == -signal.SIGTERM
        thread.join()
    assert kept.call_count == 2


def _tell(listener: socket.socket, process_id: int) -> None:
    """Accepts a question and says which process traces it, until whoever asks has ended."""
    client, _ = listener.accept()
    with Connection(client.detach()) as connection:
        connection.recv_bytes()
        connection.send_bytes(str(process_id).encode())
        with pytest.raises(EOFError):
            connection.recv_bytes()


TWO_POLICIES = """
    lora: int = 0

    def batch(self, shape):
        end = time.monotonic() + 60
        if self.lora:
            open("other", "a").close()
        while shape.items > 1 and not os.path.exists("other"):
            if time.monotonic() > end:
                open("late", "a").close()
                break
            time.sleep(0.01)
"""
"""Batches of one policy wait until one of the other policy is traced."""


@needs_core
def test_policies_are_searched_at_once_where_another_process_has_the_job_loaded(folder):
    text = (folder / "job.py").read_text()
    (folder / "job.py").write_text(text.replace("\n    def batch(self, shape):\n", TWO_POLICIES, 1))
    (folder / "slow").unlink()
    largest = ("max", "job.py:Own", "--device", "rtx4090", "--memory", "10GiB", "--json")
    assert asked(folder, *FIRST).returncode == 0
    wait_for(lambda: sockets(folder))
    second = asked(folder, *largest)
    assert (second.returncode, imports(folder)) == (0, 1)
    assert not (folder / "late").exists()
    fresh = asked(folder, *largest, "--fresh")
    both = [json.loads(output.stdout) for output in (second, fresh)]
    assert [len(answer["results"]) for answer in both] == [2, 2]
    assert both[0]["results"] == both[1]["results"]
