import gc

import pytest

from memfit.device.virtual import fake_mode
from memfit.device.virtual.card_rules import CardRules
from memfit.device.virtual.virtual_device import virtual_gpu


@pytest.fixture
def gpu():
    """The virtual A100."""
    with virtual_gpu(CardRules(compute_capability=(8, 0))) as virtual:
        yield virtual


@pytest.fixture
def no_memory(monkeypatch):
    """Outputs' shapes that were learnt before are forgotten, and what is learnt is forgotten after."""
    monkeypatch.setattr(fake_mode, "_calls", {})


@pytest.fixture
def no_gc():
    """Frees happen when the last reference goes."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()
