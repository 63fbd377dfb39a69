"""What holds memory from one step to the next: attributes of modules, and variables of the script that trains."""

from __future__ import annotations

import gc
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from memfit.errors import is_library
from memfit.frame_variables import frame_variables
from memfit.torch_compat.data_workers import DataLoaderIterator, data_set_of, workers_of
from memfit.train.recovery.memory_growth import MANY_GRAPHS, held_by, module_attributes, plain_attributes


def holders(modules: Sequence[nn.Module], optimizers: Sequence[Optimizer], grown: int, most: int = 3) -> list[str]:
    """The largest holders outside of nets and optimizers, in words, the largest first.

    ``grown``: bytes by which memory has grown. What holds less than an eighth of them is no reason, unless it holds
    graphs of autograd.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # names that a library deprecates warn where they are looked at
        return _holders(modules, optimizers, grown // 8)[:most]


def data_sets_of_workers() -> list[str]:
    """The data sets of loaders with workers, in words."""
    objects = gc.get_objects()
    data = [each.dataset for each in objects if issubclass(type(each), DataLoader) and each.num_workers > 0]
    data += [data_set_of(each) for each in objects if issubclass(type(each), DataLoaderIterator) and workers_of(each)]
    names = dict.fromkeys(f"{type(each).__qualname__} of a loader with workers" for each in data)
    return [f"data set {name} keeps something" for name in names]


def _holders(modules: Sequence[nn.Module], optimizers: Sequence[Optimizer], least: int) -> list[str]:
    seen = _own(modules, optimizers)
    lines_by_size: list[tuple[int, str]] = []
    for label, value in _roots(modules):
        held = held_by(value, seen)
        if held.nbytes >= least or held.graphs >= MANY_GRAPHS:
            lines_by_size.append((held.nbytes, f"{label} {held}"))
    return [text for _, text in sorted(lines_by_size, reverse=True)]


def _roots(modules: Sequence[nn.Module]) -> list[tuple[str, Any]]:
    """(where, value) of everything that a script can keep: module attributes, globals, locals of running functions."""
    roots: list[tuple[str, Any]] = []
    for module in modules:
        for path, part in module.named_modules():
            rest = module_attributes(part)
            roots += [(f"model.{path}.{key}".replace("..", "."), value) for key, value in rest.items()]
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        name = frame.f_globals.get("__name__", "")
        if not name.startswith("memfit.") and not is_library(code.co_filename):
            place = f"{Path(code.co_filename).name}:{frame.f_lineno}"
            values = plain_attributes(frame_variables(frame))
            roots += [(f"{key} ({place})", value) for key, value in values.items()]
        frame = frame.f_back
    for script in _own_modules():
        file = Path(str(script.__file__)).name
        roots += [(f"{key} ({file})", value) for key, value in plain_attributes(vars(script)).items()]
    return roots


def _own_modules() -> list[ModuleType]:
    """Modules of Python that are the user's: the script, and what it imports from files that are not installed."""
    files = [(each, getattr(each, "__file__", None)) for each in list(sys.modules.values())]
    own = [each for each, file in files if isinstance(file, str) and not is_library(file)]
    return [each for each in own if each.__name__.partition(".")[0] != "memfit"]


def _own(modules: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> set[int]:
    """Ids of the nets, their tensors and the optimizers' state."""
    own = {id(each) for each in (*modules, *optimizers)}
    for module in modules:
        own |= {id(part) for part in module.modules()}
        for tensor in (*module.parameters(), *module.buffers()):
            own |= {id(tensor), id(tensor.grad)}
    for optimizer in optimizers:
        own |= {id(optimizer.state), id(optimizer.param_groups), id(vars(optimizer))}
        own |= {id(p) for group in optimizer.param_groups for p in group["params"]}
    return own
