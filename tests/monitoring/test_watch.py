"""memfit.watch: a line a step, a prediction beside it, leaks named with what holds them.

pytest tests/monitoring/test_watch.py
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import memfit
from memfit.errors import InputError
from memfit.explain.evidence_reader import read_evidence
from memfit.monitoring import step_monitor
from memfit.monitoring.holders import data_sets_of_workers, holders
from memfit.monitoring.predicted import predicted_bytes
from memfit.train.recovery.memory_growth import held_by


def trained(net: nn.Module, steps: int, optimizer: Any = None, keep: list | None = None, size: int = 8) -> None:
    optimizer = optimizer or torch.optim.SGD(net.parameters(), lr=0.01)
    for _ in range(steps):
        net(torch.randn(size, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if keep is not None:
            keep.append(torch.ones(300_000))


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_for_each_step(tmp_path: Path) -> None:
    net = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    said: list[dict] = []
    with memfit.watch(optimizer, out=tmp_path / "m.jsonl", units=8, callback=said.append) as monitor:
        trained(net, 5, optimizer)
        monitor.count(100)
        time.sleep(0.01)
        trained(net, 1, optimizer)
    trained(net, 3, optimizer)
    read = lines(tmp_path / "m.jsonl")
    assert [line["window"] for line in read] == list(range(6))
    assert said == read
    assert all(line["host_bytes"] > 10 << 20 and line["seconds"] > 0 for line in read)
    assert read[2]["units_per_second"] == pytest.approx(8 / read[2]["seconds"])
    assert read[5]["units_per_second"] == pytest.approx(100 / read[5]["seconds"])
    assert read_evidence(str(tmp_path / "m.jsonl")).readings == 6


def test_a_model_is_watched_by_the_optimizer_that_holds_it(tmp_path: Path) -> None:
    net, other = nn.Linear(4, 2), nn.Linear(4, 2)
    with memfit.watch(net, out=None) as monitor:
        trained(other, 4)
        trained(net, 3)
    assert monitor.steps == 3


def test_the_prediction_stands_in_each_line(tmp_path: Path) -> None:
    phases = {"train": {"allocated_bytes": 10, "reserved_bytes": 20, "process_bytes": 30}}
    (tmp_path / "trace.json").write_text(json.dumps({"phases": phases}))
    net = nn.Linear(4, 2)
    with memfit.watch(net, out=tmp_path / "m.jsonl", prediction=tmp_path / "trace.json"):
        trained(net, 1)
    assert lines(tmp_path / "m.jsonl")[0]["predicted_process_bytes"] == 30
    assert predicted_bytes({"phases": phases})["reserved_bytes"] == 20


def in_own_process(case: Callable[..., list[str]], *arguments: str) -> tuple[list[str], str]:
    """The leaks or holders that a case of this file names, and what it wrote to the error stream.

    What other tests freed would serve a leak, and what they free late would hide it: neither process would grow. What
    their modules hold would be named, too.
    """
    text = (
        "import json, sys\nfrom tests.monitoring import test_watch\n"
        f"print(json.dumps(test_watch.{case.__name__}(*sys.argv[1:])))\n"
    )
    command = [sys.executable, "-c", text, *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(ended.stdout), ended.stderr


def leak_of_a_variable(out: str) -> list[str]:
    net, kept_tensors = nn.Linear(4, 2), []
    with memfit.watch(net, out=out) as monitor:
        trained(net, 80, keep=kept_tensors)
    return monitor.leaks


def leak_of_a_module() -> list[str]:
    class Remembers(nn.Linear):
        seen: list

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen.append(torch.ones(300_000))
            return super().forward(x)

    inner = Remembers(4, 2)
    inner.seen = []
    net = nn.Sequential(inner)
    with memfit.watch(net, out=None) as monitor:
        trained(net, 80)
    return monitor.leaks


class KeepsAll(Dataset[torch.Tensor]):
    def __init__(self) -> None:
        self.kept: list[bytearray] = []

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> torch.Tensor:
        self.kept.append(bytearray(b"x" * 1_500_000))
        return torch.randn(4)


def leak_of_a_worker() -> list[str]:
    step_monitor.CHILDREN_EVERY = 0.0
    net = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    loader = DataLoader(KeepsAll(), batch_size=2, num_workers=1)
    with memfit.watch(optimizer, out=None) as monitor:
        for rows, _ in zip(loader, range(40), strict=False):
            net(rows).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return monitor.leaks


def leak_beside_an_object_that_raises() -> list[str]:
    class Shy:
        @property
        def __class__(self) -> type:
            raise RuntimeError("not now")

    net = nn.Linear(4, 2)
    net.shy = [Shy()]  # type: ignore[assignment]
    kept: list[torch.Tensor] = []
    with memfit.watch(net, out=None) as monitor:
        trained(net, 40, keep=kept)
    return monitor.leaks


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "No such file or directory"), (b"\xff\xfe{", "not text"), (b"{", "not JSON"),
        (b"[" * 100_000, "not JSON"), (b'"prediction.json"', "no prediction"), (b"[]", "no prediction"),
    ],
    ids=["absent", "bytes", "cut off", "deep", "a path", "a list"],
)  # fmt: skip
def test_a_file_that_is_no_prediction_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None, why: str
) -> None:
    monkeypatch.chdir(tmp_path)
    if content is not None:
        Path("prediction.json").write_bytes(content)
    with pytest.raises(InputError, match=why) as refused:
        predicted_bytes("prediction.json")
    assert "Errno" not in str(refused.value)


def test_a_leak_is_named_with_the_variable_that_holds_it(tmp_path: Path) -> None:
    (leak, *_), said = in_own_process(leak_of_a_variable, str(tmp_path / "m.jsonl"))
    assert leak.startswith("host memory grew from")
    assert "1.14 MiB a step" in leak or "1.1 MiB a step" in leak
    assert "keep (test_watch.py:" in leak or "kept_tensors (test_watch.py:" in leak
    assert "tensors" in leak
    assert "memfit: host memory grew" in said
    assert read_evidence(str(tmp_path / "m.jsonl")).growth is not None


def test_a_leak_in_a_module_is_named_with_its_path() -> None:
    (leak, *_), _ = in_own_process(leak_of_a_module)
    assert "model.0.seen holds" in leak


def test_a_loader_whose_workers_keep_something_is_named() -> None:
    leaks, _ = in_own_process(leak_of_a_worker)
    leak = next(text for text in leaks if text.startswith("workers' memory grew from"))
    assert leak.endswith(": data set KeepsAll of a loader with workers keeps something")


def holders_of_a_hook() -> list[str]:
    class Trainer:
        def __init__(self) -> None:
            self.net = nn.Linear(4, 2)
            self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.01)
            outputs: list[torch.Tensor] = []
            self.net.register_forward_hook(lambda module, inputs, output: outputs.append(torch.zeros(1 << 16)))

    trainer = Trainer()
    trained(trainer.net, 20, trainer.optimizer)
    return holders([], [trainer.optimizer], grown=5 << 20)


def holders_of_losses() -> list[str]:
    net, losses, small = nn.Linear(4, 2), [], torch.zeros(1 << 16)
    losses += [net(torch.randn(8, 4)).sum() for _ in range(9)]
    given = holders([net], [], grown=8 << 20)
    assert small.nbytes == 1 << 18
    return given


def test_what_the_closure_of_a_hook_holds_is_named_with_the_object_that_has_the_net() -> None:
    (largest,), _ = in_own_process(holders_of_a_hook)
    assert largest.startswith("trainer (test_watch.py:"), largest
    assert largest.endswith("holds 20 tensors, 5.0 MiB"), largest


def test_a_list_of_losses_is_named_with_its_graphs_and_small_variables_are_not() -> None:
    (largest,), _ = in_own_process(holders_of_losses)
    assert "losses (test_watch.py:" in largest
    assert largest.endswith("and the graphs of 9 of them (detach them)")


def test_the_data_set_of_an_iterator_whose_loader_is_gone_is_named() -> None:
    iterator = iter(DataLoader(KeepsAll(), batch_size=2, num_workers=1))
    assert "data set KeepsAll of a loader with workers keeps something" in data_sets_of_workers()
    del iterator


def test_an_object_that_raises_where_it_is_looked_at_does_not_end_the_training() -> None:
    (leak, *_), _ = in_own_process(leak_beside_an_object_that_raises)
    assert leak.endswith("what holds it cannot be searched (RuntimeError)")


def test_a_full_disk_does_not_end_the_training(capsys: pytest.CaptureFixture[str]) -> None:
    net = nn.Linear(4, 2)
    with memfit.watch(net, out="/dev/full") as monitor:
        trained(net, 400)
    assert monitor.steps == 400
    said = capsys.readouterr().err
    assert said == "memfit: /dev/full cannot be written: No space left on device; the training goes on without it\n"


def test_each_rank_has_a_file_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net = nn.Linear(4, 2)
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        with memfit.watch(net, out=tmp_path / "metrics.jsonl", tensorboard=tmp_path / "board"):
            trained(net, 2)
    assert {path.name for path in tmp_path.iterdir()} == {"metrics.jsonl", "metrics-rank1.jsonl", "board"}
    assert len(lines(tmp_path / "metrics.jsonl")) == len(lines(tmp_path / "metrics-rank1.jsonl")) == 2
    assert len([*(tmp_path / "board").iterdir()]) == 1


def test_the_card_is_that_of_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model may get other parameters on its card after the watch is made; a mock stands for the card."""
    asked: list[str] = []
    monkeypatch.setattr(step_monitor, "_card", lambda device: asked.append(device.type))
    net = nn.Linear(4, 2, device="meta")
    with memfit.watch(net, out=None):
        net.to_empty(device="cpu")
        trained(net, 3)
    assert asked == ["cpu"]


def test_steps_that_keep_nothing_are_no_leak() -> None:
    net = nn.Linear(4, 2)
    with memfit.watch(net, out=None) as monitor:
        trained(net, 150, size=5000)
    assert monitor.leaks == []


def test_tensorboard_and_wandb(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    net = nn.Linear(4, 2)
    with memfit.watch(net, out=None, tensorboard=tmp_path / "tb"):
        trained(net, 3)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    assert [event.step for event in events.Scalars("host_bytes")] == [0, 1, 2]


def test_a_watch_does_not_keep_itself_alive() -> None:
    net = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    memfit.watch(optimizer, out=None)
    trained(net, 2, optimizer)


@pytest.mark.parametrize(
    ("target", "options"),
    [(3, {}), (nn.Linear(1, 1), {"out": "/no/such/folder/m.jsonl"}), (nn.Linear(1, 1), {"prediction": "no.json"}),
     (nn.Linear(1, 1), {"prediction": {"a": 1}}), (nn.Linear(1, 1), {"unit": 3}), (nn.Linear(1, 1), {"units": "8"}),
     (nn.Linear(1, 1), {"callback": 3}), (nn.Linear(1, 1), {"models": ["net"]}), (nn.Linear(1, 1), {"epoch": [1, 2]})],
)  # fmt: skip
def test_wrong_use_is_one_line(target: Any, options: dict) -> None:
    """When the watch is made, and not in a later step."""
    with pytest.raises(InputError):
        memfit.watch(target, **options)


def test_a_step_costs_little() -> None:
    """bench/watch.py measures; here only that no reading became slow: a tenth of a millisecond on a busy machine."""
    net = nn.Linear(4, 1)
    with memfit.watch(net, out=None) as monitor:
        trained(net, 50)
        begin = time.perf_counter()
        for _ in range(200):
            monitor._stepped()
        assert (time.perf_counter() - begin) / 200 < 3e-4


def test_sparse_tensors_count_with_the_bytes_of_their_parts_and_those_of_kernels_with_none():
    index, values = torch.arange(1 << 12).expand(2, -1).contiguous(), torch.ones(1 << 12)
    held = held_by([torch.sparse_coo_tensor(index, values, (1 << 12, 1 << 12)), values.to_mkldnn()], set())
    assert (held.tensors, held.graphs) == (2, 0)
    assert held.nbytes == pytest.approx((1 << 12) * (2 * 8 + 4), rel=0.01)
