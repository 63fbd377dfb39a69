"""Variables of a running function, read without keeping them alive.

Before Python 3.13 (PEP 667), ``frame.f_locals`` of a function copies its variables into a dict that the frame keeps, so
that what a variable held at the last look lives on when the variable is set anew. ``locals()`` gives the function the
same dict.
"""

from __future__ import annotations

import inspect
import sys
from types import FrameType
from typing import Any

_IS_A_VIEW = sys.version_info >= (3, 13)
_HELD_BY_FRAME = 3
"""Of that dict, where nobody else holds it: by the frame, by whoever looks, and by the question for the count."""


def frame_variables(frame: FrameType) -> dict[str, Any]:
    """Names and values of a frame's variables. The frame keeps no reference that it did not have.

    Where the function has kept its ``locals()``, that dict shows its variables as they are now, as after a debugger.
    """
    names = frame.f_locals
    values = dict(names)
    is_a_copy = not _IS_A_VIEW and frame.f_code.co_flags & inspect.CO_OPTIMIZED
    if is_a_copy and sys.getrefcount(names) <= _HELD_BY_FRAME:
        names.clear()
    return values
