"""pytest tests/show/test_settings_page.py: the page of memfit ui in real Chromium, against predict to the byte."""

import gc
import json
import random
import shlex
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn

import memfit
from memfit.cli import main
from memfit.device.hardware.catalogue import catalogue, find_device
from memfit.footprint import Footprint
from memfit.job import Shape
from memfit.loading import load_job
from memfit.planner.asked_job import AskedJob
from memfit.planner.derived_steps import card_groups
from memfit.planner.predict import checkpoint_all, plain_nets
from memfit.show.settings_page import write_settings_page
from testing.browser import browser, missing, opened, show_as, text
from testing.nets import JOBS
from testing.traced_questions import TracedQuestions
from tests.hostile import HOSTILE, JOB
from tests.show.contrasted_job import Contrasted

pytest.importorskip("selenium")
from selenium.webdriver.support.ui import Select, WebDriverWait

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())
SEED = random.randrange(1 << 32)
"""Printed where a test fails; settings are drawn from it."""
SETTINGS = 40
LINEAR = Path(__file__).parents[2] / "testing/linear_layer.py"


class Tagger(memfit.Job):
    """Two blocks that can be recomputed; its step runs one operator more from 100 items of its longest length on, and
    of shorter items one more for every 4 from 8 to 160."""

    unit, longest = "tokens", 96

    def nets(self):
        blocks = nn.ModuleList(nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(2))
        return {"tagger": nn.ModuleDict({"blocks": blocks})}

    def checkpointable(self, nets):
        return [f"tagger.blocks.{number}" for number in range(2)]

    def batch(self, shape):
        return {"x": torch.randn(shape.items, shape.length, 256)}

    def loss(self, nets, batch):
        x = batch["x"]
        for block in nets["tagger"]["blocks"]:
            x = x + block(x)
        if len(x) >= 100 and x.shape[1] == 96:
            x = x.sin()
        for _ in range(min(max(len(x) // 4 - 1, 0), 40) if x.shape[1] == 32 else 0):
            x = x.sin()
        return memfit.Loss(x.square().sum(), x.shape[0] * x.shape[1])

    def optimizers(self, nets):
        return {"adamw": torch.optim.AdamW(nets["tagger"].parameters(), lr=1e-3)}


class Convolved(memfit.Job):
    """Convolutions in bf16, whose workspaces cuDNN can do without."""

    precision = "bf16"

    def nets(self):
        return {"net": nn.Sequential(nn.Conv3d(4, 32, 3, padding=1), nn.SiLU(), nn.Conv3d(32, 4, 3, padding=1))}

    def batch(self, shape):
        return torch.randn(shape.items, 4, 4, 16, 16)

    def loss(self, nets, batch):
        return nets["net"](batch).square().sum(), len(batch)

    def optimizers(self, nets):
        return {"sgd": torch.optim.SGD(nets["net"].parameters(), lr=0.1)}


@pytest.fixture(scope="module")
def driver():
    with browser() as item:
        yield item


@pytest.fixture(scope="module")
def tagger_page(tmp_path_factory):
    gc.freeze()
    path = tmp_path_factory.mktemp("ui") / "tagger.html"
    asked = AskedJob("tagger.py:Tagger", Tagger)
    groups = card_groups(asked, [find_device("rtx4060")])
    write_settings_page(path, asked.facts, "tagger.py:Tagger", (), groups)
    return path


def ready(driver, path) -> None:
    opened(driver, path)
    WebDriverWait(driver, 30).until(lambda d: d.execute_script("return document.documentElement.dataset.ready"))


def derivable_settings(data, count: int, draw: random.Random) -> list[dict]:
    """Settings drawn from the page's own kinds, cards and ranges;"""
    settings = []
    for _ in range(count):
        card = draw.choice([card for card in data["cards"] if card["group"] is not None])
        kind = draw.choice(data["groups"][card["group"]])
        low, high = draw.choice(kind["ranges"])
        settings.append({
            "card": card["key"], "items": draw.randint(low, high), "length": kind["length"],
            "accumulate": draw.randint(2, 64) if kind["accumulated"] else 1, "checkpoint": kind["checkpoint"],
            "world": kind["world"],
        })  # fmt: skip
    return settings


RANGES = """return {cards: memfit.data.cards, groups: memfit.data.groups.map((kinds) => kinds.map(
    (kind) => ({...kind, ranges: kind.ranges.map((range) => [range.low, range.high])})))}"""


def disagreements(driver, job, count: int) -> list[str]:
    """Settings at which the page's answer is not that of memfit predict, and what it says there."""
    data = driver.execute_script(RANGES)
    draw = random.Random(SEED)
    questions, modes = TracedQuestions(), {"none": {}, "all": checkpoint_all(job, plain_nets(job))}
    wrong = []
    for setting in derivable_settings(data, count, draw):
        if draw.random() < 0.5:
            setting["items"] = driver.execute_script("return memfit.largest(arguments[0])", setting) or setting["items"]
        shown = driver.execute_script("return memfit.footprint(arguments[0])", setting)
        world = setting["world"]
        predicted = questions.predict(
            job, "job", Shape(items=setting["items"], length=setting["length"]), find_device(setting["card"]),
            micro_batches=setting["accumulate"], checkpointing=modes[setting["checkpoint"]], world=world,
            engine="ddp" if world > 1 else "single",
        ).footprint  # fmt: skip
        if figures(shown) != expected(predicted):
            wrong.append(f"{setting}: {figures(shown)}, but memfit predict says {expected(predicted)}")
    return wrong


def figures(shown: dict) -> dict:
    """The page's answer, as far as it is figures."""
    names = ("allocated_bytes", "reserved_bytes", "process_bytes", "process_bytes_low", "process_bytes_high",
             "categories", "at")  # fmt: skip
    if "why" in shown:
        return shown
    phases = {
        name: {key: phase[key] for key in names} | {"largest": phase["largest_request"]["bytes"]}
        for name, phase in shown["phases"].items()
    }
    failed = shown["failed_request"]
    request = failed and (failed["bytes"], failed["phase"], failed["module"], failed["operator"])
    return {name: shown[name] for name in ("fits", "verdict", "limiting_phase", "headroom_bytes")} | {
        "phases": phases, "failed": request,
    }  # fmt: skip


def expected(footprint: Footprint) -> dict:
    """The same of a Footprint."""
    phases = {
        name: {
            "allocated_bytes": phase.allocated_bytes, "reserved_bytes": phase.reserved_bytes,
            "process_bytes": phase.process_bytes, "process_bytes_low": phase.process_bytes_low,
            "process_bytes_high": phase.process_bytes_high, "categories": phase.categories,
            "at": {"module": phase.at.module, "operator": phase.at.operator}, "largest": phase.largest_request.bytes,
        }
        for name, phase in footprint.phases.items()
    }  # fmt: skip
    failed = footprint.failed_request
    request = failed and (failed.bytes, failed.phase, failed.module, failed.operator)
    return {
        "fits": footprint.fits, "verdict": footprint.verdict, "limiting_phase": footprint.limiting_phase,
        "headroom_bytes": footprint.headroom_bytes, "phases": phases, "failed": request,
    }  # fmt: skip


def test_the_page_agrees_with_predict_at_random_settings(driver, tagger_page):
    ready(driver, tagger_page)
    wrong = disagreements(driver, Tagger(), SETTINGS)
    assert not wrong, f"seed {SEED}: {len(wrong)} of {SETTINGS}\n" + "\n".join(wrong[:3])


def test_the_page_replays_workspaces_as_predict_does(driver, tmp_path):
    agrees(driver, tmp_path, Convolved(), "convolved", ("rtx4060",), 1)


def ranges_of(driver, length: int) -> list[list[int]]:
    """The lowest and highest items of the ranges in which the page derives the plain step of a length."""
    kinds = [kind for kind in driver.execute_script(RANGES)["groups"][0] if kind["length"] == length]
    plain = next(kind for kind in kinds if kind["checkpoint"] == "none" and not kind["accumulated"])
    return plain["ranges"]


def write(driver, control: str, value: int) -> None:
    driver.execute_script(
        "const box = document.getElementById(arguments[0]); box.value = arguments[1];"
        "box.dispatchEvent(new Event('input'))", control, value,
    )  # fmt: skip


def test_both_sides_of_the_size_at_which_a_step_changes_are_derived(driver, tagger_page):
    ready(driver, tagger_page)
    single, below, above = ranges_of(driver, 96)
    assert (single, below, above[0]) == ([1, 1], [2, 99], 100)
    for items in (99, 100):
        write(driver, "items-number", items)
        assert "Not derived" not in text(driver, "#verdict")


def test_sizes_between_other_operators_are_greyed_out_with_the_reason(driver, tagger_page):
    ready(driver, tagger_page)
    write(driver, "length", driver.execute_script("return memfit.data.lengths.indexOf(32)"))
    ranges = ranges_of(driver, 32)
    below, above = next((low[1], high[0]) for low, high in pairwise(ranges) if low[1] + 1 < high[0])
    write(driver, "items-number", below + 1)
    assert "Not derived on rtx4060" in text(driver, "#verdict")
    assert f"at {below} and at {above} items" in text(driver, "#reason")
    assert f"--shape {below + 1}x32" in text(driver, "#command-predict")


def test_sizes_whose_bytes_lie_on_no_line_are_greyed_out_with_that_reason(driver, tmp_path):
    page = tmp_path / "contrasted.html"
    asked = AskedJob("contrasted", Contrasted)
    write_settings_page(page, asked.facts, "contrasted", (), card_groups(asked, [find_device("rtx4060")]))
    ready(driver, page)
    below, above = next((low[1], high[0]) for low, high in pairwise(ranges_of(driver, None)) if low[1] + 1 < high[0])
    write(driver, "items-number", below + 1)
    assert "Not derived on rtx4060" in text(driver, "#verdict")
    assert f"the same tensors at {below} and at {above} items" in text(driver, "#reason")


def test_controls_change_the_verdict_and_the_commands(driver, tagger_page):
    ready(driver, tagger_page)
    assert "Fits on rtx4060 with" in text(driver, "#verdict")
    driver.find_element("id", "largest").click()
    largest = int(driver.find_element("id", "items-number").get_attribute("value"))
    assert largest > 1
    Select(driver.find_element("id", "checkpoint")).select_by_value("all")
    driver.find_element("id", "largest").click()
    assert int(driver.find_element("id", "items-number").get_attribute("value")) > largest
    Select(driver.find_element("id", "card")).select_by_value("rtx4090")
    command = text(driver, "#command-predict")
    assert command.startswith("memfit predict tagger.py:Tagger --device rtx4090 --shape ")
    assert command.endswith(" --checkpoint all")
    greyed = driver.execute_script("return [...document.querySelectorAll('#card option:disabled')].map((o) => o.value)")
    shown = driver.execute_script("return [...document.querySelectorAll('#card option')].map((o) => o.value)")
    assert "h100" in greyed
    assert not {"rtx4090", "a100-40gb"} & set(greyed)
    assert set(shown) == {key for key, card in catalogue().items() if card.is_cuda and card.usable_bytes}


def test_a_narrow_dark_page_is_no_wider_than_its_window(driver, tagger_page):
    show_as(driver, 400, 800, dark=True)
    try:
        ready(driver, tagger_page)
    finally:
        show_as(driver, 1200, 900, dark=False)


def test_texts_of_a_job_run_nothing(driver, tmp_path):
    (tmp_path / "job.py").write_text(JOB)
    job = load_job(f"{tmp_path}/job.py:Hostile")
    page = tmp_path / "hostile.html"
    asked = AskedJob(HOSTILE, lambda: job)
    groups = card_groups(asked, [find_device("rtx4090")])
    write_settings_page(page, asked.facts, HOSTILE, (f"name={HOSTILE}",), groups)
    ready(driver, page)
    assert HOSTILE in text(driver, "title")
    assert HOSTILE in text(driver, ".about")
    assert driver.execute_script("return JSON.stringify(memfit.data.steps[0].places)").count("window_broken")
    assert driver.execute_script("return document.images.length") == 0


def test_the_command_writes_a_page(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("memfit.cli.ui._other_cards", lambda targets, headroom: [find_device("l4")])
    out = tmp_path / "page.html"
    with pytest.raises(SystemExit) as left:
        main(["ui", f"{LINEAR}:LinearLayer", "--device", "rtx4060", "--out", str(out)])
    assert left.value.code == 0
    verdict, written = capsys.readouterr().out.splitlines()
    assert verdict.startswith("Fits on RTX 4060 with ")
    assert written == f"Written to {out}, with 2 cards: open it in a browser."
    assert out.read_text().startswith("<!doctype html>")


@pytest.mark.slow
def test_the_page_has_every_card_and_the_memory_that_was_asked_for(driver, tmp_path, capsys):
    out, every = (
        tmp_path / "page.html",
        [key for key, card in catalogue().items() if card.is_cuda and card.usable_bytes],
    )
    with pytest.raises(SystemExit):
        main(["ui", f"{LINEAR}:LinearLayer", "--memory", "2GiB", "--headroom", "10%", "--out", str(out)])
    assert "starts with rtx4090" in capsys.readouterr().out
    ready(driver, out)
    WebDriverWait(driver, 30).until(lambda d: d.find_elements("css selector", "#card-rows tr"))
    rows = driver.execute_script("return [...document.querySelectorAll('#card-rows tr')].map((r) => r.textContent)")
    assert len(rows) == len(every)
    assert not any("not derived" in row for row in rows)
    assert "--device rtx4090 --memory 2GiB --headroom 10%" in text(driver, "#command-predict")
    for card, options in (("rtx4090", ("--memory", "2GiB")), ("h200", ())):
        asked = dict(driver.execute_script("return memfit.data.start"), card=card, items=3)
        page = driver.execute_script("return memfit.footprint(arguments[0])", asked)
        with pytest.raises(SystemExit):
            main(["predict", f"{LINEAR}:LinearLayer", "--device", card, *options, "--headroom", "10%", "--shape", "3",
                  "--json"])  # fmt: skip
        predicted = json.loads(capsys.readouterr().out)
        assert page["headroom_bytes"] == predicted["headroom_bytes"]
        assert page["phases"]["train"]["process_bytes"] == predicted["phases"]["train"]["process_bytes"]


SCRIPT = """
import argparse, torch

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=4)
given = parser.parse_args()
net = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.BatchNorm1d(256)).cuda()
optimizer = torch.optim.AdamW(net.parameters())
for _ in range(8):
    net(torch.randn(given.batch_size, 256, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.slow
def test_the_page_of_a_script_answers_as_predict_does(driver, tmp_path, capsys):
    out, train = tmp_path / "page.html", tmp_path / "train.py"
    train.write_text(SCRIPT)
    command = ["python", str(train), "--batch-size", "{batch}"]
    with pytest.raises(SystemExit) as left:
        main(["ui", "--device", "rtx4060", "--out", str(out), "--", *command])
    assert left.value.code == 0
    assert capsys.readouterr().out.startswith("Fits on RTX 4060 with ")
    ready(driver, out)
    start = driver.execute_script("return memfit.data.start")
    commands = driver.execute_script("return memfit.commands(arguments[0])", dict(start, items=3))
    shown = shlex.join(command).replace(shlex.quote("{batch}"), "'{batch}'")
    assert commands == {"predict": f"memfit predict --device rtx4060 --micro-batch 3 -- {shown}", "plan": ""}
    most = max(high for _, high in driver.execute_script(RANGES)["groups"][0][0]["ranges"])
    assert most > 1000
    for items in (2, random.Random(SEED).randint(3, most), most):
        page = driver.execute_script("return memfit.footprint(arguments[0])", dict(start, items=items))
        with pytest.raises(SystemExit):
            main(["predict", "--device", "rtx4060", "--micro-batch", str(items), "--json", "--", *command])
        predicted = json.loads(capsys.readouterr().out)["phases"]["train"]
        names = ("allocated_bytes", "reserved_bytes", "process_bytes", "categories")
        assert {name: page["phases"]["train"][name] for name in names} == {name: predicted[name] for name in names}


def test_a_processor_and_a_folder_that_is_not_there_are_refused(tmp_path, capsys):
    for arguments in (["--device", "cpu"], ["--out", str(tmp_path / "none" / "page.html")]):
        with pytest.raises(SystemExit) as left:
            main(["ui", f"{LINEAR}:LinearLayer", *arguments])
        assert left.value.code == 2
        assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "cards", "ranks"),
    [("dit", ("rtx4060", "a100-40gb"), 2), ("unet", ("rtx4060",), 1), ("gan", ("rtx4060",), 1)],
)
def test_other_nets_agree_with_predict(driver, tmp_path, name, cards, ranks):
    agrees(driver, tmp_path, JOBS[name](), name, cards, ranks)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["f5_tts/base", "llama_lora.py:Llama8B", "unet.py:Discs", "gan.py:Waves"])
def test_large_jobs_agree_with_predict(driver, tmp_path, name):
    spec = name if "/" in name else f"{Path(__file__).parents[2] / 'examples'}/{name}"
    agrees(driver, tmp_path, load_job(spec), spec, ("rtx4090", "h100"), 1)


def agrees(driver, folder, job, name, cards, ranks):
    """Asserts that a job's page says at random settings what predict says, to the byte."""
    asked = AskedJob(name, lambda: job)
    groups = card_groups(asked, [find_device(card) for card in cards], ranks)
    write_settings_page(folder / "page.html", asked.facts, name, (), groups, ranks)
    ready(driver, folder / "page.html")
    wrong = disagreements(driver, job, SETTINGS)
    assert not wrong, f"seed {SEED}: {len(wrong)} of {SETTINGS}\n" + "\n".join(wrong[:3])
