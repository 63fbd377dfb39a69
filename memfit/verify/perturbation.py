"""What rounding inside of a micro-batch does to its gradients, where an engine changes the graph that makes them.

Sharded engines put functions of their own around modules, so autograd adds up what flows into a tensor in another
order. Ranks that hold parts of layers (tensor parallelism) also sum the terms of a matrix product in parts, and
DeepSpeed's stage 3 computes linear layers by a function of its own, which adds the bias after the product is rounded:
outputs of layers and the gradients that flow back are rounded otherwise, and so is all that is computed from them. What
that can do is seen by running the window again with other roundings (Monte Carlo arithmetic: Parker, 1997): every
weight is moved by its last bit, up or down at random, and where products are rounded otherwise, every product is summed
in random parts, of which each is rounded to its own type (``split_products``). The largest change in a tensor is what
its elements may differ by, times a factor, beside the order of the sum of micro-batches.

The factor. Where only the order of autograd's sums differs, real differences are far smaller than such a change (over
three windows of latentsync/tiny, FSDP2's exceed 0.4 of one change in 0.1 % of comparisons of a tensor, and are at most
1.2; those of stage 3 with torch's linear function in the place of its own are the same), and twice one change is
allowed. Where products are rounded otherwise, a real difference is as large as a change: it is one more draw of the
same kind. How large a draw is varies, most where few random numbers decide a whole tensor, as for queries and keys
whose gradients nearly cancel: their differences nearly have rank one. So the root mean square of ``DRAWS_OF_PRODUCTS``
changes is taken, times ``ROOM_OF_PRODUCTS``. If a single normal number decided a tensor, and real rounding were as
large as a draw's, one more draw would exceed that with probability 0.004 (Student's t with 4 degrees of freedom beyond
6); of two such numbers with 1e-4 (an F of 2 and 8 degrees beyond 36), of three with 3e-6. Real differences are about
half of a change in the median: over six windows of latentsync/tiny on tp=2, none of 7,296 comparisons of a tensor
exceeded 2.5 times that root mean square, and over three windows under stage 3 none of 4,512 exceeded 2.2 times that of
moved weights alone.

Losses are allowed the same where products are rounded otherwise, since forwards differ; elsewhere they are the same.

Left out: where a last bit decides between two values (an argmax), the change is large, and little is proven there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from memfit.apply.train_state import TrainState
from memfit.engine.capabilities import CAPABILITIES
from memfit.mesh import MeshShape
from memfit.verify.bounds import UNIT, coarser
from memfit.verify.recording_engine import RecordedWindow, RecordingEngine
from memfit.verify.split_products import SplitProducts

ROOM = 2.0
DRAWS_OF_PRODUCTS = 4
ROOM_OF_PRODUCTS = 6.0


@dataclass(frozen=True, kw_only=True)
class PerturbedWindow:
    """One window with other roundings."""

    seen: RecordedWindow
    losses: Mapping[str, float]
    """Of the window, by name."""


def product_parts(engine: str, mesh: MeshShape) -> int:
    """In how many parts, each of which is rounded, ranks compute what one device computes as one product.

    Args:
        engine: of the ranks.
        mesh: of the ranks; those that hold parts of layers, or some of their experts, sum parts of products.
    """
    return max(mesh.same_samples, 2 if CAPABILITIES[engine].own_linear else 1)


def perturbed_windows(
    recording: RecordingEngine,
    train_state: TrainState,
    seen: RecordedWindow,
    begin: Callable[[], None],
    run: Callable[[TrainState], Mapping[str, float]],
    parts: int,
) -> Iterator[PerturbedWindow]:
    """A window that one rank ran, again with other roundings; the state is left as the last one left it.

    Args:
        seen: the window as it was.
        begin: puts nets and optimizers back to what it began with.
        run: runs it, and gives its losses.
        parts: of every product, each of which is rounded (``product_parts``).
    """
    for draw in range(DRAWS_OF_PRODUCTS if parts > 1 else 1):
        begin()
        _move_last_bits(train_state, draw)
        recording.begin()
        recording.forced = {
            name: value * _factors(value, draw, index) for index, (name, value) in enumerate(seen.weights.items())
        }
        with SplitProducts(parts, draw) if parts > 1 else nullcontext():
            losses = run(replace(train_state, schedules={}, ema={}))
        yield PerturbedWindow(seen=recording.seen, losses=losses)
    recording.forced = {}


def allow_for(
    seen: RecordedWindow, losses: Mapping[str, float], others: Iterable[PerturbedWindow], bound: float
) -> None:
    """Adds to the magnitudes, of which ``bound`` is taken, what gradients changed by, and where products do, losses.

    Args:
        losses: of the window as it was, by name.
        others: the window with other roundings; several where products are rounded otherwise.
    """
    gradients: dict[str, list[float]] = {name: [] for name in seen.gradients}
    values: dict[str, list[float]] = {name: [] for name in losses}
    draws = 0
    for other in others:
        draws += 1
        for name, gradient in other.seen.gradients.items():
            if name in gradients:
                gradients[name].append(float((gradient - seen.gradients[name]).abs().max()))
        for name, value in other.losses.items():
            values[name].append(abs(value - losses[name]))
    room = (ROOM if draws == 1 else ROOM_OF_PRODUCTS) / bound
    for name, gradient in seen.gradients.items():
        known = torch.maximum(seen.magnitudes.get(name, gradient.abs()), gradient.abs())
        seen.magnitudes[name] = known + room / coarser(gradient.dtype) * _root_mean_square(gradients[name])
    if draws > 1:
        seen.loss_magnitudes = {name: room * _root_mean_square(changes) for name, changes in values.items()}


def _move_last_bits(train_state: TrainState, draw: int) -> None:
    """Every weight of every net becomes the one next to it or nearly so, up or down at random."""
    with torch.no_grad():
        for net in train_state.nets.values():
            for index, parameter in enumerate(net.parameters()):
                if parameter.is_floating_point():
                    parameter.mul_(_factors(parameter, draw, index))


def _factors(like: Tensor, draw: int, index: int) -> Tensor:
    generator = torch.Generator(like.device).manual_seed((draw << 20) + index)  # of 32 bits on a CPU
    signs = torch.randint(0, 2, like.shape, generator=generator, device=like.device) * 2 - 1
    return 1 + signs.to(like.dtype) * 2 * UNIT * coarser(like.dtype)


def _root_mean_square(values: Sequence[float]) -> float:
    return math.sqrt(math.fsum(value * value for value in values) / len(values)) if values else 0.0
