"""Tracer: a dispatch mode that writes down every allocation, free and operator of the fake tensors of one device.

``memfit.trace.event_record`` holds the events and the life of storages, ``memfit.trace.call_memory`` the memory that an
operator allocates and frees within one call.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from memfit.device.virtual.card_rules import RecordedRules
from memfit.device.virtual.data_dependent import NOT_HANDLED
from memfit.device.virtual.fake_mode import Remembered
from memfit.device.virtual.packed_sequences import unpacked_in_a_trace
from memfit.device.virtual.patching import replaced
from memfit.device.virtual.virtual_device import Virtual
from memfit.events import ALLOCATE, EMPTY_CACHE, FREE, ON_HOST, OVER, TO_DEVICE, TO_HOST, CutParameters
from memfit.garbage import collected_before
from memfit.torch_compat import (
    DisableTorchFunction,
    FakeTensor,
    TorchDispatchMode,
    current_autograd_node,
    dispatch_depth,
    is_traceable_wrapper_subclass_type,
    outside_inference_mode,
)
from memfit.trace import collectives, constant_values, cpu_rules, operator_scratch
from memfit.trace.autograd_formulas import note_zeros, writes_into_zeros
from memfit.trace.call_memory import CallMemory
from memfit.trace.deep_graphs import room_for_deep_graphs
from memfit.trace.event_record import EventRecord
from memfit.trace.gradient_accumulation import made_in, sums_in_place
from memfit.trace.index_bounds import check_indices
from memfit.trace.linear_sums import LinearSums, added_in_place
from memfit.trace.mask_operators import NONZERO, know_positions
from memfit.trace.net_kind import NetKind
from memfit.trace.operand_types import check_operand_types
from memfit.trace.operators import Operator, operator, work
from memfit.trace.products import products_without_zeros
from memfit.trace.running_modules import RunningModules
from memfit.trace.saved_numbers import NBYTES, SavedNumbers
from memfit.trace.sparse_parts import seen_sparse
from memfit.trace.sparse_tensors import NOT_SPARSE, answer_sparse, takes_sparse
from memfit.trace.value_counts import COUNTS, know_counts
from memfit.trace.watched_shape import WatchedShape

_DEVICE = torch.ops.prim.device.default
_META = torch.device("meta")
_ITEM = torch.ops.aten._local_scalar_dense.default
_WAIT = torch.ops._c10d_functional.wait_tensor.default
"""Gives the tensor itself, of which torch's shape function makes another."""
_PLAIN = {Tensor, nn.Parameter, FakeTensor}


class Tracer(EventRecord, TorchDispatchMode):
    """Records events while entered. ``mark`` and ``phase`` say where in the window the code is."""

    def __init__(self, virtual: Virtual) -> None:
        EventRecord.__init__(self, virtual.device.type)
        TorchDispatchMode.__init__(self)
        self.virtual = virtual
        self.call_memory = CallMemory(self, virtual.rules)
        self.repeated: list[tuple[int, int, int]] = []
        """(first operator, past the last, times) of a validation's turns that stand for others: ``repeats``."""
        self.net_kind = NetKind()
        self.descriptions: list[operator_scratch.Key | None] | None = None
        """For each operator, the call from which it can be repeated; None where no list was asked for."""
        self.overwritten: set[int] = set()
        """Modules in whose forward the output of a product, convolution or attention was written to afterwards."""
        self.layer_groups: frozenset[str] = frozenset()
        """Groups of ranks that wait for each other inside of layers."""
        self.tensor_parallel: CutParameters | None = None
        self.validation_shape: WatchedShape | None = None
        """What validation asked for its batch with; None where it has not."""
        self.changed_by_windows = ""
        """As ``memfit.trace.followed_validation.changes_since`` has it."""
        self._linear_sums = LinearSums()
        self._is_quiet = False
        self._saved_numbers = (
            SavedNumbers(self._allocate_number, lambda i: self.event(FREE, i)) if self.device_type == "cpu" else None
        )
        self._running = RunningModules()
        self.modules = self._running.modules

    # ---- where the code is

    @property
    def is_quiet(self) -> bool:
        """Whether nothing is recorded now."""
        return self._is_quiet

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Context in which nothing is recorded, for what a real run does not do."""
        before, self._is_quiet = self._is_quiet, True
        try:
            yield
        finally:
            self._is_quiet = before

    def name_modules(self, nets: dict[str, nn.Module]) -> None:
        """Gives the modules their paths, ``net.block.0``."""
        self._running.name(nets)

    def kind_of_net(self) -> str:
        """The kind of net, as in ``Trace.net_kind``. No compiled code was measured, so it is a kind of its own."""
        kind = str(self.net_kind)
        return f"compiled {kind}" if kind and self.virtual.assumptions.compiled else kind

    # ---- entering and leaving

    @contextmanager
    def recording(self) -> Iterator[Tracer]:
        """Context in which everything is recorded. A storage is freed when its last reference goes, or in
        ``collect_cycles``: the garbage collector is off at all other times.
        """
        hooks = [
            register_module_forward_pre_hook(self._enter_module),
            register_module_forward_hook(self._leave_module, always_call=True),
        ]
        self.virtual.on_empty_cache.append(lambda: self.event(EMPTY_CACHE, -1))
        self.virtual.on_resize.append(self.resized)
        try:
            with (
                collected_before(),
                room_for_deep_graphs(),
                unpacked_in_a_trace(),
                products_without_zeros(),
                replaced(self.virtual.assumptions, module_call=self._running.call),
                replaced(torch, get_rng_state=self._random_state(torch.get_rng_state)),
                replaced(torch.random, get_rng_state=self._random_state(torch.random.get_rng_state)),
                self,
            ):
                if isinstance(self.virtual.rules, RecordedRules):
                    self.virtual.rules.modes = dispatch_depth()
                self.look_back()
                yield self
        finally:
            self.look_ahead()
            for hook in hooks:
                hook.remove()

    def collect_cycles(self) -> None:
        """Frees what only reference cycles hold.

        A first window makes many: an import that fails and keeps its exception also keeps the traceback, whose frames
        reach down to the window's own. In a real run, the collector finds them in later windows.
        """
        gc.collect()

    def _random_state(self, get: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """A random state (checkpointing keeps one for each module) is memory of the CPU that no operator makes."""

        def seen() -> Tensor:
            state = get()
            self.see(state, self.last_row)
            return state

        return seen

    def _enter_module(self, module: nn.Module, args: Any) -> None:
        self._running.enter(module)

    def _leave_module(self, module: nn.Module, args: Any, output: Any) -> None:
        self._running.leave()

    # ---- what happens

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """True: nothing is compiled in a trace, and torch would wrap every dispatch to say so."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and type(args[0]) is FakeTensor:
            return _META if args[0].fake_mode.in_kernel_invocation else args[0].fake_device
        with DisableTorchFunction():
            return self._dispatched(func, types, args, kwargs)

    def _dispatched(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """One call. What it asks of tensors on the way is no torch function of the user's."""
        for kind_of_tensor in types:
            if kind_of_tensor not in _PLAIN and is_traceable_wrapper_subclass_type(kind_of_tensor):
                return NotImplemented
        kwargs, kind = kwargs or {}, operator(func)
        if (kind.may_be_sparse or seen_sparse) and takes_sparse(func, args):
            with self:
                result = answer_sparse(self.virtual, func, args, kwargs)
            if result is not NOT_SPARSE:
                return result
        if self._is_quiet:
            return self._unrecorded(kind, func, args, kwargs)
        inference, node = torch.is_inference_mode_enabled(), current_autograd_node()
        if kind.in_place is not None and writes_into_zeros(node, args[0]):
            func = kind.in_place
            kind = operator(func)
        if func is _ITEM and (number := constant_values.known_item(args[0])) is not None:
            return number
        if inference or kind.is_intercepted:
            result = self.virtual.intercept(self, func, args, kwargs)
            if result is not NOT_HANDLED:
                if func is NONZERO:
                    know_positions(args[0], result)
                elif func in COUNTS:
                    know_counts(func, args, kwargs, result)
                return result
        if inference and func.is_view and not args[0].is_inference():
            with outside_inference_mode():  # a view of an ordinary tensor is ordinary
                return self._dispatched(func, types, args, kwargs)
        numbers, known = self._saved_numbers, None
        number = numbers.before(func, args, node) if numbers is not None else None
        of_linear = node is None and kind.is_of_linear
        if of_linear and self._linear_sums.is_in_place(func, args, kwargs, sys._getframe(1)):
            out = added_in_place(*args)
            func = torch.ops.aten.add_.Tensor
            kind = operator(func)
        elif sums_in_place(func, args, node):
            out = args[0].add_(args[1])
        elif func is _WAIT:
            out = args[0]
        else:
            out = NOT_HANDLED
            if not kind.is_intercepted:
                out, known = self.virtual.mode.remembered(func, args, kwargs)
            if kind.is_checked and (known is None or not known.is_seen):
                check_operand_types(func, args)
            if kind.looks_up:
                check_indices(func, args)
            if out is NOT_HANDLED:
                out = func(*args, **kwargs)
        if of_linear:
            self._linear_sums.note(func, out, sys._getframe(1))
        if numbers is not None:
            out = cpu_rules.correct(func, args, out)
            if number is not None:
                numbers.after(number, out)
        if kind.makes_zeros and node is not None:
            note_zeros(node, out)
        if known is None or known.may_hold_content:
            constant_values.follow(func, args, kwargs, out)
        if kind.follows_values is not None and "alpha" not in kwargs:  # a factor: what follows takes the arguments
            kind.follows_values(func, args, out)
        row = len(self.op_rows)
        try:
            self._see_call(kind, func, args, kwargs, out, node, known)
        except BaseException:  # out of memory: a script may handle it, and what was made so far refers to this row
            if len(self.op_rows) == row:
                self._note_operator(kind.name, node, 0, 0, func, args, kwargs)
            raise
        if known is not None and not known.is_seen:
            known.is_seen, known.may_hold_content = True, constant_values.may_follow(func, out)
        if kind.holds:
            for tensor, category in collectives.held(func, args, kwargs):
                self.categorise(tensor, category)
        self.call_memory.note(kind, func, args, kwargs, node)
        if self.part == "forward":
            self.net_kind.note(func, args)
        return out

    def _unrecorded(self, kind: Operator, func: Any, args: Any, kwargs: Any) -> Any:
        """One call of which nothing is recorded. What is known of the tensors is followed as in a recorded call."""
        if func is _ITEM and (number := constant_values.known_item(args[0])) is not None:
            return number
        out = func(*args, **kwargs)
        constant_values.follow(func, args, kwargs, out)
        if kind.follows_values is not None and "alpha" not in kwargs:
            kind.follows_values(func, args, out)
        return out

    def _see_call(
        self, kind: Operator, func: Any, args: Any, kwargs: Any, out: Any, node: Any, known: Remembered | None
    ) -> None:
        row = len(self.op_rows)
        outs = out if isinstance(out, tuple | list) else (out,)
        passes = self.call_memory.passes(func, args) if kind.searches else []
        seen = bool(self._earlier) and self.see_earlier((*args, *kwargs.values()), row)
        for index, value in enumerate(outs):
            if isinstance(value, Tensor):
                seen |= self.see(value, row)
                if index < len(passes):
                    self.call_memory.run_pass(*passes[index], row)
                if node is not None:
                    made_in(node, value)
            elif isinstance(value, tuple | list):
                for each in value:
                    if isinstance(each, Tensor):
                        seen |= self.see(each, row)
        link = self._crosses(func, args, outs[0]) if kind.copies else None
        if link:
            self._note_operator(link, node, 0, outs[0].numel() * outs[0].itemsize, func, args, kwargs)
            return
        name = collectives.collective_name(func, args, kwargs, self.layer_groups) if kind.joins else ""
        if not (seen or kind.flops or kind.writes or OVER in name):
            return
        if kind.writes and self.part == "forward":
            self._see_overwritten(args[0] if args else None)
        if known is None:
            cost = _cost(kind, args, kwargs, out)
        else:
            known.cost = cost = known.cost or _cost(kind, args, kwargs, out)
        if kind.writes and self.device_type != "cpu" and _is_on_cpu(args[0] if args else None):
            name = ON_HOST + kind.name
        self._note_operator(name or kind.name, node, *cost, func, args, kwargs)

    def _note_operator(
        self, name: str, node: Any, work: int, moved: int, func: Any, args: Any, kwargs: Any
    ) -> None:  # fmt: skip
        self.op_rows.append((name, self._running.current(node), self.part, work, moved))
        if self.descriptions is not None:
            self.descriptions.append(operator_scratch.call_key(func, args, kwargs))

    def _crosses(self, func: Any, args: Any, out: Tensor) -> str | None:
        """What a copy between host and device is called; None where it stays on one of them."""
        source = args[0] if func is torch.ops.aten._to_copy.default else args[1]
        there, here = out.device.type, source.device.type
        if there == here or self.device_type not in (there, here):
            return None
        return TO_DEVICE if there == self.device_type else TO_HOST

    def _see_overwritten(self, target: Any) -> None:
        if isinstance(target, Tensor):
            i = self.number_of(target)
            is_made_by_this_call = i is not None and self.made_by[i] == len(self.op_rows)  # as by set_ of a storage
            if i is not None and not is_made_by_this_call and self.op_rows[self.made_by[i]][3]:
                self.overwritten.add(self.op_rows[self.made_by[i]][1])

    def _allocate_number(self) -> int:
        i = self.new_storage(NBYTES, "activations", self.last_row)
        self.event(ALLOCATE, i)
        return i


def _cost(kind: Operator, args: Any, kwargs: Any, out: Any) -> tuple[int, int]:
    """Floating point operations of a call, and the bytes that it reads and writes."""
    moved = 0
    for value in (*args, *(out if isinstance(out, tuple | list) else (out,))):
        if isinstance(value, Tensor):
            moved += value.numel() * value.itemsize
        elif isinstance(value, tuple | list):
            moved += sum(each.numel() * each.itemsize for each in value if isinstance(each, Tensor))
    return work(kind.flops, args, kwargs, out) if kind.flops else 0, moved


def _is_on_cpu(target: Any) -> bool:
    """Whether what an operator writes, a tensor or a list of them, is the host's."""
    first = target[0] if isinstance(target, list | tuple) and target else target
    return isinstance(first, Tensor) and first.device.type == "cpu"
