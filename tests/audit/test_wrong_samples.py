"""pytest tests/audit/test_wrong_samples.py: data sets are read to see whether they give what they are asked for."""

import numpy as np
import pytest
import torch
from torch.utils.data import Subset, default_collate

from memfit.audit.wrong_samples import SampleFaults, _read


@pytest.mark.parametrize("samples", [list(range(40)), range(40), tuple(range(40)), np.arange(40), [7] * 40])
def test_a_plain_sequence_is_read_as_it_is(samples):
    assert _read(samples) == SampleFaults()


def test_a_data_set_that_replaces_what_it_cannot_read_is_named():
    class Replacing:
        def __init__(self):
            self.clips = list(range(40))

        def __len__(self):
            return 40

        def __getitem__(self, index):
            return {"id": self.clips[index if index % 4 else (index + 1) % 40]}

    assert "gives another sample" in _read(Replacing()).replaced


class Recurses:
    """Hands on the next sample where one cannot be read; its samples carry no id."""

    def __init__(self, readable=False):
        self.readable = readable

    def __len__(self):
        return 40

    def __getitem__(self, index):
        if index % 20 == 7 and not self.readable:
            return self[index + 1]
        return {"x": torch.full((2,), float(index))}


def test_a_sample_that_the_data_set_took_from_another_index_is_named():
    assert "2 times in 40 (7 gives 8, 27 gives 28)" in _read(Recurses()).replaced
    assert _read(Recurses(readable=True)) == SampleFaults()


def test_a_subset_of_a_subset_gives_what_it_is_asked_for():
    assert _read(Subset(Subset(Recurses(readable=True), range(30)), range(5, 20))) == SampleFaults()


def test_a_sample_that_is_mixed_with_another_is_no_other_one():
    class Mixed(Recurses):
        def __getitem__(self, index):
            sample = super().__getitem__(index)
            return {"x": sample["x"] + self[index + 1]["x"]} if index % 2 == 0 else sample

    assert _read(Mixed(readable=True)) == SampleFaults()


def test_none_is_named_where_the_collate_leaves_it_out():
    samples = [None if index % 10 == 3 else {"x": torch.zeros(2)} for index in range(40)]

    def leave_out(batch):
        return default_collate([sample for sample in batch if sample is not None])

    assert "None 4 times in 40 (index 3, 13, 23, 33)" in _read(samples, leave_out).left_out
    assert _read(samples, default_collate) == SampleFaults()
