"""The virtual GPU: a context in which tensors on its device have shapes, types and storages, but no bytes.

Everything here that reaches into torch's internals is undone on leaving. A trace of a step on this device makes the
allocations that the step makes on CUDA; what a kernel allocates inside of itself is in ``memfit.device.workspace``.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch._dynamo  # before any torch.cuda function is replaced: it keeps a table of them
import torch._meta_registrations
import torch.utils._foreach_utils
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.optim.optimizer import _foreach_supported_types

from memfit.device import backend
from memfit.device.patching import appended, replaced
from memfit.device.rules import CardRules
from memfit.errors import InputError

TRIED_WITH = ("2.13",)
"""The torch versions whose internals this was tried with."""


class VirtualMode(FakeTensorMode):
    """FakeTensorMode for tensors that live as long as a training run."""

    avoid_device_init = True  # type: ignore[assignment]
    """There is no device behind PrivateUse1: ``torch.tensor(..., device=...)`` must not fill one."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        # A memo of fake tensors is a weak reference to each, and torch swaps no tensor (Module.to) that has one.
        self.fake_tensor_converter.set_tensor_memo = lambda tensor, fake: None  # type: ignore[method-assign]

    def __deepcopy__(self, memo: dict[int, Any]) -> VirtualMode:
        return self


@dataclass(frozen=True, kw_only=True, eq=False)
class Virtual:
    """A virtual device that was entered."""

    device: torch.device
    mode: VirtualMode
    rules: CardRules | None
    """None for the virtual CPU."""


def check_torch_version() -> None:
    """Raises:
    InputError: this torch was never tried.
    """
    if not torch.__version__.startswith(tuple(f"{tried}." for tried in TRIED_WITH)):
        raise InputError(
            f"torch {torch.__version__}",
            "memfit reaches into torch's internals, and has not been tried with this version",
            f"install torch {' or '.join(TRIED_WITH)}",
        )


def _device_hint(tensor: Any) -> str:
    """What the meta kernels take a tensor's device for; they know CUDA's rules under the name of cuda."""
    if not isinstance(tensor, FakeTensor):
        return "cuda"
    kind = tensor.fake_device.type
    return "cuda" if kind == backend.NAME else kind


@contextlib.contextmanager
def _fakes_pass_for_tensors() -> Iterator[None]:
    """What torch asks of a tensor's Python type or its weak references, answered as for a plain tensor."""
    with (
        replaced(torch.utils, weakref=SimpleNamespace(**vars(weakref) | {"getweakrefs": lambda tensor: []})),
        appended(_foreach_supported_types, FakeTensor),
        appended(torch.utils._foreach_utils._foreach_supported_types, FakeTensor),
        replaced(torch._meta_registrations, device_hint=_device_hint),
    ):
        yield


@contextlib.contextmanager
def virtual_cpu() -> Iterator[Virtual]:
    """Fake tensors on the plain CPU, with CPU's own rules: the same step as a real one here, without its bytes."""
    check_torch_version()
    with _fakes_pass_for_tensors(), VirtualMode() as mode:
        yield Virtual(device=torch.device("cpu"), mode=mode, rules=None)


@contextlib.contextmanager
def virtual_gpu(card: CardRules) -> Iterator[Virtual]:
    """The card's device: what is built and run in this context behaves as on CUDA, and code that says cuda runs on it.

    Raises:
        InputError: a version of torch that was never tried.
    """
    from memfit.device.attention import cuda_attention
    from memfit.device.autocast import cuda_autocast
    from memfit.device.redirect import says_cuda

    check_torch_version()
    backend.register()
    with _fakes_pass_for_tensors(), cuda_autocast(), cuda_attention(card), VirtualMode() as mode, says_cuda(card):
        yield Virtual(device=torch.device(backend.NAME), mode=mode, rules=card)
