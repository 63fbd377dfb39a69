"""Pretrained weights of a script: a trace needs their shapes only, so nothing is read or downloaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.hub
from torch import nn

from memfit.device.virtual.patching import replaced
from memfit.device.virtual.pretrained import asked_dtype, diffusers_model, with_origin
from memfit.device.virtual.quantized import quantization_of, quantize
from memfit.errors import InputError
from memfit.script.import_hooks import Hook, on_import
from memfit.torch_compat.attributes import IncompatibleKeys

_LOADING_OPTIONS = frozenset(
    {
        "state_dict", "from_tf", "from_flax", "output_loading_info", "low_cpu_mem_usage", "device_map", "max_memory",
        "offload_folder", "offload_state_dict", "offload_buffers", "load_in_8bit", "load_in_4bit",
        "quantization_config",
        "use_safetensors", "variant", "ignore_mismatched_sizes", "weights_only", "key_mapping", "torch_dtype", "dtype",
        "adapter_name", "adapter_kwargs", "gguf_file", "tp_plan", "tp_size", "device_mesh", "use_kernels",
        "_commit_hash", "_from_auto", "_fast_init", "mirror", "keep_in_fp32_modules",
    }
)  # fmt: skip


class AbsentWeights(dict[str, Any]):
    """Stands for weights that were not downloaded: a net that loads them stays as it was built."""


def _quantization(name: Any, given: dict[str, Any], config: Any, note: Callable[[str], None]) -> Any:
    try:
        return quantization_of(name, given, config)
    except InputError as error:
        note(f"weights of {name} are counted unquantized: {error.why}")
        return None


@contextmanager
def absent_weights(note: Callable[[str], None]) -> Iterator[None]:
    """Context in which nets of libraries are built from their configurations, without weights.

    Args:
        note: called with what is not modelled.
    """

    def transformers_model(cls: Any, name: Any, *args: Any, config: Any = None, **given: Any) -> Any:
        loading = {key: given.pop(key) for key in list(given) if key in _LOADING_OPTIONS}
        rest = given
        if config is None or isinstance(config, str):
            config, rest = cls.config_class.from_pretrained(config or name, return_unused_kwargs=True, **given)
        own = {key: rest[key] for key in ("attn_implementation", "experts_implementation") if key in rest}
        dtype = asked_dtype(loading, config) or (getattr(config, "dtype", None) if "dtype" not in loading else None)
        net = cls._from_config(config, dtype=dtype or torch.get_default_dtype(), **own).eval()
        net = with_origin(net, name, given)
        quantization = _quantization(name, loading, config, note)
        where = loading.get("device_map")
        if quantization is not None:
            net = quantize(net, quantization)
        elif where is not None and where != "cpu":
            net = net.to("cuda")
        return (net, {}) if loading.get("output_loading_info") else net

    def timm_weights(*args: Any, **kwargs: Any) -> None:
        """The net keeps the weights that it was built with."""

    hooks: dict[str, Hook] = {
        "transformers.modeling_utils": lambda module: (
            module.PreTrainedModel, {"from_pretrained": classmethod(transformers_model)}
        ),
        "diffusers.models.modeling_utils": lambda module: (
            module.ModelMixin, {"from_pretrained": classmethod(diffusers_model)}
        ),
        "timm.models._builder": lambda module: (module, {"load_pretrained": timm_weights}),
    }  # fmt: skip
    load_state_dict = nn.Module.load_state_dict

    def load(self: nn.Module, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(state_dict, AbsentWeights):
            return IncompatibleKeys([], [])
        return load_state_dict(self, state_dict, *args, **kwargs)

    with ExitStack() as stack:
        stack.enter_context(on_import(hooks))
        stack.enter_context(replaced(torch.hub, load_state_dict_from_url=lambda *args, **kwargs: AbsentWeights()))
        stack.enter_context(replaced(nn.Module, load_state_dict=load))
        yield
