"""A training loop as someone's script has it, traced on the virtual card."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from bench.accuracy_parts import deepspeed_engine, earlier_adam, four_bit_base, fsdp1, litgpt_nets, quantized_state
from bench.accuracy_parts.earlier_attention import flash_attention_1
from bench.accuracy_parts.earlier_softmax import KeepsInputs
from bench.accuracy_parts.nets_by_name import Built, build_net
from memfit.device.hardware.catalogue import Device
from memfit.device.virtual.fake_group import predicted_ranks
from memfit.events import Trace

Precision = Literal["fp32", "fp16-autocast", "bf16-autocast", "bf16", "fp16"]


@dataclass(frozen=True, kw_only=True)
class Loop:
    """What a script trains and how; every field is one that a recipe file may set."""

    net: str
    """A name of timm, of torchvision or of the hub."""
    kind: str
    """``timm``, ``torchvision``, ``causal-lm``, ``seq2seq-lm``, ``encoder``, or ``litgpt-`` with one of
    ``litgpt_nets.METHODS``."""
    environment: str = "installed"
    batch: int = 1
    length: int = 128
    """Tokens of a sequence."""
    later_length: int | None = None
    """Tokens of the sequences after the first iteration, of a script that begins with its longest; None: the same."""
    image: int = 224
    precision: Precision = "fp32"
    optimizer: str = "AdamW"
    optimizer_arguments: dict[str, Any] = field(default_factory=dict)
    zero_grad: Literal["start", "before_backward", "after_step"] = "start"
    attention: str | None = None
    """Transformers' ``attn_implementation``; None: the version's default."""
    attention_mask: bool = False
    """Whether the batch has a mask of ones."""
    attention_mask_padded: bool = False
    """Whether that mask has zeros: the masks that follow from it are then really made."""
    loss: Literal["labels", "cross_entropy", "mean_square"] = "labels"
    step_is_function: bool = False
    """Whether an iteration is a function of its own, whose outputs and loss are gone when it returns. In a loop they
    are variables that the next forward replaces only when it returns."""
    keeps_batch: bool = False
    """Whether the batch stays the same over all iterations and lies on the card."""
    reads_prediction: bool = False
    """Whether ``torch.max(outputs, 1)`` follows the step."""
    channels_last: bool = False
    cudnn_benchmark: bool = False
    backward_in_autocast: bool = False
    cublas_workspace: bool = True
    torch: str = ""
    """The version of torch that the run used, as 2.1.0; empty: the installed one. Before 2.0 optimizers go one tensor
    at a time, and ``zero_grad`` fills gradients with 0; ``_earlier_operators`` has what else differs."""
    classes: int | None = None
    net_arguments: dict[str, Any] = field(default_factory=dict)
    """What timm's constructor or litgpt's LoRA is given besides."""
    quantize: str = ""
    """How the linear layers of litgpt's net are quantized: one of ``four_bit_base.MODES``; empty: not."""
    gradient_checkpointing: bool = False
    """Whether timm's ``set_grad_checkpointing`` is called."""
    deepspeed: dict[str, Any] = field(default_factory=dict)
    """Configuration of ``deepspeed.initialize``, whose engine has the optimizer; empty: no engine."""
    fsdp1: bool = False
    """Whether litgpt's net is sharded over ``ranks``, each block a unit whose activations are recomputed."""
    ranks: int = 1
    compiled: bool = False
    """Whether ``net.compile()`` is called."""
    accumulates: bool = False
    """Whether only every other iteration takes the optimizer's step: more iterations in between hold no more."""
    iterations: int = 3

    def is_before(self, version: tuple[int, int]) -> bool:
        """Whether the run's torch was older than a version."""
        numbers = re.match(r"(\d+)\.(\d+)", self.torch)
        return numbers is not None and (int(numbers[1]), int(numbers[2])) < version

    @property
    def litgpt_method(self) -> str:
        """How litgpt trains the net; empty where it is not litgpt's."""
        return self.kind.removeprefix("litgpt-") if self.kind.startswith("litgpt-") else ""

    @property
    def uses_bitsandbytes(self) -> bool:
        """Whether its layers or its optimizer are bitsandbytes'."""
        return bool(self.quantize) or self.optimizer.startswith("bitsandbytes.")


def trace_loop(loop: Loop, card: Device) -> Trace:
    """The loop's memory events on a card: setup, then an iteration after another, each a ``train`` phase."""
    from memfit.device.virtual.library_patches import as_in_a_real_run
    from memfit.trace.columns import as_trace
    from memfit.trace.operator_scratch import with_scratch
    from memfit.trace.step import on_virtual_device
    from memfit.trace.tracer import Tracer

    with (
        _without_kernels(loop),
        _cublas(loop.cublas_workspace),
        on_virtual_device(card) as virtual,
        as_in_a_real_run(),
        _ranks(loop),
        (tracer := Tracer(virtual)).recording(),
    ):
        with tracer.phase("setup"):
            script = _Script(loop, virtual.device)
            tracer.name_modules({"net": script.net})
            script.categorise(tracer)
        for number in range(loop.iterations):
            with tracer.phase("train"):
                script.iterate(tracer, takes_step=not loop.accumulates or number % 2 == 1)
                script.categorise(tracer)
                if number == 0:
                    tracer.collect_cycles()
        trace = as_trace(tracer)
        calls = tracer.call_memory.calls
    return with_scratch(trace, calls)


def mem_tracker_peak(loop: Loop) -> int:
    """Bytes that torch's MemTracker finds for two iterations of the loop, on tensors without data of a CPU.

    Raises:
        Exception: what the net's code, or MemTracker, raises.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    device = torch.device("cpu")
    with FakeTensorMode():
        script = _Script(loop, device)
        tracker = MemTracker()
        tracker.track_external(script.net, script.optimizer)
        with tracker:
            for number in range(2):
                script.iterate(_Unseen(), takes_step=True)
                if not number:
                    tracker.reset_mod_stats()
        return int(tracker.get_tracker_snapshot("peak")[device]["Total"])


class _Unseen:
    """Stands where a loop is traced: nobody asks what its tensors are."""

    def mark(self, part: str) -> None:
        pass

    def categorise(self, tensor: Tensor, category: str) -> None:
        pass


@contextlib.contextmanager
def _without_kernels(loop: Loop) -> Iterator[None]:
    """Libraries that are imported before the virtual card is there, without their compiled code."""
    with contextlib.ExitStack() as stack:
        if loop.uses_bitsandbytes:
            stack.enter_context(four_bit_base.without_kernels())
        if loop.deepspeed:
            stack.enter_context(deepspeed_engine.without_kernels())
        yield


def _earlier_operators(loop: Loop) -> contextlib.AbstractContextManager[Any]:
    """Operators as the loop's version of torch had them."""
    if loop.is_before((1, 11)):
        return KeepsInputs()
    return flash_attention_1() if loop.is_before((2, 2)) else contextlib.nullcontext()


def _ranks(loop: Loop) -> contextlib.AbstractContextManager[None]:
    """The process group that the loop's strategy asks for, if any."""
    if loop.deepspeed:
        return deepspeed_engine.one_rank()
    return predicted_ranks(loop.ranks) if loop.fsdp1 else contextlib.nullcontext()


@contextlib.contextmanager
def _cublas(workspace: bool) -> Iterator[None]:
    before = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    if not workspace:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":0:0"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
        else:
            os.environ["CUBLAS_WORKSPACE_CONFIG"] = before


class _Script:
    """The loop's variables between iterations."""

    def __init__(self, loop: Loop, device: torch.device) -> None:
        self.loop, self.device = loop, device
        torch.backends.cudnn.benchmark = loop.cudnn_benchmark
        built: Built = build_net(loop)
        if loop.gradient_checkpointing:
            built.net.set_grad_checkpointing()  # type: ignore[operator]
        self.vocabulary = built.vocabulary
        self.net: nn.Module = built.net.train()
        if loop.precision in ("bf16", "fp16") and not loop.quantize:
            self.net = self.net.to(torch.bfloat16 if loop.precision == "bf16" else torch.float16)
        if loop.fsdp1:
            self.net = fsdp1.sharded(self.net, device)
        layout = {"memory_format": torch.channels_last} if loop.channels_last else {}
        if layout or next(self.net.parameters()).device != device:
            self.net = self.net.to(device=device, **layout)
        if loop.compiled:
            self.net.compile()
        if loop.deepspeed:
            self.net = self.optimizer = deepspeed_engine.engine(self.net, loop.batch, loop.deepspeed)
        else:
            self.optimizer = _optimizer(loop, self.net)
        self.batch: dict[str, Tensor] = {}
        self.batches = 0
        self.outputs: Any = None
        self.loss: Tensor | None = None
        self.prediction: Any = None

    def iterate(self, tracer: Any, *, takes_step: bool) -> None:
        """One iteration, statement by statement as the script has it."""
        loop = self.loop
        tracer.mark("fetch")
        if loop.zero_grad == "start":
            self._zero_grad()
        if not self.batch or not loop.keeps_batch:
            self.batch = self._fetch()
            for tensor in self.batch.values():
                tracer.categorise(tensor, "inputs")
        tracer.mark("forward")
        with contextlib.ExitStack() as stack:
            stack.enter_context(_earlier_operators(loop))  # in the backward too, which may recompute
            autocast = stack.enter_context(contextlib.ExitStack())
            if loop.fsdp1:
                stack.enter_context(fsdp1.synced(self.net, when=takes_step))
            if loop.precision.endswith("-autocast"):
                half = torch.float16 if loop.precision.startswith("fp16") else torch.bfloat16
                autocast.enter_context(torch.autocast(self.device.type, dtype=half))
            self.outputs = self._forward()
            self.loss = self._loss(self.outputs)
            if not loop.backward_in_autocast:
                autocast.close()
            if loop.zero_grad == "before_backward":
                self._zero_grad()
            tracer.mark("backward")
            if loop.deepspeed:
                self.net.backward(self.loss)  # type: ignore[operator]
            else:
                self.loss.backward()
        tracer.mark("optimizer")
        if takes_step:
            self.optimizer.step()
        if loop.reads_prediction:
            _, self.prediction = torch.max(self.outputs, 1)
        if loop.zero_grad == "after_step" and takes_step:
            self._zero_grad()
        if loop.step_is_function:
            self.outputs = self.loss = self.prediction = None

    def _zero_grad(self) -> None:
        if self.loop.deepspeed:  # the engine's step has done it
            return
        self.optimizer.zero_grad(set_to_none=not self.loop.is_before((2, 0)))

    def categorise(self, tracer: Any) -> None:
        """Says what parameters, buffers, gradients and the optimizer's tensors are."""
        for parameter in self.net.parameters():
            tracer.categorise(parameter, "parameters" if parameter.requires_grad else "frozen")
            if parameter.grad is not None:
                tracer.categorise(parameter.grad, "gradients")
        for buffer in self.net.buffers():
            tracer.categorise(buffer, "buffers")
        for scale in four_bit_base.scales(self.net):
            tracer.categorise(scale, "frozen")
        for state in getattr(self.optimizer, "state", {}).values():
            for value in state.values():
                if isinstance(value, Tensor):
                    tracer.categorise(value, "optimizer")

    def _fetch(self) -> dict[str, Tensor]:
        loop = self.loop
        self.batches += 1
        if loop.kind in ("timm", "torchvision"):
            dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(loop.precision, torch.float32)
            images = torch.randn(loop.batch, 3, loop.image, loop.image, device=self.device, dtype=dtype)
            if loop.channels_last:
                images = images.contiguous(memory_format=torch.channels_last)
            return {"images": images, "classes": torch.zeros(loop.batch, dtype=torch.int64, device=self.device)}
        length = loop.length if self.batches == 1 else loop.later_length or loop.length
        ids = torch.zeros(loop.batch, length, dtype=torch.int64, device=self.device)
        batch = {"input_ids": ids}
        if loop.attention_mask:
            batch["attention_mask"] = torch.ones_like(ids)
        if loop.loss == "labels":
            batch["labels"] = ids if loop.keeps_batch else torch.zeros_like(ids)
        return batch

    def _forward(self) -> Any:
        if "images" in self.batch:
            outputs = self.net(self.batch["images"])
            return outputs[0] if isinstance(outputs, tuple) else outputs
        if method := self.loop.litgpt_method:
            return litgpt_nets.outputs_of(self.net, self.batch["input_ids"], method)
        return self.net(**self.batch)

    def _loss(self, outputs: Any) -> Tensor:
        if "images" in self.batch:
            loss: Tensor = nn.functional.cross_entropy(outputs, self.batch["classes"])
            return loss
        if method := self.loop.litgpt_method:
            return litgpt_nets.loss_of(outputs, self.batch["labels"], method)
        if self.loop.loss == "labels":
            loss = outputs.loss
            return loss
        loss = outputs.last_hidden_state.float().pow(2).mean()
        return loss


def _optimizer(loop: Loop, net: nn.Module) -> Any:
    trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
    if loop.kind == "timm" and loop.optimizer == "timm-sgd":
        from timm.optim import create_optimizer_v2

        optimizer = create_optimizer_v2(net, opt="sgd", lr=1e-4)
        for group in optimizer.param_groups:
            group["foreach"] = False if loop.is_before((2, 0)) else group.get("foreach")
        return optimizer
    if loop.optimizer == "Adafactor" and loop.kind not in ("timm", "torchvision"):
        from transformers.optimization import Adafactor

        return Adafactor(trained, lr=1e-3, relative_step=False)
    return _optimizer_class(loop.optimizer)(trained, lr=1e-3, **loop.optimizer_arguments)


def _optimizer_class(name: str) -> Any:
    """An optimizer of torch, of torchao under ``torchao.AdamW8bit``, of bitsandbytes under ``bitsandbytes.PagedAdamW``,
    ``earlier.Adam`` or ``quantized_state.AdamW``."""
    library, _, plain = name.rpartition(".")
    if library in ("earlier", "quantized_state"):
        return getattr(earlier_adam if library == "earlier" else quantized_state, plain)
    if library == "torchao":
        import torchao.optim

        return getattr(torchao.optim, plain)
    if library == "bitsandbytes":
        import bitsandbytes.optim

        return getattr(bitsandbytes.optim, plain)
    return getattr(torch.optim, name)
