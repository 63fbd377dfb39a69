"""Data sets that divide their samples among ranks by themselves: none of the samples may be left out in silence.

python -m pytest tests/train/test_rank_shares.py [-m slow]
"""

import json
import os
import subprocess
import sys
import textwrap

import pytest
from torch.utils.data import IterableDataset

from memfit.batch.dataset import by_index
from memfit.batch.whole_data_set import WholeDataSet
from memfit.engine.single import Single
from memfit.errors import InputError
from memfit.job import Job
from memfit.plan import Plan, write_plan
from memfit.train.launch import rank_agreement
from memfit.train.launch.rank_agreement import RankAgreement, check_rank_agreement
from testing.kill_and_resume import ROOT

COUNT = 37


class Share(IterableDataset):
    """As StreamingDataset of litdata: the length of a rank's share, and all samples by index."""

    def __len__(self):
        return COUNT // int(os.environ.get("WORLD_SIZE", "1"))

    def __getitem__(self, index):
        if index >= COUNT:
            raise ValueError(f"no sample {index}")
        return index

    def __iter__(self):
        raise AssertionError("it is read by index")


class SizedShare(Share):
    """As that of mosaicml-streaming, which also says how many samples there are."""

    @property
    def size(self):
        return COUNT


class Endless(IterableDataset):
    """Makes a sample up for any index; its length is that of an epoch."""

    def __len__(self):
        return 10

    def __getitem__(self, index):
        return index

    def __iter__(self):
        raise AssertionError("it is read by index")


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_length_of_a_share_is_not_taken_for_that_of_the_whole(monkeypatch, ranks):
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    assert len(by_index(Job(), Endless())) == 10
    assert by_index(Job(), list(range(5))) == [0, 1, 2, 3, 4]
    whole = by_index(Job(), SizedShare())
    assert isinstance(whole, WholeDataSet) == (ranks > 1)
    assert (len(whole), whole[COUNT - 1]) == (COUNT, COUNT - 1)
    if ranks == 1:
        assert len(by_index(Job(), Share())) == COUNT
    else:
        with pytest.raises(InputError, match=f"the share of one of {ranks} ranks, and it has more samples by index"):
            by_index(Job(), Share())


def view(*, machine="a", first_sample, samples=40):
    return RankAgreement(
        world=2, mesh="", plan="", samples=samples, windows_per_epoch=1, first_sample=first_sample, first_window=0,
        first_ids=(), machine=machine,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("views", "agree"),
    [
        ([view(first_sample=3), view(first_sample=3)], True),
        ([view(first_sample=3), view(first_sample=4)], False),
        ([view(first_sample=3), view(first_sample=0)], True),
        ([view(first_sample=3), view(first_sample=4, machine="b")], True),
        ([view(first_sample=3, samples=0), view(first_sample=4, samples=0, machine="b")], False),
    ],
)
def test_first_samples_are_compared_where_they_can_be(monkeypatch, views, agree):
    monkeypatch.setattr(rank_agreement, "gather", lambda engine, chain: views)
    if agree:
        check_rank_agreement(Single(), views[0])
    else:
        with pytest.raises(InputError, match="first sample of rank 0: 3; rank 1: 4"):
            check_rank_agreement(Single(), views[0])


SHARDED = """
    import os
    import torch
    from torch import nn
    import memfit
    from tests.train.test_rank_shares import SizedShare

    class Whole(memfit.Job):
        windows: int = 7

        def nets(self):
            return {"net": nn.Linear(1, 1)}

        def optimizers(self, nets):
            return {"sgd": torch.optim.SGD(nets["net"].parameters(), lr=1e-3)}

        def batch(self, shape):
            return torch.rand(shape.items, 1)

        def loss(self, nets, batch):
            return nets["net"](batch.float().view(-1, 1)).square().sum(), len(batch)

        def dataset(self):
            return SizedShare()

        def collate(self, samples):
            return torch.tensor(samples)

    class Shard(Whole):
        def dataset(self):
            rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            return list(range(36))[rank::ranks]
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Whole", "Shard"])
def test_two_ranks_train_on_every_sample_or_end_in_one_line(tmp_path, name):
    (tmp_path / "sharded.py").write_text(textwrap.dedent(SHARDED))
    plan = Plan(
        job=f"{tmp_path / 'sharded.py'}:{name}", settings={}, device="cpu", budget_bytes=1 << 29, unit="samples",
        global_batch=6, micro_batch=3, micro_batches=[[3], [3]], arithmetic="", engine="ddp", precision="fp32", seed=0,
    )  # fmt: skip
    write_plan(plan, tmp_path / "plan.toml")
    command = [sys.executable, "-m", "memfit", "run", str(tmp_path / "plan.toml"), "--out", str(tmp_path / "run")]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=120, cwd=ROOT)
    if name == "Shard":
        assert done.returncode == 2, done.stderr
        last = done.stderr.splitlines()[-1]
        assert last.startswith("memfit: first sample of rank 0: ")
        assert last.endswith("give every rank the same plan, data set and order, none of it taken from the rank")
        return
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    epoch = [number for line in lines if line["window"] < 6 for number in line["ids"]]
    assert len(epoch) == len(set(epoch)) == 36
    assert max(number for line in lines for number in line["ids"]) == 36
