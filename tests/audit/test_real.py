"""pytest tests/audit/test_real.py: worlds in real processes of a gloo group."""

import subprocess
from pathlib import Path

import numpy as np
import pytest

from memfit.audit import audit, process_world
from memfit.audit.process_world import run_world
from memfit.audit.simulated_world import simulate
from memfit.errors import InputError

HERE = Path(__file__).parent


@pytest.mark.parametrize(
    "target",
    ["faults/system_faults.py:sovits_s1", "right/accelerate_loaders.py:accelerate_prepared", "targets.py:gathers"],
)
def test_real_processes_and_simulation_count_alike(target) -> None:
    real = audit(f"{HERE}/{target}", [2], real=True)
    simulated = audit(f"{HERE}/{target}", [2])
    assert real.counts[2].batches_per_rank == simulated.counts[2].batches_per_rank
    assert real.counts[2].distinct == simulated.counts[2].distinct
    assert real.counts[2].duplicates == simulated.counts[2].duplicates
    assert [finding.code for finding in real.findings] == [finding.code for finding in simulated.findings]


def test_a_replayed_collective_gives_what_the_real_one_gives() -> None:
    target = f"{HERE}/targets.py:gathers"
    real, simulated = run_world(target, 2), simulate(target, 2)
    assert [drawn.batches for drawn in real] == [drawn.batches for drawn in simulated]
    assert np.unique([batch.ids for drawn in real for batch in drawn.batches]).tolist() == list(range(40))


def test_ranks_that_wait_for_ever_are_stopped() -> None:
    with pytest.raises(InputError, match=r"ranks \[0\] are not done|ranks \[0, 1\] are not done|rank 0|rank 1"):
        run_world(f"{HERE}/targets.py:hangs", 2, seconds=20)


def test_a_rank_that_fails_is_named() -> None:
    with pytest.raises(InputError, match="as rank 1 of 2: it raises KeyError"):
        run_world(f"{HERE}/targets.py:fails_on_rank_one", 2)


def test_a_function_cannot_be_given_to_processes() -> None:
    with pytest.raises(InputError, match=r"path/file\.py:function"):
        audit(lambda rank, world: [[0]], [1], real=True)


def test_a_start_that_fails_leaves_no_rank(monkeypatch) -> None:
    popen, started = subprocess.Popen, []

    def refusing(*args, **options):
        if len(started) == 2:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        started.append(popen(*args, **options))
        return started[-1]

    monkeypatch.setattr(process_world.subprocess, "Popen", refusing)
    with pytest.raises(InputError, match=r"the system does not start rank 2.*write 2 or fewer"):
        run_world(f"{HERE}/targets.py:gathers", 3)
    assert len(started) == 2
    assert all(process.returncode is not None for process in started)
