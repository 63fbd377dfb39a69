"""ScriptTracer: a Tracer for user scripts. Tensors on the host are real, and each operator has its source line."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from memfit.device.virtual.assumptions import HOLDS_IF_FINITE
from memfit.device.virtual.data_dependent import PUTS, asks_data, fills_by_mask
from memfit.device.virtual.hybrid_mode import HybridMode, is_real_call
from memfit.device.virtual.packed_sequences import packed
from memfit.device.virtual.virtual_device import Virtual
from memfit.script.function_calls import FunctionCalls
from memfit.script.outcome import NOWHERE, Line
from memfit.script.random_draws import RandomDraws
from memfit.script.source_lines import SourceLines
from memfit.script.weight_averages import WeightAverages
from memfit.torch_compat import DisableTorchDispatch, FakeTensor, current_autograd_node, disable_current_modes
from memfit.torch_compat.attributes import local_tensor, storage_id_of, stored_parts
from memfit.trace import constant_values
from memfit.trace.event_record import without_storage
from memfit.trace.operators import operator
from memfit.trace.tracer import Tracer

MOST_KNOWN_INTEGERS = 1 << 22
"""Elements of the largest integer or boolean tensor whose content is known on the card: token ids, lengths, masks."""

_aten = torch.ops.aten
_DEVICE = torch.ops.prim.device.default
_OF_FAKES = frozenset(
    {
        _aten._local_scalar_dense.default, _aten.split_with_sizes.default,
        _aten._nested_tensor_from_mask_left_aligned.default,
    }
)  # fmt: skip
"""Operators that ask for data, whose results on fake tensors are numbers, truth values or views of them."""
_LIFT_FRESH = _aten.lift_fresh.default
_TO_COPY = _aten._to_copy.default
_PACK = _aten._pack_padded_sequence.default
_SELECT = _aten.masked_select.default
_COUNT = _aten.bincount.default
_INDEXED = frozenset(
    {
        _aten.index.Tensor, _aten._unsafe_index.Tensor, *PUTS,
    }
)  # fmt: skip
"""Operators whose second argument may hold masks."""
_BELOW = frozenset({_aten.lt.Scalar, _aten.le.Scalar})
_ABOVE = frozenset({_aten.gt.Scalar, _aten.ge.Scalar})


def _asks_size(func: Any) -> bool:
    """Whether the size of an operator's result may depend on data."""
    return func in _INDEXED or (asks_data(func) and func not in _OF_FAKES)


class ScriptTracer(Tracer):
    """Records as Tracer does. ``on_operator`` is called before each operator that involves the card."""

    def __init__(self, virtual: Virtual) -> None:
        super().__init__(virtual)
        assert isinstance(virtual.mode, HybridMode)
        self.mode = virtual.mode
        self.mode.content = constant_values.value_of
        self.draws = RandomDraws()
        self.lines = SourceLines()
        self.row_lines: list[Line] = []
        """The line of each operator."""
        self.on_operator: Callable[[], None] = lambda: None
        self.watch: Any = None
        """The StepWatch that is notified of modules."""
        self._line = NOWHERE
        self._function_calls = FunctionCalls(number_of=self.recorded_number)
        self.averages = WeightAverages(number_of=self.recorded_number)
        self.is_paused = False

    def pause(self) -> None:
        """Stops recording for good: the trace is over, whatever the script still does."""
        self.is_paused = self._is_quiet = True

    def quiet(self) -> Any:
        return nullcontext() if self.is_paused else super().quiet()

    def _enter_module(self, module: Any, args: Any) -> None:
        if not self.is_quiet:
            self.watch.enter_module(module)
        super()._enter_module(module, args)

    def _leave_module(self, module: Any, args: Any, output: Any) -> None:
        super()._leave_module(module, args, output)
        if not self.is_quiet:
            self.watch.leave_module(module)

    def event(self, kind: int, storage: int, row: int | None = None) -> None:
        if not self.is_paused:
            super().event(kind, storage, row)

    def made_on_cpu(self, tensor: Tensor) -> None:
        """Notes a tensor that no operator made: one that was read from a file. On the CPU its bytes count."""
        if self.device_type == "cpu" and not self._is_quiet:
            self.see(tensor, self.last_row)

    def parameter_made(self, tensor: FakeTensor, real: Tensor) -> None:
        """Notes a parameter of a real tensor, which is fake from now on. On the CPU, its memory is the real one's."""
        if self._is_quiet:
            return
        self.watch.net_made()
        if self.device_type == "cpu" and not self.share(tensor, real):
            self.see(tensor, self.last_row)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _DEVICE:
            return super().__torch_dispatch__(func, types, args, kwargs)
        if _asks_size(func):
            args = self.mode.with_unknown(func, args)
        if is_real_call(types, args, kwargs):
            if self.device_type != "cpu" or self._is_quiet:
                return self.mode.run_real(func, args, kwargs)
            return self._see_real(func, args, kwargs)
        self.draws.follow(func, args, kwargs)
        if self._is_quiet:
            answered = None if self.is_paused or not _asks_size(func) else self._from_content(func, types, args, kwargs)
            return super().__torch_dispatch__(func, types, args, kwargs) if answered is None else answered
        self.on_operator()
        if current_autograd_node() is None:
            self._line = self.lines.note()
            if self.part == "between" and self.watch.steps:
                self.averages.see(func, args)
                self._note_function(func, args)
        if _asks_size(func):
            answered = self._from_content(func, types, args, kwargs)
            if answered is not None:
                return answered
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if self.part == "between":
            self._note_between(func, args, out)
        self.watch.after_operator()
        if (func in _BELOW and args[1] == math.inf) or (func in _ABOVE and args[1] == -math.inf):
            out.__dict__[HOLDS_IF_FINITE] = True
        return out

    def _see_real(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs an operator on real tensors if the CPU is the device, and records what it allocates."""
        self.on_operator()
        given = {storage_id_of(part) for arg in args if type(arg) is Tensor for part in stored_parts(arg)}
        if func is _LIFT_FRESH and args[0].layout is torch.strided and args[0].untyped_storage().resizable():
            given.clear()  # torch.tensor has allocated it; what shares an array of numpy's has a storage of fixed size
        out = self.mode.run_real(func, args, kwargs)
        outs = [made for made in (out if isinstance(out, tuple | list) else (out,)) if isinstance(made, Tensor)]
        for made in outs:
            if made.layout not in (torch.strided, torch.sparse_coo):
                raise without_storage(made)
        if self.part == "between" and current_autograd_node() is None:
            self._note_function(func, args)
        if any(storage_id_of(part) not in given for made in outs for part in stored_parts(made)):
            node = current_autograd_node()
            self._line = self.lines.here()
            kind = operator(func)
            self._see_call(kind, func, args, kwargs, out, node, None)
            self.call_memory.note(kind, func, args, kwargs, node)
        if self.part == "between":
            self._note_between(func, args, out)
        self.watch.after_operator()
        return out

    def _note_function(self, func: Any, args: Any) -> None:
        """Notes the forward of a net that is a function of trained weights."""
        watch = self.watch
        if not watch.depth and self._function_calls.multiplies_data(func, args, watch.trained_storages):
            watch.function_called()

    def _note_between(self, func: Any, args: Any, out: Any) -> None:
        """Notes an operator outside of forwards with gradients, backwards and steps of an optimizer."""
        self.watch.by_hand.see(func, args, len(self.kind))
        self._function_calls.made(args, out, self.watch.trained_storages)

    def _from_content(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """The result of an operator whose size depends on known data, on the card; None if the data is not known."""
        if func is _PACK:
            return self._packed(*args)
        if func in PUTS and fills_by_mask(*args):
            return None
        if func in _INDEXED:
            positions = [self._selected(index) for index in args[1]]
            if all(position is None for position in positions):
                return None
            flat: list[Any] = []
            for index, position in zip(args[1], positions, strict=True):
                flat += [index] if position is None else position
            return self.__torch_dispatch__(func, types, (args[0], flat, *args[2:]), kwargs)
        if func is _SELECT:
            return self._masked(*args)
        real = constant_values.real_arguments(func, args, kwargs)
        if real is None:
            return self._counts(*args, **kwargs) if func is _COUNT else None
        with disable_current_modes():
            result = func(*real[0], **real[1])
        with self:
            if isinstance(result, Tensor):
                return self._on_device(result)
            if isinstance(result, tuple):
                return tuple(self._on_device(part) for part in result)
        return result

    def _packed(self, padded: Any, lengths: Tensor, batch_first: bool) -> Any:
        """The result of ``pack_padded_sequence``: for each step, the rows of the sequences that reach it,
        concatenated.
        """
        known = lengths if not isinstance(lengths, FakeTensor) else constant_values.value_of(lengths)
        if known is None:
            return None
        with DisableTorchDispatch():
            longest = int(known[0])
            sizes = torch.tensor([int((known > step).sum()) for step in range(longest)])
        with self:
            return packed(padded, sizes.tolist(), batch_first), sizes

    def _selected(self, index: Any) -> list[Tensor] | None:
        """The positions that a mask of known content selects, which a real run computes first."""
        if index is None or index.dtype not in (torch.bool, torch.uint8):
            return None
        mask = constant_values.value_of(index)
        if mask is None:
            return None
        with disable_current_modes():
            positions = mask.nonzero()
        with self:
            return list(self._on_device(positions).unbind(1))

    def _masked(self, tensor: Tensor, mask: Tensor) -> Any:
        """The result of ``masked_select`` by a mask of known content: on a card by ``x[mask]``, as its kernel has it.

        The values are known where those of the tensor are.
        """
        content = constant_values.value_of(mask)
        if content is None:
            return None
        values = constant_values.value_of(tensor)
        with disable_current_modes():
            shape = torch.broadcast_shapes(tensor.shape, mask.shape) or (1,)
            selected = content.expand(shape)
            chosen = values.masked_select(content) if values is not None and self.device_type == "cpu" else None
            count = int(selected.sum())
        with self:
            if chosen is not None:
                return self._on_device(chosen)
            if self.device_type == "cpu":
                return tensor.new_empty((count,))
            return tensor.expand(shape)[mask.expand(shape)]

    def _counts(self, tensor: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Any:
        """The result of ``bincount`` of known values with weights that are not known."""
        values = constant_values.value_of(tensor)
        if values is None or weights is None:
            return None
        with disable_current_modes():
            length = max(minlength, int(values.max()) + 1 if values.numel() else 0)
        dtype = weights.dtype if weights.dtype is torch.float32 else torch.float64
        with self:
            return weights.new_empty((length,), dtype=dtype)

    def _on_device(self, real: Tensor) -> Tensor:
        """What an operator allocates for a result of known content."""
        if self.device_type == "cpu":
            made: Tensor = _aten.empty_like.default(self.mode.fake_like(real))
            constant_values.know(made, real)
            return made
        copied: Tensor = _TO_COPY(real, device=self.virtual.device)
        return copied

    def _note_operator(self, name: str, node: Any, *rest: Any) -> None:
        super()._note_operator(name, node, *rest)
        line = self._line if node is None else self.lines.of_node(node)
        while len(self.row_lines) < len(self.op_rows):
            self.row_lines.append(line)

    def line_of(self, storage: int) -> Line:
        """The line that allocated a storage."""
        row = self.made_by[storage]
        return self.row_lines[row] if row < len(self.row_lines) else NOWHERE

    def recorded_number(self, tensor: Any) -> int | None:
        """The number of the storage of a tensor; None if it was not recorded."""
        local = local_tensor(tensor)
        if not isinstance(local, FakeTensor) and self.device_type != "cpu":
            return None
        try:
            return self.number_of(local)
        except NotImplementedError:
            return None
