"""A net of timm trained as timm's train.py does by default: its loader, its optimizer, its loss, its flags."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.accuracy_parts import torchvision_stand_in
from memfit.job import Job, Loss, Nets, Shape

VERSION = "1.0.9"
"""The newest names in the measured table are of this version; none of the 35 that the next ones added is there."""


def timm_folder() -> Path:
    """Where the benchmark's own timm is."""
    return Path(os.environ.get("MEMFIT_TIMM", Path(__file__).resolve().parents[1] / ".timm"))


def import_timm() -> Any:
    """timm of the pinned version, out of the benchmark's own folder."""
    folder = str(timm_folder())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    with torchvision_stand_in.present():
        import timm
        import timm.data.loader
        import timm.loss
        import timm.optim
        import timm.utils
    return timm


class Timm(Job):
    """``train.py --model NAME`` on images of the net's own size.

    SGD with momentum 0.9 and weight decay 2e-5, label smoothing 0.1, fp32 with TF32, cudnn.benchmark, and the
    prefetching loader, which brings batches onto the card on a stream of its own.
    """

    model: str = "resnet18"

    def nets(self) -> Nets:
        timm = import_timm()
        torch.backends.cudnn.benchmark = True
        net = timm.create_model(self.model).train()
        self._size = timm.data.resolve_data_config(model=net)["input_size"]
        return {"net": net}

    def optimizers(self, nets: Nets) -> dict[str, Any]:
        from timm.optim import create_optimizer_v2

        return {"sgd": create_optimizer_v2(nets["net"], opt="sgd", lr=0.1, weight_decay=2e-5, momentum=0.9)}

    def batch(self, shape: Shape) -> tuple[Tensor, Tensor]:
        if not hasattr(self, "_loader"):
            self._loader = iter(self._prefetching(shape.items))
        self._held = next(self._loader)  # train.py's loop variable: it lives until the next batch takes its place
        return self._held

    def loss(self, nets: Nets, batch: tuple[Tensor, Tensor]) -> Loss:
        from timm.loss import LabelSmoothingCrossEntropy

        loss = LabelSmoothingCrossEntropy(smoothing=0.1)(nets["net"](batch[0]), batch[1])
        return Loss(loss, 1)

    def _prefetching(self, items: int) -> Any:
        from timm.data.loader import PrefetchLoader

        return PrefetchLoader(_Images(items, self._size), channels=self._size[0], device=torch.device("cuda"))


class _Images:
    """Endless batches as fast_collate makes them: uint8 images and int64 classes on the host."""

    def __init__(self, items: int, size: tuple[int, ...]) -> None:
        self.items, self.size = items, size

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            images = torch.empty((self.items, *self.size), dtype=torch.uint8, device="cpu")
            yield images, torch.zeros(self.items, dtype=torch.int64, device="cpu")
