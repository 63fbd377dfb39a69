"""What a function takes for itself is told apart from what the timed functions take that it calls.

python -m pytest tests/bench/test_part_timer.py
"""

import sys
from unittest.mock import patch

from bench import loop
from bench.part_timer import PartTimer

CLOCK = {"now": 0}


class Work:
    def outer(self) -> int:
        CLOCK["now"] += 5
        return self.inner() + self.inner()

    def inner(self) -> int:
        CLOCK["now"] += 20
        return 1


def test_a_part_has_its_own_time_without_that_of_the_parts_it_calls() -> None:
    timer = PartTimer({name: [f"{__name__}:Work.{name}"] for name in ("outer", "inner")})
    assert __name__ in sys.modules
    with patch("time.perf_counter_ns", lambda: CLOCK["now"] * 1000), timer.timing():
        for _ in range(3):
            assert Work().outer() == 2
            timer.next_turn()
    assert timer.microseconds(cold=1) == {"outer": 5.0, "inner": 40.0}
    CLOCK["now"] = 0
    assert Work().outer() == 2
    assert CLOCK["now"] == 45


def test_every_part_of_the_loop_is_timed() -> None:
    parts = loop.microseconds_of_parts(2 * loop.TURN)
    assert parts.keys() == loop.PARTS.keys()
    assert all(parts.values()), parts
