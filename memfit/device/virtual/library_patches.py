"""Other people's code under fake tensors: imported for real, and not told that its tensors are fake."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.machinery import SourceFileLoader
from types import ModuleType

import torch
from torch import Tensor

from memfit.device.virtual import managed_memory
from memfit.device.virtual.patching import replaced
from memfit.device.virtual.pretrained import hub_is_offline
from memfit.torch_compat import DisableTorchFunction, disable_current_modes

_ASKS_FOR_FAKES = {"transformers.utils.import_utils": "is_fake_tensor"}
"""Functions by which a library takes another branch for fake tensors than a real run does."""

_HUB = "huggingface_hub.constants"
"""Asked before each request to the hub; libraries repeat a request that fails for a minute and more."""


_GENERATION, _SEARCH = "transformers.generation.utils", "_beam_search_has_unfinished_sequences"


def _has_room(improves: Tensor, finished: Tensor, at_their_end: Tensor, early_stopping: object) -> bool:
    """Whether a beam search goes on: until every sequence is at its largest length. Whether better ones can be found,
    which would end it before, is not known."""
    return not bool(torch.all(at_their_end))


@contextmanager
def as_in_a_real_run() -> Iterator[None]:
    """A context in which imported modules get real tensors for their constants, and no library sees fake ones."""
    with ExitStack() as stack:

        def blind(name: str) -> None:
            module = sys.modules.get(name)
            if module is not None:
                stack.enter_context(replaced(module, **{_ASKS_FOR_FAKES[name]: lambda tensor: False}))

        def ask_the_hub_once() -> None:
            constants = sys.modules.get(_HUB)
            if constants is not None and hasattr(constants, "is_offline_mode"):
                asked = constants.is_offline_mode
                stack.enter_context(replaced(constants, is_offline_mode=lambda: asked() or hub_is_offline()))

        def count_managed_memory() -> None:
            module = sys.modules.get(managed_memory.MODULE)
            if module is not None:
                stack.enter_context(replaced(module, **managed_memory.replacements(module)))

        def search_to_the_end() -> None:
            generation = getattr(sys.modules.get(_GENERATION), "GenerationMixin", None)
            if hasattr(generation, _SEARCH):
                stack.enter_context(replaced(generation, **{_SEARCH: staticmethod(_has_room)}))

        with disable_current_modes():
            """It imports parts of torch on first use, which must be over before imports pass through it."""
        plain, depth = SourceFileLoader.exec_module, [0]

        def exec_module(loader: SourceFileLoader, module: ModuleType) -> None:
            before = gc.get_count()[0]
            depth[0] += 1
            try:
                with disable_current_modes(), DisableTorchFunction():
                    plain(loader, module)
            finally:
                depth[0] -= 1
                if not depth[0] and not gc.isenabled() and gc.get_count()[0] - before >= gc.get_threshold()[0]:
                    gc.collect(0)  # as Python does meanwhile: cycles of frames would keep what the importing ones hold
            if module.__name__ in _ASKS_FOR_FAKES:
                blind(module.__name__)
            if module.__name__ == _HUB:
                ask_the_hub_once()
            if module.__name__ == managed_memory.MODULE:
                count_managed_memory()
            if module.__name__ == _GENERATION:
                search_to_the_end()

        stack.enter_context(replaced(SourceFileLoader, exec_module=exec_module))
        for name in _ASKS_FOR_FAKES:
            blind(name)
        ask_the_hub_once()
        count_managed_memory()
        search_to_the_end()
        yield
