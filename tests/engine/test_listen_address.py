"""pytest tests/engine/test_listen_address.py: ranks of one node are closed to the network, and none is left behind."""

import json
import os
import socket
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from memfit.child_process import children
from memfit.device.hardware.loopback import LOOPBACK, loopback_environment
from memfit.engine import listen_address
from memfit.errors import InputError
from memfit.train.launch.torchrun import torchrun
from tests.engine.listening_rank import listens

ROOT = Path(__file__).parents[2]
LAUNCH = """
import sys
from pathlib import Path
from memfit.train.launch.torchrun import torchrun
sys.exit(torchrun(2, "tests.engine.listening_rank", [sys.argv[1]], Path(sys.argv[1]), max_restarts=0))
"""


def environment() -> dict[str, str]:
    names = ("RANK", "WORLD_SIZE", "GLOO_SOCKET_IFNAME", "MEMFIT_PARENT")
    kept = {key: value for key, value in os.environ.items() if key not in names}
    return {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MEMFIT_COLLECTIVE_SECONDS": "60"}


def test_two_real_ranks_and_their_launcher_listen_on_loopback_only(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", LAUNCH, str(tmp_path)], env=environment(), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    seen = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert [item["world"] for item in seen] == [2, 2]
    assert seen[0]["launcher"], "the store of the launcher is a socket"
    assert any(item["rank"] for item in seen), "gloo and the store of rank 0 are sockets"
    addresses = {address for item in seen for address in (*item["rank"], *item["launcher"])}
    assert addresses == {LOOPBACK}


def test_a_store_listens_on_the_address_that_is_asked_for_alone():
    before = len(listens(psutil.Process()))
    store = listen_address.open_store(LOOPBACK, timedelta(seconds=20))
    store.set("key", "value")
    reader = dist.TCPStore(LOOPBACK, store.port, is_master=False, timeout=timedelta(seconds=20))
    assert reader.get("key") == b"value"
    mine = [c.laddr for c in psutil.Process().net_connections(kind="inet") if c.status == psutil.CONN_LISTEN]
    assert (LOOPBACK, store.port) in mine
    assert len(mine) == before + 1


@pytest.mark.parametrize(
    ("environment", "host"),
    [
        ({"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "node7"}, LOOPBACK),
        ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "node7"}, "node7"),
        ({"WORLD_SIZE": "4", "MASTER_ADDR": "node7"}, "node7"),
        ({"WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1"}, LOOPBACK),
    ],
)
def test_several_nodes_listen_where_the_user_says(monkeypatch, environment, host):
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert listen_address.store_host() == host


def test_an_address_of_another_machine_is_served_on_all_interfaces():
    assert listen_address._listener("192.0.2.1") is None  # TEST-NET-1, which no machine has


def test_an_interface_that_the_user_has_set_stays(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    assert "GLOO_SOCKET_IFNAME" not in loopback_environment()
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    assert loopback_environment()["GLOO_SOCKET_IFNAME"] in dict(socket.if_nameindex()).values()


def test_a_start_that_fails_leaves_no_rank(tmp_path, monkeypatch):
    from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler

    started: list[int] = []
    popen = SubprocessHandler._popen

    def refusing(self, *args):
        if len(started) == 2:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        process = popen(self, *args)
        started.append(process.pid)
        return process

    monkeypatch.setattr(SubprocessHandler, "_popen", refusing)
    before = children()
    with pytest.raises(InputError, match="3 ranks: the system does not start so many"):
        torchrun(3, "tests.engine.sleeping_rank", [], tmp_path, max_restarts=0)
    assert len(started) == 2
    assert not [pid for pid in started if psutil.pid_exists(pid)]
    assert children() == before


def test_ranks_end_with_a_launcher_that_is_killed(tmp_path):
    launch = LAUNCH.replace("tests.engine.listening_rank", "tests.engine.sleeping_rank")
    launch = "import os\nfrom memfit.child_process import for_child\nos.environ.update(for_child())\n" + launch
    with subprocess.Popen([sys.executable, "-c", launch, str(tmp_path)], env=environment()) as launcher:
        until = time.monotonic() + 60
        while len(list(tmp_path.glob("*.pid"))) < 2 and time.monotonic() < until:
            time.sleep(0.1)
        ranks = [int(file.stem) for file in tmp_path.glob("*.pid")]
        assert len(ranks) == 2
        launcher.kill()
    until = time.monotonic() + 10
    while any(psutil.pid_exists(pid) for pid in ranks) and time.monotonic() < until:
        time.sleep(0.1)
    assert not [pid for pid in ranks if psutil.pid_exists(pid)]
