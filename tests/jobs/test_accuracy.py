"""pytest tests/jobs/test_accuracy.py: the metric of GPT-SoVITS' first stage is torchmetrics' own."""

import pytest
import torch

from memfit.jobs.nets.accuracy import top_k_accuracy


def test_it_gives_what_torchmetrics_gives():
    classification = pytest.importorskip("torchmetrics.classification")
    torch.manual_seed(0)
    logits, targets = torch.randn(3, 11, 7), torch.randint(0, 11, (3, 7))
    metric = classification.MulticlassAccuracy(11, top_k=3, average="micro", multidim_average="global", ignore_index=10)
    torch.testing.assert_close(top_k_accuracy(logits, targets, 3, ignored=10), metric(logits, targets))


def test_classes_that_are_ignored_do_not_count():
    logits = torch.tensor([[[9.0, 0, 0], [0, 9, 0], [0, 0, 9], [0, 0, 0], [0, 0, 0]]])
    assert float(top_k_accuracy(logits, torch.tensor([[0, 1, 4]]), 3, ignored=4)) == 1.0
