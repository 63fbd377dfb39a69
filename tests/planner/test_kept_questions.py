"""A question that was traced before is answered from the cache, and traced anew where anything it depends on changed.

python -m pytest tests/planner/test_kept_questions.py
"""

import json
import subprocess
import sys

import pytest
import torch

from memfit.device.hardware.catalogue import find_device
from memfit.job import Job, Shape
from memfit.planner.asked_job import AskedJob
from memfit.planner.kept_questions import Shelf

JOB = """
import json, torch
from pathlib import Path
import memfit
from helper import WIDTH

class Plain(memfit.Job):
    depth: int = 2
    def nets(self):
        depth = json.loads(Path(__file__).with_name("config.json").read_text())["depth"] * self.depth
        return {"net": torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH) for _ in range(depth)])}
    def optimizers(self, nets):
        return {"net": torch.optim.AdamW(nets["net"].parameters())}
    def batch(self, shape):
        return torch.zeros(shape.items, WIDTH)
    def loss(self, nets, batch):
        return nets["net"](batch).square().sum(), len(batch)
"""
PAIR = """
    def _pair(self):
        up, down = torch.nn.Linear(WIDTH, 2 * WIDTH), torch.nn.Linear(2 * WIDTH, WIDTH)
        return torch.nn.Sequential(up, torch.nn.ReLU(), down)
"""
"""Two layers that tp cuts together, in place of one."""
ASK = """
import sys
from memfit.cli import main
try:
    main(sys.argv[1:])
finally:
    print("torch" in sys.modules, file=sys.stderr)
"""


CARD = find_device("rtx4090")


class Small(Job):
    def nets(self):
        return {"net": torch.nn.Linear(4, 4)}

    def optimizers(self, nets):
        return {"net": torch.optim.SGD(nets["net"].parameters())}

    def batch(self, shape):
        return torch.zeros(shape.items, 4)

    def loss(self, nets, batch):
        return nets["net"](batch).sum(), len(batch)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "job.py").write_text(JOB)
    (tmp_path / "helper.py").write_text("WIDTH = 64\n")
    (tmp_path / "config.json").write_text('{"depth": 1}')
    monkeypatch.setenv("MEMFIT_KEEP_TRACES", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def ask(folder, *arguments, device="rtx4090"):
    """(the prediction, whether it was traced)."""
    return ask_verb(folder, "predict", "--device", device, *arguments)


def ask_verb(folder, verb, *arguments):
    command = [sys.executable, "-c", ASK, verb, "job.py:Plain", "--json", *arguments]
    answer = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr
    return {**json.loads(answer.stdout), "seconds": 0}, answer.stderr.split()[-1] == "True"


def test_the_second_question_is_answered_without_torch_and_to_the_byte(folder):
    first, traced = ask(folder)
    assert traced
    assert ask(folder) == (first, False)
    assert ask(folder, "--fresh") == (first, True)
    other, traced = ask(folder, device="l40s")
    assert not traced, "a card of the same architecture"
    assert ask(folder, "--fresh", device="l40s") == (other, True)
    assert ask(folder, "--memory", "1GiB")[1] is False


def test_other_cards_and_micro_batches_are_answered_without_torch_and_to_the_byte(folder):
    ask(folder)
    question = {
        "job": "job.py:Plain", "pairs": [], "precision": None, "shape": {"items": 1}, "device": "rtx4090",
        "choices": {}, "code": "",
    }  # fmt: skip
    traces = "import sys; from memfit.cli.background_traces import main; main(sys.argv[1:])"
    subprocess.run([sys.executable, "-c", traces, json.dumps(question)], cwd=folder, check=True)
    for device, more in (("h100", ()), ("t4", ("--micro-batch", "7"))):
        answer, traced = ask(folder, *more, device=device)
        assert not traced, (device, more)
        assert ask(folder, *more, "--fresh", device=device) == (answer, True)


def test_nothing_is_kept_of_a_file_that_is_changed_while_the_job_is_traced(folder):
    edits = 'import subprocess\nsubprocess.run(["sh", "-c", "test ! -e edit || echo WIDTH = 96 > helper.py"])\n'
    (folder / "job.py").write_text(JOB + edits)
    (folder / "edit").touch()
    before, _ = ask(folder)
    (folder / "edit").unlink()
    after, traced = ask(folder)
    assert traced
    assert after["phases"] != before["phases"]
    assert ask(folder) == (after, False)


def test_a_variable_that_an_import_sets_does_not_hide_what_was_kept(folder):
    (folder / "job.py").write_text(f'import os\nos.environ["SET_BY_AN_IMPORT"] = "1"\n{JOB}')
    first, _ = ask(folder)
    assert ask(folder) == (first, False)


def test_a_workspace_that_an_import_sets_is_kept_with_the_trace(folder):
    """``:4096:8``, which deterministic jobs set, has the bytes of a Hopper's."""
    (folder / "job.py").write_text(f'import os\nos.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"\n{JOB}')
    first, _ = ask(folder)
    assert ask(folder) == (first, False)
    assert first["phases"]["train"]["categories"]["workspace"] == 2 * (32 << 20)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "content"),
    [("helper.py", "WIDTH = 96\n"), ("config.json", '{"depth": 3}'), ("job.py", JOB.replace("= 2", "= 4"))],
)
def test_what_a_trace_depends_on_makes_it_anew(folder, name, content):
    before, _ = ask(folder)
    (folder / name).write_text(content)
    after, traced = ask(folder)
    assert traced
    assert after["phases"] != before["phases"]
    assert ask(folder) == (after, False)


@pytest.mark.slow
def test_another_setting_and_a_torn_file_are_traced(folder):
    before, _ = ask(folder)
    other, traced = ask(folder, "--set", "depth=3")
    assert traced
    assert other["phases"] != before["phases"]
    for path in (folder / "cache").rglob("*.npz"):
        path.write_bytes(path.read_bytes()[:1000])
    assert ask(folder) == (before, True)


def test_a_module_that_torch_writes_anew_in_each_process_is_no_dependency(folder):
    job = (folder / "job.py").read_text()
    (folder / "job.py").write_text(f"import torch.distributed.nn\n{job}")
    first, _ = ask(folder)
    assert ask(folder) == (first, False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("verb", "first", "second"),
    [
        ("max", "--device rtx4090", "--device l40s --memory 6GiB"),
        ("cards", "--device rtx4090 --device t4", "--device t4 --headroom 1GiB --micro-batch 9"),
        ("compare", "--device rtx4090 --set depth=3", "--device l40s --set depth=3 --headroom 5%"),
        ("ui", "--device rtx4090", "--device rtx4090 --memory 1GiB"),
    ],
)
def test_other_questions_are_answered_from_what_was_kept(folder, verb, first, second):
    """Whatever the card or the budget: no torch, and what tracing anew answers."""
    first, second = first.split(), second.split()
    assert ask_verb(folder, verb, *first)[1]
    assert not ask_verb(folder, verb, *first)[1]
    answer, traced = ask_verb(folder, verb, *second)
    assert not traced
    assert ask_verb(folder, verb, *second, "--fresh") == (answer, True)
    (folder / "helper.py").write_text("WIDTH = 2048\n")
    other, traced = ask_verb(folder, verb, *second)
    assert traced
    assert other != answer


def test_a_rank_of_a_mesh_is_answered_without_torch_and_to_the_byte(folder):
    (folder / "job.py").write_text(JOB.replace("torch.nn.Linear(WIDTH, WIDTH) for", "self._pair() for") + PAIR)
    first, traced = ask(folder, "--mesh", "tp=2")
    assert traced
    assert first["tensor_parallel"] == {"parameters": 2 * (2 * 64 * 128 + 64 + 128), "cut": 2 * (2 * 64 * 128 + 128)}
    assert ask(folder, "--mesh", "tp=2") == (first, False)


def test_answers_of_two_processes_are_kept_together_and_a_fresh_one_reads_none(folder):
    first, second = (Shelf("job", {}, fresh=False) for _ in range(2))
    for shelf, name in ((first, "longest"), (second, "units")):
        shelf.answers[name] = 1
        shelf.keep(loaded=True)
    assert Shelf("job", {}, fresh=False).answers == {"longest": 1, "units": 1}
    fresh = Shelf("job", {}, fresh=True)
    fresh.answers["units"] = 2
    fresh.keep(loaded=True)
    assert fresh.answers == {"units": 2}
    assert Shelf("job", {}, fresh=False).answers == {"units": 2}


class TracedMeanwhile(AskedJob):
    """Another process keeps a question when it is asked for, and has ended then."""

    def loaded_elsewhere(self):
        with AskedJob("small", Small, {}) as other:
            other.question(Shape(items=2), CARD)
            assert other.traced == 1


def test_what_another_process_keeps_just_before_it_ends_is_not_traced_again(folder):
    with TracedMeanwhile("small", Small, {}) as asked:
        question = asked.question(Shape(items=2), CARD)
        assert (asked.traced, question.shape) == (0, Shape(items=2))


KEEPS = """
import sys
from memfit.planner.kept_questions import Shelf
for number in range(20):
    shelf = Shelf("job", {}, fresh=False, environment={})
    shelf.answers[f"{sys.argv[1]} {number}"] = number
    shelf.keep(loaded=False)
"""


def test_answers_that_processes_keep_at_once_are_all_there(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("MEMFIT_KEEP_TRACES", "1")
    processes = [subprocess.Popen([sys.executable, "-c", KEEPS, name]) for name in ("first", "other", "third")]
    assert [process.wait(timeout=60) for process in processes] == [0, 0, 0]
    assert len(Shelf("job", {}, fresh=False, environment={}).answers) == 60
