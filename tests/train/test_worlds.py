"""A run begun on some ranks and gone on with on others: the same samples, the same weights to rounding.

python -m pytest tests/train/test_worlds.py -m slow
"""

import pytest
import torch
from safetensors.torch import load_file

from memfit.plan import read_plan, write_plan
from memfit.verify.verify_plan import on_ranks
from tests.train.test_ranks import lines, memfit, plan

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The plan for one device, and its run of 6 windows."""
    folder = tmp_path_factory.mktemp("undisturbed")
    first = on_ranks(read_plan(plan(folder, name="Still")), "single", 1)
    write_plan(first, folder / "one.toml")
    done = memfit("run", folder / "one.toml", "--out", folder / "run")
    assert done.returncode == 0, done.stderr
    return first, folder / "run"


@pytest.mark.parametrize(("engine", "then"), [("ddp", "ddp"), ("fsdp2", "fsdp2"), ("fsdp2", "ddp")])
def test_two_ranks_go_on_as_three(engine, then, undisturbed, tmp_path):
    first, result = undisturbed
    write_plan(on_ranks(first, engine, 2), tmp_path / "two.toml")
    write_plan(on_ranks(first, then, 3), tmp_path / "three.toml")
    begun = memfit("run", tmp_path / "two.toml", "--out", tmp_path / "run", "--windows", 3)
    assert begun.returncode == 0, begun.stderr
    ended = memfit("run", tmp_path / "three.toml", "--out", tmp_path / "run", "--resume")
    assert ended.returncode == 0, ended.stderr
    applied = [(line["window"], line["rank"]) for line in lines(tmp_path / "run", "samples")]
    assert applied == [(w, rank) for w in range(6) for rank in range(2 if w < 3 else 3)]
    assert _ids(tmp_path / "run") == _ids(result)
    mine, theirs = (load_file(run / "final" / "net.safetensors") for run in (tmp_path / "run", result))
    assert mine.keys() == theirs.keys()
    for name, weight in theirs.items():
        torch.testing.assert_close(mine[name], weight, rtol=1e-4, atol=1e-5)


def _ids(run):
    by_name = {}
    for line in lines(run, "samples"):
        by_name.setdefault(line["window"], []).extend(line["ids"])
    return {window: sorted(ids) for window, ids in by_name.items()}
