"""Recognises what a file is and reads it as evidence."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from memfit.errors import InputError, why_unreadable
from memfit.explain.evidence import Evidence
from memfit.explain.log import read_log
from memfit.explain.memory_summary import read_memory_summary
from memfit.explain.metrics import read_metrics
from memfit.explain.nvidia_smi import read_nvidia_smi
from memfit.explain.snapshot import read_snapshot

LARGEST = 4 << 30
"""Bytes of a file at most."""
_KINDS = (
    "an out-of-memory message or a log with one, torch.cuda.memory_summary(), a memory snapshot, nvidia-smi's output "
    "or a metrics.jsonl"
)


def read_evidence(name: str) -> Evidence:
    """What a file says about memory.

    Args:
        name: the file's path; ``-`` is standard input.

    Raises:
        InputError: it cannot be read, is of no kind that is known, or is a pickle of more than plain containers.
    """
    data = sys.stdin.buffer.read(LARGEST) if name == "-" else _content(Path(name))
    seen = "standard input" if name == "-" else name
    if data[:1] == b"\x80" or (name.endswith((".pickle", ".pkl")) and data):
        return read_snapshot(Path(seen), data)
    if not data.strip():
        raise InputError(seen, "it is empty", f"write {_KINDS}")
    text = data.decode("utf-8", "replace")
    if text.count("\x00") > len(text) // 100:
        if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
            text = data.decode("utf-16", "replace")
        else:
            raise InputError(seen, "a binary file that is no memory snapshot", f"write {_KINDS}")
    evidence = _joined(text)
    if evidence is None:
        raise InputError(seen, "no memory failure and no reading of memory is in it", f"write {_KINDS}")
    return evidence


def _joined(text: str) -> Evidence | None:
    """What all readers find in a text: a log may hold a failure, metrics, a memory summary and a table of cards."""
    logged, metrics, cards = read_log(text), read_metrics(text), read_nvidia_smi(text)
    failure = logged.failures[0] if logged is not None and logged.failures else None
    summary = read_memory_summary(text, failure.device if failure is not None else None)
    if failure is None or logged is None:
        over_steps = logged if logged is not None and (logged.growth or logged.spike) else None
        return metrics or summary or over_steps or cards or logged
    if metrics is not None:
        logged = replace(
            logged, growth=metrics.growth, spike=metrics.spike, readings=metrics.readings, notes=metrics.notes
        )
    return replace(
        logged, state=summary.state if summary is not None else None, devices=cards.devices if cards is not None else ()
    )  # fmt: skip


def _content(path: Path) -> bytes:
    write = "write the path of a file that can be read, or - for standard input"
    try:
        if path.is_dir():
            raise InputError(str(path), "a folder", write)
        if path.stat().st_size > LARGEST:
            raise InputError(str(path), "more than 4 GiB", "cut the file to the part around the failure")
        return path.read_bytes()
    except OSError as error:
        raise InputError(str(path), f"cannot be read: {why_unreadable(error)}", write) from error
    except ValueError as error:
        raise InputError(repr(str(path)), str(error), write) from error
