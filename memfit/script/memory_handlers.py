"""Finds code on the stack that handles memory that fails, as loops do that halve the batch and try again."""

from __future__ import annotations

import re
import sys
from functools import cache
from types import CodeType, FrameType

from memfit.script.source_lines import SourceLines

_NAMES = re.compile(r"out_?of_?memory|out of memory|(^|_)oom(_|$)|should_reduce_batch_size", re.IGNORECASE)
"""What such code asks for: torch's error, its message, or a library's function that knows both."""


def memory_handler(lines: SourceLines) -> str:
    """The line of the user's code, ``file:line``, from which a function that handles failing memory runs or was called;
    empty where the stack has none.
    """
    frame: FrameType | None = sys._getframe(1)
    handles = False
    while frame is not None:
        file = frame.f_code.co_filename
        if not lines.is_internal(file):
            handles = handles or _handles(frame.f_code)
            if handles and lines.is_own(file):
                return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


@cache
def _handles(code: CodeType) -> bool:
    texts = (constant for constant in code.co_consts if isinstance(constant, str))
    return any(_NAMES.search(text) for text in (*code.co_names, *texts))
