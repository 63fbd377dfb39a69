"""What the right targets read."""

import numpy as np
from torch.utils.data import (
    Dataset,
)

SIZE = 203


LENGTHS = np.random.default_rng(0).integers(20, 400, SIZE)


class Unread(Dataset):
    """Its samples cannot be read here, as on a machine without the data."""

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        raise FileNotFoundError(index)
