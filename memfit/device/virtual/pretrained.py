"""``from_pretrained`` of transformers and diffusers without the weights: a trace needs their shapes alone.

The configuration is read as usual (from the disk or the hub); the net is built from it, in the asked type, for
evaluation, with tied weights tied. Quantised weights and adapters are not handled: their libraries load as they do.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch

from memfit.device.virtual.patching import replaced

_CONFIG_OPTIONS = ("subfolder", "revision", "cache_dir", "local_files_only", "token", "trust_remote_code")


def _options(given: dict[str, Any]) -> dict[str, Any]:
    return {name: given[name] for name in _CONFIG_OPTIONS if name in given}


def asked_dtype(given: dict[str, Any], config: Any = None) -> torch.dtype | None:
    """The type that was asked for; ``auto`` is the configuration's."""
    asked = given.get("dtype", given.get("torch_dtype"))
    if asked == "auto":
        asked = getattr(config, "dtype", None)
    return getattr(torch, asked) if isinstance(asked, str) else asked


def _transformers_model(cls: Any, name: Any, *args: Any, config: Any = None, **given: Any) -> Any:
    if config is None or isinstance(config, str):
        config = cls.config_class.from_pretrained(config or name, **_options(given))
    return cls._from_config(config, dtype=asked_dtype(given, config) or torch.get_default_dtype()).eval()


def diffusers_model(cls: Any, name: Any, **given: Any) -> Any:
    net = cls.from_config(cls.load_config(name, **_options(given))).eval()
    dtype = asked_dtype(given)
    return net if dtype is None else net.to(dtype)


_MODELS = {
    "transformers.modeling_utils": ("PreTrainedModel", _transformers_model),
    "diffusers.models.modeling_utils": ("ModelMixin", diffusers_model),
}


@contextlib.contextmanager
def without_weights() -> Iterator[None]:
    """Inside, ``from_pretrained`` of libraries that were imported before makes nets of fake tensors."""
    with contextlib.ExitStack() as stack:
        for module, (name, make) in _MODELS.items():
            if module in sys.modules:
                owner = getattr(sys.modules[module], name)
                stack.enter_context(replaced(owner, from_pretrained=classmethod(make)))
        yield
