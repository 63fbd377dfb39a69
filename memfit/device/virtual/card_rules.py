"""What the virtual GPU must know of a card to choose kernels as CUDA would."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

from memfit.device.hardware.catalogue import Device


@dataclass(frozen=True, kw_only=True)
class CardRules:
    """The properties of a card on which PyTorch's choice of kernels depends. Bytes of memory are not among them."""

    compute_capability: tuple[int, int] = (8, 0)
    """(major, minor), as torch.cuda.get_device_capability gives it."""
    cudnn_attention_first: bool | None = None
    """Whether scaled_dot_product_attention tries cuDNN before flash; None: as PyTorch decides with a cuDNN newer than
    9.15, by the compute capability. TORCH_CUDNN_SDPA_DEPRIORITIZED=1 in the environment forbids it, as in PyTorch."""
    name: str = "virtual GPU"
    """What torch.cuda.get_device_name answers."""
    memory_bytes: int = 80 * 2**30
    """What torch.cuda.mem_get_info and get_device_properties answer."""
    multiprocessors: int = 108
    """What get_device_properties answers."""

    @property
    def prefers_cudnn_attention(self) -> bool:
        """Hopper and data centre Blackwell (sdp_utils.cpp, check_prefer_cudnn_attention), unless set otherwise."""
        if self.cudnn_attention_first is not None:
            return self.cudnn_attention_first
        return self.compute_capability[0] in (9, 10)


_recorders: list[set[str]] = []
"""Open recorders; not by thread, since autograd reads rules in threads of its own."""
_FACTS = frozenset(field.name for field in fields(CardRules))


class _RecordedRules(CardRules):
    """Rules that note which of them are read."""

    def __getattribute__(self, name: str) -> Any:
        if name in _FACTS:
            for read in _recorders:
                read.add(name)
        return super().__getattribute__(name)


@contextmanager
def recorded_facts() -> Iterator[set[str]]:
    """Notes which facts of a card traces read: they are the same on every card where these facts are the same."""
    read: set[str] = set()
    _recorders.append(read)
    try:
        yield read
    finally:
        _recorders.pop()
        read.discard("cudnn_attention_first")


def card_rules(device: Device) -> CardRules:
    """The rules of a card of the catalogue."""
    assert device.compute_capability is not None
    assert device.memory_bytes is not None
    return (_RecordedRules if _recorders else CardRules)(
        compute_capability=device.compute_capability,
        name=device.name,
        memory_bytes=device.memory_bytes,
        multiprocessors=device.multiprocessors or CardRules.multiprocessors,
    )
