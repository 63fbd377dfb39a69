"""What torch's kernels refuse, a trace refuses too.

python -m pytest tests/trace/test_operand_types.py
"""

from functools import partial

import pytest
import torch
from torch import nn

from memfit.device.hardware.catalogue import find_device
from memfit.errors import InputError
from memfit.job import Job, Shape
from memfit.trace.step import Tracing, trace_job


class Mixed(Job):
    inputs: str = "float32"
    classes: str = "int64"
    pixels: int = 0

    def nets(self):
        return {"net": nn.Linear(8, 4)}

    def optimizers(self, nets):
        return {"sgd": torch.optim.SGD(nets["net"].parameters())}

    def batch(self, shape):
        pixels = (self.pixels,) if self.pixels else ()
        classes = torch.zeros(shape.items, *pixels, dtype=getattr(torch, self.classes))
        return torch.ones(shape.items, *pixels, 8, dtype=getattr(torch, self.inputs)), classes

    def loss(self, nets, batch):
        out = nets["net"](batch[0])
        out = out.transpose(1, 2) if self.pixels else out
        return nn.functional.cross_entropy(out, batch[1], reduction="sum"), len(batch[0])


@pytest.mark.parametrize(
    ("settings", "real", "words"),
    [
        ({"inputs": "float64"}, "same dtype", "a matrix product at .*: float64 times float32"),
        ({"inputs": "bfloat16"}, "same dtype", "a matrix product at .*: bfloat16 times float32"),
        ({"classes": "int32"}, "Long", "a loss over classes at .*test_operand_types.py:.*: its classes are int32"),
        ({"classes": "bool"}, "Long", "its classes are bool"),
        ({"classes": "uint8", "pixels": 3}, "Long", "its classes are uint8"),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "rtx4090"])
def test_types_that_a_real_step_refuses(settings: dict[str, str], real: str, words: str, device: str) -> None:
    job = Mixed(**settings)
    with pytest.raises(RuntimeError, match=real):
        job.loss(job.nets(), job.batch(Shape(items=2)))
    with pytest.raises(InputError, match=words):
        trace_job(job, Shape(items=2), Tracing(device=find_device(device)))


@pytest.mark.parametrize(
    "settings", [{}, {"inputs": "bfloat16", "precision": "bf16"}, {"classes": "uint8"}, {"pixels": 3}]
)
def test_types_that_a_real_step_takes(settings: dict[str, str]) -> None:
    job = Mixed(**settings)
    run = partial(job.loss, job.nets(), job.batch(Shape(items=2)))
    with job.autocast("cpu"):
        assert run()[0].isfinite()
    assert trace_job(job, Shape(items=2), Tracing(device=find_device("cpu"))).phases
