"""pytest tests/show/test_live_view.py: the live view, drawn to a console of a given width."""

import io

import pytest
from rich.console import Console

from memfit.show.live_view import LiveView

LINE = {
    "window": 1,
    "loss": 0.123456,
    "units_per_second": 321.0,
    "measured_process_bytes": 200 << 20,
    "predicted_process_bytes": 190 << 20,
}


def drawn(*lines: dict, width: int = 80, say: str = "") -> str:
    file = io.StringIO()
    view = LiveView(10, 256 << 20, Console(file=file, force_terminal=True, width=width, color_system=None))
    for line in lines:
        view.line(line)
    if say:
        view.say(say)
    view.close()
    return file.getvalue()


def test_windows_memory_and_retries():
    text = drawn(LINE, {**LINE, "window": 2, "retries": 2, "skipped_samples": [7]})
    assert "3/10" in text
    assert "200 MiB of 256 MiB" in text
    assert "190 MiB planned" in text
    assert "2 retries" in text
    assert "1 skipped" in text


def test_a_process_is_compared_with_what_is_planned_for_the_process():
    text = drawn({**LINE, "planned_process_bytes": 220 << 20})
    assert "200 MiB of 256 MiB, 220 MiB planned" in text


@pytest.mark.parametrize("width", [80, 60])
def test_nothing_is_wider_than_the_terminal(width):
    text = drawn({**LINE, "measured_process_bytes": 23_456 << 20, "predicted_process_bytes": 23_456 << 20}, width=width)
    plain = [line.split("\x1b[2K")[-1] for line in text.replace("\r", "").split("\n")]
    assert max(map(len, plain)) <= width


def test_what_is_said_is_no_markup():
    assert "[red]as it is[/red]" in drawn(LINE, say="[red]as it is[/red]")
