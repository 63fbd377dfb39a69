"""What a job's methods give and what no run can use: each is a mistake of the job in one line.

python -m pytest tests/train/test_odd_values.py
"""

import pytest
import torch

from memfit.errors import InputError
from memfit.plan import Plan
from memfit.train.data.run_data import samples_and_windows
from memfit.train.loop.validation_data import validation_data
from testing.faulty_jobs import Plain, run

PLAN = Plan(
    job="", settings={}, device="cpu", budget_bytes=1 << 30, unit="samples", global_batch=8, micro_batch=3,
    micro_batches=[[8]], arithmetic="", engine="single", precision="fp32", seed=5,
)  # fmt: skip


class Sized(list):
    def __init__(self, size):
        super().__init__([(torch.zeros(6), torch.tensor(0.0))])
        self.size = size

    def __len__(self):
        return self.size


@pytest.mark.parametrize("size", [-1, 2.5, 10**30, "3", None])
def test_a_length_that_is_none(size):
    class Wrong(Plain):
        def dataset(self):
            return Sized(size)

        validation_dataset = dataset

    with pytest.raises(InputError, match=r"len\(dataset\(\)\)"):
        samples_and_windows(Wrong(), PLAN, 1)
    with pytest.raises(InputError, match=r"len\(validation_dataset\(\)\)"):
        validation_data(Wrong())


class ByName(Plain):
    def validation_dataset(self):
        return {"one": self.dataset()[0]}


class Ends(Plain):
    def schedules(self, optimizers, windows):
        return {"once": torch.optim.lr_scheduler.OneCycleLR(optimizers["sgd"], 0.1, total_steps=2)}


class OnMeta(Plain):
    def collate(self, samples):
        return [part.to("meta") for part in super().collate(samples)]


class Odd(Plain):
    calls = 0

    def loss(self, nets, batch):
        type(self).calls += 1
        return self.odd(*super().loss(nets, batch))


class Names(Odd):
    def odd(self, value, count):
        return {("a", "b"): (value, count)}


class OtherNames(Odd):
    def odd(self, value, count):
        return {"later" if self.calls % 3 == 0 else "first": (value, count)}


class Countless(Odd):
    def odd(self, value, count):
        return value, 10**400


@pytest.mark.parametrize(
    ("job", "words"),
    [
        (ByName, r"validation_dataset\(\)\[0\]: KeyError"),
        (Ends, r"schedule 'once': ValueError: Tried to step 3 times"),
        (OnMeta, "a batch: NotImplementedError"),
        (Names, "its name is a tuple, not text"),
        (OtherNames, r"turn 'loss': it gave \w+ for a micro-batch, and \w+ for one before"),
        (Countless, r"loss 'loss': 1000+… valid units"),
    ],
)
def test_what_a_method_gives(tmp_path, job, words):
    job.calls = 0
    with pytest.raises(InputError, match=words):
        run(tmp_path / "run", job(), 3, proves=True)
