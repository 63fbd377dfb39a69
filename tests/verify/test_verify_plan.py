"""python -m pytest tests/verify/test_verify_plan.py"""

from collections import UserDict

import torch

from memfit.verify.additivity import split_findings
from memfit.verify.verify_plan import batch_items, joined
from tests.apply.test_batches import Graphs
from tests.verify.jobs import Sound


def test_a_batch_that_is_a_mapping_of_a_library_stays_one_when_it_is_cut_and_joined():
    batch = UserDict(ids=torch.arange(6).view(3, 2), names=["a", "b", "c"])
    cut = [batch_items(batch, [i], 3) for i in (2, 0)]
    made = joined(cut)
    assert (type(cut[0]), type(made)) == (UserDict, UserDict)
    assert (made["ids"].tolist(), made["names"]) == ([[4, 5], [0, 1]], ["c", "a"])
    assert batch["names"] == ["a", "b", "c"]


class OfGraphs(Sound):
    def loss(self, nets, batch):
        return nets["net"](batch.nodes).square().sum(), len(batch.nodes)

    def dataset(self):
        return list(torch.arange(80.0).view(10, 8) / 80)

    def collate(self, samples):
        return Graphs(torch.stack(samples))


def test_a_batch_that_moves_itself_is_split_by_its_samples():
    assert split_findings(OfGraphs()) == []


class Flat(Sound):
    """Samples of varied length, joined end to end: the first dimension counts their rows, not the samples."""

    def loss(self, nets, batch):
        error = nets["net"](batch["rows"]).square().sum(1)
        weights = torch.repeat_interleave(batch["weights"], batch["counts"])
        return (error * weights).sum(), len(batch["rows"])

    def dataset(self):
        return [torch.arange(8.0 * (1 + i % 3)).view(-1, 8) / 80 for i in range(10)]

    def collate(self, samples):
        counts = torch.tensor([len(sample) for sample in samples])
        return {"rows": torch.cat(samples), "counts": counts, "weights": 1.0 + counts}


def test_a_batch_whose_tensors_do_not_all_count_samples_is_collated_again():
    assert split_findings(Flat()) == []


class Padded(Sound):
    """Samples of varied length; padding counts in the mean."""

    unit = "frames"
    longest: int | None = 4

    def loss(self, nets, batch):
        return nets["net"](batch).square().mean((1, 2)).sum(), len(batch)

    def dataset(self):
        return [torch.arange(8.0 * (4 - i % 4)).view(-1, 8) / 80 for i in range(10)]

    def lengths(self):
        return [len(sample) for sample in self.dataset()]

    def collate(self, samples):
        return torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)


def test_a_loss_that_sees_padding_is_named_where_a_job_has_a_longest_item():
    assert [finding.code for finding in split_findings(Padded())] == ["padding"]
