"""Memory that grows with each step, or with each batch of a validation that collects what it makes."""

from pathlib import Path

import pytest

from memfit.device.hardware.catalogue import find_device
from memfit.show.footprint_table import verdict_line
from memfit.wording import LONGER
from tests.script.script_trace import trace_alone, trace_here

TRAINING = """
import collections
import torch
from torch import nn

net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)).cuda()
optimizer = torch.optim.Adam(net.parameters())
losses, kept, recent, last, total = [], [], collections.deque(maxlen=3), None, 0
for step in range(1000):
    x = torch.randn(512{rows}, 64).cuda()
    y = net(x)
    loss = (y - x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    {then}
"""
GROWING = {
    "outputs": ("", "kept.append(y.detach())"),
    "graphs": ("", "losses.append((net(x) - x).square().mean())"),
    "graphs in a sum": ("", "total = total + (net(x) - x).square().mean()"),
    "outputs of several sizes": (" + 32 * (step * 7 % 5)", "kept.append(y.detach())"),
    "outputs in one tensor": ("", "kept = torch.cat([kept, y.detach()]) if step else y.detach()"),
    "outputs of every second step": ("", "kept += [y.detach()] * (step % 2)"),
    "an epoch's outputs": ("", "kept = kept[:(step % 5) * 512]; kept.append(y.detach())"),
}
STEADY = {
    "nothing": ("", "pass"),
    "numbers": ("", "losses.append(loss.item()); total += loss.item()"),
    "copies on the host": ("", "kept.append(y.detach().cpu())"),
    "the last steps": ("", "recent.append(y.detach())"),
    "the last steps of several sizes": (" + 32 * (step * 7 % 5)", "recent.append(y.detach())"),
    "the step before": (" + 32 * (step * 7 % 5)", "last = (x, y.detach())"),
    "few bytes": ("", "losses.append(loss.detach())"),
}


@pytest.mark.parametrize("kind", GROWING)
def test_what_each_step_leaves_behind_is_told_with_its_line(tmp_path: Path, kind: str) -> None:
    rows, then = GROWING[kind]
    outcome = trace_here(tmp_path, TRAINING.format(rows=rows, then=then))
    assert outcome.growth
    lines = TRAINING.splitlines()
    made = {lines[growth.line - 1].strip() for growth in outcome.growth}
    assert made & {"y = net(x)", "{then}"}
    assert 512 * 64 * 2 <= sum(growth.bytes for growth in outcome.growth) <= 512 * 64 * 4 * 12
    assert outcome.footprint is not None
    assert any(line.endswith(LONGER) for line in outcome.footprint.assumed)
    assert "A longer run needs more: memory grows at" in verdict_line(outcome.footprint, find_device("rtx4090"))


@pytest.mark.parametrize("kind", STEADY)
def test_what_later_steps_free_is_no_growth(tmp_path: Path, kind: str) -> None:
    rows, then = STEADY[kind]
    outcome = trace_here(tmp_path, TRAINING.format(rows=rows, then=then))
    assert outcome.windows >= 5
    assert not outcome.growth


def test_a_script_whose_steps_all_ran_has_shown_all_that_it_needs(tmp_path: Path) -> None:
    rows, then = GROWING["outputs"]
    outcome = trace_here(tmp_path, TRAINING.replace("1000", "8").format(rows=rows, then=then))
    assert outcome.windows == 8
    assert not outcome.growth


def test_weights_that_get_more_are_told(tmp_path: Path) -> None:
    text = """
import torch
from torch import nn

points = nn.Parameter(torch.randn(100, 3, device="cuda"))
optimizer = torch.optim.Adam([points])
target = torch.rand(4096, 3, device="cuda")
for step in range(1, 3000):
    loss = torch.cdist(target, points).min(1).values.mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 3 == 0:
        state = optimizer.state.pop(points)
        more = points.detach()[:50]
        points = nn.Parameter(torch.cat([points.detach(), more]))
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = torch.cat([state[name], torch.zeros_like(more)])
        optimizer.param_groups[0]["params"] = [points]
        optimizer.state[points] = state
"""
    outcome = trace_here(tmp_path, text)
    assert [growth.of_weights for growth in outcome.growth] == [True]


VALIDATION = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1024)).cuda()
optimizer = torch.optim.Adam(net.parameters())
training = DataLoader(TensorDataset(torch.randn(80, 64), torch.randint(0, 1024, (80,))), 8)
validation = DataLoader(TensorDataset(torch.randn({samples}, 64), torch.randint(0, 1024, ({samples},))), 8)
for epoch in range(2):
    for x, y in training:
        loss = nn.functional.cross_entropy(net(x.cuda()), y.cuda())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    outputs, labels, losses = [], [], []
    with torch.no_grad():
        for x, y in validation:
            output = net(x.cuda())
            {then}
"""
COLLECTING = {
    "a list": "outputs.append(output); labels.append(y.cuda())",
    "one tensor": "outputs = torch.cat([outputs, output]) if len(outputs) else output",
    "steps of accumulation": "outputs = [] if len(outputs) == 40 else [*outputs, output]",
}


@pytest.mark.parametrize("kind", COLLECTING)
def test_a_validation_that_collects_is_traced_to_its_end(tmp_path: Path, kind: str) -> None:
    text = VALIDATION.format(samples=480, then=COLLECTING[kind])
    peaks = [trace_here(tmp_path, text, batches=batches).peak_bytes["validate"] for batches in (None, 1000)]
    assert peaks[0] == peaks[1]


def test_a_validation_that_keeps_little_is_cut_short(tmp_path: Path) -> None:
    for then in ("losses.append(output.mean())", "outputs.append(output.cpu())", "pass"):
        outcome = trace_here(tmp_path, VALIDATION.format(samples=480, then=then))
        assert outcome.passes_cut


def test_a_validation_that_collects_more_than_a_trace_follows_is_told(tmp_path: Path) -> None:
    outcome = trace_here(tmp_path, VALIDATION.format(samples=2_000_000, then=COLLECTING["a list"]))
    assert any("more batches of the loop at" in line and "adds 32." in line for line in outcome.not_seen)
    assert outcome.footprint is not None
    assert any(line.endswith(LONGER) for line in outcome.footprint.assumed)


def test_a_trainer_that_gathers_the_logits_of_its_validation_is_traced_to_its_end(tmp_path: Path) -> None:
    text = """
import torch
from transformers import BertConfig, BertForMaskedLM, Trainer, TrainingArguments

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 160

    def __getitem__(self, number):
        ids = torch.full((32,), number)
        return {"input_ids": ids, "labels": ids}

sizes = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64)
arguments = TrainingArguments(
    "out", per_device_train_batch_size=8, per_device_eval_batch_size=8, num_train_epochs=1, eval_strategy="epoch",
    report_to=[], disable_tqdm=True,
)
Trainer(
    BertForMaskedLM(BertConfig(vocab_size=2000, max_position_embeddings=64, **sizes)), arguments, train_dataset=Rows(),
    eval_dataset=Rows(), compute_metrics=lambda prediction: {"mean": float(prediction.predictions.mean())},
).train()
"""
    outcome = trace_alone(tmp_path, text)
    assert outcome.peak_bytes["validate"] > 160 * 32 * 2000 * 4
