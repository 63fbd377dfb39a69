"""A stage's part of its nets' forward: from what was received to what is sent, or to the loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from memfit.blocks import find_module
from memfit.engine.absent_module import AbsentModule, AbsentTracking, StageEndError, StandIn, is_absent
from memfit.engine.pipeline_cut import PipelineCut, replace_module
from memfit.errors import InputError
from memfit.job import Nets
from memfit.torch_compat import disable_current_modes

Compute = Callable[[], Any]
"""Runs the nets' forward; gives the loss, or what a validation gives."""
_OUT = "leave pp out of the mesh"


@dataclass(frozen=True, kw_only=True)
class StageShapes:
    """What a stage receives and sends for one micro-batch, as tensors of the ``meta`` device."""

    received: Tensor | None
    """None on the first stage."""
    sent: Tensor | None
    """None on the last stage."""


@dataclass(kw_only=True)
class _Pass:
    """One forward of a stage: what was received; the number of the module that was called last."""

    stage: int
    own: range
    """Numbers of the stage's modules."""
    received: Tensor | None = None
    called: int = -1
    asks_shapes: bool = False
    hidden: Tensor | None = None
    """What the stage's first module is given, where shapes are asked."""


class StageForward:
    """Puts absent modules in the place of those of other ranks, and runs forwards.

    Args:
        nets: whole; they are changed in place.
        stages: those that this rank holds.
    """

    def __init__(self, nets: Nets, cut: PipelineCut, stages: Sequence[int]) -> None:
        self.cut = cut
        self._nets = nets
        self._now: _Pass | None = None
        self._held = [number for stage in stages for number in cut.modules_of(stage)]
        for number, path in enumerate(cut.paths):
            if number in self._held:
                module = find_module(nets, path)
                module.register_forward_pre_hook(partial(self._enter, number), prepend=True, with_kwargs=True)
            else:
                replace_module(nets, path, self._absent_module(number))

    def __deepcopy__(self, memo: Any) -> StageForward:
        """Copies of the nets, such as averages, run as the nets do."""
        return self

    def run(self, stage: int, compute: Compute, shapes: StageShapes, received: Tensor | None) -> Any:
        """What is sent; on the last stage what the forward gives.

        Args:
            shapes: those of ``compute``'s micro-batch.

        Raises:
            InputError: the forward does not call the modules in their order, needs what is on another stage, or sends
                a part of a tensor.
        """
        now = self._now = _Pass(stage=stage, own=self.cut.modules_of(stage), received=received)
        try:
            with self._without(now.own, absent=False), AbsentTracking() if received is not None else nullcontext():
                given = compute()
        except StageEndError as end:
            return self._sent(now, end.hidden, shapes)
        finally:
            self._now = None
        expected = now.called + 1
        if not self.cut.is_last(stage) or expected < len(self.cut.paths):
            raise InputError(
                f"module {self.cut.paths[expected]} on pp", "the forward of the nets ends without calling it", _OUT
            )
        if is_absent(given):
            why = "it depends on what a module of an earlier stage gives, beside the tensor that is passed on"
            raise InputError("the loss on pp", why, _OUT)
        return given

    def shapes(self, stage: int, compute: Compute) -> StageShapes:
        """Runs a forward in which no module computes, as far as the stage's end."""
        now = self._now = _Pass(stage=stage, own=self.cut.modules_of(stage), asks_shapes=True)
        sent: Tensor | None = None
        with self._without(now.own, absent=True), AbsentTracking(), torch.no_grad():
            try:
                compute()
            except StageEndError as end:
                sent = end.hidden
            finally:
                self._now = None
        if sent is None or (stage > 0 and now.hidden is None):
            path = self.cut.paths[now.called + 1]
            raise InputError(f"module {path} on pp", "the forward of the nets ends without calling it", _OUT)
        return StageShapes(
            received=None if now.hidden is None else _like(now.hidden),
            sent=None if self.cut.is_last(stage) else _like(sent),
        )

    @contextmanager
    def _without(self, own: range, *, absent: bool) -> Iterator[None]:
        """Inside, the rank's modules of other stages are absent, and this stage's too where it says so."""
        away = {number: self.cut.paths[number] for number in self._held if absent or number not in own}
        before = {path: replace_module(self._nets, path, self._absent_module(number)) for number, path in away.items()}
        try:
            yield
        finally:
            for path, module in before.items():
                replace_module(self._nets, path, module)

    def _absent_module(self, number: int) -> AbsentModule:
        return AbsentModule(partial(self._absent, number), self.cut.stand_ins[number])

    def _absent(self, number: int, stand_in: StandIn, args: Any, kwargs: Any) -> Any:
        """A module that does not compute was called."""
        now = self._begin(number)
        if number == now.own.stop:
            raise StageEndError(self._first(number, args))
        if number not in now.own:
            return stand_in(args, kwargs)
        self._check(now, number, args, kwargs)
        if number == now.own.start and number > 0:
            now.hidden = self._first(number, args)
        if self.cut.is_last(now.stage):
            raise StageEndError(self._first(number, args))
        return stand_in(args, kwargs, absent=False)

    def _enter(self, number: int, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """One of the stage's own modules is called."""
        now = self._begin(number)
        self._check(now, number, args, kwargs)
        if number > now.own.start or now.received is None:
            return None
        first = self._first(number, args)
        if first.shape != now.received.shape or first.dtype != now.received.dtype:
            seen = f"module {self.cut.paths[number]} on pp"
            why = f"it is given {tuple(first.shape)}, {first.dtype}, and received {tuple(now.received.shape)}"
            raise InputError(seen, f"{why}, {now.received.dtype}", "let shapes follow from the shapes of the batch")
        return (now.received, *args[1:]), kwargs

    def _begin(self, number: int) -> _Pass:
        path = self.cut.paths[number]
        if self._now is None:
            raise InputError(f"module {path} on pp", "it is called outside of the loss and of validate", _OUT)
        if number != self._now.called + 1:
            after = self.cut.paths[self._now.called] if self._now.called >= 0 else "the start"
            raise InputError(f"module {path} on pp", f"it is called after {after}", "call each once, in their order")
        self._now.called = number
        return self._now

    def _first(self, number: int, args: Any) -> Tensor:
        if not args or not isinstance(args[0], Tensor):
            why = "its first argument is not one tensor"
            raise InputError(f"module {self.cut.paths[number]} on pp", why, "pass the tensor on by position")
        first: Tensor = args[0]
        return first

    def _check(self, now: _Pass, number: int, args: Any, kwargs: Any) -> None:
        """Raises InputError where a module is given something of another stage beside its first argument."""
        beside = args[1:] if number == now.own.start else args
        if is_absent((beside, kwargs)):
            why = "it is given what a module of an earlier stage gives, beside the tensor that is passed on"
            raise InputError(f"module {self.cut.paths[number]} on pp", why, _OUT)

    def _sent(self, now: _Pass, hidden: Tensor, shapes: StageShapes) -> Tensor:
        seen = f"module {self.cut.paths[now.own.stop]} on pp"
        if is_absent(hidden):
            raise InputError(seen, "it is not given what the module before it gives", _OUT)
        if isinstance(hidden, DTensor):
            why = "it is given a DTensor, and stages pass on plain tensors"
            raise InputError(seen, why, "let parallelize(self, nets, mesh) give local outputs between those modules")
        if shapes.sent is None or hidden.shape != shapes.sent.shape:
            whole = "nothing" if shapes.sent is None else tuple(shapes.sent.shape)
            why = f"it is given {tuple(hidden.shape)}, and on one device {whole}"
            write = "cut layers within the modules of pipeline(self, nets), which pass on whole tensors"
            raise InputError(seen, why, write)
        return hidden.to(shapes.sent.dtype).contiguous()  # parameters that are gathered in a half type give that type


def _like(tensor: Tensor) -> Tensor:
    with disable_current_modes():
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta", requires_grad=tensor.is_floating_point())
