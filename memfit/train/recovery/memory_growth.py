"""MemoryGrowth: memory that is held between windows and grows from window to window, and what holds it.

Between windows a run holds its nets, optimizers and caches, which stop growing soon. What goes on growing is kept by
the job: losses with their graph in a list, a cache without a bound. Memory then fails in some window, and no sample is
to blame: it fitted before.
"""

from __future__ import annotations

import gc
import itertools
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from memfit.apply.train_state import TrainState
from memfit.loading import module_in_words
from memfit.sizes import format_size
from memfit.torch_compat.attributes import HELD_BY_MODULES, stored_bytes

SETTLED = 3
"""Windows after which growth counts: the first ones make the optimizers' state and fill caches."""
MANY = 8
"""Readings that show a growth while the run goes on."""
FEW = 3
"""Readings that show it where memory has run out: a fast leak leaves no more."""
POINTS = 64
"""Readings that are kept; when there are more, every second one is dropped."""
PART_OF_BUDGET = 0.1
"""Growth that is told, as a part of the budget."""
MANY_GRAPHS = 8
"""Graphs of tensors that are held together from which on they are named."""
_VISITED = 200_000
"""Objects that the search for a holder looks at."""


class GrownMemoryError(RuntimeError):
    """Memory ran out because what is held between windows has grown, and not because of a sample."""


@dataclass(frozen=True, kw_only=True)
class Growth:
    """A steady growth between two windows."""

    first: int
    last: int
    begin: int
    end: int
    """Bytes that were held at both."""

    @property
    def bytes(self) -> int:
        return self.end - self.begin

    def __str__(self) -> str:
        per_window = self.bytes / (self.last - self.first)
        return (
            f"memory held between windows grew from {format_size(self.begin)} (window {self.first}) to "
            f"{format_size(self.end)} (window {self.last}), by {format_size(round(per_window))} a window"
        )


class MemoryGrowth:
    """Readings of the bytes that are held at the beginning of windows."""

    def __init__(self) -> None:
        self._readings: list[tuple[int, int]] = []
        self._first: int | None = None
        self._stride = 1

    def wants(self, window: int) -> bool:
        """Whether a reading is taken in this window: the longer the run, the fewer."""
        if self._first is None:
            self._first = window
        return window - self._first >= SETTLED and (
            not self._readings or window - self._readings[-1][0] >= self._stride
        )

    def note(self, window: int, held: int) -> None:
        """Adds the bytes that are held when a window begins."""
        self._readings.append((window, held))
        if len(self._readings) > POINTS:
            self._readings = self._readings[::2]
            self._stride *= 2

    def steady(self) -> Growth | None:
        """The growth over all readings, where it goes on in every quarter of them; None where it does not."""
        return _steady(self._readings, MANY)

    def latest(self, needed: int) -> Growth | None:
        """The growth of ``needed`` bytes or more that goes on up to the last reading, where memory has run out; None
        where there is none.

        Over all readings, else from a later one on, else over all of them without their largest drop: what a process
        takes or gives back once, such as a checkpoint's buffers, hides a growth.
        """
        held = self._readings
        growths = [_steady(held, FEW)]
        growths += [_steady(held[begin:], MANY) for begin in range(1, len(held) - MANY + 1)]
        growths.append(_without_drop(held))
        return next((growth for growth in growths if growth is not None and growth.bytes >= needed), None)


def _without_drop(readings: Sequence[tuple[int, int]]) -> Growth | None:
    """The growth that is steady but for the largest drop: by how much more is held at the end than at the beginning."""
    steps = [after - before for (_, before), (_, after) in itertools.pairwise(readings)]
    drop = min(steps, default=0)
    if drop >= 0:
        return None
    at = steps.index(drop)
    before, after = readings[: at + 1], readings[at + 1 :]
    if _steady([*((window, held + drop) for window, held in before), *after], MANY) is None:
        return None
    (first, begin), (last, end) = readings[0], readings[-1]
    return Growth(first=first, last=last, begin=begin, end=end)


def _steady(readings: Sequence[tuple[int, int]], least: int) -> Growth | None:
    """As ``MemoryGrowth.steady``, of these readings.

    Args:
        least: readings without which there is no answer; fewer than five have fewer parts than quarters.
    """
    if len(readings) < least:
        return None
    parts = min(4, len(readings) - 1)
    chosen = [readings[i * (len(readings) - 1) // parts] for i in range(parts + 1)]
    (first, begin), (last, end) = chosen[0], chosen[-1]
    rates = [(after - before) / (at - since) for (since, before), (at, after) in itertools.pairwise(chosen)]
    if end <= begin or min(rates) < (end - begin) / (last - first) / 4:
        return None
    return Growth(first=first, last=last, begin=begin, end=end)


def largest_holder(train_state: TrainState, samples: Any) -> str | None:
    """What holds the most bytes outside of nets and optimizers, in words; None where nothing that is reachable does.

    Searched: attributes of the job, its class and its module, of the data set, and of the nets' modules.
    """
    job = train_state.job
    own = _state_ids(train_state)
    roots: list[tuple[str, Any]] = [
        (type(job).__name__, vars(job)),
        (type(job).__name__, plain_attributes(vars(type(job)))),
    ]
    module = sys.modules.get(type(job).__module__)
    if module is not None and not module.__name__.startswith(("memfit.", "torch")):
        roots.append((module_in_words(module.__name__).rpartition(".")[2], plain_attributes(vars(module))))
    roots.append(("dataset()", getattr(samples, "__dict__", samples)))
    for name, net in train_state.nets.items():
        for path, part in net.named_modules():
            roots.append((f"{name}.{path}".rstrip("."), module_attributes(part)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # libraries warn of old names wherever these are looked at
        return _holder_of_most(roots, set(own))


def _holder_of_most(roots: Iterable[tuple[str, Any]], seen: set[int]) -> str | None:
    best: tuple[int, str] = (0, "")
    for name, root in roots:
        for key, value in root.items() if isinstance(root, Mapping) else (("", root),):
            held = held_by(value, seen)
            if held.nbytes > best[0]:
                best = (held.nbytes, f"{name}.{key} {held}" if key else f"{name} {held}")
    return best[1] or None


def plain_attributes(values: Mapping[str, Any]) -> dict[str, Any]:
    """Attributes that may hold data: no code, no modules, nothing private to Python."""
    skipped = (type, type(sys), type(len), type(plain_attributes), property, staticmethod, classmethod)
    return {
        name: value for name, value in values.items() if not name.startswith("__") and not isinstance(value, skipped)
    }


def _state_ids(train_state: TrainState) -> set[int]:
    """Ids of what belongs to the training: nets, their tensors and the optimizers."""
    ids = {id(net) for net in train_state.nets.values()} | {
        id(optimizer) for optimizer in train_state.optimizers.values()
    }
    for net in (*train_state.nets.values(), *train_state.ema.values()):
        for part in net.modules():
            ids.add(id(part))
        for tensor in (*net.parameters(), *net.buffers()):
            ids.add(id(tensor))
            ids.add(id(tensor.grad))
    return ids


class Held(NamedTuple):
    """What is reachable from an object."""

    tensors: int
    graphs: int
    """Those of the tensors that hold a graph of autograd, whose saved tensors are not counted: no object of Python
    holds them, and to read them would run the hooks that recompute or copy them."""
    nbytes: int
    """Bytes of tensors and arrays."""

    def __str__(self) -> str:
        what = f"{self.tensors} tensors, " if self.tensors else ""
        graphs = f", and the graphs of {self.graphs} of them (detach them)" if self.graphs >= MANY_GRAPHS else ""
        return f"holds {what}{format_size(self.nbytes)}{graphs}"


def held_by(root: Any, seen: set[int]) -> Held:
    """What is reachable from an object and was not seen before; of modules, what is no parameter and no buffer."""
    tensors = graphs = nbytes = 0
    pending = [root]
    while pending and len(seen) < _VISITED:
        value = pending.pop()
        if id(value) in seen or isinstance(value, type | type(sys) | Optimizer):
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            tensors += 1
            graphs += value.grad_fn is not None
            nbytes += stored_bytes(value)
        elif isinstance(value, bytes | bytearray | str) or type(value).__module__ == "numpy":
            nbytes += int(getattr(value, "nbytes", 0)) or sys.getsizeof(value)
        else:
            nbytes += sys.getsizeof(value, 0) if isinstance(value, list | dict | set) else 0
            pending += _referents(value)
    return Held(tensors, graphs, nbytes)


def module_attributes(module: nn.Module) -> dict[str, Any]:
    """What a module keeps beside its parameters, buffers and parts."""
    return {key: value for key, value in vars(module).items() if key not in HELD_BY_MODULES}


def _referents(value: Any) -> Iterable[Any]:
    if isinstance(value, nn.Module):
        return [*module_attributes(value).values(), *value.children()]
    if isinstance(value, FunctionType):
        return [value.__closure__, value.__defaults__, value.__kwdefaults__, vars(value)]
    if callable(value) and not hasattr(value, "__dict__"):
        return ()
    return [part for part in gc.get_referents(value) if not callable(part) or hasattr(part, "__dict__")]
