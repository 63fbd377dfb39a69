import warnings

import pytest


@pytest.fixture(autouse=True)
def _third_party_warnings():
    """What Lightning, Accelerate and Lhotse warn of is not ours."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
