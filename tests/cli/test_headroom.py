"""--headroom leaves a part of the device's memory free.

python -m pytest tests/cli/test_headroom.py
"""

import pytest

from memfit.cli.options import choose_device
from memfit.errors import InputError


@pytest.mark.parametrize(("headroom", "left"), [("5%", 972), ("24MiB", 1000), ("0%", 1024), ("12.5 %", 896)])
def test_headroom_is_a_part_or_a_size(headroom, left):
    device = choose_device("rtx4090", "1GiB", headroom)
    assert device.usable_bytes >> 20 == left
    assert device.memory_bytes == 1 << 30


@pytest.mark.parametrize("headroom", ["100%", "1GiB", "five", "-5%", "200%"])
def test_headroom_that_leaves_nothing_or_is_no_size_is_refused(headroom):
    with pytest.raises(InputError):
        choose_device("rtx4090", "1GiB", headroom)
