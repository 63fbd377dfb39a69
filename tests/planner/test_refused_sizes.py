"""``memfit max`` and ``cards`` of jobs that refuse sizes, or whose traces grow with them, against ``predict``.

python -m pytest tests/planner/test_refused_sizes.py
"""

import json
import types

import pytest
import torch
from torch import nn

import memfit
from memfit.cli import main
from memfit.device.hardware.catalogue import find_device, with_memory
from memfit.job import Shape
from memfit.planner import largest
from memfit.planner.asked_job import AskedJob
from memfit.planner.predict import predict

CARD = with_memory(find_device("t4"), 256 << 20)


class Rows(memfit.Job):
    """Rows of 256 numbers through a small net; the classes below refuse some sizes of it."""

    width: int = 256

    def nets(self):
        return {"net": nn.Sequential(nn.Linear(256, self.width), nn.ReLU(), nn.Linear(self.width, 256))}

    def optimizers(self, nets):
        return {"sgd": torch.optim.SGD(nets["net"].parameters(), lr=0.1)}

    def batch(self, shape):
        return torch.randn(shape.items, shape.length or 1, 256)

    def loss(self, nets, batch):
        return nets["net"](batch).square().sum(), batch[..., 0].numel()


class Normalised(Rows):
    """Batch normalisation refuses one item."""

    def nets(self):
        net = super().nets()["net"]
        return {"net": nn.Sequential(nn.Flatten(), *net, nn.BatchNorm1d(256))}


class Halved(Rows):
    """Mixes the halves of a batch, which an odd number of items does not have."""

    def loss(self, nets, batch):
        first, second = batch.view(2, -1, 256)
        return nets["net"](first + second).square().sum(), len(batch)


class Positioned(Rows):
    """A table of positions has 48 rows."""

    unit, longest = "tokens", 48
    rows: int = 48

    def nets(self):
        return super().nets() | {"positions": nn.Embedding(self.rows, 256)}

    def optimizers(self, nets):
        return {"sgd": torch.optim.SGD([p for net in nets.values() for p in net.parameters()], lr=0.1)}

    def loss(self, nets, batch):
        return super().loss(nets, batch + nets["positions"].weight[: batch.shape[1]])


class PositionedByMask(Positioned):
    """Positions are a cumulative sum of a mask, as those of OPT."""

    def loss(self, nets, batch):
        mask = torch.ones(batch.shape[:2], device=batch.device)
        positions = nets["positions"]((mask.cumsum(1) * mask - 1).long())
        return Rows.loss(self, nets, batch + positions)


class Headed(Rows):
    """Attention whose four heads the width must divide, and no wider than 512."""

    ranges = types.MappingProxyType({"width": (4, 512)})

    def nets(self):
        attention = nn.MultiheadAttention(self.width, 4)
        return {"net": nn.ModuleList([nn.Linear(256, self.width), attention])}

    def loss(self, nets, batch):
        first, attention = nets["net"]
        x = first(batch)
        return attention(x, x, x)[0].square().sum(), len(batch)


class Padded(Rows):
    """Pads a batch to a multiple of 8."""

    def loss(self, nets, batch):
        return super().loss(nets, nn.functional.pad(batch, (0, 0, 0, 0, 0, -len(batch) % 8)))


class Grown(Rows):
    """As long as a setting says."""

    unit = "tokens"
    block: int = 32

    @property
    def longest(self):
        return self.block

    @longest.setter
    def longest(self, value):
        pass


class Saved(Rows):
    """Takes small blocks in validation, in a segment beside those that training leaves in the cache."""

    def validate(self, nets, batch):
        parts = [torch.ones(1 << 17, device=batch.device) for _ in range(64)]
        return {"mean": torch.stack([part.mean() for part in parts]).mean()}


class Layered(Rows):
    """As many layers as a setting says."""

    layers: int = 2

    def nets(self):
        return {"net": nn.Sequential(*[nn.Linear(256, 256) for _ in range(self.layers)])}


def of(name, verb, *options, capsys):
    """(exit code, what a verb answers of a class of this file)."""
    with pytest.raises(SystemExit) as stop:
        main([verb, f"{__name__}:{name}", "--device", "t4", *options, "--json"])
    written = capsys.readouterr()
    assert stop.value.code in (0, 3), written.err
    return stop.value.code, json.loads(written.out)


def most(name, *options, capsys):
    """The first answer of ``memfit max``, under 256 MiB."""
    _, answer = of(name, "max", "--memory", "256MiB", *options, capsys=capsys)
    return answer["results"][0]


@pytest.mark.parametrize(("name", "step"), [("Normalised", 1), ("Halved", 2)])
def test_the_largest_of_a_job_that_refuses_one_item(name, step, capsys):
    result = most(name, capsys=capsys)
    assert (result["exact"], result["step"], bool(result["refused"])) == (True, step, step > 1)
    size = result["largest"]
    for items, code in ((size, 0), (size + step, 3)):
        assert of(name, "predict", "--memory", "256MiB", "--shape", str(items), capsys=capsys)[0] == code
    assert size % step == 0


def test_cards_of_a_job_that_refuses_one_item(capsys):
    _, answer = of("Normalised", "cards", "--micro-batch", "8", capsys=capsys)
    assert answer["cards"][0]["largest_micro_batch"] > 8


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("max", "Rows", "--items", "4"), "--items 4: the largest micro-batch is asked for"),
        (("cards", "Rows", "--micro-batch", "8", "--global-batch", "4"), "less than the micro-batch of 8"),
        (("predict", "Normalised"), "such as --micro-batch 2"),
    ],
)
def test_what_cannot_be_answered_is_refused_in_one_line(arguments, words, capsys):
    verb, name, *options = arguments
    with pytest.raises(SystemExit) as stop:
        main([verb, f"{__name__}:{name}", "--device", "t4", *options])
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line


def test_a_size_that_the_job_refuses_follows_from_no_other():
    asked = AskedJob("halved", Halved)
    policy = asked.facts.policies[0]
    largest.largest_of(policy, CARD, asked, largest.by_items(None))
    with pytest.raises(RuntimeError, match="is invalid for input"):
        asked.predict(Shape(items=33), CARD, checkpointing={})


def test_sizes_that_are_padded_alike_say_nothing_of_others():
    asked = AskedJob("padded", Padded)
    for items in (1, 9, 801):
        asked.predict(Shape(items=items), CARD, checkpointing={})
    assert asked.traced == 3
    again = predict(Padded(), "padded", Shape(items=408), CARD, checkpointing={})
    assert asked.predict(Shape(items=408), CARD, checkpointing={}).footprint == again.footprint


def test_the_longest_sequence_of_a_table_of_positions(capsys):
    result = most("Positioned", "--length", capsys=capsys)
    assert (result["largest"], result["exact"], result["stopped"]) == (48, False, False)
    assert [refused["size"] for refused in result["refused"]] == [49]
    assert "RuntimeError" in result["refused"][0]["reason"]


def test_the_longest_sequence_of_a_table_of_positions_that_a_mask_counts(capsys):
    result = most("PositionedByMask", "--length", capsys=capsys)
    assert (result["largest"], result["exact"], result["stopped"]) == (48, False, False)
    assert "index 48 of a tensor that has 48 rows" in result["refused"][0]["reason"]


def test_the_largest_width_that_heads_divide_and_its_range_holds(capsys):
    result = most("Headed", "--vary", "width", capsys=capsys)
    assert result["largest"] == 512
    assert result["refused"]


def test_a_setting_that_the_length_follows_is_varied_with_it(capsys):
    result = most("Grown", "--vary", "block", capsys=capsys)
    assert result["exact"]
    size = result["largest"]
    assert result["shape"] == {"items": 1, "length": size}
    for block, code in ((size, 0), (size + 1, 3)):
        answer = of("Grown", "predict", "--memory", "256MiB", "--set", f"block={block}", capsys=capsys)
        assert answer[0] == code
        if code == 0:
            assert answer[1]["phases"]["train"]["process_bytes"] == result["process_bytes"]


def test_the_bytes_are_those_of_the_phase_that_needs_most(capsys):
    result = most("Saved", capsys=capsys)
    _, alone = of("Saved", "predict", "--memory", "256MiB", "--shape", str(result["largest"]), capsys=capsys)
    needs = {name: phase["process_bytes"] for name, phase in alone["phases"].items() if phase}
    assert needs["validate"] > needs["train"]
    assert result["limiting_phase"] == "train"
    assert result["process_bytes"] == max(needs.values())


def test_a_budget_that_the_device_cannot_hold_is_an_error(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["predict", f"{__name__}:Rows", "--device", "t4", "--memory", "64MiB", "--budget", "1GiB", "--ci"])
    assert stop.value.code == 3
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("::error::")
    assert line.endswith("within the budget of 1.00 GiB but does not fit in 64.0 MiB.")


def test_a_setting_that_adds_layers_stops_where_a_trace_is_too_long(capsys, monkeypatch):
    monkeypatch.setattr(largest, "EVENTS", 2_000)
    monkeypatch.setattr(Layered, "width", 8)
    with pytest.raises(SystemExit):
        main(["max", f"{__name__}:Layered", "--vary", "layers", "--device", "b200"])
    out = capsys.readouterr().out
    assert "or more" in out.splitlines()[0], "the verdict says so too"
    assert "whose trace is too long (the trace: it makes more than 2,000 allocations and frees)" in out
