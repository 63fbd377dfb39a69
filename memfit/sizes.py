"""Sizes in bytes, read and written as people write them: 24GiB, 24GB, 512MiB."""

import re

from memfit.errors import InputError

_UNITS = {
    "B": 1,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
}  # fmt: skip


def parse_size(text: str, what: str = "size") -> int:
    """Bytes of a size such as ``24GiB``, ``24GB`` or ``512MiB``; at least one byte. ``24G`` is 24 GiB, as in Docker.

    Args:
        what: the option that it is of, for messages.

    Raises:
        InputError: no number, an unknown unit, or a size that is not positive.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*", text)
    unit = match and _UNITS.get(match[2].upper())
    if not match or not unit:
        raise InputError(f"{what} {text!r}", "not a number and a unit", "write a size such as 24GiB, 24GB or 512MiB")
    nbytes = int(float(match[1]) * unit)
    if nbytes >= 2**63:
        raise InputError(f"{what} {text!r}", "more than a machine can address", "write a size such as 24GiB or 512MiB")
    if nbytes < 1:
        raise InputError(f"{what} {text!r}", "a size is more than nothing", "write a size such as 24GiB or 512MiB")
    return nbytes


def format_size(nbytes: float) -> str:
    """A size for people: ``1.50 GiB``, ``12.0 MiB``, ``512 B``; three significant digits, binary units."""
    value, sign = abs(nbytes), "-" if nbytes < 0 else ""
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{sign}{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{sign}{value:.1f} {unit}"
        value /= 1024
    return f"{sign}{value:.2f} GiB"
