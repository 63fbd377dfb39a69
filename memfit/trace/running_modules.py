"""Which module's code runs, in a forward and in the backward of what it made."""

from __future__ import annotations

import bisect
from typing import Any

from torch import nn

from memfit.torch_compat import current_autograd_node, sequence_number
from memfit.torch_compat.attributes import sequence_number_of


class RunningModules:
    """The modules whose forwards have begun, and which of them made each of autograd's nodes."""

    def __init__(self) -> None:
        self.modules: dict[str, int] = {"": 0}
        """Numbers by path, in the order in which modules first ran; 0 is code outside of all."""
        self._paths: dict[int, str] = {}
        self._stack: list[int] = []
        self._calls: list[int] = []
        """The number of each call of a module whose forward has begun."""
        self._latest_call = 0
        self._made_at: list[int] = [0]
        self._made_in: list[int] = [0]

    def name(self, nets: dict[str, nn.Module]) -> None:
        """Tells the modules' paths, ``net.block.0``."""
        for name, net in nets.items():
            for path, module in net.named_modules():
                self._paths[id(module)] = f"{name}.{path}".rstrip(".")

    def enter(self, module: nn.Module) -> None:
        """A module's forward begins. One without a path counts as the module that calls it."""
        path = self._paths.get(id(module))
        outer = self._stack[-1] if self._stack else 0
        self._latest_call += 1
        self._calls.append(self._latest_call)
        self._stack.append(outer if path is None else self.modules.setdefault(path, len(self.modules)))
        self._note()

    def leave(self) -> None:
        """The forward that began last ends."""
        self._stack.pop()
        self._calls.pop()
        self._note()

    def call(self) -> int:
        """The number of the call of a module whose own code runs; 0 outside of all."""
        return self._calls[-1] if self._calls else 0

    def current(self, node: Any) -> int:
        """The number of the module whose code runs; in a backward, of the one whose forward made the node."""
        if self._stack:
            return self._stack[-1]
        if node is None:
            return 0
        return self._made_in[bisect.bisect_right(self._made_at, sequence_number_of(node)) - 1]

    def _note(self) -> None:
        """Nodes that are made from now on are this module's. What a backward recomputes makes none that will run, and
        a card's backward is another thread, which numbers its nodes from the beginning."""
        if current_autograd_node() is None:
            self._made_at.append(sequence_number())
            self._made_in.append(self._stack[-1] if self._stack else 0)
