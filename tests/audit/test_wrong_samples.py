"""pytest tests/audit/test_wrong_samples.py: data sets are read to see whether they give what they are asked for."""

import numpy as np
import pytest

from memfit.audit.wrong_samples import _read


@pytest.mark.parametrize("samples", [list(range(40)), range(40), tuple(range(40)), np.arange(40), [7] * 40])
def test_a_plain_sequence_is_read_as_it_is(samples):
    assert _read(samples) is None


def test_a_data_set_that_replaces_what_it_cannot_read_is_named():
    class Replacing:
        def __init__(self):
            self.clips = list(range(40))

        def __len__(self):
            return 40

        def __getitem__(self, index):
            return {"id": self.clips[index if index % 4 else (index + 1) % 40]}

    assert "gives another sample" in _read(Replacing())
