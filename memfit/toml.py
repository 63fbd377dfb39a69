"""Reads TOML: the standard library's ``tomllib``, and ``tomli``, of which it is a copy, on Python 3.10."""

import sys
from typing import Any

if sys.version_info >= (3, 11):
    from tomllib import TOMLDecodeError
    from tomllib import loads as _loads
else:
    from tomli import TOMLDecodeError
    from tomli import loads as _loads

__all__ = ["TOMLDecodeError", "loads"]


def loads(text: str) -> dict[str, Any]:
    """The values of a text.

    Raises:
        TOMLDecodeError: it is no TOML, or holds what Python does not read: whole numbers of thousands of digits, and
            lists nested as deeply.
    """
    try:
        return _loads(text)
    except TOMLDecodeError:
        raise
    except ValueError as error:
        raise TOMLDecodeError("a whole number has too many digits") from error
    except RecursionError as error:
        raise TOMLDecodeError("its lists or tables are nested too deeply") from error
