"""Describes a configuration of torchtitan as JSON, in a process of its own: python -m memfit.script.titan.describe

Reads a target of ``memfit.script.titan.target`` on standard input, and writes a ``Description`` on standard output, or
``{"error": [seen, why, write]}``.
"""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from memfit.device.virtual.patching import replaced
from memfit.errors import InputError, describe, install_extra, is_installed
from memfit.planner.prediction import NetSize
from memfit.script.launch import script_environment
from memfit.script.titan.advice import advice
from memfit.script.titan.target import DEGREES, PREFIX, TitanTarget, target_from_json


@dataclass(frozen=True, kw_only=True)
class Description:
    """What a prediction needs of a configuration beside its trace.

    Attributes:
        degrees: ranks by dimension, as ``memfit.mesh`` names them; ``dp_shard`` is -1 where it takes those left over.
        batch: rows of one micro-batch of a data-parallel rank.
        length: tokens of a row.
        backend: how parameters are laid out over ranks, ``parallelism.spmd_backend``.
        not_modelled: settings that memfit does not model, and what to write for them.
        not_validated: what is predicted and was not measured: a line for each, with what its bytes rest on.
        loader: the class of the data loader.
        makes_rows: whether rows of tokens, with an image each for a model of both, or images of flux, can stand for
            what that loader gives.
        has_pipelines: whether this torch's schedules take micro-batches as torchtitan gives them.
        net: the model's size.
        torch: the version of torch.
        torchtitan: the version of torchtitan.
    """

    module: str
    config: str
    degrees: Mapping[str, int]
    batch: int
    length: int
    backend: str
    not_modelled: Mapping[str, str]
    not_validated: tuple[str, ...]
    loader: str
    makes_rows: bool
    has_pipelines: bool
    net: NetSize
    torch: str
    torchtitan: str


def describe_target(target: TitanTarget) -> Description:
    """What a child process reads of a target.

    Raises:
        InputError: as ``memfit.script.titan.config`` raises, or the process failed.
    """
    if not is_installed("torchtitan"):
        raise InputError(f"torchtitan:{target.config}", "torchtitan is not installed", f"run {install_extra('titan')}")
    command = [sys.executable, "-m", "memfit.script.titan.describe"]
    child = subprocess.run(
        command, input=target.to_json(), capture_output=True, text=True, env=script_environment(), check=False
    )
    try:
        answer = json.loads(child.stdout)
    except ValueError:
        last = (child.stderr.strip().splitlines() or ["no output"])[-1]
        seen = f"torchtitan:{target.config}"
        raise InputError(seen, f"torchtitan could not be asked for it: {last}", "mend its installation") from None
    if "error" in answer:
        raise InputError(*answer["error"])
    lines = tuple(answer["not_validated"])
    return Description(**{**answer, "net": NetSize(**answer["net"]), "not_validated": lines})


def main() -> None:
    """Writes the answer; what libraries print goes to standard error."""
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        described: dict[str, Any] = asdict(_described(target_from_json(sys.stdin.read())))
    except InputError as error:
        described = {"error": [error.seen, error.why, error.write]}
    answer.write(json.dumps(described))
    answer.flush()


def _described(target: TitanTarget) -> Description:
    import torch
    from torch.distributed.pipelining.schedules import PipelineScheduleSingle

    from memfit.script.titan.config import importable, load_config
    from memfit.script.titan.image_rows import reads_image_rows
    from memfit.script.titan.images import image_tokens, reads_images

    with importable():
        import torchtitan
        from torchtitan.hf_datasets import text_datasets

        with replaced(torch.cuda, is_available=lambda: True, get_device_capability=lambda *device: _CAPABILITY):
            config = load_config(target)
        model = _built(target, config)
        texts = [kind for name in _TEXT_LOADERS if (kind := getattr(text_datasets, name, None)) is not None]
        return Description(
            module=config.model_spec.name,
            config=target.config,
            degrees={name: getattr(config.parallelism, degree) for name, degree in DEGREES.items()},
            batch=config.training.local_batch_size,
            length=image_tokens(config) if reads_images(config) else config.training.seq_len,
            backend=config.parallelism.spmd_backend,
            not_modelled=_not_modelled(config, model),
            not_validated=tuple(_not_validated(config, model)),
            loader=config.dataloader._owner.__name__,
            makes_rows=reads_images(config) or reads_image_rows(config) or _reads_texts(config, texts),
            has_pipelines="arg_mbs" in inspect.signature(PipelineScheduleSingle.step).parameters,
            net=_net(config.model_spec.name, model),
            torch=torch.__version__,
            torchtitan=torchtitan.__version__,
        )


def _reads_texts(config: Any, loaders: list[Any]) -> bool:
    return any(isinstance(config.dataloader, kind.Config) for kind in loaders)


_CAPABILITY = (10, 0)
"""Of the card that a configuration is told of here: it has every format. The traced one is told of the card that was
asked for."""
_TEXT_LOADERS = ("HuggingFaceTextDataLoader", "InterleavedHuggingFaceTextDataLoader", "ChatDataLoader")
"""Loaders of torchtitan that give rows of tokens."""


_SYMMETRIC = ("MinimalAsyncEPTokenDispatcher",)
"""Dispatchers of tokens that allocate torch's symmetric memory, which asks the driver of a card."""


def _not_modelled(config: Any, model: Any) -> dict[str, str]:
    """Settings of which memfit has no model, and what to write."""
    refused = {}
    dispatchers = {type(getattr(module, "token_dispatcher", None)).__name__ for module in model.modules()}
    if symmetric := dispatchers.intersection(_SYMMETRIC):
        write = "write a configuration whose experts send their tokens by all-to-all"
        refused[f"symmetric memory ({', '.join(symmetric)})"] = write
    if config.comm.mode != "default":
        refused[f"comm.mode={config.comm.mode}"] = "write --set comm.mode=default"
    return refused


def _not_validated(config: Any, model: Any) -> Iterator[str]:
    """Lines about settings of which memfit has a model and no measured run."""
    from torchtitan.components.quantization.utils import has_quantization

    from memfit.script.titan.flash_kernels import packs_rows
    from memfit.script.titan.image_rows import image_line, reads_image_rows
    from memfit.script.titan.images import reads_images

    if reads_image_rows(config):
        yield image_line(config)
    if reads_images(config):
        yield "no run that reads images was measured; the frozen encoders have the sizes that were published"
    if config.compile.enable:
        parts, backend = " and ".join(config.compile.components), config.compile.backend
        rest = "are those that the code of torch's inductor allocates"
        if backend != "inductor":
            rest = f"were traced as eager, since memfit does not model the backend {backend}"
        yield f"no compiled run was measured (compile.enable, {parts}); compiled bytes {rest}"
    if packs_rows(model):
        yield (
            "no run with variable-length attention was measured; what its kernels (FlashAttention 2, 3 or 4) take "
            "inside is not counted"
        )
    if has_quantization(config.model_spec.model):
        yield (
            "no run with quantized layers was measured; their bytes are those of the tensors that torchao and "
            "torchtitan make, without what their kernels take"
        )


def _built(target: TitanTarget, config: Any) -> Any:
    """The whole model, on the ``meta`` device, before it is cut for ranks.

    Raises:
        InputError: the model does not take the configuration's settings, or needs what is not installed.
    """
    import torch

    spec = config.model_spec
    try:
        spec.model.update_from_config(config=config)
        with torch.device("meta"), replaced(torch.cuda, current_device=lambda: 0):
            return spec.model.build()
    except (ImportError, ValueError, AssertionError, RuntimeError) as error:
        why = describe(error)
        raise InputError(f"{PREFIX}{target.config}", why, advice(why)) from error


def _net(name: str, model: Any) -> NetSize:
    """The size of the whole model."""
    parameters = list(model.parameters())
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    return NetSize(
        name=name, parameters=sum(parameter.numel() for parameter in parameters), tensors=len(parameters),
        trainable=sum(parameter.numel() for parameter in trained), trainable_tensors=len(trained),
    )  # fmt: skip


if __name__ == "__main__":
    main()
