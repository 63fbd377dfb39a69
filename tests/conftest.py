"""Puts this folder's own modules (nets, truth) on the path, and keeps what memfit measures out of the user's cache."""

import gc
import os
import signal

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("busy machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy machine")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
os.environ["COLUMNS"] = "80"  # whatever terminal the tests are started from: lines are broken at the same places
os.environ.setdefault("MEMFIT_KEEP_TRACES", "0")  # tests that replace parts of memfit must trace
os.environ.setdefault("MEMFIT_TRACE_AHEAD", "0")  # no process goes on beside the tests
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell has what it starts in the background ignore it
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which commands that tests start and interrupt inherit


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Importing what tests need takes a fourth less without the garbage collector."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.fixture(scope="session", autouse=True)
def virtual_gpu_is_known():
    """Autograd's engine knows only the devices that were there at a process's first backward."""
    from memfit.device.virtual import backend

    backend.register_virtual_device()


@pytest.fixture(scope="session", autouse=True)
def frozen_objects_stay_frozen():
    """As within one command: a command that a test runs in this process would unfreeze all that came before it."""
    from memfit.garbage import frozen_within

    with frozen_within():
        gc.enable()
        yield


@pytest.fixture(scope="module", autouse=True)
def nothing_old_is_collected_again():
    """Every trace collects garbage, as ``memfit`` does it: what stays from before this module is no garbage of it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory):
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))
