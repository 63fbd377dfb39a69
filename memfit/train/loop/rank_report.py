"""RankReport: what a rank tells the others after a window, and what all of them did together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from memfit.train.recovery.failure import Ids


class RankReport(NamedTuple):
    """One rank's part in a window."""

    stop: bool
    """Whether this rank was asked to stop."""
    due: bool
    """Whether it is time for a checkpoint."""
    ids: Ids
    """Samples that were applied."""
    done: int
    """Padded units of them."""
    micro_batches: int
    retries: int
    allocator_retries: int
    skipped_samples: Ids
    measured_process_bytes: int


def sum_of_ranks(
    reports: Sequence[RankReport], seconds: float, share_ranks: Sequence[int] | None = None
) -> dict[str, Any]:
    """The part of a line of metrics that sums what the ranks did.

    Args:
        share_ranks: one of those that took the same samples, which count once; None: all took others.
    """
    shares = reports if share_ranks is None else [reports[rank] for rank in share_ranks]
    done = sum([report.done for report in shares])
    measured = [report.measured_process_bytes for report in reports]
    line: dict[str, Any] = {
        "global_batch_done": done,
        "seconds": seconds,
        "units_per_second": done / seconds,
        "micro_batches": sum([report.micro_batches for report in shares]),
        "retries": max([report.retries for report in reports]),
        "allocator_retries": sum([report.allocator_retries for report in reports]),
        "skipped_samples": [i for report in shares for i in report.skipped_samples],
        "measured_process_bytes": max(measured),
    }
    if len(reports) > 1:
        line["measured_process_bytes_of_ranks"] = measured
    return line
