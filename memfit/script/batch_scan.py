"""The largest batch of a script: the script is traced at three sizes, which give the bytes of every tensor at any size.

If the events are the same at each size, the bytes of each storage are a + b * size: two sizes determine a and b, a
third one checks them, and every other size is replayed. If some storages grow with the square of the size (pairwise
similarities of samples), three sizes determine a + b * size + c * size ** 2, and a further size is traced to check
them. Finally the answer and the next larger size are traced. Where the bytes do not follow, as where a small data set
has fewer batches of a larger size, sizes are traced until the largest that fits is known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from memfit.device.hardware.catalogue import Device
from memfit.errors import InputError
from memfit.events import Trace
from memfit.script.launch import trace_script
from memfit.script.outcome import (
    ALL_LONGEST,
    MOVE_TO_CARD,
    NOT_ALL_LONGEST,
    NOTHING_ON_CARD,
    TRAINS_ON_CPU,
    ScriptOutcome,
    TraceRequest,
)
from memfit.script.request_device import requested_device
from memfit.script.side_by_side import at_once, trace_scripts
from memfit.script.traced_search import TracedNeeds, next_size
from memfit.script.varying_steps import LARGER
from memfit.sizes import format_size
from memfit.wording import COALESCE, counted

PLACEHOLDER = "{batch}"
SIZES = (2, 3, 5)
"""Sizes that are traced first; PyTorch treats a size of 1 apart."""
ROWS_DIFFER = "every id was taken for another row of its table of sparse gradients"
LONGEST_SIZES = (4, 5, 7)
"""Those of batches of the longest samples: where a sample has several parts, each one's longest is in a batch."""
MOST_CHECKS = 8
"""Sizes that are traced to check the answer."""
MOST_TRACED = 40
"""Sizes that are traced where their bytes do not follow from others."""
MOST = 1 << 20
"""Larger sizes are not tried."""


@dataclass(frozen=True, kw_only=True)
class LargestBatch:
    """The largest batch on a card.

    Attributes:
        batch: None where even the smallest traced size does not fit, or where bytes do not follow from the size.
        card: the card's name.
        verified: whether the script was traced at that size, and did not fit at the next one.
        sizes: the sizes that were traced.
        reason: why there is no number, or why it was not traced itself; empty otherwise.
        traced: whether the script was traced at that size, and fits.
        too_large: where sizes between were not traced, the smallest that was traced and does not fit; else 0.
        assumes: what batches were made of, where not of what the script's samplers give.
    """

    batch: int | None
    card: str
    verified: bool
    sizes: tuple[int, ...]
    process_bytes: int | None = None
    reason: str = ""
    traced: bool = False
    too_large: int = 0
    assumes: str = ""


@dataclass(frozen=True, kw_only=True, eq=False)
class BatchScan:
    outcome: ScriptOutcome
    """At the smallest size."""
    largest: LargestBatch


def at_size(request: TraceRequest, size: int) -> TraceRequest:
    """Returns the request with ``{batch}`` replaced by a size."""
    command = request.command
    args = tuple(word.replace(PLACEHOLDER, str(size)) for word in command.args)
    environment = {name: value.replace(PLACEHOLDER, str(size)) for name, value in command.environment.items()}
    return replace(request, command=replace(command, args=args, environment=environment))


def scan_batches(request: TraceRequest, sizes: Sequence[int]) -> BatchScan:
    """Traces the script at the sizes and finds the largest one that fits.

    Where the bytes do not follow from the size, as those of batches that are padded to their longest sample, it is
    traced anew with batches of the longest samples. Where they still do not follow, sizes are traced one after another.

    Raises:
        InputError: the script fails at one of the sizes.
    """
    device = _device(request)
    scan, unlike = _scanned(request, device, sizes)
    if not unlike:
        return scan
    longest = replace(request, longest_samples=True)
    longest_sizes = LONGEST_SIZES if tuple(sizes) == SIZES else tuple(sizes)
    other, others_unlike = _scanned(longest, device, longest_sizes)
    differ = any(answer.operator == COALESCE for answer in other.outcome.assumed)
    assumes = "; ".join(filter(None, (_line(other.outcome, ALL_LONGEST), ROWS_DIFFER * differ)))
    if assumes and not others_unlike:
        return BatchScan(outcome=scan.outcome, largest=replace(other.largest, assumes=assumes))
    if assumes:
        largest = _searched(longest, other, dict(zip(longest_sizes, others_unlike, strict=True)), device)
    else:
        largest = _searched(request, other, dict(zip(sizes, unlike, strict=True)), device)
    if largest is not None:
        return BatchScan(outcome=scan.outcome, largest=replace(largest, assumes=assumes))
    return BatchScan(outcome=scan.outcome, largest=replace(scan.largest, reason=_unknown(scan, other)))


def _searched(
    request: TraceRequest, longest: BatchScan, outcomes: Mapping[int, ScriptOutcome], device: Device
) -> LargestBatch | None:
    """The largest batch where each size is traced; None where batches of one size may differ in their bytes.

    Args:
        request: with ``{batch}``.
        longest: the scan with batches of the longest samples, which says whether all could be chosen.
        outcomes: at the sizes that were traced.
        device: the card.
    """
    if not longest.outcome.loaders or _line(longest.outcome, NOT_ALL_LONGEST):
        return None  # batches that the script makes itself may have any size
    free, needs = replace(request, enforced=False, every_card=False), TracedNeeds(device.usable_bytes or 0)
    queue = dict(outcomes)
    while queue and len(needs.fits) < MOST_TRACED:
        size, outcome = queue.popitem()
        fits, process_bytes, _ = _fits(outcome)
        if _line(outcome, LARGER):
            return None
        if fits is None or process_bytes is None:  # the script does not take the size
            break
        needs.process_bytes[size], needs.fits[size] = process_bytes, fits
        following = 0 if queue else next_size(needs, MOST)
        if following:
            queue[following] = trace_script(at_size(free, following))
    if not needs.fits:
        return None
    fitting, too_large = needs.fitting, needs.too_large
    made = replace(longest.largest, sizes=tuple(sorted(needs.process_bytes)), reason="")
    if not fitting:
        return replace(made, reason=f"a batch of {too_large} does not fit")
    return replace(
        made, batch=fitting, verified=fitting + 1 == too_large, process_bytes=needs.process_bytes[fitting],
        traced=True, too_large=too_large,
    )  # fmt: skip


def _unknown(scan: BatchScan, longest: BatchScan) -> str:
    """Why there is no largest batch, with and without batches of the longest samples, and what to write."""
    why = _line(longest.outcome, NOT_ALL_LONGEST)
    return "; ".join(
        filter(None, (scan.largest.reason, why, "write a size in place of {batch} to see whether it fits"))
    )


def _line(outcome: ScriptOutcome, begin: str | tuple[str, ...]) -> str:
    return next((line for line in outcome.not_seen if line.startswith(begin)), "")


def _scanned(
    request: TraceRequest, device: Device, sizes: Sequence[int]
) -> tuple[BatchScan, tuple[ScriptOutcome, ...]]:
    """(the largest batch, the outcomes where there is none since the bytes do not follow from the size)."""
    name = device.key if request.memory_bytes is None else format_size(request.memory_bytes)
    free = replace(request, enforced=False)
    requests = [replace(at_size(free, size), every_card=not number) for number, size in enumerate(sizes)]
    outcomes = trace_scripts(requests)
    failed = next((outcome for outcome in outcomes if outcome.trace is None), None)
    base = outcomes[0]

    def answer(
        batch: int | None,
        *,
        verified: bool = False,
        nbytes: int | None = None,
        reason: str = "",
        too_large: int = 0,
        traced: bool = False,
    ) -> BatchScan:
        largest = LargestBatch(
            batch=batch, card=name, verified=verified, sizes=tuple(sizes), process_bytes=nbytes, reason=reason,
            too_large=too_large, traced=traced or verified,
        )  # fmt: skip
        return BatchScan(outcome=base, largest=largest)

    if NOTHING_ON_CARD in base.not_seen:
        return answer(None, reason=f"{TRAINS_ON_CPU}; {MOVE_TO_CARD}"), ()
    if failed is not None:
        size = sizes[outcomes.index(failed)]
        why = failed.error.summary if failed.error is not None else failed.ended
        write = "memfit trace --batch 2,4,8 traces other sizes"
        return answer(None, reason=f"a batch of {size} was not traced to two complete steps ({why}); {write}"), ()
    traces = [_of(outcome) for outcome in outcomes]
    problem = different_events(traces, sizes)
    if problem:
        return answer(None, reason=problem), tuple(outcomes)
    growth = fitted(traces, sizes)
    if growth is not None and growth.is_quadratic:
        check = 2 * max(sizes) + 1
        traced = trace_script(replace(at_size(free, check), every_card=False)).bare
        growth = growth if traced is not None and growth.holds_for(traced, check) else None
    if growth is None:
        reason = f"the bytes at batches of {', '.join(map(str, sizes))} are no polynomial of degree 1 or 2 in the size"
        return answer(None, reason=reason), tuple(outcomes)
    grown = _Family(traces[0], growth, device, base.world)
    best = grown.largest(sizes[0]) if grown.fits(sizes[0]) else next(filter(grown.fits, range(sizes[0] - 1, 0, -1)), 0)
    if not best:
        return answer(None, reason=f"a batch of {sizes[0]} does not fit"), ()
    return _verified(request, best, grown, answer), ()


def _verified(request: TraceRequest, best: int, grown: _Family, answer: Callable[..., BatchScan]) -> BatchScan:
    """Traces the script at the answer and at the next size, and corrects the answer where a trace says otherwise."""
    free = replace(request, enforced=False, every_card=False)
    fitting, too_large, nbytes, size = 0, 0, None, best
    # where the first fits, the next size is asked for
    first = (best, best + 1) if at_once() > 1 and best < MOST else (best,)
    outcomes = dict(zip(first, trace_scripts([at_size(free, each) for each in first]), strict=True))
    for _ in range(MOST_CHECKS):
        fits, process_bytes, why = _fits(outcomes.get(size) or trace_script(at_size(free, size)))
        if fits is None and not fitting:
            return answer(best, nbytes=grown.process_bytes(best), reason=why)
        if fits is None:
            break
        if fits:
            fitting, nbytes = size, process_bytes
            if size >= MOST:
                break
        else:
            too_large = size
        if fitting and fitting + 1 == too_large:
            return answer(fitting, verified=True, nbytes=nbytes)
        size = _next_size(best, fitting, too_large, grown.share(process_bytes))
        if size < 1:
            return answer(None, reason=f"a batch of {too_large} does not fit")
    if fitting:
        return answer(fitting, nbytes=nbytes, too_large=too_large, traced=True)
    return answer(None, reason=f"it was computed to be {best}, and where it was traced, {too_large} does not fit")


def _next_size(computed: int, fitting: int, too_large: int, share: float) -> int:
    """The size to trace next.

    Args:
        computed: the size that was traced first.
        fitting: the largest that fits, of those that were traced; 0 where none did.
        too_large: the smallest that does not; 0 where all did.
        share: of what the last trace needed, the part that the card has.
    """
    if not too_large:
        return fitting + max(1, fitting - computed)
    return (fitting + too_large) // 2 if fitting else min(too_large - 1, int(too_large * share))


def _fits(outcome: ScriptOutcome) -> tuple[bool | None, int | None, str]:
    """(whether the traced size fits, bytes of its process, why that is not known)."""
    if outcome.footprint is None or outcome.windows < 2:
        return None, None, f"{counted(outcome.windows, 'complete step')} ran at that size: {outcome.ended}"
    return outcome.footprint.fits, max(phase.process_bytes for phase in outcome.footprint.phases.values()), ""


def _device(request: TraceRequest) -> Device:
    if request.device == "cpu" and request.memory_bytes is None:
        raise InputError("--device cpu", "the largest batch on a CPU depends on its memory", "write --memory SIZE too")
    return requested_device(request)


def _of(outcome: ScriptOutcome) -> Trace:
    assert outcome.bare is not None
    return outcome.bare


def different_events(traces: Sequence[Trace], sizes: Sequence[int]) -> str:
    """Says why the events of one size do not predict those of another; empty if they do."""
    first = traces[0]
    for trace, size in zip(traces[1:], sizes[1:], strict=True):
        if not _has_events_of(first, trace):
            return f"other operators run with a batch of {size} than with {sizes[0]}, so none can be computed"
    return ""


def _has_events_of(first: Trace, trace: Trace) -> bool:
    return len(trace.kind) == len(first.kind) and (
        np.array_equal(trace.kind, first.kind) and np.array_equal(trace.storage, first.storage)
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class SizePolynomial:
    """The bytes of each storage at any batch size, as Newton's polynomial through the first sizes.

    Attributes:
        first: the trace at the first size.
        sizes: the first two sizes.
        start: bytes at the first size.
        slope: first divided difference.
        square: second divided difference; 0 for a storage that grows in a line.
    """

    first: Trace
    sizes: tuple[int, int]
    start: np.ndarray
    slope: np.ndarray
    square: np.ndarray

    @property
    def is_quadratic(self) -> bool:
        return bool(self.square.any())

    def nbytes(self, size: int) -> np.ndarray:
        low, high = self.sizes
        return self.start + (size - low) * (self.slope + (size - high) * self.square)

    def holds_for(self, trace: Trace, size: int) -> bool:
        """Whether a trace at that size agrees with the prediction from the others."""
        return _has_events_of(self.first, trace) and np.array_equal(self.nbytes(size), trace.nbytes)


def fitted(traces: Sequence[Trace], sizes: Sequence[int]) -> SizePolynomial | None:
    """Returns the polynomial of least degree (at most 2) through all sizes; None if there is none with whole bytes."""
    x, y = [int(size) for size in sizes], [trace.nbytes.astype(np.int64) for trace in traces]
    slope, rest = np.divmod(y[1] - y[0], x[1] - x[0])
    next_slope, next_rest = np.divmod(y[2] - y[1], x[2] - x[1])
    square, last_rest = np.divmod(next_slope - slope, x[2] - x[0])
    if rest.any() or next_rest.any() or last_rest.any() or (square < 0).any():
        return None
    growth = SizePolynomial(first=traces[0], sizes=(x[0], x[1]), start=y[0], slope=slope, square=square)
    return growth if all(growth.holds_for(*pair) for pair in zip(traces, x, strict=True)) else None


class _Family:
    """The predicted trace at any size."""

    def __init__(self, trace: Trace, growth: SizePolynomial, device: Device, world: int) -> None:
        self._trace, self._growth, self._device, self._world = trace, growth, device, world
        self._known: dict[int, tuple[bool, int]] = {}

    def _replayed(self, size: int) -> tuple[bool, int]:
        from memfit.planner.prediction import need_on

        if size not in self._known:
            trace = replace(self._trace, nbytes=self._growth.nbytes(size))
            need = need_on(trace, self._device, self._world)
            self._known[size] = (need.fits, max(need.process_bytes.values()))
        return self._known[size]

    def fits(self, size: int) -> bool:
        return self._replayed(size)[0]

    def process_bytes(self, size: int) -> int:
        return self._replayed(size)[1]

    def share(self, process_bytes: int | None) -> float:
        """The part of some bytes that the card has."""
        return (self._device.usable_bytes or 0) / process_bytes if process_bytes else 1.0

    def largest(self, low: int) -> int:
        """Returns the largest size that fits; ``low`` is known to fit."""
        high = low * 2
        while high < MOST and self.fits(high):
            low, high = high, high * 2
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.fits(middle) else (low, middle)
        return low
