"""A rig's whole state goes into a checkpoint and back: training goes on bit for bit, whatever the optimizer.

python -m pytest tests/train/test_checkpoints.py
"""

import os
import random
import resource
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from memfit.apply.train_state import build
from memfit.apply.window import MicroBatch, run_window
from memfit.errors import InputError
from memfit.job import Job, Loss, Shape
from memfit.jobs.optimizers.adam8bit import AdamW8bit
from memfit.jobs.optimizers.scaled_adam import ScaledAdam
from memfit.plan import Plan
from memfit.train.checkpoint.checkpoints import Checkpoints, read_checkpoint
from memfit.train.checkpoint.resume import restore
from memfit.train.checkpoint.saver import Saver, copy_into
from memfit.train.checkpoint.state_codec import encode
from testing.killed_job import Killed
from tests.train.test_state_codec import same, through

PLAN = Plan(
    job="tests", settings={}, device="cpu", budget_bytes=1 << 30, unit="samples", global_batch=4, micro_batch=4,
    micro_batches=[[4]], arithmetic="4 = 4", engine="single", precision="fp32", seed=0,
)  # fmt: skip


def saver(path: Path, **how) -> Saver:
    return Saver(checkpoints=Checkpoints(path, how.pop("keep", 2)), plan=PLAN, **how)


def train(train_state, windows):
    for _ in range(windows):
        batch = train_state.job.batch(Shape(items=4))
        run_window(train_state, [MicroBatch(fetch=lambda batch=batch: batch, padded_units=4)])


def goes_on_alike(job, tmp_path, asynchronous=False):
    """Three windows, saved, five more; and the same five in a new rig from the checkpoint."""
    torch.manual_seed(1)
    train_state = build(job, "cpu")
    train(train_state, 3)
    writer = saver(tmp_path, asynchronous=asynchronous)
    writer.save(train_state, 3)
    train(train_state, 5)
    assert writer.finish()

    torch.manual_seed(2)
    other = build(job, "cpu")
    restore(other, read_checkpoint(tmp_path / "00000003"))
    train(other, 5)
    states = [encode_all(each) for each in (train_state, other)]
    same(*states)


def encode_all(train_state):
    from memfit.train.checkpoint.state import state_of

    return {name: value for name, value in state_of(train_state).items() if name != "saved"}


class Net(Job):
    """A net of matrices, vectors and a scalar, under the optimizer that is asked for."""

    kind: str = "Adam"
    dtype: str = "float32"

    def nets(self):
        net = nn.Sequential(nn.Conv2d(3, 160, 3), nn.BatchNorm2d(160), nn.PReLU(), nn.Flatten(), nn.LazyLinear(1))
        net(torch.zeros(2, 3, 5, 5))
        return {"net": net.to(getattr(torch, self.dtype)).to(memory_format=torch.channels_last)}

    def optimizers(self, nets):
        kind, arguments = OPTIMIZERS[self.kind]
        return {"one": kind(nets["net"].parameters(), **arguments)}

    def batch(self, shape):
        return torch.randn(shape.items, 3, 5, 5).to(getattr(torch, self.dtype))

    def loss(self, nets, batch):
        return Loss(nets["net"](batch).float().square().sum(), len(batch))


OPTIMIZERS = {
    "Adam": (torch.optim.Adam, {"lr": 1e-2, "amsgrad": True}),
    "AdamW": (torch.optim.AdamW, {"lr": torch.tensor(1e-2), "fused": True}),
    "one by one": (torch.optim.Adam, {"lr": 1e-2, "foreach": False}),
    "Adadelta": (torch.optim.Adadelta, {}),
    "Adagrad": (torch.optim.Adagrad, {"lr_decay": 0.1}),
    "Adafactor": (torch.optim.Adafactor, {}),
    "Adamax": (torch.optim.Adamax, {}),
    "ASGD": (torch.optim.ASGD, {"t0": 2}),
    "NAdam": (torch.optim.NAdam, {}),
    "RAdam": (torch.optim.RAdam, {}),
    "RMSprop": (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
    "Rprop": (torch.optim.Rprop, {}),
    "SGD": (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "nesterov": True}),
    "plain SGD": (torch.optim.SGD, {"lr": 1e-2}),
    "Adam8bit": (AdamW8bit, {"lr": 1e-2}),
    "ScaledAdam": (ScaledAdam, {"lr": 1e-2}),
}


def test_a_plan_that_was_changed_in_a_checkpoint_is_found(tmp_path):
    writer = saver(tmp_path, asynchronous=False)
    writer.save(build(Net(kind="plain SGD"), "cpu"), 1)
    assert writer.finish()
    plan = tmp_path / "00000001" / "plan.toml"
    plan.write_text(plan.read_text().replace("seed = 0", "seed = 1"))
    with pytest.raises(InputError, match=r"plan\.toml was changed: its checksum is another"):
        read_checkpoint(tmp_path / "00000001")


def test_a_checkpoint_of_other_nets_is_refused_by_the_names_of_both(tmp_path):
    class Renamed(Net):
        def nets(self):
            return {"encoder": super().nets()["net"]}

        def optimizers(self, nets):
            return super().optimizers({"net": nets["encoder"]})

    train_state = build(Net(kind="plain SGD"), "cpu")
    writer = saver(tmp_path, asynchronous=False)
    writer.save(train_state, 1)
    assert writer.finish()
    with pytest.raises(InputError, match="it has nets net; the job has encoder"):
        restore(build(Renamed(kind="plain SGD"), "cpu"), read_checkpoint(tmp_path / "00000001"))


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_training_goes_on_bit_for_bit_under_every_optimizer(tmp_path, kind):
    goes_on_alike(Net(kind=kind), tmp_path, asynchronous=kind in ("Adam", "Adam8bit"))


def test_states_keep_their_dtype_beside_weights_of_16_bits(tmp_path):
    """torch's own load_state_dict would cast them to the weights' dtype."""

    class Master(torch.optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    state = self.state[p]
                    master = state.setdefault("master", p.detach().float())
                    state["steps"] = [*state.get("steps", []), (len(state), None, float("inf"))]
                    master.sub_(p.grad.float(), alpha=1e-2)
                    p.data.copy_(master)

    OPTIMIZERS["master"] = (Master, {"lr": 1e-2})
    goes_on_alike(Net(kind="master", dtype="bfloat16"), tmp_path)


def test_lbfgs_keeps_its_history(tmp_path):
    p = nn.Parameter(torch.randn(5))
    optimizer = torch.optim.LBFGS([p], history_size=3, max_iter=4)

    def closure():
        optimizer.zero_grad()
        loss = (p - torch.arange(5.0)).pow(4).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    state = optimizer.state_dict()
    assert len(state["state"][0]["old_dirs"]) == 3
    same(state, through(state, tmp_path))


SCHEDULES = {
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=3, cycle_momentum=False),
    "milestones": lambda o: lr_scheduler.MultiStepLR(o, [2, 2, 4]),
    "function": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (step + 1)),
    "sequence": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=3), lr_scheduler.ExponentialLR(o, 0.9)], [3]
    ),
    "chained": lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.ConstantLR(o), lr_scheduler.PolynomialLR(o)]),
    "swa": lambda o: torch.optim.swa_utils.SWALR(o, 0.05),
}


@pytest.mark.parametrize("kind", SCHEDULES)
def test_every_schedule_goes_on(tmp_path, kind):
    class Scheduled(Net):
        def schedules(self, optimizers, windows):
            return {kind: SCHEDULES[kind](optimizers["one"])}

    goes_on_alike(Scheduled(kind="SGD"), tmp_path)


def test_random_numbers_of_every_kind_the_scaler_and_frozen_buffers_go_on(tmp_path):
    train_state = build(Killed(precision="fp16"), "cpu")
    train_state.nets["frozen"][1].running_mean.fill_(3)
    train_state.scaler.scale(torch.ones(()))
    train_state.scaler.update(3.0)
    writer = saver(tmp_path)
    writer.save(train_state, 1)
    drawn = [random.random(), float(np.random.rand()), float(torch.rand(()))]

    other = build(Killed(precision="fp16"), "cpu")
    other.scaler.scale(torch.ones(()))
    restore(other, read_checkpoint(tmp_path / "00000001"))
    assert [random.random(), float(np.random.rand()), float(torch.rand(()))] == drawn
    assert other.scaler.get_scale() == 3
    assert other.nets["frozen"][1].running_mean.tolist() == [3.0] * 8


def test_what_a_job_saves_beside_is_kept_and_what_it_cannot_is_refused(tmp_path):
    class Extra(Net):
        def saved(self, nets, optimizers):
            return {"ema_decay": 0.5, "again": nets["net"].state_dict(), "notes": (1, "two")}

    class Wrong(Net):
        def saved(self, nets, optimizers):
            return {"model": nets["net"]}

    train_state = build(Extra(), "cpu")
    saver(tmp_path).save(train_state, 1)
    checkpoint = read_checkpoint(tmp_path / "00000001")
    saved = checkpoint.mapped(checkpoint.state["saved"])
    assert (saved["ema_decay"], saved["notes"]) == (0.5, (1, "two"))
    assert torch.equal(saved["again"]["0.weight"], train_state.nets["net"][0].weight)
    assert not any(name.startswith("saved") for name in checkpoint.tensors.entries), "kept twice"
    with pytest.raises(InputError, match=r"the state to save: saved\.model: a torch\.nn.*Sequential; keep numbers"):
        saver(tmp_path).warm(build(Wrong(), "cpu"))


def holds_itself():
    state = {}
    return state | {"again": [state], "me": state.setdefault("me", state)}


@pytest.mark.parametrize(
    ("saved", "words"), [(None, "gave NoneType, not a dict"), (holds_itself(), "holds itself, or is nested too deeply")]
)
def test_a_state_that_no_file_can_hold_is_a_mistake_of_the_job(tmp_path, saved, words):
    class Wrong(Net):
        def saved(self, nets, optimizers):
            return saved

    with pytest.raises(InputError, match=words):
        saver(tmp_path).warm(build(Wrong(), "cpu"))


def test_the_newest_stay_and_what_a_killed_process_left_goes(tmp_path):
    train_state, writer = build(Net(), "cpu"), saver(tmp_path, keep=2)
    for number in (1, 2, 3):
        writer.save(train_state, number)
    (tmp_path / ".00000004.123").mkdir()
    (tmp_path / "00000009").mkdir()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".00000004.123", "00000002", "00000003", "00000009"]
    said = []
    checkpoint = Checkpoints(tmp_path).newest(said.append)
    assert checkpoint is not None
    assert checkpoint.next_window == 3
    assert "00000009: it is torn or no checkpoint" in said[0]
    Checkpoints(tmp_path).clean(3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["00000002", "00000003", "00000009.torn"]


def test_a_pickle_in_the_folder_is_named_and_never_opened(tmp_path):
    class Code:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "ran"),))

    torch.save({"a": Code()}, tmp_path / "last.pt")
    with pytest.raises(
        InputError, match=r"no checkpoint in it is whole: checkpoint .*last\.pt: it is foreign, a pickle"
    ):
        Checkpoints(tmp_path).newest(print)
    with pytest.raises(InputError, match=r"last\.pt: it is foreign, a pickle, which can hold code: memfit never opens"):
        read_checkpoint(tmp_path / "last.pt")
    saver(tmp_path).save(build(Net(), "cpu"), 1)
    said = []
    assert Checkpoints(tmp_path).newest(said.append).next_window == 1
    assert "last.pt: it is foreign, a pickle" in said[0]
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_full_disk_costs_that_checkpoint_alone(small_disk, asynchronous):
    train_state, said = build(Killed(), "cpu"), []
    writer = saver(small_disk / "checkpoints", asynchronous=asynchronous, say=said.append)
    writer.save(train_state, 1)
    assert writer.finish()
    (small_disk / "other").write_bytes(b"0" * (os.statvfs(small_disk).f_bavail * 4096 - 8192))
    writer.save(train_state, 2)
    assert not writer.finish()
    (line,) = said
    assert "checkpoint of window 2 not written: No space left on device; the one before it" in line
    assert "00000001, is whole; give" in line
    assert "KiB that can be written" in line
    assert [path.name for path in (small_disk / "checkpoints").iterdir()] == ["00000001"]
    assert read_checkpoint(small_disk / "checkpoints" / "00000001").next_window == 1
    (small_disk / "other").unlink()
    writer.save(train_state, 3)
    assert writer.finish()


def test_a_file_size_limit_and_a_read_only_folder_too(small_disk):
    train_state, said = build(Killed(), "cpu"), []
    writer = saver(small_disk, say=said.append)
    writer.save(train_state, 1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        writer.save(train_state, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    writer.save(train_state, 3)
    assert "File too large; the one before it" in said[0]
    assert "Read-only file system; the one before it" in said[1]
    assert [path.name for path in small_disk.iterdir()] == ["00000001"]


def test_what_a_failed_write_left_is_written_over_where_a_simulated_removal_fails(tmp_path, monkeypatch):
    """As where there is no memory to list the folder, which cannot be had on purpose."""
    monkeypatch.setattr("memfit.train.checkpoint.checkpoints.shutil.rmtree", lambda path, **options: None)
    left = tmp_path / f".00000003.{os.getpid()}"
    left.mkdir()
    (left / "state.safetensors").write_bytes(b"torn" * 1000)
    writer = saver(tmp_path)
    writer.save(build(Net(), "cpu"), 3)
    assert writer.finish()
    assert read_checkpoint(tmp_path / "00000003").next_window == 3


def test_a_copy_that_memory_does_not_hold_is_not_made(tmp_path, monkeypatch):
    """The allocation is made to fail here; bench/faults.py runs real ones."""

    def no_memory(*size, **how):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    train_state, said = build(Net(), "cpu"), []
    writer = saver(tmp_path, asynchronous=True, say=said.append)
    monkeypatch.setattr(torch, "empty", no_memory)
    writer.save(train_state, 1)
    monkeypatch.undo()
    assert writer.finish()
    assert "checkpoints are written while the training waits" in said[0]
    assert read_checkpoint(tmp_path / "00000001").next_window == 1


def test_the_copy_is_of_the_moment_and_reuses_its_buffer(tmp_path):
    train_state = build(Net(), "cpu")
    writer = saver(tmp_path, asynchronous=True)
    writer.warm(train_state)
    weights = []
    for number in (1, 2):
        train(train_state, 1)
        weights.append(train_state.nets["net"][0].weight.detach().clone())
        writer.save(train_state, number)
        buffer = writer._buffer.data_ptr()
        with torch.no_grad():
            train_state.nets["net"][0].weight.zero_()
    assert writer.finish()
    assert writer._buffer.data_ptr() == buffer
    for number, weight in zip((1, 2), weights, strict=True):
        checkpoint = read_checkpoint(tmp_path / f"{number:08d}")
        assert torch.equal(checkpoint.mapped(checkpoint.state["nets"]["net"]["0.weight"]), weight)


def test_nothing_is_copied_on_the_way_into_the_state():
    train_state = build(Net(kind="SGD"), "cpu")
    train(train_state, 1)
    _, tensors = encode(encode_all(train_state), "test")
    assert tensors["nets.net.0.weight"].data_ptr() == train_state.nets["net"][0].weight.data_ptr()
    momentum = next(iter(train_state.optimizers["one"].state.values()))["momentum_buffer"]
    assert tensors["optimizers.one.state.0.momentum_buffer"].data_ptr() == momentum.data_ptr()


def test_a_copy_has_the_values_and_the_memory_layout_of_its_tensor():
    tensors = {"last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last), "plain": torch.randn(7)[2:]}
    copies = copy_into(torch.empty(sum(tensor.nbytes for tensor in tensors.values()), dtype=torch.uint8), tensors)
    for name, tensor in tensors.items():
        assert copies[name].stride() == tensor.stride()
        assert torch.equal(copies[name], tensor)
