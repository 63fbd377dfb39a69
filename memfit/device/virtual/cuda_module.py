"""What ``torch.cuda`` answers on the virtual GPU."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
import torch.cuda.memory
import torch.cuda.nvtx
import torch.cuda.random

from memfit.device.hardware.shared_memory import (
    WITHOUT_OPT_IN,
    shared_memory_bytes,
    shared_memory_of_multiprocessor,
    threads_per_multiprocessor,
)
from memfit.device.virtual import backend
from memfit.device.virtual.assumptions import unknown_integer
from memfit.device.virtual.backend import Event, Stream
from memfit.device.virtual.card_rules import CardRules
from memfit.device.virtual.default_tensor_type import LEGACY_DTYPES, legacy_constructor
from memfit.errors import InputError
from memfit.torch_compat import c_bindings
from memfit.torch_compat.attributes import RAW_STREAM

_BYTES = (
    "memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved", "memory_cached",
    "max_memory_cached",
)  # fmt: skip
"""Functions of torch.cuda that count bytes."""
_FULL = 1 << 40
"""Bytes that no card has."""


def _nothing(*args: Any, **kwargs: Any) -> None: ...


def _zero(*args: Any, **kwargs: Any) -> int:
    return 0


def _context(*args: Any, **kwargs: Any) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


class UnknownPropertyError(InputError, AttributeError):
    """A property that is not known of a card without it: missing, as for ``hasattr``."""


class _Properties(SimpleNamespace):
    """The properties of a card that are known without it."""

    def __getattr__(self, name: str) -> Any:
        raise UnknownPropertyError(
            f"torch.cuda.get_device_properties().{name}", "not known without the card", "write its number instead"
        )


def _properties(card: CardRules) -> _Properties:
    """What get_device_properties answers; read only when a job asks, so that a trace knows what it depends on."""
    capability = major, minor = card.compute_capability
    return _Properties(
        name=card.name, major=major, minor=minor, total_memory=card.memory_bytes,
        multi_processor_count=card.multiprocessors, warp_size=32, shared_memory_per_block=WITHOUT_OPT_IN,
        shared_memory_per_block_optin=shared_memory_bytes(capability), regs_per_multiprocessor=65536,
        shared_memory_per_multiprocessor=shared_memory_of_multiprocessor(capability),
        max_threads_per_multi_processor=threads_per_multiprocessor(capability), max_threads_per_block=1024,
        is_integrated=0, is_multi_gpu_board=0,
    )  # fmt: skip


def stubs(
    card: CardRules, emptied: Callable[[], None], note_memory: Callable[[str], None]
) -> list[tuple[Any, dict[str, Any]]]:
    """(module, attributes to replace) for torch.cuda, torch.accelerator and their submodules.

    Args:
        emptied: called for ``empty_cache``.
        note_memory: called with the name of a function that is asked what lies on the card.
    """
    memory, random = _memory_functions(card, emptied, note_memory), _random_functions()
    nvtx = dict.fromkeys(("range_push", "range_pop", "mark"), _nothing) | {"range": _context}
    return [
        (torch.cuda, _device_functions(card) | memory | random),
        (torch.cuda.memory, memory),
        *((module, accelerator_memory(memory)) for module in ACCELERATOR),
        (torch.cuda.random, random),
        (torch.cuda.nvtx, nvtx),
        (c_bindings, {RAW_STREAM: _zero}),  # absent from a CPU build; libraries look it up on import
    ]


with contextlib.suppress(ImportError):
    import torch.accelerator.memory
ACCELERATOR = (torch.accelerator, *filter(None, [getattr(torch.accelerator, "memory", None)]))
"""Modules whose functions of memory are those of torch.cuda; before torch 2.9, they have none."""
_ACCELERATOR_NAMES = {"get_memory_info": "mem_get_info"}


def accelerator_memory(memory: Mapping[str, Any]) -> dict[str, Any]:
    """What replaces functions of ``torch.accelerator``, from what replaces those of ``torch.cuda``."""
    cuda = {name: name for name in memory} | _ACCELERATOR_NAMES
    return {name: memory[instead] for name, instead in cuda.items() if hasattr(ACCELERATOR[-1], name)}


def _memory_functions(
    card: CardRules, emptied: Callable[[], None], note_memory: Callable[[str], None]
) -> dict[str, Any]:
    """What lies on the card is answered as on an empty one; as on a full one, where unknown integers are not 0."""

    def taken() -> int:
        return _FULL if unknown_integer() else 0

    def answered(name: str, answer: Callable[[], Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            note_memory(name)
            return answer()

        return call

    answers: dict[str, Callable[[], Any]] = {
        "mem_get_info": lambda: (max(card.memory_bytes - taken(), 0), card.memory_bytes),
        "memory_stats": lambda: defaultdict(taken),
        "memory_snapshot": list,
        **dict.fromkeys(_BYTES, taken),
    }
    memory: dict[str, Any] = {name: answered(name, answer) for name, answer in answers.items()}
    memory |= {"empty_cache": emptied, "memory_summary": lambda device=None, abbreviated=False: ""}
    memory |= dict.fromkeys(
        ("reset_peak_memory_stats", "reset_accumulated_memory_stats", "reset_max_memory_allocated",
         "reset_max_memory_cached", "set_per_process_memory_fraction", "_record_memory_history", "_dump_snapshot"),
        _nothing,
    )  # fmt: skip
    return memory


def _random_functions() -> dict[str, Any]:
    def state(device: Any = None) -> torch.Tensor:
        return torch.empty(16, dtype=torch.uint8, device="cpu")

    random: dict[str, Any] = dict.fromkeys(
        ("manual_seed", "manual_seed_all", "seed", "seed_all", "set_rng_state", "set_rng_state_all"), _nothing
    )
    random |= {"get_rng_state": state, "get_rng_state_all": lambda: [state()], "initial_seed": _zero}
    return random


def _device_functions(card: CardRules) -> dict[str, Any]:
    cuda: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_bf16_supported": lambda including_emulation=True: including_emulation or card.is_at_least(8, 0),
        "is_tf32_supported": lambda: card.is_at_least(8, 0),
        "is_current_stream_capturing": lambda: False,
        "device_count": lambda: 1,
        "current_device": _zero,
        "get_device_name": lambda device=None: card.name,
        "get_device_capability": lambda device=None: card.compute_capability,
        "get_device_properties": lambda device=None: _properties(card),
        "get_arch_list": lambda: ["sm_{}{}".format(*card.compute_capability)],
        "can_device_access_peer": lambda device, peer: False,
        "Stream": Stream,
        "Event": Event,
        "current_stream": backend.current_stream,
        "default_stream": backend.default_stream,
        "stream": backend.on_stream,
        "set_stream": backend.set_stream,
        "device": _context,
        "device_of": _context,
    }
    cuda |= dict.fromkeys(("init", "_lazy_init", "set_device", "synchronize", "ipc_collect"), _nothing)
    cuda |= {name: legacy_constructor(name, dtype) for name, dtype in LEGACY_DTYPES.items()}
    return cuda
