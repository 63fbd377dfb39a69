"""The largest batch of scripts whose batches are padded to their longest sample."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from memfit.script import batch_scan, side_by_side
from memfit.script.batch_scan import ROWS_DIFFER, SIZES, _next_size, scan_batches
from memfit.script.longest_samples import LongestSamples
from memfit.script.outcome import ALL_LONGEST, NOT_ALL_LONGEST, ScriptCommand, ScriptOutcome, TraceRequest
from memfit.script.run_script import run_script
from memfit.show.script_table import largest_batch
from tests.script.script_trace import _process_kept

LENGTHS = [5, 90, 12, 40, 7, 33, 64, 8, 21, 50] * 20
LONGEST_LENGTH = max(LENGTHS)
SCRIPT = """
import sys
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

size, kind = int(sys.argv[1]), sys.argv[2]
lengths = LENGTHS


class Buckets:
    def __iter__(self):
        order = sorted(range(len(lengths)), key=lengths.__getitem__)
        for start in torch.randperm(len(order) // size).tolist():
            yield order[start * size : start * size + size]


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        for length in lengths:
            yield torch.ones(length, 256)


data = Stream() if kind == "stream" else [torch.ones(length, 256) for length in lengths]
options = {"batch_sampler": Buckets()} if kind == "buckets" else {"batch_size": size, "shuffle": kind == "shuffled"}
loader = DataLoader(data, collate_fn=lambda parts: pad_sequence(parts, batch_first=True), **options)
net = nn.Sequential(nn.Linear(256, 4096), nn.ReLU(), nn.Linear(4096, 1)).cuda()
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for batch in loader:
    net(batch.cuda()).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def scanned(folder: Path, monkeypatch, kind: str, text: str = SCRIPT, memory_bytes: int = 600 << 20):
    script = folder / "train.py"
    script.write_text(text.replace("LENGTHS", repr(LENGTHS)))

    def traced(request: TraceRequest) -> ScriptOutcome:
        outcomes: list[ScriptOutcome] = []
        with _process_kept(folder):
            run_script(request, outcomes.append)
        return outcomes[0]

    for module in (batch_scan, side_by_side):
        monkeypatch.setattr(module, "trace_script", traced)
    monkeypatch.setattr(batch_scan, "at_once", lambda: 1)
    monkeypatch.setattr(side_by_side, "at_once", lambda: 1)
    command = ScriptCommand(target=str(script), args=("{batch}", kind))
    request = TraceRequest(
        command=command, device="rtx4090", memory_bytes=memory_bytes, unsafe_writes=True, every_card=False
    )
    return request, traced, scan_batches(request, SIZES)


@pytest.mark.parametrize("kind", ["shuffled", "buckets"])
def test_the_largest_batch_is_that_of_the_longest_samples(tmp_path: Path, monkeypatch, kind: str) -> None:
    request, traced, scan = scanned(tmp_path, monkeypatch, kind)
    largest = scan.largest
    assert largest.verified, largest.reason
    assert largest.assumes == f"{ALL_LONGEST}{len(LENGTHS)} samples that were read of its data set"
    assert largest.assumes in largest_batch(scan)
    assert largest.batch is not None
    for size in (largest.batch, largest.batch + 1):
        text = (tmp_path / "train.py").read_text().replace(repr(LENGTHS), repr([LONGEST_LENGTH] * len(LENGTHS)))
        (tmp_path / "train.py").write_text(text)
        outcome = traced(replace(request, command=replace(request.command, args=(str(size), kind))))
        assert outcome.footprint is not None
        assert outcome.footprint.fits is (size == largest.batch)


RECOMMENDER = """
import sys
import torch
size = int(sys.argv[1])
table = torch.nn.Embedding(100_000, 4096, sparse=True).cuda()
optimizer = torch.optim.SGD(table.parameters(), 0.1)
for step in range(3):
    table(torch.randint(200, (size, 50)).cuda()).square().mean().backward()
    table.weight.grad = table.weight.grad.coalesce()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_table_of_sparse_gradients_has_a_largest_batch_whose_ids_all_differ(tmp_path: Path, monkeypatch) -> None:
    largest = scanned(tmp_path, monkeypatch, "", RECOMMENDER, 8 << 30)[2].largest
    assert largest.verified, largest.reason
    assert largest.assumes == ROWS_DIFFER


SMALL_SET = """
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

data = TensorDataset(torch.ones(12, 64, 256))
loader = DataLoader(data, batch_size=int(sys.argv[1]), shuffle=True)
net = nn.Sequential(nn.Linear(256, 16384), nn.ReLU(), nn.Linear(16384, 1)).cuda()
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for epoch in range(3):
    for (batch,) in loader:
        net(batch.cuda()).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize("memory_bytes", [560 << 20, 8 << 30])
def test_of_a_data_set_of_few_batches_the_largest_batch_is_traced(tmp_path: Path, monkeypatch, memory_bytes) -> None:
    """12 samples are six batches of two, and two and a half of five: other operators run."""
    request, traced, scan = scanned(tmp_path, monkeypatch, "", SMALL_SET, memory_bytes)
    largest = scan.largest
    if memory_bytes == 8 << 30:  # one batch has the whole set
        assert (largest.batch, largest.traced, largest.too_large) == (batch_scan.MOST, True, 0)
        return
    assert largest.verified, largest.reason
    assert largest.batch is not None
    assert 5 < largest.batch < 12
    for size in (largest.batch, largest.batch + 1):
        outcome = traced(replace(request, command=replace(request.command, args=(str(size), ""))))
        assert outcome.footprint is not None
        assert outcome.footprint.fits is (size == largest.batch)


def test_where_samples_cannot_be_chosen_the_answer_says_why_and_what_to_write(tmp_path: Path, monkeypatch) -> None:
    largest = scanned(tmp_path, monkeypatch, "stream")[2].largest
    assert largest.batch is None
    assert "Stream gives its samples in an order of its own" in largest.reason
    assert "write a size in place of {batch}" in largest.reason


def batches(data, notes, **options):
    loader = DataLoader(data, collate_fn=list, **options)
    iterator = iter(loader)
    LongestSamples(notes.append).replace(loader, iterator)
    return list(iterator)


def test_each_part_of_a_sample_has_its_longest_in_a_batch() -> None:
    pairs = [([0] * source, [0] * target) for source, target in [(3, 4), (9, 2), (5, 8), (1, 1)]]
    notes: list[str] = []
    made = batches(pairs, notes, batch_size=2)
    assert [sorted((len(source), len(target)) for source, target in batch) for batch in made] == [[(5, 8), (9, 2)]] * 2
    assert notes == [f"{ALL_LONGEST}4 samples that were read of its data set"]


def test_samples_of_one_size_are_not_said_to_be_the_longest() -> None:
    notes: list[str] = []
    assert len(batches([torch.ones(3)] * 6, notes, batch_size=2)) == 3
    assert notes == []


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"batch_sampler": [[0], [1, 2], [3], [0, 2]]}, "list gives batches of 1 to 2 samples"),
        ({"batch_size": None}, "the script makes batches itself"),
    ],
)
def test_batches_that_a_sampler_fills_by_another_rule_stay(options, why: str) -> None:
    notes: list[str] = []
    batches([[0] * length for length in (3, 4, 5, 6)], notes, **options)
    assert len(notes) == 1
    assert notes[0].startswith(NOT_ALL_LONGEST)
    assert why in notes[0]


class Endless(IterableDataset):
    def __iter__(self):
        yield from range(3)


def test_a_data_set_with_an_order_of_its_own_stays() -> None:
    notes: list[str] = []
    assert batches(Endless(), notes, batch_size=1) == [[0], [1], [2]]
    assert "Endless gives its samples in an order of its own" in notes[0]


@pytest.mark.parametrize(
    ("fitting", "too_large", "share", "size"),
    [(8, 0, 1.0, 9), (10, 0, 1.0, 12), (0, 9, 0.999, 8), (0, 100, 0.5, 50), (40, 50, 1.0, 45), (0, 1, 0.5, 0)],
)
def test_the_next_size_comes_nearer_to_the_largest(fitting, too_large, share, size) -> None:
    assert _next_size(8, fitting, too_large, share) == size
