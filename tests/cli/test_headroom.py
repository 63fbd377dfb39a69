"""--headroom leaves a part of the device's memory free.

python -m pytest tests/cli/test_headroom.py
"""

import json
import re

import pytest

from memfit.cli.options import choose_device
from memfit.errors import InputError

CLOSE = ("examples/unet.py:Discs", "--device", "rtx4090", "--memory", "2GiB")


@pytest.mark.parametrize(("headroom", "left"), [("5%", 972), ("24MiB", 1000), ("0%", 1024), ("12.5 %", 896)])
def test_headroom_is_a_part_or_a_size(headroom, left):
    device = choose_device("rtx4090", "1GiB", headroom)
    assert device.usable_bytes >> 20 == left
    assert device.memory_bytes == 1 << 30
    assert device.usable_bytes + device.free_bytes == 1 << 30


@pytest.mark.parametrize("headroom", ["100%", "1GiB", "five", "-5%", "200%"])
def test_headroom_that_leaves_nothing_or_is_no_size_is_refused(headroom):
    with pytest.raises(InputError):
        choose_device("rtx4090", "1GiB", headroom)


def test_the_headroom_that_a_warning_names_gives_a_plan_with_a_margin(run):
    """An interval may reach into what is left free: else no headroom would ever give a margin."""
    code, out, _ = run("plan", *CLOSE, "--global-batch", "24")
    assert code == 0
    named = re.search(
        r"this plan may run out of memory; use --headroom (\d+)% for a plan with a margin", " ".join(out.split())
    )
    assert named, out
    assert "may run" in run("plan", *CLOSE, "--global-batch", "24", "--headroom", "1%")[1]
    code, out, _ = run("plan", *CLOSE, "--global-batch", "24", "--headroom", f"{named[1]}%", "--json")
    footprint = json.loads(out)
    assert (code, footprint["verdict"]) == (0, "yes"), out
    code, out, _ = run("plan", *CLOSE, "--global-batch", "24", "--headroom", f"{named[1]}%")
    assert out.startswith("Fits on"), out
    assert "Warning" not in out


@pytest.mark.slow
def test_the_largest_of_which_the_whole_interval_fits_uses_what_is_left_free(run):
    def asked(*more):
        return json.loads(run("max", *CLOSE, "--json", *more)[1])["results"]

    for plain, with_headroom in zip(asked(), asked("--headroom", "5%"), strict=True):
        assert with_headroom["largest"] < plain["largest"]
        assert with_headroom["largest_certain"] == min(plain["largest_certain"], with_headroom["largest"])
