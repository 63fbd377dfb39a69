"""Tracer: a dispatch mode that writes down every allocation, free and operator of the fake tensors of one device.

A storage is seen when an operator first returns it and is gone when its last reference goes: fake tensors live in the
same autograd graph, Python frames and optimizers as real ones would. What an operator allocates and frees within one
call is not visible here.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from memfit.device.virtual import backend, cudnn_benchmark, workspace
from memfit.device.virtual.data_dependent import NOT_HANDLED, source_line
from memfit.device.virtual.patching import replaced
from memfit.device.virtual.virtual_device import Virtual
from memfit.errors import InputError
from memfit.events import ALLOCATE, EMPTY_CACHE, FREE, TO_DEVICE, TO_HOST
from memfit.torch_compat import (
    DisableTorchFunction,
    FakeTensor,
    TorchDispatchMode,
    current_autograd_node,
    is_traceable_wrapper_subclass_type,
)
from memfit.trace import collectives, constant_values, cpu_rules, operator_scratch
from memfit.trace.gradient_accumulation import made_in, sums_in_place
from memfit.trace.net_kind import NetKind
from memfit.trace.operators import Operator, operator, work
from memfit.trace.running_modules import RunningModules
from memfit.trace.saved_numbers import NBYTES, SavedNumbers

_DEVICE = torch.ops.prim.device.default
_META = torch.device("meta")
_ITEM = torch.ops.aten._local_scalar_dense.default
_PLAIN = {Tensor, nn.Parameter, FakeTensor}


class Allocator(Protocol):
    """An allocator that sees each event as it happens. ``malloc`` may raise; the storage is then not recorded."""

    def malloc(self, storage: int, nbytes: int, stream: int = 0) -> None: ...
    def free(self, storage: int) -> None: ...
    def empty_cache(self) -> None: ...


class Tracer(TorchDispatchMode):
    """Records events while entered. ``mark`` and ``phase`` say where in the window the code is."""

    def __init__(self, virtual: Virtual) -> None:
        super().__init__()
        self.virtual = virtual
        self.device_type = virtual.device.type
        self.kind: list[int] = []
        self.storage: list[int] = []
        self.operator: list[int] = []
        self.nbytes: list[int] = []
        self.category: list[str | None] = []
        self.stream: list[int] = []
        self.made_by: list[int] = []
        self.op_rows: list[tuple[str, int, str, int, int]] = []
        self.phases: list[tuple[str, int, int]] = []
        self.calls: list[operator_scratch.Call] = []
        """Calls that take memory inside of themselves."""
        self.repeated: list[tuple[int, int, int]] = []
        """(first operator, past the last, times) of a validation's turns that stand for others: ``repeats``."""
        self.net_kind = NetKind()
        self.marks: list[tuple[int, str]] = []
        self.descriptions: list[operator_scratch.Key | None] | None = None
        """For each operator, the call from which it can be repeated; None where no list was asked for."""
        self.overwritten: set[int] = set()
        """Modules in whose forward the output of a product, convolution or attention was written to afterwards."""
        self.part = "setup"
        self.live: Allocator | None = None
        """Fed with every event as it happens, for code that asks how much memory is allocated."""
        self._is_quiet = False
        self._ids: dict[int, int] = {}
        self._keys: dict[int, int] = {}
        self._refs: dict[weakref.ref[Any], int] = {}
        self._saved_numbers = (
            SavedNumbers(self._allocate_number, lambda i: self._event(FREE, i)) if self.device_type == "cpu" else None
        )
        self._cublas_threads: set[bool] = set()
        self.plans: set[tuple[Any, ...]] = set()
        """Passes of convolutions for which cuDNN searched its plans already."""
        self._running = RunningModules()
        self.modules = self._running.modules

    # ---- where the code is

    def mark(self, part: str) -> None:
        """A part of the window begins. At ``backward``, what the forward left alive becomes activations."""
        if part == "backward":
            for i in self._refs.values():
                if self.category[i] is None and self.op_rows[self.made_by[i]][2] == "forward":
                    self.category[i] = "activations"
        self.marks.append((len(self.kind), part))
        self.part = part

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Events in here belong to this phase."""
        start = len(self.kind)
        yield
        self.phases.append((name, start, len(self.kind)))

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Inside, nothing is recorded: what a real run does not do."""
        before, self._is_quiet = self._is_quiet, True
        try:
            yield
        finally:
            self._is_quiet = before

    def name_modules(self, nets: dict[str, nn.Module]) -> None:
        """Tells the modules' paths, ``net.block.0``."""
        self._running.name(nets)

    def categorise(self, tensor: Tensor, category: str) -> None:
        """Says what the storage of a tensor holds; of a DTensor, that of this rank's shard."""
        i = self._ids.get(getattr(tensor, "_local_tensor", tensor).untyped_storage()._cdata)
        if i is not None:
            self.category[i] = category

    # ---- entering and leaving

    @contextmanager
    def recording(self) -> Iterator[Tracer]:
        """Inside, everything is recorded. A storage is freed when its last reference goes, or in ``collect_cycles``: at
        any other time the garbage collector rests."""
        gc.collect()
        collects, freezes = gc.isenabled(), not gc.get_freeze_count()
        gc.disable()
        if freezes:
            gc.freeze()  # what was there before is no garbage of the trace, and need not be looked at again
        hooks = [
            register_module_forward_pre_hook(self._enter_module),
            register_module_forward_hook(self._leave_module, always_call=True),
        ]
        self.virtual.on_empty_cache.append(lambda: self._event(EMPTY_CACHE, -1))
        self.virtual.on_resize.append(self._resized)
        try:
            with (
                replaced(torch, get_rng_state=self._random_state(torch.get_rng_state)),
                replaced(torch.random, get_rng_state=self._random_state(torch.random.get_rng_state)),
                self,
            ):
                yield self
        finally:
            for hook in hooks:
                hook.remove()
            if freezes:
                gc.unfreeze()
            if collects:
                gc.enable()

    def collect_cycles(self) -> None:
        """Frees what only reference cycles hold.

        A first window makes many: an exception that an import raises and keeps has its traceback, whose frames reach
        down to the window's own. A real run's collector finds them in the windows after it.
        """
        gc.collect()

    def _random_state(self, get: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """A random state (checkpointing keeps one for each module) is memory of the CPU that no operator makes."""

        def seen() -> Tensor:
            state = get()
            self._see(state, max(len(self.op_rows) - 1, 0))
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
        if any(t not in _PLAIN and is_traceable_wrapper_subclass_type(t) for t in types):
            return NotImplemented
        kwargs = kwargs or {}
        if self._is_quiet:
            return func(*args, **kwargs)
        if func.is_view and torch.is_inference_mode_enabled() and not args[0].is_inference():
            with torch.inference_mode(False):  # a view of an ordinary tensor is ordinary
                return self._dispatched(func, types, args, kwargs)
        if func is _ITEM and (number := constant_values.item(args[0])) is not None:
            return number
        result = self.virtual.intercept(self, func, args, kwargs)
        if result is not NOT_HANDLED:
            return result
        node = current_autograd_node()
        numbers = self._saved_numbers
        number = numbers.before(func, args, node) if numbers is not None else None
        if sums_in_place(func, args, node):
            out = args[0].add_(args[1])
        else:
            out = self.virtual.mode.remembered(func, args, kwargs)
            if out is NOT_HANDLED:
                out = func(*args, **kwargs)
        if numbers is not None:
            out = cpu_rules.correct(func, args, out)
            if number is not None:
                numbers.after(number, out)
        constant_values.follow(func, args, kwargs, out)
        kind = operator(func)
        self._see_call(kind, func, args, kwargs, out, node)
        if kind.holds:
            for tensor, category in collectives.held(func, args, kwargs):
                self.categorise(tensor, category)
        self._note_scratch(kind, func, args, kwargs, node)
        if self.part == "forward":
            self.net_kind.note(func, args)
        return out

    def _see_call(self, kind: Operator, func: Any, args: Any, kwargs: Any, out: Any, node: Any) -> None:
        moved = 0
        row = len(self.op_rows)
        outs = out if isinstance(out, tuple | list) else (out,)
        passes = self._passes(func, args) if kind.searches else []
        seen = False
        for index, value in enumerate(outs):
            if isinstance(value, Tensor):
                seen |= self._see(value, row)
                if index < len(passes):
                    self._run_pass(*passes[index], row)
                if node is not None:
                    made_in(node, value)
                moved += value.numel() * value.itemsize
            elif isinstance(value, tuple | list):
                for each in value:
                    if isinstance(each, Tensor):
                        seen |= self._see(each, row)
                        moved += each.numel() * each.itemsize
        link = self._crosses(func, args, outs[0]) if kind.copies else None
        if link:
            self._note_operator(link, node, 0, outs[0].numel() * outs[0].itemsize, func, args, kwargs)
            return
        if not (seen or kind.flops or kind.writes):
            return
        for value in args:
            if isinstance(value, Tensor):
                moved += value.numel() * value.itemsize
            elif isinstance(value, tuple | list):
                moved += sum(each.numel() * each.itemsize for each in value if isinstance(each, Tensor))
        if kind.writes and self.part == "forward":
            self._see_overwritten(args[0] if args else None)
        done = work(kind.flops, args, kwargs, out) if kind.flops else 0
        self._note_operator(str(func), node, done, moved, func, args, kwargs)

    def _note_operator(
        self, name: str, node: Any, work: int, moved: int, func: Any, args: Any, kwargs: Any
    ) -> None:  # fmt: skip
        self.op_rows.append((name, self._running.current(node), self.part, work, moved))
        if self.descriptions is not None:
            self.descriptions.append(operator_scratch.describe(func, args, kwargs))

    def _crosses(self, func: Any, args: Any, out: Tensor) -> str | None:
        """What a copy between host and device is called; None where it stays on one of them."""
        source = args[0] if func is torch.ops.aten._to_copy.default else args[1]
        there, here = out.device.type, source.device.type
        if there == here or self.device_type not in (there, here):
            return None
        return TO_DEVICE if there == self.device_type else TO_HOST

    def _see_overwritten(self, target: Any) -> None:
        if isinstance(target, Tensor):
            i = self._ids.get(target.untyped_storage()._cdata)
            if i is not None and self.op_rows[self.made_by[i]][3]:
                self.overwritten.add(self.op_rows[self.made_by[i]][1])

    def _passes(self, func: Any, args: Any) -> list[tuple[Any, int]]:
        """(plan that cuDNN searches, or None; bytes of its workspace) by output of a convolution."""
        rules = self.virtual.rules
        if rules is None:
            return []
        searched = cudnn_benchmark.plans(func, args) if torch.backends.cudnn.benchmark else (None, None)
        workspaces = iter(workspace.scratch(rules, func, args))
        asked = args[10][:2] if func is cudnn_benchmark.BACKWARD else (True,)
        return [(plan, next(workspaces, 0) if wanted else 0) for plan, wanted in zip(searched, asked, strict=False)]

    def _run_pass(self, plan: Any, nbytes: int, row: int) -> None:
        """One pass of a convolution, whose output is there: a search at first sight, then its workspace."""
        if plan is not None and plan not in self.plans:
            self.plans.add(plan)
            self._event(EMPTY_CACHE, -1, row)
        if nbytes:
            self._take(row, nbytes)

    def _take(self, row: int, nbytes: int) -> None:
        """Memory that an operator allocates and frees within one call."""
        self.calls.append((len(self.kind), row, nbytes))
        if self.live is not None:
            self.live.malloc(-1, nbytes)
            self.live.free(-1)

    def _note_scratch(self, kind: Operator, func: Any, args: Any, kwargs: Any, node: Any) -> None:
        """What the operator took inside of itself: on a CPU to be measured, on CUDA as its libraries' code has it."""
        row = max(len(self.op_rows) - 1, 0)
        rules = self.virtual.rules
        if rules is None:
            if operator_scratch.may_have(func, args):
                key = operator_scratch.describe(func, args, kwargs)
                if key is not None:
                    self.calls.append((len(self.kind), row, key))
            return
        if not kind.takes:
            return
        if func in workspace.CUBLAS_OPERATORS and (thread := node is not None) not in self._cublas_threads:
            self._cublas_threads.add(thread)
            self._event(ALLOCATE, self._storage(workspace.cublas_workspace(rules), "workspace", row))
        if not kind.searches:
            for nbytes in workspace.scratch(rules, func, args):
                self._take(row, nbytes)

    def _allocate_number(self) -> int:
        i = self._storage(NBYTES, "activations", max(len(self.op_rows) - 1, 0))
        self._event(ALLOCATE, i)
        return i

    def _see(self, tensor: Tensor, row: int) -> bool:
        try:
            storage = tensor.untyped_storage()
        except NotImplementedError as error:
            raise _without_storage(tensor) from error
        key = storage._cdata
        if key in self._ids or tensor.device.type != self.device_type:
            return False
        i = self._storage(storage.nbytes(), None, row)
        if self.live is not None:
            self.live.malloc(i, self.nbytes[i], self.stream[i])
        self._ids[key], self._keys[i] = i, key
        self._refs[weakref.ref(storage, self._gone)] = i
        self.kind.append(ALLOCATE)
        self.storage.append(i)
        self.operator.append(row)
        return True

    def _gone(self, ref: weakref.ref[Any]) -> None:
        i = self._refs.pop(ref)
        del self._ids[self._keys.pop(i)]
        self._event(FREE, i)

    def _resized(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """A storage with other bytes is another storage: the old one is freed, and what it held is allocated anew."""
        old = self._ids.get(storage._cdata)
        if old is None or self.nbytes[old] == nbytes:
            return
        new = self._storage(nbytes, self.category[old], max(len(self.op_rows) - 1, 0))
        self._event(FREE, old)
        self._event(ALLOCATE, new)
        self._ids[storage._cdata] = new
        self._keys[new] = self._keys.pop(old)
        for ref, i in self._refs.items():
            if i == old:
                self._refs[ref] = new

    def _storage(self, nbytes: int, category: str | None, row: int) -> int:
        """A new storage on the stream that the code is on."""
        self.nbytes.append(nbytes)
        self.category.append(category)
        self.stream.append(backend.current_stream().stream_id)
        self.made_by.append(row)
        return len(self.nbytes) - 1

    def _event(self, kind: int, storage: int, row: int | None = None) -> None:
        if self.live is not None:
            if kind == ALLOCATE:
                self.live.malloc(storage, self.nbytes[storage], self.stream[storage])
            elif kind == FREE:
                self.live.free(storage)
            else:
                self.live.empty_cache()
        self.kind.append(kind)
        self.storage.append(storage)
        self.operator.append(max(len(self.op_rows) - 1, 0) if row is None else row)


def _without_storage(tensor: Tensor) -> InputError:
    where, users = source_line()
    seen = f"a tensor of layout {str(tensor.layout).removeprefix('torch.')}"
    return InputError(
        f"{seen} at {where}" if users else f"a gradient or another {seen[2:]}",
        "how much it holds depends on data, which a trace does not have",
        "write it dense: sparse=False in nn.Embedding and nn.EmbeddingBag, index_add for a sparse product",
    )
