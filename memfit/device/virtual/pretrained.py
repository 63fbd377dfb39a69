"""``from_pretrained`` of transformers and diffusers without the weights: a trace needs their shapes alone.

The configuration is read as usual (from the disk or the hub); the net is built from it, in the asked type, for
evaluation, with tied weights tied. bitsandbytes' weights are quantized. Adapters are not handled: their libraries load
as they do.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import sys
from collections.abc import Callable, Iterator
from importlib.machinery import SourceFileLoader
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import torch

from memfit.device.virtual.patching import replaced
from memfit.device.virtual.quantized import quantization_of, quantize
from memfit.errors import InputError, describe

_CONFIG_OPTIONS = ("subfolder", "revision", "cache_dir", "local_files_only", "token", "trust_remote_code")


def _options(given: dict[str, Any]) -> dict[str, Any]:
    return {name: given[name] for name in _CONFIG_OPTIONS if name in given}


def asked_dtype(given: dict[str, Any], config: Any = None) -> torch.dtype | None:
    """The type that was asked for; ``auto`` is the configuration's, and the default from transformers 5 on."""
    asked = given.get("dtype", given.get("torch_dtype"))
    if asked == "auto" or (asked is None and config is not None and _auto_is_the_default()):
        asked = getattr(config, "dtype", None)
    return _dtype(asked)


def _auto_is_the_default() -> bool:
    version = getattr(sys.modules.get("transformers"), "__version__", "0")
    return int(version.partition(".")[0]) >= 5


def _read(load: Callable[..., Any], name: Any, given: dict[str, Any]) -> Any:
    """A configuration, from the disk where it is there: the hub is asked once, and without a long wait.

    Raises:
        InputError: it is neither on the disk nor can the hub be reached.
    """
    options = _options(given)
    with contextlib.suppress(Exception):
        return load(name, **{**options, "local_files_only": True})
    reason = "its configuration is not on this disk"
    if not options.get("local_files_only") and not hub_is_offline():
        try:
            return load(name, **options)
        except Exception as error:
            reason += f", and the hub did not give it: {describe(error)}"
    write = "download its config.json once, or build the net with from_config(...), which needs no network"
    raise InputError(f"from_pretrained({str(name)!r})", reason, write)


@functools.cache
def hub_is_offline() -> bool:
    """Whether the hub is switched off, or does not answer within two seconds: libraries try for a minute and more."""
    if any(
        os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE")
        for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    ):
        return True
    hub = urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
    proxies = getproxies()
    if hub.scheme in proxies and not proxy_bypass(hub.hostname or ""):
        hub = urlsplit(proxies[hub.scheme])
    try:
        socket.create_connection((hub.hostname or "", hub.port or 443), timeout=2).close()
    except OSError:
        return True
    return False


def _transformers_model(cls: Any, name: Any, *args: Any, config: Any = None, **given: Any) -> Any:
    if config is None or isinstance(config, str):
        config = _read(cls.config_class.from_pretrained, config or name, given)
    dtype = asked_dtype(given, config) or torch.get_default_dtype()
    quantization = quantization_of(name, given, config)
    saved = _dtype(getattr(config, "dtype", None)) or torch.float32
    with torch.device("cpu") if quantization is not None else contextlib.nullcontext():
        net = with_origin(cls._from_config(config, dtype=dtype).eval(), name, given)
    if dtype == saved and not torch.cuda.is_available():
        _map_as_file(net)
    return net if quantization is None else quantize(net, quantization)


def with_origin(net: Any, name: Any, given: dict[str, Any]) -> Any:
    """A net of transformers with what the library notes of a net that it has loaded: the folder's or hub's name, by
    which trainers load it once more (a reference model), and the lengths and choices with which it generates."""
    net.name_or_path = net.config.name_or_path = str(name)
    if net.can_generate():
        with contextlib.suppress(OSError):  # there is no such file
            net.generation_config = type(net.generation_config).from_pretrained(name, **_options(given))
    return net


def _map_as_file(net: torch.nn.Module) -> None:
    """Puts the weights of a net on the CPU into one storage, as safetensors does, which maps the checkpoint's file.

    The whole file stays as long as a view of it does: where some weights are quantized, converted or left out, the
    others keep it. Buffers are few and stay where they are. A checkpoint in several files is taken as one.
    """
    weights = [weight for weight in net.parameters() if weight.device.type == "cpu"]
    weights.sort(key=lambda weight: -weight.itemsize)  # each begins at a multiple of its type
    shapes = [(weight, weight.shape, weight.dtype, weight.nbytes) for weight in weights]
    for weight in weights:
        weight.data = torch.empty(0, dtype=weight.dtype)
    file = torch.empty(sum(nbytes for *_, nbytes in shapes), dtype=torch.uint8)
    begin = 0
    for weight, shape, dtype, nbytes in shapes:
        weight.data = file[begin : begin + nbytes].view(dtype).view(shape)
        begin += nbytes


def _dtype(name: Any) -> torch.dtype | None:
    """A type by its name; None and a type as they are."""
    return getattr(torch, name) if isinstance(name, str) else name


def diffusers_model(cls: Any, name: Any, **given: Any) -> Any:
    net = cls.from_config(_read(cls.load_config, name, given)).eval()
    net.register_to_config(_name_or_path=name)
    dtype = asked_dtype(given)
    return net if dtype is None else net.to(dtype)


_MODELS = {
    "transformers.modeling_utils": ("PreTrainedModel", _transformers_model),
    "diffusers.models.modeling_utils": ("ModelMixin", diffusers_model),
}
_HUB = "huggingface_hub.constants"


@contextlib.contextmanager
def without_weights() -> Iterator[None]:
    """A context in which ``from_pretrained`` makes nets of fake tensors, and an unreachable hub is asked once.

    This holds for libraries that are imported already and for those that a job imports inside.
    """
    with contextlib.ExitStack() as stack:

        def replace_in(module: ModuleType) -> None:
            if module.__name__ == _HUB:
                is_offline = getattr(module, "is_offline_mode", None)
                if is_offline is not None:
                    stack.enter_context(replaced(module, is_offline_mode=lambda: is_offline() or hub_is_offline()))
            elif module.__name__ in _MODELS:
                name, make = _MODELS[module.__name__]
                owner = getattr(module, name)
                if not _is_replaced(owner):
                    stack.enter_context(replaced(owner, from_pretrained=classmethod(make)))

        for name in (*_MODELS, _HUB):
            if name in sys.modules:
                replace_in(sys.modules[name])
        execute = SourceFileLoader.exec_module

        def exec_module(loader: SourceFileLoader, module: ModuleType) -> None:
            execute(loader, module)
            replace_in(module)

        stack.enter_context(replaced(SourceFileLoader, exec_module=exec_module))
        yield


def _is_replaced(owner: Any) -> bool:
    """Whether ``from_pretrained`` is memfit's already, as it is where a script is traced."""
    method = vars(owner).get("from_pretrained")
    return str(getattr(getattr(method, "__func__", method), "__module__", "")).startswith("memfit.")
