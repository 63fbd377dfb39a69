"""A sample alone at the end of an epoch is tried before the first window, and leaves nothing behind.

python -m pytest tests/train/test_lone_sample.py
"""

import pytest
import torch

from testing.faulty_jobs import Plain, run


class Alone(Plain):
    """25 samples in windows of 8: the last one of an epoch has one."""

    sizes = ()

    def dataset(self):
        x = torch.randn(25, 6, generator=torch.Generator().manual_seed(0))
        return list(zip(x, x.sum(1), strict=True))

    def loss(self, nets, batch):
        type(self).sizes = (*self.sizes, len(batch[0]))
        return super().loss(nets, batch)


class Refusing(Alone):
    def loss(self, nets, batch):
        if len(batch[0]) == 1:
            raise ValueError("Expected more than 1 value per channel when training")
        return super().loss(nets, batch)


class Whole(Alone):
    """No window of an epoch has one sample."""

    def dataset(self):
        return super().dataset()[:24]


def test_a_job_that_refuses_one_sample_ends_before_its_first_window(tmp_path):
    Refusing.sizes = ()
    with pytest.raises(ValueError, match="Expected more than 1 value"):
        run(tmp_path / "run", Refusing(), 4, proves=True, last=6)
    assert Refusing.sizes == ()


def test_the_trial_leaves_nothing_behind(tmp_path):
    ends = []
    for proves in (False, True):
        Alone.sizes = ()
        code, learnt, ids, *_ = run(tmp_path / f"run-{proves}", Alone(), 4, proves=proves, last=6)
        assert (code, Alone.sizes.count(1)) == (0, 2 if proves else 1)
        ends.append((learnt, ids))
    torch.testing.assert_close(ends[0][0], ends[1][0], rtol=0, atol=0)
    assert ends[0][1] == ends[1][1]


def test_an_epoch_that_ends_otherwise_takes_no_trial_of_one(tmp_path):
    Whole.sizes = ()
    assert run(tmp_path / "run", Whole(), 4, proves=True, last=6)[0] == 0
    assert 1 not in Whole.sizes
