"""pytest tests/show/test_report.py: reports in real headless Chromium."""

import json
from pathlib import Path

import pytest

from memfit.audit import Meant, audit
from memfit.cli import main
from memfit.device.hardware.catalogue import find_device, with_memory
from memfit.geometry import shape_of
from memfit.job import Shape
from memfit.loading import load_job
from memfit.plan import MemoryOption, Plan, read_plan, write_plan
from memfit.planner.predict import predict
from memfit.show.page import render, write_page
from memfit.show.report import report
from memfit.show.report_audit import audit_report
from memfit.show.timeline import place_of
from memfit.show.trace_file import write_trace
from memfit.sizes import format_size
from testing.browser import browser, missing, opened, show_as, text
from testing.linear_layer import LinearLayer
from tests.hostile import HOSTILE, JOB

pytest.importorskip("selenium")
from selenium.webdriver import ActionChains, Keys
from selenium.webdriver.support.ui import WebDriverWait

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())


@pytest.fixture(scope="module")
def driver():
    with browser() as item:
        yield item


@pytest.fixture(scope="module")
def prediction():
    job = load_job(f"{Path(__file__).parents[2]}/testing/nets.py:Transformer")
    device = with_memory(find_device("rtx4090"), 2 << 30)
    return predict(job, "dit", shape_of(job, 640), device, micro_batches=2, checkpointing={"dit.blocks.0": "full"})


@pytest.fixture(scope="module")
def page(prediction, tmp_path_factory):
    folder = tmp_path_factory.mktemp("prediction")
    write_trace(folder / "t.npz", prediction)
    write_page(report(folder / "t.npz"), folder / "t.html")
    return folder / "t.html"


@pytest.fixture
def plan(tmp_path):
    """A plan of a job whose file and module have hostile names."""
    (tmp_path / "job.py").write_text(JOB)
    hostile = MemoryOption(name=HOSTILE, applied=True, saves_bytes=1 << 20, costs=HOSTILE, reason=HOSTILE)
    phases = {"train": {"allocated_bytes": 1000, "process_bytes": 1000, "process_bytes_high": 1000}}
    return Plan(
        job=f"{tmp_path}/job.py:Hostile",
        settings={},
        device="cpu",
        budget_bytes=1 << 30,
        unit=HOSTILE,
        global_batch=8,
        micro_batch=8,
        micro_batches=[[8]],
        arithmetic=f"8 = 1 x 8 {HOSTILE}",
        engine="single",
        precision="fp32",
        seed=0,
        reasons={HOSTILE: HOSTILE},
        options=[hostile],
        phases=phases,
    )


def write_run(folder: Path, plan: Plan, windows: int) -> None:
    """A folder as memfit run leaves it, with losses that are not numbers and ids of two ranks."""
    write_plan(plan, folder / "plan.toml")
    with open(folder / "metrics.jsonl", "w") as metrics, open(folder / "samples.jsonl", "w") as samples:
        for i in range(windows):
            loss = float("nan") if i == 3 else 2.0 - i / windows
            line = {
                "window": i,
                "loss": loss,
                "units_per_second": 10.0,
                "micro_batches": 1,
                "seconds": 0.1,
                "measured_process_bytes": 900 if i != 4321 else 1234,
                "predicted_process_bytes": 1000,
                HOSTILE: HOSTILE,
            }
            metrics.write(json.dumps(line) + "\n")
            for rank in (0, 1):
                samples.write(json.dumps({"window": i, "rank": rank, "ids": [(i % 16) * 4 + rank * 2]}) + "\n")
        metrics.write('{"window": 99999, "lo')


@pytest.mark.parametrize("width", [1200, 400])
@pytest.mark.parametrize("dark", [False, True])
def test_a_prediction_opens_quietly_alone_and_within_its_width(driver, page, width, dark) -> None:
    show_as(driver, width, 900, dark=dark)
    opened(driver, page)
    assert driver.find_element("css selector", "h1").text.startswith("✓ Fits")
    paper = driver.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert paper == ("rgb(20, 23, 27)" if dark else "rgb(255, 255, 255)")


def test_hover_shows_module_and_operator(driver, page, prediction) -> None:
    show_as(driver, 1200, 900, dark=False)
    opened(driver, page)
    area = driver.find_element("css selector", "#timeline .plot .nsewdrag")
    driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", area)
    inside = 0
    for across in range(-400, 500, 150):
        ActionChains(driver).move_to_element_with_offset(area, across, 40).pause(0.2).perform()
        label = driver.execute_script("return document.querySelector('.hoverlayer').textContent")
        event = driver.execute_script(
            "return JSON.parse(document.querySelector('#data').textContent)[0]"
            ".x[document.querySelector('#timeline input').value]"
        )
        module, operator = place_of(prediction.trace, event)
        assert text(driver, "[data-out=module]") == (module or "outside of any module")
        assert text(driver, "[data-out=operator]") == operator
        assert f"event {event + 1:,} of" in text(driver, "[data-out=when]")
        assert (module or "outside of any module") + operator in label
        inside += module.startswith("dit.blocks")
    assert inside


def test_a_drag_zooms_and_a_double_click_shows_all_again(driver, page) -> None:
    show_as(driver, 1200, 900, dark=False)
    opened(driver, page)
    area = driver.find_element("css selector", "#timeline .plot .nsewdrag")
    driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", area)
    pressed = "return [...document.querySelectorAll('button[aria-pressed=true]')].map(button => button.textContent)"
    assert driver.execute_script(pressed) == ["all"]
    ActionChains(driver).move_to_element(area).click_and_hold().move_by_offset(150, 2).pause(0.2).release().perform()
    WebDriverWait(driver, 5).until(lambda item: item.execute_script(pressed) == [])

    def shows_all(item):
        """Two clicks are a double click only within 0.3 seconds, which a busy machine may exceed."""
        shown = item.execute_script(pressed) == ["all"]
        if not shown:
            ActionChains(driver).pause(0.5).move_to_element(area).double_click().perform()
        return shown

    WebDriverWait(driver, 15, poll_frequency=1).until(shows_all)


def test_the_peak_that_is_read_out_is_the_traces(driver, page, prediction) -> None:
    from memfit.show.timeline import alive_by_category

    show_as(driver, 1200, 900, dark=False)
    opened(driver, page)
    alive = alive_by_category(prediction.trace)
    assert text(driver, "[data-out=total]").startswith(format_size(alive.sum(0).max()))
    rows = driver.find_elements("css selector", "tr[data-band]")
    assert rows[-1].text.split("\n")[0].startswith("parameters")


def test_every_control_is_reached_and_worked_by_keyboard(driver, page) -> None:
    show_as(driver, 1200, 900, dark=False)
    opened(driver, page)
    reached = []
    for _ in range(40):
        ActionChains(driver).send_keys(Keys.TAB).perform()
        active = driver.execute_script(
            "const a = document.activeElement;"
            "return [a.tagName, a.textContent.trim().slice(0, 20), getComputedStyle(a).outlineStyle, a.type || '']"
        )
        if active[0] == "BODY":
            break
        assert active[2] != "none", f"the focus of {active} cannot be seen"
        reached.append(active)
        if active[3] == "range":
            before = text(driver, "[data-out=when]")
            ActionChains(driver).send_keys(Keys.ARROW_LEFT * 5).perform()
            assert text(driver, "[data-out=when]") != before
            assert driver.execute_script("return document.querySelector('.hoverlayer').textContent") != ""
        if active[1] == "window 2":
            ActionChains(driver).send_keys(Keys.SPACE).perform()
            shown = driver.execute_script(
                "return document.querySelector('.plot')._fullLayout.xaxis.range.map(Math.round)"
            )
            assert shown[0] > 0
        if active[0] == "SUMMARY":
            ActionChains(driver).send_keys(Keys.ENTER).perform()
            assert driver.execute_script("return document.activeElement.parentElement.open")
    tags = [item[0] for item in reached]
    assert {"A", "BUTTON", "INPUT", "SUMMARY", "DIV"} <= set(tags)
    names = [item[1] for item in reached if item[0] == "BUTTON"]
    assert names == [
        "all",
        "setup",
        "window 1",
        "window 2",
        "validate",
        "peak of setup",
        "peak of window 1",
        "peak of window 2",
        "peak of validate",
    ]


@pytest.mark.parametrize("width", [1200, 400])
def test_a_plan_with_hostile_names_shows_them_as_text(driver, plan, tmp_path, width) -> None:
    write_plan(plan, tmp_path / "plan.toml")
    write_page(report(tmp_path / "plan.toml"), tmp_path / "plan.html")
    show_as(driver, width, 900, dark=False)
    opened(driver, tmp_path / "plan.html")
    assert HOSTILE in text(driver, ".arithmetic")
    assert HOSTILE in text(driver, "dl.reasons")
    assert HOSTILE in text(driver, "tbody th")
    assert driver.find_elements("css selector", "img") == []
    module = driver.execute_script("return document.querySelector('#timeline .plot').data.at(-1).text.join(' ')")
    assert "<script>" not in module
    assert "net.&lt;/script&gt;" in module or "onerror" in module
    assert "What to do." in text(driver, "p.cure")
    assert f"memfit probe {tmp_path}/plan.toml" in [line.text for line in driver.find_elements("css selector", "pre")]


def test_a_run_shows_what_was_measured_against_what_was_predicted(driver, plan, tmp_path) -> None:
    write_run(tmp_path, plan, 9000)
    main_exit(["report", str(tmp_path)])
    show_as(driver, 1200, 900, dark=False)
    opened(driver, tmp_path / "report.html")
    assert (
        driver.find_element("css selector", "h1").text
        == "≈ Not finished: stopped after 9000 windows, loss 2 to 1; peak 1.2 KiB of 1.00 GiB"
    )
    assert f"memfit run {tmp_path}/plan.toml --out {tmp_path} --resume" in text(driver, "p.cure")
    assert "23.4% more" in driver.find_element("css selector", "section p").text
    memory = driver.execute_script("return JSON.parse(document.querySelector('#data').textContent)[0].panels[0].lines")
    collected = [(line["name"], max(line["y"])) for line in memory]
    assert collected == [("measured", 1234), ("planned", 1000), ("budget", 1 << 30)]
    assert len(memory[0]["y"]) <= 1500, "few windows are drawn, and the highest is among them"
    drawn = driver.execute_script("return document.querySelector('#windows .plot').data.map(line => line.y.length)")
    assert len(drawn) == 5, "the budget lies far above, and is told in the title"
    assert "budget 1.00 GiB" in text(driver, "#windows .infolayer")
    driver.find_element("css selector", "#windows input").send_keys(Keys.ARROW_LEFT)
    label = driver.execute_script("return document.querySelector('#windows .hoverlayer').textContent")
    assert all(f"{name}:" in label for name in ("measured", "planned", "loss", "micro-batches"))
    cells = [row.text.split() for row in driver.find_elements("css selector", "section:nth-of-type(2) tbody tr")]
    assert cells == [
        ["rank", "0", "9,000", "9,000", "16", "563", "×"],
        ["rank", "1", "9,000", "9,000", "16", "563", "×"],
    ]


FLIGHT = {
    "window": 2,
    "part": "backward",
    "micro_batch": 1,
    "ids": list(range(12)),
    "requested_bytes": 3 << 20,
    "held_bytes": 60 << 20,
    "budget_bytes": 64 << 20,
    "message": HOSTILE,
    "resident": {
        "measured": {"parameters": 8 << 20, "gradients": 4 << 20, "ema": 0, "rest": 40 << 20},
        "by_module": [{"module": f"net.{HOSTILE}", "bytes": 5 << 20}],
        "predicted_at_peak": {"parameters": 8 << 20, "activations": 30 << 20},
    },
    "options": [{"name": "recompute", "saves_bytes": 20 << 20, "costs": HOSTILE}],
}


def test_a_failed_run_shows_its_flight_record_and_what_was_monitored(driver, plan, tmp_path) -> None:
    write_plan(plan, tmp_path / "plan.toml")
    (tmp_path / "flight.json").write_text(json.dumps(FLIGHT))
    with open(tmp_path / "metrics.jsonl", "w") as metrics:
        for i in range(12):
            line = {
                "window": i,
                "loss": 1.0,
                "units_per_second": 10.0,
                "micro_batches": 2,
                "seconds": 0.5,
                "measured_process_bytes": 60 << 20,
                "predicted_process_bytes": 58 << 20,
                "retries": int(i == 2),
                "cpu_utilisation": 0.9,
                "gpu_utilisation": None,
                "noise_scale": 40.0 if i > 4 else None,
                "validation_seconds": 2.0 if i % 4 == 3 else None,
            }
            metrics.write(json.dumps(line) + "\n")
    main_exit(["report", str(tmp_path)])
    show_as(driver, 400, 900, dark=True)
    opened(driver, tmp_path / "report.html")
    verdict = driver.find_element("css selector", "h1").text
    assert verdict.startswith("✗ Not finished: stopped after 12 windows")
    assert "memory ran out in the backward of window 2, micro-batch 1: 3.0 MiB asked for" in verdict
    first = driver.find_element("css selector", "section").text
    assert "Samples: 0, 1, 2, 3, 4, 5, 6, 7 and 4 more" in first
    assert HOSTILE in first
    rows = [
        row.text for row in driver.find_elements("css selector", "section:nth-of-type(1) table:first-of-type tbody tr")
    ]
    assert "parameters 8.0 MiB 8.0 MiB" in rows
    assert "activations – 30.0 MiB" in rows
    assert not any(row.startswith("ema") for row in rows)
    panels = driver.execute_script(
        "return JSON.parse(document.querySelector('#data').textContent)[0].panels.map(p => [p.name, p.lines.length])"
    )
    assert [name for name, _ in panels[4:]] == [
        "part of the time busy",
        f"gradient noise scale, {HOSTILE}",
        "seconds",
        "retries",
    ]
    assert dict(panels)["part of the time busy"] == 1, "no GPU was seen, so none is drawn"


@pytest.mark.parametrize("record", ["", "[]", "{}", '{"resident": 3, "options": [1], "ids": 4}'])
def test_a_flight_record_that_is_not_one_breaks_no_report(plan, tmp_path, record) -> None:
    write_plan(plan, tmp_path / "plan.toml")
    (tmp_path / "flight.json").write_text(record)
    assert "Nothing was trained" in report(tmp_path).verdict


def test_an_audit_has_its_findings_counts_and_strips(driver, tmp_path) -> None:
    audited = audit(
        lambda rank, world: [[i] for i in range(rank, 64, world * world)],
        [1, 2],
        meant=Meant(global_batch=1, unit="samples"),
    )
    write_page(audit_report(audited, HOSTILE), tmp_path / "a.html")
    show_as(driver, 400, 900, dark=True)
    opened(driver, tmp_path / "a.html")
    assert HOSTILE in text(driver, ".over")
    assert driver.find_element("css selector", "h1").text.startswith("✗ Faults")
    assert len(driver.find_elements("css selector", ".strip svg path")) == 5
    assert (tmp_path / "a.html").stat().st_size < 100_000, "no plot, no plotly"


def main_exit(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert left.value.code == 0


def test_a_page_states_that_nothing_may_be_fetched(prediction) -> None:
    from memfit.show.report import prediction_report

    page = render(prediction_report(prediction))
    policy = page.split('Content-Security-Policy" content="')[1].split('"')[0]
    assert policy.startswith("default-src 'none'")
    assert policy.count("sha256-") == 2
    assert "unsafe-eval" not in policy
    assert "unsafe-inline" not in policy.split("script-src")[1]
    assert len(page) < 8_000_000


def test_two_runs_side_by_side(driver, plan, tmp_path) -> None:
    for name, windows in (("a", 20), ("b", 10)):
        (tmp_path / name).mkdir()
        write_run(tmp_path / name, plan, windows)
    main_exit(["report", "--compare", str(tmp_path / "a"), str(tmp_path / "b"), "--out", str(tmp_path / "c.html")])
    show_as(driver, 400, 900, dark=True)
    opened(driver, tmp_path / "c.html")
    assert driver.find_element("css selector", "h1").text == "B took the same memory, and the same time a window"
    rows = [row.text.split() for row in driver.find_elements("css selector", "section:first-of-type tbody tr")]
    assert rows[0] == ["windows", "20", "10", "B:", "50.0%", "less"]
    memory = driver.execute_script("return document.querySelector('#windows .plot').data.map(line => line.y.length)")
    assert memory == [20] * 8


def test_a_plan_shows_the_other_cards_as_predict_does(tmp_path):
    main_exit(["plan", "testing/linear_layer.py:LinearLayer", "--global-batch", "64", "--device", "l40s", "--out",
               str(tmp_path / "plan.toml")])  # fmt: skip
    page = report(tmp_path / "plan.toml")
    cards = next(section for section in page.sections if section.title == "Other cards").tables[0]
    plan = read_plan(tmp_path / "plan.toml")
    predicted = predict(
        LinearLayer(), "linear", Shape(items=plan.micro_batch), find_device("rtx4090"), plan=plan,
        micro_batches=len(plan.micro_batches[0]), checkpointing=plan.checkpointing,
    ).footprint  # fmt: skip
    row = next(row for row in cards.rows if row[0] == "rtx4090")
    need = max(phase.process_bytes for phase in predicted.phases.values())
    assert row[1:3] == (predicted.verdict, format_size(need))
    assert page.advice == f"Run it: memfit run {tmp_path}/plan.toml --out RUN."
