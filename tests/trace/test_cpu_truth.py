"""A trace on the CPU against the allocator's own events, phase by phase, of the same job really run.

python -m pytest tests/trace/test_cpu_truth.py
"""

from typing import ClassVar

import pytest
import torch
from torch import nn

from memfit.errors import InputError
from memfit.job import Shape
from testing.nets import JOBS, SHAPES
from testing.truth import compare

SETTINGS = {
    "fp32 AdamW": {},
    "fp32 AdamW for-each": {"foreach": True},
    "fp32 SGD": {"optimizer": "sgd"},
    "bf16 AdamW, clipped": {"precision": "bf16", "clip": 1.0},
    "bf16 SGD for-each": {"precision": "bf16", "optimizer": "sgd", "foreach": True},
}


def _trains_recurrent_layers_in_bf16() -> bool:
    """Whether torch does, on this CPU: without AVX-512 oneDNN has no such kernel (torch 2.13)."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        try:
            nn.LSTM(8, 8)(torch.randn(3, 2, 8))
        except RuntimeError:
            return False
    return True


@pytest.mark.parametrize("micro_batches", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("name", JOBS)
def test_every_phase_to_the_byte_without_scratch_and_within_two_percent_with_it(name, settings, micro_batches):
    items, length = SHAPES[name]
    if name == "recurrent" and settings.get("precision") == "bf16" and not _trains_recurrent_layers_in_bf16():
        with pytest.raises(InputError, match="oneDNN has no kernel for it on this CPU"):
            compare(JOBS[name], settings, Shape(items=items, length=length), micro_batches)
        return
    traced, with_scratch, measured = compare(JOBS[name], settings, Shape(items=items, length=length), micro_batches)

    assert set(measured) >= {"setup", "train", "save"}
    assert traced == {phase: peak.without_scratch_bytes for phase, peak in measured.items()}
    for phase, peak in measured.items():
        assert with_scratch[phase] == pytest.approx(peak.allocated_bytes, rel=0.02)


@pytest.mark.parametrize("length", [17, 33, 40, 61])
def test_each_of_varied_lengths_in_bf16(length):
    settings = {"precision": "bf16", "clip": 1.0}
    traced, with_scratch, measured = compare(JOBS["dit"], settings, Shape(items=3, length=length), 2)
    assert traced == {phase: peak.without_scratch_bytes for phase, peak in measured.items()}
    assert with_scratch["train"] == pytest.approx(measured["train"].allocated_bytes, rel=0.02)


def test_a_scaler_steps_in_a_trace_and_the_optimizers_state_is_there():
    traced, _, measured = compare(JOBS["decoder"], {"precision": "fp16"}, Shape(items=4, length=None), 1)
    assert traced["save"] == measured["save"].without_scratch_bytes


class Table(JOBS["decoder"]):
    """A loss over what a mask selects, with a check that it is finite."""

    sparse: bool = False

    def nets(self):
        return {"table": nn.Embedding(500, 64, sparse=self.sparse)}

    def batch(self, shape):
        return torch.randint(500, (shape.items, 40))

    def loss(self, nets, rows):
        result = nets["table"](rows)[rows >= 0]
        assert torch.isfinite(result).all()
        return result.square().sum(), len(rows)


def test_what_a_mask_selects_and_a_check_of_its_numbers():
    traced, with_scratch, measured = compare(Table, {}, Shape(items=64, length=None), 1)
    assert traced == {phase: peak.without_scratch_bytes for phase, peak in measured.items()}
    assert with_scratch["train"] == pytest.approx(measured["train"].allocated_bytes, rel=0.02)


def test_sparse_gradients_of_a_job_are_refused():
    with pytest.raises(InputError, match=r"gradient of table.weight: it is sparse.*write sparse=False"):
        compare(Table, {"sparse": True}, Shape(items=64, length=None), 1)


class FirstWindowCycles(JOBS["dit"]):
    """The first loss of a process leaves a cycle that holds an activation, as an import that raises inside does."""

    cycles: ClassVar[int] = 1

    def nets(self):
        type(self).cycles = 1
        return super().nets()

    def loss(self, nets, batch):
        noisy = batch["x"].repeat(1, 1, 64)
        if type(self).cycles:
            type(self).cycles -= 1
            cycle = [noisy]
            cycle.append(cycle)
        return super().loss(nets, batch)


def test_what_cycles_of_the_first_window_hold_is_collected_after_it():
    traced, _, measured = compare(FirstWindowCycles, {}, Shape(items=3, length=40), 1)
    assert traced == {phase: peak.without_scratch_bytes for phase, peak in measured.items()}
    plain, _, _ = compare(JOBS["dit"], {}, Shape(items=3, length=40), 1)
    assert traced["save"] == plain["save"]
