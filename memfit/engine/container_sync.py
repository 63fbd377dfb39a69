"""Lists and dicts that a module empties or fills while it runs, where FSDP2 or ZeRO's stage 3 hands it copies of them.

FSDP2 replaces the tensors that a sharded module is called with, and for that makes every list and dict around them anew
(torch 2.13, ``FSDPParamGroup._register_post_backward_hook``); DeepSpeed does it with every module (0.19.8,
``apply_to_tensors_only``). What the module then takes out of its copy (a U-Net's
stage its skips) would stay in the caller's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

Pair = tuple[Any, Any, dict[int, Any]]
"""(the caller's container, the module's copy, the caller's items by the id of the module's)."""


class ContainerSync:
    """What one module was called with, for as long as it runs; calls may be nested."""

    def __init__(self) -> None:
        self._given: list[Any] = []
        self._pairs: list[list[Pair]] = []

    def watch(self, module: nn.Module) -> None:
        """After it was sharded: what the module changes in its copies is changed in what it was called with."""
        module.register_forward_pre_hook(self.before, prepend=True, with_kwargs=True)
        module.register_forward_pre_hook(self.after, with_kwargs=True)
        module.register_forward_hook(self.leave, always_call=True)

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """With what the module is called with, before its containers are copied."""
        self._given.append((args, kwargs))

    def after(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """With the copies, before the module's forward."""
        both = zip(_containers(self._given.pop()), _containers((args, kwargs)), strict=True)
        self._pairs.append(
            [
                (given, copy, {id(new): old for old, new in zip(_items(given), _items(copy), strict=True)})
                for given, copy in both
                if given is not copy
            ]
        )

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """After the module's forward: the caller's containers hold what its copies hold."""
        for given, copy, own in self._pairs.pop() if self._pairs else ():
            if isinstance(given, list):
                given[:] = [own.get(id(item), item) for item in copy]
            else:
                now = {key: own.get(id(item), item) for key, item in copy.items()}
                given.clear()
                given.update(now)


def _containers(value: Any) -> Iterator[Any]:
    """Lists and dicts, outer ones first."""
    if isinstance(value, list | dict):
        yield value
    if isinstance(value, list | tuple | dict):
        for item in _items(value):
            yield from _containers(item)


def _items(value: Any) -> list[Any]:
    return list(value.values() if isinstance(value, dict) else value)
