"""Ways to spoil a file: bytes, lines, and values of JSON and TOML."""

from __future__ import annotations

import copy
import random
from typing import Any

WORDS = (
    "", " ", "\n", "\x00", "\x1b[2J", "é", "\ud800", "nan", "inf", "-inf", "-1", "0", "1e999", "9" * 40, "true", "None",
    "null", "[]", "{}", "[1, 2", "'", '"', "\\", "../..", "/etc/passwd", "/dev/full", "a" * 5000, "%s%n",
    "${HOME}", "[/b]",
    "0x10", "1_000", "１２", "1.5", "GiB", "1GiB", "torch", "$tensor",
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2**31, 2**63, 2**200, 0.5, -0.0, 1e308, float("nan"), float("inf"), "", "x", "\x1b[2J",
    "a" * 3000, [], {}, [[]], [1], ["x"], [[1, 2], [3]], {"x": 1}, {"": {}}, [None],
)  # fmt: skip


def spoil_bytes(content: bytes, chance: random.Random) -> bytes:
    """Bytes changed, cut off, doubled, swapped or put in."""
    changed = bytearray(content)
    for _ in range(chance.choice((1, 1, 2, 5))):
        if not changed:
            return bytes(chance.randbytes(chance.randrange(64)))
        at = chance.randrange(len(changed))
        match chance.randrange(7):
            case 0:
                changed[at] = chance.randrange(256)
            case 1:
                changed[at] ^= 1 << chance.randrange(8)
            case 2:
                del changed[at:]
            case 3:
                del changed[at : at + chance.randrange(1, 32)]
            case 4:
                changed[at:at] = changed[at : at + chance.randrange(1, 64)]
            case 5:
                changed[at:at] = chance.choice(WORDS).encode("utf-8", "surrogatepass")
            case 6:
                changed[at:at] = chance.randbytes(chance.randrange(1, 16))
    return bytes(changed)


def spoil_lines(content: bytes, chance: random.Random) -> bytes:
    """Lines left out, doubled, swapped, or their words replaced."""
    lines = content.split(b"\n")
    for _ in range(chance.choice((1, 1, 2, 4))):
        at = chance.randrange(len(lines))
        match chance.randrange(5):
            case 0:
                lines[at] = b""
            case 1:
                lines.insert(at, lines[chance.randrange(len(lines))])
            case 2:
                lines[at] = chance.choice(WORDS).encode("utf-8", "surrogatepass")
            case 3:
                words = lines[at].split(b" ")
                words[chance.randrange(len(words))] = chance.choice(WORDS).encode("utf-8", "surrogatepass")
                lines[at] = b" ".join(words)
            case 4:
                lines[at] = spoil_bytes(lines[at], chance)
    return b"\n".join(lines)


def spoil_value(value: Any, chance: random.Random) -> Any:
    """A value of JSON or TOML with one of its parts replaced, left out or put in."""
    changed = copy.deepcopy(value)
    for _ in range(chance.choice((1, 1, 1, 3))):
        place, key = _place(changed, chance)
        if place is None:
            return copy.deepcopy(chance.choice(VALUES))
        match chance.randrange(4):
            case 0 if isinstance(place, dict):
                del place[key]
            case 1 if isinstance(place, dict):
                place[chance.choice(WORDS)] = copy.deepcopy(chance.choice(VALUES))
            case _:
                place[key] = copy.deepcopy(chance.choice(VALUES))
    return changed


def _place(value: Any, chance: random.Random) -> tuple[Any, Any]:
    """A dict or list in it and one of its keys; None where it has none."""
    place, key = None, None
    while isinstance(value, dict | list) and value:
        place, key = value, chance.choice(list(value) if isinstance(value, dict) else range(len(value)))
        value = value[key]
        if chance.random() < 0.25:
            break
    return place, key


def without_none(value: Any) -> Any:
    """What TOML can hold of it."""
    if isinstance(value, dict):
        return {str(key): without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_none(item) for item in value if item is not None]
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 2**63:
        return 2**63 - 1
    return value
