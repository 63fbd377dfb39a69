"""Saving and validation before the first step: they are not what a trace waits for."""

from pathlib import Path

import pytest

from memfit.script.outcome import NO_LATER_SAVE
from memfit.trace.self_test import live_peaks
from tests.script.script_trace import trace_here

CACHED = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

data = torch.randn(512, 1000)
torch.save(data, "cache.pt")
net = nn.Linear(1000, 1000).cuda()
torch.save(net.state_dict(), "initial.pt")
optimizer = torch.optim.AdamW(net.parameters())

def validate(net):
    with torch.no_grad():
        for x, in DataLoader(TensorDataset(data[:32]), batch_size=16):
            net(x.cuda())

validate(net)
for step in range(100):
    loss = net(data[step : step + 8].cuda()).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
validate(net)
"""
SAVES = 'torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict()}, "last.pt")\n'
STATE = 3 * 4 * 1_001_000
"""Bytes of the parameters and of AdamW's two moments."""


def test_what_is_saved_and_validated_at_the_end_is_waited_for(tmp_path: Path) -> None:
    outcome = trace_here(tmp_path, CACHED + SAVES)
    assert outcome.error is None
    assert outcome.peak_bytes["validate"] > STATE
    assert outcome.peak_bytes["save"] >= STATE
    assert not [line for line in outcome.not_seen if "saved" in line or "validation" in line]


def test_what_is_saved_before_training_alone_is_no_saving(tmp_path: Path) -> None:
    outcome = trace_here(tmp_path, CACHED)
    assert "save" not in outcome.peak_bytes
    assert NO_LATER_SAVE in outcome.not_seen


ACCUMULATED = """
import copy

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)).cuda()
copied = copy.deepcopy(net).eval().requires_grad_(False)
optimizer = torch.optim.AdamW(net.parameters())
data = TensorDataset(torch.randn(40, 64))
step = 0
for epoch in range(3):
    net.train()
    for x, in DataLoader(data, batch_size=8):
        if {every_window}:
            net.eval()
            with torch.no_grad():
                {called}(x.cuda())
            net.train()
        net(x.cuda()).square().mean().backward()
        step += 1
        if step % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
    net.eval()
    with torch.no_grad():
        for x, in DataLoader(data, batch_size=16):
            {called}(x.cuda())
"""


@pytest.mark.parametrize("called", ["net", "copied"])
def test_a_validation_while_gradients_are_left_over_is_one(tmp_path: Path, called: str) -> None:
    """The batches of an epoch are no multiple of what is accumulated."""
    outcome = trace_here(tmp_path, ACCUMULATED.format(every_window="False", called=called), batches=5)
    assert "validate" in outcome.peak_bytes


@pytest.mark.parametrize(("called", "every_window"), [("net", "step % 4 == 1"), ("copied", "True")])
def test_an_evaluation_within_every_window_belongs_to_it(tmp_path: Path, called: str, every_window: str) -> None:
    text = ACCUMULATED.format(every_window=every_window, called=called).partition("    net.eval()\n    with")[0]
    outcome = trace_here(tmp_path, text, batches=5)
    assert outcome.windows >= 3
    assert "validate" not in outcome.peak_bytes


WRAPPED = """
import torch
from torch import nn

class Sharp(torch.optim.Optimizer):
    def __init__(self, parameters, base, **options):
        super().__init__(parameters, options)
        self.base = base(self.param_groups, **options)

    def climb(self):
        self.kept = [p.detach().clone() for group in self.param_groups for p in group["params"]]

    def descend(self):
        self.base.step()

net = nn.Linear(64, 64).cuda()
optimizer = Sharp(net.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
for step in range(1000):
    for move in (optimizer.climb, optimizer.descend):
        net(torch.randn(8, 64).cuda()).sum().backward()
        move()
    net.zero_grad()
torch.save(net.state_dict(), "net.pt")
"""


def test_an_optimizer_that_another_steps_for_is_not_missed(tmp_path: Path) -> None:
    outcome = trace_here(tmp_path, WRAPPED)
    assert outcome.error is None
    assert not [line for line in outcome.not_seen if "never stepped" in line]


FOLDS = """
import torch
from torch import nn

x, y = torch.randn(96, 64), torch.randint(2, (96,))
for fold in range(3):
    net = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 2))
    optimizer = torch.optim.Adam(net.parameters())
    for start in range(0, 64, 16):
        nn.functional.cross_entropy(net(x[start : start + 16]), y[start : start + 16]).backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        net(x[64:]).argmax(1)
"""
WEIGHTS = (64 * 1024 + 1024 + 2 * 1024 + 2) * 4


def test_the_net_of_the_next_fold_is_no_part_of_a_validation(tmp_path: Path) -> None:
    outcome = trace_here(tmp_path, FOLDS, device="cpu", memory_bytes=8 << 30, batches=1000)
    assert outcome.error is None, outcome.error.text
    assert outcome.bare is not None
    peaks = live_peaks(outcome.bare)
    data, hidden = 96 * 64 * 4 + 96 * 8, 32 * 1024 * 4
    assert peaks["validate"] == pytest.approx(3 * WEIGHTS + data + 2 * hidden, rel=0.01)


def test_a_parameter_is_the_memory_of_the_tensor_that_it_is_made_of(tmp_path: Path) -> None:
    text = "import torch\nnet = torch.nn.Linear(1024, 512)\n" + FOLDS.replace("range(3)", "range(1)")
    outcome = trace_here(tmp_path, text, device="cpu", memory_bytes=8 << 30, batches=1000)
    assert outcome.error is None, outcome.error.text
    assert outcome.bare is not None
    assert live_peaks(outcome.bare)["setup"] < 1.1 * (1024 * 512 * 4 + WEIGHTS)


FROZEN = """
import torch
from torch import nn

encoder = nn.Linear(1000, 1000).cuda().requires_grad_(False)
net = nn.Linear(1000, 10).cuda()
optimizer = torch.optim.SGD(net.parameters(), 0.1)
data = torch.randn(4000, 1000)
for epoch in range(2):
    for step in range(2):
        loss = net(encoder(data.cuda())).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    del loss
    with torch.no_grad():
        net(data[:8].cuda())
"""
ENCODED = 4 * 1000 * 4000
"""Bytes of what the encoder makes in a step."""


def test_a_frozen_encoder_of_the_next_epoch_is_no_validation(tmp_path: Path) -> None:
    outcome = trace_here(tmp_path, FROZEN)
    assert outcome.error is None
    assert outcome.bare is not None
    peaks = live_peaks(outcome.bare)
    assert peaks["validate"] + ENCODED < peaks["train"]


COLLECTED = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

net = nn.Linear(256, 256).cuda()
optimizer = torch.optim.SGD(net.parameters(), 0.1)
training, validation = (DataLoader(TensorDataset(torch.randn(16384, 256)), batch_size=4096) for part in range(2))
for epoch in range(3):
    for x, in training:
        net(x.cuda()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    outputs = []
    with torch.no_grad():
        for x, in validation:
            output = net(x.cuda())
            {collect}
        {after}
    torch.save(net.state_dict(), "net.pt")
"""


def test_a_validation_beside_the_results_of_the_one_before_is_seen(tmp_path: Path) -> None:
    text = COLLECTED.format(collect="outputs.append(output)", after="scores = torch.cat(outputs)")
    outcome = trace_here(tmp_path, text)
    before = 4 * 16384 * 256  # bytes of the scores of the validation before, which are gone when the net is saved
    assert outcome.peak_bytes["validate"] == outcome.peak_bytes["save"] + before


def test_what_each_batch_of_a_validation_replaces_is_no_reason_to_trace_on(tmp_path: Path) -> None:
    outcome = trace_here(tmp_path, COLLECTED.format(collect="hits = output > 0", after="pass"))
    assert outcome.windows == 5


EVERY_FIFTY = """
import torch

net = torch.nn.Linear(256, 256).cuda()
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for step in range(1, 200):
    net(torch.randn(4096, 256).cuda()).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 50 == 0:
        with torch.no_grad():
            scores = torch.cat([net(torch.randn(4096, 256).cuda()) for part in range(4)])
        torch.save(net.state_dict(), "net.pt")
"""


def test_a_validation_every_so_many_steps_is_seen_beside_the_results_of_the_one_before(tmp_path: Path) -> None:
    outcome = trace_here(tmp_path, EVERY_FIFTY)
    scores = 4 * 16384 * 256  # bytes of the batches' scores before they are put together, and of those before
    assert outcome.peak_bytes["validate"] == outcome.peak_bytes["save"] + 2 * scores
    assert outcome.windows == 4


STOPPED = """
import torch
from torch import nn
encoder = nn.Linear(64, 65536).requires_grad_(False)
net = nn.Linear(64, 64)
optimizer = torch.optim.AdamW(net.parameters())
loader = torch.utils.data.DataLoader(torch.ones(64, 64), 8)
for epoch in range(20):
    for batch in loader:
        with torch.no_grad():
            encoded = encoder(batch)[:, :64].clone()
        net(encoded).sum().backward(); optimizer.step(); optimizer.zero_grad()
        with torch.no_grad():
            net(batch)
        torch.save(net.state_dict(), "net.pt")
"""


def test_what_a_window_encodes_before_the_trace_stops_in_it_is_no_saving(tmp_path: Path) -> None:
    peaks = trace_here(tmp_path, STOPPED, device="cpu").peak_bytes
    encoded = 8 * 65536 * 4
    assert peaks["train"] - peaks["save"] == pytest.approx(encoded, rel=0.05)
