"""A tensor-parallel plan that follows from a forward of the job: for nets for which nobody wrote one.

A forward on tensors without bytes shows which linear layers may be cut by columns and which by rows (``split_trace``):
queries, keys and values with the output of attention, the layers of a feed-forward, and embeddings of relative
positions whose columns are heads. What lies between them is computed by each rank for its part. Modules that count
heads by an attribute get this rank's number: a second forward, with the parts of a rank, has to run the same operators,
each on a part of what it had.

Left out: layers whose outputs would be gathered. They stay whole.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from memfit.engine.collectives import is_memory_failure
from memfit.engine.fake_forward import CPU, fake_copies, in_copied_process, refusal, run_losses, structure_of
from memfit.engine.product_layers import ProductLayer, ProductTrace, possible_products
from memfit.engine.split_trace import Findings, LocalTrace, SplitTrace, Step, layers_of, watched
from memfit.errors import describe
from memfit.job import Job, Nets

MOST_COUNTS = 5
"""Attributes of a module that may be numbers of heads or widths: all choices among them are tried."""


@dataclass(frozen=True, kw_only=True)
class TracedPlan:
    """How the layers of a net are cut.

    Attributes:
        layouts: of each layer that is cut, by path, as transformers names them; ``colwise_fused_N`` for N parts.
        counts: attributes of modules, by path, that are divided by the ranks.
        products: of layers that are modules of their own making, how they hold their matrix, by path.
        refused: of a layer that stays whole, its name and why; empty: there is none.
    """

    layouts: Mapping[str, str]
    counts: Mapping[str, tuple[str, ...]]
    products: Mapping[str, ProductLayer]
    refused: str

    def divide_counts(self, net: nn.Module, ranks: int) -> None:
        """After the cut: modules count what this rank has."""
        for path, keys in self.counts.items():
            module = net.get_submodule(path)
            for key in keys:
                setattr(module, key, getattr(module, key) // ranks)


def traced_plans(job: Job, nets: Nets, names: Sequence[str], ranks: int) -> dict[str, TracedPlan]:
    """Plans of some nets of a job; those of which no layer can be cut have an empty one.

    Args:
        nets: all that the job's loss needs, whole.
        names: of those that are to be cut.

    Raises:
        InputError: the job's forward does not run on tensors without bytes.
    """
    known = _KNOWN.setdefault(job, {})
    key = (tuple(names), ranks, structure_of(nets))
    if key not in known:
        known[key] = in_copied_process(lambda: _Planner(job, nets, names, ranks).plans())
    return known[key]


_KNOWN: weakref.WeakKeyDictionary[Job, dict[Any, dict[str, TracedPlan]]] = weakref.WeakKeyDictionary()
"""Plans of a job's nets: a search builds them anew for each mesh, and averages are cut as they are."""


class _Planner:
    """Looks for the plans of the nets of a job."""

    def __init__(self, job: Job, nets: Nets, names: Sequence[str], ranks: int) -> None:
        self._job, self._ranks, self._names = job, ranks, names
        self._mode, self._nets = fake_copies(nets, CPU, everywhere=True)
        self._layers = {key: layer for name in names for key, layer in layers_of(name, self._nets[name]).items()}
        self._products = self._products_of(names)
        self._layers |= {
            key: self._nets[key.partition(".")[0]].get_submodule(key.partition(".")[2]) for key in self._products
        }
        self.reasons: dict[str, str] = {}
        """Why layers stay whole."""
        self._counts: dict[Any, tuple[str, ...]] = {}
        """By kind of module, the attributes that are divided."""

    def plans(self) -> dict[str, TracedPlan]:
        columns = dict.fromkeys(self._layers, 1)
        while True:
            findings = self._followed(columns)
            uncut = {name: reason for name, reason in findings.uncut().items() if name in columns}
            for name in uncut:
                parts = findings.parts.get(name, 0)
                if columns.pop(name) == 1 and parts > 1:
                    columns[name] = parts
            if uncut:
                self.reasons |= uncut
                continue
            failed = self._counted(findings) if findings.sources else frozenset()
            if not failed:
                break
            for name in failed:
                columns.pop(name, None)
        return {name: self._plan_of(name, columns, findings) for name in self._names}

    def _plan_of(self, name: str, columns: Mapping[str, int], findings: Findings) -> TracedPlan:
        layouts = {key: "colwise" if columns[key] == 1 else f"colwise_fused_{columns[key]}" for key in findings.sources}
        layouts |= dict.fromkeys(findings.rows, "rowwise")
        counts, of_parts = {}, _of_parts(findings.steps)
        for path, module in self._nets[name].named_modules():
            divided = self._counts.get(_kind(module), ())
            if divided and module in of_parts:
                counts[path] = divided
        own = {key.partition(".")[2]: layout for key, layout in layouts.items() if key.partition(".")[0] == name}
        kept = next((f"module {key}: {why}" for key, why in self.reasons.items() if key.startswith(f"{name}.")), "")
        products = {path: self._products[f"{name}.{path}"] for path in own if f"{name}.{path}" in self._products}
        return TracedPlan(layouts=own, counts=counts, products=products, refused=kept)

    def _products_of(self, names: Sequence[str]) -> dict[str, ProductLayer]:
        """Modules that are linear layers as a forward shows, by name."""
        possible = {key: module for name in names for key, module in possible_products(name, self._nets[name]).items()}
        if not possible:
            return {}
        trace = ProductTrace(possible)
        self._look(trace, possible)
        return trace.products()

    def _followed(self, columns: Mapping[str, int]) -> Findings:
        trace = SplitTrace(self._layers, columns, self._ranks)
        self._look(trace, self._layers)
        return trace.findings

    def _look(self, trace: Any, layers: Mapping[str, nn.Module]) -> None:
        """Runs the forward of whole nets.

        Raises:
            InputError: it does not run.
        """
        try:
            self._run(trace, layers)
        except Exception as error:
            write = "write parallelize(self, nets, mesh) in the job, or leave tp out of the mesh"
            raise refusal(self._job, f"tp={self._ranks}", error, write) from error

    def _counted(self, findings: Findings) -> frozenset[str]:
        """Finds the attributes that are divided. Returns the layers that cannot be cut with any."""
        waiting: dict[Any, Iterator[tuple[str, ...]]] = {}
        self._counts = {}
        while True:
            trace = LocalTrace(findings.steps, findings.sources, findings.rows.keys(), self._ranks)
            with self._divided(findings.steps):
                failed = self._differs(trace, findings.steps)
            if failed is None:
                return frozenset()
            step = _latest_of_parts(findings.steps, trace.position)
            if step is None or step.module is None:
                return frozenset(findings.sources)
            kind = _kind(step.module)
            if kind not in waiting:
                waiting[kind] = _choices(step.module, findings.steps, self._ranks)
            try:
                self._counts[kind] = next(waiting[kind])
            except StopIteration:
                return step.sources

    def _differs(self, trace: LocalTrace, steps: Sequence[Step]) -> str | None:
        """Runs the forward with a rank's parts; what is not as it was, or None."""
        try:
            self._run(trace, self._layers)
        except Exception as error:
            if is_memory_failure(error):
                raise
            return describe(error)
        return None if trace.position == len(steps) else "it ends sooner"

    @contextmanager
    def _divided(self, steps: Sequence[Step]) -> Iterator[None]:
        """Modules that see parts count what a rank has."""
        modules = _of_parts(steps)
        before = [
            (module, key, getattr(module, key)) for module in modules for key in self._counts.get(_kind(module), ())
        ]
        for module, key, value in before:
            setattr(module, key, value // self._ranks)
        try:
            yield
        finally:
            for module, key, value in before:
                setattr(module, key, value)

    def _run(self, trace: Any, layers: Mapping[str, nn.Module]) -> None:
        modules = watched(self._nets, layers, trace)
        run_losses(self._job, self._nets, self._mode, trace, modules)


def _of_parts(steps: Sequence[Step]) -> set[nn.Module]:
    """Modules that call operators on parts."""
    return {step.module for step in steps if step.sources and step.module is not None}


def _kind(module: nn.Module) -> Any:
    """Modules of one kind count heads by the same attributes."""
    return type(module), tuple(sorted(_numbers(module).items()))


def _numbers(module: nn.Module) -> dict[str, int]:
    return {key: value for key, value in vars(module).items() if type(value) is int and value > 1}


def _choices(module: nn.Module, steps: Sequence[Step], ranks: int) -> Iterator[tuple[str, ...]]:
    """Attributes of a module that may be numbers of what ranks have parts of, the fewest first."""
    sizes = frozenset().union(*(step.sizes for step in steps if step.module is module))
    names = [key for key, value in _numbers(module).items() if value in sizes and value % ranks == 0]
    names = sorted(names, key=lambda key: "head" not in key)[:MOST_COUNTS]
    for count in range(1, len(names) + 1):
        yield from itertools.combinations(names, count)


def _latest_of_parts(steps: Sequence[Step], position: int) -> Step | None:
    """The step that differs, or the last one before it that has parts."""
    return next((step for step in reversed(steps[: position + 1]) if step.sources), None)
