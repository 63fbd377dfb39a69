"""Spoiled inputs that once ended in a traceback: each is answered in one line, or measured again.

python -m pytest tests/attack/test_spoiled.py
"""

import json

import numpy as np
import pytest

from bench.fuzz_parts.jobs import GOOD
from memfit.cli import main
from memfit.errors import InputError
from memfit.show.trace_file import read_trace
from memfit.user_cache import cache_folder, keep, read_kept


@pytest.fixture
def job(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "job.py").write_text(GOOD)
    return f"{tmp_path}/job.py"


@pytest.fixture
def answer(capsys):
    def run(*arguments):
        with pytest.raises(SystemExit) as ended:
            main(list(map(str, arguments)))
        return int(ended.value.code or 0), capsys.readouterr().err

    return run


def is_one_line(result, *words):
    code, said = result
    assert code == 2, said
    assert said.count("\n") == 1
    assert all(word in said for word in words), said


@pytest.mark.parametrize("value", ["x", [], {}, -1, True, [1, [2]], 1e999, {"full": 1, "selective": [0, "a"]}])
def test_a_spoiled_cache_is_measured_again(job, answer, value):
    plan = ("plan", f"{job}:Good", "--global-batch", 4, "--memory", "1GiB")
    assert answer(*plan)[0] == 0
    files = [path.name for path in cache_folder().iterdir()]
    assert len(files) >= 3
    for name in files:
        keep(name, dict.fromkeys(read_kept(name), value))
    assert answer(*plan)[0] == 0


@pytest.mark.parametrize(
    ("ending", "content", "says"),
    [
        ("csv", b"frames\n\xff\n", "not a csv file in UTF-8"),
        ("jsonl", b'{"frames": }\n', "not a jsonl file"),
        ("jsonl", b"[1]\n", "a line is no object"),
        ("jsonl", b'{"frames": 1e999}\n', "give lengths above 0"),
        ("jsonl", b"[" * 100000, "not a jsonl file"),
    ],
)
def test_spoiled_lengths(job, answer, tmp_path, ending, content, says):
    path = tmp_path / f"lengths.{ending}"
    path.write_bytes(content)
    sizes = ("--device", "rtx4090", "--micro-batch", 32, "--epoch", 1)
    is_one_line(answer("predict", f"{job}:Long", *sizes, "--lengths", f"{path}:frames"), says)


def test_shapes_that_no_tensor_has(job, answer, tmp_path):
    (tmp_path / "shapes.txt").write_text(f"2x{9 * 10**40}")
    is_one_line(answer("predict", f"{job}:Long", "--device", "rtx4090", "--shapes", tmp_path / "shapes.txt"), "items x")


@pytest.fixture
def trace(job, answer, tmp_path):
    path = tmp_path / "t.npz"
    assert answer("predict", f"{job}:Good", "--device", "rtx4090", "--trace", path)[0] == 0
    return path


@pytest.mark.parametrize(
    ("column", "change"),
    [
        ("operator_name", lambda values: values + 1000),
        ("storage", lambda values: values - 5),
        ("nbytes", lambda values: values * -1),
        ("nbytes", lambda values: values[:-1]),
        ("operator", lambda values: values.astype(float)),
        ("kind", lambda values: values[::-1]),
        ("told", lambda text: np.array(str(text).replace('"seconds": ', '"seconds": "x", "later": '))),
        ("told", lambda text: np.array(json.dumps(json.loads(str(text)) | {"micro_batch": None}))),
        ("told", lambda text: np.array(json.dumps(json.loads(str(text)) | {"phases": [["train", 9, 2]]}))),
    ],
)
def test_a_trace_whose_columns_do_not_belong_together(trace, column, change):
    with np.load(trace) as file:
        columns = {name: file[name] for name in file.files}
    with open(trace, "wb") as out:
        np.savez(out, **columns)
    read_trace(trace)
    with open(trace, "wb") as out:
        np.savez(out, **columns | {column: change(columns[column])})
    with pytest.raises(InputError, match="not a trace of memfit"):
        read_trace(trace)


def test_a_plan_whose_savings_are_no_numbers(job, answer, tmp_path):
    path = tmp_path / "p.toml"
    assert answer("plan", f"{job}:Good", "--global-batch", 4, "--memory", "1GiB", "--out", path)[0] == 0
    path.write_text(path.read_text() + '\n[[options]]\nname = "x"\napplied = true\n[options.saves]\ntrain = "much"\n')
    is_one_line(answer("report", "--no-trace", path), "options")


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('{"adam": torch.optim.AdamW(nets["net"].parameters(), lr=self.rate)}', "torch.zeros(1)", "dict of optimizers"),
        ("nn.Linear(self.width, 2)", "nn.LazyLinear(2)", "has no shape yet"),
        ('["net"](batch)', '["net"](batch.sum())', "in loss(): RuntimeError: both arguments to linear"),
        ("nn.Linear(self.width, 2)", "nn.Linear(self.wide, 2)", "has no attribute 'wide'"),
    ],
)
def test_a_jobs_mistake_that_planning_meets_first(job, answer, tmp_path, old, new, says):
    (tmp_path / "job.py").write_text(GOOD.replace(old, new, 1))
    plan = ("plan", f"{job}:Good", "--global-batch", 4, "--device", "rtx4090")
    is_one_line(answer(*plan), says)
