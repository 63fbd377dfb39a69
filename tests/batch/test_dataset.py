"""What ``dataset()`` may give to a run.

python -m pytest tests/batch/test_dataset.py
"""

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from memfit.batch.dataset import check_no_loader
from memfit.errors import InputError
from memfit.train.data.run_data import samples_and_windows
from testing.faulty_jobs import Plain


class Counted(IterableDataset):
    def __iter__(self):
        return iter(range(8))


@pytest.mark.parametrize("samples", [TensorDataset(torch.arange(8)), Counted()])
def test_a_loader_of_batches_is_refused(samples):
    class Loaded(Plain):
        def dataset(self):
            return DataLoader(samples, batch_size=4)

    with pytest.raises(InputError, match=r"Loaded.dataset\(\): gave DataLoader, whose batches would each count"):
        samples_and_windows(Loaded(), None, 1)


def test_a_loader_of_samples_is_a_stream_of_them():
    check_no_loader(Plain(), DataLoader(Counted(), batch_size=None))
