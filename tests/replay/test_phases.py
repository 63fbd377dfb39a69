"""Setup as a phase of its own, and the phase that the verdict names."""

import io

import torch
from torch import nn

from memfit.device.hardware.catalogue import find_device, with_memory
from memfit.footprint import PeakLocation, PhaseFootprint, Request
from memfit.job import Job, Shape
from memfit.planner.predict import predict
from memfit.replay.margins import margin_of, margins
from memfit.replay.replay import _limiting_phase
from memfit.show.console import make_console
from memfit.show.footprint_table import footprint_remarks, show_prediction


class Converted(Job):
    """Nets that are built in fp32 and converted."""

    convert: bool = True

    def nets(self):
        if not self.convert:
            return {"net": nn.Linear(256, 256, dtype=torch.bfloat16)}
        net = nn.Sequential(*(nn.Linear(256, 256) for _ in range(3)))
        return {"net": net[0].to(torch.bfloat16)}

    def optimizers(self, nets):
        return {"sgd": torch.optim.SGD(nets["net"].parameters())}

    def batch(self, shape):
        return torch.ones(shape.items, 256, dtype=torch.bfloat16)

    def loss(self, nets, batch):
        return nets["net"](batch).square().sum(), len(batch)


def test_building_nets_that_needs_more_than_training_is_a_phase_with_its_own_advice():
    cpu = with_memory(find_device("cpu"), 1 << 30)
    prediction = predict(Converted(), "job", Shape(items=1), cpu)
    footprint = prediction.footprint
    assert list(footprint.phases)[:2] == ["setup", "train"]
    assert footprint.limiting_phase == "setup"
    assert footprint.phases["setup"].allocated_bytes >= 3 * 256 * 256 * 4
    assert footprint.phases["train"].allocated_bytes < footprint.phases["setup"].allocated_bytes
    assert footprint_remarks(footprint)[0].startswith("Building the nets needs more than training")
    assert "final type" in footprint_remarks(footprint)[0]
    assert "initialise(self, net, module)" in footprint_remarks(footprint, "fsdp2")[0]
    shown = io.StringIO()
    show_prediction(prediction, make_console(file=shown))
    assert "Peak in the building of the nets (" in shown.getvalue()
    assert "setup" not in predict(Converted(convert=False), "job", Shape(items=1), cpu).footprint.phases


def test_nets_that_cannot_be_built_fail_in_setup():
    cpu = with_memory(find_device("cpu"), 600_000)
    footprint = predict(Converted(), "job", Shape(items=1), cpu).footprint
    assert not footprint.fits
    assert footprint.failed_request is not None
    assert footprint.failed_request.phase == "setup"


def phase(allocated, process):
    nothing = Request(bytes=0, module="", operator="", phase="")
    return PhaseFootprint(
        allocated_bytes=allocated, reserved_bytes=process, process_bytes=process, process_bytes_low=process,
        process_bytes_high=process, at=PeakLocation(module="", operator=""), largest_request=nothing, categories={},
    )  # fmt: skip


def test_the_phase_whose_tensors_make_the_peak_is_named():
    train = phase(800, 900)
    assert _limiting_phase({"train": train, "validate": phase(176, 950)}) == "train"
    assert _limiting_phase({"train": train, "validate": phase(700, 1400)}) == "validate"


def test_every_margin_holds_the_prediction_itself() -> None:
    assert all(margin.low <= 0 <= margin.high for margin in [*margins().values(), margin_of("no such kind")])
