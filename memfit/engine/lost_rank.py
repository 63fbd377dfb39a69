"""Tells a rank that is lost from a mistake of the job: by where an error was raised, and not by its words alone.

torch raises a lost connection from C, with a type of ``torch.distributed`` (NCCL, the store) or as a RuntimeError whose
text names a file of gloo. Python code of a job or of a library may raise the same types and the same texts.
"""

from __future__ import annotations

import dis
import re
from types import TracebackType

import torch.distributed as dist

from memfit.errors import chain_of, describe, message_of

_OF_GLOO = re.compile(r"\[\S*gloo/\S+\.(cc|h):\d+\] ")
"""``[.../gloo/transport/tcp/pair.cc:553] Connection closed by peer``"""
_ADVICE = re.compile(r"[.,]? This is typically .*")
_RAISES = ("RAISE_VARARGS", "RERAISE")
_RAISE_THEMSELVES = ("torch.distributed.", "memfit.engine.")
"""Modules whose Python code raises a lost rank; the others pass on what C raises."""
_CALL_COLLECTIVES = ("torch.", "memfit.")


def is_lost_rank(error: BaseException) -> bool:
    """Whether a collective failed because another rank is gone or waits elsewhere: this error, or what it came of."""
    return any(_is_of_collective(each) for each in chain_of(error))


def describe_loss(error: BaseException) -> str:
    """What a lost connection says, without gloo's source file and its general advice."""
    return _ADVICE.sub("", _OF_GLOO.sub("", describe(error)))


def _is_of_collective(error: BaseException) -> bool:
    of_gloo = isinstance(error, RuntimeError) and _OF_GLOO.search(message_of(error)) is not None
    if not of_gloo and not isinstance(error, dist.DistError):
        return False
    if error.__traceback__ is None:
        return False
    origin = _origin(error.__traceback__)
    module = origin.tb_frame.f_globals.get("__name__") or ""
    if _is_raised_by_python(origin):
        return isinstance(error, dist.DistError) and module.startswith(_RAISE_THEMSELVES)
    if module.startswith(_CALL_COLLECTIVES) and not module.startswith("memfit.jobs."):
        return True
    return of_gloo or isinstance(error, dist.DistBackendError)  # a job may wait for its own collectives


def _origin(traceback: TracebackType) -> TracebackType:
    """The innermost entry of a traceback: where the error was raised."""
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    return traceback


def _is_raised_by_python(origin: TracebackType) -> bool:
    """Whether a ``raise`` statement raised it, and not a function in C."""
    code = origin.tb_frame.f_code.co_code
    return dis.opname[code[origin.tb_lasti]] in _RAISES
