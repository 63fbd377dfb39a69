"""Cards side by side, and their prices.

python -m pytest tests/planner/test_card_comparison.py
"""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from memfit.cli import main
from memfit.device.hardware.catalogue import catalogue, find_device
from memfit.errors import InputError
from memfit.job import Job, Loss, Shape
from memfit.plan import read_plan
from memfit.planner.asked_job import AskedJob
from memfit.planner.card_comparison import compare_cards, read_prices
from memfit.planner.predict import predict
from memfit.show.cards_table import cards_line
from tests.planner.test_largest import JOB


def test_each_card_s_figures_are_those_of_predict():
    devices = [find_device(name) for name in ("t4", "rtx4090")]
    prices = read_prices("examples/prices.csv")
    cards = compare_cards(
        AskedJob("dit", lambda: JOB),
        Shape(items=4),
        devices,
        global_batch=16,
        prices=prices,
        count_epoch=lambda: (3200, ""),
        find_largest=False,
    )
    assert [card.prediction.footprint for card in cards] == [
        predict(JOB, "dit", Shape(items=4), device, micro_batches=2).footprint for device in devices
    ]
    t4, rtx4090 = cards
    assert rtx4090.epoch_seconds == pytest.approx(200 * rtx4090.window_seconds)
    assert rtx4090.epoch_joules == pytest.approx(450 * rtx4090.epoch_seconds)
    assert rtx4090.epoch_cost == pytest.approx(0.4 * rtx4090.epoch_seconds / 3600)
    assert (t4.epoch_cost, t4.largest) == (None, None)
    assert cards_line(cards).startswith("Fits on 2 of 2 cards; fastest: RTX 4090")


class Heavy(Job):
    """Weights of 64 MiB, whose gradients lie beside the activations of all micro-batches but the first."""

    def nets(self):
        return {"net": nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(16)))}

    def optimizers(self, nets):
        return {"net": torch.optim.SGD(nets["net"].parameters(), lr=0.1)}

    def batch(self, shape):
        return torch.randn(shape.items, 4096, 1024)

    def loss(self, nets, batch):
        return Loss(nets["net"](batch).square().mean((1, 2)).sum(), len(batch))


def test_a_global_batch_of_several_micro_batches_is_predicted_with_accumulation():
    card, shape = find_device("rtx4090"), Shape(items=2)

    def card_with(global_batch):
        asked = AskedJob("heavy", Heavy)
        (answer,) = compare_cards(asked, shape, [card], global_batch=global_batch, find_largest=False)
        return answer

    alone, two, three, eight = map(card_with, (None, 4, 5, 16))
    assert alone.prediction.footprint == predict(Heavy(), "heavy", shape, card).footprint
    for accumulated in (two, three, eight):
        footprint = predict(Heavy(), "heavy", shape, card, micro_batches=8).footprint
        assert accumulated.prediction.footprint == footprint
    more = (
        two.prediction.footprint.phases["train"].allocated_bytes
        - alone.prediction.footprint.phases["train"].allocated_bytes
    )
    assert more >= 56 << 20
    each = two.window_seconds - alone.window_seconds
    assert three.window_seconds == pytest.approx(two.window_seconds + each / 2, rel=0.02)
    assert eight.window_seconds == pytest.approx(two.window_seconds + 6 * each, rel=0.02)


def test_a_global_batch_is_told_and_a_script_has_none(capsys):
    command = ("cards", "testing/large_nets.py:Dit", "--set", "depth=1", "--device", "t4")
    code, printed = run(capsys, *command, "--micro-batch", "1", "--global-batch", "6")
    assert code == 0
    assert "testing/large_nets.py:Dit, 1 sample, 6 samples a window\n" in printed.out
    assert "without accumulation, as of memfit max" in printed.out
    code, printed = run(capsys, *command, "--no-largest")
    assert "testing/large_nets.py:Dit, 1 sample\n" in printed.out
    assert "accumulation" not in printed.out
    code, printed = run(capsys, "cards", "--global-batch", "8", "--", "python", "examples/scripts/gpt2.py")
    assert (code, printed.err) == (
        2,
        "memfit: --global-batch 8: a script is asked as it is written; leave --global-batch out\n",
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("card,price\nt4,1\n", "no price_per_hour"),
        ("card,price_per_hour,currency\nt5,1,USD\n", "not in the catalogue"),
        ("card,price_per_hour,currency\nt4,cheap,USD\n", "not a number"),
        ("card,price_per_hour,currency\nt4,nan,USD\n", "not a number"),
        ("card,price_per_hour,currency\nt4,1,USD\nl40s,1,EUR\n", "mixes EUR and USD"),
        ("card,price_per_hour,currency\n", "no prices"),
        ("card,price_per_hour,currency\nt4,1,USD\nt4,2,USD\n", "card 't4': it has two rows"),
        ("card,price_per_hour,currency\nt4,1_0,USD\n", "not a number"),
        ("card,price_per_hour,currency\nt4,0,40,EUR\n", "row 1: it has more values than the first line has columns"),
        ("card,price_per_hour,currency\nt4,1, \n", "row 1: it has no currency"),
        ("card,price_per_hour,currency,currency\nt4,1,USD,EUR\n", "it has two columns currency"),
    ],
)
def test_prices_that_cannot_be_read_are_refused(tmp_path, text, message):
    path = tmp_path / "prices.csv"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        read_prices(path)


def test_prices_that_a_spreadsheet_wrote_are_read(tmp_path):
    path = tmp_path / "prices.csv"
    path.write_text("card,price_per_hour,currency\r\nt4,0.5,EUR,\r\n", encoding="utf-8-sig")
    assert read_prices(path)["t4"].per_hour == 0.5


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        main([*arguments])
    return ended.value.code, capsys.readouterr()


def test_the_command_lists_every_card(capsys):
    code, printed = run(capsys, "cards", "testing/large_nets.py:Dit", "--set", "depth=1", "--no-largest", "--json")
    assert code == 0
    cards = json.loads(printed.out)["cards"]
    asked = [key for key, device in catalogue().items() if device.is_cuda]
    assert [card["device"] for card in cards] == asked
    assert all(card["process_bytes"] > 0 for card in cards)


def test_a_comparison_says_what_each_saves_and_what_differs(capsys):
    arguments = ("compare", "testing/large_nets.py:Dit", "--set", "depth=1", "--checkpoint", "all", "--device", "t4")
    code, printed = run(capsys, *arguments, "--json")
    assert code == 0
    answer = json.loads(printed.out)
    first, smaller, recomputed = answer["subjects"]
    assert answer["differences"]["depth"][1] == 1
    assert smaller["saves_bytes"] == first["process_bytes"] - smaller["process_bytes"] > 0
    _, predicted = run(
        capsys, "predict", "testing/large_nets.py:Dit", "--checkpoint", "all", "--device", "t4", "--json"
    )
    same = ("phases", "checkpointing", "settings")
    assert recomputed["checkpointing"]
    assert {key: recomputed[key] for key in same} == {key: json.loads(predicted.out)[key] for key in same}


@pytest.mark.parametrize("device", [("cpu", "--memory", "2GiB"), ("t4",)], ids=["cpu", "t4"])
def test_a_plan_is_compared_with_the_bytes_that_it_says_itself(capsys, tmp_path, device):
    """On a CPU with those of the copy that is kept of what is saved."""
    path = str(tmp_path / "plan.toml")
    job = "testing/linear_layer.py:LinearLayer"
    run(capsys, "plan", job, "--global-batch", "4", "--out", path, "--device", *device)
    _, printed = run(capsys, "compare", path, path, "--json")
    planned = read_plan(Path(path)).phases
    for subject in json.loads(printed.out)["subjects"]:
        assert {name: phase["process_bytes"] for name, phase in subject["phases"].items()} == {
            name: phase["process_bytes"] for name, phase in planned.items()
        }


def test_a_comparison_of_nothing_is_refused(capsys):
    code, printed = run(capsys, "compare", "testing/large_nets.py:Dit", "--device", "t4")
    assert code == 2
    assert "nothing to compare it with" in printed.err


def test_prices_that_are_not_there_are_one_line(tmp_path):
    with pytest.raises(InputError, match=r"none\.csv: cannot be read: No such file or directory; write the path"):
        read_prices(tmp_path / "none.csv")
