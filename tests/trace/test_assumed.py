"""Sizes that depend on data: what was taken for them stands beside the prediction."""

from pathlib import Path

import torch
from torch import nn

from memfit.device.hardware.catalogue import find_device
from memfit.job import Job, Shape
from memfit.planner.plan_json import plan_json
from memfit.planner.predict import predict
from memfit.planner.request import PlanRequest
from memfit.planner.search.search import find_plan
from memfit.show.footprint_table import footprint_remarks
from memfit.show.trace_file import read_trace, write_trace


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(8, 4)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        chosen = self.gate(x).argmax(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero()[:, 0]
            out = out.index_add(0, rows, expert(x[rows]))
        return out


class Mixture(Job):
    def nets(self):
        return {"net": Experts()}

    def optimizers(self, nets):
        return {"net": torch.optim.SGD(nets["net"].parameters(), lr=0.1)}

    def batch(self, shape):
        return torch.randn(shape.items, 8)

    def loss(self, nets, batch):
        out = nets["net"](batch)
        return out.square().sum(), out.numel()


def line_of(text):
    lines = Path(__file__).read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line)


def test_sizes_taken_as_large_as_they_can_be_are_told_with_their_line_and_kept_in_a_trace(tmp_path):
    prediction = predict(Mixture(), "mixture", Shape(items=6), find_device("rtx4090"))
    place = f"{__file__}:{line_of('rows = (chosen')}"
    share = "nonzero was taken to find 2, an equal share of 6 for each of 4 values"
    result = f"{place}: {share}; a run needs more where one value has more"
    assert prediction.footprint.assumed == (result,)
    assert f"Assumed: {result}." in footprint_remarks(prediction.footprint)
    write_trace(tmp_path / "t.npz", prediction)
    back = read_trace(tmp_path / "t.npz")
    assert back.footprint.assumed == back.trace.assumed == (result,)


def test_a_size_read_from_data_is_told_as_a_doubt_and_one_that_is_known_is_not():
    class Counting(Mixture):
        def loss(self, nets, batch):
            longest = int((batch > 0).sum())  # asks data
            width = int(torch.arange(5).max())
            out = nets["net"].gate(batch)
            return out.square().sum() + torch.ones(longest + width, device=out.device).sum(), out.numel()

    (doubt,) = predict(Counting(), "counting", Shape(items=6), find_device("rtx4090")).footprint.assumed
    assert doubt.startswith(f"{__file__}:{line_of('# asks data')}: item() was answered 1")
    assert "a run needs more" in doubt


def test_a_number_read_from_data_that_is_no_size_is_not_told():
    class Accuracy(Mixture):
        def loss(self, nets, batch):
            out = nets["net"].gate(batch)
            self.correct = (out.argmax(-1) == 0).sum().item() / len(batch)
            start = int(torch.randint(0, 4, (1,)))
            return out[:, start : start + 1].square().sum() + self.correct, out.numel()

    class Repeated(Mixture):
        def loss(self, nets, batch):
            out = nets["net"].gate(batch)
            for _ in range((batch > 0).sum().item()):
                out = torch.cat([out, out])
            return out.square().sum(), out.numel()

    assert predict(Accuracy(), "accuracy", Shape(items=6), find_device("rtx4090")).footprint.assumed == ()
    (doubt,) = predict(Repeated(), "repeated", Shape(items=6), find_device("rtx4090")).footprint.assumed
    assert "item() was answered 1" in doubt


def test_a_plan_tells_them_too():
    answer = find_plan(Mixture(), PlanRequest(name="mixture", global_batch=6, device=find_device("rtx4090")))
    (result,) = plan_json(answer)["assumed"]
    assert "nonzero was taken to find 2, an equal share of 6 for each of 4 values" in result


def test_the_rows_of_one_value_alone_may_be_all():
    class Single(Mixture):
        def loss(self, nets, batch):
            out = nets["net"].gate(batch)
            return out[out.argmax(-1) == 2].square().sum(), out.numel()

    (result,) = predict(Single(), "single", Shape(items=6), find_device("rtx4090")).footprint.assumed
    assert "index by a mask was taken to find all 6; a run needs less" in result


def test_memory_that_code_asks_for_is_told_where_it_decides_sizes_alone():
    class Logs(Mixture):
        def loss(self, nets, batch):
            out = nets["net"].gate(batch)
            self.used = torch.cuda.memory_allocated() / 2**20
            return out.square().sum(), out.numel()

    class Pieces(Mixture):
        def loss(self, nets, batch):
            free, total = torch.cuda.mem_get_info()  # asks the card
            pieces = batch.split(len(batch) if free > total // 2 else 1)
            out = torch.cat([nets["net"].gate(piece) for piece in pieces])
            return out.square().sum(), out.numel()

    assert predict(Logs(), "logs", Shape(items=6), find_device("rtx4090")).footprint.assumed == ()
    (doubt,) = predict(Pieces(), "pieces", Shape(items=6), find_device("rtx4090")).footprint.assumed
    place = f"{__file__}:{line_of('# asks the card')}"
    assert doubt.startswith(f"{place}: mem_get_info() was answered as on an empty card; where that decides a size")
