"""The verdict in one line: what is to spare and what is needed add up to the card."""

from dataclasses import replace
from io import StringIO
from types import SimpleNamespace

from rich.console import Console

from memfit.device.hardware.catalogue import find_device
from memfit.footprint import Footprint, PeakLocation, PhaseFootprint, Request
from memfit.job import Shape
from memfit.show.footprint_table import show_predictions, verdict_line

GIB = 1 << 30


def phase(process: int) -> PhaseFootprint:
    nothing = Request(bytes=0, module="", operator="", phase="")
    return PhaseFootprint(
        allocated_bytes=process, reserved_bytes=process, process_bytes=process, process_bytes_low=process,
        process_bytes_high=process, at=PeakLocation(module="", operator=""), largest_request=nothing, categories={},
    )  # fmt: skip


INHERITED = Footprint(
    phases={"train": phase(10 * GIB), "validate": phase(11 * GIB)}, fits=True, verdict="yes", limiting_phase="train",
    headroom_bytes=9 * GIB, failed_request=None, net_kind="", measured_runs=None, plan_searches=0, assumed=(),
)  # fmt: skip
"""Validation inherits the cache of training, and takes more."""


def test_the_verdict_counts_the_largest_process_where_a_later_phase_inherits_a_larger_cache():
    card = replace(find_device("rtx4090"), usable_bytes=20 * GIB)
    line = verdict_line(INHERITED, card)
    assert line == "Fits on RTX 4090 with 9.00 GiB to spare (peak: training, 11.00 of 20.00 GiB)."


def test_the_row_of_each_of_several_cards_counts_the_largest_process_too():
    card = replace(find_device("rtx4090"), usable_bytes=20 * GIB)
    prediction = SimpleNamespace(  # what a table reads of a prediction
        footprint=INHERITED, device=card, job="job", micro_batch=1, unit="samples", shape=Shape(items=1)
    )  # fmt: skip
    console = Console(file=StringIO(), width=120)
    show_predictions([prediction], console)
    assert console.file.getvalue().splitlines()[-1].split() == (
        ["rtx4090", "yes", "11.00", "GiB", "20.00", "GiB", "9.00", "GiB", "training"]
    )


def test_the_verdict_names_the_building_of_the_nets_where_setup_does_not_fit():
    card = replace(find_device("rtx4090"), usable_bytes=20 * GIB)
    failed = Request(bytes=GIB, module="", operator="aten.to", phase="setup")
    footprint = Footprint(
        phases={"setup": phase(21 * GIB), "train": phase(9 * GIB)}, fits=False, verdict="no", limiting_phase="setup",
        headroom_bytes=-GIB, failed_request=failed, net_kind="", measured_runs=None, plan_searches=0, assumed=(),
    )  # fmt: skip
    assert "setup fails to allocate 1.00 GiB in the building of the nets (peak: setup" in verdict_line(footprint, card)


def test_the_verdict_of_a_processor_says_what_may_come_beside_the_tensors():
    cpu = replace(find_device("cpu"), usable_bytes=20 * GIB)
    footprint = Footprint(
        phases={"train": replace(phase(19 * GIB), process_bytes_high=21 * GIB)}, fits=True, verdict="close",
        limiting_phase="train", headroom_bytes=GIB, failed_request=None, net_kind="", measured_runs=None,
        plan_searches=0, assumed=(),
    )  # fmt: skip
    line = verdict_line(footprint, cpu)
    assert "1.00 GiB to spare, but what is no tensor (Python, autograd's graph) may take 2.00 GiB" in line
