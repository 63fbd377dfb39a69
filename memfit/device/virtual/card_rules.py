"""What the virtual GPU must know of a card to choose kernels as CUDA would."""

import math
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, fields
from functools import wraps
from typing import Any

from memfit.device.hardware.catalogue import Device
from memfit.device.virtual.patching import appended


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

    def is_at_least(self, major: int, minor: int) -> bool:
        """Whether the compute capability is this one or a later one."""
        return self.compute_capability >= (major, minor)

    def is_at_most(self, major: int, minor: int) -> bool:
        """Whether the compute capability is this one or an earlier one."""
        return self.compute_capability <= (major, minor)

    def has_major(self, *majors: int) -> bool:
        """Whether the compute capability begins with one of these numbers."""
        return self.compute_capability[0] in majors

    def flash_splits(self, blocks: int, key_blocks: int) -> int:
        """Parts in which flash takes the keys, so that no multiprocessor is idle; 1: it does not split them.

        FlashAttention 2 splits where the blocks of queries leave more than a fifth of twice the multiprocessors idle,
        and takes the fewest splits within 85 % of the best use.
        """
        slots = 2 * self.multiprocessors
        if blocks >= 0.8 * slots:
            return 1
        use = {
            splits: (waves := blocks * splits / slots) / math.ceil(waves)
            for splits in range(1, min(128, slots, key_blocks) + 1)
            if splits == 1 or math.ceil(key_blocks / splits) != math.ceil(key_blocks / (splits - 1))
        }
        return next(splits for splits in use if use[splits] >= 0.85 * max(use.values()))

    @property
    def shares_attention(self) -> bool:
        """Whether a call that is flash's on some cards and cuDNN's on others is traced as flash's on all."""
        return False

    @property
    def prefers_cudnn_attention(self) -> bool:
        """Hopper and data centre Blackwell (sdp_utils.cpp, check_prefer_cudnn_attention), unless set otherwise."""
        if self.cudnn_attention_first is not None:
            return self.cudnn_attention_first
        return self.has_major(9, 10)


_shares_attention = [False]
"""Whether a trace is for cards of both kinds of attention, by context."""
_recorders: list[set[str]] = []
"""Open recorders; not by thread, since autograd reads rules in threads of its own."""
_FIELDS = frozenset(field.name for field in fields(CardRules))
_QUESTIONS = frozenset(("is_at_least", "is_at_most", "has_major", "flash_splits"))
"""Methods of the rules that are asked with whole numbers."""


class RecordedRules(CardRules):
    """Rules that note what is asked of them: a field by its name, a method by its name and numbers."""

    def become(self, device: Device) -> None:
        """Answers as another card from now on."""
        for name, value in vars(plain(card_rules(device))).items():
            object.__setattr__(self, name, value)

    modes = 0
    """Dispatch modes that are entered where a job's code runs; 0: not known."""

    @property
    def shares_attention(self) -> bool:
        return is_attention_shared()

    def __getattribute__(self, name: str) -> Any:
        if name in _FIELDS:
            note_fact(name)
        value = super().__getattribute__(name)
        if name not in _QUESTIONS:
            return value

        @wraps(value)
        def asked(*numbers: int) -> Any:
            note_fact(" ".join(map(str, (name, *numbers))))
            return getattr(plain(self), name)(*numbers)

        return asked


def note_fact(fact: str) -> None:
    """Notes that a trace asked for a fact of its card, where something else than its rules answers."""
    for read in _recorders:
        read.add(fact)


def plain(rules: CardRules) -> CardRules:
    """The same rules, which note nothing."""
    return CardRules(**{name: object.__getattribute__(rules, name) for name in _FIELDS})


@contextmanager
def recorded_facts() -> Iterator[set[str]]:
    """Notes which facts of a card traces ask for: they are the same on every card where these facts are the same."""
    read: set[str] = set()
    _recorders.append(read)
    try:
        yield read
    finally:
        _recorders.pop()
        read.discard("cudnn_attention_first")


def attention_shared(is_shared: bool = True) -> AbstractContextManager[None]:
    """Context whose traces are put on a card before they are used, so that cards which prefer cuDNN's attention may
    share them with others: ``memfit.planner.prediction.question_on``."""
    return appended(_shares_attention, is_shared)


def is_attention_shared() -> bool:
    """Whether ``attention_shared`` is entered."""
    return _shares_attention[-1]


def card_rules(device: Device) -> CardRules:
    """The rules of a card of the catalogue."""
    assert device.compute_capability is not None
    assert device.memory_bytes is not None
    return (RecordedRules if _recorders else CardRules)(
        compute_capability=device.compute_capability,
        name=device.name,
        memory_bytes=device.memory_bytes,
        multiprocessors=device.multiprocessors or CardRules.multiprocessors,
    )


def card_facts(device: Device, asked: Collection[str]) -> dict[str, Any]:
    """What a card answers to facts that ``recorded_facts`` noted, such as ``name`` or ``is_at_least 8 0``."""
    rules = plain(card_rules(device))
    facts = {}
    for fact in sorted(asked):
        name, *numbers = fact.split(" ")
        value = getattr(rules, name)
        facts[fact] = value(*map(int, numbers)) if name in _QUESTIONS else value
    return facts
